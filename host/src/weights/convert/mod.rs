//! Writing a `.kdtr` file, or a folder of shards, from a checkpoint folder or another bundle, experts quantized where
//! asked.
//!
//! `pieces` are the tensors in order; all sizes are known before the first byte is written, and so is a file's header
//! but for its hashes. `file.rs` writes a file so that a run that was killed can be taken up again, `folder.rs` a
//! folder of such files.

mod file;
mod folder;
mod quantize;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::manifest::{self, Declared, Packing};
use super::{Bundle, Mismatch, WeightsError, config, kdtr, tensor};
use crate::linear::{Format, HostData, ScaleType};
pub use quantize::Scales;
use quantize::{GROUP, Values, quantize};

/// Bytes of a hash in the header.
const HASH_CHARS: usize = 2 * blake3::OUT_LEN;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The disk, or what lies where the file should go.
    #[error("{}: {source}; what was written stays in {}, and the same command goes on from there", file.display(),
        part.display())]
    Write { file: PathBuf, part: PathBuf, source: std::io::Error },
    #[error("{}: exists; nothing is overwritten", .0.display())]
    Exists(PathBuf),
    #[error("{}: another process is writing it", .0.display())]
    Busy(PathBuf),
    #[error("{0}")]
    Nothing(String),
}

/// A tensor of the file.
struct Piece {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: u64,
    from: From,
}

impl Piece {
    /// Whether both are halves of one quantized weight.
    fn belongs_to(&self, other: &Self) -> bool {
        matches!((&self.from, &other.from), (From::Scales(own), From::Codes(name)) if own == name)
    }
}

/// Where its bytes come from.
enum From {
    /// A stored tensor.
    Stored(String),
    Codes(String),
    Scales(String),
    Vocabulary,
}

/// A file to be.
pub struct Conversion<'a> {
    bundle: &'a Bundle,
    scales: Scales,
    manifest: BTreeMap<String, Declared>,
    pieces: Vec<Piece>,
}

/// What was written.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Written {
    pub bytes: u64,
    pub tensors: usize,
    pub weights: usize,
    /// Files with tensors.
    pub shards: usize,
    /// Bytes that an earlier run had written.
    pub resumed_bytes: u64,
}

impl<'a> Conversion<'a> {
    /// `quantize`: routed experts that are stored plain become W4A16 with such scales.
    pub fn new(bundle: &'a Bundle, quantize: Option<Scales>) -> Result<Self, ConvertError> {
        let mut manifest = BTreeMap::new();
        let mut pieces = Vec::new();
        let mut quantized = 0;
        for (name, line) in &bundle.manifest {
            let mut line = Declared { packing: Packing::Bundle, ..line.clone() };
            let plain = !matches!(line.format, Format::W4a16 { .. });
            if quantize.is_some() && plain && name.contains(".mlp.experts.") {
                quantized += 1;
                if !line.shape.get(1).is_some_and(|k| k.is_multiple_of(GROUP)) {
                    let expected = format!("rows in whole groups of {GROUP}");
                    let found = format!("{:?}", line.shape);
                    return Err(bundle.store.blame(Mismatch::tensor(name, expected, found)).into());
                }
                line.format = Format::W4a16 { group: GROUP };
                let [n, k] = [line.shape[0], line.shape[1]];
                let [codes, scales] = [".qw", ".sc"].map(|suffix| format!("{name}{suffix}"));
                pieces.push(piece(codes, Dtype::U8, vec![n, k / 2], From::Codes(name.clone())));
                pieces.push(piece(scales, Dtype::BF16, vec![n, k / GROUP], From::Scales(name.clone())));
            } else {
                pieces.extend(copies(bundle, name, &line)?);
            }
            manifest.insert(name.clone(), line);
        }
        if quantize.is_some() && quantized == 0 {
            let file = bundle.path().display();
            return Err(ConvertError::Nothing(format!("{file}: no routed expert is stored as f32 or bf16")));
        }
        if let (Some(spec), Some(vocabulary)) = (&bundle.tokenizer, &bundle.vocabulary) {
            pieces.push(piece(spec.kind.tensor().into(), Dtype::U8, vec![vocabulary.len()], From::Vocabulary));
        }
        Ok(Self { bundle, scales: quantize.unwrap_or(Scales::Extreme), manifest, pieces })
    }

