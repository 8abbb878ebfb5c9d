//! A model on disk, opened, checked, and read by weight name: a bundle (`.kdtr`, a file or a folder) or a checkpoint
//! folder.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use serde::Serialize;

use super::census::{self, Table};
use super::checkpoint::{self, Folder};
use super::manifest::{self, Declared};
use super::read_ahead::{self, Span};
use super::store::Store;
use super::tensor::{bf16_values, f32_values};
use super::{
    DrafterConfig, Golden, GoldenText, Mismatch, ModelConfig, Settings, TemplateSource, TokenizerSpec, WeightsError,
};
use super::{kdtr, layout};
use crate::linear::{Format, HostData, HostWeight};

/// The content of files below this size is checked on opening; from it on, on request.
pub const HASHED_BELOW: u64 = 1 << 30;

/// When content is read and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// For less than 1 GiB.
    WhenSmall,
    Never,
}

pub struct Bundle {
    pub(super) store: Store,
    pub(super) config: ModelConfig,
    /// The configuration as it stands in the file.
    pub(super) config_text: String,
    pub(super) settings: Settings,
    pub(super) drafter: Option<DrafterConfig>,
    pub(super) drafter_text: Option<String>,
    pub(super) manifest: BTreeMap<String, Declared>,
    /// Of a `.kdtr` file, for every tensor.
    pub(super) hashes: BTreeMap<String, String>,
    /// Whether the content was checked on opening.
    pub(super) checked: bool,
    pub(super) goldens: Vec<Golden>,
    pub(super) golden_texts: Vec<GoldenText>,
    pub(super) tokenizer: Option<TokenizerSpec>,
    pub(super) vocabulary: Option<Vec<u8>>,
    pub(super) chat_template: Option<TemplateSource>,
    /// What there is to know about a checkpoint folder; none of a `.kdtr` file.
    pub(super) folder: Option<Folder>,
    /// Bytes of the weights that were asked for.
    pub(super) handed: AtomicU64,
    /// Bytes that `verify` and `verify_files` have gone through.
    pub(super) verified: AtomicU64,
}

