//! `out[r, i] = weight[i] * x[r, i] / sqrt(mean(x[r, :]^2) + eps)`
//!
//! Grid: x = rows. A block owns one row; its 256 threads stride over the row. Sums are f32 in a fixed order (per
//! thread, then per warp, then warps in ascending order), so a row's bits do not depend on the other rows.

use cuda_std::{kernel, math, static_shared, thread, warp};

use crate::args::RmsNormArgs;

/// Threads a block.
pub const THREADS: u32 = 256;

static_shared!(fn rms_norm_partial() -> [f32; (THREADS / warp::WARP) as usize]);

/// `1 / sqrt(sum / width + eps)` of a row's sum of squares. A sum that has overflowed gives NaN, not 0: a row of zeros
/// would pass for a value, and its largest logit for token 0.
#[inline(always)]
pub(super) fn inverse_rms(sum: f32, width: u32, eps: f32) -> f32 {
    let scale = 1.0 / math::sqrt(sum / width as f32 + eps);
    if scale > 0.0 { scale } else { f32::NAN }
}

#[kernel]
pub fn rms_norm(a: RmsNormArgs) {
    let partial = rms_norm_partial();
    let width = a.width as usize;
    let row = thread::block_idx_x() as usize;
    let x = a.x.slice(row * a.stride as usize, width);
    let t = thread::thread_idx_x() as usize;

    let mut sum = 0.0;
    let mut i = t;
    while i < width {
        let v = x.get(i);
        sum = math::fma(v, v, sum);
        i += THREADS as usize;
    }
    sum = warp::reduce_sum(sum);
    if warp::lane_id() == 0 {
        partial.set(warp::warp_id() as usize, sum);
    }
    thread::sync_threads();
    let mut total = 0.0;
    for w in 0..(THREADS / warp::WARP) as usize {
        total += partial.get(w);
    }
    let scale = inverse_rms(total, a.width, a.eps);

    let mut i = t;
    while i < width {
        let y = x.get(i) * scale * a.weight.get(i);
        if !a.out_f32.is_empty() {
            a.out_f32.set(row * width + i, y);
        }
        if !a.out_bf16.is_empty() {
            a.out_bf16.set(row * width + i, math::to_bf16(y));
        }
        i += THREADS as usize;
    }
}
