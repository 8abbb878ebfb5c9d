//! Which kernel a product takes, how k is split and how rows are divided: a pure function of shape and rows, printable.
//!
//! The split of k follows from k alone. Everything else may follow from the number of rows too, because it leaves a
//! row's sums as they are.

use std::fmt;

use gpu::kernels::gemm::{CHUNK_K, MAX_TILES, MAX_WARPS, TILE_M, TILE_N, shared_bytes};

use super::pool::Kind;
use super::{ExpertWeights, Format, HostWeight, ScaleType, Weight};
use crate::device::Dims;

/// k from which a second warp joins in a tile's sums, and so on: less would cost more in the barrier than it saves.
const K_PER_WARP: usize = 512;
/// Blocks along x of a grouped product: each takes tiles in turn, so that a step with few tiles starts few blocks.
const GROUPED_BLOCKS: usize = 16;

/// How one product runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub kernel: &'static str,
    pub format: Format,
    /// Matrices, their rows and columns.
    pub batch: usize,
    pub n: usize,
    pub k: usize,
    /// Rows of x; of a grouped product, pairs.
    pub rows: usize,
    /// Warps that share the sums of a 16-row tile.
    pub k_split: u32,
    /// Tiles of 16 weight rows that a block owns.
    pub tiles_per_block: u32,
    /// Rows of x that a block multiplies.
    pub rows_per_block: usize,
    pub grid: [u32; 3],
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
    /// Bytes of weights that are read at least once.
    pub weight_bytes: usize,
    /// Tiles of rows that the kernel can hold.
    pub(super) row_tiles: usize,
}

/// Warps that share a tile's sums.
fn k_split(k: usize) -> u32 {
    let wanted = (k / K_PER_WARP).clamp(1, MAX_WARPS as usize) as u32;
    1 << wanted.ilog2()
}

fn dense_kernel(kind: Kind, many: bool) -> (&'static str, usize) {
    match (kind, many) {
        (Kind::F32, _) => ("gemm_f32", 1),
        (Kind::Bf16, false) => ("gemm_bf16_m8", 1),
        (Kind::Bf16, true) => ("gemm_bf16_m64", MAX_TILES),
        (Kind::W4a16(ScaleType::Bf16), false) => ("gemm_w4a16_m8", 1),
        (Kind::W4a16(ScaleType::Bf16), true) => ("gemm_w4a16_m64", MAX_TILES),
        (Kind::W4a16(ScaleType::F32), false) => ("gemm_w4a16_s32_m8", 1),
        (Kind::W4a16(ScaleType::F32), true) => ("gemm_w4a16_s32_m64", MAX_TILES),
    }
}

fn grouped_kernel_of(kind: Kind) -> &'static str {
    match kind {
        Kind::F32 => "grouped_gemm_f32",
        Kind::Bf16 => "grouped_gemm_bf16",
        Kind::W4a16(ScaleType::Bf16) => "grouped_gemm_w4a16",
        Kind::W4a16(ScaleType::F32) => "grouped_gemm_w4a16_s32",
    }
}

/// The kernel that multiplies `rows` rows with such a weight.
pub fn kernel(weight: &HostWeight, rows: usize) -> &'static str {
    dense_kernel(Kind::of(&weight.data), rows > TILE_M).0
}

/// The kernel that multiplies gathered rows with such an expert.
pub fn grouped_kernel(expert: &HostWeight) -> &'static str {
    grouped_kernel_of(Kind::of(&expert.data))
}

impl Plan {
    pub(super) fn dense(kind: Kind, format: Format, batch: usize, n: usize, k: usize, rows: usize) -> Self {
        let (kernel, row_tiles) = dense_kernel(kind, rows > TILE_M);
        // Blocks of equal size: 65 rows are 40 and 25, not 64 and 1.
        let tiles = rows.div_ceil(TILE_M);
        let blocks = tiles.div_ceil(row_tiles);
        let rows_per_block = tiles.checked_div(blocks).map_or(0, |_| tiles.div_ceil(blocks)) * TILE_M;
        let mut plan = Self::divided(kernel, format, n, k, row_tiles);
        plan.grid[0] = blocks as u32;
        plan.grid[2] = batch as u32;
        Self { batch, rows, rows_per_block, weight_bytes: batch * kind.matrix_bytes(n, k), ..plan }
    }

    /// `experts`: how many have this kind. At least one tile for each expert in use, at most as many as pairs.
    pub(super) fn grouped(kind: Kind, format: Format, experts: usize, n: usize, k: usize, pairs: usize) -> Self {
        let mut plan = Self::divided(grouped_kernel_of(kind), format, n, k, 1);
        plan.grid[0] = pairs.min(GROUPED_BLOCKS) as u32;
        let weight_bytes = experts.min(pairs) * kind.matrix_bytes(n, k);
        Self { batch: experts, rows: pairs, rows_per_block: TILE_M, weight_bytes, ..plan }
    }

    fn divided(kernel: &'static str, format: Format, n: usize, k: usize, row_tiles: usize) -> Self {
        let k_split = k_split(k);
        let tiles = n.div_ceil(TILE_N) as u32;
        let tiles_per_block = tiles.min(MAX_WARPS / k_split);
        let warps = tiles_per_block * k_split;
        Self {
            kernel,
            format,
            batch: 1,
            n,
            k,
            rows: 0,
            k_split,
            tiles_per_block,
            rows_per_block: 0,
            grid: [0, tiles.div_ceil(tiles_per_block), 1],
            block: warps * cuda_std::warp::WARP,
            shared: shared_bytes(k_split, warps, row_tiles),
            weight_bytes: 0,
            row_tiles,
        }
    }

    pub(super) fn dims(&self) -> Dims {
        Dims { grid: self.grid, block: [self.block, 1, 1], shared: self.shared }
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> usize {
        2 * self.rows * self.n * self.k * if self.kernel.starts_with("grouped") { 1 } else { self.batch }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { batch, rows, n, k, k_split, tiles_per_block, rows_per_block, grid: [x, y, z], block, .. } = *self;
        let tile = tiles_per_block as usize * TILE_N;
        write!(
            f,
            "{} {batch} x [{n}, {k}] x {rows} rows: {}, {tile} x {rows_per_block} a block, k in {CHUNK_K}s over \
             {k_split} warps, grid {x} x {y} x {z} of {block}, {} shared, {} weight bytes",
            self.format, self.kernel, self.shared, self.weight_bytes
        )
    }
}

/// How `linear` would run a product of `weight` with `rows` rows.
pub fn explain(weight: &Weight, rows: usize) -> Plan {
    Plan::dense(weight.pool().kind, weight.format(), weight.batch(), weight.n(), weight.k(), rows)
}

/// How `grouped_linear` would run a product with `pairs` pairs: one launch for each format present.
pub fn explain_grouped(weights: &ExpertWeights, pairs: usize) -> Vec<Plan> {
    weights.plans(pairs).collect()
}
