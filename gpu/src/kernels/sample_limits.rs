//! Where a row's tokens end that may be drawn, `limits[r] = (last key, last id)`: a token is kept when its logit's key
//! is larger, or equal and its id not larger.
//!
//! Tokens are ordered by logit, the lower id first among equals, and each filter keeps a first part of that order:
//!
//! ```text
//! top-k: the first k
//! top-p: of those, the fewest whose weights reach p of the sum of all of those;
//!        weight = round(2^31 e^((logit - max) / T)), so that sums are of integers and do not depend on order
//! min-p: those with logit >= max + T ln(min_p)
//! ```
//!
//! Three kernels, all with grid x = chunks of 4,096 logits, y = rows:
//!
//! * `sample_limits_max` leaves each chunk's maximum;
//! * `sample_limits_bins` counts and weighs the row by steps of (max - logit), and its last block a row finds the steps
//!   in which the filters may end: where top-k ends is known but for the place in a step, and the sum that top-p is a
//!   share of is known up to that step's weight, so that the steps that top-p may end in are few;
//! * `sample_limits` collects what lies in those steps, and its last block a row sorts it and finds the two places.
//!   Where more logits share the steps than there is room for, that block goes through the whole row instead, as
//!   [`super::sample_passes`] says: slow, and the same result.
//!
//! A row that `draw` will report gets some limits.

use cuda_std::{GlobalMut, dynamic_shared, kernel, math, static_shared, thread, warp};

use super::sample_passes::by_passes;
use super::{bitonic, order};
use crate::args::tokens::SampleLimitsArgs;
use crate::unroll::unroll;

/// Threads a block. More than 256: the last block of a row is alone with it.
pub const THREADS: u32 = 512;
/// Logits a chunk.
pub const CHUNK: usize = LOADS * WIDE * THREADS as usize;
/// Candidates of a row that are sorted at most.
pub const ROOM: usize = 4096;
/// Dynamic shared memory of `sample_limits`.
pub const SHARED_BYTES: u32 = (ROOM * size_of::<u64>()) as u32;
/// Words of a row in the workspace, besides a chunk's maximum each.
pub const ROW_WORDS: usize = CANDIDATES + 2 * ROOM;

/// Logits of a 16-byte load, and loads of a thread.
const WIDE: usize = 4;
const LOADS: usize = 2;
const WARPS: usize = THREADS as usize / warp::WARP as usize;
const BINS: usize = 1024;
/// Steps in one unit of the logits.
const STEPS: f32 = 32.0;
/// Bins of a thread.
const OWNED: usize = BINS / THREADS as usize;
const _: () = assert!(OWNED == 2);
/// Weight of the largest logit.
const UNIT: f32 = (1u32 << 31) as f32;

// A row's words: counts, weights (low and high words), what `sample_limits_bins` finds, blocks that have ended of it
// and of `sample_limits`, candidates that were collected, and the candidates.
const LOW: usize = BINS;
const HIGH: usize = 2 * BINS;
const FOUND: usize = 3 * BINS;
const ENDED: usize = FOUND + FOUND_WORDS;
const COLLECTED: usize = ENDED + 2;
const CANDIDATES: usize = (COLLECTED + 1).next_multiple_of(2);

/// What `sample_limits_bins` finds: [`Found`].
const FOUND_WORDS: usize = 11;

static_shared!(fn sample_limits_counts() -> [u32; BINS]);
static_shared!(fn sample_limits_low() -> [u32; BINS]);
static_shared!(fn sample_limits_high() -> [u32; BINS]);
static_shared!(fn sample_limits_warps() -> [u32; 2 * WARPS]);
static_shared!(fn sample_limits_before() -> [u32; 1]);
static_shared!(fn sample_limits_place() -> [u32; 4]);

#[inline(always)]
pub fn wide(low: u32, high: u32) -> u64 {
    (high as u64) << u32::BITS | low as u64
}

/// Steps in which the filters end.
#[derive(Clone, Copy)]
struct Found {
    /// The steps that top-p may end in.
    first: u32,
    last: u32,
    /// The step that top-k ends in, and how many of its logits it keeps.
    step: u32,
    keeps: u32,
    /// Logits in steps `first` to `last` that lie before `step`.
    between: u32,
    /// Weights before `first`, before `step`, and up to its end.
    before_first: u64,
    before_step: u64,
    through_step: u64,
}

