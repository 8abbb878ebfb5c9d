//! New rows of one layer's cache: the latent after its norm, the rotary key after its rotation.
//!
//! ```text
//! cache[S + r, 0 .. LATENT]      = bf16(weight * t[r, ..LATENT] / sqrt(mean(t[r, ..LATENT]^2) + eps))
//! cache[S + r, LATENT ..]        = bf16(rotate(t[r, LATENT ..], S + depths[r]))        neighbouring pairs
//! ```
//!
//! A row goes to slot S + r (its place in the tree's order), rotated for position S + depth: siblings share a position,
//! never a slot. Grid: x = rows. A block owns one row; each of its 128 threads owns four latent values, the first 32
//! also a rotary pair. The sum is f32 in a fixed order (thread, warp, warps ascending).

use cuda_std::{kernel, math, static_shared, thread, warp};

use super::query::{ROPE_PAIRS, rotate_pair, table_row};
use super::rms_norm::inverse_rms;
use crate::args::attention::{KEY, KvAppendArgs, LATENT};
use crate::args::state;

/// Threads a block.
pub const THREADS: u32 = 128;

const WARPS: usize = (THREADS / warp::WARP) as usize;
/// Latent values of a thread.
const OWN: usize = LATENT / THREADS as usize;

static_shared!(fn kv_append_partial() -> [f32; WARPS]);

#[kernel]
pub fn kv_append(a: KvAppendArgs) {
    let partial = kv_append_partial();
    let row = thread::block_idx_x() as usize;
    let t = thread::thread_idx_x() as usize;
    let committed = a.state.get(state::COMMITTED);
    let slot = committed as usize + row;
    if (slot + 1) * KEY > a.cache.len() {
        thread::trap("a cache row past the last slot");
    }
    let (from, to) = (row * KEY, slot * KEY);

    let x = a.t.ld16(from + t * OWN).map(f32::from_bits);
    let mut sum = 0.0;
    for v in x {
        sum = math::fma(v, v, sum);
    }
    sum = warp::reduce_sum(sum);
    if warp::lane_id() == 0 {
        partial.set(warp::warp_id() as usize, sum);
    }
    thread::sync_threads();
    let mut total = 0.0;
    for w in 0..WARPS {
        total += partial.get(w);
    }
    let scale = inverse_rms(total, LATENT as u32, a.eps);
    let g = a.weight.ld16(t * OWN).map(f32::from_bits);
    let words = [
        math::pack_bf16(x[0] * scale * g[0], x[1] * scale * g[1]),
        math::pack_bf16(x[2] * scale * g[2], x[3] * scale * g[3]),
    ];
    a.cache.st8(to + t * OWN, words);

    if t < ROPE_PAIRS {
        let angles = table_row(a.cos, committed, a.depths.get(row), ROPE_PAIRS);
        let i = from + LATENT + 2 * t;
        let word = rotate_pair(a.t.get(i), a.t.get(i + 1), a.cos, a.sin, angles + t);
        a.cache.st4(to + LATENT + 2 * t, word);
    }
}
