//! The target's token at each row: the largest value, the lowest id of equals.
//!
//! ```text
//! argmax: value[r, i] = logits[r, i]                                               the greedy pick
//! draw:   value[r, i] = logits[r, i] / T - ln(-ln(1 - u(seed, position of r, i)))  one draw from softmax(logits / T)
//! pick[r] = index of the largest value, best[r] that value, second[r] the largest of the others
//! ```
//!
//! `second` equals `best` when two tie. The noise of `draw` is Gumbel's: the largest of logit / T + noise is token i
//! with probability softmax(logits / T)[i], exactly. u has 32 bits, four ids to a Philox counter (id / 4, position), so
//! that rows at one position have the same noise: a token is a function of the logits, the seed and its position, never
//! of the tree around it. Ids that a row's `limits` (see `sample_limits`) leave out have the value -inf.
//!
//! Grid: x = parts of a row, y = rows. Each thread keeps four 16-byte loads in flight and a running (best, pick,
//! second); these are merged in a warp, then over warps, then by the last block of a row over its parts. The merge does
//! not depend on order, so neither do the results on the number of parts.
//! A row with NaN, +inf or no finite value has pick -1; it is reported in the state if it is a row of the tree
//! (row <= NODES), not if it is padding.

use cuda_std::{GlobalMut, kernel, math, static_shared, thread, warp};

use super::{errors, order};
use crate::args::state::{COMMITTED, ERROR_LOGITS, NODES};
use crate::args::tokens::{ArgmaxArgs, DrawArgs};
use crate::philox::philox;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Logits that a block takes in one step: parts are multiples of it.
pub const STEP: usize = UNROLL * WIDE * THREADS as usize;
/// Parts of a row at most: one a lane in the merge.
pub const MAX_PARTS: usize = warp::WARP as usize * 2;
/// Words of a part's result.
pub const PART_WORDS: usize = 4;

const WARPS: usize = (THREADS / warp::WARP) as usize;
/// Logits of a 16-byte load.
const WIDE: usize = 4;
/// Loads in flight a thread.
const UNROLL: usize = 4;
/// No logit yet.
const NOBODY: u32 = u32::MAX;

static_shared!(fn argmax_best() -> [f32; WARPS]);
static_shared!(fn argmax_pick() -> [u32; WARPS]);
static_shared!(fn argmax_second() -> [f32; WARPS]);
static_shared!(fn argmax_nan() -> [u32; WARPS]);

/// The largest value, its lowest index, and the largest of the others.
#[derive(Clone, Copy)]
struct Top {
    best: f32,
    pick: u32,
    second: f32,
}

impl Top {
    const NONE: Self = Self { best: f32::NEG_INFINITY, pick: NOBODY, second: f32::NEG_INFINITY };

    /// Adds one value, of a larger index than those before.
    #[inline(always)]
    fn add(&mut self, v: f32, i: usize) {
        if v > self.best {
            (self.second, self.best, self.pick) = (self.best, v, i as u32);
        } else if v > self.second {
            self.second = v;
        }
    }

    #[inline(always)]
    fn merge(self, other: Self) -> Self {
        let wins = self.best > other.best || (self.best == other.best && self.pick <= other.pick);
        let (first, loser) = if wins { (self, other.best) } else { (other, self.best) };
        Self { second: loser.max(self.second).max(other.second), ..first }
    }

    /// Merges the lanes' results; the same on all.
    #[inline(always)]
    fn over_lanes(mut self) -> Self {
        let mut lanes = warp::WARP / 2;
        while lanes > 0 {
            let other = Self {
                best: warp::shfl_xor(self.best, lanes),
                pick: warp::shfl_xor(self.pick, lanes),
                second: warp::shfl_xor(self.second, lanes),
            };
            self = self.merge(other);
            lanes /= 2;
        }
        self
    }
}

