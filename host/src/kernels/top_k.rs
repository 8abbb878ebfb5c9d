//! Launcher of [`gpu::kernels::top_k`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::TopKArgs;
use gpu::kernels::top_k as kernel;

use super::{MAX_GRID_Y, contract, holds};
use crate::device::{Device, Dims, Result};

/// The `k` likeliest tokens of each row with their log-probabilities.
pub struct TopK {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows, k]`: descending by logit, then ascending by id.
    pub ids: GlobalMut<i32>,
    /// `[rows, k]`: logit - log(sum of exp over the whole row).
    pub logp: GlobalMut<f32>,
    /// Takes the error of a row with NaN, +inf or no finite logit.
    pub state: GlobalMut<u32>,
    /// `[top_k_workspace(rows, vocab, k)]`.
    pub workspace: TopKWorkspace,
    pub rows: usize,
    pub vocab: usize,
    pub k: usize,
}

/// Views of [`top_k`]'s scratch memory, each at least as long as [`top_k_workspace`] says.
#[derive(Clone, Copy)]
pub struct TopKWorkspace {
    /// Keys and ids of the candidates.
    pub candidates: GlobalMut<u32>,
    /// Partial sums of exponentials.
    pub sums: GlobalMut<f32>,
}

/// Elements of `TopKWorkspace`: (`candidates`, `sums`).
pub fn top_k_workspace(rows: usize, vocab: usize, k: usize) -> (usize, usize) {
    let chunks = vocab.div_ceil(kernel::chunk_of(vocab));
    (2 * rows * chunks * k, 2 * rows * chunks)
}

/// Queues the selection in `rows` rows.
pub fn top_k(device: &Device, p: TopK) -> Result<()> {
    let name = kernel::TOP_K_CHUNKS.name();
    contract(name, (1..=kernel::MAX_K).contains(&p.k), || format!("k = {}; 1 to {} are possible", p.k, kernel::MAX_K))?;
    contract(name, (p.k..=kernel::MAX_VOCAB).contains(&p.vocab), || {
        format!("a vocabulary of {}; {} to {} are possible", p.vocab, p.k, kernel::MAX_VOCAB)
    })?;
    contract(name, p.rows <= MAX_GRID_Y, || format!("{} rows; at most {MAX_GRID_Y} are possible", p.rows))?;
    let (candidates, sums) = top_k_workspace(p.rows, p.vocab, p.k);
    holds(name, "logits", p.logits.len(), p.rows * p.vocab)?;
    holds(name, "ids", p.ids.len(), p.rows * p.k)?;
    holds(name, "logp", p.logp.len(), p.rows * p.k)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    holds(name, "workspace.candidates", p.workspace.candidates.len(), candidates)?;
    holds(name, "workspace.sums", p.workspace.sums.len(), sums)?;
    let chunk = kernel::chunk_of(p.vocab);
    let chunks = p.vocab.div_ceil(chunk);
    let args = TopKArgs {
        logits: p.logits,
        keys: p.workspace.candidates.slice(0, candidates / 2),
        candidates: p.workspace.candidates.slice(candidates / 2, candidates / 2),
        sums: p.workspace.sums,
        ids: p.ids,
        logp: p.logp,
        state: p.state,
        vocab: p.vocab as u32,
        k: p.k as u32,
        chunk: chunk as u32,
        chunks: chunks as u32,
    };
    let dims = |grid, keys| Dims { grid, block: [kernel::THREADS, 1, 1], shared: kernel::shared_bytes(keys) as u32 };
    device.launch(&kernel::TOP_K_CHUNKS, dims([chunks as u32, p.rows as u32, 1], chunk), args)?;
    device.launch(&kernel::TOP_K_MERGE, dims([p.rows as u32, 1, 1], chunks * p.k), args)
}
