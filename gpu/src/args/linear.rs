//! Arguments of the matrix products and of their repacking.
//!
//! A product's weights are one or more matrices `[n, k]` of one shape: the entries of a batch, or experts.

use cuda_std::{Global, GlobalMut, bf16};

/// Weights as in the file: `[matrices, n, k]`. See [`crate::kernels::gemm_f32`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct F32Weights {
    pub rows: Global<f32>,
}

/// The shape of an f32 product and how a block divides it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GemmShape {
    /// Outputs: rows of each matrix.
    pub n: u32,
    /// Terms of each sum: columns of each matrix.
    pub k: u32,
    /// Warps that share one tile's sums; a divisor of the warps of a block.
    pub k_split: u32,
    /// 1 when four f32 of `x` and of the weights may be read at once.
    pub wide: u32,
}

/// Rows at fixed strides, in elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DenseRows {
    pub x_stride: u64,
    pub x_batch: u64,
    pub y_stride: u64,
    pub y_batch: u64,
    pub rows: u32,
    /// Rows that one block multiplies: a multiple of 8, at most 8 times the kernel's tiles.
    pub rows_per_block: u32,
    /// 1: add to what `y` holds.
    pub accumulate: u32,
}

/// Rows gathered by expert.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupedRows {
    /// `[pairs]`: pairs sorted by expert.
    pub order: Global<u32>,
    /// `[1 + 3 * tiles]`: the number of tiles, then for each: expert, first index into `order`, count: up to 8, or 16.
    pub tiles: Global<u32>,
    /// `[experts]`: the expert's matrix among the weights, or [`ABSENT`] when it has another format.
    pub slots: Global<u32>,
    /// Pairs that share a row of `x`: row = pair / pairs_per_row.
    pub pairs_per_row: u32,
    /// 1: `order` and `tiles`, or `ids`, were written before the launch before this one began.
    pub settled: u32,
    /// `[pairs]`: the expert of each; read by kernels that find `order` and `tiles` for themselves.
    pub ids: Global<u32>,
    pub experts: u32,
}

/// In [`GroupedRows::slots`]: this expert's weights have another format.
pub const ABSENT: u32 = u32::MAX;

/// `y[r, b, :] (+)= W[b] x[r, b, :]` for dense rows, all f32.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GemmArgs {
    pub weights: F32Weights,
    pub x: Global<f32>,
    pub y: GlobalMut<f32>,
    pub shape: GemmShape,
    pub rows: DenseRows,
}

/// `y[pair, :] = W[expert of pair] x[pair / pairs_per_row, :]`, rows of `x` and `y` packed, all f32.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupedGemmArgs {
    pub weights: F32Weights,
    pub x: Global<f32>,
    pub y: GlobalMut<f32>,
    pub shape: GemmShape,
    pub rows: GroupedRows,
}

/// The shape of a product whose weights are streamed, see [`crate::kernels::stream`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StreamShape {
    /// Outputs: rows of each matrix.
    pub n: u32,
    /// Terms of each sum: columns of each matrix.
    pub k: u32,
    /// Slices that k is summed in: by the shape alone.
    pub k_split: u32,
}

/// `y[r, b, :] (+)= W[b] x[r, b, :]` for dense rows. Weights in their format's order of lanes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StreamArgs {
    pub weights: Global<u32>,
    pub x: Global<bf16>,
    pub y: GlobalMut<f32>,
    pub shape: StreamShape,
    pub rows: DenseRows,
    /// Entries of the batch.
    pub batch: u32,
    /// Blocks of rows of x.
    pub row_blocks: u32,
}

/// Rows of x brought into panels, see [`crate::kernels::panels`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PanelArgs {
    pub x: Global<bf16>,
    /// `[batch, blocks of rows, pairs of chunks, words of two panels]`.
    pub panels: GlobalMut<u32>,
    /// Of f16 panels: what undoes each row's factor, `[batch, blocks of rows, rows of a block]`.
    pub undo: GlobalMut<f32>,
    pub rows: DenseRows,
    pub k: u32,
}

/// As [`StreamArgs`], rows of x from panels. See [`crate::kernels::tiled_wgmma`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PanelProductArgs {
    pub weights: Global<u32>,
    /// Those of [`PanelArgs`].
    pub panels: Global<u32>,
    pub undo: Global<f32>,
    pub y: GlobalMut<f32>,
    pub shape: StreamShape,
    pub rows: DenseRows,
    /// Entries of the batch.
    pub batch: u32,
    /// Blocks of rows of x.
    pub row_blocks: u32,
    /// Of scaled formats: a power of two that brings the scales into the range of f16, and what undoes it.
    pub factor: f32,
    pub undo_factor: f32,
}

/// `y[pair, :] = W[expert of pair] x[pair / pairs_per_row, :]`, rows of `x` and `y` packed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupedStreamArgs {
    pub weights: Global<u32>,
    pub x: Global<bf16>,
    pub y: GlobalMut<f32>,
    pub shape: StreamShape,
    pub rows: GroupedRows,
}

/// `out[pair, :] = silu(gate x) * (up x)` with the expert's matrices and x as in [`GroupedStreamArgs`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GateUpArgs {
    pub gate: Global<u32>,
    pub up: Global<u32>,
    pub x: Global<bf16>,
    /// `[pairs, n]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[pairs, n]`, or empty.
    pub out_bf16: GlobalMut<bf16>,
    pub shape: StreamShape,
    /// `slots` are those of gate.
    pub rows: GroupedRows,
    /// `[experts]`: as `rows.slots`, of up.
    pub up_slots: Global<u32>,
}

/// `out[r, :] = silu(gate x[r]) * (up x[r])` for dense rows, both matrices `[n, k]`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GatedArgs {
    pub gate: Global<u32>,
    pub up: Global<u32>,
    pub x: Global<bf16>,
    /// `[rows, n]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, n]`, or empty.
    pub out_bf16: GlobalMut<bf16>,
    pub shape: StreamShape,
    /// `y_stride` is that of both results.
    pub rows: DenseRows,
}

/// See [`crate::kernels::repack_w4a16`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RepackArgs<S> {
    /// `[matrices, n, k / 2]` bytes, low nibble = even k, stored as q + 8.
    pub packed: Global<u8>,
    /// `[matrices, n, k / group]`.
    pub scales: Global<S>,
    /// In the order of lanes of [`crate::kernels::gemm_w4a16`].
    pub out: GlobalMut<u32>,
    pub matrices: u32,
    pub n: u32,
    pub k: u32,
    /// Consecutive k that share a scale: a multiple of 32.
    pub group: u32,
}

/// See [`crate::kernels::repack_bf16`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RepackBf16Args {
    /// `[matrices, n, k]`.
    pub rows: Global<bf16>,
    /// In the order of lanes of [`crate::kernels::gemm_bf16`].
    pub out: GlobalMut<u32>,
    pub matrices: u32,
    pub n: u32,
    pub k: u32,
}
