//! Products with f32 weights `[n, k]`, rows as in the file, any k: `y[m, n] (+)= sum_k x[m, k] W[n, k]`, fused
//! multiply-adds, nothing rounded but the sums.
//!
//! Grid: x = blocks of 8 rows of x (dense) or blocks that take tiles of pairs in turn (grouped), y = blocks of tiles of
//! 16 weight rows, z = the matrix. A tile is one warp's, or `k_split` warps', which take its k in chunks of 64 in turn;
//! their sums are added in ascending order through shared memory. How k is divided follows from the matrix's shape
//! alone, so a row's bits do not depend on how many rows go with it.
//!
//! Lane `(g, c)` sums, for weight rows `g` and `g + 8` and up to 8 rows of x, the k with `k / 4 % 4 == c`; the four
//! lanes of a row then add up in a butterfly, and the lane `c` keeps the sums of rows `2c` and `2c + 1` of x. Rows past
//! the last are read as copies of the last and never stored: no lane branches alone.

use cuda_std::{Global, GlobalMut, dynamic_shared, kernel, math, thread, warp};

use super::stream::{CHUNK_K, FRAGMENT, Lane, TILE_M, TILE_N};
use super::stream_rows::{Gathered, Rows, Strided};
use crate::args::linear::{ABSENT, GemmArgs, GemmShape, GroupedGemmArgs, GroupedRows};
use crate::unroll::unroll;

/// Warps of a block.
pub const MAX_WARPS: u32 = 8;
/// Consecutive k that a lane reads at a time.
const LANE_K: usize = 4;
/// k that the four lanes of a row read at a time.
const ROW_K: usize = 4 * LANE_K;
/// Weight rows of a lane.
const LANE_ROWS: usize = 2;

/// Bytes of dynamic shared memory of a block.
pub const fn shared_bytes(k_split: u32, warps: u32) -> u32 {
    if k_split == 1 { 0 } else { warps * warp::WARP * (FRAGMENT * size_of::<f32>()) as u32 }
}

const _: () = assert!(shared_bytes(MAX_WARPS, MAX_WARPS) <= crate::SHARED_LIMIT);

/// Four values from element `i` on, zeros past the first `left`. `wide`: all four or none are there, aligned.
#[inline(always)]
fn load(view: Global<f32>, i: usize, left: usize, wide: bool) -> [f32; LANE_K] {
    let mut values = [0.0; LANE_K];
    if wide {
        if left > 0 {
            values = view.ld16(i).map(f32::from_bits);
        }
    } else {
        for (j, value) in values.iter_mut().enumerate() {
            if j < left {
                *value = view.get(i + j);
            }
        }
    }
    values
}

/// A lane's sums of the chunks `member`, `member + k_split`, … of a tile.
#[inline(always)]
fn accumulate<R: Rows>(
    weights: [usize; LANE_ROWS],
    w: Global<f32>,
    x: Global<f32>,
    shape: GemmShape,
    member: usize,
    rows: R,
) -> [f32; FRAGMENT] {
    let lane = Lane::this();
    let (k, wide) = (shape.k as usize, shape.wide != 0);
    let count = rows.count();
    let mut row = [0; TILE_M];
    unroll!(m in 0 1 2 3 4 5 6 7; { row[m] = rows.x(m.min(count - 1)) });
    let mut own = [[0.0; LANE_ROWS]; TILE_M];
    let mut chunk = member;
    while chunk < k.div_ceil(CHUNK_K) {
        for step in 0..CHUNK_K / ROW_K {
            let at = chunk * CHUNK_K + step * ROW_K + lane.c * LANE_K;
            let left = k.saturating_sub(at);
            let w = weights.map(|start| load(w, start + at, left, wide));
            unroll!(m in 0 1 2 3 4 5 6 7; {
                if m < count {
                    let x = load(x, row[m] + at, left, wide);
                    for r in 0..LANE_ROWS {
                        for j in 0..LANE_K {
                            own[m][r] = math::fma(w[r][j], x[j], own[m][r]);
                        }
                    }
                }
            });
        }
        chunk += shape.k_split as usize;
    }
    let mut sums = [0.0; FRAGMENT];
    unroll!(m in 0 1 2 3 4 5 6 7; {
        if m < count {
            for r in 0..LANE_ROWS {
                let pair = own[m][r] + warp::shfl_xor(own[m][r], 1);
                let all = pair + warp::shfl_xor(pair, 2);
                if lane.c == m / 2 {
                    sums[r * 2 + m % 2] = all;
                }
            }
        }
    });
    sums
}

