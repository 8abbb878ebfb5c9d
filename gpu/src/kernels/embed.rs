//! `x[r, :] = table[ids[r], :]`, and for row 0 the table's row of the state's bonus token where a state is given.
//!
//! Grid: x = rows. A block owns one row; its threads stride over the columns. The bonus is read on the device, so that
//! a captured round needs no id from the host.

use cuda_std::{kernel, math, thread};

use crate::args::state::BONUS;
use crate::args::tokens::EmbedArgs;

/// Threads a block.
pub const THREADS: u32 = 256;

#[kernel]
pub fn embed(a: EmbedArgs) {
    let width = a.width as usize;
    let row = thread::block_idx_x() as usize;
    let id = if row == 0 && !a.state.is_empty() { a.state.get(BONUS) } else { a.ids.get(row) as u32 };
    // A negative id is a large one here.
    if id >= a.vocab {
        thread::trap("a token id outside the vocabulary");
    }
    let from = id as usize * width;
    let x = a.x.slice(row * width, width);
    let mut i = thread::thread_idx_x() as usize;
    while i < width {
        let v = match a.table_f32.is_empty() {
            false => a.table_f32.get(from + i),
            true => math::from_bf16(a.table_bf16.get(from + i)),
        };
        x.set(i, v);
        i += THREADS as usize;
    }
}
