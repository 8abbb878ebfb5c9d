//! New rows of one layer's cache: the latent after its norm, the rotary key after its rotation.
//!
//! ```text
//! y = weight * t[r, ..LATENT] / sqrt(mean(t[r, ..LATENT]^2) + eps)         k = rotate(t[r, LATENT ..], S + depths[r])
//! kv_append:     row S + r = bf16(y), bf16(k)
//! kv_append_f8:  row S + r = e4m3(y / scale), scale of each F8_GROUP values, bf16(k)
//!                scale = the least power of two for which the group's largest is at most F8_LARGEST
//! ```
//!
//! A row goes to slot S + r (its place in the tree's order), rotated for position S + depth: siblings share a position,
//! never a slot. Grid: x = rows. A block owns one row; each of its 128 threads owns four latent values, the first 32
//! also a rotary pair. The sum is f32 in a fixed order (thread, warp, warps ascending). A warp has the values of one
//! scale; as it is a power of two, codes times scale are exact in bf16. A group with NaN, or with values too large for
//! a scale, gets NaN for its scale and so is NaN when it is read.

use cuda_std::{GlobalMut, bf16, kernel, math, static_shared, thread, warp};

use super::query::{ROPE_PAIRS, rotate_pair, table_row};
use super::rms_norm::inverse_rms;
use crate::args::attention::{
    F8_GROUP, F8_LARGEST, F8_LARGEST_SCALE, F8_ROTARY, F8_ROW, F8_SCALES, KEY, KvAppendArgs, LATENT,
};
use crate::args::state;

/// Threads a block.
pub const THREADS: u32 = 128;

const WARPS: usize = (THREADS / warp::WARP) as usize;
/// Latent values of a thread.
const OWN: usize = LATENT / THREADS as usize;
/// Exponent of the least scale: for smaller values their digits no longer matter.
const LEAST_EXPONENT: u32 = 127 - 100;

const _: () = assert!(OWN * warp::WARP as usize == F8_GROUP, "a warp finds the scale of its values");

static_shared!(fn kv_append_partial() -> [f32; WARPS]);

#[kernel]
pub fn kv_append(a: KvAppendArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let to = slot(&a, KEY * size_of::<bf16>());
    let t = thread::thread_idx_x() as usize;
    let y = latent(&a);
    let cache = GlobalMut::<bf16>::from_raw(a.cache.addr(), a.cache.len() / size_of::<bf16>());
    let to = to / size_of::<bf16>();
    cache.st8(to + t * OWN, [math::pack_bf16(y[0], y[1]), math::pack_bf16(y[2], y[3])]);
    if t < ROPE_PAIRS {
        cache.st4(to + LATENT + 2 * t, rotary(&a, t));
    }
}

#[kernel]
pub fn kv_append_f8(a: KvAppendArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let to = slot(&a, F8_ROW);
    let t = thread::thread_idx_x() as usize;
    let y = latent(&a);
    let largest = y[0].abs().max(y[1].abs()).max(y[2].abs().max(y[3].abs()));
    let largest = warp::reduce_max(largest);
    let finite = warp::all((y[0] + y[1] + (y[2] + y[3])).is_finite());
    let scale = scale_for(largest);
    let fits = finite && scale <= F8_LARGEST_SCALE;
    // The inverse of a power of two is exact.
    let inverse = if fits { 1.0 / scale } else { 0.0 };
    let code = |i: usize| if fits { math::to_e4m3(y[i] * inverse) } else { 0 };
    a.cache.st4(to + t * OWN, code(0) | code(1) << 8 | code(2) << 16 | code(3) << 24);
    if warp::lane_id() == 0 {
        let scale = if fits { scale } else { f32::NAN };
        a.cache.st4(to + F8_SCALES + warp::warp_id() as usize * size_of::<f32>(), scale.to_bits());
    }
    if t < ROPE_PAIRS {
        a.cache.st4(to + F8_ROTARY + 2 * t * size_of::<bf16>(), rotary(&a, t));
    }
}

/// The least power of two that is `largest / F8_LARGEST` or more.
#[inline(always)]
fn scale_for(largest: f32) -> f32 {
    const FRACTION: u32 = (1 << 23) - 1;
    const { assert!(F8_LARGEST == 1.75 * 256.0) };
    // A fraction above .75 carries into the exponent.
    let above = largest.to_bits() + (FRACTION - (F8_LARGEST.to_bits() & FRACTION));
    f32::from_bits((above >> 23).saturating_sub(8).max(LEAST_EXPONENT) << 23)
}

/// First byte of this block's row.
#[inline(always)]
fn slot(a: &KvAppendArgs, row_bytes: usize) -> usize {
    let slot = a.state.get(state::COMMITTED) as usize + thread::block_idx_x() as usize;
    if (slot + 1) * row_bytes > a.cache.len() {
        thread::trap("a cache row past the last slot");
    }
    slot * row_bytes
}

/// This thread's values after the norm.
#[inline(always)]
fn latent(a: &KvAppendArgs) -> [f32; OWN] {
    let partial = kv_append_partial();
    let t = thread::thread_idx_x() as usize;
    let x = a.t.ld16(thread::block_idx_x() as usize * KEY + t * OWN).map(f32::from_bits);
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
    [x[0] * scale * g[0], x[1] * scale * g[1], x[2] * scale * g[2], x[3] * scale * g[3]]
}

/// Rotary pair `pair`, turned.
#[inline(always)]
fn rotary(a: &KvAppendArgs, pair: usize) -> u32 {
    let row = thread::block_idx_x() as usize;
    let angles = table_row(a.cos, a.state.get(state::COMMITTED), a.depths.get(row), ROPE_PAIRS);
    let i = row * KEY + LATENT + 2 * pair;
    rotate_pair(a.t.get(i), a.t.get(i + 1), a.cos, a.sin, angles + pair)
}