/// `round(2^31 e^-below)`, 0 of what is not a number.
#[inline(always)]
pub fn weight(below: f32) -> u32 {
    (math::exp(-below) * UNIT + 0.5) as u32
}

/// What top-p wants of the weights `all`.
#[inline(always)]
pub fn share(all: u64, top_p: f32) -> u64 {
    // The product is rounded; at least one token is kept, and at most all.
    let part = (all as f32 * top_p) as u64;
    if part == 0 {
        1
    } else if part < all {
        part
    } else {
        all
    }
}

/// Whether top-k leaves tokens out.
#[inline(always)]
fn top_k(a: &SampleLimitsArgs) -> bool {
    a.top_k > 0 && a.top_k < a.vocab
}

/// The step of a logit: 0 for the largest.
#[inline(always)]
fn step_of(max: f32, v: f32) -> u32 {
    let step = (max - v) * STEPS;
    if step < (BINS - 1) as f32 { step as u32 } else { BINS as u32 - 1 }
}

/// This block's chunk, its first id, and the chunk's values of this thread; -inf behind the row's end.
#[inline(always)]
fn load(a: &SampleLimitsArgs) -> (usize, [[f32; WIDE]; LOADS]) {
    let (vocab, start) = (a.vocab as usize, thread::block_idx_x() as usize * CHUNK);
    let len = if vocab - start < CHUNK { vocab - start } else { CHUNK };
    let chunk = a.logits.slice(thread::block_idx_y() as usize * vocab + start, len);
    let mut values = [[f32::NEG_INFINITY; WIDE]; LOADS];
    if len == CHUNK && chunk.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        unroll!(u in 0 1; {
            let [x, y, z, w] = chunk.ld16(at(u, 0));
            values[u] = [f32::from_bits(x), f32::from_bits(y), f32::from_bits(z), f32::from_bits(w)];
        });
    } else {
        unroll!(u in 0 1; {
            unroll!(j in 0 1 2 3; {
                if at(u, j) < len {
                    values[u][j] = chunk.get(at(u, j));
                }
            });
        });
    }
    (start, values)
}

/// Index of value `j` of this thread's load `u` in the chunk.
#[inline(always)]
fn at(u: usize, j: usize) -> usize {
    (u * THREADS as usize + thread::thread_idx_x() as usize) * WIDE + j
}

/// This row's words.
#[inline(always)]
fn words(a: &SampleLimitsArgs) -> GlobalMut<u32> {
    a.words.slice(thread::block_idx_y() as usize * ROW_WORDS, ROW_WORDS)
}

/// The chunks' maxima of this row.
#[inline(always)]
fn maxima(a: &SampleLimitsArgs) -> GlobalMut<u32> {
    let chunks = thread::grid_dim_x() as usize;
    a.words.slice((thread::grid_dim_y() as usize * ROW_WORDS) + thread::block_idx_y() as usize * chunks, chunks)
}

/// The largest value over the block, on all threads; -inf of NaN. A barrier lies between two calls.
#[inline(always)]
fn block_max(value: f32) -> f32 {
    let key = order::key(if value.is_nan() { f32::NEG_INFINITY } else { value });
    let (keys, lane, mine) = (sample_limits_warps(), warp::lane_id(), warp::max(key));
    if lane == 0 {
        keys.set(warp::warp_id() as usize, mine);
    }
    thread::sync_threads();
    order::value(warp::max(keys.get(lane as usize % WARPS)))
}

/// The row's largest logit but NaN, on all threads.
#[inline(always)]
fn row_max(a: &SampleLimitsArgs) -> f32 {
    let (maxima, mut max, mut i) = (maxima(a), f32::NEG_INFINITY, thread::thread_idx_x() as usize);
    while i < maxima.len() {
        max = max.max(f32::from_bits(maxima.get(i)));
        i += THREADS as usize;
    }
    block_max(max)
}

