//! Launcher of [`gpu::kernels::accept`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::AcceptArgs;
use gpu::args::tokens::record::RECORD_WORDS;
use gpu::kernels::accept as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// The walk from the root along the target's picks.
pub struct Accept {
    /// `[rows]`: row 0 is the root.
    pub tokens: Global<i32>,
    /// `[rows]`.
    pub parents: Global<i32>,
    /// `[rows]`: the target's token after each row.
    pub pick: Global<i32>,
    /// Says how many rows are real; takes path and next bonus. With an error in it the path is empty.
    pub state: GlobalMut<u32>,
    /// `[RECORD_WORDS]`, laid out by `gpu::args::tokens::record`.
    pub record: GlobalMut<u32>,
    pub rows: usize,
}

/// Queues the walk.
pub fn accept(device: &Device, p: Accept) -> Result<()> {
    let name = kernel::ACCEPT.name();
    contract(name, (1..=kernel::MAX_ROWS).contains(&p.rows), || {
        format!("{} rows; 1 to {} are possible", p.rows, kernel::MAX_ROWS)
    })?;
    holds(name, "tokens", p.tokens.len(), p.rows)?;
    holds(name, "parents", p.parents.len(), p.rows)?;
    holds(name, "pick", p.pick.len(), p.rows)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    holds(name, "record", p.record.len(), RECORD_WORDS)?;
    let args = AcceptArgs {
        tokens: p.tokens,
        parents: p.parents,
        pick: p.pick,
        state: p.state,
        record: p.record,
        rows: p.rows as u32,
    };
    let dims = Dims { grid: [1, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::ACCEPT, dims, args)
}
