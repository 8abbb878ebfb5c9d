//! The device-resident state as the host makes it.

use gpu::args::state::{BONUS, COMMITTED, ERROR_ROW, NO_ROW, NODES, STATE_WORDS};

/// The words of a state with `committed` tokens in the cache, `bonus` chosen behind them, a tree of `nodes` nodes, and
/// no error. The layout is `gpu::args::state`.
pub fn initial_state(committed: u32, bonus: u32, nodes: u32) -> [u32; STATE_WORDS] {
    let mut words = [0; STATE_WORDS];
    (words[COMMITTED], words[BONUS], words[NODES], words[ERROR_ROW]) = (committed, bonus, nodes, NO_ROW);
    words
}
