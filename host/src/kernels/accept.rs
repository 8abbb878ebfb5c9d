//! Launcher of [`gpu::kernels::accept`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::AcceptArgs;
use gpu::args::tokens::record::RECORD_WORDS;
use gpu::kernels::accept as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// The walks of `sequences` sequences from their roots along the target's picks. Every array holds those of all
/// sequences, one after the other.
pub struct Accept {
    /// `[rows]`: row 0 is the root.
    pub tokens: Global<i32>,
    /// `[rows]`.
    pub parents: Global<i32>,
    /// `[rows]`: the target's token after each row.
    pub pick: Global<i32>,
    /// `[rows]`: what the pick was chosen by, and that of the runner-up; their difference goes into the record.
    pub best: Global<f32>,
    pub second: Global<f32>,
    /// Says how many rows are real; takes path and next bonus. With an error in it the path is empty.
    pub state: GlobalMut<u32>,
    /// `[RECORD_WORDS]`, laid out by `gpu::args::tokens::record`.
    pub record: GlobalMut<u32>,
    pub sequences: usize,
    pub rows: usize,
}

/// Queues the walks.
pub fn accept(device: &Device, p: Accept) -> Result<()> {
    let name = kernel::ACCEPT.name();
    contract(name, (1..=kernel::MAX_ROWS).contains(&p.rows), || {
        format!("{} rows; 1 to {} are possible", p.rows, kernel::MAX_ROWS)
    })?;
    let (n, rows) = (p.sequences, p.sequences * p.rows);
    holds(name, "tokens", p.tokens.len(), rows)?;
    holds(name, "parents", p.parents.len(), rows)?;
    holds(name, "pick", p.pick.len(), rows)?;
    holds(name, "best", p.best.len(), rows)?;
    holds(name, "second", p.second.len(), rows)?;
    holds(name, "state", p.state.len(), n * STATE_WORDS)?;
    holds(name, "record", p.record.len(), n * RECORD_WORDS)?;
    let args = AcceptArgs {
        tokens: p.tokens,
        parents: p.parents,
        pick: p.pick,
        best: p.best,
        second: p.second,
        state: p.state,
        record: p.record,
        rows: p.rows as u32,
    };
    let dims = Dims { grid: [n as u32, 1, 1], block: [kernel::threads(p.rows), 1, 1], shared: 0 };
    device.launch_overlapping(&kernel::ACCEPT, dims, args)
}
