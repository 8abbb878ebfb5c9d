//! Products with bf16 weights; k a multiple of 16. See [`super::stream`] for who owns what, [`super::repack_bf16`] for
//! how the layout is made.
//!
//! Each step of 32 k is summed by tensor cores from zero and then added to the running sum, rounded to nearest (the
//! hardware's own long sums truncate).
//!
//! Layout, for a tile of 16 rows and a chunk of 64 k, 2,048 bytes in one run: `[mma][lane][4]` words, the first operand
//! of each of the chunk's four `mma` as its lanes hold it. Rows past n and k past the last are zero.

use cuda_std::{Shared, kernel, warp};

use super::stream::{FRAGMENT, Format, Lane, STEPS, Variant};
use super::stream_work::{Dense, GateUp, Gated, Grouped, split, stream, wide, wide_sm_90};
use super::wide::Wide;
use crate::args::linear::{GateUpArgs, GatedArgs, GroupedStreamArgs, StreamArgs};
use crate::unroll::unroll;

/// Words of an operand that a lane holds.
pub const LANE_WORDS: usize = 4;
/// `mma`s of a step.
const MMAS: usize = 2;
/// Words of a tile's chunk.
pub const TILE_WORDS: usize = STEPS * MMAS * warp::WARP as usize * LANE_WORDS;

/// Where a lane's operand of `mma` `i` of a chunk begins.
#[inline(always)]
pub const fn operand_word(i: usize, lane: usize) -> usize {
    (i * warp::WARP as usize + lane) * LANE_WORDS
}

/// bf16 weights.
#[derive(Clone, Copy)]
pub struct Bf16;

impl Format for Bf16 {
    const TILE_WORDS: usize = TILE_WORDS;
    const UNIT: f32 = 1.0;
    type Chunk = [[u32; LANE_WORDS]; STEPS * MMAS];

    #[inline(always)]
    fn load(stage: Shared<u32>, at: usize, lane: Lane) -> Self::Chunk {
        let mut held = [[0; LANE_WORDS]; STEPS * MMAS];
        unroll!(i in 0 1 2 3; { held[i] = stage.ld16(at + operand_word(i, lane.index())) });
        held
    }

    #[inline(always)]
    fn operands(chunk: &Self::Chunk, step: usize) -> [[u32; 4]; 2] {
        [chunk[step * MMAS], chunk[step * MMAS + 1]]
    }

    #[inline(always)]
    fn fold(_: &Self::Chunk, _: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]) {
        unroll!(i in 0 1 2 3; { sums[i] += products[i] });
    }
}

/// Up to 8 rows.
pub const M8: Variant = Variant { nt: 2, mt: 1, chunks: 1, depth: 2, blocks: 2 };
/// Up to 8 rows where there are few tiles: more blocks have some.
pub const M8_FEW: Variant = Variant { nt: 1, mt: 1, chunks: 2, depth: 2, blocks: 3 };
/// Up to 16 rows: two tiles of weights for each row of x that is read.
pub const M16: Variant = Variant { nt: 2, mt: 2, chunks: 1, depth: 2, blocks: 2 };
/// Up to 16 rows, few tiles.
pub const M16_FEW: Variant = Variant { nt: 1, mt: 2, chunks: 1, depth: 4, blocks: 2 };
/// Up to 32 rows.
pub const M32: Variant = Variant { nt: 2, mt: 4, chunks: 1, depth: 2, blocks: 2 };
/// Up to 64 rows.
pub const M64: Variant = Variant { nt: 2, mt: 8, chunks: 1, depth: 2, blocks: 1 };
/// Up to 64 rows, few tiles.
pub const M64_FEW: Variant = Variant { nt: 1, mt: 8, chunks: 1, depth: 4, blocks: 1 };

/// Up to 32 rows of a tall matrix.
pub const WIDE32: Wide = Wide { warps: 8, shares: 1, nt: 1, mt: 4, chunks: 1, depth: 4, blocks: 2 };
/// Up to 64 rows of a tall matrix.
pub const WIDE64: Wide = Wide { warps: 4, shares: 2, nt: 2, mt: 4, chunks: 1, depth: 4, blocks: 2 };
/// Up to 8 rows, a slice of k a block, few tiles.
pub const SPLIT8: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 1, chunks: 2, depth: 5, blocks: 2 };
/// Up to 16 rows, a slice of k a block, few tiles.
pub const SPLIT16: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 2, chunks: 2, depth: 4, blocks: 2 };
/// Up to 32 rows, a slice of k a block.
pub const SPLIT32: Wide = Wide { warps: 4, shares: 1, nt: 2, mt: 4, chunks: 1, depth: 3, blocks: 3 };
/// The same with few tiles.
pub const SPLIT32_FEW: Wide = Wide { warps: 4, shares: 1, nt: 1, mt: 4, chunks: 1, depth: 6, blocks: 3 };
/// The same with many tiles.
pub const SPLIT32_MANY: Wide = Wide { warps: 8, shares: 1, nt: 2, mt: 4, chunks: 1, depth: 2, blocks: 2 };
/// Up to 64 rows, a slice of k a block.
pub const SPLIT64: Wide = Wide { warps: 4, shares: 2, nt: 2, mt: 4, chunks: 1, depth: 3, blocks: 2 };
/// The same with few tiles.
pub const SPLIT64_FEW: Wide = Wide { warps: 2, shares: 2, nt: 2, mt: 4, chunks: 1, depth: 4, blocks: 4 };

