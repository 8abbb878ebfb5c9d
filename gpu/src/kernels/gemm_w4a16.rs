//! Products with 4-bit weights `q * s`: q in -8..=7 exact in bf16, one scale s (bf16 or f32) for 32 consecutive k of a
//! row. See [`super::gemm`] for who owns what, [`super::repack_w4a16`] for how the layout is made.
//!
//! Each group of 32 k is summed by tensor cores over the bare codes; its scale is applied to that sum in f32
//! (`sum = fma(s, products, sum)`), so a weight is never rounded.
//!
//! Layout, for a tile of 16 rows and a chunk of 64 k (two groups):
//!
//! ```text
//! codes   [matrix][tile][chunk][lane][4]   512 bytes; words 0, 1: the two mma of group 0, words 2, 3: of group 1.
//!         nibble i of a word is the low, nibble i + 4 the high half of operand register a_i
//! scales  [matrix][tile][chunk][g][2][2]   group 0: rows g, g + 8; group 1: rows g, g + 8
//! ```
//!
//! An odd last group leaves the second half of its chunk unread; rows past n have code 8 (q = 0) and scale 0.

use cuda_std::{Element, Global, bf16, kernel, math, warp};

use super::gemm::{CHUNK_K, FRAGMENT, Lane, MmaWeights, Part, Rows, STEPS, TILE_M, TILE_N, Weights, accumulate_mma};
use super::gemm::{dense, grouped, unroll};
use crate::args::linear::{GemmArgs, GroupedGemmArgs, W4a16Weights};

/// Words of codes that a lane holds of a chunk.
pub const LANE_WORDS: usize = 4;
/// Words of codes of a tile's chunk.
pub const CHUNK_WORDS: usize = warp::WARP as usize * LANE_WORDS;
/// Scales of a tile's chunk.
pub const CHUNK_SCALES: usize = TILE_N * STEPS;
/// Scales that a lane reads of a chunk: both groups of rows `g` and `g + 8`.
pub const LANE_SCALES: usize = CHUNK_SCALES / TILE_M;

/// The number of the tile's chunk among all of its weights.
#[inline(always)]
pub const fn chunk_index(matrix: usize, n: usize, k: usize, tile: usize, chunk: usize) -> usize {
    (matrix * n.div_ceil(TILE_N) + tile) * k.div_ceil(CHUNK_K) + chunk
}

/// The first word of a lane's codes.
#[inline(always)]
pub const fn code_index(chunk_index: usize, lane: usize) -> usize {
    chunk_index * CHUNK_WORDS + lane * LANE_WORDS
}

/// The first scale of row `g` of the tile.
#[inline(always)]
pub const fn scale_index(chunk_index: usize, g: usize) -> usize {
    chunk_index * CHUNK_SCALES + g * LANE_SCALES
}

/// What a scale can be.
pub trait Scale: Element {
    const ZERO: Self;

    /// Four scales from element `i` on.
    fn load(scales: Global<Self>, i: usize) -> [f32; LANE_SCALES];
}

impl Scale for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn load(scales: Global<Self>, i: usize) -> [f32; LANE_SCALES] {
        let [a, b] = scales.ld8(i);
        [math::bf16_lo(a), math::bf16_hi(a), math::bf16_lo(b), math::bf16_hi(b)]
    }
}

impl Scale for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn load(scales: Global<Self>, i: usize) -> [f32; LANE_SCALES] {
        scales.ld16(i).map(f32::from_bits)
    }
}

/// A lane's share of a chunk.
#[derive(Clone, Copy)]
pub struct Chunk {
    codes: [u32; LANE_WORDS],
    scales: [f32; LANE_SCALES],
}

impl<S: Scale> MmaWeights for W4a16Weights<S> {
    type Chunk = Chunk;

    #[inline(always)]
    fn load(&self, part: Part, lane: Lane, chunk: usize) -> Chunk {
        let at = chunk_index(part.matrix, part.n, part.k, part.tile, chunk);
        Chunk {
            codes: self.codes.ld16_stream(code_index(at, lane.g * 4 + lane.c)),
            scales: S::load(self.scales, scale_index(at, lane.g)),
        }
    }

    #[inline(always)]
    fn operands(chunk: &Chunk, step: usize) -> [[u32; 4]; 2] {
        [math::dequant_pairs(chunk.codes[step * 2]), math::dequant_pairs(chunk.codes[step * 2 + 1])]
    }

    #[inline(always)]
    fn fold(chunk: &Chunk, step: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]) {
        unroll!(i < FRAGMENT, { sums[i] = math::fma(chunk.scales[step * 2 + i / 2], products[i], sums[i]) });
    }
}

impl<S: Scale> Weights for W4a16Weights<S> {
    type X = bf16;

    #[inline(always)]
    fn accumulate<R: Rows, const TILES: usize>(
        &self,
        part: Part,
        x: Global<bf16>,
        rows: R,
        sums: &mut [[f32; FRAGMENT]; TILES],
    ) {
        accumulate_mma(self, part, x, rows, sums);
    }
}

/// Up to 8 rows a block, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m8(a: GemmArgs<W4a16Weights<bf16>, bf16>) {
    dense::<_, 1>(a);
}

/// Up to 64 rows a block, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m64(a: GemmArgs<W4a16Weights<bf16>, bf16>) {
    dense::<_, 8>(a);
}

/// Rows gathered by expert, bf16 scales.
#[kernel]
pub fn grouped_gemm_w4a16(a: GroupedGemmArgs<W4a16Weights<bf16>, bf16>) {
    grouped(a);
}

/// Up to 8 rows a block, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m8(a: GemmArgs<W4a16Weights<f32>, bf16>) {
    dense::<_, 1>(a);
}

/// Up to 64 rows a block, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m64(a: GemmArgs<W4a16Weights<f32>, bf16>) {
    dense::<_, 8>(a);
}

/// Rows gathered by expert, f32 scales.
#[kernel]
pub fn grouped_gemm_w4a16_s32(a: GroupedGemmArgs<W4a16Weights<f32>, bf16>) {
    grouped(a);
}
