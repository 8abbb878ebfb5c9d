//! A safetensors file, memory-mapped: a bundle, or a shard of a checkpoint.
//!
//! The crate's reader decides whether a header is valid. It does not always say which tensor is wrong, so after a
//! refusal `diagnose` walks the header once more for the words of the error.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors, TensorInfo};
use serde_json::Value;

use super::error::rule;
use super::{Mismatch, WeightsError, json};

/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;

pub(super) struct Container {
    path: PathBuf,
    file: File,
    map: Mmap,
    /// Where the data of tensors starts in the file.
    data: usize,
    tensors: BTreeMap<String, TensorInfo>,
    pub metadata: HashMap<String, String>,
}

/// A stored tensor. `bytes` has no particular alignment.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a> {
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

impl Container {
    /// Maps a file; `what` says what it should be.
    pub fn open(path: &Path, what: &str) -> Result<Self, WeightsError> {
        let io = |source| WeightsError::Io { file: path.to_path_buf(), source };
        // Asked before it is opened: opening a pipe waits for a writer.
        let is_file = std::fs::metadata(path).map_err(io)?.is_file();
        rule(is_file, || Mismatch::new("path", what, "something that is not a file")).map_err(|m| m.in_file(path))?;
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is private and read-only. Nothing in this process writes the file; one that another
        // process cuts short while it is open is outside what a mapped file can promise, as the manual says.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let (data, tensors, metadata) = parse(&map).map_err(|m| m.in_file(path))?;
        Ok(Self { path: path.to_path_buf(), file, map, data, tensors, metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a tensor's bytes are in the file.
    pub fn span(&self, name: &str) -> Option<std::ops::Range<u64>> {
        let (from, to) = self.tensors.get(name)?.data_offsets;
        Some((self.data + from) as u64..(self.data + to) as u64)
    }

    /// For reading a part of it without the mapping.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The whole file.
    pub fn content(&self) -> &[u8] {
        &self.map
    }

    /// Size of the file.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, name: &str) -> Option<Raw<'_>> {
        let info = self.tensors.get(name)?;
        let (from, to) = info.data_offsets;
        Some(Raw { dtype: info.dtype, shape: &info.shape, bytes: &self.map[self.data + from..self.data + to] })
    }
}

type Parsed = (usize, BTreeMap<String, TensorInfo>, HashMap<String, String>);

fn parse(file: &[u8]) -> Result<Parsed, Mismatch> {
    let header = header(file)?;
    json::unique_keys(header).map_err(|e| Mismatch::new("header", "JSON with every key once", e))?;
    let data = LENGTH_BYTES + header.len();
    match SafeTensors::read_metadata(file) {
        Ok((_, read)) => {
            let tensors = read.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
            Ok((data, tensors, read.metadata().clone().unwrap_or_default()))
        }
        Err(refusal) => {
            diagnose(header, file.len() - data)?;
            Err(Mismatch::new("header", "a safetensors header", refusal))
        }
    }
}

fn header(file: &[u8]) -> Result<&str, Mismatch> {
    let room = file.len().saturating_sub(LENGTH_BYTES);
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| {
        Mismatch::new(
            "header",
            format_args!("its length in {LENGTH_BYTES} bytes"),
            format_args!("{} bytes", file.len()),
        )
    })?;
    let length = u64::from_le_bytes(*length);
    let bytes = usize::try_from(length).ok().and_then(|n| rest.get(..n)).ok_or_else(|| {
        Mismatch::new("header", format_args!("at most the {room} bytes that follow"), format_args!("{length} bytes"))
    })?;
    std::str::from_utf8(bytes).map_err(|e| Mismatch::new("header", "UTF-8 text", e))
}

/// The first tensor that breaks a rule of the format.
fn diagnose(header: &str, data: usize) -> Result<(), Mismatch> {
    let parsed: BTreeMap<String, Value> =
        serde_json::from_str(header).map_err(|e| Mismatch::new("header", "a JSON object", e))?;
    let mut spans = Vec::new();
    for (name, info) in parsed.iter().filter(|(name, _)| *name != "__metadata__") {
        let dtype: Dtype = field(name, info, "dtype", "a known type of elements")?;
        let shape: Vec<usize> = field(name, info, "shape", "a list of sizes")?;
        let (from, to): (usize, usize) = field(name, info, "data_offsets", "two offsets")?;
        let bits = shape.iter().try_fold(dtype.bitsize(), |product, &n| product.checked_mul(n));
        let bytes = bits.map(|b| b / 8);
        rule(from <= to && bytes == Some(to - from), || {
            let expected = bytes.map_or("a size below 2^64".to_string(), |b| format!("{b} bytes"));
            Mismatch::tensor(
                name,
                format_args!("{expected} for {shape:?} {dtype:?}"),
                format_args!("bytes {from}..{to}"),
            )
        })?;
        spans.push((from, to, name));
    }
    spans.sort();
    let mut end = 0;
    for (from, to, name) in spans {
        rule(from == end, || {
            Mismatch::tensor(name, format_args!("bytes from {end} on"), format_args!("{from}..{to}"))
        })?;
        rule(to <= data, || {
            Mismatch::tensor(name, format_args!("bytes {from}..{to}"), format_args!("a file with {data} bytes of data"))
        })?;
        end = to;
    }
    rule(end == data, || Mismatch::new("end of file", format_args!("{end} bytes of data"), format_args!("{data}")))
}

fn field<T: serde::de::DeserializeOwned>(name: &str, info: &Value, key: &str, expected: &str) -> Result<T, Mismatch> {
    let value = info.get(key).unwrap_or(&Value::Null);
    serde_json::from_value(value.clone())
        .map_err(|_| Mismatch::tensor(name, format_args!("{expected} as `{key}`"), value))
}
