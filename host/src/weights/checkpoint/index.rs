//! Where a checkpoint's files are: the folder itself or a hub cache, the index, the shards.

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::super::container::Container;
use super::super::error::rule;
use super::super::layout::layer_of;
use super::super::{Mismatch, WeightsError, json};

pub(super) const CONFIG: &str = "config.json";
pub(in crate::weights) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// In front of the text model's names in a multi-modal checkpoint.
pub(super) const PREFIX: &str = "language_model.";
/// Parts of a multi-modal checkpoint that text does not need.
const SKIPPED: [&str; 2] = ["vision_tower.", "mm_projector."];
/// JSON files of more bytes than this are refused; the published index has 24 million.
const MAX_JSON: u64 = 1 << 30;

type Result<T> = std::result::Result<T, WeightsError>;

/// What a stored tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind<'a> {
    /// Its name without prefix.
    Wanted(&'a str),
    Skipped,
    /// Of a layer that was not asked for.
    LeftOut,
}

/// Whose names a folder holds.
#[derive(Clone)]
pub(super) enum Names {
    /// A target's; layers of the model in the range are not loaded.
    Target { left_out: Range<usize> },
    /// A drafter's, which may begin with `model.`.
    Drafter,
}

impl Names {
    /// What tensor `stored` is for.
    pub fn kind<'a>(&self, stored: &'a str) -> Kind<'a> {
        let Self::Target { left_out } = self else {
            return Kind::Wanted(stored.strip_prefix("model.").unwrap_or(stored));
        };
        if SKIPPED.iter().any(|part| stored.starts_with(part)) {
            return Kind::Skipped;
        }
        let name = stored.strip_prefix(PREFIX).unwrap_or(stored);
        match layer_of(name) {
            Some(layer) if left_out.contains(&layer) => Kind::LeftOut,
            _ => Kind::Wanted(name),
        }
    }
}

/// The folder with config.json: `path`, or the snapshot that a hub's cache folder points at.
pub(super) fn resolve(path: &Path) -> Result<PathBuf> {
    if path.join(CONFIG).exists() {
        return Ok(path.to_path_buf());
    }
    let snapshots = path.join("snapshots");
    if !snapshots.is_dir() {
        let found = match std::fs::symlink_metadata(path.join(CONFIG)) {
            Ok(_) => "a link that leads nowhere",
            Err(_) => "none",
        };
        return Err(Mismatch::new("folder", format_args!("`{CONFIG}` in it"), found).in_file(path));
    }
    let named = std::fs::read_to_string(path.join("refs/main")).ok().map(|name| name.trim().to_string());
    let folder = match named.filter(|name| is_plain(Path::new(name))) {
        Some(name) => snapshots.join(name),
        None => {
            let io = |source| WeightsError::Io { file: snapshots.clone(), source };
            let mut all: Vec<PathBuf> =
                std::fs::read_dir(&snapshots).map_err(io)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
            all.sort();
            match all.as_slice() {
                [one] => one.clone(),
                _ => {
                    let expected = "`refs/main` or one snapshot in a cache folder";
                    let found = format!("{} snapshots", all.len());
                    return Err(Mismatch::new("folder", expected, found).in_file(path));
                }
            }
        }
    };
    rule(folder.join(CONFIG).exists(), || Mismatch::new("folder", format_args!("`{CONFIG}` in it"), "none"))
        .map_err(|m| m.in_file(&folder))?;
    Ok(folder)
}

