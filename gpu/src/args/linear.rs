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

/// Weights as in the file: `[matrices, n, k]`. See [`crate::kernels::gemm_bf16`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bf16Weights {
    pub rows: Global<bf16>,
}

/// Weights in fragment order, see [`crate::kernels::gemm_w4a16`]. `S` is the type of the scales: bf16 or f32.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct W4a16Weights<S> {
    /// `[matrices, tiles, chunks, 32 lanes, 4]` words of eight codes.
    pub codes: Global<u32>,
    /// `[matrices, tiles, chunks, 8, 2 groups, 2 rows]`.
    pub scales: Global<S>,
}

/// The shape of a product and how a block divides it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GemmShape {
    /// Outputs: rows of each matrix.
    pub n: u32,
    /// Terms of each sum: columns of each matrix.
    pub k: u32,
    /// Warps that share one tile's sums; a divisor of the warps of a block.
    pub k_split: u32,
    /// 1 when four f32 of `x` and of the weights may be read at once (f32 products only).
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
    /// `[1 + 3 * tiles]`: the number of tiles, then for each: expert, first index into `order`, count 1..=8.
    pub tiles: Global<u32>,
    /// `[experts]`: the expert's matrix among the weights, or [`ABSENT`] when it has another format.
    pub slots: Global<u32>,
    /// Pairs that share a row of `x`: row = pair / pairs_per_row.
    pub pairs_per_row: u32,
}

/// In [`GroupedRows::slots`]: this expert's weights have another format.
pub const ABSENT: u32 = u32::MAX;

/// `y[r, b, :] (+)= W[b] x[r, b, :]` for dense rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GemmArgs<W, X> {
    pub weights: W,
    pub x: Global<X>,
    pub y: GlobalMut<f32>,
    pub shape: GemmShape,
    pub rows: DenseRows,
}

/// `y[pair, :] = W[expert of pair] x[pair / pairs_per_row, :]`, rows of `x` and `y` packed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupedGemmArgs<W, X> {
    pub weights: W,
    pub x: Global<X>,
    pub y: GlobalMut<f32>,
    pub shape: GemmShape,
    pub rows: GroupedRows,
}

/// See [`crate::kernels::repack_w4a16`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RepackArgs<S> {
    /// `[matrices, n, k / 2]` bytes, low nibble = even k, stored as q + 8.
    pub packed: Global<u8>,
    /// `[matrices, n, k / group]`.
    pub scales: Global<S>,
    /// As [`W4a16Weights::codes`].
    pub out_codes: GlobalMut<u32>,
    /// As [`W4a16Weights::scales`].
    pub out_scales: GlobalMut<S>,
    pub matrices: u32,
    pub n: u32,
    pub k: u32,
    /// Consecutive k that share a scale: a multiple of 32.
    pub group: u32,
}
