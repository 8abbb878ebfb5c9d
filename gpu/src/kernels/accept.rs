//! The walk: from the root, to the child whose token is the target's pick, as long as there is one; of siblings with
//! equal tokens the lowest row. Writes the path, its length and the next bonus (the pick at its end) into the state,
//! and the record that the host reads.
//!
//! Grid: one warp. Each lane holds the tokens and parents of rows l, l + 32, l + 64, so a step is one load of the pick
//! and three votes. The path ends at the latest when it is full, which loses no token: the pick there is the next
//! bonus. With an error in the state the path is empty and the bonus stays. A pick that is no token, at the end of a
//! path that no error explains, is itself an error of the logits.

use cuda_std::{kernel, thread, warp};

use super::errors;
use crate::args::state::{BONUS, ERROR, ERROR_LOGITS, ERROR_ROW, MAX_PATH, NEXT_BONUS, NODES, PATH, PATH_LEN};
use crate::args::tokens::{AcceptArgs, record};

/// Threads a block.
pub const THREADS: u32 = warp::WARP;
/// Rows at most.
pub const MAX_ROWS: usize = 65;

const LANES: usize = warp::WARP as usize;
/// Rows that a lane owns.
const OWNED: usize = MAX_ROWS.div_ceil(LANES);
/// Parent of a row that is no node: no row.
const NOWHERE: i32 = -1;

#[kernel]
pub fn accept(a: AcceptArgs) {
    let lane = thread::thread_idx_x() as usize;
    let (state, out) = (a.state, a.record);
    let last_row = a.rows - 1;
    let nodes = if state.get(NODES) < last_row { state.get(NODES) } else { last_row };
    let bonus = state.get(BONUS);
    let mut error = state.get(ERROR);

    let (mut tokens, mut parents) = ([0; OWNED], [NOWHERE; OWNED]);
    for slot in 0..OWNED {
        let row = slot * LANES + lane;
        if row > 0 && row <= nodes as usize {
            tokens[slot] = a.tokens.get(row);
            parents[slot] = a.parents.get(row);
        }
    }

    let (mut at, mut len, mut next) = (0, 0, bonus);
    while error == 0 {
        let pick = a.pick.get(at as usize);
        if pick < 0 {
            error = ERROR_LOGITS;
            if lane == 0 {
                errors::report(state, error, at);
            }
            break;
        }
        if lane == 0 {
            state.set(PATH + len, at);
            if len > 0 {
                out.set(record::TOKENS + len - 1, next);
            }
        }
        len += 1;
        next = pick as u32;
        let mut child = 0;
        for slot in (0..OWNED).rev() {
            let lanes = warp::ballot(parents[slot] == at as i32 && tokens[slot] == pick);
            if lanes != 0 {
                child = (slot * LANES) as u32 + lanes.trailing_zeros();
            }
        }
        // A child's row is above its parent's, so the walk ends.
        if child <= at || len == MAX_PATH {
            break;
        }
        at = child;
    }
    warp::sync_warp();

    if error != 0 {
        (len, next) = (0, bonus);
    }
    for r in (len..MAX_PATH).filter(|r| r % LANES == lane) {
        state.set(PATH + r, 0);
    }
    let tokens_end = record::TOKENS + if len > 0 { len - 1 } else { 0 };
    for word in (tokens_end..record::RECORD_WORDS).filter(|w| w % LANES == lane) {
        out.set(word, 0);
    }
    if lane == 0 {
        state.set(PATH_LEN, len as u32);
        state.set(NEXT_BONUS, next);
        out.set(record::PATH_LEN, len as u32);
        out.set(record::NODES, nodes);
        out.set(record::ERROR, error);
        out.set(record::ERROR_ROW, state.get(ERROR_ROW));
        out.set(record::NEXT_BONUS, next);
    }
}
