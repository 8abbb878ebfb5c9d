//! Launchers of [`gpu::kernels::argmax`] and [`gpu::kernels::sample_limits`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::{ArgmaxArgs, DrawArgs, SampleLimitsArgs};
use gpu::kernels::argmax as kernel;
use gpu::kernels::sample_limits as limits_kernel;

use super::{MAX_GRID_Y, aligned, contract, holds};
use crate::device::{Device, Dims, Result};

/// The target's token at each row: the greedy pick, or a draw.
#[derive(Clone, Copy)]
pub struct Argmax {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows]`: the id of the largest value, the lowest of equals; -1 in a row that is an error.
    pub pick: GlobalMut<i32>,
    /// `[rows]`: the largest value.
    pub best: GlobalMut<f32>,
    /// `[rows]`: the largest of the others, -inf where there is none.
    pub second: GlobalMut<f32>,
    /// Says how many rows are real, and takes the error of a real row with NaN, +inf or no finite logit.
    pub state: GlobalMut<u32>,
    pub workspace: ArgmaxWorkspace,
    pub rows: usize,
    pub vocab: usize,
}

/// Views of the scratch memory, each at least as long as [`argmax_workspace`] says.
#[derive(Clone, Copy)]
pub struct ArgmaxWorkspace {
    /// Results of parts of rows.
    pub parts: GlobalMut<u32>,
    /// One a row: 0 before the first launch, and left so by each.
    pub tickets: GlobalMut<u32>,
}

/// Blocks that a GPU is filled with: rows are divided until there are about as many.
const BLOCKS: usize = 1024;

/// Logits of a part, and parts of a row.
fn division(rows: usize, vocab: usize) -> (usize, usize) {
    let wanted = (BLOCKS / rows.max(1)).clamp(1, kernel::MAX_PARTS);
    let part = vocab.div_ceil(wanted).next_multiple_of(kernel::STEP);
    (part, vocab.div_ceil(part))
}

/// Elements of `ArgmaxWorkspace` for up to `rows` rows: (`parts`, `tickets`).
pub fn argmax_workspace(rows: usize, vocab: usize) -> (usize, usize) {
    // Fewer rows are divided into more parts.
    let parts = (1..=rows).map(|r| r * division(r, vocab).1).max().unwrap_or(0);
    (parts * kernel::PART_WORDS, rows)
}

/// Checks the contract; returns the arguments and the grid.
fn prepare(name: &'static str, p: Argmax) -> Result<(ArgmaxArgs, Dims)> {
    contract(name, p.vocab > 0 && p.vocab <= i32::MAX as usize, || format!("a vocabulary of {}", p.vocab))?;
    contract(name, p.rows <= MAX_GRID_Y, || format!("{} rows; at most {MAX_GRID_Y} are possible", p.rows))?;
    let (part, parts) = division(p.rows, p.vocab);
    holds(name, "logits", p.logits.len(), p.rows * p.vocab)?;
    holds(name, "pick", p.pick.len(), p.rows)?;
    holds(name, "best", p.best.len(), p.rows)?;
    holds(name, "second", p.second.len(), p.rows)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    holds(name, "workspace.parts", p.workspace.parts.len(), p.rows * parts * kernel::PART_WORDS)?;
    holds(name, "workspace.tickets", p.workspace.tickets.len(), p.rows)?;
    aligned(name, "workspace.parts", p.workspace.parts.addr(), 16)?;
    let args = ArgmaxArgs {
        logits: p.logits,
        pick: p.pick,
        best: p.best,
        second: p.second,
        state: p.state,
        parts: p.workspace.parts,
        tickets: p.workspace.tickets,
        vocab: p.vocab as u32,
        part: part as u32,
    };
    Ok((args, Dims { grid: [parts as u32, p.rows as u32, 1], block: [kernel::THREADS, 1, 1], shared: 0 }))
}

/// Queues the greedy picks of `rows` rows.
pub fn argmax(device: &Device, p: Argmax) -> Result<()> {
    let (args, dims) = prepare(kernel::ARGMAX.name(), p)?;
    device.launch_overlapping(&kernel::ARGMAX, dims, args)
}

/// How tokens are drawn: from softmax(logits / temperature), cut by the filters in the order top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// At least [`Sampling::LEAST_TEMPERATURE`].
    pub temperature: f32,
    /// Only the k likeliest; 0: all.
    pub top_k: u32,
    /// Only the likeliest that together reach this share, at least one; 1: all.
    pub top_p: f32,
    /// Only those with at least this share of the likeliest one's probability; 0: all.
    pub min_p: f32,
    pub seed: u64,
}

impl Sampling {
    /// Below it the logits would leave f32, and the draws are the greedy picks.
    pub const LEAST_TEMPERATURE: f32 = 1e-6;

    /// Draws at `temperature` from all tokens.
    pub fn all(temperature: f32, seed: u64) -> Self {
        Self { temperature, top_k: 0, top_p: 1.0, min_p: 0.0, seed }
    }

    /// Whether a filter leaves tokens out.
    pub fn filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    fn check(&self, name: &'static str) -> Result<()> {
        let Self { temperature, top_p, min_p, .. } = *self;
        contract(name, temperature.is_finite() && temperature >= Self::LEAST_TEMPERATURE, || {
            format!("a temperature of {temperature}; from {} on it is possible", Self::LEAST_TEMPERATURE)
        })?;
        contract(name, top_p > 0.0 && top_p <= 1.0, || format!("top-p of {top_p}; above 0 and up to 1 is possible"))?;
        contract(name, (0.0..=1.0).contains(&min_p), || format!("min-p of {min_p}; 0 to 1 is possible"))
    }
}

/// One draw for each row.
#[derive(Clone, Copy)]
pub struct Draw {
    pub picks: Argmax,
    /// `[rows]`: the row's position is the committed length and its depth; the token drawn is the next one.
    pub depths: Global<u32>,
    /// `[rows, 2]`, from [`sample_limits`]; empty: no filter.
    pub limits: Global<u32>,
    pub sampling: Sampling,
}

/// Queues the draws of `rows` rows.
pub fn draw(device: &Device, p: Draw) -> Result<()> {
    let name = kernel::DRAW.name();
    p.sampling.check(name)?;
    let (picks, dims) = prepare(name, p.picks)?;
    holds(name, "depths", p.depths.len(), p.picks.rows)?;
    contract(name, p.limits.is_empty() || p.limits.len() >= 2 * p.picks.rows, || {
        format!("limits holds {}, {} are wanted", p.limits.len(), 2 * p.picks.rows)
    })?;
    let args = DrawArgs {
        picks,
        depths: p.depths,
        limits: p.limits,
        seed: [p.sampling.seed as u32, (p.sampling.seed >> 32) as u32],
        inverse_temperature: 1.0 / p.sampling.temperature,
    };
    device.launch_overlapping(&kernel::DRAW, dims, args)
}

/// Where the tokens of each row end that the filters keep.
#[derive(Clone, Copy)]
pub struct SampleLimits {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows, 2]`: key of the last logit that is kept, and the last id of those equal to it.
    pub limits: GlobalMut<u32>,
    /// Scratch memory, at least as long as [`sample_limits_workspace`] says.
    pub workspace: GlobalMut<u32>,
    pub sampling: Sampling,
    pub rows: usize,
    pub vocab: usize,
}

