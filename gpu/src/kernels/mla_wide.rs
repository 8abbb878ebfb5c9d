//! [`super::mla_attention`] by `wgmma`: blocks of 64 packed queries, rounds of 32 keys.
//!
//! The block's two warpgroups take turns. In round t one of them turns the scores of its keys into weights while the
//! other has the tensor cores at the scores of round t + 1; then both start to multiply the weights of round t with
//! their half of the latent's columns, and go on. Two barriers a round, and no tensor core waits for an exponential:
//!
//! ```text
//! warpgroup 0   | weights 0          | scores 2  | weights 2 |
//!               |           values 0 ...  values 1 ...  values 2 ...
//! warpgroup 1   | scores 1           | weights 1 | scores 3  |
//!               barrier  barrier
//! ```
//!
//! Four rounds of keys lie in shared memory: one for values, one for scores, two on their way. Of an f8 cache three do,
//! and the codes of two: in round t both warpgroups widen round t + 2, one behind its weights, the other while its
//! scores are on their way, as is round t + 3. Weights of even rounds take columns 0..32 of their panel, those of odd
//! rounds the others. A thread has the whole scores of two rows and 8 keys each; a row's base is found within its warp.
//! Where there are few queries two blocks may share the columns of the values ([`mla_attention_wide_halves`]): each
//! computes all scores, and half of the sums; these are then half as many to store, and take half the registers.
//! What the base, the sums and the parts of a context are is told there.

use cuda_std::async_copy::{cp_async_16, cp_async_16_or_zero, cp_async_commit, cp_async_wait};
use cuda_std::{Global, Shared, bf16, dynamic_shared, kernel, math, thread, warp, wgmma};

