//! A checkpoint folder as published: config.json, model.safetensors.index.json, shards, tokenizer files.
//!
//! `index.rs` finds the folder and its shards, this file matches tensors with the configuration, `quantization.rs` says
//! which of them should be packed, `text.rs` reads the tokenizer. Nothing but headers and JSON is read here.

mod digest;
mod index;
mod quantization;
mod text;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::census;
use super::config::text_config;
use super::container::Container;
use super::error::rule;
use super::layout::{self, Expected, Use};
use super::manifest::{self, Declared, Packing};
use super::store::Store;
use super::{Bundle, DrafterConfig, HASHED_BELOW, Mismatch, ModelConfig, Settings, WeightsError, json};
use crate::linear::Format;
pub(super) use digest::verify_files;
use index::{CONFIG, Index, Kind, Names};
pub(super) use index::{INDEX, read_text};
use quantization::Quantization;

type Result<T> = std::result::Result<T, WeightsError>;

/// What a checkpoint folder holds beside the weights that are used.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Folder {
    /// Where the files are: of a cache folder, the snapshot.
    pub path: PathBuf,
    pub shards: usize,
    /// All tensors of all shards that are there, and their bytes.
    pub tensors: usize,
    pub payload_bytes: u64,
    /// Tensors that text does not need: vision tower and projector.
    pub skipped_tensors: usize,
    pub skipped_bytes: u64,
    /// Tensors of layers that were not asked for.
    pub left_out: usize,
    /// What is odd and no fault.
    pub notes: Vec<String>,
}

/// Opens a folder with the first `layers` layers of its model, or all.
pub(super) fn open(path: &Path, layers: Option<usize>) -> Result<Bundle> {
    let folder = index::resolve(path)?;
    let config_path = folder.join(CONFIG);
    let config_text = index::read_text(&config_path)?;
    let in_config = |m: Mismatch| m.in_file(&config_path);
    let mut config = ModelConfig::parse(&config_text).map_err(in_config)?;
    let whole: Value = json::parse("config", &config_text).map_err(in_config)?;
    let quantization = Quantization::of(&whole).map_err(in_config)?;
    let all_layers = config.num_hidden_layers;
    if let Some(layers) = layers {
        config.keep_layers(layers).map_err(in_config)?;
    }
    let names = Names::Target { left_out: config.num_hidden_layers..all_layers };
    let index = Index::read(&folder)?;
    let (shards, mut facts) = open_shards(&folder, &index, &names)?;
    let (store, prefix) = fill(path, shards, &names)?;
    let manifest = match_layout(&store, &layout::target(&config), prefix, quantization.as_ref())
        .map_err(|m| refused(&store, &index, m))?;
    unreferenced(&store, &manifest).map_err(|m| store.blame(m))?;
    facts.path = folder.clone();
    let text = text::read(&folder, &whole, config.vocab_size)?;
    let settings = Settings {
        name: index::name(path, &folder),
        lora_norm_eps: lora_norm_eps(&whole, &config).map_err(in_config)?,
        gap_tolerance: 0.0,
        stop_token_ids: text.stop_token_ids,
        gap_tolerances: None,
        expected_acceptance: None,
    };
    Ok(Bundle {
        store,
        config,
        config_text,
        settings,
        drafter: None,
        drafter_text: None,
        manifest,
        hashes: BTreeMap::new(),
        checked: false,
        goldens: Vec::new(),
        golden_texts: Vec::new(),
        tokenizer: text.tokenizer,
        vocabulary: text.vocabulary,
        chat_template: text.chat_template,
        folder: Some(facts),
        handed: Default::default(),
        verified: Default::default(),
    })
}

/// The epsilon of the two low-rank norms is no published field: implementations differ (1e-6 in DeepSeek's reference,
/// `rms_norm_eps` elsewhere). A folder may state it as `lora_norm_eps`.
fn lora_norm_eps(whole: &Value, config: &ModelConfig) -> std::result::Result<f32, Mismatch> {
    let stated: Option<f32> = json::field("config", &text_config(whole.clone()), "lora_norm_eps")?;
    let eps = stated.unwrap_or(config.rms_norm_eps);
    rule(eps.is_finite() && eps > 0.0, || {
        Mismatch::new("metadata `config`, field `lora_norm_eps`", "a positive number", eps)
    })?;
    Ok(eps)
}

