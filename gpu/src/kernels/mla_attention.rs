//! Attention over the latent cache (absorbed multi-head latent attention), for a tree of rows.
//!
//! ```text
//! s[r, h, j] = scale * sum_d q[r, h, d] cache[j, d]            d in 0..KEY
//! j visible to r:  j < S, or j = S + i with bit i of ancestors[r]
//! out[r, h]  = sum_j w_j cache[j, ..LATENT] / sum_j w_j        w_j = 2^(scale log2 e * (s_j - max))
//! ```
//!
//! The cache row is key and (its first part) value for all heads, so queries are packed: query r * heads + h is one row
//! of a 16-row tile. Grid: x = blocks of 16 or 64 packed queries, y = splits of the context. A block takes 128 keys at
//! a time; each of its 8 warps
//!
//! 1. scores its own 16 of them against all the block's queries (queries in shared memory, keys from global memory);
//! 2. finds the rows' new maxima together with the others, turns its scores into weights and leaves these, rounded to
//!    bf16, in shared memory; sums are of the unrounded weights;
//! 3. multiplies all 128 weights with its own 64 columns of the latent, whose sums it keeps in registers.
//!
//! A key is read twice, as key from memory and as value soon after from the first-level cache, and each time by one
//! warp only: shared memory would save nothing, and holds the queries instead. See [`super::fragments`] for the loads.
//! Keys past the last are not read: their lanes read the last one, with weight 0.
//!
//! Split y owns a whole number of tiles that follows from S and the grid's splits, not from the number of rows, and
//! with more than one split leaves sums undivided for [`super::mla_merge`], with maximum and sum of weights. A split
//! without keys leaves (-inf, 0) and no columns. A row's bits depend on S, its keys and the number of splits alone.

use cuda_std::{GlobalMut, Shared, bf16, dynamic_shared, kernel, math, thread, warp};