/// The sum of the values up to this thread's, and of all. A barrier lies between two calls.
#[inline(always)]
fn block_sums(value: u64) -> (u64, u64) {
    let (sums, lane, w) = (sample_limits_warps(), warp::lane_id(), warp::warp_id() as usize);
    let from =
        |value: u64, lane: u32| wide(warp::shfl(value as u32, lane), warp::shfl((value >> u32::BITS) as u32, lane));
    let upto = |mut sum: u64| {
        let mut step = 1;
        while step < warp::WARP {
            let below = wide(warp::shfl_up(sum as u32, step), warp::shfl_up((sum >> u32::BITS) as u32, step));
            sum += if lane >= step { below } else { 0 };
            step *= 2;
        }
        sum
    };
    let mine = upto(value);
    if lane == warp::WARP - 1 {
        sums.set(2 * w, mine as u32);
        sums.set(2 * w + 1, (mine >> u32::BITS) as u32);
    }
    thread::sync_threads();
    let other =
        if (lane as usize) < WARPS { wide(sums.get(2 * lane as usize), sums.get(2 * lane as usize + 1)) } else { 0 };
    let others = upto(other);
    let before = from(others, w as u32) - from(other, w as u32);
    (before + mine, from(others, warp::WARP - 1))
}

/// Whether this is the last of the row's blocks to come here; what the others have written is seen then.
#[inline(always)]
fn last(counter: GlobalMut<u32>, word: usize) -> bool {
    let before = sample_limits_before();
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::fence_device();
        before.set(0, counter.atomic_add(word, 1));
        thread::fence_device();
    }
    thread::sync_threads();
    before.get(0) == thread::grid_dim_x() - 1
}

#[kernel]
pub fn sample_limits_max(a: SampleLimitsArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (t, number) = (thread::thread_idx_x() as usize, thread::block_idx_x() as usize);
    let (_, values) = load(&a);
    let mut max = f32::NEG_INFINITY;
    unroll!(u in 0 1; {
        unroll!(j in 0 1 2 3; {
            max = max.max(values[u][j]);
        });
    });
    let max = block_max(max);
    if t == 0 {
        maxima(&a).set(number, max.to_bits());
    }
    // The row's blocks clear its words.
    let words = words(&a);
    let mut i = number * THREADS as usize + t;
    while i < CANDIDATES {
        words.set(i, 0);
        i += thread::grid_dim_x() as usize * THREADS as usize;
    }
}

/// Adds `value` to the number whose words are `low` and `high`, given what was in the low one.
macro_rules! add_wide {
    ($low:expr, $high:expr, $i:expr, $value:expr) => {
        let (i, value): (usize, u64) = ($i, $value);
        if value != 0 {
            let before = $low.atomic_add(i, value as u32);
            let carry = (before.wrapping_add(value as u32) < before) as u32 + (value >> u32::BITS) as u32;
            if carry != 0 {
                $high.atomic_add(i, carry);
            }
        }
    };
}

#[kernel]
pub fn sample_limits_bins(a: SampleLimitsArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let t = thread::thread_idx_x() as usize;
    let (counts, low, high) = (sample_limits_counts(), sample_limits_low(), sample_limits_high());
    let (start, values) = load(&a);
    unroll!(u in 0 1; {
        counts.set(t + u * THREADS as usize, 0);
        low.set(t + u * THREADS as usize, 0);
        high.set(t + u * THREADS as usize, 0);
    });
    let max = row_max(&a);
    // Barriers lie in there.
    if !max.is_finite() {
        return;
    }
    unroll!(u in 0 1; {
        unroll!(j in 0 1 2 3; {
            let v = values[u][j];
            if start + at(u, j) < a.vocab as usize && !v.is_nan() {
                let bin = step_of(max, v) as usize;
                counts.atomic_add(bin, 1);
                add_wide!(low, high, bin, weight((max - v) * a.inverse_temperature) as u64);
            }
        });
    });
    thread::sync_threads();
    let words = words(&a);
    unroll!(u in 0 1; {
        let bin = t + u * THREADS as usize;
        let count = counts.get(bin);
        if count != 0 {
            words.atomic_add(bin, count);
            let (low_words, high_words) = (words.slice(LOW, BINS), words.slice(HIGH, BINS));
            add_wide!(low_words, high_words, bin, wide(low.get(bin), high.get(bin)));
        }
    });
    if last(words, ENDED) {
        find(&a, words);
    }
}

/// A thread's bins in the order of the steps: numbers, and sums up to each.
#[derive(Clone, Copy)]
struct Bins {
    own: [u64; OWNED],
    upto: [u64; OWNED],
    all: u64,
}