/// One block's products: its warps' tiles of `matrix` times `rows`. All threads of the block come here together.
#[inline(always)]
fn multiply<R: Rows>(
    w: Global<f32>,
    x: Global<f32>,
    y: GlobalMut<f32>,
    shape: GemmShape,
    matrix: usize,
    rows: R,
    add: bool,
) {
    let warps = thread::block_dim_x() / warp::WARP;
    let (team, member) = (math::div(warp::warp_id(), shape.k_split), math::rem(warp::warp_id(), shape.k_split));
    let tile = (thread::block_idx_y() * math::div(warps, shape.k_split) + team) as usize;
    let (n, k) = (shape.n as usize, shape.k as usize);
    let lane = Lane::this();

    let mut sums = [0.0; FRAGMENT];
    if tile * TILE_N < n {
        let first = tile * TILE_N + lane.g;
        let weights = [first, first + TILE_M].map(|row| (matrix * n + row.min(n - 1)) * k);
        sums = accumulate(weights, w, x, shape, member as usize, rows);
    }

    if shape.k_split > 1 {
        let lanes = warp::WARP as usize;
        let partial = dynamic_shared::<f32>(0, warps * warp::WARP * FRAGMENT as u32);
        let at = |warp: u32, i: usize| (warp as usize * FRAGMENT + i) * lanes + warp::lane_id() as usize;
        if member > 0 {
            unroll!(i in 0 1 2 3; { partial.set(at(warp::warp_id(), i), sums[i]) });
        }
        thread::sync_threads();
        if member == 0 {
            for other in 1..shape.k_split {
                unroll!(i in 0 1 2 3; { sums[i] += partial.get(at(warp::warp_id() + other, i)) });
            }
        }
    }

    if member == 0 {
        unroll!(i in 0 1 2 3; {
            let column = tile * TILE_N + lane.g + i / 2 * TILE_M;
            let m = lane.c * 2 + i % 2;
            if column < n && m < rows.count() {
                let to = rows.y(m) + column;
                let sum = sums[i];
                y.set(to, if add { y.get(to) + sum } else { sum });
            }
        });
    }
}

/// Up to 8 rows a block.
#[kernel]
pub fn gemm_f32(a: GemmArgs) {
    let matrix = thread::block_idx_z();
    let rows = Strided::of(a.rows, matrix, thread::block_idx_x());
    multiply(a.weights.rows, a.x, a.y, a.shape, matrix as usize, rows, a.rows.accumulate != 0);
}

/// Rows gathered by expert.
#[kernel]
pub fn grouped_gemm_f32(a: GroupedGemmArgs) {
    let GroupedRows { order, tiles, slots, pairs_per_row, .. } = a.rows;
    let count = tiles.get(0) as usize;
    let mut tile = thread::block_idx_x() as usize;
    while tile < count {
        let word = |i| tiles.get(1 + tile * 3 + i);
        let matrix = slots.get(word(0) as usize);
        if matrix != ABSENT {
            let rows = Gathered { order, first: word(1), count: word(2), pairs_per_row, n: a.shape.n, k: a.shape.k };
            multiply(a.weights.rows, a.x, a.y, a.shape, matrix as usize, rows, false);
            if a.shape.k_split > 1 {
                // The next tile writes the partial sums that this one's first warps may still be reading.
                thread::sync_threads();
            }
        }
        tile += thread::grid_dim_x() as usize;
    }
}