/// All tensors of a folder's shards, by their own names.
pub(super) fn open_store(folder: &Path) -> Result<Store> {
    let index = Index::read(folder)?;
    let names = Names::Target { left_out: 0..0 };
    let mut store = Store::new(folder);
    for (name, tensors) in &index.shards {
        let shard = index.open(folder, name, tensors, &names)?;
        let own: Vec<String> = shard.iter().flat_map(Container::names).map(str::to_string).collect();
        let Some(shard) = shard else { continue };
        let at = store.add_file(shard);
        own.into_iter().for_each(|name| store.add(name, at, None));
    }
    Ok(store)
}

/// The shards that hold something for text, in the index's order, and what all shards hold.
fn open_shards(folder: &Path, index: &Index, names: &Names) -> Result<(Vec<Container>, Folder)> {
    let opened: Vec<Result<Option<Container>>> =
        index.shards.par_iter().map(|(name, tensors)| index.open(folder, name, tensors, names)).collect();
    let mut facts = Folder { shards: index.shards.len(), notes: index.notes(folder), ..Folder::default() };
    let mut shards = Vec::new();
    for ((name, _), shard) in index.shards.iter().zip(opened) {
        let Some(shard) = shard? else {
            facts.notes.push(format!("shard {name} is absent and holds nothing that is used"));
            continue;
        };
        for tensor in shard.names() {
            let bytes = shard.get(tensor).map_or(0, |raw| raw.bytes.len() as u64);
            facts.tensors += 1;
            facts.payload_bytes += bytes;
            match names.kind(tensor) {
                Kind::Skipped => {
                    facts.skipped_tensors += 1;
                    facts.skipped_bytes += bytes;
                }
                Kind::LeftOut => facts.left_out += 1,
                Kind::Wanted(_) => {}
            }
        }
        shards.push(shard);
    }
    if let Some(total) = index.total_size.filter(|&total| total != facts.payload_bytes) {
        let found = facts.payload_bytes;
        facts.notes.push(format!("the index states a total size of {total} bytes; the tensors have {found}"));
    }
    Ok((shards, facts))
}

/// All wanted tensors under their names without prefix, and whether names have the prefix.
fn fill(path: &Path, shards: Vec<Container>, names: &Names) -> Result<(Store, bool)> {
    let (mut store, mut prefix, mut seen) = (Store::new(path), false, HashMap::new());
    for shard in shards {
        let all: Vec<String> = shard.names().map(str::to_string).collect();
        let file = shard.path().to_path_buf();
        let at = store.add_file(shard);
        for stored in all {
            let Kind::Wanted(name) = names.kind(&stored) else { continue };
            prefix |= name.len() < stored.len();
            let name = name.to_string();
            if let Some(first) = seen.insert(name.clone(), stored.clone()) {
                let expected = format!("`{name}` once, with or without `{}`", index::PREFIX);
                return Err(Mismatch::tensor(&stored, expected, format_args!("`{first}`, too")).in_file(&file));
            }
            store.add(name, at, Some(stored));
        }
    }
    Ok((store, prefix))
}

