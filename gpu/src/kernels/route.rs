//! Router: `p = sigmoid(logits[r, :])`; the `top_k` experts of the largest `p + bias`, ties to the lower id, in
//! descending order; `weights = p / (sum of the chosen p + 1e-20) * scaling` (without the division if `norm` is 0).
//!
//! Grid: x = rows. A block owns one row. An expert's place is the number of experts before it, counted by its thread
//! against all keys in shared memory (broadcast reads): exact for ties, one pass for any `top_k`, no rounds.
//! A row with NaN is reported in the state; its ids are 0..top_k and its weights NaN.

use cuda_std::{kernel, math, static_shared, thread};

use super::{errors, order};
use crate::args::state::ERROR_ROUTER;
use crate::args::tokens::RouteArgs;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Experts at most: what the shared arrays hold.
pub const MAX_EXPERTS: usize = 1024;

/// Keys read at once.
const WIDE: usize = 4;
/// Key of NaN: above that of every number, so that each thread sees it while it counts.
const NAN: u32 = u32::MAX;
/// Keeps the division defined when every chosen score is zero.
const TINY: f32 = 1e-20;

static_shared!(fn route_keys() -> [u32; MAX_EXPERTS]);
static_shared!(fn route_scores() -> [f32; MAX_EXPERTS]);
static_shared!(fn route_chosen() -> [f32; MAX_EXPERTS]);

#[kernel]
pub fn route(a: RouteArgs) {
    let (keys, scores, chosen) = (route_keys(), route_scores(), route_chosen());
    let (experts, top_k) = (a.experts as usize, a.top_k as usize);
    let row = thread::block_idx_x() as usize;
    let logits = a.logits.slice(row * experts, experts);
    let t = thread::thread_idx_x() as usize;

    let padded = experts.next_multiple_of(WIDE);
    let mut e = t;
    while e < padded {
        let mut key = order::ABSENT;
        if e < experts {
            let p = math::sigmoid(logits.get(e));
            let x = p + a.bias.get(e);
            key = if x.is_nan() { NAN } else { order::key(x) };
            scores.set(e, p);
        }
        keys.set(e, key);
        e += THREADS as usize;
    }
    thread::sync_threads();

    let mut e = t;
    while e < experts {
        let mine = keys.get(e);
        let (mut place, mut largest) = (0, 0);
        let mut j = 0;
        while j < padded {
            let four = keys.ld16(j);
            for (i, other) in four.into_iter().enumerate() {
                let before = other > mine || (other == mine && j + i < e);
                place += before as usize;
                largest = if other > largest { other } else { largest };
            }
            j += WIDE;
        }
        let score = if largest == NAN { f32::NAN } else { scores.get(e) };
        if largest == NAN {
            place = e;
        }
        if place < top_k {
            a.ids.set(row * top_k + place, e as u32);
            chosen.set(place, score);
        }
        if largest == NAN && e == 0 {
            errors::report(a.state, ERROR_ROUTER, row as u32);
        }
        e += THREADS as usize;
    }
    thread::sync_threads();

    let mut slot = t;
    while slot < top_k {
        let mut weight = chosen.get(slot);
        if a.norm != 0 {
            let mut sum = 0.0;
            for s in 0..top_k {
                sum += chosen.get(s);
            }
            weight /= sum + TINY;
        }
        a.weights.set(row * top_k + slot, weight * a.scaling);
        slot += THREADS as usize;
    }
}
