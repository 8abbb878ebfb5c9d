//! `x[r, i] += sum_j weights[r, j] * y[r * top_k + j, i] + shared[r, i]`
//!
//! Grid: x = rows, y = parts of the columns. A thread owns one column of a row, or four where rows can be read 16 bytes
//! at a time; then the slots' values are on their way together. The sum runs over the slots in ascending order with one
//! fma each, then the shared expert is added once, then the residual: one order for all.

use cuda_std::{kernel, math, thread};

use crate::args::tokens::CombineArgs;
use crate::unroll::unroll;

/// Threads a block where a thread owns one column.
pub const THREADS: u32 = 256;
/// Threads a block where a thread owns [`WIDE`] columns.
pub const WIDE_THREADS: u32 = 128;
/// Columns of a 16-byte load.
pub const WIDE: usize = 4;
/// Slots that are read together.
const SLOTS: usize = 8;

#[kernel(threads = THREADS, blocks = 4)]
pub fn combine(a: CombineArgs) {
    let (width, top_k) = (a.width as usize, a.top_k as usize);
    let row = thread::block_idx_x() as usize;
    let owner = (thread::block_idx_y() * thread::block_dim_x() + thread::thread_idx_x()) as usize;
    if a.wide != 0 {
        return four(a, row, owner * WIDE);
    }
    if owner >= width {
        return;
    }
    thread::wait_for_previous();
    thread::start_next();
    let mut sum = 0.0;
    for pair in row * top_k..(row + 1) * top_k {
        sum = math::fma(a.weights.get(pair), a.y.get(pair * width + owner), sum);
    }
    if !a.shared.is_empty() {
        sum += a.shared.get(row * width + owner);
    }
    a.x.set(row * width + owner, a.x.get(row * width + owner) + sum);
}

/// Columns `i ..` of a row.
#[inline(always)]
fn four(a: CombineArgs, row: usize, i: usize) {
    let (width, top_k) = (a.width as usize, a.top_k as usize);
    if i >= width {
        return;
    }
    thread::wait_for_previous();
    thread::start_next();
    let x = a.x.ld16(row * width + i);
    let mut sum = [0.0; WIDE];
    let mut slot = 0;
    while slot < top_k {
        let (first, left) = (row * top_k + slot, top_k - slot);
        let (mut y, mut weights) = ([[0; WIDE]; SLOTS], [0.0; SLOTS]);
        // Slots past the last are read as the last and not added: loads without branches go out together.
        unroll!(j in 0 1 2 3 4 5 6 7; {
            let pair = first + j.min(left - 1);
            y[j] = a.y.ld16(pair * width + i);
            weights[j] = a.weights.get(pair);
        });
        unroll!(j in 0 1 2 3 4 5 6 7; {
            if j < left {
                unroll!(c in 0 1 2 3; { sum[c] = math::fma(weights[j], f32::from_bits(y[j][c]), sum[c]) });
            }
        });
        slot += SLOTS;
    }
    if !a.shared.is_empty() {
        let shared = a.shared.ld16(row * width + i);
        unroll!(c in 0 1 2 3; { sum[c] += f32::from_bits(shared[c]) });
    }
    unroll!(c in 0 1 2 3; { sum[c] += f32::from_bits(x[c]) });
    a.x.st16(row * width + i, sum.map(f32::to_bits));
}
