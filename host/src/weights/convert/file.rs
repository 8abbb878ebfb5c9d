//! A file under `convert`: written beside its name, taken up after a kill, renamed when it has been read back.
//!
//! `OUT.part` has its full length from the start, header included, with zeros for hashes. `OUT.part.done` names the
//! source in its first line and then one finished piece a line, with its hash, written after the piece is on disk.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::{Conversion, ConvertError, HASH_CHARS, Piece};
use crate::weights::{Bundle, Verify, WeightsError};

/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;
/// The metadata entry with the hashes.
pub(super) const HASHES: &str = "blake3";

/// A safetensors file to be.
pub(super) struct File<'a> {
    pub conversion: &'a Conversion<'a>,
    /// Its tensors.
    pub pieces: &'a [Piece],
    /// Of its header, but for the hashes.
    pub metadata: Map<String, Value>,
}

impl File<'_> {
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// The header with these hashes; its length does not depend on them.
    fn header(&self, hashes: &[String]) -> Vec<u8> {
        let (mut header, mut at) = (Map::new(), 0);
        let sums: Map<String, Value> =
            self.pieces.iter().zip(hashes).map(|(piece, hash)| (piece.name.clone(), json!(hash))).collect();
        let mut metadata = self.metadata.clone();
        metadata.insert(HASHES.into(), json!(Value::Object(sums).to_string()));
        header.insert("__metadata__".into(), Value::Object(metadata));
        for Piece { name, dtype, shape, bytes, .. } in self.pieces {
            let end = at + bytes;
            header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        text
    }
}

/// `out` with more behind its name.
pub(super) fn beside(out: &Path, suffix: &str) -> PathBuf {
    let mut name = out.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

/// Writes all of `conversion` to one file. Returns the bytes that were there from an earlier run.
pub(super) fn write_alone(
    conversion: &Conversion,
    out: &Path,
    sync: u64,
    progress: &mut dyn FnMut(&str, u64),
) -> Result<u64, ConvertError> {
    let file = File { conversion, pieces: &conversion.pieces, metadata: conversion.metadata() };
    // As any reader would.
    let read_back = |part: &Path| Bundle::open_with(part, Verify::Never).and_then(|bundle| bundle.verify()).map(|_| ());
    write(&file, out, sync, progress, &read_back)
}

/// Writes `file` to `out` and has it read back. Returns the bytes that were there from an earlier run.
pub(super) fn write(
    file: &File,
    out: &Path,
    sync: u64,
    progress: &mut dyn FnMut(&str, u64),
    read_back: &dyn Fn(&Path) -> Result<(), WeightsError>,
) -> Result<u64, ConvertError> {
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(ConvertError::Exists(out.to_path_buf()));
    }
    let (part_path, log_path) = (beside(out, ".part"), beside(out, ".part.done"));
    let failed = |file: &Path| {
        let (file, part) = (file.to_path_buf(), part_path.clone());
        move |source: io::Error| ConvertError::Write { file, part, source }
    };
    let mut log = open(&log_path).map_err(failed(&log_path))?;
    if log.try_lock().is_err() {
        return Err(ConvertError::Busy(out.to_path_buf()));
    }
    let part = open(&part_path).map_err(failed(&part_path))?;
    let pieces = file.pieces;
    let zeros = vec!["0".repeat(HASH_CHARS); pieces.len()];
    let header = file.header(&zeros);
    let length = (LENGTH_BYTES + header.len()) as u64 + file.bytes();
    let source = fingerprint(file.conversion, &header);
    let mut hashes = finished(&mut log, &source, pieces.len()).map_err(failed(&log_path))?;
    if hashes.is_empty() || part.metadata().map_err(failed(&part_path))?.len() != length {
        hashes.clear();
        start(&mut log, &source, &part, length).map_err(failed(&part_path))?;
    }
    let resumed: u64 = hashes.keys().map(|&i| pieces[i].bytes).sum();
    let mut at = (LENGTH_BYTES + header.len()) as u64;
    let placed: Vec<(usize, u64)> = pieces.iter().enumerate().map(|(i, piece)| (i, advance(&mut at, piece))).collect();
    let mut done = resumed;
    progress("writing", done);
    let left: Vec<(usize, u64)> = placed.into_iter().filter(|(i, _)| !hashes.contains_key(i)).collect();
    for batch in batches(&left, pieces, sync) {
        let weights: Vec<&[(usize, u64)]> = batch.chunk_by(|a, b| pieces[b.0].belongs_to(&pieces[a.0])).collect();
        let of_weight = |places: &&[(usize, u64)]| -> Result<Vec<(usize, String)>, ConvertError> {
            let some: Vec<&Piece> = places.iter().map(|&(i, _)| &pieces[i]).collect();
            let content = file.conversion.content(&some)?;
            let each = places.iter().zip(content).map(|(&(i, at), bytes)| {
                part.write_all_at(&bytes, at).map_err(failed(&part_path))?;
                Ok((i, blake3::hash(&bytes).to_hex().to_string()))
            });
            each.collect()
        };
        let fresh: Result<Vec<Vec<(usize, String)>>, ConvertError> = weights.par_iter().map(of_weight).collect();
        let fresh = fresh?.concat();
        part.sync_data().map_err(failed(&part_path))?;
        let lines: String = fresh.iter().map(|(i, hash)| format!("{i} {hash}\n")).collect();
        log.write_all(lines.as_bytes()).and_then(|()| log.sync_data()).map_err(failed(&log_path))?;
        done += batch.iter().map(|&(i, _)| pieces[i].bytes).sum::<u64>();
        hashes.extend(fresh);
        progress("writing", done);
    }
    let sums: Vec<String> = (0..pieces.len()).map(|i| hashes.get(&i).cloned().unwrap_or_default()).collect();
    let header = file.header(&sums);
    let size = (header.len() as u64).to_le_bytes();
    part.write_all_at(&[&size[..], &header].concat(), 0).map_err(failed(&part_path))?;
    part.sync_all().map_err(failed(&part_path))?;
    progress("reading back", 0);
    if let Err(error) = read_back(&part_path) {
        // The next run begins anew; if this fails, so does that run's look at the log.
        let _ = std::fs::remove_file(&log_path);
        return Err(error.into());
    }
    progress("reading back", file.bytes());
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(ConvertError::Exists(out.to_path_buf()));
    }
    std::fs::rename(&part_path, out).map_err(failed(out))?;
    std::fs::remove_file(&log_path).map_err(failed(&log_path))?;
    Ok(resumed)
}

