//! The slow way to the limits of [`super::sample_limits`]: a row's place in the order without sorting, by one block.
//!
//! A histogram of weights over 256 steps of (max - logit) / T, of which the one that holds the place is resolved by the
//! four bytes of the key, then, where equal logits straddle the place, by those of the id. The steps keep apart what
//! the first byte of a float does not.

use cuda_std::{Global, static_shared, thread, warp};

use super::order;
use super::sample_limits::{THREADS, share, weight, wide};
use crate::args::tokens::SampleLimitsArgs;
use crate::unroll::unroll;

const LANES: usize = warp::WARP as usize;
const DIGIT_BITS: u32 = 8;
const BINS: usize = 1 << DIGIT_BITS;
/// Bins that a lane looks through.
const OWNED: usize = BINS / LANES;
/// Logits of a 16-byte load, and loads on their way at once.
const WIDE: usize = 4;
const AHEAD: usize = 4;
/// Steps of the first histogram in a factor of e.
const STEPS: f32 = 8.0;

// Sums of weights by bin, low and high words.
static_shared!(fn sample_passes_low() -> [u32; BINS]);
static_shared!(fn sample_passes_high() -> [u32; BINS]);
// The bin found; what is wanted of it and what it holds, low and high words each.
static_shared!(fn sample_passes_found() -> [u32; 5]);

/// Adds `weight` to a bin.
#[inline(always)]
fn add(bin: usize, weight: u32) {
    if weight == 0 {
        return;
    }
    let before = sample_passes_low().atomic_add(bin, weight);
    if before.wrapping_add(weight) < before {
        sample_passes_high().atomic_add(bin, 1);
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
    let (low, high, found) = (sample_passes_low(), sample_passes_high(), sample_passes_found());
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
    let (t, len, step) = (thread::thread_idx_x() as usize, logits.len(), THREADS as usize * WIDE);
    let mut rest = 0;
    if logits.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        // Several loads on their way at once.
        rest = len / (AHEAD * step) * (AHEAD * step);
        let mut i = t * WIDE;
        while i < rest {
            let mut values = [[0; WIDE]; AHEAD];
            unroll!(u in 0 1 2 3; {
                values[u] = logits.ld16(i + u * step);
            });
            unroll!(u in 0 1 2 3; {
                unroll!(j in 0 1 2 3; {
                    visit(i + u * step + j, f32::from_bits(values[u][j]));
                });
            });
            i += AHEAD * step;
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

    /// What it counts in top-p.
    #[inline(always)]
    fn weight(self, v: f32) -> u32 {
        weight(self.below(v))
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

/// Last key and last id that top-k and top-p keep of this block's row, whose largest logit is `max`.
#[inline(always)]
pub fn by_passes(a: &SampleLimitsArgs, max: f32) -> (u32, u32) {
    let vocab = a.vocab as usize;
    let logits = a.logits.slice(thread::block_idx_y() as usize * vocab, vocab);
    let mut row =
        Row { logits, max, inverse_temperature: a.inverse_temperature, last: order::ABSENT, last_id: u32::MAX };
    if a.top_k > 0 && a.top_k < a.vocab {
        row.cut(|_| a.top_k as u64, |_| 1);
    }
    if a.top_p < 1.0 {
        let whole = row;
        row.cut(|all| share(all, a.top_p), |v| whole.weight(v));
    }
    (row.last, row.last_id)
}