/// The manifest that a bundle would have: every weight of the configuration in the format that it is stored in, which
/// must be the one that the quantization settings ask for.
fn match_layout(
    store: &Store,
    expected: &[Expected],
    prefix: bool,
    quantization: Option<&Quantization>,
) -> std::result::Result<BTreeMap<String, Declared>, Mismatch> {
    let mut manifest = BTreeMap::new();
    for Expected { name, shape, usage } in expected {
        let packing = Packing::CompressedTensors;
        let packed: Vec<String> = packing.suffixes().iter().map(|suffix| format!("{name}{suffix}")).collect();
        let there = packed.iter().find(|name| store.get(name).is_some());
        let format = match (store.get(name), there) {
            (Some(_), Some(other)) => {
                return Err(Mismatch::tensor(name, "one form of this weight", format_args!("`{other}`, too")));
            }
            (None, None) => {
                let shown = if prefix { format!("{}{name}", index::PREFIX) } else { name.clone() };
                return Err(Mismatch::tensor(&shown, format_args!("{shape:?} in a shard"), "no such tensor"));
            }
            (Some(raw), None) => match raw.dtype {
                Dtype::F32 => Format::F32,
                Dtype::BF16 => Format::Bf16,
                other => return Err(Mismatch::tensor(name, format_args!("BF16 {shape:?}"), format_args!("{other:?}"))),
            },
            (None, Some(first)) => {
                if let Some(absent) = packed.iter().find(|name| store.get(name).is_none()) {
                    return Err(Mismatch::tensor(first, format_args!("`{absent}` beside it"), "none"));
                }
                let Some(q) = quantization else {
                    let expected = "a plain tensor, since config.json has no quantization_config";
                    return Err(Mismatch::tensor(first, expected, "packed codes"));
                };
                Format::W4a16 { group: q.group }
            }
        };
        let line = Declared { shape: shape.clone(), format, packing };
        let stored = manifest::stored_names(name, &line);
        if let Format::W4a16 { group } = format {
            rule(shape.len() == 2 && shape[1].is_multiple_of(group), || {
                Mismatch::tensor(&stored[0], format_args!("rows in whole groups of {group}"), format_args!("{shape:?}"))
            })?;
            rule(*usage == Use::Linear, || {
                Mismatch::tensor(&stored[0], "f32 or bf16, since it enters no product", "packed codes")
            })?;
        }
        manifest::check(store, name, &line)?;
        if *usage == Use::Linear {
            quantization.map_or(Ok(()), |q| q.check(name, &stored[0], format))?;
        }
        manifest.insert(name.clone(), line);
    }
    Ok(manifest)
}

/// Every tensor that is kept belongs to a weight.
fn unreferenced(store: &Store, manifest: &BTreeMap<String, Declared>) -> std::result::Result<(), Mismatch> {
    let owned: HashSet<String> = manifest.iter().flat_map(|(name, line)| manifest::stored_names(name, line)).collect();
    let stray = store.names().find(|name| !owned.contains(*name));
    stray.map_or(Ok(()), |name| {
        Err(Mismatch::tensor(name, "a weight of the configured model", "one that it does not have"))
    })
}

/// A missing tensor is in no file: the index is where it should have been.
fn refused(store: &Store, index: &Index, mismatch: Mismatch) -> WeightsError {
    match mismatch.found == "no such tensor" {
        true => mismatch.in_file(&index.path),
        false => store.blame(mismatch),
    }
}

/// Adds the drafter of a folder (`config.json` and its shards) to a target's store and manifest.
pub(super) fn attach_drafter(
    path: &Path,
    target: &ModelConfig,
    store: &mut Store,
    manifest: &mut BTreeMap<String, Declared>,
) -> Result<(DrafterConfig, String)> {
    let folder = index::resolve(path)?;
    let config_path = folder.join(CONFIG);
    let text = index::read_text(&config_path)?;
    let config = DrafterConfig::parse(&text, target).map_err(|m| m.in_file(&config_path))?;
    let index = Index::read(&folder)?;
    let names = Names::Drafter;
    let (shards, _) = open_shards(&folder, &index, &names)?;
    let (own, _) = fill(path, shards, &names)?;
    let unprefixed: Vec<Expected> = layout::drafter(&config)
        .into_iter()
        .map(|e| Expected { name: e.name.trim_start_matches(layout::DRAFTER).to_string(), ..e })
        .collect();
    let lines = match_layout(&own, &unprefixed, false, None).map_err(|m| refused(&own, &index, m))?;
    unreferenced(&own, &lines).map_err(|m| own.blame(m))?;
    if own.bytes() < HASHED_BELOW {
        census::take(&own, &lines, &Default::default()).map_err(|m| own.blame(m))?;
    }
    manifest.retain(|name, _| !name.starts_with(layout::DRAFTER));
    manifest.extend(lines.into_iter().map(|(name, line)| (format!("{}{name}", layout::DRAFTER), line)));
    store.take(own, layout::DRAFTER);
    Ok((config, text))
}