/// `-ln(-ln(1 - u))` for the u of 32 random bits: midpoints of 2^32 steps, as far as f32 holds them.
#[inline(always)]
pub fn gumbel(word: u32) -> f32 {
    const UNIT: f32 = 1.0 / (1u64 << 32) as f32;
    // Below it the series of -ln(1 - u) is used: the small values decide, and 1 - u has lost them.
    const SMALL: f32 = 1.0 / 16.0;
    // The largest u rounds to 1.
    const LEAST: f32 = 1.0 / (1 << 26) as f32;
    let u = (word as f32 + 0.5) * UNIT;
    let series = u * math::fma(u, math::fma(u, math::fma(u, math::fma(u, 0.2, 0.25), 1.0 / 3.0), 0.5), 1.0);
    let waited = if u < SMALL { series } else { -math::ln((1.0 - u).max(LEAST)) };
    -math::ln(waited)
}

/// How a row's values come from its logits.
trait Values {
    /// Of the four ids from `id` on, a multiple of 4.
    fn four(&self, id: usize, logits: [f32; WIDE]) -> [f32; WIDE];
    fn one(&self, id: usize, logit: f32) -> f32;
}

/// The logits themselves.
struct Greedy;

impl Values for Greedy {
    #[inline(always)]
    fn four(&self, _: usize, logits: [f32; WIDE]) -> [f32; WIDE] {
        logits
    }
    #[inline(always)]
    fn one(&self, _: usize, logit: f32) -> f32 {
        logit
    }
}

/// Logits with noise.
struct Noisy {
    inverse_temperature: f32,
    seed: [u32; 2],
    position: u32,
    /// The last key and id that are kept.
    limit: (u32, u32),
}

