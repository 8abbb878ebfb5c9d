//! Rows of x in the order in which [`super::tiled_wgmma`] multiplies them: panels of 128 rows and 64 k that one bulk
//! copy brings to shared memory as they are.
//!
//! ```text
//! words [batch entry][block of 128 rows][pair of chunks][chunk][row][piece p xor row % 8][4]
//! piece 4 s + q of a row's chunk: word q of each lane of a quad for step s, so k 32 s + 8 c + 2 q, + 1 for c in 0..4
//! ```
//!
//! Weights lie in the order of the streams, where lane c of a quad holds k `8c .. 8c + 8` of a step. `wgmma` wants
//! pairs of k side by side in lanes: x is brought into that order here, once, instead of the weights at each product.
//! The exchange of pieces within a row is the one of the hardware's 128-byte rule.
//!
//! * `x_panels`: bf16 values as they are.
//! * `x_panels_half`: f16. Each row is multiplied by a power of two, so that its largest value is 2^15 to 2^16. A bf16
//!   has 8 significant bits, so values down to 2^-32 of the largest stay exact, and none moves by more than 2^-41 of
//!   the largest. `undo` is the inverse factor. A row with a NaN or an infinity keeps it, and its factor is 1.
//!
//! k past the last, up to an even number of chunks, is zero. Rows past the last are not written: their sums are not
//! stored.
//!
//! Grid: x = rows, y = entries of the batch. A block owns a row; a thread reads and writes a piece at a time, so that
//! eight lanes fill 128 bytes, and the lanes of a quad exchange words in between.

use cuda_std::{Global, bf16, kernel, math, static_shared, thread, warp};

use super::stream::{CHUNK_K, LANE_K};
use crate::args::linear::PanelArgs;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Rows of a panel.
pub const ROWS: usize = 128;
/// Chunks of k that are multiplied together.
pub const PAIR: usize = 2;
/// Words of a row's chunk.
const ROW_WORDS: usize = CHUNK_K * size_of::<bf16>() / size_of::<u32>();
/// Words of a pair's panels.
pub const PAIR_WORDS: usize = PAIR * ROWS * ROW_WORDS;
/// Words of a piece of 16 bytes, and pieces of a row's chunk.
const PIECE: usize = 4;
const PIECES: usize = ROW_WORDS / PIECE;
/// Pieces that a thread reads before it writes the first.
const AHEAD: usize = 4;

/// Pairs of chunks of rows of `k` values.
pub const fn pairs(k: u32) -> u32 {
    k.div_ceil((PAIR * CHUNK_K) as u32)
}

static_shared!(fn panels_largest() -> [u32; (THREADS / warp::WARP) as usize]);

/// Bits of a bf16 without its sign, and of them those behind the exponent.
const SIZE: u32 = 0x7FFF;
const FRACTION: u32 = 7;
/// The exponent of infinities and NaN; of 1.
const NOT_FINITE: u32 = 255;
const BIAS: u32 = 127;
/// The largest exponent whose inverse is normal.
const MOST: u32 = 2 * BIAS - 1;
/// The exponent that a row's largest value gets.
const TARGET: u32 = BIAS + 15;

/// 2^(exponent - 127).
#[inline(always)]
fn power(exponent: u32) -> f32 {
    f32::from_bits(exponent << 23)
}

/// The exponent of the factor of a row whose largest size has these bits.
#[inline(always)]
fn factor(largest: u32) -> u32 {
    let exponent = largest >> FRACTION;
    if exponent == NOT_FINITE { BIAS } else { (TARGET + BIAS - exponent).min(MOST) }
}

