//! Products with f32 weights `[n, k]`, rows as in the file, any k: fused multiply-adds, nothing rounded but the sums.
//! See [`super::gemm`] for who owns what.
//!
//! Lane `(g, c)` sums, for weight rows `g` and `g + 8` and up to 8 rows of x, the k with `k / 4 % 4 == c`; the four
//! lanes of a row then add up in a butterfly, and the one that stands for the row of x in the fragment keeps the sum.

use cuda_std::{Global, kernel, math, warp};

use super::gemm::{CHUNK_K, FRAGMENT, Lane, Part, Rows, TILE_M, Weights, dense, grouped, unroll};
use crate::args::linear::{F32Weights, GemmArgs, GroupedGemmArgs};

/// Consecutive k that a lane reads at a time.
const LANE_K: usize = 4;
/// k that the four lanes of a row read at a time.
const ROW_K: usize = 4 * LANE_K;
/// Weight rows of a lane.
const LANE_ROWS: usize = 2;

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

impl Weights for F32Weights {
    type X = f32;

    #[inline(always)]
    fn accumulate<R: Rows, const TILES: usize>(
        &self,
        part: Part,
        x: Global<f32>,
        rows: R,
        sums: &mut [[f32; FRAGMENT]; TILES],
    ) {
        let lane = Lane::this();
        let weights = part.weight_rows(lane).map(|row| row * part.k);
        let chunks = part.k.div_ceil(CHUNK_K);
        for (t, sums) in sums.iter_mut().enumerate() {
            let first = t * TILE_M;
            let count = rows.count();
            let mut row = [0; TILE_M];
            unroll!(m < TILE_M, { row[m] = rows.x((first + m).min(count - 1)) });
            let mut own = [[0.0; LANE_ROWS]; TILE_M];
            let mut chunk = part.chunk;
            while chunk < chunks {
                for step in 0..CHUNK_K / ROW_K {
                    let k = chunk * CHUNK_K + step * ROW_K + lane.c * LANE_K;
                    let left = part.k.saturating_sub(k);
                    let w = weights.map(|start| load(self.rows, start + k, left, part.wide));
                    unroll!(m < TILE_M, {
                        if first + m < count {
                            let x = load(x, row[m] + k, left, part.wide);
                            for r in 0..LANE_ROWS {
                                for j in 0..LANE_K {
                                    own[m][r] = math::fma(w[r][j], x[j], own[m][r]);
                                }
                            }
                        }
                    });
                }
                chunk += part.stride;
            }
            unroll!(m < TILE_M, {
                if first + m < count {
                    for r in 0..LANE_ROWS {
                        let pair = own[m][r] + warp::shfl_xor(own[m][r], 1);
                        let all = pair + warp::shfl_xor(pair, 2);
                        if lane.c == m / 2 {
                            sums[r * 2 + m % 2] = all;
                        }
                    }
                }
            });
        }
    }
}

/// Up to 8 rows a block.
#[kernel]
pub fn gemm_f32(a: GemmArgs<F32Weights, f32>) {
    dense::<_, 1>(a);
}

/// Rows gathered by expert.
#[kernel]
pub fn grouped_gemm_f32(a: GroupedGemmArgs<F32Weights, f32>) {
    grouped(a);
}
