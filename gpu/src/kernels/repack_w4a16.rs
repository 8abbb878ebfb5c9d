//! Puts 4-bit weights as a checkpoint holds them into the order in which [`super::gemm_w4a16`] reads them.
//!
//! In: `packed [matrices, n, k / 2]` (low nibble = even k, q + 8), `scales [matrices, n, k / group]`, group a multiple
//! of 32. Out: the layout drawn in `gemm_w4a16`; rows past n become code 8 (q = 0) and scale 0, a scale of a larger
//! group is repeated for each of its 32s. Nothing is rounded.
//!
//! Grid: x = blocks of 8 chunks. A warp owns one tile's chunk; its lanes write what they will read in the product.

use cuda_std::{bf16, kernel, math, thread, warp};

use super::gemm_w4a16::{LANE_SCALES, LANE_WORDS, Scale};
use super::stream::{CHUNK_K, LANE_K, Lane, STEP_K, STEPS, TILE_M, TILE_N};
use crate::args::linear::RepackArgs;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Chunks a block.
pub const CHUNKS: u32 = THREADS / warp::WARP;
/// Eight codes of q = 0.
const ZEROS: u32 = 0x8888_8888;
/// Codes of a byte.
const BYTE_CODES: usize = 2;

/// The two words of a step from eight consecutive codes of rows `g` and `g + 8`.
///
/// Operand register a_0 of an `mma` holds the first pair of row g, a_1 that of row g + 8, a_2 and a_3 the second pairs;
/// register a_i takes its low half from nibble i and its high half from nibble i + 4.
#[inline(always)]
pub const fn fragment_words(low: u32, high: u32) -> [u32; 2] {
    [fragment_word(low, high, 0), fragment_word(low, high, 4)]
}

/// Rows `g` and `g + 8` side by side, from code `first` on.
#[inline(always)]
const fn fragment_word(low: u32, high: u32, first: u32) -> u32 {
    let (low, high) = (low >> (4 * first), high >> (4 * first));
    let even = low & 0xF | (high & 0xF) << 4 | (low & 0xF00) | (high & 0xF00) << 4;
    let odd = low >> 4 & 0xF | (high & 0xF0) | (low >> 4 & 0xF00) | (high & 0xF000);
    even | odd << 16
}

#[inline(always)]
fn repack<S: Scale>(a: RepackArgs<S>) {
    let (n, k) = (a.n as usize, a.k as usize);
    let (tiles, chunks) = (n.div_ceil(TILE_N), k.div_ceil(CHUNK_K));
    let index = thread::block_idx_x() as usize * CHUNKS as usize + warp::warp_id() as usize;
    if index < a.matrices as usize * tiles * chunks {
        let (rest, chunk) = (math::div_usize(index, chunks), math::rem_usize(index, chunks));
        let (matrix, tile) = (math::div_usize(rest, tiles), math::rem_usize(rest, tiles));
        let lane = Lane::this();
        let groups = math::div_usize(k, a.group as usize);
        let mut words = [ZEROS; LANE_WORDS];
        let mut scales = [S::ZERO; LANE_SCALES];
        for step in 0..STEPS {
            let start = chunk * CHUNK_K + step * STEP_K;
            let mut codes = [ZEROS; 2];
            if start < k {
                for half in 0..2 {
                    let row = tile * TILE_N + lane.g + half * TILE_M;
                    if row < n {
                        let row = matrix * n + row;
                        codes[half] = a.packed.ld4((row * k + start + lane.c * LANE_K) / BYTE_CODES);
                        scales[step * 2 + half] = a.scales.get(row * groups + math::div_usize(start, a.group as usize));
                    }
                }
            }
            let [first, second] = fragment_words(codes[0], codes[1]);
            words[step * 2] = first;
            words[step * 2 + 1] = second;
        }
        let at = index * S::TILE_WORDS;
        a.out.st16(at + lane.index() * LANE_WORDS, words);
        if lane.c == 0 {
            S::store(a.out, at + S::scale_word(lane.g), scales);
        }
    }
}

/// bf16 scales.
#[kernel]
pub fn repack_w4a16(a: RepackArgs<bf16>) {
    repack(a);
}

/// f32 scales.
#[kernel]
pub fn repack_w4a16_s32(a: RepackArgs<f32>) {
    repack(a);
}
