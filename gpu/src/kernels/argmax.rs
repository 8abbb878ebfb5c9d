//! `pick[r]` = index of the largest of `logits[r, :]`, the lowest of equals; `best[r]`, and `second[r]` = the largest
//! of the others (equal to `best` when two tie).
//!
//! Grid: x = rows. A block owns one row of up to 163,840 logits: each thread keeps four 16-byte loads in flight and a
//! running (best, pick, second), and these are merged in a warp, then over warps. The merge does not depend on order.
//! A row with NaN, +inf or no finite logit has pick -1; it is reported in the state if it is a row of the tree
//! (row <= NODES), not if it is padding.

use cuda_std::{kernel, static_shared, thread, warp};

use super::errors;
use crate::args::state::{ERROR_LOGITS, NODES};
use crate::args::tokens::ArgmaxArgs;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;

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
    /// Adds one logit, of a larger index than those before.
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
}

#[kernel]
pub fn argmax(a: ArgmaxArgs) {
    let vocab = a.vocab as usize;
    let row = thread::block_idx_x() as usize;
    let logits = a.logits.slice(row * vocab, vocab);
    let t = thread::thread_idx_x() as usize;

    let mut top = Top { best: f32::NEG_INFINITY, pick: NOBODY, second: f32::NEG_INFINITY };
    let mut nan = false;
    let step = WIDE * THREADS as usize;
    let mut wide = 0;
    if logits.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        while wide + UNROLL * step <= vocab {
            let from = wide + t * WIDE;
            let loads = [
                logits.ld16(from),
                logits.ld16(from + step),
                logits.ld16(from + 2 * step),
                logits.ld16(from + 3 * step),
            ];
            unroll!(u in 0 1 2 3; {
                unroll!(j in 0 1 2 3; {
                    let v = f32::from_bits(loads[u][j]);
                    nan |= v.is_nan();
                    top.add(v, from + u * step + j);
                });
            });
            wide += UNROLL * step;
        }
    }
    let mut i = wide + t;
    while i < vocab {
        let v = logits.get(i);
        nan |= v.is_nan();
        top.add(v, i);
        i += THREADS as usize;
    }

    let mut lanes = warp::WARP / 2;
    while lanes > 0 {
        let other = Top {
            best: warp::shfl_xor(top.best, lanes),
            pick: warp::shfl_xor(top.pick, lanes),
            second: warp::shfl_xor(top.second, lanes),
        };
        top = top.merge(other);
        lanes /= 2;
    }
    let nan = warp::ballot(nan);
    let w = warp::warp_id() as usize;
    if warp::lane_id() == 0 {
        argmax_best().set(w, top.best);
        argmax_pick().set(w, top.pick);
        argmax_second().set(w, top.second);
        argmax_nan().set(w, nan);
    }
    thread::sync_threads();
    if t != 0 {
        return;
    }
    let mut nan = nan;
    for w in 1..WARPS {
        top = top.merge(Top { best: argmax_best().get(w), pick: argmax_pick().get(w), second: argmax_second().get(w) });
        nan |= argmax_nan().get(w);
    }
    let good = nan == 0 && top.best.is_finite();
    a.pick.set(row, if good { top.pick as i32 } else { -1 });
    a.best.set(row, if nan == 0 { top.best } else { f32::NAN });
    a.second.set(row, top.second);
    if !good && row as u32 <= a.state.get(NODES) {
        errors::report(a.state, ERROR_LOGITS, row as u32);
    }
}
