//! [`super::tiled`] with products of warpgroups (`wgmma`, sm_90a): weights are the first operand, from registers, and
//! rows of x the second, in shared memory.
//!
//! A block has 128 weight rows, a tile of 16 each of its 8 warps, and 128 rows of x, all of which each warp multiplies.
//! Here lanes must hold k in the order of the memory, not in that of the stream: a quad's lanes exchange what they have
//! read ([`Ordered::ordered`]).
//!
//! * Scaled formats: groups of 32 k are summed by tensor cores from zero and folded into f32 sums, as in the other
//!   kernels. Two are under way: while one is summed, a warp folds the other and makes the operand of the next.
//! * Formats without scales: two chunks, 128 k, are summed from zero and added; meanwhile a warp makes the next
//!   operands.
//!
//! Sums add up in ascending order of k, without the slices of the other kernels: last bits differ from theirs. They do
//! not depend on other rows or their number.

use cuda_std::async_copy::{cp_async_16, cp_async_16_or_zero, cp_async_commit, cp_async_wait};
use cuda_std::{Global, bf16, dynamic_shared, kernel, math, thread, warp, wgmma};

use super::gemm_bf16::Bf16;
use super::gemm_w4a16::{Scale, W4a16};
use super::stream::{CHUNK_K, FRAGMENT, Format, LANE_K, Lane, STEPS, TILE_M, TILE_N, WARPS, chunk_index};
use super::stream_rows::{Rows, Strided};
use super::tiled::{Place, THREADS};
use crate::args::linear::{StreamArgs, StreamShape};
use crate::unroll::unroll;

const LANES: usize = warp::WARP as usize;
/// Pieces of 16 bytes of a row's chunk.
const PIECES: usize = CHUNK_K / LANE_K;
/// Rows of x that the block's threads copy at a time, a piece each.
const COPY_ROWS: usize = THREADS as usize / PIECES;
/// Words of such a piece.
const PIECE_WORDS: usize = 4;
/// Rows of x of a block.
pub const ROWS: usize = 128;
/// Tiles of weights of a block.
pub const TILES: usize = WARPS as usize;
/// Tiles of rows of x.
const MT: usize = ROWS / TILE_M;

/// A format whose operands can be had with k in the order of the memory.
pub trait Ordered: Format {
    /// Whether a group's sum is scaled, and so not left to the tensor cores to add.
    const SCALED: bool;

    /// The first operands of both products of a step: register i of product j holds what fragment A of `mma.m16n8k16`
    /// names, of k `16 j ..` of the step. All lanes call together.
    fn ordered(chunk: &Self::Chunk, step: usize, lane: usize) -> [[u32; 4]; 2];
}

/// `low` where bit `bit` of the lane is 0, else `high`.
#[inline(always)]
fn choose(lane: usize, bit: usize, low: u32, high: u32) -> u32 {
    if lane & bit == 0 { low } else { high }
}

/// Lane c of a quad gives word s to lane s and gets word c of each.
#[inline(always)]
fn transpose(lane: usize, words: [u32; 4]) -> [u32; 4] {
    let [a, b, c, d] = words;
    let (p, q) = (warp::shfl_xor(choose(lane, 2, c, a), 2), warp::shfl_xor(choose(lane, 2, d, b), 2));
    let [a, b, c, d] = [choose(lane, 2, a, p), choose(lane, 2, b, q), choose(lane, 2, p, c), choose(lane, 2, q, d)];
    let (p, q) = (warp::shfl_xor(choose(lane, 1, b, a), 1), warp::shfl_xor(choose(lane, 1, d, c), 1));
    [choose(lane, 1, a, p), choose(lane, 1, p, b), choose(lane, 1, c, q), choose(lane, 1, q, d)]
}

impl Ordered for Bf16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn ordered(chunk: &Self::Chunk, step: usize, lane: usize) -> [[u32; 4]; 2] {
        let [first, second] = Self::operands(chunk, step);
        let low = transpose(lane, [first[0], first[2], second[0], second[2]]);
        let high = transpose(lane, [first[1], first[3], second[1], second[3]]);
        [[low[0], high[0], low[1], high[1]], [low[2], high[2], low[3], high[3]]]
    }
}

