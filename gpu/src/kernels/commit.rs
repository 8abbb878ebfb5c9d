//! What follows an accepted path: cache rows and drafter features move to their places, the committed length grows.
//!
//! ```text
//! path = state[PATH .. PATH + PATH_LEN], ascending, path[0] = 0, so path[r] >= r
//! commit:      cache[l, S + r, :] = cache[l, S + path[r], :]    r = 0, 1, .. in this order
//! gather_rows: dst[r, :] = src[path[r], :]                      r = 0 .. count; path[r] = 0 past PATH_LEN
//! advance:     S += PATH_LEN, BONUS = NEXT_BONUS                nothing if PATH_LEN = 0 (an error)
//! ```
//!
//! Grid of `commit`: x = layers, y = blocks of 256 groups of 8 columns. A thread owns its columns in every row and
//! moves them in ascending order of r: no row is overwritten before it is read, and no two threads meet. A cached key
//! is already rotated for its depth, which is where it lands, so nothing is computed.
//! Grid of `gather_rows`: x = output rows, y = blocks of 256 groups of 4 columns. `advance`: one warp, lane 0 works.

use cuda_std::{kernel, thread};

use crate::args::attention::{AdvanceArgs, CommitArgs, GatherRowsArgs};
use crate::args::state;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Columns of a cache row that a thread of `commit` owns: 16 bytes.
pub const COMMIT_COLUMNS: usize = 8;
/// Columns of a row that a thread of `gather_rows` owns: 16 bytes.
pub const GATHER_COLUMNS: usize = 4;
/// Threads of `advance`: one warp.
pub const ADVANCE_THREADS: u32 = 32;

#[kernel]
pub fn commit(a: CommitArgs) {
    let width = a.width as usize;
    let column = (thread::block_idx_y() * THREADS + thread::thread_idx_x()) as usize * COMMIT_COLUMNS;
    if column >= width {
        return;
    }
    let committed = a.state.get(state::COMMITTED) as usize;
    let first = thread::block_idx_x() as usize * a.slots as usize + committed;
    let len = a.state.get(state::PATH_LEN) as usize;
    let mut r = 0;
    while r < len {
        let from = a.state.get(state::PATH + r) as usize;
        if from != r {
            a.cache.st16((first + r) * width + column, a.cache.ld16((first + from) * width + column));
        }
        r += 1;
    }
}

#[kernel]
pub fn gather_rows(a: GatherRowsArgs) {
    let width = a.width as usize;
    let column = (thread::block_idx_y() * THREADS + thread::thread_idx_x()) as usize * GATHER_COLUMNS;
    if column >= width {
        return;
    }
    let row = thread::block_idx_x() as usize;
    let accepted = row < a.state.get(state::PATH_LEN) as usize;
    let from = if accepted { a.state.get(state::PATH + row) as usize } else { 0 };
    a.dst.st16(row * width + column, a.src.ld16(from * width + column));
}

#[kernel]
pub fn advance(a: AdvanceArgs) {
    let len = a.state.get(state::PATH_LEN);
    if thread::thread_idx_x() == 0 && len > 0 {
        a.state.set(state::COMMITTED, a.state.get(state::COMMITTED) + len);
        a.state.set(state::BONUS, a.state.get(state::NEXT_BONUS));
    }
}
