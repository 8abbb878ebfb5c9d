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
//! Grid: x = rows. A block finds a place in the order without sorting: a histogram of weights over 256 steps of
//! (max - logit) / T, of which the one that holds the place is resolved by the four bytes of the key, then, where equal
//! logits straddle the place, by those of the id. The steps keep apart what the first byte of a float does not.
//! A row that `draw` will report gets some limits.

use cuda_std::{Global, Shared, kernel, math, static_shared, thread, warp};

use super::order;
use crate::args::tokens::SampleLimitsArgs;
use crate::unroll::unroll;

/// Threads a block. More than 256: the passes over a row are latency, and there are few rows.
pub const THREADS: u32 = 1024;

const LANES: usize = warp::WARP as usize;
const WARPS: usize = THREADS as usize / LANES;
const DIGIT_BITS: u32 = 8;
const BINS: usize = 1 << DIGIT_BITS;
/// Bins that a lane looks through.
const OWNED: usize = BINS / LANES;
/// Logits of a 16-byte load.
const WIDE: usize = 4;
/// Steps of the first histogram in a factor of e.
const STEPS: f32 = 8.0;
/// Weight of the largest logit.
const UNIT: f32 = (1u32 << 31) as f32;

// Sums of weights by bin, low and high words.
static_shared!(fn sample_limits_low() -> [u32; BINS]);
static_shared!(fn sample_limits_high() -> [u32; BINS]);
// The bin found; what is wanted of it and what it holds, low and high words each.
static_shared!(fn sample_limits_found() -> [u32; 5]);
static_shared!(fn sample_limits_max() -> [f32; WARPS]);

#[inline(always)]
fn wide(low: u32, high: u32) -> u64 {
    (high as u64) << u32::BITS | low as u64
}

/// Adds `weight` to a bin.
#[inline(always)]
fn add(bin: usize, weight: u32) {
    if weight == 0 {
        return;
    }
    let before = sample_limits_low().atomic_add(bin, weight);
    if before.wrapping_add(weight) < before {
        sample_limits_high().atomic_add(bin, 1);
    }
}

/// A place in the order: the bin or key that holds it, how much is wanted of that, and how much there is.
#[derive(Clone, Copy)]
struct Place {
    at: u32,
    wanted: u64,
    there: u64,
}

/// Fills the histogram with `fill` and finds the first bin, from the highest on, at which the sum reaches `wanted`.
/// Weights together must reach it.
#[inline(always)]
fn find(wanted: impl Fn(u64) -> u64, fill: impl Fn()) -> Place {
    let (low, high, found) = (sample_limits_low(), sample_limits_high(), sample_limits_found());
    let t = thread::thread_idx_x() as usize;
    if t < BINS {
        low.set(t, 0);
        high.set(t, 0);
    }
    thread::sync_threads();
    fill();
    thread::sync_threads();
    if warp::warp_id() == 0 {
        // Lane 0 has the highest bins.
        let top = BINS - 1 - warp::lane_id() as usize * OWNED;
        let mut own = 0;
        for i in 0..OWNED {
            own += wide(low.get(top - i), high.get(top - i));
        }
        let mut upto = own;
        let mut step = 1;
        while step < warp::WARP {
            let below = wide(warp::shfl_up(upto as u32, step), warp::shfl_up((upto >> u32::BITS) as u32, step));
            upto += if warp::lane_id() >= step { below } else { 0 };
            step *= 2;
        }
        let all = wide(warp::shfl(upto as u32, 31), warp::shfl((upto >> u32::BITS) as u32, 31));
        let wanted = wanted(all);
        let mut before = upto - own;
        for i in 0..OWNED {
            let there = wide(low.get(top - i), high.get(top - i));
            if before < wanted && before + there >= wanted {
                let left = wanted - before;
                found.set(0, (top - i) as u32);
                found.set(1, left as u32);
                found.set(2, (left >> u32::BITS) as u32);
                found.set(3, there as u32);
                found.set(4, (there >> u32::BITS) as u32);
            }
            before += there;
        }
    }
    thread::sync_threads();
    let place =
        Place { at: found.get(0), wanted: wide(found.get(1), found.get(2)), there: wide(found.get(3), found.get(4)) };
    thread::sync_threads();
    place
}

/// Calls `visit` for each logit of the row, on one of the threads.
#[inline(always)]
fn each(logits: Global<f32>, mut visit: impl FnMut(usize, f32)) {
    let (t, len) = (thread::thread_idx_x() as usize, logits.len());
    let mut rest = 0;
    if logits.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        rest = len / WIDE * WIDE;
        let mut i = t * WIDE;
        while i < rest {
            let four = logits.ld16(i);
            unroll!(j in 0 1 2 3; {
                visit(i + j, f32::from_bits(four[j]));
            });
            i += THREADS as usize * WIDE;
        }
    }
    let mut i = rest + t;
    while i < len {
        visit(i, logits.get(i));
        i += THREADS as usize;
    }
}

