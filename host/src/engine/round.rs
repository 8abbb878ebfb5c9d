//! The device-resident state of a sequence and of one DDTree round.
//!
//! Source of the round: Ringel and Romano, DDTree (arXiv 2604.12989); names are the paper's. A round reads the
//! committed length S and the bonus token from `state`, allocates nothing and leaves its result there, so that each of
//! its stages can be captured once as a graph.

use gpu::args::state::{BONUS, COMMITTED, ERROR, ERROR_ROW, MAX_PATH, NODES, PATH, PATH_LEN, STATE_WORDS};
use gpu::args::tokens::record::RECORD_WORDS;

use super::draft::MAX_CANDIDATES;
use crate::device::{Buffer, Device, Result};
use crate::kernels;
use crate::model::{CHUNK, MAX_ROWS, Rows};

/// Rows of the tree, its marginals, and what the target picked.
pub(super) struct Round {
    /// See `gpu::args::state`.
    pub state: Buffer<u32>,
    /// Nodes asked for, the root not counted.
    pub budget: usize,
    /// `[budget + 1]`, the root first.
    pub tokens: Buffer<i32>,
    pub parents: Buffer<i32>,
    pub depths: Buffer<u32>,
    /// `[budget + 1, words]`.
    pub ancestors: Buffer<u32>,
    /// Marginals of the drafter, `[depth, candidates]`, best first.
    pub draft_ids: Buffer<i32>,
    pub draft_logp: Buffer<f32>,
    pub depth: usize,
    pub candidates: usize,
    /// `[budget + 1, vocabulary]`.
    pub logits: Buffer<f32>,
    /// The target's greedy pick of each row, its logit and the second best.
    pub picks: Buffer<i32>,
    pub best: Buffer<f32>,
    pub second: Buffer<f32>,
    pub record: Buffer<u32>,
    /// A prefill chunk: ids, and the chain's depths and ancestors.
    pub chunk_ids: Buffer<i32>,
    chunk_depths: Buffer<u32>,
    chunk_ancestors: Buffer<u32>,
}

/// Words of an ancestor row for `rows` rows.
pub(super) fn words(rows: usize) -> usize {
    rows.div_ceil(32)
}

/// Bytes that [`Round::new`] allocates, a few hundred aside.
pub fn round_bytes(vocab: usize, budget: usize, depth: usize) -> usize {
    let (rows, chunk) = (budget + 1, CHUNK * (2 + words(CHUNK)));
    size_of::<f32>() * (rows * (vocab + 6 + words(rows)) + 2 * depth * MAX_CANDIDATES + chunk)
}

impl Round {
    /// Buffers of rounds with `budget` nodes over marginals `[depth, candidates]`.
    pub fn new(device: &Device, vocab: usize, budget: usize, depth: usize, candidates: usize) -> Result<Self> {
        let rows = budget + 1;
        assert!(rows <= MAX_ROWS, "a tree of {rows} rows; the caller has checked the budget");
        let depths: Vec<u32> = (0..CHUNK as u32).collect();
        Ok(Self {
            state: device.zeros(STATE_WORDS)?,
            budget,
            tokens: device.zeros(rows)?,
            parents: device.zeros(rows)?,
            depths: device.zeros(rows)?,
            ancestors: device.zeros(rows * words(rows))?,
            draft_ids: device.zeros(depth * candidates)?,
            draft_logp: device.zeros(depth * candidates)?,
            depth,
            candidates,
            logits: device.alloc(rows * vocab)?,
            picks: device.alloc(rows)?,
            best: device.alloc(rows)?,
            second: device.alloc(rows)?,
            record: device.zeros(RECORD_WORDS)?,
            chunk_ids: device.zeros(CHUNK)?,
            chunk_depths: device.upload(&depths)?,
            chunk_ancestors: device.zeros(CHUNK * words(CHUNK))?,
        })
    }

    /// The tree's rows.
    pub fn tree(&self) -> Rows {
        Rows {
            ids: self.tokens.view(),
            depths: self.depths.view(),
            ancestors: self.ancestors.view(),
            rows: self.budget + 1,
        }
    }

    /// `ids` as the chain of a prefill chunk, at most [`CHUNK`] of them.
    ///
    /// An ancestor row has as many words as the chunk needs, so a short chunk gets its own.
    pub fn chunk(&self, ids: &[i32]) -> Result<Rows> {
        let rows = ids.len();
        self.chunk_ids.write(0, ids)?;
        let see = |row: usize, word: usize| (0..32).fold(0, |bits, i| bits | (((word * 32 + i <= row) as u32) << i));
        let words = words(rows);
        let ancestors: Vec<u32> = (0..rows * words).map(|i| see(i / words, i % words)).collect();
        self.chunk_ancestors.write(0, &ancestors)?;
        Ok(Rows {
            ids: self.chunk_ids.view(),
            depths: self.chunk_depths.view(),
            ancestors: self.chunk_ancestors.view(),
            rows,
        })
    }

    /// Queues the target's pick of the first `rows` rows of the logits.
    pub fn argmax(&self, device: &Device, vocab: usize, rows: usize) -> Result<()> {
        kernels::argmax(
            device,
            kernels::Argmax {
                logits: self.logits.view(),
                pick: self.picks.view_mut(),
                best: self.best.view_mut(),
                second: self.second.view_mut(),
                state: self.state.view_mut(),
                rows,
                vocab,
            },
        )
    }

    /// The target's pick of each row, with best minus second logit.
    pub fn picks_and_gaps(&self) -> Result<Vec<(i32, f32)>> {
        let (picks, best, second) = (self.picks.read()?, self.best.read()?, self.second.read()?);
        Ok(picks.into_iter().zip(best.into_iter().zip(second).map(|(b, s)| b - s)).collect())
    }

    /// Puts the sequence at committed length `committed` with `bonus` as its next token.
    pub fn set_state(&self, committed: usize, bonus: i32) -> Result<()> {
        self.state.write(0, &kernels::initial_state(committed as u32, bonus as u32, 0))
    }

    /// Reads the state after what was queued.
    pub fn read_state(&self) -> Result<State> {
        let mut words = [0u32; STATE_WORDS];
        self.state.read_into(0, &mut words)?;
        Ok(State(words))
    }
}

/// A copy of the device's state words.
pub(super) struct State([u32; STATE_WORDS]);

impl State {
    pub fn committed(&self) -> usize {
        self.0[COMMITTED] as usize
    }

    pub fn bonus(&self) -> i32 {
        self.0[BONUS] as i32
    }

    /// An error code and the row it was found in, or none.
    pub fn error(&self) -> Option<(u32, usize)> {
        (self.0[ERROR] != 0).then(|| (self.0[ERROR], self.0[ERROR_ROW] as usize))
    }

    /// Nodes of the last tree, the root not counted.
    pub fn nodes(&self) -> usize {
        self.0[NODES] as usize
    }

    /// Rows of the last accepted path, the root first.
    pub fn path(&self) -> &[u32] {
        let len = (self.0[PATH_LEN] as usize).min(MAX_PATH);
        &self.0[PATH..PATH + len]
    }
}
