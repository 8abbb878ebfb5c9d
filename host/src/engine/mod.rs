//! The engine: a prompt in, tokens out. Prefill, then DDTree rounds; plain decoding is a round whose tree is its root.
//!
//! Lives here: the order of a round (draft, tree, verify, accept, commit) and when the output ends. `decode.rs` is the
//! loop, `output.rs` where it ends, `states.rs` shows passes to other programs, `round.rs` the device-resident state,
//! `draft/` the drafters. The operations themselves are the model's.

mod decode;
mod draft;
mod output;
mod round;
mod states;

use crate::device::DeviceError;
use crate::model::ModelError;
use crate::weights::{Golden, WeightsError};

pub use crate::kernels::{Growth, KvFormat, Sampling};
pub use decode::Engine;
pub use draft::DraftStages;
pub use round::round_bytes;
pub use states::{States, draft_stages, states};

pub type Result<T> = std::result::Result<T, EngineError>;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{0}")]
    Unsupported(String),
    /// A NaN or an infinity where a finite number belongs; names step and row.
    #[error("{0}")]
    NonFinite(String),
    /// A request that the engine as opened cannot serve.
    #[error("{0}")]
    Request(String),
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Weights(e) => Self::Weights(e),
            ModelError::Device(e) => Self::Device(e),
            ModelError::Unsupported(text) => Self::Unsupported(text),
        }
    }
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Draft {
    None,
    /// A golden's recorded marginals.
    Recorded,
    Dflash,
}

#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// What the cache holds.
    pub kv: KvFormat,
    /// Cache slots; `None`: the configuration's `max_position_embeddings`, or what the device holds.
    pub context: Option<usize>,
    pub draft: Draft,
    /// Nodes of a tree, the root not counted.
    pub budget: usize,
    /// What a tree takes besides the most probable prefixes.
    pub growth: Growth,
    /// How tokens are drawn; `None`: the greedy pick.
    pub sampling: Option<Sampling>,
    /// Queue the launches of a round one by one instead of replaying its graphs: what graphs are compared with.
    pub eager: bool,
    /// Fill all cache rows behind the committed ones with NaN after each round: nothing may read them.
    pub poison: bool,
}

impl Default for EngineOptions {
    /// Plain greedy decoding.
    fn default() -> Self {
        Self {
            kv: KvFormat::Bf16,
            context: None,
            draft: Draft::None,
            budget: 0,
            growth: Growth::BEST_FIRST,
            sampling: None,
            eager: false,
            poison: false,
        }
    }
}

pub struct Request<'a> {
    pub prompt: Vec<i32>,
    pub max_new: usize,
    pub stop_ids: Vec<i32>,
    /// Its marginals are the drafts of `Draft::Recorded`.
    pub golden: Option<&'a Golden>,
}

/// What is new of an output.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    pub ids: &'a [i32],
    /// The round they come from; none for the prefill.
    pub round: Option<&'a Round>,
}

/// Why the output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// This stop token, the last of `ids`.
    Token(i32),
    MaxNew,
    /// The caller asked.
    Stopped,
}

/// Microseconds by stage of a round.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Stages {
    pub draft: f64,
    pub tree: f64,
    pub verify: f64,
    pub accept: f64,
    pub commit: f64,
}

impl Stages {
    pub fn total(&self) -> f64 {
        self.draft + self.tree + self.verify + self.accept + self.commit
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Nodes of the tree, the root not counted.
    pub nodes: usize,
    /// Drafted tokens accepted; the round's new bonus token comes on top.
    pub accepted: usize,
    pub stages_us: Stages,
}

#[derive(Clone, Debug)]
pub struct Outcome {
    /// The tokens after the prompt: the first from the prefill, then `accepted + 1` a round, cut at the stop token
    /// (which is the last one) or at `max_new`.
    pub ids: Vec<i32>,
    pub rounds: Vec<Round>,
    pub stop: StopReason,
    /// Best minus second logit at each of `ids`; of draws, best minus second of logit / T + noise, which is what
    /// decides.
    pub gaps: Vec<f32>,
    pub prefill_us: f64,
}