/// Finds the place byte by byte among the logits with weights, by descending key.
#[inline(always)]
fn by_key(
    logits: Global<f32>,
    wanted: u64,
    key: impl Fn(usize, f32) -> u32,
    weight: impl Fn(usize, f32) -> u32,
) -> Place {
    let mut place = Place { at: 0, wanted, there: 0 };
    let mut shift = u32::BITS;
    while shift > 0 {
        shift -= DIGIT_BITS;
        let (prefix, left) = (place.at, place.wanted);
        let next = find(
            |_| left,
            || {
                each(logits, |i, v| {
                    let digits = key(i, v) >> shift;
                    if digits >> DIGIT_BITS == prefix {
                        add(digits as usize % BINS, weight(i, v));
                    }
                });
            },
        );
        place = Place { at: prefix << DIGIT_BITS | next.at, ..next };
    }
    place
}

/// A row's logits and what is kept of them so far.
#[derive(Clone, Copy)]
struct Row {
    logits: Global<f32>,
    max: f32,
    inverse_temperature: f32,
    last: u32,
    last_id: u32,
}

impl Row {
    #[inline(always)]
    fn kept(self, i: usize, v: f32) -> bool {
        let key = order::key(v);
        key > self.last || (key == self.last && i as u32 <= self.last_id)
    }

    /// (max - logit) / T.
    #[inline(always)]
    fn below(self, v: f32) -> f32 {
        (self.max - v) * self.inverse_temperature
    }

    /// The bin of the first histogram: the highest for the largest logits.
    #[inline(always)]
    fn bin(self, v: f32) -> u32 {
        let step = self.below(v) * STEPS;
        let last = (BINS - 1) as f32;
        BINS as u32 - 1 - if step < last { step as u32 } else { BINS as u32 - 1 }
    }

    /// round(2^31 e^-below), 0 of what is not a number.
    #[inline(always)]
    fn weight(self, v: f32) -> u32 {
        (math::exp(-self.below(v)) * UNIT + 0.5) as u32
    }

    /// Cuts the row where the weights reach `wanted` of their sum.
    #[inline(always)]
    fn cut(&mut self, wanted: impl Fn(u64) -> u64, weight: impl Fn(f32) -> u32) {
        let row = *self;
        let step = find(&wanted, || {
            each(row.logits, |i, v| {
                if row.kept(i, v) {
                    add(row.bin(v) as usize, weight(v));
                }
            });
        });
        let here = |i: usize, v: f32| if row.kept(i, v) && row.bin(v) == step.at { weight(v) } else { 0 };
        let place = by_key(row.logits, step.wanted, |_, v| order::key(v), here);
        self.last = place.at;
        if place.wanted < place.there {
            // Equal logits have equal weights: the lowest ids are kept, as many as reach what is wanted.
            let equal = |i: usize, v: f32| if order::key(v) == place.at { here(i, v) } else { 0 };
            self.last_id = !by_key(row.logits, place.wanted, |i, _| !(i as u32), equal).at;
        } else if place.at != row.last {
            self.last_id = u32::MAX;
        }
    }
}

/// The largest of the row's logits but NaN.
#[inline(always)]
fn row_max(logits: Global<f32>, values: Shared<f32>) -> f32 {
    let mut max = f32::NEG_INFINITY;
    each(logits, |_, v| max = max.max(v));
    let max = warp::reduce_max(max);
    if warp::lane_id() == 0 {
        values.set(warp::warp_id() as usize, max);
    }
    thread::sync_threads();
    warp::reduce_max(values.get(warp::lane_id() as usize % WARPS))
}

#[kernel]
pub fn sample_limits(a: SampleLimitsArgs) {
    let (row_index, vocab) = (thread::block_idx_x() as usize, a.vocab as usize);
    let logits = a.logits.slice(row_index * vocab, vocab);
    let max = row_max(logits, sample_limits_max());
    let mut row =
        Row { logits, max, inverse_temperature: a.inverse_temperature, last: order::ABSENT, last_id: u32::MAX };
    if max.is_finite() {
        if a.top_k > 0 && a.top_k < a.vocab {
            row.cut(|_| a.top_k as u64, |_| 1);
        }
        if a.top_p < 1.0 {
            let whole = row;
            let share = |all: u64| {
                // The product is rounded; at least one token is kept, and at most all.
                let part = (all as f32 * a.top_p) as u64;
                if part == 0 {
                    1
                } else if part < all {
                    part
                } else {
                    all
                }
            };
            row.cut(share, |v| whole.weight(v));
        }
        if a.min_p > 0.0 {
            let least = order::key(max + math::ln(a.min_p) / a.inverse_temperature);
            if least > row.last {
                (row.last, row.last_id) = (least, u32::MAX);
            }
        }
    }
    if thread::thread_idx_x() == 0 {
        a.limits.set(2 * row_index, row.last);
        a.limits.set(2 * row_index + 1, row.last_id);
    }
}