use super::fragments::{PIECE, Sums, scale_rows, softmax_base, store};
use super::mla_attention::{HEADROOM, Keys, THREADS, part_start, parts_used, visible};
use super::mla_tile::{F8_STRIDE, PANEL, piece_at, thread_index, widen};
use crate::args::attention::{F8_ROTARY, F8_ROW, F8_SCALES, KEY, LATENT, MlaAttentionArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Packed queries of a block, and keys of a round.
pub const ROWS: usize = 64;
pub const KEYS: usize = 32;

/// Rounds of keys in shared memory.
const STAGES: usize = 4;
const KEY_PANELS: usize = KEY / PANEL;
const PANEL_PIECES: usize = PANEL / PIECE;
/// Threads of a warpgroup.
const GROUP: usize = 128;
/// Tiles of 8 keys in a round.
const KEYS8: usize = KEYS / 8;

/// Words of two bytes of an f8 row, and where its scales and its rotary key begin.
const F8_WORDS: usize = F8_ROW / size_of::<bf16>();
const F8_SCALE_WORDS: usize = F8_SCALES / size_of::<bf16>();
const F8_ROTARY_WORDS: usize = F8_ROTARY / size_of::<bf16>();
/// Stages of an f8 cache's keys after they are widened; two of codes take the place of the fourth.
const F8_STAGES: usize = STAGES - 1;

const STAGE_BYTES: usize = KEYS * KEY * size_of::<bf16>();
const STAGES_AT: usize = ROWS * KEY * size_of::<bf16>();
const WEIGHTS_AT: usize = STAGES_AT + STAGES * STAGE_BYTES;
const STATS_AT: usize = WEIGHTS_AT + ROWS * PANEL * size_of::<bf16>();
/// Words behind the tiles: bases, shrinks, a flag for each warp of a warpgroup.
const STATS: usize = 2 * ROWS + FLAGS;
const FLAGS: usize = 4;

/// Bytes of dynamic shared memory of a block.
pub const SHARED: u32 = (STATS_AT + STATS * size_of::<f32>()) as u32;

const _: () = assert!(2 * KEYS * F8_STRIDE * size_of::<bf16>() <= STAGE_BYTES);
const _: () = assert!(SHARED <= crate::SHARED_LIMIT_LARGE);
const _: () = assert!(KEYS * PANEL_PIECES == THREADS as usize && 2 * KEYS == ROWS && KEY_PANELS == 9);
const _: () = assert!(2 * KEYS == PANEL, "the weights of two rounds share a panel");

/// A block's shared memory.
#[derive(Clone, Copy)]
struct Tiles {
    queries: Shared<bf16>,
    weights: Shared<bf16>,
    /// What is subtracted from a row's scores.
    bases: Shared<f32>,
    /// What a row's sums so far are multiplied by when its base has moved.
    shrinks: Shared<f32>,
    /// `[2, ROWS]`, where the queries were.
    sums: Shared<f32>,
    /// Whether a base of a warp's rows has moved in this round.
    flags: Shared<u32>,
}

impl Tiles {
    #[inline(always)]
    fn new() -> Self {
        let at = |words: usize| (STATS_AT + words * size_of::<f32>()) as u32;
        Self {
            queries: dynamic_shared(0, (ROWS * KEY) as u32),
            weights: dynamic_shared(WEIGHTS_AT as u32, (ROWS * PANEL) as u32),
            bases: dynamic_shared(at(0), ROWS as u32),
            shrinks: dynamic_shared(at(ROWS), ROWS as u32),
            sums: dynamic_shared(0, 2 * ROWS as u32),
            flags: dynamic_shared(at(2 * ROWS), FLAGS as u32),
        }
    }

    /// The keys of a stage: panels of 32 rows.
    #[inline(always)]
    fn stage(self, stage: usize) -> Shared<bf16> {
        dynamic_shared((STAGES_AT + stage * STAGE_BYTES) as u32, (KEYS * KEY) as u32)
    }

    /// Codes and scales of the rounds that `round` is one of, the even or the odd ones.
    #[inline(always)]
    fn codes(self, round: u32) -> Shared<bf16> {
        let half = KEYS * F8_STRIDE;
        self.stage(F8_STAGES).slice(round as usize % 2 * half, half)
    }
}

/// Where a lane is.
#[derive(Clone, Copy)]
struct Place {
    /// Its warpgroup: 0 has the scores of even rounds, and the first half of the latent's columns.
    half: usize,
    /// Warp of the warpgroup, which has rows `16 warp ..` of scores and of sums.
    warp: usize,
    group: usize,
    quad: usize,
}

impl Place {
    #[inline(always)]
    fn new(t: usize) -> Self {
        let lane = t % warp::WARP as usize;
        Self { half: t / GROUP, warp: t % GROUP / warp::WARP as usize, group: lane / 4, quad: lane % 4 }
    }

    /// Row of the block of the lower or upper half of this lane's fragments.
    #[inline(always)]
    fn row(self, half: usize) -> usize {
        16 * self.warp + 8 * half + self.group
    }
}

/// This thread's row of 32 and piece of each panel, in a panel.
#[inline(always)]
fn copy_place() -> (usize, usize) {
    let t = thread_index();
    (t / PANEL_PIECES, t % PANEL_PIECES)
}

/// The keys of a block, and where copies of them go.
#[derive(Clone, Copy)]
struct Source {
    /// In words of two bytes, whatever they hold.
    cache: Global<bf16>,
    tiles: Tiles,
    first: u32,
    last: u32,
}

impl Source {
    /// Key of this thread in a round, whether all keys of the round are there, and whether this one is.
    #[inline(always)]
    fn place(self, round: u32) -> (usize, bool, bool) {
        let (key, row) = (self.first + round * KEYS as u32, copy_place().0 as u32);
        ((key + row) as usize, key + KEYS as u32 <= self.last, key + row < self.last)
    }

    /// Starts the copies of a round of a bf16 cache; zeros behind the last key. Eight threads copy a key, 128 bytes at
    /// a time.
    #[inline(always)]
    fn fetch(self, round: u32) {
        let ((row, piece), (key, whole, valid)) = (copy_place(), self.place(round));
        let to = self.tiles.stage(round as usize % STAGES);
        let (into, from) = (piece_at(row, piece), key * KEY + piece * PIECE);
        if whole {
            unroll!(panel in 0 1 2 3 4 5 6 7 8; {
                cp_async_16(to, panel * KEYS * PANEL + into, self.cache, from + panel * PANEL);
            });
        } else {
            unroll!(panel in 0 1 2 3 4 5 6 7 8; {
                cp_async_16_or_zero(to, panel * KEYS * PANEL + into, self.cache, from + panel * PANEL, valid);
            });
        }
    }

    /// As [`Self::fetch`] for the codes and scales of an f8 cache.
    #[inline(always)]
    fn fetch_codes(self, round: u32) {
        let ((row, piece), (key, _, valid)) = (copy_place(), self.place(round));
        let to = self.tiles.codes(round);
        let (into, from) = (row * F8_STRIDE + piece * PIECE, key * F8_WORDS + piece * PIECE);
        unroll!(part in 0 1 2 3; {
            cp_async_16_or_zero(to, into + part * PANEL, self.cache, from + part * PANEL, valid);
        });
        if piece == 0 {
            cp_async_16_or_zero(to, into + F8_SCALE_WORDS, self.cache, from + F8_SCALE_WORDS, valid);
        }
    }

    /// As [`Self::fetch`] for the rotary keys of an f8 cache.
    #[inline(always)]
    fn fetch_rotary(self, round: u32) {
        let ((row, piece), (key, _, valid)) = (copy_place(), self.place(round));
        let to = self.tiles.stage(round as usize % F8_STAGES);
        let into = (KEY_PANELS - 1) * KEYS * PANEL + piece_at(row, piece);
        cp_async_16_or_zero(to, into, self.cache, key * F8_WORDS + F8_ROTARY_WORDS + piece * PIECE, valid);
    }

    /// Widens a round's codes, by all threads of the block.
    #[inline(always)]
    fn widen(self, round: u32) {
        let to = self.tiles.stage(round as usize % F8_STAGES);
        widen(self.tiles.codes(round), to, KEYS, thread_index(), THREADS as usize);
    }
}

/// Starts the copies of the queries; zeros behind the last.
#[inline(always)]
fn fetch_queries(q: Global<bf16>, to: Shared<bf16>, query0: usize, queries: usize) {
    let (row, piece) = copy_place();
    unroll!(half in 0 1; {
        let row = row + half * ROWS / 2;
        let (into, from) = (piece_at(row, piece), (query0 + row) * KEY + piece * PIECE);
        unroll!(panel in 0 1 2 3 4 5 6 7 8; {
            let to_panel = panel * ROWS * PANEL + into;
            cp_async_16_or_zero(to, to_panel, q, from + panel * PANEL, query0 + row < queries);
        });
    });
}

/// A thread's scores: of two rows, of 8 keys each.
type Scores = [[f32; 4]; KEYS8];

/// The products are `wgmma` of sm_90a.
#[kernel]
pub fn mla_attention_wide_64(a: MlaAttentionArgs) {
    attention::<4, false>(a);
}

/// Two blocks share the columns of the values; each has all scores.
#[kernel]
pub fn mla_attention_wide_halves(a: MlaAttentionArgs) {
    attention::<2, false>(a);
}

/// [`mla_attention_wide_64`] over an f8 cache.
#[kernel]
pub fn mla_attention_f8_wide_64(a: MlaAttentionArgs) {
    attention::<4, true>(a);
}

/// [`mla_attention_wide_halves`] over an f8 cache.
#[kernel]
pub fn mla_attention_f8_wide_halves(a: MlaAttentionArgs) {
    attention::<2, true>(a);
}

/// `PANELS`: panels of the latent that a warpgroup multiplies.
#[inline(always)]
fn attention<const PANELS: usize, const F8: bool>(a: MlaAttentionArgs) {
    let queries = a.rows as usize * a.heads as usize;
    // First query, and first panel of the latent.
    let (query0, panel0) = match thread::block_idx_x() as usize {
        x if PANELS == 4 => (x * ROWS, 0),
        x => (x / 2 * ROWS, x % 2 * 2 * PANELS),
    };
    let committed = a.state.get(state::COMMITTED);
    let end = committed + a.rows;
    let (part, parts) = (thread::block_idx_y(), parts_used(end, thread::grid_dim_y()));
    if part >= parts {
        return;
    }
    let (first, last) = (part_start(end, part, parts), part_start(end, part + 1, parts));
    let keys = Keys { committed, last };
    let rounds = (last - first).div_ceil(KEYS as u32);
    let tiles = Tiles::new();
    let cache = Global::from_raw(a.cache.addr(), a.cache.len() / size_of::<bf16>());
    let source = Source { cache, tiles, first, last };
    let stages = if F8 { F8_STAGES } else { STAGES };
    let t = thread_index();
    let at = Place::new(t);

    // The launch before writes queries, not keys.
    if F8 {
        source.fetch_codes(0);
        source.fetch_codes(1);
        source.fetch_rotary(0);
        source.fetch_rotary(1);
    } else {
        source.fetch(0);
    }
    thread::wait_for_previous();
    thread::start_next();
    fetch_queries(a.q, tiles.queries, query0, queries);
    cp_async_commit();
    if !F8 {
        source.fetch(1);
        cp_async_commit();
        source.fetch(2);
        if all_there(rounds) {
            source.fetch(3);
        }
        cp_async_commit();
    }
    if t < ROWS {
        tiles.bases.set(t, f32::NEG_INFINITY);
    }
    if t < FLAGS {
        tiles.flags.set(t, 0);
    }

    let mut s: Scores = [[0.0; 4]; KEYS8];
    let mut sum = [0f32; 2];
    let mut acc: [Sums; 4] = [[[0.0; 4]; 8]; 4];
    if F8 {
        cp_async_wait::<0>();
        thread::sync_threads();
        source.widen(0);
        source.widen(1);
    } else {
        cp_async_wait::<2>();
    }
    wgmma::fence_async();
    thread::sync_threads();
    if F8 {
        source.fetch_codes(2);
        cp_async_commit();
    }
    if at.half == 0 {
        wgmma::start_nt_32(&mut s, tiles.queries, tiles.stage(0));
        wgmma::wait_32(&mut s);
    }
    let mut round = 0;
    while round < rounds {
        // The keys of the next round have come.
        if F8 {
            cp_async_wait::<0>();
        } else {
            cp_async_wait::<1>();
        }
        wgmma::fence_async();
        thread::sync_threads();
        let scores_next = at.half != round as usize % 2;
        let mut new = [0f32; 2];
        if scores_next {
            if round + 1 < rounds {
                s = [[0.0; 4]; KEYS8];
                wgmma::start_nt_32(&mut s, tiles.queries, tiles.stage((round as usize + 1) % stages));
                if F8 {
                    source.fetch_codes(round + 3);
                    source.fetch_rotary(round + 2);
                    if round + 2 < rounds {
                        source.widen(round + 2);
                    }
                }
                wgmma::wait_32(&mut s);
            }
        } else {
            if F8 {
                source.fetch_codes(round + 3);
                source.fetch_rotary(round + 2);
            }
            let key = first + round * KEYS as u32;
            new = weights(&a, &mut s, tiles, at, query0, keys, key, round as usize % 2);
            if F8 && round + 2 < rounds {
                source.widen(round + 2);
            }
        }
        // The values of the round before, which nobody has waited for yet.
        wait_values::<PANELS>(&mut acc);
        wgmma::fence_async();
        if F8 {
            cp_async_commit();
        }
        thread::sync_threads();
        // A vote, so that the compiler knows that the warp stays together.
        if warp::any(tiles.flags.get(at.warp) != 0) {
            unroll!(half in 0 1; {
                let shrink = tiles.shrinks.get(at.row(half));
                unroll!(i in 0 1 2 3 below PANELS; {
                    scale_rows(&mut acc[i], half, shrink);
                });
                sum[half] *= shrink;
            });
        }
        sum = [sum[0] + new[0], sum[1] + new[1]];
        let (panel, column) = (KEYS * PANEL, round as usize % 2 * KEYS);
        let values = tiles.stage(round as usize % stages).slice((panel0 + PANELS * at.half) * panel, PANELS * panel);
        if PANELS == 4 {
            wgmma::start_nn_32(&mut acc, tiles.weights, column, values);
        } else {
            let [low, high, ..] = &mut acc;
            wgmma::start_nn_32_half([low, high], tiles.weights, column, values);
        }
        if F8 {
            // What comes next is widened to where the round before lies.
            wait_values::<PANELS>(&mut acc);
        } else {
            if !all_there(rounds) {
                source.fetch(round + 3);
            }
            cp_async_commit();
        }
        round += 1;
    }
    wait_values::<PANELS>(&mut acc);
    finish::<PANELS>(&a, tiles, at, sum, &acc, query0, panel0, parts > 1);
}

/// Waits for the products with the values.
#[inline(always)]
fn wait_values<const PANELS: usize>(acc: &mut [Sums; 4]) {
    if PANELS == 4 {
        wgmma::wait_nn_32(acc);
    } else {
        let [low, high, ..] = acc;
        wgmma::wait_nn_32_half([low, high]);
    }
}

/// Whether a block has no more rounds than lie in shared memory: then it fetches all of a bf16 cache at once. (With
/// more, to fetch the fourth so early is slower.)
#[inline(always)]
fn all_there(rounds: u32) -> bool {
    rounds <= STAGES as u32
}

/// Weights of this warp's scores, rounded into shared memory; returns the sums of what was stored there. A base that a
/// score exceeds by far becomes the row's largest score, up to a whole number.
#[inline(always)]
fn weights(
    a: &MlaAttentionArgs,
    s: &mut Scores,
    tiles: Tiles,
    at: Place,
    query0: usize,
    keys: Keys,
    key: u32,
    odd: usize,
) -> [f32; 2] {
    unroll!(n in 0 1 2 3; {
        unroll!(i in 0 1 2 3; {
            s[n][i] *= a.scale_log2;
        });
    });
    if key + KEYS as u32 > keys.committed.min(keys.last) {
        let queries = a.rows as usize * a.heads as usize;
        unroll!(half in 0 1; {
            let query = (query0 + at.row(half)).min(queries - 1);
            let row = math::div(query as u32, a.heads) as usize;
            let words = a.ancestors.slice(row * a.words as usize, a.words as usize);
            let seen = visible(words, keys, key) >> (2 * at.quad);
            unroll!(n in 0 1 2 3; {
                unroll!(i in 0 1; {
                    if seen >> (8 * n + i) & 1 == 0 {
                        s[n][2 * half + i] = f32::NEG_INFINITY;
                    }
                });
            });
        });
    }
    let mut base = [tiles.bases.get(at.row(0)), tiles.bases.get(at.row(1))];
    let mut max = [f32::NEG_INFINITY; 2];
    unroll!(half in 0 1; {
        unroll!(n in 0 1 2 3; {
            max[half] = max[half].max(s[n][2 * half]).max(s[n][2 * half + 1]);
        });
    });
    let moves = warp::any(max[0] > base[0] + HEADROOM || max[1] > base[1] + HEADROOM);
    if moves {
        // All lanes of a row have read its base.
        warp::sync_warp();
        unroll!(half in 0 1; {
            let pair = max[half].max(warp::shfl_xor(max[half], 1));
            let largest = pair.max(warp::shfl_xor(pair, 2));
            let old = base[half];
            base[half] = if largest > old + HEADROOM { math::ceil(largest) } else { old };
            if at.quad == 0 {
                tiles.bases.set(at.row(half), base[half]);
                tiles.shrinks.set(at.row(half), math::exp2(old - softmax_base(base[half])));
            }
        });
    }
    if at.group == 0 && at.quad == 0 {
        tiles.flags.set(at.warp, moves as u32);
    }
    let mut sum = [0f32; 2];
    unroll!(half in 0 1; {
        let base = softmax_base(base[half]);
        unroll!(n in 0 1 2 3; {
            let pair = math::pack_bf16(math::exp2(s[n][2 * half] - base), math::exp2(s[n][2 * half + 1] - base));
            sum[half] += math::bf16_lo(pair) + math::bf16_hi(pair);
            tiles.weights.st4(piece_at(at.row(half), odd * KEYS8 + n) + 2 * at.quad, pair);
        });
    });
    sum
}

/// Divides and stores, or stores undivided for the merge.
#[inline(always)]
fn finish<const PANELS: usize>(
    a: &MlaAttentionArgs,
    tiles: Tiles,
    at: Place,
    sum: [f32; 2],
    acc: &[Sums; 4],
    query0: usize,
    panel0: usize,
    split: bool,
) {
    unroll!(half in 0 1; {
        let pair = sum[half] + warp::shfl_xor(sum[half], 1);
        let quad = pair + warp::shfl_xor(pair, 2);
        if at.quad == 0 {
            tiles.sums.set(at.half * ROWS + at.row(half), quad);
        }
    });
    thread::sync_threads();
    let queries = a.rows as usize * a.heads as usize;
    let from = thread::block_idx_y() as usize * queries;
    // Of two neighbouring tiles of columns an even lane takes four columns of the first, an odd one of the second.
    let odd = at.quad % 2;
    let column = (panel0 + PANELS * at.half) * PANEL + 2 * (at.quad - odd) + 8 * odd;
    unroll!(half in 0 1; {
        let row = at.row(half);
        let query = query0 + row;
        let total = tiles.sums.get(row) + tiles.sums.get(ROWS + row);
        // All pairs change hands before the first store: no branch lies between them.
        let mut fours = [[[0f32; 4]; 4]; 4];
        unroll!(i in 0 1 2 3 below PANELS; {
            unroll!(n in 0 1 2 3; {
                let tile = |n: usize| [acc[i][n][2 * half], acc[i][n][2 * half + 1]];
                let (low, high) = (tile(2 * n), tile(2 * n + 1));
                let given = if odd == 0 { high } else { low }.map(|v| warp::shfl_xor(v, 1));
                let [[a0, a1], [b0, b1]] = if odd == 0 { [low, given] } else { [given, high] };
                fours[i][n] = [a0, a1, b0, b1];
            });
        });
        if query < queries && split {
            let to = (from + query) * LATENT + column;
            unroll!(i in 0 1 2 3 below PANELS; {
                unroll!(n in 0 1 2 3; {
                    a.partial.st16(to + i * PANEL + 16 * n, fours[i][n].map(f32::to_bits));
                });
            });
            if at.half == 0 && panel0 == 0 && at.quad == 0 {
                a.partial_max_sum.st8((from + query) * 2, [tiles.bases.get(row), total].map(f32::to_bits));
            }
        } else if query < queries {
            let factor = 1.0 / total;
            unroll!(i in 0 1 2 3 below PANELS; {
                unroll!(n in 0 1 2 3; {
                    let four = fours[i][n].map(|v| v * factor);
                    store(a.out_f32, a.out_bf16, query * LATENT + column + i * PANEL + 16 * n, four);
                });
            });
        }
    });
}
