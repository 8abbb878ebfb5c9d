//! What follows an accepted path: cache rows and drafter features move to their places, the committed length grows.
//!
//! ```text
//! path = state[PATH .. PATH + PATH_LEN], ascending, path[0] = 0, so path[r] >= r
//! commit:      cache[l, S + r, :] = cache[l, S + path[r], :]    r = 0, 1, .. in this order
//! gather_rows: dst[r, :] = src[path[r], :]                      r = 0 .. count; path[r] = 0 past PATH_LEN
//! advance:     S += PATH_LEN, BONUS = NEXT_BONUS                nothing if PATH_LEN = 0 (an error)
//! ```
//!
//! Grid of `commit`: x = layers, y = blocks of 128 pieces of 16 bytes. A thread owns its piece of every row and moves
//! eight rows at a time, all loads before all stores, in ascending order of r: a row is overwritten only after it and
//! all rows that land below it have been read (path[r] >= r), and no two threads meet. A cached key is already rotated
//! for its depth, which is where it lands, so nothing is computed, and a row is bytes.
//! Grid of `gather_rows`: x = output rows, y = blocks of 256 groups of 4 columns. `advance`: one warp, lane 0 works.

use cuda_std::{kernel, thread};

use crate::args::attention::{AdvanceArgs, CommitArgs, GatherRowsArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Threads a block of `commit`: a row of 1,152 bytes has 72 pieces.
pub const COMMIT_THREADS: u32 = 128;
/// Bytes of a cache row that a thread of `commit` owns.
pub const COMMIT_BYTES: usize = 16;
/// Rows that a thread of `commit` has in flight.
const BATCH: usize = 8;
// The last batch reads whole, from row 1 on.
const _: () = assert!(state::PATH + 1 + (state::MAX_PATH - 1).next_multiple_of(BATCH) <= state::STATE_WORDS);
/// Columns of a row that a thread of `gather_rows` owns: 16 bytes.
pub const GATHER_COLUMNS: usize = 4;
/// Threads of `advance`: one warp.
pub const ADVANCE_THREADS: u32 = 32;

#[kernel]
pub fn commit(a: CommitArgs) {
    let row_bytes = a.row_bytes as usize;
    let piece = (thread::block_idx_y() * COMMIT_THREADS + thread::thread_idx_x()) as usize * COMMIT_BYTES;
    if piece >= row_bytes {
        return;
    }
    let committed = a.state.get(state::COMMITTED) as usize;
    let first = thread::block_idx_x() as usize * a.slots as usize + committed;
    let len = a.state.get(state::PATH_LEN) as usize;
    // The root is in its place.
    let mut r = 1;
    while r < len {
        let mut from = [0; BATCH];
        let mut rows = [[0; 4]; BATCH];
        unroll!(i in 0 1 2 3 4 5 6 7; {
            // The state has room behind the longest path for a whole batch.
            from[i] = a.state.get(state::PATH + r + i) as usize;
        });
        unroll!(i in 0 1 2 3 4 5 6 7; {
            if r + i < len {
                rows[i] = a.cache.ld16((first + from[i]) * row_bytes + piece);
            }
        });
        unroll!(i in 0 1 2 3 4 5 6 7; {
            if r + i < len && from[i] != r + i {
                a.cache.st16((first + r + i) * row_bytes + piece, rows[i]);
            }
        });
        r += BATCH;
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
