//! What the tree builder reads of a draft, and the guess that its search starts from.

use cuda_std::{Global, GlobalMut, Shared, math, static_shared, thread, warp};

use super::errors;
use super::tree_build::THREADS;
use crate::args::state::ERROR_DRAFT;
use crate::unroll::unroll;

/// Steps of cost that the guess counts in.
pub const BINS: u32 = 64;
/// Words a level of the histograms: as many zeros before the bins, so that no place lies outside.
const HISTOGRAM: u32 = 2 * BINS;
/// Bins of a lane.
const OWNED: usize = (BINS / warp::WARP) as usize;
const _: () = assert!(OWNED == 2);
/// Threads that share the work on a bin, neighbours in a warp.
const SHARES: u32 = THREADS / BINS;
const _: () = assert!(SHARES * BINS == THREADS && SHARES <= warp::WARP && BINS == 8 * SHARES);
/// More than that many prefixes are wanted within the guess, besides a quarter more than the budget.
const SPARE: u32 = 8;
/// Counts beyond it are all alike: more than any budget, and the sums of products stay below 2^32.
const MANY: u32 = 4095;
const _: () = assert!(MANY as u64 * super::tree_build::MAX_K as u64 * BINS as u64 <= u32::MAX as u64);
/// Costs beyond it are not counted in steps.
const LARGEST_COST: f32 = 1e9;
/// The range of costs is narrowed until the guess has this many steps below it, at most [`NARROWINGS`] times.
const FINE: u32 = BINS / 3;
const NARROWINGS: u32 = 6;
/// Loads on their way at once when the draft comes in.
const AHEAD: usize = 4;
const WARPS: u32 = THREADS / warp::WARP;

// Two rounds of counts that alternate, and their sum over the levels.
static_shared!(fn tree_guess_counts() -> [u32; 2 * BINS as usize]);
static_shared!(fn tree_guess_total() -> [u32; BINS as usize]);

/// Words of shared memory that [`Draft::guess`] takes.
pub const fn guess_words(levels: u32) -> u32 {
    levels * HISTOGRAM
}

/// Log-probabilities by depth of the parent and rank; those above 0 count as 0. `WHOLE`: all that count are staged.
#[derive(Clone, Copy)]
pub struct Draft<const WHOLE: bool> {
    /// `[levels, k]`.
    pub all: Global<f32>,
    /// Their first columns, `[levels, columns]`.
    pub staged: Shared<f32>,
    pub columns: u32,
    pub levels: u32,
    pub k: u32,
    /// Nodes that are wanted.
    pub budget: u32,
}

/// Where the search starts.
#[derive(Clone, Copy)]
pub struct Guess {
    /// Scores from here on are thought to be a few more than wanted.
    pub score: f32,
    /// How far off it may be.
    pub step: f32,
}

impl<const WHOLE: bool> Draft<WHOLE> {
    #[inline(always)]
    pub fn get(self, depth: u32, rank: u32) -> f32 {
        if WHOLE || rank < self.columns {
            self.staged.get((depth * self.columns + rank) as usize)
        } else {
            self.all.get((depth * self.k + rank) as usize).min(0.0)
        }
    }

    /// Ranks below a node at `depth` that a tree of `budget` nodes can hold: it has the node's ancestors and the
    /// better siblings too. `depth` is less than `levels`, which is at most `budget`.
    #[inline(always)]
    pub fn reach(self, depth: u32) -> u32 {
        let free = self.budget - depth;
        if self.k < free { self.k } else { free }
    }

    /// Ranks that some node can have.
    #[inline(always)]
    fn width(self) -> u32 {
        if self.k < self.budget { self.k } else { self.budget }
    }

    /// Depth and rank number `part` of this thread, where the warps share the levels in parts of 32 ranks; a rank of
    /// `width` or more is none.
    #[inline(always)]
    fn place(self, part: u32) -> (u32, u32) {
        let parts = self.width().div_ceil(warp::WARP);
        let part = part * WARPS + warp::warp_id();
        let depth = math::div(part, parts);
        let rank = (part - depth * parts) * warp::WARP + warp::lane_id();
        if depth < self.levels { (depth, rank) } else { (0, u32::MAX) }
    }

    /// Parts that a thread has.
    #[inline(always)]
    fn parts(self) -> u32 {
        (self.levels * self.width().div_ceil(warp::WARP)).div_ceil(WARPS)
    }

    /// Brings the first columns in. Whether this thread has seen a value that cannot be used and that the budget can
    /// reach; it is reported.
    #[inline(always)]
    pub fn stage(self, state: GlobalMut<u32>) -> bool {
        let (width, mut worst) = (self.width(), u32::MAX);
        let mut part = 0;
        while part < self.parts() {
            let (mut places, mut values) = ([(0, 0); AHEAD], [0.0; AHEAD]);
            unroll!(i in 0 1 2 3; {
                places[i] = self.place(part + i as u32);
                let (depth, rank) = places[i];
                if rank < width {
                    values[i] = self.all.get((depth * self.k + rank) as usize);
                }
            });
            unroll!(i in 0 1 2 3; {
                let ((depth, rank), v) = (places[i], values[i]);
                if rank < self.reach(depth) && (v.is_nan() || v == f32::INFINITY) && depth < worst {
                    worst = depth;
                }
                if rank < width && (WHOLE || rank < self.columns) {
                    self.staged.set((depth * self.columns + rank) as usize, v.min(0.0));
                }
            });
            part += AHEAD as u32;
        }
        if worst != u32::MAX {
            errors::report(state, ERROR_DRAFT, worst);
        }
        worst != u32::MAX
    }

