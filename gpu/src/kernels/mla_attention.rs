//! Attention over the latent cache (absorbed multi-head latent attention), for a tree of rows.
//!
//! ```text
//! s[r, h, j] = scale * sum_d q[r, h, d] cache[j, d]            d in 0..KEY
//! j visible to r:  j < S, or j = S + i with bit i of ancestors[r]
//! out[r, h]  = sum_j w_j cache[j, ..LATENT] / sum_j w_j        w_j = 2^(scale log2 e * s_j - base)
//! ```
//!
//! The cache row is key and (its first part) value for all heads, so queries are packed: query r * heads + h is one row
//! of the block's 16 or 32. Grid: x = blocks of packed queries, y = parts of the context. Keys come through shared
//! memory, one round (64; 32 or 16 where shared memory is small) ahead, each once a block (see [`super::mla_tile`]). In
//! a round a block's 8 warps
//!
//! 1. score: 4 warps share the tiles of queries and keys, 4 others do the same for the other half of each key's
//!    columns; the two then swap halves of their sums, so that each has whole scores of half of its rows;
//! 2. turn scores into weights, rounded to bf16 in shared memory; sums are of the rounded weights, so that the weights
//!    of a row have the sum that it is divided by (a key that counts alone is its latent, to the bit);
//! 3. multiply all weights with their own 64 columns of the latent, whose sums they keep in registers.
//!
//! The base of a row need not be its largest score, only near: bf16 and f32 have exponents to spare. It is the largest
//! of the first round, up to a whole number (see [`softmax_base`]), and grows only when a later score is [`HEADROOM`]
//! above it, which a warp finds by itself and all learn from a flag. So nothing is exchanged or rescaled in other
//! rounds.
//!
//! Part y owns keys that follow from S, rows and the grid's parts ([`part`]); with more than one part sums are left
//! undivided for [`super::mla_merge`], with base and sum of weights. A row's bits depend on the keys it sees, their
//! slots and the bounds of the parts: not on other rows, on the rows of a block, or on whether a tree is a chain.

use cuda_std::async_copy::{cp_async_commit, cp_async_wait};
use cuda_std::{EMULATED, Global, bf16, kernel, math, thread, warp};

