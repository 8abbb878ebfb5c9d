//! Reading a `.kdtr` file, or a folder of shards with `kdtr.json`: metadata, manifest against what is stored, shapes
//! against the configuration, goldens.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::checkpoint;
use super::container::Container;
use super::error::rule;
use super::layout::{self, Expected, Use};
use super::manifest::{self, Declared};
use super::store::Store;
use super::{
    Bundle, DrafterConfig, GoldenText, Mismatch, ModelConfig, Settings, TemplateSource, TokenizerKind, TokenizerSpec,
    WeightsError, goldens, json, tensor,
};
use crate::linear::Format;

pub(super) const FORMAT: &str = "kdtr";
pub(super) const VERSION: &str = "1";
pub(super) const TEMPLATE: &str = "chat_template";
/// The file with the metadata of a folder of shards.
pub(super) const FOLDER: &str = "kdtr.json";
const HASH_CHARS: usize = 2 * blake3::OUT_LEN;

type Metadata = HashMap<String, String>;

/// The bundle in file `path`, its content not yet compared with its hashes.
pub(super) fn open(path: &Path) -> Result<Bundle, WeightsError> {
    let mut file = Container::open(path, "a .kdtr file or a folder")?;
    let metadata = std::mem::take(&mut file.metadata);
    read(metadata, Store::of(file)).map_err(|m| m.in_file(path))
}

/// Whether `folder` is one of shards that `convert` has written.
pub(super) fn is_folder(folder: &Path) -> bool {
    std::fs::symlink_metadata(folder.join(FOLDER)).is_ok()
}

/// The bundle in such a folder.
pub(super) fn open_folder(folder: &Path) -> Result<Bundle, WeightsError> {
    let path = folder.join(FOLDER);
    let text = checkpoint::read_text(&path)?;
    let metadata = json::parse(FOLDER, &text).map_err(|m| m.in_file(&path))?;
    read(metadata, checkpoint::open_store(folder)?).map_err(|m| m.in_file(folder))
}

/// The bundle with this metadata and these tensors.
fn read(metadata: Metadata, store: Store) -> Result<Bundle, Mismatch> {
    for (key, only) in [("format", FORMAT), ("version", VERSION)] {
        let found = metadata.get(key).map_or("nothing", String::as_str);
        rule(found == only, || Mismatch::metadata(key, format_args!("`{only}`"), format_args!("`{found}`")))?;
    }
    let config_text = required(&metadata, "config")?.to_string();
    let config = ModelConfig::parse(&config_text)?;
    let settings = Settings::parse(required(&metadata, "settings")?, config.vocab_size)?;
    let drafter_text = metadata.get("drafter_config").cloned();
    let drafter = drafter_text.as_ref().map(|text| DrafterConfig::parse(text, &config)).transpose()?;
    let manifest = manifest::parse(required(&metadata, "manifest")?)?;
    let mut expected = layout::target(&config);
    expected.extend(drafter.iter().flat_map(layout::drafter));
    check_layout(&manifest, &expected)?;
    manifest.par_iter().try_for_each(|(name, line)| manifest::check(&store, name, line))?;
    let goldens = goldens::read(&store, config.vocab_size)?;
    let tokenizer = tokenizer(&metadata, &store)?;
    let golden_texts: Vec<GoldenText> = match metadata.get("golden_texts") {
        Some(text) => json::parse("golden_texts", text)?,
        None => Vec::new(),
    };
    rule(golden_texts.is_empty() || golden_texts.len() == goldens.len(), || {
        Mismatch::metadata("golden_texts", format_args!("{} texts", goldens.len()), golden_texts.len())
    })?;
    let hashes = json::parse("blake3", required(&metadata, "blake3")?)?;
    let vocabulary = tokenizer.as_ref().and_then(|t| store.get(t.kind.tensor())).map(|raw| raw.bytes.to_vec());
    let chat_template = metadata.get(TEMPLATE).map(|text| {
        let place = format!("metadata `{TEMPLATE}`");
        TemplateSource { text: text.clone(), file: store.path().to_path_buf(), place }
    });
    let bundle = Bundle {
        store,
        config,
        config_text,
        settings,
        drafter,
        drafter_text,
        manifest,
        hashes,
        checked: false,
        goldens,
        golden_texts,
        tokenizer,
        vocabulary,
        chat_template,
        folder: None,
        handed: Default::default(),
        verified: Default::default(),
    };
    check_names(&bundle)?;
    Ok(bundle)
}

/// Every stored tensor has an owner and a hash, and every hash a tensor.
fn check_names(bundle: &Bundle) -> Result<(), Mismatch> {
    let mut owned: HashSet<String> = HashSet::new();
    owned.extend(bundle.manifest.iter().flat_map(|(name, line)| manifest::stored_names(name, line)));
    owned.extend(bundle.goldens.iter().enumerate().flat_map(|(i, g)| goldens::names(i, g)));
    owned.extend(bundle.tokenizer.as_ref().map(|t| t.kind.tensor().to_string()));
    for name in bundle.store.names() {
        rule(owned.contains(name), || Mismatch::tensor(name, "an entry in the manifest", "an undeclared tensor"))?;
        rule(bundle.hashes.contains_key(name), || Mismatch::tensor(name, "an entry in metadata `blake3`", "none"))?;
    }
    for (name, hash) in &bundle.hashes {
        rule(bundle.store.get(name).is_some(), || {
            Mismatch::tensor(name, "a tensor, since it has a hash", "none stored")
        })?;
        let valid = hash.len() == HASH_CHARS && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        rule(valid, || Mismatch::metadata("blake3", format_args!("{HASH_CHARS} hex digits for `{name}`"), hash))?;
    }
    Ok(())
}

fn required<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a str, Mismatch> {
    metadata.get(key).map(String::as_str).ok_or_else(|| Mismatch::metadata(key, "an entry", "nothing"))
}

fn tokenizer(metadata: &Metadata, store: &Store) -> Result<Option<TokenizerSpec>, Mismatch> {
    let Some(text) = metadata.get("tokenizer") else {
        let stored = TokenizerKind::ALL.map(TokenizerKind::tensor).into_iter().find(|name| store.get(name).is_some());
        return stored.map_or(Ok(None), |name| {
            Err(Mismatch::metadata("tokenizer", format_args!("an entry for tensor `{name}`"), "nothing"))
        });
    };
    let spec: TokenizerSpec = json::parse("tokenizer", text)?;
    let name = spec.kind.tensor();
    let missing = || Mismatch::tensor(name, "the vocabulary of metadata `tokenizer`", "nothing stored");
    let raw = store.get(name).ok_or_else(missing)?;
    tensor::typed(name, raw, &[Dtype::U8], &[raw.bytes.len()])?;
    Ok(Some(spec))
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