const _: () = {
    assert!(WIDE32.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(WIDE64.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT8.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT16.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT32.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT32_FEW.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT32_MANY.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT64.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(SPLIT64_FEW.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(
        M8.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT && M8_FEW.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT
    );
    assert!(M16_FEW.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(M16.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT && M64.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(M32.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(M64_FEW.shared_bytes(TILE_WORDS) <= crate::SHARED_LIMIT);
};

/// Up to 8 rows a unit.
#[kernel]
pub fn gemm_bf16_m8(a: StreamArgs) {
    stream!(Bf16, M8, Dense, a);
}

/// Up to 8 rows a unit, few tiles.
#[kernel]
pub fn gemm_bf16_m8_few(a: StreamArgs) {
    stream!(Bf16, M8_FEW, Dense, a);
}

/// Up to 16 rows a unit.
#[kernel]
pub fn gemm_bf16_m16(a: StreamArgs) {
    stream!(Bf16, M16, Dense, a);
}

/// Up to 16 rows a unit, few tiles.
#[kernel]
pub fn gemm_bf16_m16_few(a: StreamArgs) {
    stream!(Bf16, M16_FEW, Dense, a);
}

/// Up to 32 rows a unit.
#[kernel]
pub fn gemm_bf16_m32(a: StreamArgs) {
    stream!(Bf16, M32, Dense, a);
}

/// Up to 64 rows a unit, few tiles.
#[kernel]
pub fn gemm_bf16_m64_few(a: StreamArgs) {
    stream!(Bf16, M64_FEW, Dense, a);
}

/// Up to 64 rows a unit.
#[kernel]
pub fn gemm_bf16_m64(a: StreamArgs) {
    stream!(Bf16, M64, Dense, a);
}

/// Up to 32 rows of a tall matrix.
#[kernel(threads = WIDE32.threads(), blocks = WIDE32.blocks)]
pub fn gemm_bf16_wide32(a: StreamArgs) {
    wide!(Bf16, WIDE32, a);
}

/// Up to 64 rows of a tall matrix.
#[kernel(threads = WIDE64.threads(), blocks = WIDE64.blocks)]
pub fn gemm_bf16_wide64(a: StreamArgs) {
    wide_sm_90!(Bf16, WIDE64, a);
}

/// Up to 8 rows, a slice of k a block, few tiles.
#[kernel(threads = SPLIT8.threads(), blocks = SPLIT8.blocks)]
pub fn gemm_bf16_split8(a: StreamArgs) {
    split!(Bf16, SPLIT8, a);
}

/// Up to 16 rows, a slice of k a block, few tiles.
#[kernel(threads = SPLIT16.threads(), blocks = SPLIT16.blocks)]
pub fn gemm_bf16_split16(a: StreamArgs) {
    split!(Bf16, SPLIT16, a);
}

/// Up to 32 rows, a slice of k a block.
#[kernel(threads = SPLIT32.threads(), blocks = SPLIT32.blocks)]
pub fn gemm_bf16_split32(a: StreamArgs) {
    split!(Bf16, SPLIT32, a);
}

/// Up to 32 rows, a slice of k a block, few tiles.
#[kernel(threads = SPLIT32_FEW.threads(), blocks = SPLIT32_FEW.blocks)]
pub fn gemm_bf16_split32_few(a: StreamArgs) {
    split!(Bf16, SPLIT32_FEW, a);
}

/// Up to 32 rows, a slice of k a block, many tiles.
#[kernel(threads = SPLIT32_MANY.threads(), blocks = SPLIT32_MANY.blocks)]
pub fn gemm_bf16_split32_many(a: StreamArgs) {
    split!(Bf16, SPLIT32_MANY, a);
}

/// Up to 64 rows, a slice of k a block.
#[kernel(threads = SPLIT64.threads(), blocks = SPLIT64.blocks)]
pub fn gemm_bf16_split64(a: StreamArgs) {
    split!(Bf16, SPLIT64, a);
}

/// Up to 64 rows, a slice of k a block, few tiles.
#[kernel(threads = SPLIT64_FEW.threads(), blocks = SPLIT64_FEW.blocks)]
pub fn gemm_bf16_split64_few(a: StreamArgs) {
    split!(Bf16, SPLIT64_FEW, a);
}

/// Rows gathered by expert.
#[kernel]
pub fn grouped_gemm_bf16(a: GroupedStreamArgs) {
    stream!(Bf16, M8, Grouped, a);
}

/// Gate and up of experts with SwiGLU.
#[kernel]
pub fn gate_up_gemm_bf16(a: GateUpArgs) {
    stream!(Bf16, M8, GateUp, a);
}

/// Gate and up of up to 8 rows a unit, with SwiGLU.
#[kernel]
pub fn gated_gemm_bf16(a: GatedArgs) {
    stream!(Bf16, M8, Gated, a);
}