    /// A cost that `budget` nodes do not exceed, for this thread's numbers of children: each of a node's first r
    /// children has r, down to the depth where they are `budget`. +inf: there are not as many.
    #[inline(always)]
    fn even_cost(self) -> f32 {
        let mut least = f32::INFINITY;
        let mut r = thread::thread_idx_x() + 1;
        while r <= self.k && r <= self.budget {
            let (mut nodes, mut of_depth, mut cost, mut depth) = (0, 1, 0.0, 0);
            while depth < self.levels && r <= self.reach(depth) && nodes < self.budget {
                of_depth *= r;
                nodes += of_depth;
                cost -= self.get(depth, r - 1);
                depth += 1;
            }
            least = if nodes >= self.budget && cost < least { cost } else { least };
            r += THREADS;
        }
        least
    }

    /// The cost of the dearest node of all, whole warps.
    #[inline(always)]
    fn largest_cost(self) -> f32 {
        let depth = warp::lane_id();
        let mut cost = 0.0;
        if depth < self.levels {
            let finite = partition(self.reach(depth), |rank| self.get(depth, rank) > f32::NEG_INFINITY);
            cost = if finite > 0 { -self.get(depth, finite - 1) } else { 0.0 };
        }
        warp::reduce_sum(cost)
    }

    /// Guesses the score of the last node without looking at nodes: the number of prefixes of each cost, in steps, is
    /// level by level the convolution of the numbers before with the level's own. `block_min` is the least value over
    /// the block, on all threads. `room` takes [`guess_words`].
    #[inline(always)]
    pub fn guess(self, room: Shared<u32>, floor: f32, block_min: impl Fn(f32) -> f32) -> Guess {
        let mut range = block_min(self.even_cost());
        if range == f32::INFINITY {
            range = self.largest_cost();
        }
        range = if -floor < range { -floor } else { range };
        // A few more than wanted: counts are of rounded costs.
        let wanted = self.budget + self.budget / 4 + SPARE;
        let mut narrowing = 0;
        loop {
            let step = range / BINS as f32;
            if !(range < LARGEST_COST && step > f32::MIN_POSITIVE) {
                return Guess { score: -range, step: 1.0 };
            }
            let bin = self.last_bin(room, 1.0 / step, wanted);
            narrowing += 1;
            // There are as many as the budget within the range, if there are at all.
            if bin >= FINE || narrowing == NARROWINGS {
                return Guess { score: -(bin as f32 + 1.0) * step, step };
            }
            range = (bin as f32 + 2.0) * step;
        }
    }

    /// The first step of cost up to which there are `wanted` prefixes; [`BINS`]: there are fewer.
    #[inline(always)]
    fn last_bin(self, room: Shared<u32>, scale: f32, wanted: u32) -> u32 {
        let t = thread::thread_idx_x();
        let mut i = t;
        while i < guess_words(self.levels) {
            room.set(i as usize, 0);
            i += THREADS;
        }
        thread::sync_threads();
        let mut part = 0;
        while part < self.parts() {
            let (depth, rank) = self.place(part);
            if rank < self.reach(depth) {
                let bin = 0.5 - self.get(depth, rank) * scale;
                if bin < BINS as f32 {
                    room.atomic_add((depth * HISTOGRAM + BINS + bin as u32) as usize, 1);
                }
            }
            part += 1;
        }
        thread::sync_threads();

        let (bin, share) = (t / SHARES, t % SHARES);
        let counts = tree_guess_counts();
        // Nothing of the first level but the root lies before it.
        if share == 0 {
            counts.set(bin as usize, (bin == 0) as u32);
        }
        thread::sync_threads();
        let mut total = 0;
        let mut depth = 0;
        while depth < self.levels {
            let (old, new) = ((depth % 2 * BINS) as usize, ((depth + 1) % 2 * BINS) as usize);
            // A share of the counts before, each with the level's number that makes it `bin`: beyond `bin` that is one
            // of the zeros.
            let level = (depth * HISTOGRAM + BINS + bin) as usize;
            let mut count = 0;
            unroll!(i in 0 1 2 3 4 5 6 7; {
                let other = share as usize + i * SHARES as usize;
                count += counts.get(old + other) * room.get(level - other);
            });
            unroll!(i in 0 1 2; {
                count += warp::shfl_xor(count, 1 << i);
            });
            let count = if count < MANY { count } else { MANY };
            if share == 0 {
                counts.set(new + bin as usize, count);
            }
            total += count;
            thread::sync_threads();
            depth += 1;
        }
        if share == 0 {
            tree_guess_total().set(bin as usize, total);
        }
        thread::sync_threads();

        // Every warp for itself.
        let lane = warp::lane_id();
        let first = tree_guess_total().get(OWNED * lane as usize);
        let second = tree_guess_total().get(OWNED * lane as usize + 1);
        let upto = warp::inclusive_sum(first + second);
        let reached = warp::ballot(upto >= wanted);
        if reached == 0 {
            return BINS;
        }
        let lane = reached.trailing_zeros();
        OWNED as u32 * lane + warp::shfl((upto - second < wanted) as u32, lane)
    }
}

/// The first index in `0..len` where `before` no longer holds; it holds for a prefix. Three looks at a time, so that
/// their loads overlap.
#[inline(always)]
pub fn partition(len: u32, before: impl Fn(u32) -> bool) -> u32 {
    let mut at = 0;
    // The largest power of four up to `len`.
    let mut step = if len > 0 { 1 << ((u32::BITS - 1 - len.leading_zeros()) & !1) } else { 0 };
    while step > 0 {
        let mut held = 0;
        unroll!(i in 1 2 3; {
            let next = at + i as u32 * step;
            let inside = next <= len;
            held += (before(if inside { next - 1 } else { 0 }) && inside) as u32;
        });
        at += held * step;
        step /= 4;
    }
    at
}
