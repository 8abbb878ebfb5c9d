//! Copies of whole rows.
//!
//! ```text
//! round_bf16: out[i] = bf16(x[i])                           for i in 0..n
//! tap:        dst[r, offset + i] = src[r, i]                for i in 0..width
//! ```
//!
//! Grid of `round_bf16`: x = blocks of 256 values. Grid of `tap`: x = rows, y = blocks of 256 values of the row. A
//! thread owns one value: these move little and are limited by memory.

use cuda_std::{kernel, math, thread};

use crate::args::attention::{RoundBf16Args, TapArgs};

/// Threads a block.
pub const THREADS: u32 = 256;

#[kernel]
pub fn round_bf16(a: RoundBf16Args) {
    let i = thread::block_idx_x() as usize * THREADS as usize + thread::thread_idx_x() as usize;
    if i < a.n as usize {
        a.out.set(i, math::to_bf16(a.x.get(i)));
    }
}

#[kernel]
pub fn tap(a: TapArgs) {
    let row = thread::block_idx_x() as usize;
    let i = thread::block_idx_y() as usize * THREADS as usize + thread::thread_idx_x() as usize;
    if i < a.width as usize {
        let value = a.src.get(row * a.width as usize + i);
        a.dst.set(row * a.stride as usize + a.offset as usize + i, value);
    }
}