/// Elements of `SampleLimits::workspace` for up to `rows` rows.
pub fn sample_limits_workspace(rows: usize, vocab: usize) -> usize {
    rows * (limits_kernel::ROW_WORDS + vocab.div_ceil(limits_kernel::CHUNK))
}

/// Queues the filters of `rows` rows.
pub fn sample_limits(device: &Device, p: SampleLimits) -> Result<()> {
    let name = limits_kernel::SAMPLE_LIMITS.name();
    p.sampling.check(name)?;
    contract(name, p.vocab > 0 && p.vocab <= i32::MAX as usize, || format!("a vocabulary of {}", p.vocab))?;
    holds(name, "logits", p.logits.len(), p.rows * p.vocab)?;
    holds(name, "limits", p.limits.len(), 2 * p.rows)?;
    contract(name, p.rows <= MAX_GRID_Y, || format!("{} rows; at most {MAX_GRID_Y} are possible", p.rows))?;
    holds(name, "workspace", p.workspace.len(), sample_limits_workspace(p.rows, p.vocab))?;
    aligned(name, "workspace", p.workspace.addr(), 8)?;
    let Sampling { temperature, top_k, top_p, min_p, .. } = p.sampling;
    let args = SampleLimitsArgs {
        logits: p.logits,
        limits: p.limits,
        words: p.workspace,
        vocab: p.vocab as u32,
        inverse_temperature: 1.0 / temperature,
        top_k,
        top_p,
        min_p,
    };
    let grid = [p.vocab.div_ceil(limits_kernel::CHUNK) as u32, p.rows as u32, 1];
    let dims = |shared| Dims { grid, block: [limits_kernel::THREADS, 1, 1], shared };
    device.launch_overlapping(&limits_kernel::SAMPLE_LIMITS_MAX, dims(0), args)?;
    device.launch_overlapping(&limits_kernel::SAMPLE_LIMITS_BINS, dims(0), args)?;
    device.launch_overlapping(&limits_kernel::SAMPLE_LIMITS, dims(limits_kernel::SHARED_BYTES), args)
}
