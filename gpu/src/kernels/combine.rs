//! `x[r, i] += sum_j weights[r, j] * y[r * top_k + j, i] + shared[r, i]`
//!
//! Grid: x = rows, y = parts of 256 columns. A thread owns one column of a row. The sum runs over the slots in
//! ascending order with one fma each, then the shared expert is added once, then the residual: one order for all.

use cuda_std::{kernel, math, thread};

use crate::args::tokens::CombineArgs;

/// Threads a block.
pub const THREADS: u32 = 256;

#[kernel]
pub fn combine(a: CombineArgs) {
    let (width, top_k) = (a.width as usize, a.top_k as usize);
    let row = thread::block_idx_x() as usize;
    let i = (thread::block_idx_y() * THREADS + thread::thread_idx_x()) as usize;
    if i >= width {
        return;
    }
    thread::wait_for_previous();
    thread::start_next();
    let mut sum = 0.0;
    for pair in row * top_k..(row + 1) * top_k {
        sum = math::fma(a.weights.get(pair), a.y.get(pair * width + i), sum);
    }
    if !a.shared.is_empty() {
        sum += a.shared.get(row * width + i);
    }
    a.x.set(row * width + i, a.x.get(row * width + i) + sum);
}