impl Noisy {
    #[inline(always)]
    fn value(&self, id: usize, logit: f32, word: u32) -> f32 {
        let (key, (last, last_id)) = (order::key(logit), self.limit);
        let kept = key > last || (key == last && id as u32 <= last_id);
        let value = math::fma(logit, self.inverse_temperature, gumbel(word));
        if kept { value } else { f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn words(&self, id: usize) -> [u32; WIDE] {
        philox([(id / WIDE) as u32, self.position, 0, 0], self.seed)
    }
}

impl Values for Noisy {
    #[inline(always)]
    fn four(&self, id: usize, [a, b, c, d]: [f32; WIDE]) -> [f32; WIDE] {
        let [w, x, y, z] = self.words(id);
        [self.value(id, a, w), self.value(id + 1, b, x), self.value(id + 2, c, y), self.value(id + 3, d, z)]
    }
    #[inline(always)]
    fn one(&self, id: usize, logit: f32) -> f32 {
        let [w, x, y, z] = self.words(id);
        let word = match id % WIDE {
            0 => w,
            1 => x,
            2 => y,
            _ => z,
        };
        self.value(id, logit, word)
    }
}

/// The best of this block's part of its row; valid on warp 0. The second value says whether a logit is NaN.
#[inline(always)]
fn part(a: &ArgmaxArgs, values: impl Values) -> (Top, bool) {
    let (vocab, t) = (a.vocab as usize, thread::thread_idx_x() as usize);
    let row = thread::block_idx_y() as usize;
    let logits = a.logits.slice(row * vocab, vocab);
    let start = thread::block_idx_x() as usize * a.part as usize;
    let end = if start + (a.part as usize) < vocab { start + a.part as usize } else { vocab };

    let (mut top, mut nan, mut wide) = (Top::NONE, false, start);
    if logits.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        let step = WIDE * THREADS as usize;
        while wide + STEP <= end {
            let from = wide + t * WIDE;
            let loads = [
                logits.ld16(from),
                logits.ld16(from + step),
                logits.ld16(from + 2 * step),
                logits.ld16(from + 3 * step),
            ];
            unroll!(u in 0 1 2 3; {
                let [x, y, z, w] = loads[u];
                let four = [f32::from_bits(x), f32::from_bits(y), f32::from_bits(z), f32::from_bits(w)];
                let valued = values.four(from + u * step, four);
                unroll!(j in 0 1 2 3; {
                    nan |= four[j].is_nan();
                    top.add(valued[j], from + u * step + j);
                });
            });
            wide += STEP;
        }
    }
    let mut i = wide + t;
    while i < end {
        let v = logits.get(i);
        nan |= v.is_nan();
        top.add(values.one(i, v), i);
        i += THREADS as usize;
    }

    top = top.over_lanes();
    let votes = warp::ballot(nan);
    let w = warp::warp_id() as usize;
    if warp::lane_id() == 0 {
        argmax_best().set(w, top.best);
        argmax_pick().set(w, top.pick);
        argmax_second().set(w, top.second);
        argmax_nan().set(w, votes);
    }
    thread::sync_threads();
    let mut votes = votes;
    for w in 1..WARPS {
        top = top.merge(Top { best: argmax_best().get(w), pick: argmax_pick().get(w), second: argmax_second().get(w) });
        votes |= argmax_nan().get(w);
    }
    (top, votes != 0)
}

/// Whether this block is the last of its row's to come here; its warp 0 then sees what the others have written before.
#[inline(always)]
fn is_last(tickets: GlobalMut<u32>, row: usize, parts: u32) -> bool {
    let mut before = 0;
    if warp::lane_id() == 0 {
        thread::fence_device();
        before = tickets.atomic_add(row, 1);
        if before == parts - 1 {
            // For the next launch.
            tickets.set(row, 0);
        }
        thread::fence_device();
    }
    warp::shfl(before, 0) == parts - 1
}

/// Merges the parts of a row and writes its pick.
#[inline(always)]
fn finish(a: &ArgmaxArgs, values: impl Values) {
    let (mut top, mut nan) = part(a, values);
    if warp::warp_id() != 0 {
        return;
    }
    let (row, lane) = (thread::block_idx_y() as usize, warp::lane_id() as usize);
    let parts = thread::grid_dim_x();
    if parts > 1 {
        let first = row * parts as usize;
        if lane == 0 {
            let at = (first + thread::block_idx_x() as usize) * PART_WORDS;
            a.parts.st16(at, [top.best.to_bits(), top.pick, top.second.to_bits(), nan as u32]);
        }
        if !is_last(a.tickets, row, parts) {
            return;
        }
        (top, nan) = (Top::NONE, false);
        let mut other = lane;
        while other < parts as usize {
            let [best, pick, second, bad] = a.parts.ld16((first + other) * PART_WORDS);
            top = top.merge(Top { best: f32::from_bits(best), pick, second: f32::from_bits(second) });
            nan |= bad != 0;
            other += warp::WARP as usize;
        }
        top = top.over_lanes();
        nan = warp::any(nan);
    }
    if lane != 0 {
        return;
    }
    let good = !nan && top.best.is_finite();
    a.pick.set(row, if good { top.pick as i32 } else { -1 });
    a.best.set(row, if nan { f32::NAN } else { top.best });
    a.second.set(row, top.second);
    if !good && row as u32 <= a.state.get(NODES) {
        errors::report(a.state, ERROR_LOGITS, row as u32);
    }
}

#[kernel]
pub fn argmax(a: ArgmaxArgs) {
    thread::wait_for_previous();
    thread::start_next();
    finish(&a, Greedy);
}

#[kernel]
pub fn draw(a: DrawArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let row = thread::block_idx_y() as usize;
    let limit = if a.limits.is_empty() { (0, 0) } else { (a.limits.get(2 * row), a.limits.get(2 * row + 1)) };
    let values = Noisy {
        inverse_temperature: a.inverse_temperature,
        seed: a.seed,
        // Of the token that is drawn: one behind the row's.
        position: a.picks.state.get(COMMITTED) + a.depths.get(row) + 1,
        limit,
    };
    finish(&a.picks, values);
}
