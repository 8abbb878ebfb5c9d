//! Products with 4-bit weights `q * s`: q in -8..=7 exact in bf16, one scale s (bf16 or f32) for 32 consecutive k of a
//! row. See [`super::stream`] for who owns what, [`super::repack_w4a16`] for how the layout is made.
//!
//! Each group of 32 k is summed by tensor cores over the bare codes; its scale is applied to that sum in f32
//! (`sum = fma(s, products, sum)`), so a weight is never rounded.
//!
//! Layout, for a tile of 16 rows and a chunk of 64 k (two groups), one contiguous run:
//!
//! ```text
//! codes   [lane][4] words     512 bytes; words 0, 1: the two mma of group 0, words 2, 3: of group 1.
//!                             nibble i of a word is the low, nibble i + 4 the high half of operand register a_i
//! scales  [g][2][2]           64 or 128 bytes; group 0: rows g, g + 8; group 1: rows g, g + 8
//! ```
//!
//! An odd last group leaves the second half of its chunk zero; rows past n have code 8 (q = 0) and scale 0.

use core::marker::PhantomData;

use cuda_std::{Element, GlobalMut, Shared, bf16, kernel, math, warp};

use super::pairs::{Listed, Within};
use super::short::Short;
use super::stream::{FRAGMENT, Format, Lane, STEPS, THREADS, TILE_M, TILE_N, Variant};
use super::stream_work::{
    Dense, GateUp, GateUpWithin, Gated, Grouped, GroupedWithin, gathered_wide, short, split, stream, wide, wide_sm_90,
};
use super::wide::Wide;
use crate::args::linear::{GateUpArgs, GatedArgs, GroupedStreamArgs, StreamArgs};
use crate::unroll::unroll;

/// Words of codes that a lane holds of a chunk.
pub const LANE_WORDS: usize = 4;
/// Words of codes of a tile's chunk.
pub const CODE_WORDS: usize = warp::WARP as usize * LANE_WORDS;
/// Scales of a tile's chunk.
pub const CHUNK_SCALES: usize = TILE_N * STEPS;
/// Scales that a lane reads of a chunk: both groups of rows `g` and `g + 8`.
pub const LANE_SCALES: usize = CHUNK_SCALES / TILE_M;

/// What a scale can be.
pub trait Scale: Element {
    const ZERO: Self;
    /// Words of a tile's chunk.
    const TILE_WORDS: usize = CODE_WORDS + CHUNK_SCALES * size_of::<Self>() / size_of::<u32>();

    /// Where the scales of row `g` begin in a tile's chunk, words.
    #[inline(always)]
    fn scale_word(g: usize) -> usize {
        CODE_WORDS + g * LANE_SCALES * size_of::<Self>() / size_of::<u32>()
    }

    /// Four scales from word `at` on.
    fn load(stage: Shared<u32>, at: usize) -> [f32; LANE_SCALES];

    /// Stores four scales from word `at` on.
    fn store(out: GlobalMut<u32>, at: usize, scales: [Self; LANE_SCALES]);
}

impl Scale for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn load(stage: Shared<u32>, at: usize) -> [f32; LANE_SCALES] {
        let [a, b] = stage.ld8(at);
        [math::bf16_lo(a), math::bf16_hi(a), math::bf16_lo(b), math::bf16_hi(b)]
    }

    #[inline(always)]
    fn store(out: GlobalMut<u32>, at: usize, [a, b, c, d]: [Self; LANE_SCALES]) {
        let word = |low: Self, high: Self| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
        out.st8(at, [word(a, b), word(c, d)]);
    }
}

impl Scale for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn load(stage: Shared<u32>, at: usize) -> [f32; LANE_SCALES] {
        stage.ld16(at).map(f32::from_bits)
    }

    #[inline(always)]
    fn store(out: GlobalMut<u32>, at: usize, scales: [Self; LANE_SCALES]) {
        out.st16(at, scales.map(f32::to_bits));
    }
}

/// 4-bit weights with scales of type `S`.
#[derive(Clone, Copy)]
pub struct W4a16<S>(PhantomData<S>);