impl Bins {
    #[inline(always)]
    fn new(own: [u64; OWNED]) -> Self {
        let (upto, all) = block_sums(own[0] + own[1]);
        thread::sync_threads();
        Self { own, upto: [upto - own[1], upto], all }
    }

    /// The first bin up to which the sum reaches `wanted`, which it does somewhere; and the sum before it.
    #[inline(always)]
    fn reaches(self, wanted: u64) -> (u32, u64) {
        let place = sample_limits_place();
        unroll!(i in 0 1; {
            let before = self.upto[i] - self.own[i];
            if before < wanted && self.upto[i] >= wanted {
                place.set(0, (OWNED * thread::thread_idx_x() as usize + i) as u32);
                place.set(1, before as u32);
                place.set(2, (before >> u32::BITS) as u32);
            }
        });
        thread::sync_threads();
        let found = (place.get(0), wide(place.get(1), place.get(2)));
        thread::sync_threads();
        found
    }

    /// The sum before bin `bin`.
    #[inline(always)]
    fn before(self, bin: u32) -> u64 {
        let place = sample_limits_place();
        unroll!(i in 0 1; {
            if (OWNED * thread::thread_idx_x() as usize + i) as u32 == bin {
                let before = self.upto[i] - self.own[i];
                place.set(0, before as u32);
                place.set(1, (before >> u32::BITS) as u32);
            }
        });
        thread::sync_threads();
        let found = wide(place.get(0), place.get(1));
        thread::sync_threads();
        found
    }
}

/// Finds the steps in which the filters end.
#[inline(always)]
fn find(a: &SampleLimitsArgs, words: GlobalMut<u32>) {
    let own = OWNED * thread::thread_idx_x() as usize;
    let count = |i: usize| words.get(own + i) as u64;
    let weight = |i: usize| wide(words.get(LOW + own + i), words.get(HIGH + own + i));
    let counts = Bins::new([count(0), count(1)]);
    let weights = Bins::new([weight(0), weight(1)]);
    let cuts = a.top_k > 0 && (a.top_k as u64) < counts.all;
    // Without top-k: all of the last step.
    let (step, before) = counts.reaches(if cuts { a.top_k as u64 } else { counts.all });
    let keeps = if cuts { a.top_k as u64 } else { counts.all } - before;
    let before_step = weights.before(step);
    let through_step = if step as usize + 1 < BINS { weights.before(step + 1) } else { weights.all };
    let whole = before + keeps == if step as usize + 1 < BINS { counts.before(step + 1) } else { counts.all };
    let (mut first, mut last, mut before_first, mut between) = (1, 0, 0, 0);
    if a.top_p < 1.0 {
        let least = if whole { through_step } else { before_step };
        (first, before_first) = weights.reaches(share(least, a.top_p));
        (last, _) = weights.reaches(share(through_step, a.top_p));
        let end = if last < step { last + 1 } else { step };
        between = counts.before(end) - counts.before(first);
    }
    if thread::thread_idx_x() == 0 {
        let found = [first, last, step, keeps as u32, between as u32];
        unroll!(i in 0 1 2 3 4; {
            words.set(FOUND + i, found[i]);
        });
        let weights = [before_first, before_step, through_step];
        unroll!(i in 0 1 2; {
            words.set(FOUND + 5 + 2 * i, weights[i] as u32);
            words.set(FOUND + 6 + 2 * i, (weights[i] >> u32::BITS) as u32);
        });
    }
}

/// What [`find`] has found.
#[inline(always)]
fn found(words: GlobalMut<u32>) -> Found {
    let at = |i: usize| words.get(FOUND + i);
    Found {
        first: at(0),
        last: at(1),
        step: at(2),
        keeps: at(3),
        between: at(4),
        before_first: wide(at(5), at(6)),
        before_step: wide(at(7), at(8)),
        through_step: wide(at(9), at(10)),
    }
}

