//! The device-resident state of a sequence and of one DDTree round.
//!
//! Source of the round: Ringel and Romano, DDTree (arXiv 2604.12989); names are the paper's. A round reads the
//! committed length S and the bonus token from `state`, allocates nothing and leaves its result there, so that each of
//! its stages can be captured once as a graph.

use cuda_std::Global;
use gpu::args::state::{ERROR, ERROR_ROW, MAX_PATH, STATE_WORDS};
use gpu::args::tokens::record::{self, RECORD_WORDS};

use super::EngineOptions;
use super::draft::MAX_CANDIDATES;
use crate::device::{Buffer, Device, Result};
use crate::kernels;
use crate::model::{CHUNK, Pass, Rows};

/// Rows of the tree, its marginals, and what the target picked.
pub(super) struct Round {
    /// See `gpu::args::state`.
    pub state: Buffer<u32>,
    /// Nodes asked for, the root not counted.
    pub budget: usize,
    pub growth: kernels::Growth,
    sampling: Option<kernels::Sampling>,
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
    /// The target's token after each row, the value that it was chosen by and the second best.
    picks: Buffer<i32>,
    best: Buffer<f32>,
    second: Buffer<f32>,
    pick_parts: Buffer<u32>,
    pick_tickets: Buffer<u32>,
    /// Where the filters of the draws end each row.
    limits: Buffer<u32>,
    limits_scratch: Buffer<u32>,
    record: Buffer<u32>,
    /// A prefill chunk: ids, and the chain's depths and ancestors.
    pub chunk_ids: Buffer<i32>,
    chunk_depths: Buffer<u32>,
    chunk_ancestors: Buffer<u32>,
}

/// Words of an ancestor row for `rows` rows.
pub(super) fn words(rows: usize) -> usize {
    rows.div_ceil(32)
}

/// Elements of the filters' scratch memory; none without filters.
fn filter_words(sampling: Option<kernels::Sampling>, rows: usize, vocab: usize) -> usize {
    if sampling.is_some_and(|s| s.filters()) { kernels::sample_limits_workspace(rows, vocab) } else { 0 }
}

/// Bytes that [`Round::new`] allocates, a few hundred and the filters' 45 KB a row aside.
pub fn round_bytes(vocab: usize, budget: usize, depth: usize) -> usize {
    let (rows, chunk) = (budget + 1, CHUNK * (2 + words(CHUNK)));
    let (parts, tickets) = kernels::argmax_workspace(rows, vocab);
    let drafts = 2 * depth * MAX_CANDIDATES.min(budget.max(1));
    size_of::<f32>() * (rows * (vocab + 8 + words(rows)) + parts + tickets + drafts + chunk)
}

impl Round {
    /// Buffers of rounds with `budget` nodes over marginals `[depth, candidates]`.
    pub fn new(
        device: &Device,
        vocab: usize,
        budget: usize,
        depth: usize,
        candidates: usize,
        options: EngineOptions,
    ) -> Result<Self> {
        let rows = budget + 1;
        let (parts, tickets) = kernels::argmax_workspace(rows, vocab);
        let depths: Vec<u32> = (0..CHUNK as u32).collect();
        Ok(Self {
            state: device.zeros(STATE_WORDS)?,
            budget,
            growth: options.growth,
            sampling: options.sampling,
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
            pick_parts: device.alloc(parts)?,
            pick_tickets: device.zeros(tickets)?,
            limits: device.alloc(2 * rows)?,
            limits_scratch: device.alloc(filter_words(options.sampling, rows, vocab))?,
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
            pass: Pass::Verify,
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
            pass: Pass::Prefill,
        })
    }

    /// Queues the target's token after each of the first `rows` rows of the logits, which lie at `depths`.
    pub fn pick(&self, device: &Device, vocab: usize, depths: Global<u32>, rows: usize) -> Result<()> {
        let workspace =
            kernels::ArgmaxWorkspace { parts: self.pick_parts.view_mut(), tickets: self.pick_tickets.view_mut() };
        let logits = self.logits.view();
        let picks = kernels::Argmax {
            logits,
            pick: self.picks.view_mut(),
            best: self.best.view_mut(),
            second: self.second.view_mut(),
            state: self.state.view_mut(),
            workspace,
            rows,
            vocab,
        };
        let Some(sampling) = self.sampling else { return kernels::argmax(device, picks) };
        let mut limits = Global::EMPTY;
        if sampling.filters() {
            let (out, workspace) = (self.limits.view_mut(), self.limits_scratch.view_mut());
            let args = kernels::SampleLimits { logits, limits: out, workspace, sampling, rows, vocab };
            kernels::sample_limits(device, args)?;
            limits = out.as_ref();
        }
        kernels::draw(device, kernels::Draw { picks, depths, limits, sampling })
    }

    /// Queues the walk along the picks of the first `rows` rows.
    pub fn accept(&self, device: &Device, rows: usize) -> Result<()> {
        kernels::accept(
            device,
            kernels::Accept {
                tokens: self.tokens.view(),
                parents: self.parents.view(),
                pick: self.picks.view(),
                best: self.best.view(),
                second: self.second.view(),
                state: self.state.view_mut(),
                record: self.record.view_mut(),
                sequences: 1,
                rows,
            },
        )
    }

    /// Puts the sequence at committed length `committed` with `bonus` as its next token.
    pub fn set_state(&self, committed: usize, bonus: i32) -> Result<()> {
        self.state.write(0, &kernels::initial_state(committed as u32, bonus as u32, 0))
    }

    /// The error in the state after what was queued: its code and row.
    pub fn error(&self) -> Result<Option<(u32, usize)>> {
        let mut words = [0u32; 2];
        const { assert!(ERROR_ROW == ERROR + 1) };
        self.state.read_into(ERROR, &mut words)?;
        Ok((words[0] != 0).then_some((words[0], words[1] as usize)))
    }

    /// What the last walk found, in one copy.
    pub fn read_record(&self) -> Result<Record> {
        let mut words = [0u32; RECORD_WORDS];
        self.record.read_into(0, &mut words)?;
        Ok(Record(words))
    }
}

/// A copy of the device's record, see `gpu::args::tokens::record`.
pub(super) struct Record([u32; RECORD_WORDS]);

impl Record {
    /// An error code and the row it was found in, or none.
    pub fn error(&self) -> Option<(u32, usize)> {
        (self.0[record::ERROR] != 0).then(|| (self.0[record::ERROR], self.0[record::ERROR_ROW] as usize))
    }

    /// Nodes of the tree, the root not counted.
    pub fn nodes(&self) -> usize {
        self.0[record::NODES] as usize
    }

    /// The new tokens: those of the path behind the root, then the next bonus; each with its gap.
    pub fn picks(&self) -> (Vec<i32>, Vec<f32>) {
        let len = (self.0[record::PATH_LEN] as usize).min(MAX_PATH);
        let part = |from: usize| self.0[from..from + len].iter();
        let picks = part(record::PICKS).map(|&id| id as i32).collect();
        (picks, part(record::GAPS).map(|&bits| f32::from_bits(bits)).collect())
    }
}