/// A lane's share of a chunk.
#[derive(Clone, Copy)]
pub struct Chunk {
    codes: [u32; LANE_WORDS],
    scales: [f32; LANE_SCALES],
}

impl<S> W4a16<S> {
    /// The codes of a step.
    #[inline(always)]
    pub fn codes(chunk: &Chunk, step: usize) -> [u32; 2] {
        [chunk.codes[step * 2], chunk.codes[step * 2 + 1]]
    }

    /// The scales of a step: of rows `g` and `g + 8`.
    #[inline(always)]
    pub fn scales(chunk: &Chunk, step: usize) -> [f32; 2] {
        [chunk.scales[step * 2], chunk.scales[step * 2 + 1]]
    }
}

impl<S: Scale> Format for W4a16<S> {
    const TILE_WORDS: usize = S::TILE_WORDS;
    const UNIT: f32 = math::QUARTERS;
    type Chunk = Chunk;

    #[inline(always)]
    fn load(stage: Shared<u32>, at: usize, lane: Lane) -> Chunk {
        let codes = stage.ld16(at + lane.index() * LANE_WORDS);
        Chunk { codes, scales: S::load(stage, at + S::scale_word(lane.g)) }
    }

    #[inline(always)]
    fn operands(chunk: &Chunk, step: usize) -> [[u32; 4]; 2] {
        [math::dequant_quarters(chunk.codes[step * 2]), math::dequant_quarters(chunk.codes[step * 2 + 1])]
    }

    #[inline(always)]
    fn fold(chunk: &Chunk, step: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]) {
        unroll!(i in 0 1 2 3; { sums[i] = math::fma(chunk.scales[step * 2 + i / 2], products[i], sums[i]) });
    }
}

/// Up to 8 rows.
pub const M8: Variant = Variant { nt: 2, mt: 1, chunks: 4, depth: 2, blocks: 2 };
/// The same with f32 scales, which take more registers.
pub const M8_S32: Variant = Variant { nt: 2, mt: 1, chunks: 2, depth: 4, blocks: 2 };
/// Up to 8 rows where there are few tiles: more blocks have some.
pub const M8_FEW: Variant = Variant { nt: 1, mt: 1, chunks: 4, depth: 4, blocks: 2 };
/// Up to 16 rows.
pub const M16: Variant = Variant { nt: 2, mt: 2, chunks: 2, depth: 3, blocks: 2 };
/// The same with f32 scales, which take more registers.
pub const M16_S32: Variant = Variant { blocks: 1, ..M16 };
/// Up to 16 rows, few tiles.
pub const M16_FEW: Variant = Variant { nt: 1, mt: 2, chunks: 2, depth: 3, blocks: 2 };
/// Up to 32 rows: four tiles of weights for each read of x, whose traffic would else exceed that of the weights.
pub const M32: Variant = Variant { nt: 4, mt: 4, chunks: 1, depth: 3, blocks: 1 };
/// Up to 32 rows, few tiles: two blocks wait for each other's weights and x.
pub const M32_FEW: Variant = Variant { nt: 1, mt: 4, chunks: 1, depth: 6, blocks: 2 };
/// Up to 64 rows, few tiles, or with f32 scales: registers hold the sums of one tile.
pub const M64_FEW: Variant = Variant { nt: 1, mt: 8, chunks: 2, depth: 3, blocks: 1 };

/// Rows gathered by expert, a short k.
pub const SHORT: Short = Short { depth: 4, blocks: 2 };
/// The same with f32 scales.
pub const SHORT_S32: Short = Short { depth: 4, blocks: 2 };

/// Rows gathered by expert, up to 16 a tile of pairs.
pub const GATHERED16: Wide = Wide { warps: 8, shares: 1, nt: 2, mt: 2, chunks: 4, depth: 2, blocks: 2 };