/// What people call the model: the folder's name, or the repository's of a cache folder.
pub(super) fn name(path: &Path, folder: &Path) -> String {
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let cached = folder.ancestors().filter_map(last).find_map(|name| {
        let name = name.strip_prefix("models--")?;
        Some(name.rsplit("--").next().unwrap_or(name).to_string())
    });
    let whole = std::fs::canonicalize(path).ok();
    let plain = || last(path).or_else(|| last(whole.as_deref()?));
    let name = cached.or_else(plain).unwrap_or_else(|| "checkpoint".into());
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The content of a JSON or text file of the folder.
pub(in crate::weights) fn read_text(path: &Path) -> Result<String> {
    let io = |source| WeightsError::Io { file: path.to_path_buf(), source };
    let about = std::fs::metadata(path).map_err(io)?;
    let fits = about.is_file() && about.len() <= MAX_JSON;
    rule(fits, || {
        let found = if about.is_file() { format!("{} bytes", about.len()) } else { "something else".into() };
        Mismatch::new("path", format_args!("a file of at most {MAX_JSON} bytes"), found)
    })
    .map_err(|m| m.in_file(path))?;
    let mut bytes = Vec::new();
    std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(io)?;
    String::from_utf8(bytes).map_err(|e| Mismatch::new("text", "UTF-8", e.utf8_error()).in_file(path))
}

/// Names in the folder and below it, and nothing else.
fn is_plain(name: &Path) -> bool {
    name.components().count() > 0 && name.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Which shard holds which tensors.
pub(super) struct Index {
    /// The file that says so.
    pub path: PathBuf,
    /// Whether that is an index and not the only shard.
    indexed: bool,
    pub shards: BTreeMap<String, HashSet<String>>,
    pub total_size: Option<u64>,
}

impl Index {
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(INDEX);
        if std::fs::symlink_metadata(&path).is_ok() {
            return Self::parse(&read_text(&path)?, &path);
        }
        let path = folder.join(SINGLE);
        if std::fs::symlink_metadata(&path).is_err() {
            let expected = format!("`{INDEX}` or `{SINGLE}` in it");
            return Err(Mismatch::new("folder", expected, "neither").in_file(folder));
        }
        let shards = BTreeMap::from([(SINGLE.to_string(), HashSet::new())]);
        Ok(Self { path, indexed: false, shards, total_size: None })
    }

    fn parse(text: &str, path: &Path) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct File {
            metadata: Option<Value>,
            weight_map: BTreeMap<String, String>,
        }
        let bad = |at: &str, expected: &str, found: &dyn std::fmt::Display| {
            Err(Mismatch::new(at, expected, found).in_file(path))
        };
        let parsed = json::unique_keys(text).and_then(|()| serde_json::from_str::<File>(text));
        let file = match parsed {
            Ok(file) => file,
            Err(e) => return bad("index", "JSON with a `weight_map` from tensors to files, every key once", &e),
        };
        if file.weight_map.is_empty() {
            return bad("index", "a `weight_map` with entries", &"an empty one");
        }
        let total_size = file.metadata.as_ref().and_then(|m| m.get("total_size")).and_then(Value::as_u64);
        let mut shards: BTreeMap<String, HashSet<String>> = BTreeMap::new();
        for (tensor, shard) in file.weight_map {
            if !is_plain(Path::new(&shard)) || !shard.ends_with(".safetensors") {
                let expected = "the name of a .safetensors file in the folder";
                return bad(&format!("tensor `{tensor}`"), expected, &format_args!("`{shard}`"));
            }
            shards.entry(shard).or_default().insert(tensor);
        }
        Ok(Self { path: path.to_path_buf(), indexed: true, shards, total_size })
    }

    /// Opens a shard and compares its tensors with those of the index. `None` when it is absent and not needed.
    pub fn open(
        &self,
        folder: &Path,
        name: &str,
        tensors: &HashSet<String>,
        names: &Names,
    ) -> Result<Option<Container>> {
        let path = folder.join(name);
        if let Err(source) = std::fs::metadata(&path) {
            let wanted = tensors.iter().filter(|t| matches!(names.kind(t), Kind::Wanted(_))).min();
            let Some(wanted) = wanted.cloned().or_else(|| (!self.indexed).then(|| "all".to_string())) else {
                return Ok(None);
            };
            let found = match std::fs::read_link(&path) {
                Ok(to) => format!("a link to {}, which leads nowhere ({source})", to.display()),
                Err(_) => source.to_string(),
            };
            return Err(Mismatch::new("shard", format_args!("a file, with `{wanted}` in it"), found).in_file(&path));
        }
        let shard = Container::open(&path, "a .safetensors file")?;
        if self.indexed {
            self.compare(&shard, name, tensors).map_err(|m| m.in_file(&path))?;
        }
        Ok(Some(shard))
    }

    /// The shard holds what the index says, and nothing else.
    fn compare(&self, shard: &Container, name: &str, tensors: &HashSet<String>) -> std::result::Result<(), Mismatch> {
        if let Some(absent) = tensors.iter().filter(|tensor| shard.get(tensor).is_none()).min() {
            return Err(Mismatch::tensor(absent, "it in this shard, as the index says", "no such tensor here"));
        }
        let Some(stray) = shard.names().find(|tensor| !tensors.contains(*tensor)) else { return Ok(()) };
        let elsewhere = self.shards.iter().find(|(other, held)| *other != name && held.contains(stray));
        let found = elsewhere.map_or("none".to_string(), |(other, _)| format!("one for {other}: the tensor is twice"));
        Err(Mismatch::tensor(stray, "an entry for this shard in the index", found))
    }

    /// Files beside the shards that look like more of them.
    pub fn notes(&self, folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| {
            let name = entry.ok()?.file_name().to_string_lossy().into_owned();
            let odd = name.ends_with(".safetensors") && !self.shards.contains_key(&name);
            (odd || name.ends_with(".incomplete")).then(|| format!("{name} is not in the index and not read"))
        });
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}
