//! `out[r, i] = silu(gate[r, i]) * up[r, i]`, with `silu(z) = z / (1 + e^-z)`, unrounded and rounded once to bf16.
//!
//! Grid: x = rows, y = parts of 256 columns. A thread owns one element.

use cuda_std::{kernel, math, thread};

use crate::args::tokens::SwigluArgs;

/// Threads a block.
pub const THREADS: u32 = 256;

#[kernel]
pub fn swiglu(a: SwigluArgs) {
    let (width, stride) = (a.width as usize, a.stride as usize);
    let row = thread::block_idx_x() as usize;
    let i = (thread::block_idx_y() * THREADS + thread::thread_idx_x()) as usize;
    if i >= width {
        return;
    }
    let y = math::silu(a.gate.get(row * stride + i)) * a.up.get(row * stride + i);
    if !a.out_f32.is_empty() {
        a.out_f32.set(row * width + i, y);
    }
    if !a.out_bf16.is_empty() {
        a.out_bf16.set(row * width + i, math::to_bf16(y));
    }
}