/// Up to 8 rows of a tall matrix.
pub const WIDE8: Wide = Wide { warps: 8, shares: 1, nt: 1, mt: 1, chunks: 4, depth: 3, blocks: 3 };
/// Up to 16 rows of a tall matrix.
pub const WIDE16: Wide = Wide { warps: 8, shares: 1, nt: 1, mt: 2, chunks: 4, depth: 3, blocks: 2 };
/// The same of a matrix so tall that blocks are many even with 16 tiles each: x is read less often.
pub const WIDE16_MANY: Wide = Wide { warps: 4, shares: 1, nt: 4, mt: 2, chunks: 2, depth: 3, blocks: 3 };
/// Up to 32 rows of a tall matrix.
pub const WIDE32: Wide = Wide { warps: 4, shares: 1, nt: 2, mt: 4, chunks: 2, depth: 4, blocks: 3 };
/// Up to 64 rows of a tall matrix.
pub const WIDE64: Wide = Wide { warps: 4, shares: 1, nt: 2, mt: 8, chunks: 2, depth: 3, blocks: 2 };
/// Up to 16 rows, a slice of k a block, few tiles.
pub const SPLIT16: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 2, chunks: 4, depth: 3, blocks: 4 };
/// Up to 32 rows, a slice of k a block.
pub const SPLIT32: Wide = Wide { warps: 4, shares: 1, nt: 2, mt: 4, chunks: 2, depth: 4, blocks: 3 };
/// The same with few tiles.
pub const SPLIT32_FEW: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 4, chunks: 2, depth: 4, blocks: 4 };
/// The same with many tiles.
pub const SPLIT32_MANY: Wide = Wide { warps: 4, shares: 1, nt: 4, mt: 4, chunks: 2, depth: 3, blocks: 2 };
/// Up to 64 rows, a slice of k a block.
pub const SPLIT64: Wide = Wide { warps: 4, shares: 1, nt: 2, mt: 8, chunks: 2, depth: 3, blocks: 2 };
/// The same with few tiles.
pub const SPLIT64_FEW: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 8, chunks: 1, depth: 6, blocks: 3 };

const _: () = {
    let words = <bf16 as Scale>::TILE_WORDS;
    assert!(WIDE8.shared_bytes(words) <= crate::SHARED_LIMIT && WIDE16.shared_bytes(words) <= crate::SHARED_LIMIT);
    assert!(
        WIDE16_MANY.shared_bytes(words) <= crate::SHARED_LIMIT && SPLIT16.shared_bytes(words) <= crate::SHARED_LIMIT
    );
    assert!(M32_FEW.shared_bytes(words) <= crate::SHARED_LIMIT);
    assert!(WIDE32.shared_bytes(words) <= crate::SHARED_LIMIT && WIDE64.shared_bytes(words) <= crate::SHARED_LIMIT);
    assert!(
        SPLIT32.shared_bytes(words) <= crate::SHARED_LIMIT && SPLIT32_FEW.shared_bytes(words) <= crate::SHARED_LIMIT
    );
    assert!(SPLIT32_MANY.shared_bytes(words) <= crate::SHARED_LIMIT);
    assert!(
        SPLIT64.shared_bytes(words) <= crate::SHARED_LIMIT && SPLIT64_FEW.shared_bytes(words) <= crate::SHARED_LIMIT
    );
    let (few, many) = (<bf16 as Scale>::TILE_WORDS, <f32 as Scale>::TILE_WORDS);
    assert!(M8.shared_bytes(few) <= crate::SHARED_LIMIT && M8_S32.shared_bytes(many) <= crate::SHARED_LIMIT);
    assert!(M8_FEW.shared_bytes(many) <= crate::SHARED_LIMIT && M16.shared_bytes(many) <= crate::SHARED_LIMIT);
    assert!(M16_FEW.shared_bytes(many) <= crate::SHARED_LIMIT);
    assert!(M32.shared_bytes(many) <= crate::SHARED_LIMIT);
    assert!(M64_FEW.shared_bytes(many) <= crate::SHARED_LIMIT);
    assert!(GATHERED16.shared_bytes(few) <= crate::SHARED_LIMIT);
    assert!(SHORT.shared_bytes(few) <= crate::SHARED_LIMIT && SHORT_S32.shared_bytes(many) <= crate::SHARED_LIMIT);
};

/// Up to 8 rows a unit, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn gemm_w4a16_m8(a: StreamArgs) {
    stream!(W4a16<bf16>, M8, Dense, a);
}

/// Up to 8 rows a unit, few tiles, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m8_few(a: StreamArgs) {
    stream!(W4a16<bf16>, M8_FEW, Dense, a);
}

