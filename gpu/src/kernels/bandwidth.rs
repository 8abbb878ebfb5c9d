//! What the memory can do: `to = from`, and `sums[t] = sum of the words that thread t reads` (wrapping).
//!
//! Grid: x = any number of blocks of 256; a thread owns 16 bytes in every `threads of the grid`, four loads ahead of
//! their use. The rates of these two are what products are compared with.

use cuda_std::{kernel, thread};

use crate::args::bandwidth::{CopyArgs, ReadArgs};
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Words of a load.
const WIDE: usize = 4;
/// Loads on their way.
const AHEAD: usize = 4;

/// This thread's first word, and how far the next is.
#[inline(always)]
fn stride() -> (usize, usize) {
    let threads = thread::grid_dim_x() as usize * THREADS as usize;
    let own = thread::block_idx_x() as usize * THREADS as usize + thread::thread_idx_x() as usize;
    (own * WIDE, threads * WIDE)
}

#[kernel]
pub fn copy_words(a: CopyArgs) {
    let (mut at, step) = stride();
    while at + (AHEAD - 1) * step < a.from.len() {
        let mut words = [[0; WIDE]; AHEAD];
        unroll!(i in 0 1 2 3; { words[i] = a.from.ld16_stream(at + i * step) });
        unroll!(i in 0 1 2 3; { a.to.st16(at + i * step, words[i]) });
        at += AHEAD * step;
    }
    while at < a.from.len() {
        a.to.st16(at, a.from.ld16_stream(at));
        at += step;
    }
}

#[kernel]
pub fn read_words(a: ReadArgs) {
    let (mut at, step) = stride();
    let own = at / WIDE;
    let mut sum = 0u32;
    while at + (AHEAD - 1) * step < a.from.len() {
        let mut words = [[0; WIDE]; AHEAD];
        unroll!(i in 0 1 2 3; { words[i] = a.from.ld16_stream(at + i * step) });
        unroll!(i in 0 1 2 3; {
            unroll!(j in 0 1 2 3; { sum = sum.wrapping_add(words[i][j]) });
        });
        at += AHEAD * step;
    }
    while at < a.from.len() {
        let words = a.from.ld16_stream(at);
        unroll!(j in 0 1 2 3; { sum = sum.wrapping_add(words[j]) });
        at += step;
    }
    a.sums.set(own, sum);
}
