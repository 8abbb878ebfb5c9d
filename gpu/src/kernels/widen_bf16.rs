//! `out[i] = f32(x[i])`, exact: rounded activations for a product whose weights are f32.
//!
//! Grid: x = blocks of 256 values, one a thread.

use cuda_std::{kernel, math, thread};

use crate::args::WidenBf16Args;

/// Threads a block.
pub const THREADS: u32 = 256;

#[kernel]
pub fn widen_bf16(a: WidenBf16Args) {
    let i = thread::block_idx_x() as usize * THREADS as usize + thread::thread_idx_x() as usize;
    if i < a.out.len() {
        a.out.set(i, math::from_bf16(a.x.get(i)));
    }
}