/// Up to 16 rows a unit, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m16(a: StreamArgs) {
    stream!(W4a16<bf16>, M16, Dense, a);
}

/// Up to 16 rows a unit, few tiles, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m16_few(a: StreamArgs) {
    stream!(W4a16<bf16>, M16_FEW, Dense, a);
}

/// Up to 32 rows a unit, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m32(a: StreamArgs) {
    stream!(W4a16<bf16>, M32, Dense, a);
}

/// Up to 32 rows a unit, few tiles, bf16 scales.
#[kernel(threads = THREADS, blocks = M32_FEW.blocks)]
pub fn gemm_w4a16_m32_few(a: StreamArgs) {
    stream!(W4a16<bf16>, M32_FEW, Dense, a);
}

/// Up to 64 rows a unit, few tiles, bf16 scales.
#[kernel]
pub fn gemm_w4a16_m64_few(a: StreamArgs) {
    stream!(W4a16<bf16>, M64_FEW, Dense, a);
}

/// Up to 8 rows of a tall matrix, bf16 scales.
#[kernel(threads = WIDE8.threads(), blocks = WIDE8.blocks)]
pub fn gemm_w4a16_wide8(a: StreamArgs) {
    wide!(W4a16<bf16>, WIDE8, a);
}

/// Up to 16 rows of a tall matrix, bf16 scales.
#[kernel(threads = WIDE16.threads(), blocks = WIDE16.blocks)]
pub fn gemm_w4a16_wide16(a: StreamArgs) {
    wide!(W4a16<bf16>, WIDE16, a);
}

/// Up to 16 rows of a very tall matrix, bf16 scales.
#[kernel(threads = WIDE16_MANY.threads(), blocks = WIDE16_MANY.blocks)]
pub fn gemm_w4a16_wide16_many(a: StreamArgs) {
    wide!(W4a16<bf16>, WIDE16_MANY, a);
}

/// Up to 32 rows of a tall matrix, bf16 scales.
#[kernel(threads = WIDE32.threads(), blocks = WIDE32.blocks)]
pub fn gemm_w4a16_wide32(a: StreamArgs) {
    wide!(W4a16<bf16>, WIDE32, a);
}

/// Up to 64 rows of a tall matrix, bf16 scales.
#[kernel(threads = WIDE64.threads(), blocks = WIDE64.blocks)]
pub fn gemm_w4a16_wide64(a: StreamArgs) {
    wide_sm_90!(W4a16<bf16>, WIDE64, a);
}

/// Up to 16 rows, a slice of k a block, few tiles, bf16 scales.
#[kernel(threads = SPLIT16.threads(), blocks = SPLIT16.blocks)]
pub fn gemm_w4a16_split16(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT16, a);
}

/// Up to 32 rows, a slice of k a block, bf16 scales.
#[kernel(threads = SPLIT32.threads(), blocks = SPLIT32.blocks)]
pub fn gemm_w4a16_split32(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT32, a);
}

/// Up to 32 rows, a slice of k a block, few tiles, bf16 scales.
#[kernel(threads = SPLIT32_FEW.threads(), blocks = SPLIT32_FEW.blocks)]
pub fn gemm_w4a16_split32_few(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT32_FEW, a);
}

/// Up to 32 rows, a slice of k a block, many tiles, bf16 scales.
#[kernel(threads = SPLIT32_MANY.threads(), blocks = SPLIT32_MANY.blocks)]
pub fn gemm_w4a16_split32_many(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT32_MANY, a);
}

/// Up to 64 rows, a slice of k a block, bf16 scales.
#[kernel(threads = SPLIT64.threads(), blocks = SPLIT64.blocks)]
pub fn gemm_w4a16_split64(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT64, a);
}

/// Up to 64 rows, a slice of k a block, few tiles, bf16 scales.
#[kernel(threads = SPLIT64_FEW.threads(), blocks = SPLIT64_FEW.blocks)]
pub fn gemm_w4a16_split64_few(a: StreamArgs) {
    split!(W4a16<bf16>, SPLIT64_FEW, a);
}

/// Rows gathered by expert, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn grouped_gemm_w4a16(a: GroupedStreamArgs) {
    stream!(W4a16<bf16>, M8, Grouped, a);
}