impl Bundle {
    /// Opens and checks a `.kdtr` file or a checkpoint folder: headers, what is declared against what is stored, shapes
    /// against the configuration, goldens; below 1 GiB its content, too.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::open_with(path, Verify::WhenSmall)
    }

    pub fn open_with(path: &Path, verify: Verify) -> Result<Self, WeightsError> {
        Self::open_layers(path, verify, None)
    }

    /// The same with the first `layers` layers of the model only; of a folder, tensors of the others may be absent.
    pub fn open_layers(path: &Path, verify: Verify, layers: Option<usize>) -> Result<Self, WeightsError> {
        let mut bundle = match path.is_dir() {
            true if kdtr::is_folder(path) => kdtr::open_folder(path)?,
            true => checkpoint::open(path, layers)?,
            false => kdtr::open(path)?,
        };
        if verify == Verify::WhenSmall && bundle.file_bytes() < HASHED_BELOW {
            bundle.verify()?;
            bundle.checked = true;
        }
        if let (Some(layers), None) = (layers, &bundle.folder) {
            bundle.config.keep_layers(layers).map_err(|m| m.in_file(path))?;
            bundle.forget_the_whole();
            let count = bundle.config.num_hidden_layers;
            bundle.manifest.retain(|name, _| layout::layer_of(name).is_none_or(|layer| layer < count));
        }
        Ok(bundle)
    }

    /// Takes out what only the whole model has.
    fn forget_the_whole(&mut self) {
        self.goldens.clear();
        self.golden_texts.clear();
        self.drafter = None;
        self.drafter_text = None;
        self.manifest.retain(|name, _| !name.starts_with(layout::DRAFTER));
    }

    /// Takes the drafter of `path`, a folder as drafters are published, in place of one that the bundle may have.
    pub fn attach_drafter(&mut self, path: &Path) -> Result<(), WeightsError> {
        let (drafter, text) = checkpoint::attach_drafter(path, &self.config, &mut self.store, &mut self.manifest)?;
        self.drafter = Some(drafter);
        self.drafter_text = Some(text);
        Ok(())
    }

    /// Reads all content: compares it with its hashes where there are any, looks for values that are not finite, and
    /// counts.
    pub fn verify(&self) -> Result<Table, WeightsError> {
        self.hashes.par_iter().try_for_each(|(name, expected)| {
            let raw = manifest::raw(&self.store, name).map_err(|m| self.store.blame(m))?;
            let found = blake3::hash(raw.bytes).to_hex();
            self.verified.fetch_add(raw.bytes.len() as u64, Ordering::Relaxed);
            if found.as_str() == expected {
                return Ok(());
            }
            let (file, tensor) = (self.path().to_path_buf(), name.clone());
            Err(WeightsError::Hash { file, tensor, expected: expected.clone(), found: found.to_string() })
        })?;
        census::take(&self.store, &self.manifest, &self.verified).map_err(|m| self.store.blame(m))
    }

    /// Compares the files of a folder with the SHA-256 that a hub's cache keeps of them. Returns how many have one.
    pub fn verify_files(&self) -> Result<usize, WeightsError> {
        checkpoint::verify_files(self.store.files(), &self.verified)
    }

    /// Bytes that [`Self::verify`] goes through: all once to count, and once more where there are hashes.
    pub fn verify_bytes(&self) -> u64 {
        self.file_bytes() * if self.hashes.is_empty() { 1 } else { 2 }
    }

    /// Bytes that [`Self::verify`] and [`Self::verify_files`] have gone through so far.
    pub fn verified_bytes(&self) -> u64 {
        self.verified.load(Ordering::Relaxed)
    }

    pub fn path(&self) -> &Path {
        self.store.path()
    }

    /// Size of all files.
    pub fn file_bytes(&self) -> u64 {
        self.store.bytes()
    }

    /// What there is to know about a checkpoint folder; none of a `.kdtr` file.
    pub fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// Whether the content was checked on opening.
    pub fn checked(&self) -> bool {
        self.checked
    }

    /// Stored tensors.
    pub fn tensor_count(&self) -> usize {
        self.store.len()
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
        Some((self.tokenizer.as_ref()?, self.vocabulary.as_deref()?))
    }

    /// The source of the chat template.
    pub fn chat_template(&self) -> Option<&TemplateSource> {
        self.chat_template.as_ref()
    }

    /// Weight `name` as stored, for products and look-ups. What opening did not read is looked at now.
    pub fn weight(&self, name: &str) -> Result<HostWeight<'_>, WeightsError> {
        if let (false, Some(line)) = (self.checked, self.manifest.get(name)) {
            manifest::check_scales(&self.store, name, line).map_err(|m| self.store.blame(m))?;
        }
        let weight = self.stored_weight(name)?;
        self.handed.fetch_add(weight.bytes() as u64, Ordering::Relaxed);
        Ok(weight)
    }

    /// Bytes of the weights that were asked for so far.
    pub fn handed_bytes(&self) -> u64 {
        self.handed.load(Ordering::Relaxed)
    }

    /// Bytes of all weights; the drafter's with `drafter`.
    pub fn weight_bytes(&self, drafter: bool) -> u64 {
        let names = self.manifest.keys().filter(|name| drafter || !name.starts_with(layout::DRAFTER));
        names.map(|name| self.stored_bytes(name) as u64).sum()
    }

    /// Runs `load`, which asks for weights in the order of `prefixes`, while the files are read in that order, not too
    /// far ahead. Of what has just been checked there is nothing to read.
    pub fn reading_ahead<T>(&self, prefixes: &[String], load: impl FnOnce() -> T) -> T {
        match self.checked {
            true => load(),
            false => read_ahead::during(&self.spans(prefixes), &self.handed, load),
        }
    }

    /// Where the weights with these prefixes lie, in the order of loading: of a layer the experts last, by their
    /// number.
    fn spans(&self, prefixes: &[String]) -> Vec<Span<'_>> {
        let mut spans = Vec::new();
        for prefix in prefixes {
            let from = self.manifest.range(prefix.clone()..);
            let mut lines: Vec<_> = from.take_while(|(name, _)| name.starts_with(prefix)).collect();
            lines.sort_by_key(|(name, _)| layout::expert_of(name));
            let names = lines.into_iter().flat_map(|(name, line)| manifest::stored_names(name, line));
            spans.extend(names.filter_map(|name| self.store.span(&name)));
        }
        spans
    }

    /// Weight `name` for its shape and format; its content is looked at by [`Self::weight`].
    pub fn described(&self, name: &str) -> Result<HostWeight<'_>, WeightsError> {
        self.stored_weight(name)
    }

    /// Weight `name`, not looked at.
    pub(super) fn stored_weight(&self, name: &str) -> Result<HostWeight<'_>, WeightsError> {
        let missing = || Mismatch::tensor(name, "a weight of the manifest", "none").in_file(self.path());
        let (name, line) = self.manifest.get_key_value(name).ok_or_else(missing)?;
        manifest::stored(&self.store, name, line).map_err(|m| self.store.blame(m))
    }

    /// Bytes of a weight's values, or of its codes and scales; 0 of none that there is.
    pub fn stored_bytes(&self, name: &str) -> usize {
        self.stored_weight(name).map_or(0, |weight| weight.bytes())
    }

    /// Bytes of all stored tensors.
    pub fn payload_bytes(&self) -> u64 {
        self.store.names().filter_map(|name| Some(self.store.get(name)?.bytes.len() as u64)).sum()
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
            share.bytes += manifest::stored(&self.store, name, line).map_or(0, |stored| stored.bytes());
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