    /// Bytes of the file's tensors.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    pub fn tensors(&self) -> usize {
        self.pieces.len()
    }

    /// Writes a file, or with `shard` a folder of files of about so many bytes, and reads all of it back. Work is made
    /// safe on disk every `sync` bytes; `progress` is told what is done, of [`Self::bytes`].
    pub fn write(
        &self,
        out: &Path,
        shard: Option<u64>,
        sync: u64,
        progress: &mut dyn FnMut(&str, u64),
    ) -> Result<Written, ConvertError> {
        let (shards, resumed_bytes) = match shard {
            Some(shard) => folder::write(self, out, shard, sync, progress)?,
            None => (1, file::write_alone(self, out, sync, progress)?),
        };
        let (tensors, weights) = (self.pieces.len(), self.manifest.len());
        Ok(Written { bytes: self.bytes(), tensors, weights, shards, resumed_bytes })
    }

    fn metadata(&self) -> Map<String, Value> {
        let bundle = self.bundle;
        let mut all = Map::new();
        let mut add = |key: &str, text: String| all.insert(key.into(), json!(text));
        add("format", kdtr::FORMAT.into());
        add("version", kdtr::VERSION.into());
        let parsed = serde_json::from_str(&bundle.config_text).unwrap_or_default();
        let mut text = config::text_config(parsed);
        text["num_hidden_layers"] = json!(bundle.config.num_hidden_layers);
        text["first_k_dense_replace"] = json!(bundle.config.first_k_dense_replace);
        add("config", text.to_string());
        let mut settings = bundle.settings.clone();
        settings.expected_acceptance = None;
        add("settings", json!(settings).to_string());
        add("manifest", json!(self.manifest).to_string());
        if let Some(text) = &bundle.drafter_text {
            add("drafter_config", text.clone());
        }
        if let (Some(spec), Some(_)) = (&bundle.tokenizer, &bundle.vocabulary) {
            add("tokenizer", json!(spec).to_string());
        }
        if let Some(template) = &bundle.chat_template {
            add(kdtr::TEMPLATE, template.text.clone());
        }
        all
    }

    /// The bytes of pieces that come from one weight.
    fn content(&self, pieces: &[&Piece]) -> Result<Vec<Cow<'_, [u8]>>, WeightsError> {
        let mut halves: Option<(Vec<u8>, Vec<u8>)> = None;
        let mut all = Vec::with_capacity(pieces.len());
        for piece in pieces {
            all.push(match &piece.from {
                From::Stored(name) => {
                    let raw = manifest::raw(&self.bundle.store, name).map_err(|m| self.bundle.store.blame(m))?;
                    Cow::Borrowed(raw.bytes)
                }
                From::Vocabulary => self.bundle.vocabulary.as_deref().unwrap_or_default().into(),
                From::Codes(name) | From::Scales(name) => {
                    let (codes, scales) = match halves.take() {
                        Some(halves) => halves,
                        None => self.quantized(name)?,
                    };
                    match &piece.from {
                        From::Codes(_) => {
                            halves = Some((Vec::new(), scales));
                            codes.into()
                        }
                        _ => scales.into(),
                    }
                }
            });
        }
        Ok(all)
    }

    fn quantized(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), WeightsError> {
        let raw = manifest::raw(&self.bundle.store, name);
        raw.and_then(|raw| tensor::finite(name, raw)).map_err(|m| self.bundle.store.blame(m))?;
        Ok(match &self.bundle.stored_weight(name)?.data {
            HostData::F32(bytes) => quantize(Values::F32(bytes), self.scales),
            HostData::Bf16(bytes) => quantize(Values::Bf16(bytes), self.scales),
            HostData::W4a16 { .. } => (Vec::new(), Vec::new()),
        })
    }
}

fn piece(name: String, dtype: Dtype, shape: Vec<usize>, from: From) -> Piece {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Piece { name, dtype, shape, bytes: bytes as u64, from }
}

/// The tensors of a weight that stays as it is.
fn copies(bundle: &Bundle, name: &str, line: &Declared) -> Result<Vec<Piece>, WeightsError> {
    let from = bundle.manifest.get(name).map_or_else(Vec::new, |line| manifest::stored_names(name, line));
    let host = bundle.stored_weight(name)?;
    let own = manifest::stored_names(name, line);
    let dtypes = match (&host.data, line.format) {
        (HostData::F32(_), _) => vec![(Dtype::F32, line.shape.clone())],
        (HostData::Bf16(_), _) => vec![(Dtype::BF16, line.shape.clone())],
        (HostData::W4a16 { scale_type, group, .. }, _) => {
            let scale = if *scale_type == ScaleType::F32 { Dtype::F32 } else { Dtype::BF16 };
            vec![(Dtype::U8, vec![host.n, host.k / 2]), (scale, vec![host.n, host.k / group])]
        }
    };
    let pieces = own.into_iter().zip(from).zip(dtypes);
    Ok(pieces.map(|((name, from), (dtype, shape))| piece(name, dtype, shape, From::Stored(from))).collect())
}