/// The largest size in a row, as bits.
#[inline(always)]
fn largest(row: Global<bf16>) -> u32 {
    let found = panels_largest();
    let mut most = 0;
    let mut at = thread::thread_idx_x() as usize * LANE_K;
    while at < row.len() {
        let words = row.ld16(at);
        unroll!(i in 0 1 2 3; { most = most.max(words[i] & SIZE).max(words[i] >> 16 & SIZE) });
        at += THREADS as usize * LANE_K;
    }
    most = warp::max(most);
    if warp::lane_id() == 0 {
        found.set(warp::warp_id() as usize, most);
    }
    thread::sync_threads();
    unroll!(i in 0 1 2 3 4 5 6 7; { most = most.max(found.get(i)) });
    most
}

#[inline(always)]
fn pack<const HALF: bool>(a: PanelArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (row, matrix) = (thread::block_idx_x(), thread::block_idx_y());
    let (block, within) = (row / ROWS as u32, row as usize % ROWS);
    let blocks = a.rows.rows.div_ceil(ROWS as u32);
    let first = matrix as usize * a.rows.x_batch as usize + row as usize * a.rows.x_stride as usize;
    let x = a.x.slice(first, a.k as usize);
    let pairs = pairs(a.k) as usize;
    let block = (matrix * blocks + block) as usize;
    let panels = a.panels.slice(block * pairs * PAIR_WORDS, pairs * PAIR_WORDS);
    let mut scale = 1.0;
    if HALF {
        let exponent = factor(largest(x));
        scale = power(exponent);
        if thread::thread_idx_x() == 0 {
            a.undo.set(block * ROWS + within, power(2 * BIAS - exponent));
        }
    }
    let lane = warp::lane_id() as usize;
    let total = pairs * PAIR * PIECES;
    let mut round = 0;
    while round < total {
        let first = round + thread::thread_idx_x() as usize;
        let mut held = [[0; PIECE]; AHEAD];
        unroll!(i in 0 1 2 3 below AHEAD; {
            let from = (first + i * THREADS as usize) * LANE_K;
            if from < a.k as usize {
                held[i] = x.ld16(from);
            }
        });
        unroll!(i in 0 1 2 3 below AHEAD; {
            if HALF {
                unroll!(word in 0 1 2 3; {
                    let pair = held[i][word];
                    held[i][word] = math::pack_half(math::bf16_lo(pair) * scale, math::bf16_hi(pair) * scale);
                });
            }
            let words = transpose(lane, held[i]);
            let at = first + i * THREADS as usize;
            if at < total {
                let (chunk, piece) = (at / PIECES, (at % PIECES) ^ (within % PIECES));
                panels.st16((chunk * ROWS + within) * ROW_WORDS + piece * PIECE, words);
            }
        });
        round += AHEAD * THREADS as usize;
    }
}

/// `low` where bit `bit` of the lane is 0, else `high`.
#[inline(always)]
fn choose(lane: usize, bit: usize, low: u32, high: u32) -> u32 {
    if lane & bit == 0 { low } else { high }
}

/// Lane c of a quad gives word q to lane q and gets word c of each.
#[inline(always)]
fn transpose(lane: usize, words: [u32; PIECE]) -> [u32; PIECE] {
    let [a, b, c, d] = words;
    let (p, q) = (warp::shfl_xor(choose(lane, 2, c, a), 2), warp::shfl_xor(choose(lane, 2, d, b), 2));
    let [a, b, c, d] = [choose(lane, 2, a, p), choose(lane, 2, b, q), choose(lane, 2, p, c), choose(lane, 2, q, d)];
    let (p, q) = (warp::shfl_xor(choose(lane, 1, b, a), 1), warp::shfl_xor(choose(lane, 1, d, c), 1));
    [choose(lane, 1, a, p), choose(lane, 1, p, b), choose(lane, 1, c, q), choose(lane, 1, q, d)]
}

/// For bf16 weights.
#[kernel]
pub fn x_panels(a: PanelArgs) {
    pack::<false>(a);
}

/// For 4-bit weights.
#[kernel]
pub fn x_panels_half(a: PanelArgs) {
    pack::<true>(a);
}
