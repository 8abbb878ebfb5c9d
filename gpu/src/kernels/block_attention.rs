//! The drafter's attention: a block of rows sees the whole context and itself, in both directions; grouped heads. With
//! a window w, row r sees w positions only, the last of them its own: causal, as sliding layers of published drafters.
//!
//! ```text
//! s[r, h, j] = scale * q[r, h] . k[j, h / group]               j in 0 .. S + rows, group = heads / kv_heads
//!                                                              window: j in S + r + 1 - w .. S + r + 1
//! out[r, h]  = sum_j w_j v[j, h / group] / sum_j w_j           w_j = 2^(scale log2 e * s_j - base)
//! ```
//!
//! The heads of a group share keys, so queries r * group + (h % group) of one group are packed into 16-row tiles. Grid:
//! x = tiles, y = key heads. Each of a block's 8 warps takes every eighth step of 16 keys and keeps base, sum and
//! weighted values of its own; queries and weights stay in registers, keys and values come from global memory (see
//! [`super::fragments`]), each read by one warp. At the end the warps' sums are added in ascending order through shared
//! memory. Weights are rounded to bf16 for the product, and sums are of the rounded ones. A base is the largest score
//! so far, up to a whole number (see [`softmax_base`]).

use cuda_std::{dynamic_shared, kernel, math, thread, warp};

use super::fragments::{CHUNK, LANE_COLUMNS, PIECE, SPAN, Sums, TILE, add_scores, add_values, lane_columns};
use super::fragments::{scale_rows, softmax_base, store};
use crate::args::attention::BlockAttentionArgs;
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Packed queries of a block.
pub const TILE_ROWS: usize = TILE;

const WARPS: usize = (THREADS / warp::WARP) as usize;
/// Keys of a step: two `mma` tiles of scores, one `mma` step of values.
const STEP: usize = 16;
/// Neighbouring values that a thread adds up and stores at the end.
const OWN: usize = 4;

/// Values of the warps' statistics (base and sum a row), in front of their sums.
const STATS: usize = 2 * WARPS * TILE;

/// Bytes of dynamic shared memory of a block for heads of `head_dim`.
pub const fn shared_bytes(head_dim: usize) -> u32 {
    ((STATS + WARPS * TILE * head_dim) * size_of::<f32>()) as u32
}

const _: () = assert!(shared_bytes(128) <= crate::SHARED_LIMIT);

#[kernel]
pub fn block_attention_64(a: BlockAttentionArgs) {
    attention::<64, { 64 / CHUNK }, { 64 / SPAN }>(a);
}

#[kernel]
pub fn block_attention_128(a: BlockAttentionArgs) {
    attention::<128, { 128 / CHUNK }, { 128 / SPAN }>(a);
}