use super::fragments::{CHUNK, LANE_COLUMNS, PIECE, SPAN, Sums, TILE, add_scores, add_values, lane_columns};
use super::fragments::{scale_rows, softmax_base, store};
use crate::args::attention::{KEY, LATENT, MlaAttentionArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Packed queries of a small block.
pub const SMALL_ROWS: usize = 16;
/// Packed queries of a large block.
pub const LARGE_ROWS: usize = 64;
/// Keys that a block takes at a time.
pub const KEY_TILE: usize = 128;
/// Most rows of a launch.
pub const MAX_ROWS: usize = 32 * MAX_WORDS;

const WARPS: usize = (THREADS / warp::WARP) as usize;
/// Keys that a warp scores, and their `mma` tiles.
const WARP_KEYS: usize = KEY_TILE / WARPS;
const KEY_TILES: usize = WARP_KEYS / 8;
/// Keys of an `mma` step of values, and those of one lane.
const STEP: usize = 16;
const LANE_KEYS: usize = STEP / 4;
/// Words of ancestors of a row, and of their copy in shared memory: a word of zeros behind.
const MAX_WORDS: usize = 3;
const ANCESTOR_STRIDE: usize = MAX_WORDS + 1;
/// Values from a query to the next in shared memory: two rows fall into different halves of the banks.
const QUERY_STRIDE: usize = KEY + CHUNK;
/// Values from a row of weights to the next: four rows fall into different quarters of the banks.
const WEIGHT_STRIDE: usize = KEY_TILE + STEP;

const _: () = assert!(WARPS * SPAN == LATENT, "a warp owns one span of columns");

/// Scores, then weights, of a warp's keys: a lane's part of the `mma` tiles.
type Scores<const TILES: usize> = [[[f32; 4]; KEY_TILES]; TILES];

/// Byte offsets of the parts of a block's shared memory, and its size, for `rows` packed queries.
struct Layout {
    weights: u32,
    ancestors: u32,
    stats: u32,
    max: u32,
    bytes: u32,
}

const fn layout(rows: usize) -> Layout {
    let rows = rows as u32;
    let weights = rows * (QUERY_STRIDE * size_of::<bf16>()) as u32;
    let ancestors = weights + rows * (WEIGHT_STRIDE * size_of::<bf16>()) as u32;
    let stats = ancestors + rows * (ANCESTOR_STRIDE * size_of::<u32>()) as u32;
    let max = stats + rows * (WARPS * size_of::<f32>()) as u32;
    Layout { weights, ancestors, stats, max, bytes: max + rows * size_of::<f32>() as u32 }
}

/// Bytes of dynamic shared memory of a block of `rows` packed queries.
pub const fn shared_bytes(rows: usize) -> u32 {
    layout(rows).bytes
}

const _: () = assert!(shared_bytes(LARGE_ROWS) <= crate::SHARED_LIMIT);

/// A block's shared memory.
#[derive(Clone, Copy)]
struct Tiles {
    /// `[rows, QUERY_STRIDE]`.
    queries: Shared<bf16>,
    /// `[rows, WEIGHT_STRIDE]`.
    weights: Shared<bf16>,
    /// `[rows, ANCESTOR_STRIDE]`: the ancestor bits of each packed query.
    ancestors: Shared<u32>,
    /// `[WARPS, rows]`: what each warp found.
    stats: Shared<f32>,
    /// `[rows]`: largest score so far.
    max: Shared<f32>,
}

/// Where a lane is in the fragments (see [`cuda_std::mma`]), and its warp in the block.
#[derive(Clone, Copy)]
struct Place {
    warp: usize,
    group: usize,
    quad: usize,
}

/// Keys.
#[derive(Clone, Copy)]
struct Context {
    /// S: keys before it are visible to all.
    committed: u32,
    /// First of this block.
    first: u32,
    /// One past the last of this block.
    last: u32,
}

#[kernel]
pub fn mla_attention_16(a: MlaAttentionArgs) {
    attention::<{ SMALL_ROWS / TILE }>(a);
}

#[kernel]
pub fn mla_attention_64(a: MlaAttentionArgs) {
    attention::<{ LARGE_ROWS / TILE }>(a);
}

#[inline(always)]
fn attention<const TILES: usize>(a: MlaAttentionArgs) {
    let rows = TILES * TILE;
    let shared = tiles(rows);
    let lane = warp::lane_id() as usize;
    let at = Place { warp: warp::warp_id() as usize, group: lane / 4, quad: lane % 4 };
    let queries = a.rows as usize * a.heads as usize;
    let query0 = thread::block_idx_x() as usize * rows;
    let (split, splits) = (thread::block_idx_y() as usize, thread::grid_dim_y() as usize);
    let context = context(&a);

    if context.first >= context.last {
        let query = query0 + thread::thread_idx_x() as usize;
        if query < queries && query < query0 + rows {
            a.partial_max_sum.set((split * queries + query) * 2, f32::NEG_INFINITY);
            a.partial_max_sum.set((split * queries + query) * 2 + 1, 0.0);
        }
        return;
    }
    load(&a, shared, query0, queries, rows);
    thread::sync_threads();

    let mut sum = [[0f32; 2]; TILES];
    let mut acc: [Sums; TILES] = [[[0.0; 4]; PIECE]; TILES];
    let mut key0 = context.first;
    while key0 < context.last {
        let mut s = scores::<TILES>(&a, shared, at, context, key0);
        warp_max(&s, shared.stats, at);
        thread::sync_threads();
        let max = weights(&mut s, shared, at, &mut sum, &mut acc);
        thread::sync_threads();
        if at.warp == 0 && at.quad == 0 {
            unroll!(tile in 0 1 2 3 below TILES; {
                shared.max.set(tile * TILE + at.group, max[tile][0]);
                shared.max.set(tile * TILE + 8 + at.group, max[tile][1]);
            });
        }
        values::<TILES>(&a, shared.weights, at, context, key0, &mut acc);
        key0 += KEY_TILE as u32;
    }

    unroll!(tile in 0 1 2 3 below TILES; {
        unroll!(half in 0 1; {
            let pair = sum[tile][half] + warp::shfl_xor(sum[tile][half], 1);
            let quad = pair + warp::shfl_xor(pair, 2);
            if at.quad == 0 {
                shared.stats.set(at.warp * rows + tile * TILE + half * 8 + at.group, quad);
            }
        });
    });
    thread::sync_threads();
    let column = at.warp * SPAN + LANE_COLUMNS * at.quad;
    unroll!(tile in 0 1 2 3 below TILES; {
        unroll!(half in 0 1; {
            let row = tile * TILE + half * 8 + at.group;
            let query = query0 + row;
            if query < queries {
                let mut total = 0.0;
                for w in 0..WARPS {
                    total += shared.stats.get(w * rows + row);
                }
                if splits == 1 {
                    let out = lane_columns(&acc[tile], half, 1.0 / total);
                    store(a.out_f32, a.out_bf16, query * LATENT + column, out);
                } else {
                    let to = split * queries + query;
                    store(a.partial, GlobalMut::EMPTY, to * LATENT + column, lane_columns(&acc[tile], half, 1.0));
                    if at.warp == 0 && at.quad == 0 {
                        a.partial_max_sum.set(to * 2, shared.max.get(row));
                        a.partial_max_sum.set(to * 2 + 1, total);
                    }
                }
            }
        });
    });
}

#[inline(always)]
fn tiles(rows: usize) -> Tiles {
    let layout = layout(rows);
    Tiles {
        queries: dynamic_shared(0, (rows * QUERY_STRIDE) as u32),
        weights: dynamic_shared(layout.weights, (rows * WEIGHT_STRIDE) as u32),
        ancestors: dynamic_shared(layout.ancestors, (rows * ANCESTOR_STRIDE) as u32),
        stats: dynamic_shared(layout.stats, (rows * WARPS) as u32),
        max: dynamic_shared(layout.max, rows as u32),
    }
}

/// The keys of this block's split. `MAX_ROWS` in place of the rows: the same division for any number of them.
#[inline(always)]
fn context(a: &MlaAttentionArgs) -> Context {
    let committed = a.state.get(state::COMMITTED);
    let end = committed + a.rows;
    let tiles = (committed + MAX_ROWS as u32).div_ceil(KEY_TILE as u32);
    let span = KEY_TILE as u32 * math::div(tiles + thread::grid_dim_y() - 1, thread::grid_dim_y());
    let first = (thread::block_idx_y() * span).min(end);
    Context { committed, first, last: (first + span).min(end) }
}

/// The block's queries and their ancestors into shared memory, zeros past the last; no maximum yet.
#[inline(always)]
fn load(a: &MlaAttentionArgs, shared: Tiles, query0: usize, queries: usize, rows: usize) {
    let pieces = KEY / PIECE;
    let mut i = thread::thread_idx_x() as usize;
    while i < rows * pieces {
        let (row, d) = (i / pieces, i % pieces * PIECE);
        let query = query0 + row;
        let words = if query < queries { a.q.ld16(query * KEY + d) } else { [0; 4] };
        shared.queries.st16(row * QUERY_STRIDE + d, words);
        i += THREADS as usize;
    }
    let mut i = thread::thread_idx_x() as usize;
    while i < rows * ANCESTOR_STRIDE {
        let (query, word) = (query0 + i / ANCESTOR_STRIDE, i % ANCESTOR_STRIDE);
        let mut bits = 0;
        if query < queries && word < a.words as usize {
            let row = math::div(query as u32, a.heads) as usize;
            bits = a.ancestors.get(row * a.words as usize + word);
        }
        shared.ancestors.set(i, bits);
        i += THREADS as usize;
    }
    let row = thread::thread_idx_x() as usize;
    if row < rows {
        shared.max.set(row, f32::NEG_INFINITY);
    }
}

/// Bit i: whether the block's packed query `row` sees key `own + i`, for the keys of a warp.
#[inline(always)]
fn visible(ancestors: Shared<u32>, context: Context, row: usize, own: u32) -> u32 {
    let ones = |n: u32| if n < 32 { (1 << n) - 1 } else { u32::MAX };
    if own >= context.last {
        return 0;
    }
    let before = context.committed.saturating_sub(own);
    let node = own.saturating_sub(context.committed);
    let word = row * ANCESTOR_STRIDE + node as usize / 32;
    let nodes = u64::from(ancestors.get(word)) | u64::from(ancestors.get(word + 1)) << 32;
    let tree = (nodes >> (node % 32)) as u32;
    let tree = if before < 32 { tree << before } else { 0 };
    (ones(before) | tree) & ones(context.last - own)
}

/// Scaled scores, in base 2, of this warp's keys of the tile at `key0`; -inf where a query does not see a key.
#[inline(always)]
fn scores<const TILES: usize>(
    a: &MlaAttentionArgs,
    shared: Tiles,
    at: Place,
    context: Context,
    key0: u32,
) -> Scores<TILES> {
    let mut s = [[[0f32; 4]; KEY_TILES]; TILES];
    let own = key0 + (at.warp * WARP_KEYS) as u32;
    if own < context.last {
        let row = |n: u32| (own + n * 8 + at.group as u32).min(context.last - 1) as usize * KEY;
        let (first, second) = (row(0), row(1));
        let mut d = at.quad * PIECE;
        while d < KEY {
            let keys = [a.cache.ld16(first + d), a.cache.ld16(second + d)];
            unroll!(tile in 0 1 2 3 below TILES; {
                let q = (tile * TILE + at.group) * QUERY_STRIDE + d;
                let (low, high) = (shared.queries.ld16(q), shared.queries.ld16(q + 8 * QUERY_STRIDE));
                unroll!(n in 0 1; {
                    add_scores(&mut s[tile][n], low, high, keys[n]);
                });
            });
            d += CHUNK;
        }
    }
    let masked = key0 + KEY_TILE as u32 > context.committed;
    unroll!(tile in 0 1 2 3 below TILES; {
        unroll!(half in 0 1; {
            let row = tile * TILE + half * 8 + at.group;
            let mut seen = u32::MAX;
            if masked {
                seen = visible(shared.ancestors, context, row, own) >> (2 * at.quad);
            }
            unroll!(n in 0 1; {
                unroll!(i in 0 1; {
                    let score = s[tile][n][2 * half + i] * a.scale_log2;
                    s[tile][n][2 * half + i] = if seen >> (8 * n + i) & 1 != 0 { score } else { f32::NEG_INFINITY };
                });
            });
        });
    });
    s
}

/// Each row's largest score of this warp into `stats`.
#[inline(always)]
fn warp_max<const TILES: usize>(s: &Scores<TILES>, stats: Shared<f32>, at: Place) {
    unroll!(tile in 0 1 2 3 below TILES; {
        unroll!(half in 0 1; {
            let mut max = f32::NEG_INFINITY;
            unroll!(n in 0 1; {
                max = max.max(s[tile][n][2 * half]).max(s[tile][n][2 * half + 1]);
            });
            max = max.max(warp::shfl_xor(max, 1));
            max = max.max(warp::shfl_xor(max, 2));
            if at.quad == 0 {
                stats.set(at.warp * TILES * TILE + tile * TILE + half * 8 + at.group, max);
            }
        });
    });
}

/// Scores to weights, rounded in shared memory; what was summed so far shrinks to the new maxima, which are returned.
#[inline(always)]
fn weights<const TILES: usize>(
    s: &mut Scores<TILES>,
    shared: Tiles,
    at: Place,
    sum: &mut [[f32; 2]; TILES],
    acc: &mut [Sums; TILES],
) -> [[f32; 2]; TILES] {
    let mut max = [[0f32; 2]; TILES];
    unroll!(tile in 0 1 2 3 below TILES; {
        unroll!(half in 0 1; {
            let row = tile * TILE + half * 8 + at.group;
            let old = shared.max.get(row);
            let mut new = old;
            for w in 0..WARPS {
                new = new.max(shared.stats.get(w * TILES * TILE + row));
            }
            max[tile][half] = new;
            let base = softmax_base(new);
            let shrink = math::exp2(old - base);
            sum[tile][half] *= shrink;
            scale_rows(&mut acc[tile], half, shrink);
            unroll!(n in 0 1; {
                let low = math::exp2(s[tile][n][2 * half] - base);
                let high = math::exp2(s[tile][n][2 * half + 1] - base);
                sum[tile][half] += low + high;
                let key = at.warp * WARP_KEYS + 8 * n + 2 * at.quad;
                shared.weights.st4(row * WEIGHT_STRIDE + key, math::pack_bf16(low, high));
            });
        });
    });
    max
}

/// Adds the weighted values of the tile at `key0` to this warp's columns.
#[inline(always)]
fn values<const TILES: usize>(
    a: &MlaAttentionArgs,
    weights: Shared<bf16>,
    at: Place,
    context: Context,
    key0: u32,
    acc: &mut [Sums; TILES],
) {
    let column = at.warp * SPAN + at.group * PIECE;
    let mut step = 0;
    while step < KEY_TILE && key0 + (step as u32) < context.last {
        let own = step + at.quad * LANE_KEYS;
        let value = |i: usize| {
            let key = (key0 + (own + i) as u32).min(context.last - 1);
            a.cache.ld16(key as usize * KEY + column)
        };
        let v = [value(0), value(1), value(2), value(3)];
        unroll!(tile in 0 1 2 3 below TILES; {
            let w = (tile * TILE + at.group) * WEIGHT_STRIDE + own;
            let (low, high) = (weights.ld8(w), weights.ld8(w + 8 * WEIGHT_STRIDE));
            add_values(&mut acc[tile], [low[0], high[0], low[1], high[1]], v);
        });
        step += STEP;
    }
}
