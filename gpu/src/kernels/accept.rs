//! The walk: from the root, to the child whose token is the target's pick, as long as there is one; of siblings with
//! equal tokens the lowest row. Writes the path, its length and the next bonus (the pick at its end) into the state,
//! and the record that the host reads: the pick and the gap at each row of the path.
//!
//! Grid: x = sequences, a block each. Every row at once looks whether its token is its parent's pick and leaves its
//! number there, so that the walk itself is one load of shared memory a step. The path ends at the latest when it is
//! full, which loses no token: the pick there is the next bonus. With an error in the state the path is empty and the
//! bonus stays. A pick that is no token, at the end of a path that no error explains, is an error of the logits.

use cuda_std::{kernel, static_shared, thread, warp};

use super::errors;
use crate::args::state::{
    BONUS, ERROR, ERROR_LOGITS, ERROR_ROW, MAX_PATH, NEXT_BONUS, NODES, PATH, PATH_LEN, STATE_WORDS,
};
use crate::args::tokens::{AcceptArgs, record};

/// Rows at most.
pub const MAX_ROWS: usize = 1025;

const MAX_THREADS: u32 = 512;
/// No child whose token is the pick.
const NONE: u32 = 0;

// By row: what is left of all rows from the child that follows on, so that the lowest is the largest; 0 if none.
static_shared!(fn accept_child() -> [u32; MAX_ROWS]);
static_shared!(fn accept_pick() -> [i32; MAX_ROWS]);
static_shared!(fn accept_gap() -> [f32; MAX_ROWS]);
static_shared!(fn accept_path() -> [u32; MAX_PATH]);

/// Threads a block for `rows` rows. More than 256 from there on: the loads of all rows are one latency.
pub const fn threads(rows: usize) -> u32 {
    let threads = (rows as u32).next_multiple_of(warp::WARP);
    if threads < MAX_THREADS { threads } else { MAX_THREADS }
}

#[kernel]
pub fn accept(a: AcceptArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (t, threads) = (thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
    let sequence = thread::block_idx_x() as usize;
    let rows = a.rows as usize;
    let first = sequence * rows;
    let state = a.state.slice(sequence * STATE_WORDS, STATE_WORDS);
    let out = a.record.slice(sequence * record::RECORD_WORDS, record::RECORD_WORDS);
    let (child, picks, gaps, path) = (accept_child(), accept_pick(), accept_gap(), accept_path());
    let nodes = if state.get(NODES) < a.rows - 1 { state.get(NODES) } else { a.rows - 1 };
    let bonus = state.get(BONUS);
    let mut error = state.get(ERROR);

    let mut row = t;
    while row < rows {
        child.set(row, NONE);
        picks.set(row, a.pick.get(first + row));
        gaps.set(row, a.best.get(first + row) - a.second.get(first + row));
        row += threads;
    }
    thread::sync_threads();
    let mut row = t;
    while row <= nodes as usize {
        let (token, parent) = (a.tokens.get(first + row), a.parents.get(first + row));
        // A child's row is above its parent's, so the walk ends.
        if parent >= 0 && (parent as usize) < row && picks.get(parent as usize) == token {
            child.atomic_max(parent as usize, a.rows - row as u32);
        }
        row += threads;
    }
    thread::sync_threads();
    if warp::warp_id() != 0 {
        return;
    }

    let lane = warp::lane_id() as usize;
    let (mut at, mut len, mut next) = (0, 0, bonus);
    while error == 0 {
        let pick = picks.get(at as usize);
        if pick < 0 {
            error = ERROR_LOGITS;
            if lane == 0 {
                errors::report(state, error, at);
            }
            break;
        }
        if lane == 0 {
            path.set(len, at);
        }
        len += 1;
        next = pick as u32;
        let left = child.get(at as usize);
        if left == NONE || len == MAX_PATH {
            break;
        }
        at = a.rows - left;
    }
    warp::sync_warp();

    if error != 0 {
        (len, next) = (0, bonus);
    }
    let mut r = lane;
    while r < MAX_PATH {
        let (mut row, mut pick, mut gap) = (0, 0, 0);
        if r < len {
            row = path.get(r);
            pick = picks.get(row as usize) as u32;
            gap = gaps.get(row as usize).to_bits();
        }
        state.set(PATH + r, row);
        out.set(record::PICKS + r, pick);
        out.set(record::GAPS + r, gap);
        r += warp::WARP as usize;
    }
    if lane == 0 {
        state.set(PATH_LEN, len as u32);
        state.set(NEXT_BONUS, next);
        out.set(record::PATH_LEN, len as u32);
        out.set(record::NODES, nodes);
        out.set(record::ERROR, error);
        out.set(record::ERROR_ROW, state.get(ERROR_ROW));
    }
}
