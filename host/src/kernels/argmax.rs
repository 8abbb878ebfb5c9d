//! Launcher of [`gpu::kernels::argmax`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::ArgmaxArgs;
use gpu::kernels::argmax as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// The target's greedy pick in each row.
pub struct Argmax {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows]`: the id of the largest logit, the lowest of equals; -1 in a row that is an error.
    pub pick: GlobalMut<i32>,
    /// `[rows]`: the largest logit.
    pub best: GlobalMut<f32>,
    /// `[rows]`: the largest of the others, -inf where there is none.
    pub second: GlobalMut<f32>,
    /// Says how many rows are real, and takes the error of a real row with NaN, +inf or no finite logit.
    pub state: GlobalMut<u32>,
    pub rows: usize,
    pub vocab: usize,
}

/// Queues the picks of `rows` rows.
pub fn argmax(device: &Device, p: Argmax) -> Result<()> {
    let name = kernel::ARGMAX.name();
    contract(name, p.vocab > 0 && p.vocab <= i32::MAX as usize, || format!("a vocabulary of {}", p.vocab))?;
    holds(name, "logits", p.logits.len(), p.rows * p.vocab)?;
    holds(name, "pick", p.pick.len(), p.rows)?;
    holds(name, "best", p.best.len(), p.rows)?;
    holds(name, "second", p.second.len(), p.rows)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    let args = ArgmaxArgs {
        logits: p.logits,
        pick: p.pick,
        best: p.best,
        second: p.second,
        state: p.state,
        vocab: p.vocab as u32,
    };
    let dims = Dims { grid: [p.rows as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::ARGMAX, dims, args)
}
