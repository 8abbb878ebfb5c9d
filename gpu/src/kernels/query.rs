//! The absorbed query: latent part rounded, rotary part rotated and rounded, side by side.
//!
//! ```text
//! out[r, h, 0 .. LATENT]        = bf16(q_lat[r, h, :])
//! out[r, h, LATENT + 2i]        = bf16(x[2i] cos[p, i] - x[2i + 1] sin[p, i])      x = q[r, h, nope ..]
//! out[r, h, LATENT + 2i + 1]    = bf16(x[2i + 1] cos[p, i] + x[2i] sin[p, i])      p = S + depths[r]
//! ```
//!
//! Rotation is of neighbouring pairs, as the checkpoint stores them. Grid: x = rows * heads. A block owns one query of
//! KEY / 2 pairs, 3 a thread.

use cuda_std::{Global, kernel, math, thread};

use crate::args::attention::{KEY, LATENT, QueryArgs, ROPE};
use crate::args::state;

/// Threads a block: a third of the pairs.
pub const THREADS: u32 = 96;

const PAIRS: usize = KEY / 2;
const LATENT_PAIRS: usize = LATENT / 2;
/// Pairs of the rotary part.
pub const ROPE_PAIRS: usize = ROPE / 2;

/// The neighbouring pair `(even, odd)` turned by the angle of table entry `at`, rounded to bf16.
#[inline(always)]
pub fn rotate_pair(even: f32, odd: f32, cos: Global<f32>, sin: Global<f32>, at: usize) -> u32 {
    let (c, s) = (cos.get(at), sin.get(at));
    math::pack_bf16(even * c - odd * s, odd * c + even * s)
}

/// First table entry of position `S + depth`. Traps past the table: a GPU would read on.
#[inline(always)]
pub fn table_row(table: Global<f32>, committed: u32, depth: u32, pairs: usize) -> usize {
    let at = (committed as usize + depth as usize) * pairs;
    if at >= table.len() {
        thread::trap("a position past the rotation table");
    }
    at
}

#[kernel]
pub fn query(a: QueryArgs) {
    let at = thread::block_idx_x() as usize;
    let row = math::div(thread::block_idx_x(), a.heads) as usize;
    thread::wait_for_previous();
    thread::start_next();
    let angles = table_row(a.cos, a.state.get(state::COMMITTED), a.depths.get(row), ROPE_PAIRS);
    let latent = at * LATENT;
    let rope = at * (a.nope as usize + ROPE) + a.nope as usize;
    let mut pair = thread::thread_idx_x() as usize;
    while pair < PAIRS {
        let word = if pair < LATENT_PAIRS {
            let i = latent + 2 * pair;
            math::pack_bf16(a.q_lat.get(i), a.q_lat.get(i + 1))
        } else {
            let i = pair - LATENT_PAIRS;
            let (even, odd) = (a.q.get(rope + 2 * i), a.q.get(rope + 2 * i + 1));
            rotate_pair(even, odd, a.cos, a.sin, angles + i)
        };
        a.out.st4(at * KEY + 2 * pair, word);
        pair += THREADS as usize;
    }
}
