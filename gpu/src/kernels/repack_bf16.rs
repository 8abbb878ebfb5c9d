//! Puts bf16 weights as a checkpoint holds them into the order in which [`super::gemm_bf16`] reads them.
//!
//! In: `rows [matrices, n, k]`, k a multiple of 16. Out: the layout drawn in `gemm_bf16`; rows past n and k past the
//! last become zero. Nothing is rounded.
//!
//! Grid: x = blocks of 8 chunks. A warp owns one tile's chunk; its lanes write what they will read in the product.

use cuda_std::{kernel, math, thread, warp};

use super::gemm_bf16::{TILE_WORDS, operand_word};
use super::stream::{CHUNK_K, LANE_K, Lane, STEP_K, TILE_M, TILE_N};
use crate::args::linear::RepackBf16Args;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Chunks a block.
pub const CHUNKS: u32 = THREADS / warp::WARP;

#[kernel]
pub fn repack_bf16(a: RepackBf16Args) {
    let (n, k) = (a.n as usize, a.k as usize);
    let (tiles, chunks) = (n.div_ceil(TILE_N), k.div_ceil(CHUNK_K));
    let index = thread::block_idx_x() as usize * CHUNKS as usize + warp::warp_id() as usize;
    if index < a.matrices as usize * tiles * chunks {
        let (rest, chunk) = (math::div_usize(index, chunks), math::rem_usize(index, chunks));
        let (matrix, tile) = (math::div_usize(rest, tiles), math::rem_usize(rest, tiles));
        let lane = Lane::this();
        unroll!(step in 0 1; {
            let at = chunk * CHUNK_K + step * STEP_K + lane.c * LANE_K;
            let mut values = [[0; 4]; 2];
            unroll!(half in 0 1; {
                let row = tile * TILE_N + lane.g + half * TILE_M;
                if row < n && at < k {
                    values[half] = a.rows.ld16((matrix * n + row) * k + at);
                }
            });
            let [low, high] = values;
            let to = index * TILE_WORDS;
            a.out.st16(to + operand_word(step * 2, lane.index()), [low[0], high[0], low[1], high[1]]);
            a.out.st16(to + operand_word(step * 2 + 1, lane.index()), [low[2], high[2], low[3], high[3]]);
        });
    }
}