#[inline(always)]
fn attention<const DIM: usize, const CHUNKS: usize, const SPANS: usize>(a: BlockAttentionArgs) {
    let stats = dynamic_shared::<f32>(0, STATS as u32);
    let shared_sums = dynamic_shared::<f32>((STATS * size_of::<f32>()) as u32, (WARPS * TILE * DIM) as u32);
    let lane = warp::lane_id() as usize;
    let (warp, group, quad) = (warp::warp_id() as usize, lane / 4, lane % 4);
    let shared_heads = math::div(a.heads, a.kv_heads);
    let kv_head = thread::block_idx_y();
    let committed = a.state.get(state::COMMITTED) as usize;
    let (end, window) = (committed + a.rows as usize, a.window as usize);
    // Element of a packed query's first value; none past the last.
    let query = |row: usize| {
        let packed = thread::block_idx_x() * TILE as u32 + row as u32;
        let (r, h) = (math::div(packed, shared_heads), math::rem(packed, shared_heads));
        let at = (r as usize * a.heads as usize + (kv_head * shared_heads + h) as usize) * DIM;
        if r < a.rows { Some(at) } else { None }
    };
    // The keys that a packed query sees: from the first up to the last, which is not one of them.
    let seen_by = |row: usize| {
        let r = math::div(thread::block_idx_x() * TILE as u32 + row as u32, shared_heads) as usize;
        let behind = committed + r + 1;
        if window == 0 { (0, end) } else { (behind.saturating_sub(window), behind.min(end)) }
    };
    let piece = |at: Option<usize>, d: usize| at.map_or([0; 4], |at| a.q.ld16(at + d));

    let (low, high) = (query(group), query(group + 8));
    let mut q = [[[0u32; 4]; 2]; CHUNKS];
    unroll!(c in 0 1 2 3 below CHUNKS; {
        q[c] = [piece(low, c * CHUNK + quad * PIECE), piece(high, c * CHUNK + quad * PIECE)];
    });

    let mut base = [f32::NEG_INFINITY; 2];
    let mut sum = [0f32; 2];
    let mut acc: [Sums; SPANS] = [[[0.0; 4]; PIECE]; SPANS];
    let head = kv_head as usize * DIM;
    let stride = a.kv_heads as usize * DIM;
    let sees = [seen_by(group), seen_by(group + 8)];
    // No row of the tile sees a key in front of the first row's first.
    let mut key0 = (seen_by(0).0 / STEP + warp) * STEP;
    while key0 < end {
        // Keys past the last are not read: their lanes read the last one, with weight 0.
        let row = |i: usize| (key0 + i).min(end - 1) * stride + head;
        let mut s = [[0f32; 4]; 2];
        unroll!(n in 0 1; {
            unroll!(c in 0 1 2 3 below CHUNKS; {
                let key = a.k.ld16(row(8 * n + group) + c * CHUNK + quad * PIECE);
                add_scores(&mut s[n], q[c][0], q[c][1], key);
            });
        });
        unroll!(half in 0 1; {
            let mut new = base[half];
            unroll!(n in 0 1; {
                unroll!(i in 0 1; {
                    let key = key0 + 8 * n + 2 * quad + i;
                    let seen = key >= sees[half].0 && key < sees[half].1;
                    let score = s[n][2 * half + i] * a.scale_log2;
                    s[n][2 * half + i] = if seen { score } else { f32::NEG_INFINITY };
                    new = new.max(s[n][2 * half + i]);
                });
            });
            new = new.max(warp::shfl_xor(new, 1));
            new = math::ceil(new.max(warp::shfl_xor(new, 2)));
            let subtract = softmax_base(new);
            let shrink = math::exp2(base[half] - subtract);
            base[half] = new;
            sum[half] *= shrink;
            unroll!(span in 0 1 below SPANS; {
                scale_rows(&mut acc[span], half, shrink);
            });
            unroll!(n in 0 1; {
                unroll!(i in 0 1; {
                    s[n][2 * half + i] = math::exp2(s[n][2 * half + i] - subtract);
                });
            });
        });
        // The scores' fragment is the weights' fragment: keys 2 quad, 2 quad + 1, and 8 further on.
        let w = [
            math::pack_bf16(s[0][0], s[0][1]),
            math::pack_bf16(s[0][2], s[0][3]),
            math::pack_bf16(s[1][0], s[1][1]),
            math::pack_bf16(s[1][2], s[1][3]),
        ];
        unroll!(half in 0 1; {
            unroll!(n in 0 1; {
                sum[half] += math::bf16_lo(w[2 * n + half]) + math::bf16_hi(w[2 * n + half]);
            });
        });
        unroll!(span in 0 1 below SPANS; {
            let value = |i: usize| a.v.ld16(row(2 * quad + i) + span * SPAN + group * PIECE);
            add_values(&mut acc[span], w, [value(0), value(1), value(8), value(9)]);
        });
        key0 += WARPS * STEP;
    }

    unroll!(half in 0 1; {
        let pair = sum[half] + warp::shfl_xor(sum[half], 1);
        let total = pair + warp::shfl_xor(pair, 2);
        if quad == 0 {
            let at = warp * TILE + half * 8 + group;
            stats.set(at, base[half]);
            stats.set(WARPS * TILE + at, total);
        }
        unroll!(span in 0 1 below SPANS; {
            let values = lane_columns(&acc[span], half, 1.0);
            let at = (warp * TILE + half * 8 + group) * DIM + span * SPAN + LANE_COLUMNS * quad;
            unroll!(j in 0 1 2 3; {
                let [a, b, c, d] = [values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]];
                shared_sums.st16(at + 4 * j, [a.to_bits(), b.to_bits(), c.to_bits(), d.to_bits()]);
            });
        });
    });
    thread::sync_threads();

    let mut i = thread::thread_idx_x() as usize * OWN;
    while i < TILE * DIM {
        let (row, column) = (i / DIM, i % DIM);
        if let Some(at) = query(row) {
            let mut max = f32::NEG_INFINITY;
            for w in 0..WARPS {
                max = max.max(stats.get(w * TILE + row));
            }
            let base = softmax_base(max);
            let mut total = 0.0;
            let mut values = [0f32; OWN];
            for w in 0..WARPS {
                let share = math::exp2(stats.get(w * TILE + row) - base);
                total = math::fma(share, stats.get((WARPS + w) * TILE + row), total);
                let part = shared_sums.ld16((w * TILE + row) * DIM + column);
                unroll!(j in 0 1 2 3; {
                    values[j] = math::fma(share, f32::from_bits(part[j]), values[j]);
                });
            }
            unroll!(j in 0 1 2 3; {
                values[j] *= 1.0 / total;
            });
            store(a.out_f32, a.out_bf16, at + column, values);
        }
        i += THREADS as usize * OWN;
    }
}