#[kernel]
pub fn sample_limits(a: SampleLimitsArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (t, row) = (thread::thread_idx_x(), thread::block_idx_y() as usize);
    let (start, values) = load(&a);
    let (words, max) = (words(&a), row_max(&a));
    if !max.is_finite() {
        if t == 0 {
            a.limits.set(2 * row, order::ABSENT);
            a.limits.set(2 * row + 1, u32::MAX);
        }
        return;
    }
    let ends = found(words);
    let wanted = |u: usize, j: usize| {
        let (id, v) = (start + at(u, j), values[u][j]);
        let step = step_of(max, v);
        let ends_here = (step >= ends.first && step <= ends.last) || (top_k(&a) && step == ends.step);
        ends_here && id < a.vocab as usize && !v.is_nan()
    };
    let mut hits = 0;
    unroll!(u in 0 1; {
        unroll!(j in 0 1 2 3; {
            hits += wanted(u, j) as u32;
        });
    });
    if warp::any(hits > 0) {
        let upto = warp::inclusive_sum(hits);
        let mut base = 0;
        if warp::lane_id() == warp::WARP - 1 {
            base = words.atomic_add(COLLECTED, upto);
        }
        // One behind the next.
        let mut end = (warp::shfl(base, warp::WARP - 1) + upto - hits) as usize;
        unroll!(u in 0 1; {
            unroll!(j in 0 1 2 3; {
                if wanted(u, j) {
                    end += 1;
                    if end <= ROOM {
                        let id = (start + at(u, j)) as u32;
                        words.st8(CANDIDATES + 2 * (end - 1), [!id, order::key(values[u][j])]);
                    }
                }
            });
        });
    }
    if !last(words, ENDED + 1) {
        return;
    }
    let count = words.get(COLLECTED) as usize;
    let (mut key, mut id) = if count > ROOM { by_passes(&a, max) } else { by_sort(&a, words, ends, count, max) };
    if a.min_p > 0.0 {
        let least = order::key(max + math::ln(a.min_p) / a.inverse_temperature);
        if least > key {
            (key, id) = (least, u32::MAX);
        }
    }
    if t == 0 {
        a.limits.set(2 * row, key);
        a.limits.set(2 * row + 1, id);
    }
}

/// The limits of a row of which `count` candidates were collected.
#[inline(always)]
fn by_sort(a: &SampleLimitsArgs, words: GlobalMut<u32>, ends: Found, count: usize, max: f32) -> (u32, u32) {
    let t = thread::thread_idx_x() as usize;
    let (mut key, mut id) = (order::ABSENT, u32::MAX);
    if count == 0 {
        return (key, id);
    }
    let size = bitonic::padded(count as u32);
    let list = dynamic_shared::<u64>(0, size);
    let mut i = t;
    while i < size as usize {
        let mut entry = 0;
        if i < count {
            let [low, high] = words.ld8(CANDIDATES + 2 * i);
            entry = wide(low, high);
        }
        list.set(i, entry);
        i += THREADS as usize;
    }
    thread::sync_threads();
    bitonic::sort_descending(list, size);
    let limit = |i: usize| {
        let entry = list.get(i);
        ((entry >> u32::BITS) as u32, !(entry as u32))
    };
    // Candidates that top-k keeps.
    let mut kept = count;
    if top_k(a) {
        kept = (ends.between + ends.keeps) as usize;
        (key, id) = limit(kept - 1);
    }
    if a.top_p < 1.0 {
        let weight_of = |i: usize| {
            let below = max - order::value((list.get(i) >> u32::BITS) as u32);
            weight(below * a.inverse_temperature) as u64
        };
        // A thread has a part of them, in order.
        let part = math::div_usize(kept + THREADS as usize - 1, THREADS as usize);
        let (from, to) = (t * part, if (t + 1) * part < kept { (t + 1) * part } else { kept });
        let (mut own, mut of_step) = (0, 0);
        let mut i = from;
        while i < to {
            own += weight_of(i);
            of_step += if i >= ends.between as usize { weight_of(i) } else { 0 };
            i += 1;
        }
        let (_, of_step) = block_sums(of_step);
        thread::sync_threads();
        let (upto, _) = block_sums(own);
        let place = sample_limits_place();
        let all = if top_k(a) { ends.before_step + of_step } else { ends.through_step };
        let wanted = share(all, a.top_p);
        let mut sum = ends.before_first + upto - own;
        let mut i = from;
        while i < to {
            let before = sum;
            sum += weight_of(i);
            if before < wanted && sum >= wanted {
                place.set(0, i as u32);
            }
            i += 1;
        }
        thread::sync_threads();
        (key, id) = limit(place.get(0) as usize);
    }
    (key, id)
}
