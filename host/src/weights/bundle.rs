//! A bundle (`.kdtr`): opened, checked, and read by weight name.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::container::Container;
use super::error::rule;
use super::layout::{self, Expected, Use};
use super::manifest::{self, Declared};
use super::tensor::{self, bf16_values, f32_values};
use super::{DrafterConfig, Golden, Mismatch, ModelConfig, WeightsError, goldens, json};
use crate::linear::{Format, HostData, HostWeight};

const FORMAT: &str = "kdtr";
const VERSION: &str = "1";
/// Files from this size on are hashed on request only.
pub const HASHED_BELOW: usize = 1 << 30;
const VOCABULARY: &str = "tokenizer.tiktoken";
const HASH_CHARS: usize = 2 * blake3::OUT_LEN;

/// When content is compared with the hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// For files below 1 GiB.
    WhenSmall,
    Never,
}

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

/// How a text becomes tokens.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TokenizerSpec {
    pub kind: String,
    /// The pattern that splits a text before merging.
    pub pattern: String,
    pub special_tokens: BTreeMap<String, u32>,
}

/// A golden's prompt and continuation as text.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct GoldenText {
    pub prompt: String,
    pub text: String,
}

pub struct Bundle {
    file: Container,
    config: ModelConfig,
    settings: Settings,
    drafter: Option<DrafterConfig>,
    manifest: BTreeMap<String, Declared>,
    hashes: BTreeMap<String, String>,
    hashed: bool,
    goldens: Vec<Golden>,
    golden_texts: Vec<GoldenText>,
    tokenizer: Option<TokenizerSpec>,
}

impl Bundle {
    /// Opens and checks a bundle: header, metadata, manifest against what is stored, shapes against the configuration,
    /// scales, goldens; hashes and the finiteness of all values below 1 GiB.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::open_with(path, Verify::WhenSmall)
    }

    pub fn open_with(path: &Path, verify: Verify) -> Result<Self, WeightsError> {
        let mut bundle = Self::read(Container::open(path)?).map_err(|m| m.in_file(path))?;
        if verify == Verify::WhenSmall && bundle.file.bytes() < HASHED_BELOW {
            bundle.verify()?;
            bundle.hashed = true;
        }
        Ok(bundle)
    }

    fn read(file: Container) -> Result<Self, Mismatch> {
        for (key, only) in [("format", FORMAT), ("version", VERSION)] {
            let found = file.metadata.get(key).map_or("nothing", String::as_str);
            rule(found == only, || Mismatch::metadata(key, format_args!("`{only}`"), format_args!("`{found}`")))?;
        }
        let config = ModelConfig::parse(required(&file, "config")?)?;
        let settings = Settings::parse(required(&file, "settings")?, config.vocab_size)?;
        let drafter = match file.metadata.get("drafter_config") {
            Some(text) => Some(DrafterConfig::parse(text, &config)?),
            None => None,
        };
        let manifest = manifest::parse(required(&file, "manifest")?)?;
        let mut expected = layout::target(&config);
        expected.extend(drafter.iter().flat_map(layout::drafter));
        check_layout(&manifest, &expected)?;
        manifest.par_iter().try_for_each(|(name, line)| manifest::check(&file, name, line))?;
        let goldens = goldens::read(&file, config.vocab_size)?;
        let tokenizer = tokenizer(&file)?;
        let golden_texts: Vec<GoldenText> = match file.metadata.get("golden_texts") {
            Some(text) => json::parse("golden_texts", text)?,
            None => Vec::new(),
        };
        rule(golden_texts.is_empty() || golden_texts.len() == goldens.len(), || {
            Mismatch::metadata("golden_texts", format_args!("{} texts", goldens.len()), golden_texts.len())
        })?;
        let hashes = json::parse("blake3", required(&file, "blake3")?)?;
        let bundle =
            Self { file, config, settings, drafter, manifest, hashes, hashed: false, goldens, golden_texts, tokenizer };
        bundle.check_names()?;
        Ok(bundle)
    }

    /// Every stored tensor has an owner and a hash, and every hash a tensor.
    fn check_names(&self) -> Result<(), Mismatch> {
        let mut owned: HashSet<String> = HashSet::new();
        owned.extend(self.manifest.iter().flat_map(|(name, line)| manifest::stored_names(name, line.format)));
        owned.extend(self.goldens.iter().enumerate().flat_map(|(i, g)| goldens::names(i, g)));
        owned.extend(self.tokenizer.as_ref().map(|_| VOCABULARY.to_string()));
        for name in self.file.names() {
            rule(owned.contains(name), || Mismatch::tensor(name, "an entry in the manifest", "an undeclared tensor"))?;
            rule(self.hashes.contains_key(name), || Mismatch::tensor(name, "an entry in metadata `blake3`", "none"))?;
        }
        for (name, hash) in &self.hashes {
            rule(self.file.get(name).is_some(), || {
                Mismatch::tensor(name, "a tensor, since it has a hash", "none stored")
            })?;
            let valid = hash.len() == HASH_CHARS && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            rule(valid, || Mismatch::metadata("blake3", format_args!("{HASH_CHARS} hex digits for `{name}`"), hash))?;
        }
        Ok(())
    }

    /// Compares the content of every tensor with its hash, and looks for values that are not finite.
    pub fn verify(&self) -> Result<(), WeightsError> {
        self.hashes.par_iter().try_for_each(|(name, expected)| {
            let raw = manifest::raw(&self.file, name).map_err(|m| m.in_file(self.path()))?;
            let found = blake3::hash(raw.bytes).to_hex();
            if found.as_str() != expected {
                let (file, tensor) = (self.path().to_path_buf(), name.clone());
                return Err(WeightsError::Hash { file, tensor, expected: expected.clone(), found: found.to_string() });
            }
            // Recorded log-probabilities may hold minus infinity; goldens have checks of their own.
            let weight = !name.starts_with(goldens::PREFIX);
            if weight { tensor::finite(name, raw).map_err(|m| m.in_file(self.path())) } else { Ok(()) }
        })
    }

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Size of the file.
    pub fn file_bytes(&self) -> usize {
        self.file.bytes()
    }

    /// Whether the content was compared with the hashes on opening.
    pub fn hashed(&self) -> bool {
        self.hashed
    }

    /// Stored tensors.
    pub fn tensor_count(&self) -> usize {
        self.hashes.len()
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn drafter(&self) -> Option<&DrafterConfig> {
        self.drafter.as_ref()
    }

    pub fn manifest(&self) -> &BTreeMap<String, Declared> {
        &self.manifest
    }

    pub fn goldens(&self) -> &[Golden] {
        &self.goldens
    }

    /// One a golden, or none at all.
    pub fn golden_texts(&self) -> &[GoldenText] {
        &self.golden_texts
    }

    /// The bytes of tiktoken.model and how to use them.
    pub fn tokenizer(&self) -> Option<(&TokenizerSpec, &[u8])> {
        Some((self.tokenizer.as_ref()?, self.file.get(VOCABULARY)?.bytes))
    }

    /// Weight `name` as stored, for products and look-ups.
    pub fn weight(&self, name: &str) -> Result<HostWeight<'_>, WeightsError> {
        let missing = || Mismatch::tensor(name, "a weight of the manifest", "none").in_file(self.path());
        let (name, line) = self.manifest.get_key_value(name).ok_or_else(missing)?;
        manifest::stored(&self.file, name, line).map_err(|m| m.in_file(self.path()))
    }

    /// The values of a norm's weight or a bias, stored as f32 or bf16.
    pub fn vector_f32(&self, name: &str) -> Result<Vec<f32>, WeightsError> {
        match self.weight(name)?.data {
            HostData::F32(bytes) => Ok(f32_values(&bytes).collect()),
            HostData::Bf16(bytes) => Ok(bf16_values(&bytes).collect()),
            HostData::W4a16 { .. } => Err(Mismatch::tensor(name, "f32 or bf16", "w4a16").in_file(self.path())),
        }
    }

    /// Weights and bytes by format; the drafter's apart when `drafter` is set.
    pub fn formats(&self, drafter: bool) -> BTreeMap<Format, Share> {
        let mut shares: BTreeMap<Format, Share> = BTreeMap::new();
        for (name, line) in self.manifest.iter().filter(|(name, _)| name.starts_with(layout::DRAFTER) == drafter) {
            let share = shares.entry(line.format).or_default();
            share.weights += 1;
            share.parameters += line.shape.iter().product::<usize>();
            share.bytes += manifest::stored(&self.file, name, line).map_or(0, |stored| stored.bytes());
        }
        shares
    }
}