impl<S: Scale> Ordered for W4a16<S> {
    const SCALED: bool = true;

    #[inline(always)]
    fn ordered(chunk: &Self::Chunk, step: usize, lane: usize) -> [[u32; 4]; 2] {
        const EVEN: u32 = 0x00FF_00FF;
        let [first, second] = Self::codes(chunk, step);
        let other = warp::shfl_xor(choose(lane, 2, second, first), 2);
        let (a, b) = (choose(lane, 2, first, other), choose(lane, 2, other, second));
        let (even, odd) = (a & EVEN | (b & EVEN) << 8, a >> 8 & EVEN | b & !EVEN);
        let other = warp::shfl_xor(choose(lane, 1, odd, even), 1);
        let [a, b, c, d] = math::dequant_pairs(choose(lane, 1, even, other));
        let [e, f, g, h] = math::dequant_pairs(choose(lane, 1, other, odd));
        [[a, b, e, f], [c, d, g, h]]
    }
}

/// Bytes of a stage's x.
const X_BYTES: usize = ROWS * CHUNK_K * size_of::<bf16>();

/// Bytes of dynamic shared memory.
pub const fn shared_bytes(depth: usize, tile_words: usize) -> u32 {
    (depth * (X_BYTES + TILES * tile_words * size_of::<u32>())) as u32
}

/// Element of piece `piece` of row `row` of a panel.
#[inline(always)]
fn piece_at(row: usize, piece: usize) -> usize {
    row * CHUNK_K + (piece ^ (row % PIECES)) * LANE_K
}

/// Sums of a warp: its 16 weight rows, all rows of x.
type Sums = [[f32; FRAGMENT]; MT];

