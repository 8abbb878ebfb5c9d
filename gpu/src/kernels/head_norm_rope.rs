//! Heads of the drafter: RMS norm over a head, rotation of its halves, rounded into a buffer or a cache.
//!
//! ```text
//! y           = weight * x / sqrt(mean(x^2) + eps)          x = x[r, h, :]; y = x without a weight
//! out[.., i]          = bf16(y[i] cos[p, i] - y[i + n] sin[p, i])        n = head_dim / 2, i in 0..n
//! out[.., i + n]      = bf16(y[i + n] cos[p, i] + y[i] sin[p, i])        y itself without a table
//! p = S + base + r;  row of out = (S if to_cache else 0) + base + r
//! ```
//!
//! Grid: x = rows, y = groups of 8 heads. A warp owns one head; a lane the pairs lane, lane + 32, ... Sums are f32,
//! per lane in ascending order, then a butterfly.

use cuda_std::{kernel, math, thread, warp};

use super::query::table_row;
use super::rms_norm::inverse_rms;
use crate::args::attention::HeadNormRopeArgs;
use crate::args::state;

/// Threads a block: a warp for each head of a group.
pub const THREADS: u32 = 256;
/// Heads a block.
pub const HEADS: u32 = THREADS / warp::WARP;

#[kernel]
pub fn head_norm_rope(a: HeadNormRopeArgs) {
    let row = thread::block_idx_x();
    let head = thread::block_idx_y() * HEADS + warp::warp_id();
    if head >= a.heads {
        return;
    }
    let (dim, head) = (a.head_dim as usize, head as usize);
    let half = dim / 2;
    let lane = warp::lane_id() as usize;
    let committed = a.state.get(state::COMMITTED);
    let x = a.x.slice((row as usize * a.heads as usize + head) * dim, dim);

    let mut scale = 1.0;
    if !a.weight.is_empty() {
        let mut sum = 0.0;
        let mut i = lane;
        while i < dim {
            sum = math::fma(x.get(i), x.get(i), sum);
            i += warp::WARP as usize;
        }
        scale = inverse_rms(warp::reduce_sum(sum), a.head_dim, a.eps);
    }

    let start = if a.to_cache != 0 { committed } else { 0 };
    let out_row = start as usize + a.base as usize + row as usize;
    let at = out_row * a.stride as usize + head * dim;
    if at + dim > a.out.len() {
        thread::trap("a row past the end of the output");
    }
    let rotated = !a.cos.is_empty();
    let angles = if rotated { table_row(a.cos, committed, a.base + row, half) } else { 0 };
    let mut i = lane;
    while i < half {
        let (mut low, mut high) = (x.get(i) * scale, x.get(i + half) * scale);
        if !a.weight.is_empty() {
            (low, high) = (low * a.weight.get(i), high * a.weight.get(i + half));
        }
        if rotated {
            let (c, s) = (a.cos.get(angles + i), a.sin.get(angles + i));
            (low, high) = (low * c - high * s, high * c + low * s);
        }
        a.out.set(at + i, math::to_bf16(low));
        a.out.set(at + i + half, math::to_bf16(high));
        i += warp::WARP as usize;
    }
}
