//! Bitonic sort of a list in shared memory by all threads of a block: for lists of up to a few thousand entries, where
//! the time is that of the steps.
//!
//! A warp owns segments of 64 entries, two a lane, and makes every step of stride 32 or less on them in registers;
//! longer strides go through shared memory with a barrier each.

use cuda_std::{Shared, thread, warp};

use crate::unroll::unroll;

/// Entries of a warp's segment, and the shortest list.
pub const SEGMENT: u32 = 2 * warp::WARP;

/// Entries that a list of `count` is filled up to.
#[inline(always)]
pub const fn padded(count: u32) -> u32 {
    let size = count.next_power_of_two();
    if size > SEGMENT { size } else { SEGMENT }
}

/// Sorts the first `size` (see [`padded`]) entries, the largest first. They lie behind a barrier when it is called and
/// when it returns.
#[inline(always)]
pub fn sort_descending(list: Shared<u64>, size: u32) {
    in_segments(list, size, 2, SEGMENT);
    let mut run = 2 * SEGMENT;
    while run <= size {
        let mut stride = run / 2;
        while stride >= SEGMENT {
            thread::sync_threads();
            let mut pair = thread::thread_idx_x();
            while pair < size / 2 {
                let low = pair & (stride - 1);
                let i = (pair - low) * 2 + low;
                let (a, b) = (list.get(i as usize), list.get((i + stride) as usize));
                if (a < b) == (i & run == 0) {
                    list.set(i as usize, b);
                    list.set((i + stride) as usize, a);
                }
                pair += thread::block_dim_x();
            }
            stride /= 2;
        }
        thread::sync_threads();
        in_segments(list, size, run, run);
        run *= 2;
    }
    thread::sync_threads();
}

/// The steps of stride 32 or less that end runs of `first` to `last` entries.
#[inline(always)]
fn in_segments(list: Shared<u64>, size: u32, first: u32, last: u32) {
    let (lane, warps) = (warp::lane_id(), thread::block_dim_x() / warp::WARP);
    let mut base = warp::warp_id() * SEGMENT;
    while base < size {
        let (i, j) = (base + lane, base + lane + warp::WARP);
        let (mut x, mut y) = (list.get(i as usize), list.get(j as usize));
        let mut run = first;
        while run <= last {
            if run > warp::WARP && (x < y) == (i & run == 0) {
                (x, y) = (y, x);
            }
            unroll!(shift in 4 3 2 1 0; {
                let stride = 1 << shift;
                if stride < run {
                    x = kept(x, i, run, stride);
                    y = kept(y, j, run, stride);
                }
            });
            run *= 2;
        }
        list.set(i as usize, x);
        list.set(j as usize, y);
        base += warps * SEGMENT;
    }
}

/// The larger or the smaller of the values at `i` and `i ^ stride`, as the run of entry `i` wants it.
#[inline(always)]
fn kept(value: u64, i: u32, run: u32, stride: u32) -> u64 {
    let (low, high) = (warp::shfl_xor(value as u32, stride), warp::shfl_xor((value >> u32::BITS) as u32, stride));
    let other = (high as u64) << u32::BITS | low as u64;
    let larger = (i & run == 0) == (i & stride == 0);
    if (value < other) == larger { other } else { value }
}