#[inline(always)]
fn multiply<F: Ordered, R: Rows, const DEPTH: usize, const ROUND: usize>(
    (weights, matrix, run): (Global<u32>, u32, u32),
    (x, rows): (Global<bf16>, R),
    shape: StreamShape,
) -> Sums {
    let x_stage = |stage: u32| dynamic_shared::<bf16>((stage as usize * X_BYTES) as u32, (ROWS * CHUNK_K) as u32);
    let w_bytes = TILES * F::TILE_WORDS * size_of::<u32>();
    let w_stage = |stage: u32| {
        let start = DEPTH * X_BYTES + stage as usize * w_bytes;
        dynamic_shared::<u32>(start as u32, (TILES * F::TILE_WORDS) as u32)
    };
    let chunks = shape.k.div_ceil(CHUNK_K as u32);
    let count = rows.count();
    let thread = (thread::thread_idx_x() % THREADS) as usize;
    let (warp, lane) = (thread / LANES, thread % LANES);
    let (row, piece) = (thread / PIECES, thread % PIECES);
    // Where the thread's rows begin, in pieces.
    let mut starts = [0; ROWS / COPY_ROWS];
    unroll!(i in 0 1 2 3 below ROWS / COPY_ROWS; {
        starts[i] = (rows.x((row + i * COPY_ROWS).min(count - 1)) / LANE_K) as u32;
    });
    let last = shape.n.div_ceil(TILE_N as u32) - 1;
    let tile = (run * TILES as u32 + warp as u32).min(last);
    let first = chunk_index(matrix, shape.n, shape.k, tile, 0) as usize * F::TILE_WORDS;
    let source = weights.slice(first, chunks as usize * F::TILE_WORDS);
    let fill = |stage: u32, chunk: u32| {
        let (to_x, to_w) = (x_stage(stage), w_stage(stage));
        let from = chunk * CHUNK_K as u32 + (piece * LANE_K) as u32;
        unroll!(i in 0 1 2 3 below ROWS / COPY_ROWS; {
            let start = starts[i] as usize * LANE_K;
            let at = piece_at(row + i * COPY_ROWS, piece);
            cp_async_16_or_zero(to_x, at, x, start + from as usize, from < shape.k);
        });
        unroll!(part in 0 1 2 3 below (F::TILE_WORDS / PIECE_WORDS).div_ceil(LANES); {
            let at = (part * LANES + lane) * PIECE_WORDS;
            if at < F::TILE_WORDS {
                let to = warp * F::TILE_WORDS + at;
                if F::SCALED {
                    // Codes and scales are finite: x alone must be zero behind the last k.
                    let inside = chunk.min(chunks - 1) as usize;
                    cp_async_16(to_w, to, source, inside * F::TILE_WORDS + at);
                } else {
                    let from = chunk as usize * F::TILE_WORDS + at;
                    cp_async_16_or_zero(to_w, to, source, from, chunk < chunks);
                }
            }
        });
    };
    // Behind the last chunk there are zeros.
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 2; {
        fill(stage as u32, stage as u32);
        if F::SCALED || stage % 2 == 1 {
            cp_async_commit();
        }
    });
    // A warp's share of a stage's weights, which it has copied itself.
    let held = |stage: u32| {
        let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
        let at = Lane { g: thread % LANES / 4, c: thread % 4 };
        F::load(w_stage(stage), thread / LANES * F::TILE_WORDS, at)
    };
    if F::SCALED {
        wait::<DEPTH>();
    } else {
        cp_async_wait::<1>();
    }
    warp::sync_warp();
    let mut sums: Sums = [[0.0; FRAGMENT]; MT];
    // What threads have copied of the first stage.
    wgmma::fence_async();
    thread::sync_threads();
    let (mut stage, mut chunk) = (0, 0);
    if !F::SCALED {
        // Two chunks are multiplied together.
        let of = |stage: u32| [F::ordered(&held(stage), 0, lane), F::ordered(&held(stage), 1, lane)];
        let mut a = [of(0), of(1)];
        // The operands that are made while products are under way must not be those of the products.
        macro_rules! pair {
            ($now:ident, $following:ident) => {
                let mut products = wgmma::start_pair(&$now, [x_stage(stage), x_stage(stage + 1)]);
                // All have read the two stages before.
                let free = if stage == 0 { DEPTH as u32 - 2 } else { stage - 2 };
                fill(free, chunk + DEPTH as u32 - 2);
                fill(free + 1, chunk + DEPTH as u32 - 1);
                cp_async_commit();
                cp_async_wait::<1>();
                warp::sync_warp();
                stage = if stage + 2 == DEPTH as u32 { 0 } else { stage + 2 };
                $following = [of(stage), of(stage + 1)];
                wgmma::wait_sums(&mut products, &mut $now);
                wgmma::fence_async();
                thread::sync_threads();
                unroll!(m in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 below MT; {
                    unroll!(i in 0 1 2 3; { sums[m][i] += products[m][i] });
                });
                chunk += 2;
                if chunk >= chunks {
                    return sums;
                }
            };
        }
        loop {
            let mut b;
            pair!(a, b);
            pair!(b, a);
        }
    }
    let mut a = F::ordered(&held(0), 0, lane);
    // Sums that are under way cannot go around a loop: so several chunks a round.
    let padded = chunks.next_multiple_of(ROUND as u32);
    while chunk < padded {
        let mut even = wgmma::start_registers(&a, x_stage(stage), 0);
        unroll!(i in 0 1 2 3 below ROUND; {
            let now = held(stage);
            let mut b = F::ordered(&now, 1, lane);
            let mut odd = wgmma::start_registers(&b, x_stage(stage), CHUNK_K / STEPS);
            // All have read the stage before the last.
            let free = if stage < 2 { stage + DEPTH as u32 - 2 } else { stage - 2 };
            if chunk + (DEPTH as u32) - 2 < padded {
                fill(free, chunk + DEPTH as u32 - 2);
            }
            cp_async_commit();
            wgmma::wait_registers::<1>(&mut even, &mut a);
            fold::<F>(&now, 0, &even, &mut sums);
            wait::<DEPTH>();
            warp::sync_warp();
            chunk += 1;
            let next = if stage + 1 == DEPTH as u32 { 0 } else { stage + 1 };
            // Behind the last chunk any will do.
            stage = if chunk < padded { next } else { stage };
            a = F::ordered(&held(stage), 0, lane);
            wgmma::fence_async();
            thread::sync_threads();
            if i + 1 < ROUND {
                even = wgmma::start_registers(&a, x_stage(stage), 0);
                wgmma::wait_registers::<1>(&mut odd, &mut b);
            } else {
                wgmma::wait_registers::<0>(&mut odd, &mut b);
            }
            fold::<F>(&now, 1, &odd, &mut sums);
        });
    }
    sums
}