/// Up to 16 rows a tile of pairs, bf16 scales.
#[kernel(threads = THREADS, blocks = GATHERED16.blocks)]
pub fn grouped_gemm_w4a16_m16(a: GroupedStreamArgs) {
    gathered_wide!(W4a16<bf16>, GATHERED16, Grouped, a);
}

/// Gate and up of experts with SwiGLU, up to 16 rows a tile of pairs, bf16 scales.
#[kernel(threads = THREADS, blocks = GATHERED16.blocks)]
pub fn gate_up_gemm_w4a16_m16(a: GateUpArgs) {
    gathered_wide!(W4a16<bf16>, GATHERED16, GateUp, a);
}

/// Rows gathered by expert, a short k, bf16 scales.
#[kernel(threads = THREADS, blocks = SHORT.blocks)]
pub fn grouped_gemm_w4a16_short(a: GroupedStreamArgs) {
    short!(W4a16<bf16>, SHORT, Listed, a);
}

/// Gate and up of up to 8 rows a unit with SwiGLU, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn gated_gemm_w4a16(a: GatedArgs) {
    stream!(W4a16<bf16>, M8, Gated, a);
}

/// Gate and up of experts with SwiGLU, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn gate_up_gemm_w4a16(a: GateUpArgs) {
    stream!(W4a16<bf16>, M8, GateUp, a);
}

/// Few pairs gathered by expert, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn grouped_gemm_w4a16_within(a: GroupedStreamArgs) {
    stream!(W4a16<bf16>, M8, GroupedWithin, a);
}

/// Few pairs gathered by expert, a short k, bf16 scales.
#[kernel(threads = THREADS, blocks = SHORT.blocks)]
pub fn grouped_gemm_w4a16_within_short(a: GroupedStreamArgs) {
    short!(W4a16<bf16>, SHORT, Within, a);
}

/// Gate and up of few pairs' experts with SwiGLU, bf16 scales.
#[kernel(threads = THREADS, blocks = M8.blocks)]
pub fn gate_up_gemm_w4a16_within(a: GateUpArgs) {
    stream!(W4a16<bf16>, M8, GateUpWithin, a);
}

/// Up to 8 rows a unit, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m8(a: StreamArgs) {
    stream!(W4a16<f32>, M8_S32, Dense, a);
}

/// Up to 8 rows a unit, few tiles, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m8_few(a: StreamArgs) {
    stream!(W4a16<f32>, M8_FEW, Dense, a);
}

/// Up to 16 rows a unit, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m16(a: StreamArgs) {
    stream!(W4a16<f32>, M16_S32, Dense, a);
}

/// Up to 16 rows a unit, few tiles, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m16_few(a: StreamArgs) {
    stream!(W4a16<f32>, M16_FEW, Dense, a);
}

/// Up to 32 rows a unit, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m32(a: StreamArgs) {
    stream!(W4a16<f32>, M32, Dense, a);
}

/// Up to 64 rows a unit, few tiles, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m64_few(a: StreamArgs) {
    stream!(W4a16<f32>, M64_FEW, Dense, a);
}

/// Up to 64 rows a unit, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_m64(a: StreamArgs) {
    stream!(W4a16<f32>, M64_FEW, Dense, a);
}

/// Rows gathered by expert, f32 scales.
#[kernel(threads = THREADS, blocks = M8_S32.blocks)]
pub fn grouped_gemm_w4a16_s32(a: GroupedStreamArgs) {
    stream!(W4a16<f32>, M8_S32, Grouped, a);
}

/// Rows gathered by expert, a short k, f32 scales.
#[kernel(threads = THREADS, blocks = SHORT_S32.blocks)]
pub fn grouped_gemm_w4a16_s32_short(a: GroupedStreamArgs) {
    short!(W4a16<f32>, SHORT_S32, Listed, a);
}

/// Gate and up of experts with SwiGLU, f32 scales.
#[kernel(threads = THREADS, blocks = M8_S32.blocks)]
pub fn gate_up_gemm_w4a16_s32(a: GateUpArgs) {
    stream!(W4a16<f32>, M8_S32, GateUp, a);
}
