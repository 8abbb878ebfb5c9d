//! What a model says about itself beside its configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::rule;
use super::{Mismatch, json};

/// What a bundle says about itself beside the configuration.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Settings {
    pub name: String,
    /// Epsilon of `q_a_layernorm` and `kv_a_layernorm`.
    #[serde(serialize_with = "json::short")]
    pub lora_norm_eps: f32,
    /// A token may differ from a golden where the golden's gap is at most this.
    #[serde(serialize_with = "json::short")]
    pub gap_tolerance: f32,
    pub stop_token_ids: Vec<i32>,
    /// The tolerance of each golden, where they were told apart.
    #[serde(skip_serializing)]
    pub gap_tolerances: Option<Vec<f32>>,
    /// Tokens a round that the reference committed over all goldens, by budget or `chain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_acceptance: Option<BTreeMap<String, f64>>,
}

/// What file a vocabulary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum TokenizerKind {
    /// `tiktoken.model`.
    #[serde(rename = "tiktoken")]
    Tiktoken,
    /// `tokenizer.json`.
    #[serde(rename = "tokenizer.json")]
    Json,
}

impl TokenizerKind {
    pub const ALL: [Self; 2] = [Self::Tiktoken, Self::Json];

    /// The tensor of a bundle that holds the file.
    pub fn tensor(self) -> &'static str {
        match self {
            Self::Tiktoken => "tokenizer.tiktoken",
            Self::Json => "tokenizer.json",
        }
    }
}

/// How a text becomes tokens.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TokenizerSpec {
    pub kind: TokenizerKind,
    /// The pattern that splits a text before merging; `tokenizer.json` has its own.
    #[serde(default)]
    pub pattern: String,
    pub special_tokens: BTreeMap<String, u32>,
    /// What chat templates call some of them: `bos_token`, `eos_token` and the like.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub template_tokens: BTreeMap<String, String>,
}

/// A chat template's source, and where it stands.
#[derive(Clone, Debug)]
pub struct TemplateSource {
    pub text: String,
    pub file: PathBuf,
    /// The place in the file where the source begins; empty where the file is the source.
    pub place: String,
}

/// A golden's prompt and continuation as text.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct GoldenText {
    pub prompt: String,
    pub text: String,
}

impl Settings {
    /// Largest gap at which golden `i` may be left: another order of sums decides such a step.
    pub fn tolerance(&self, i: usize) -> f32 {
        self.gap_tolerances.as_ref().and_then(|all| all.get(i)).copied().unwrap_or(self.gap_tolerance)
    }

    pub(super) fn parse(text: &str, vocab: usize) -> Result<Self, Mismatch> {
        const KEY: &str = "settings";
        let settings: Self = json::parse(KEY, text)?;
        for (field, value, least) in [
            ("lora_norm_eps", settings.lora_norm_eps, f32::MIN_POSITIVE),
            ("gap_tolerance", settings.gap_tolerance, 0.0),
        ] {
            let fine = value.is_finite() && value >= least;
            rule(fine, || Mismatch::metadata(KEY, format_args!("{field} of at least {least:e}"), value))?;
        }
        rule(!settings.name.chars().any(char::is_control), || {
            Mismatch::metadata(KEY, "a name without control characters", format_args!("{:?}", settings.name))
        })?;
        match settings.stop_token_ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
            None => Ok(settings),
            Some(id) => Err(Mismatch::metadata(KEY, format_args!("stop_token_ids in 0..{vocab}"), id)),
        }
    }
}