/// Where a piece begins; `at` moves behind it.
fn advance(at: &mut u64, piece: &Piece) -> u64 {
    let start = *at;
    *at += piece.bytes;
    start
}

pub(super) fn open(path: &Path) -> io::Result<fs::File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Everything that must be the same for an earlier run's work to count: what is written, and the files it comes from.
pub(super) fn fingerprint(conversion: &Conversion, header: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(header);
    for file in conversion.bundle.store.files() {
        let about = std::fs::metadata(file.path()).ok();
        let changed = about.as_ref().and_then(|about| about.modified().ok());
        hasher.update(format!("{:?} {} {changed:?}", file.path(), file.bytes()).as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The pieces that a log names with their hashes, if it is of this source; the log is left at its end.
fn finished(log: &mut fs::File, source: &str, pieces: usize) -> io::Result<HashMap<usize, String>> {
    let mut text = String::new();
    log.read_to_string(&mut text)?;
    // A line that was cut off by a kill does not count.
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    log.set_len(whole.len() as u64)?;
    log.seek(SeekFrom::End(0))?;
    let mut lines = whole.lines();
    if lines.next() != Some(source) {
        return Ok(HashMap::new());
    }
    let entry = |line: &str| {
        let (i, hash) = line.split_once(' ')?;
        let i: usize = i.parse().ok()?;
        (i < pieces && hash.len() == HASH_CHARS).then(|| (i, hash.to_string()))
    };
    Ok(lines.filter_map(entry).collect())
}

/// Forgets what was there.
fn start(log: &mut fs::File, source: &str, part: &fs::File, length: u64) -> io::Result<()> {
    log.set_len(0)?;
    log.seek(SeekFrom::Start(0))?;
    part.set_len(0)?;
    part.set_len(length)?;
    log.write_all(format!("{source}\n").as_bytes())?;
    log.sync_data()
}

/// Runs of pieces of about `sync` bytes.
fn batches<'a>(left: &'a [(usize, u64)], pieces: &[Piece], sync: u64) -> Vec<&'a [(usize, u64)]> {
    let (mut batches, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (k, &(i, _)) in left.iter().enumerate() {
        bytes += pieces[i].bytes;
        if bytes >= sync || k + 1 == left.len() {
            batches.push(&left[from..=k]);
            (from, bytes) = (k + 1, 0);
        }
    }
    batches
}