/// What one format holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    pub weights: usize,
    pub parameters: usize,
    pub bytes: usize,
}

impl Settings {
    /// Largest gap at which golden `i` may be left: another order of sums decides such a step.
    pub fn tolerance(&self, i: usize) -> f32 {
        self.gap_tolerances.as_ref().and_then(|all| all.get(i)).copied().unwrap_or(self.gap_tolerance)
    }

    fn parse(text: &str, vocab: usize) -> Result<Self, Mismatch> {
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

fn required<'a>(file: &'a Container, key: &str) -> Result<&'a str, Mismatch> {
    file.metadata.get(key).map(String::as_str).ok_or_else(|| Mismatch::metadata(key, "an entry", "nothing"))
}

fn tokenizer(file: &Container) -> Result<Option<TokenizerSpec>, Mismatch> {
    match (file.metadata.get("tokenizer"), file.get(VOCABULARY)) {
        (None, None) => Ok(None),
        (Some(_), None) => {
            Err(Mismatch::tensor(VOCABULARY, "the vocabulary of metadata `tokenizer`", "nothing stored"))
        }
        (None, Some(_)) => {
            Err(Mismatch::metadata("tokenizer", format_args!("an entry for tensor `{VOCABULARY}`"), "nothing"))
        }
        (Some(text), Some(raw)) => {
            tensor::typed(VOCABULARY, raw, &[Dtype::U8], &[raw.bytes.len()])?;
            json::parse("tokenizer", text).map(Some)
        }
    }
}

/// The manifest names exactly the weights of the configuration, in shapes and formats that fit.
fn check_layout(manifest: &BTreeMap<String, Declared>, expected: &[Expected]) -> Result<(), Mismatch> {
    for Expected { name, shape, usage } in expected {
        let line = manifest
            .get(name)
            .ok_or_else(|| Mismatch::tensor(name, format_args!("{shape:?} in the manifest"), "no entry"))?;
        rule(line.shape == *shape, || {
            let expected = format!("{shape:?}, which follows from the configuration");
            Mismatch::tensor(name, expected, format_args!("{:?} in the manifest", line.shape))
        })?;
        rule(*usage == Use::Linear || !matches!(line.format, Format::W4a16 { .. }), || {
            Mismatch::tensor(name, "f32 or bf16, since it enters no product", line.format)
        })?;
    }
    let known: HashSet<&str> = expected.iter().map(|e| e.name.as_str()).collect();
    match manifest.keys().find(|name| !known.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Mismatch::tensor(name, "a weight of the configured model", "another in the manifest")),
    }
}
