//! Launcher of [`gpu::kernels::top_k`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::TopKArgs;
use gpu::kernels::top_k as kernel;

use super::{MAX_GRID_Y, aligned, contract, holds};
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

/// Views of [`top_k`]'s scratch memory, each at least as long as [`top_k_workspace`] says. What it holds before does
/// not matter.
#[derive(Clone, Copy)]
pub struct TopKWorkspace {
    /// Group maxima, candidates and counts.
    pub words: GlobalMut<u32>,
    /// Partial sums of exponentials.
    pub sums: GlobalMut<f32>,
}

/// Elements of `TopKWorkspace`: (`words`, `sums`).
pub fn top_k_workspace(rows: usize, vocab: usize, k: usize) -> (usize, usize) {
    (parts(rows, vocab, k).iter().sum(), 2 * rows * vocab.div_ceil(kernel::CHUNK))
}

/// Words of the candidates (which are moved in pairs), of the group maxima, and of the counts.
fn parts(rows: usize, vocab: usize, k: usize) -> [usize; 3] {
    let chunks = vocab.div_ceil(kernel::CHUNK);
    [2 * rows * kernel::room_of(vocab, k), rows * chunks * kernel::groups_of(vocab, k), 2 * rows]
}

/// Queues the selection in `rows` rows.
pub fn top_k(device: &Device, p: TopK) -> Result<()> {
    let name = kernel::TOP_K_CHUNKS.name();
    contract(name, (1..=kernel::MAX_K).contains(&p.k), || format!("k = {}; 1 to {} are possible", p.k, kernel::MAX_K))?;
    contract(name, (p.k..=kernel::MAX_VOCAB).contains(&p.vocab), || {
        format!("a vocabulary of {}; {} to {} are possible", p.vocab, p.k, kernel::MAX_VOCAB)
    })?;
    contract(name, p.rows <= MAX_GRID_Y, || format!("{} rows; at most {MAX_GRID_Y} are possible", p.rows))?;
    let (words, sums) = top_k_workspace(p.rows, p.vocab, p.k);
    holds(name, "logits", p.logits.len(), p.rows * p.vocab)?;
    holds(name, "ids", p.ids.len(), p.rows * p.k)?;
    holds(name, "logp", p.logp.len(), p.rows * p.k)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    holds(name, "workspace.words", p.workspace.words.len(), words)?;
    holds(name, "workspace.sums", p.workspace.sums.len(), sums)?;
    aligned(name, "workspace.words", p.workspace.words.addr(), 8)?;
    let [candidates, groups_max, counts] = parts(p.rows, p.vocab, p.k);
    let args = TopKArgs {
        logits: p.logits,
        candidates: p.workspace.words.slice(0, candidates),
        groups_max: p.workspace.words.slice(candidates, groups_max),
        counts: p.workspace.words.slice(candidates + groups_max, counts),
        sums: p.workspace.sums,
        ids: p.ids,
        logp: p.logp,
        state: p.state,
        vocab: p.vocab as u32,
        k: p.k as u32,
        groups: kernel::groups_of(p.vocab, p.k) as u32,
        room: kernel::room_of(p.vocab, p.k) as u32,
    };
    let grid = [p.vocab.div_ceil(kernel::CHUNK) as u32, p.rows as u32, 1];
    let dims = |shared| Dims { grid, block: [kernel::THREADS, 1, 1], shared };
    device.launch(&kernel::TOP_K_CHUNKS, dims(0), args)?;
    device.launch(&kernel::TOP_K_SELECT, dims(kernel::shared_bytes(p.vocab, p.k) as u32), args)
}
