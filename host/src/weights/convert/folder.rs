//! A folder of shards under `convert`: files as `file.rs` writes them, an index as a checkpoint has one, and
//! `kdtr.json`, the metadata of the whole. All of it is written in `OUT.part`, which gets its name at the end.
//!
//! A shard is finished when it has its name: it has been read back then. Its header holds the hashes of its tensors and
//! says which source it is from, so a run after a kill takes it over.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::file::{self, File, HASHES, beside, fingerprint};
use super::{Conversion, ConvertError, Piece};
use crate::weights::checkpoint::INDEX;
use crate::weights::container::Container;
use crate::weights::{Bundle, Mismatch, Verify, WeightsError, json, kdtr};

/// The metadata entry that says which source a shard is from.
const SOURCE: &str = "kdtr.source";
/// Held by the process that writes.
const LOCK: &str = "lock";

/// Writes `conversion` to folder `out`. Returns how many shards there are, and the bytes of an earlier run.
pub(super) fn write(
    conversion: &Conversion,
    out: &Path,
    shard: u64,
    sync: u64,
    progress: &mut dyn FnMut(&str, u64),
) -> Result<(usize, u64), ConvertError> {
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(ConvertError::Exists(out.to_path_buf()));
    }
    let part = beside(out, ".part");
    let failed = |file: &Path| {
        let (file, part) = (file.to_path_buf(), part.clone());
        move |source: io::Error| ConvertError::Write { file, part, source }
    };
    std::fs::create_dir_all(&part).map_err(failed(&part))?;
    let lock_path = part.join(LOCK);
    let lock = file::open(&lock_path).map_err(failed(&lock_path))?;
    if lock.try_lock().is_err() {
        return Err(ConvertError::Busy(out.to_path_buf()));
    }
    let metadata = conversion.metadata();
    let source = fingerprint(conversion, Value::Object(metadata.clone()).to_string().as_bytes());
    let groups = groups(&conversion.pieces, shard);
    let names: Vec<String> =
        (1..=groups.len()).map(|i| format!("model-{i:05}-of-{:06}.safetensors", groups.len())).collect();
    clean(&part, &names).map_err(failed(&part))?;
    let (mut done, mut resumed) = (0, 0);
    let (mut hashes, mut map) = (HashMap::new(), Map::new());
    for (name, pieces) in names.iter().zip(&groups) {
        let path = part.join(name);
        let about = [("format", json!("pt")), (SOURCE, json!(source))];
        let metadata = about.into_iter().map(|(key, value)| (key.to_string(), value)).collect();
        let file = File { conversion, pieces, metadata };
        match finished(&path, &source) {
            Some(found) => {
                hashes.extend(found);
                resumed += file.bytes();
            }
            None => {
                // Of another source, if it is there at all.
                if path.exists() {
                    std::fs::remove_file(&path).map_err(failed(&path))?;
                }
                let mut here = |what: &str, bytes: u64| progress(what, done + bytes);
                resumed += file::write(&file, &path, sync, &mut here, &|path| read_back(path).map(|_| ()))?;
                hashes.extend(finished(&path, &source).unwrap_or_default());
            }
        }
        done += file.bytes();
        progress("writing", done);
        map.extend(pieces.iter().map(|piece| (piece.name.clone(), json!(name))));
    }
    let mut metadata = metadata;
    metadata.insert(HASHES.into(), json!(json!(hashes).to_string()));
    let index = json!({ "metadata": { "total_size": conversion.bytes() }, "weight_map": map });
    for (name, value) in [(INDEX, index), (kdtr::FOLDER, Value::Object(metadata))] {
        let path = part.join(name);
        let written = std::fs::File::create(&path).and_then(|mut file| {
            io::Write::write_all(&mut file, value.to_string().as_bytes())?;
            file.sync_all()
        });
        written.map_err(failed(&path))?;
    }
    // As any reader would open it.
    Bundle::open_with(&part, Verify::Never)?;
    std::fs::remove_file(&lock_path).map_err(failed(&lock_path))?;
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(ConvertError::Exists(out.to_path_buf()));
    }
    std::fs::rename(&part, out).map_err(failed(out))?;
    Ok((groups.len(), resumed))
}

/// Runs of pieces of about `bytes` bytes.
fn groups(pieces: &[Piece], bytes: u64) -> Vec<&[Piece]> {
    let (mut groups, mut from, mut sum) = (Vec::new(), 0, 0);
    for (i, piece) in pieces.iter().enumerate() {
        // The halves of a weight stay together.
        let halved = i > 0 && piece.belongs_to(&pieces[i - 1]);
        if sum + piece.bytes > bytes && i > from && !halved {
            groups.push(&pieces[from..i]);
            (from, sum) = (i, 0);
        }
        sum += piece.bytes;
    }
    groups.push(&pieces[from..]);
    groups
}

/// Takes away what an earlier run for other shards has left.
fn clean(part: &Path, names: &[String]) -> io::Result<()> {
    for entry in std::fs::read_dir(part)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let shard = name.trim_end_matches(".done").trim_end_matches(".part");
        if name != LOCK && !names.iter().any(|known| known == shard) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The hashes of a finished shard, if it is of this source.
fn finished(path: &Path, source: &str) -> Option<HashMap<String, String>> {
    let shard = Container::open(path, "a shard").ok()?;
    let same = shard.metadata.get(SOURCE).is_some_and(|own| own == source);
    same.then(|| serde_json::from_str(shard.metadata.get(HASHES)?).ok()).flatten()
}

/// Compares a shard with the hashes in its header.
fn read_back(path: &Path) -> Result<(), WeightsError> {
    let shard = Container::open(path, "a shard")?;
    let text = shard.metadata.get(HASHES).map_or("", String::as_str);
    let hashes: HashMap<String, String> = json::parse(HASHES, text).map_err(|m| m.in_file(path))?;
    hashes.par_iter().try_for_each(|(name, expected)| {
        let raw = shard.get(name).ok_or_else(|| Mismatch::tensor(name, "a tensor", "none").in_file(path))?;
        let found = blake3::hash(raw.bytes).to_hex();
        if found.as_str() == expected {
            return Ok(());
        }
        let (file, tensor) = (path.to_path_buf(), name.clone());
        Err(WeightsError::Hash { file, tensor, expected: expected.clone(), found: found.to_string() })
    })
}