/// Adds a step's products of all rows.
#[inline(always)]
fn fold<F: Format>(held: &F::Chunk, step: usize, products: &Sums, sums: &mut Sums) {
    unroll!(m in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 below MT; {
        F::fold(held, step, products[m], &mut sums[m]);
    });
}

/// Waits until the oldest stage has been filled.
#[inline(always)]
fn wait<const DEPTH: usize>() {
    match DEPTH {
        4 => cp_async_wait::<1>(),
        5 => cp_async_wait::<2>(),
        6 => cp_async_wait::<3>(),
        7 => cp_async_wait::<4>(),
        _ => cp_async_wait::<5>(),
    }
}

#[inline(always)]
fn dense<F: Ordered, const DEPTH: usize, const ROUND: usize>(a: StreamArgs) {
    if !wgmma::AVAILABLE {
        thread::trap("wgmma on a target without");
    }
    thread::wait_for_previous();
    thread::start_next();
    let place = Place::of((a.shape.n, a.row_blocks), TILES as u32, thread::block_idx_x());
    let (weights, rows) = ((a.weights, place.matrix, place.run), Strided::of(a.rows, place.matrix, place.block));
    let totals = multiply::<F, _, DEPTH, ROUND>(weights, (a.x, rows), a.shape);
    let place = Place::of((a.shape.n, a.row_blocks), TILES as u32, thread::opaque(thread::block_idx_x()));
    let rows = Strided::of(a.rows, place.matrix, place.block);
    let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
    let (warp, lane) = (thread / LANES, thread % LANES);
    let first = (place.run as usize * TILES + warp) * TILE_N + lane / 4;
    unroll!(m in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 below MT; {
        unroll!(column in 0 1; {
            let row = m * TILE_M + lane % 4 * 2 + column;
            if row < rows.count() {
                unroll!(half in 0 1; {
                    let n = first + half * TILE_M;
                    if n < a.shape.n as usize {
                        let (to, sum) = (rows.y(row) + n, totals[m][half * 2 + column]);
                        a.y.set(to, if a.rows.accumulate != 0 { a.y.get(to) + sum } else { sum });
                    }
                });
            }
        });
    });
}

/// Stages of bf16 weights, a multiple of two.
pub const BF16_DEPTH: usize = 6;
/// Stages of 4-bit weights.
pub const W4A16_DEPTH: usize = 8;

const _: () = {
    assert!(BF16_DEPTH.is_multiple_of(2));
    assert!(shared_bytes(BF16_DEPTH, Bf16::TILE_WORDS) <= crate::SHARED_LIMIT_LARGE);
    assert!(shared_bytes(W4A16_DEPTH, <f32 as Scale>::TILE_WORDS) <= crate::SHARED_LIMIT_LARGE);
};

/// bf16 weights.
#[kernel]
pub fn gemm_bf16_wgmma(a: StreamArgs) {
    dense::<Bf16, BF16_DEPTH, 2>(a);
}

/// 4-bit weights, bf16 scales.
#[kernel]
pub fn gemm_w4a16_wgmma(a: StreamArgs) {
    dense::<W4a16<bf16>, W4A16_DEPTH, 4>(a);
}

/// 4-bit weights, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_wgmma(a: StreamArgs) {
    dense::<W4a16<f32>, W4A16_DEPTH, 2>(a);
}