use super::fragments::{Sums, scale_rows, softmax_base};
use super::mla_tile::{self, Fetch, PANEL, Place, SUM_KEYS, Scores, Shape, Tiles, piece_at};
use crate::args::attention::{KEY, LATENT, MlaAttentionArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Most rows of a launch: a tree of 1,024 nodes and its root.
pub const MAX_ROWS: usize = 1025;
/// Most parts of a context.
pub const MAX_PARTS: usize = 192;

/// Blocks of 32 and 16 packed queries for GPUs with 227 KiB of shared memory; rounds of 64 keys. 64 would leave
/// `mma.sync` too few registers: see [`super::mla_wide`].
pub const ROWS_32: Shape = Shape { tiles: 2, own: 1, keys8: 4 };
pub const ROWS_16: Shape = Shape { tiles: 1, own: 1, keys8: 2 };
/// Blocks for GPUs with 99 KiB: 32 packed queries and 16 keys, 16 and 32.
pub const COMPACT_32: Shape = Shape { tiles: 2, own: 1, keys8: 1 };
pub const COMPACT_16: Shape = Shape { tiles: 1, own: 1, keys8: 1 };

const _: () = assert!(ROWS_32.shared_bytes() <= crate::SHARED_LIMIT_LARGE);
const _: () = assert!(ROWS_16.shared_bytes() <= crate::SHARED_LIMIT_LARGE);
const _: () = assert!(COMPACT_32.shared_bytes() <= crate::SHARED_LIMIT);
const _: () = assert!(COMPACT_16.shared_bytes() <= crate::SHARED_LIMIT);

/// Keys of an `mma` step of values; parts begin at multiples.
pub const STEP: u32 = 16;
/// Keys that a part is worth: below, writing and merging its sums costs more than the keys.
pub const PART_KEYS: u32 = 64;
/// Binary orders of magnitude that weights may rise above 1 before the base follows.
pub const HEADROOM: f32 = 24.0;

/// Keys of this block.
#[derive(Clone, Copy)]
pub struct Keys {
    /// S: keys before it are visible to all.
    pub committed: u32,
    /// One past the last key.
    pub last: u32,
}

#[kernel]
pub fn mla_attention_32(a: MlaAttentionArgs) {
    attention::<2, 1, 4, false>(a);
}

/// Two blocks' worth of registers, though shared memory holds one: the other half is where the second kernel waits.
#[kernel(threads = THREADS, blocks = 2)]
pub fn mla_attention_16(a: MlaAttentionArgs) {
    attention::<1, 1, 2, false>(a);
}

#[kernel]
pub fn mla_attention_compact_32(a: MlaAttentionArgs) {
    attention::<2, 1, 1, false>(a);
}

#[kernel]
pub fn mla_attention_compact_16(a: MlaAttentionArgs) {
    attention::<1, 1, 1, false>(a);
}

/// The same over an f8 cache.
#[kernel]
pub fn mla_attention_f8_32(a: MlaAttentionArgs) {
    attention::<2, 1, 4, true>(a);
}

#[kernel]
pub fn mla_attention_f8_16(a: MlaAttentionArgs) {
    attention::<1, 1, 2, true>(a);
}

#[kernel]
pub fn mla_attention_f8_compact_32(a: MlaAttentionArgs) {
    attention::<2, 1, 1, true>(a);
}

#[kernel]
pub fn mla_attention_f8_compact_16(a: MlaAttentionArgs) {
    attention::<1, 1, 1, true>(a);
}

/// Parts of `keys` keys that hold any, of the `parts` of a launch.
#[inline(always)]
pub fn parts_used(keys: u32, parts: u32) -> u32 {
    keys.div_ceil(PART_KEYS).min(parts)
}

/// First key of part `part` of `parts` (from 1): whole steps, spread evenly. One past the last for `part == parts`.
/// Keys are counted in [`PART_KEYS`], so that a few rows more seldom move a bound, and with it roundings.
#[inline(always)]
pub fn part_start(keys: u32, part: u32, parts: u32) -> u32 {
    let steps = u64::from(keys.div_ceil(PART_KEYS) * (PART_KEYS / STEP));
    (math::div_usize((steps * u64::from(part)) as usize, parts as usize) as u32 * STEP).min(keys)
}

#[inline(always)]
fn attention<const TILES: usize, const OWN: usize, const KEYS8: usize, const F8: bool>(a: MlaAttentionArgs) {
    let shape = Shape { tiles: TILES, own: OWN, keys8: KEYS8 };
    let queries = a.rows as usize * a.heads as usize;
    let query0 = thread::block_idx_x() as usize * shape.rows();
    let committed = a.state.get(state::COMMITTED);
    let end = committed + a.rows;
    let (part, parts) = (thread::block_idx_y(), parts_used(end, thread::grid_dim_y()));
    if part >= parts {
        return;
    }
    let (first, last) = (part_start(end, part, parts), part_start(end, part + 1, parts));
    let keys = Keys { committed, last };
    let round = shape.keys() as u32;
    let tiles = Tiles::new(shape);

    let cache = Global::from_raw(a.cache.addr(), a.cache.len() / size_of::<bf16>());
    let mut fetch = Fetch::<F8> { cache, key: first, last, stage: 0 };
    // The launch before writes queries, not keys.
    if F8 {
        fetch.codes(tiles);
    } else {
        let mut part = 0;
        while part < Fetch::<F8>::parts(shape) {
            fetch.latent(tiles, part);
            part += 1;
        }
    }
    fetch.rotary(tiles);
    thread::wait_for_previous();
    thread::start_next();
    mla_tile::copy_queries(a.q, tiles, query0, queries);
    cp_async_commit();
    let t = mla_tile::thread_index();
    if t < shape.rows() {
        tiles.bases.set(t, f32::NEG_INFINITY);
    }
    if t < 2 {
        tiles.flags.set(t, 0);
    }

    let mut rows = Rows { base: [f32::NEG_INFINITY; OWN], sum: [[0.0; KEYS8]; OWN] };
    let mut acc: [Sums; TILES] = [[[0.0; 4]; 8]; TILES];
    let mut key = first;
    let mut stage = 0;
    while key < last {
        cp_async_wait::<0>();
        thread::sync_threads();
        if F8 {
            mla_tile::widen(tiles.latent(1), tiles.latent(0), shape.keys(), t, THREADS as usize);
            thread::sync_threads();
        }
        let next = next_seen(&a, keys, query0, shape, key + round);
        // Not kept in registers, of which the sums leave few.
        let at = Place::new(shape, thread::opaque(t as u32) as usize % THREADS as usize);
        fetch = Fetch { key: next, stage: 1 - stage, ..fetch };
        let mut s = scores::<OWN, KEYS8, F8>(shape, tiles, at, fetch, stage, key + at.first_key::<KEYS8>() < last);
        if t == 0 {
            tiles.flags.set(1 - stage, 0);
        }
        give::<OWN, KEYS8>(&s, tiles, at, stage);
        thread::sync_threads();
        take::<OWN, KEYS8>(&mut s, tiles, at, stage, a.scale_log2);
        if next > keys.committed.min(last) {
            hide::<OWN, KEYS8>(&a, &mut s, at, query0, keys, key);
        }
        let max = largest(&s);
        // In the first round all bases are found; later ones move seldom.
        let mut moves = key == first;
        let mut new = [[0.0; KEYS8]; OWN];
        if !moves {
            let mut high = false;
            unroll!(tile in 0 1 below OWN; {
                high = high || max[tile] > rows.base[tile] + HEADROOM;
            });
            if warp::any(high) && at.lane == 0 {
                tiles.flags.atomic_or(stage, 1);
            }
            new = weights(&s, &rows.base, tiles, at, stage);
            thread::sync_threads();
            moves = tiles.flags.get(stage) != 0;
        }
        if moves {
            raise::<TILES, OWN, KEYS8>(&max, tiles, at, &mut rows, &mut acc);
            new = weights(&s, &rows.base, tiles, at, stage);
            thread::sync_threads();
            unroll!(tile in 0 1 below OWN; {
                if at.column == 0 && at.quad == 0 {
                    tiles.bases.set(own_row(at, tile), rows.base[tile]);
                }
            });
        }
        unroll!(tile in 0 1 below OWN; {
            unroll!(n in 0 1 2 3 below KEYS8; {
                rows.sum[tile][n] += new[tile][n];
            });
        });
        if next < last {
            fetch.rotary(tiles);
        }
        cp_async_commit();
        let panel = tiles.latent(latents::<F8>(stage)).slice(at.warp * shape.keys() * PANEL, shape.keys() * PANEL);
        let steps = (last - key).min(round).div_ceil(STEP) as usize;
        if TILES > 1 && steps == shape.keys() / STEP as usize {
            unroll!(step in 0 1 2 3; {
                if step < shape.keys() / STEP as usize {
                    mla_tile::add_values(&mut acc, tiles.side(stage), panel, at.lane, step);
                }
            });
        } else {
            let mut step = 0;
            while step < steps {
                mla_tile::add_values(&mut acc, tiles.side(stage), panel, at.lane, step);
                step += 1;
            }
        }
        key = next;
        stage = 1 - stage;
    }
    let at = Place::new(shape, t);
    finish::<TILES, OWN, KEYS8>(&a, shape, tiles, at, &rows, &acc, query0, parts > 1);
}

/// What a thread keeps of its rows: one of each of its warp's tiles, and its share of the keys.
struct Rows<const OWN: usize, const KEYS8: usize> {
    base: [f32; OWN],
    /// Of the weights of each [`SUM_KEYS`] neighbouring keys.
    sum: [[f32; KEYS8]; OWN],
}

/// The first round from `key` on that is worth its products. A GPU takes them all; the CPU device leaves out those in
/// the tree of which no row of the block sees a key, whose weights are all zero.
#[inline(always)]
fn next_seen(a: &MlaAttentionArgs, keys: Keys, query0: usize, shape: Shape, key: u32) -> u32 {
    let mut key = key;
    if EMULATED {
        let queries = a.rows as usize * a.heads as usize;
        let last_row = math::div((query0 + shape.rows()).min(queries) as u32 - 1, a.heads);
        while key >= keys.committed && key < keys.last {
            let mut row = math::div(query0 as u32, a.heads) + warp::lane_id();
            let mut seen = false;
            while row <= last_row {
                let words = a.ancestors.slice(row as usize * a.words as usize, a.words as usize);
                let mut part = 0;
                while part < shape.keys() as u32 {
                    seen = seen || visible(words, keys, key + part) != 0;
                    part += u32::BITS;
                }
                row += warp::WARP;
            }
            if warp::any(seen) {
                break;
            }
            key += shape.keys() as u32;
        }
    }
    key
}

/// The row of a block that this thread has of its warp's tile `tile`.
#[inline(always)]
fn own_row(at: Place, tile: usize) -> usize {
    (at.tile0 + tile) * 16 + 8 * at.half + at.group
}

/// The row of a block whose sums this thread has in the lower or upper half of `acc[i]`.
#[inline(always)]
fn sum_row(at: Place, i: usize, half: usize) -> usize {
    i * 16 + 8 * half + at.group
}

/// The place of a stage's latents: the widened ones have but one.
#[inline(always)]
fn latents<const F8: bool>(stage: usize) -> usize {
    if F8 { 0 } else { stage }
}

/// This warp's half of the scores; starts the copies of the next round's latents on the way.
#[inline(always)]
fn scores<const OWN: usize, const KEYS8: usize, const F8: bool>(
    shape: Shape,
    tiles: Tiles,
    at: Place,
    fetch: Fetch<F8>,
    stage: usize,
    any: bool,
) -> Scores<OWN, KEYS8> {
    let mut s = [[[0f32; 4]; KEYS8]; OWN];
    let (query_panel, key_panel) = (shape.rows() * PANEL, shape.keys() * PANEL);
    let more = fetch.key < fetch.last;
    if F8 && more {
        fetch.codes(tiles);
    }
    let add = |s: &mut Scores<OWN, KEYS8>, panel: usize| {
        let queries = tiles.queries.slice(panel * query_panel, query_panel);
        let keys = tiles.latent(latents::<F8>(stage)).slice(panel * key_panel, key_panel);
        mla_tile::add_panel(s, queries, keys, at);
    };
    if !F8 && more {
        unroll!(panel in 0 1 2 3 4 5 6 7; {
            unroll!(i in 0 1; {
                if panel * Fetch::<F8>::parts(shape) / 8 + i < (panel + 1) * Fetch::<F8>::parts(shape) / 8 {
                    fetch.latent(tiles, panel * Fetch::<F8>::parts(shape) / 8 + i);
                }
            });
            if any {
                add(&mut s, panel);
            }
        });
    } else if any {
        // No branch between the products: operands are loaded ahead.
        unroll!(panel in 0 1 2 3 4 5 6 7; {
            add(&mut s, panel);
        });
    }
    cp_async_commit();
    if any {
        mla_tile::add_panel(&mut s, tiles.queries.slice(8 * query_panel, query_panel), tiles.side(stage), at);
    }
    s
}

/// Leaves the half of the rows that the other half of the columns' warp finishes.
#[inline(always)]
fn give<const OWN: usize, const KEYS8: usize>(s: &Scores<OWN, KEYS8>, tiles: Tiles, at: Place, stage: usize) {
    let exchange = tiles.exchange(stage);
    unroll!(tile in 0 1 below OWN; {
        unroll!(n in 0 1 2 3 below KEYS8; {
            let c = s[tile][n];
            let other = if at.half == 0 { [c[2], c[3]] } else { [c[0], c[1]] };
            exchange.st8(exchange_at::<OWN, KEYS8>(at.warp, tile, n, at.lane), other.map(f32::to_bits));
        });
    });
}

#[inline(always)]
fn exchange_at<const OWN: usize, const KEYS8: usize>(warp: usize, tile: usize, n: usize, lane: usize) -> usize {
    (((warp * OWN + tile) * KEYS8 + n) * 32 + lane) * 2
}

/// Adds the other half of the columns to this warp's half of the rows; scaled, in the first two words of each tile.
#[inline(always)]
fn take<const OWN: usize, const KEYS8: usize>(
    s: &mut Scores<OWN, KEYS8>,
    tiles: Tiles,
    at: Place,
    stage: usize,
    scale: f32,
) {
    let exchange = tiles.exchange(stage);
    unroll!(tile in 0 1 below OWN; {
        unroll!(n in 0 1 2 3 below KEYS8; {
            let other = exchange.ld8(exchange_at::<OWN, KEYS8>(at.warp ^ 4, tile, n, at.lane)).map(f32::from_bits);
            let c = s[tile][n];
            let own = if at.half == 0 { [c[0], c[1]] } else { [c[2], c[3]] };
            s[tile][n][0] = (own[0] + other[0]) * scale;
            s[tile][n][1] = (own[1] + other[1]) * scale;
        });
    });
}

/// -inf in place of the scores of keys that a row does not see.
#[inline(always)]
fn hide<const OWN: usize, const KEYS8: usize>(
    a: &MlaAttentionArgs,
    s: &mut Scores<OWN, KEYS8>,
    at: Place,
    query0: usize,
    keys: Keys,
    key: u32,
) {
    let queries = a.rows as usize * a.heads as usize;
    unroll!(tile in 0 1 below OWN; {
        let query = (query0 + own_row(at, tile)).min(queries - 1);
        let row = math::div(query as u32, a.heads) as usize;
        let words = a.ancestors.slice(row * a.words as usize, a.words as usize);
        let first = key + at.first_key::<KEYS8>();
        let seen = visible(words, keys, first) >> (2 * at.quad);
        unroll!(n in 0 1 2 3 below KEYS8; {
            unroll!(i in 0 1; {
                if seen >> (8 * n + i) & 1 == 0 {
                    s[tile][n][i] = f32::NEG_INFINITY;
                }
            });
        });
    });
}

/// Bit i: whether the row of these ancestors sees key `own + i`.
#[inline(always)]
pub fn visible(words: Global<u32>, keys: Keys, own: u32) -> u32 {
    let ones = |n: u32| if n < 32 { (1 << n) - 1 } else { u32::MAX };
    if own >= keys.last {
        return 0;
    }
    let before = keys.committed.saturating_sub(own);
    let node = own.saturating_sub(keys.committed);
    let word = |i: usize| if i < words.len() { words.get(i) } else { 0 };
    let at = (node / 32) as usize;
    let nodes = u64::from(word(at)) | u64::from(word(at + 1)) << 32;
    let tree = (nodes >> (node % 32)) as u32;
    let tree = if before < 32 { tree << before } else { 0 };
    (ones(before) | tree) & ones(keys.last - own)
}

/// A thread's largest score of each of its rows.
#[inline(always)]
fn largest<const OWN: usize, const KEYS8: usize>(s: &Scores<OWN, KEYS8>) -> [f32; OWN] {
    let mut max = [f32::NEG_INFINITY; OWN];
    unroll!(tile in 0 1 below OWN; {
        unroll!(n in 0 1 2 3 below KEYS8; {
            max[tile] = max[tile].max(s[tile][n][0]).max(s[tile][n][1]);
        });
    });
    max
}

/// Weights of the scores, rounded into shared memory, and the sums of what was stored there.
#[inline(always)]
fn weights<const OWN: usize, const KEYS8: usize>(
    s: &Scores<OWN, KEYS8>,
    base: &[f32; OWN],
    tiles: Tiles,
    at: Place,
    stage: usize,
) -> [[f32; KEYS8]; OWN] {
    let mut sum = [[0.0; KEYS8]; OWN];
    let out = tiles.side(stage);
    unroll!(tile in 0 1 below OWN; {
        let base = softmax_base(base[tile]);
        unroll!(n in 0 1 2 3 below KEYS8; {
            let pair = math::pack_bf16(math::exp2(s[tile][n][0] - base), math::exp2(s[tile][n][1] - base));
            sum[tile][n / (SUM_KEYS / 8)] += math::bf16_lo(pair) + math::bf16_hi(pair);
            let to = piece_at(own_row(at, tile), at.column * KEYS8 + n) + 2 * at.quad;
            out.st4(to, pair);
        });
    });
    sum
}

/// Bases of rows with a score far above become the largest of this round, up to a whole number; what was summed so far
/// shrinks with them.
#[inline(always)]
fn raise<const TILES: usize, const OWN: usize, const KEYS8: usize>(
    max: &[f32; OWN],
    tiles: Tiles,
    at: Place,
    rows: &mut Rows<OWN, KEYS8>,
    acc: &mut [Sums; TILES],
) {
    let shape = Shape { tiles: TILES, own: OWN, keys8: KEYS8 };
    unroll!(tile in 0 1 below OWN; {
        let pair = max[tile].max(warp::shfl_xor(max[tile], 1));
        let quad = pair.max(warp::shfl_xor(pair, 2));
        if at.quad == 0 {
            tiles.maxima.set(at.column * shape.rows() + own_row(at, tile), quad);
        }
    });
    thread::sync_threads();
    let raised = |row: usize| {
        let old = tiles.bases.get(row);
        let mut max = tiles.maxima.get(row);
        let mut column = 1;
        while column < shape.columns() {
            max = max.max(tiles.maxima.get(column * shape.rows() + row));
            column += 1;
        }
        let new = if max > old + HEADROOM { math::ceil(max) } else { old };
        (new, math::exp2(old - softmax_base(new)))
    };
    unroll!(tile in 0 1 below TILES; {
        unroll!(half in 0 1; {
            scale_rows(&mut acc[tile], half, raised(sum_row(at, tile, half)).1);
        });
    });
    unroll!(tile in 0 1 below OWN; {
        let (new, shrink) = raised(own_row(at, tile));
        rows.base[tile] = new;
        unroll!(n in 0 1 2 3 below KEYS8; {
            rows.sum[tile][n] *= shrink;
        });
    });
}

/// Divides and stores, or stores undivided for the merge.
#[inline(always)]
fn finish<const TILES: usize, const OWN: usize, const KEYS8: usize>(
    a: &MlaAttentionArgs,
    shape: Shape,
    tiles: Tiles,
    at: Place,
    rows: &Rows<OWN, KEYS8>,
    acc: &[Sums; TILES],
    query0: usize,
    split: bool,
) {
    unroll!(tile in 0 1 below OWN; {
        unroll!(n in 0 1 2 3 below KEYS8; {
            if n < shape.sums() {
                let sum = rows.sum[tile][n];
                let pair = sum + warp::shfl_xor(sum, 1);
                let quad = pair + warp::shfl_xor(pair, 2);
                if at.quad == 0 {
                    tiles.sums.set((at.column * shape.sums() + n) * shape.rows() + own_row(at, tile), quad);
                }
            }
        });
    });
    thread::sync_threads();
    let queries = a.rows as usize * a.heads as usize;
    let from = thread::block_idx_y() as usize * queries;
    let total = |row: usize| {
        let mut total = 0.0;
        let mut i = 0;
        while i < shape.columns() * shape.sums() {
            total += tiles.sums.get(i * shape.rows() + row);
            i += 1;
        }
        total
    };
    let column = at.warp * PANEL + 2 * at.quad;
    unroll!(tile in 0 1 below TILES; {
        unroll!(half in 0 1; {
            let row = sum_row(at, tile, half);
            let query = query0 + row;
            if query < queries && split {
                let to = (from + query) * LATENT + column;
                unroll!(n in 0 1 2 3 4 5 6 7; {
                    a.partial.st8(to + 8 * n, [acc[tile][n][2 * half], acc[tile][n][2 * half + 1]].map(f32::to_bits));
                });
                if at.warp == 0 && at.quad == 0 {
                    a.partial_max_sum.st8((from + query) * 2, [tiles.bases.get(row), total(row)].map(f32::to_bits));
                }
            } else if query < queries {
                let (to, factor) = (query * LATENT + column, 1.0 / total(row));
                unroll!(n in 0 1 2 3 4 5 6 7; {
                    let pair = [acc[tile][n][2 * half] * factor, acc[tile][n][2 * half + 1] * factor];
                    if !a.out_f32.is_empty() {
                        a.out_f32.st8(to + 8 * n, pair.map(f32::to_bits));
                    }
                    if !a.out_bf16.is_empty() {
                        a.out_bf16.st4(to + 8 * n, math::pack_bf16(pair[0], pair[1]));
                    }
                });
            }
        });
    });
}

const _: () = assert!(KEY > LATENT);
