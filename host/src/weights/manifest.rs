//! The manifest: which weights a bundle holds and in which format each is stored. What is declared must be stored, and
//! nothing else may be. Nothing falls back to another format.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;
use serde_json::Value;

use super::container::Raw;
use super::error::rule;
use super::store::Store;
use super::{Mismatch, json};
use super::{census, tensor};
use crate::linear::{Format, GROUPS, HostData, HostWeight, ScaleType};

const KEY: &str = "manifest";

/// One line of the manifest.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Declared {
    pub shape: Vec<usize>,
    #[serde(flatten)]
    pub format: Format,
    #[serde(skip)]
    pub(super) packing: Packing,
}

/// How the tensors of a W4A16 weight are called and typed. Their bytes are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// `.qw` u8 `[N, K / 2]`, `.sc` `[N, K / group]`.
    Bundle,
    /// compressed-tensors, `pack-quantized`: `_packed` i32 `[N, K / 8]`, `_scale` `[N, K / group]`, `_shape` `[N, K]`.
    CompressedTensors,
}

impl Packing {
    /// What follows the weight's name in the names of codes and scales, then of what else belongs to it.
    pub fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Bundle => &[".qw", ".sc"],
            Self::CompressedTensors => &["_packed", "_scale", "_shape"],
        }
    }

    /// Type of the codes and how many share an element.
    fn codes(self) -> (Dtype, usize) {
        match self {
            Self::Bundle => (Dtype::U8, 2),
            Self::CompressedTensors => (Dtype::I32, 8),
        }
    }
}

/// Parses the metadata entry `manifest`.
pub(super) fn parse(text: &str) -> Result<BTreeMap<String, Declared>, Mismatch> {
    let lines: BTreeMap<String, Value> = json::parse(KEY, text)?;
    lines.into_iter().map(|(name, line)| Ok((name.clone(), declared(&name, line)?))).collect()
}

fn declared(name: &str, line: Value) -> Result<Declared, Mismatch> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Line {
        shape: Vec<usize>,
        format: String,
        group: Option<usize>,
    }
    let shown = line.to_string();
    let line: Line = serde_json::from_value(line)
        .map_err(|e| Mismatch::tensor(name, format_args!("shape, format and group in the manifest ({e})"), &shown))?;
    let format = match (line.format.as_str(), line.group) {
        ("f32", None) => Format::F32,
        ("bf16", None) => Format::Bf16,
        ("w4a16", Some(group)) if GROUPS.contains(&group) => Format::W4a16 { group },
        _ => {
            let expected = format!("format f32, bf16, or w4a16 with group {GROUPS:?}");
            return Err(Mismatch::tensor(name, expected, shown));
        }
    };
    if let Format::W4a16 { group } = format {
        rule(line.shape.len() == 2 && line.shape[1].is_multiple_of(group), || {
            Mismatch::tensor(
                name,
                format_args!("a matrix with rows in whole groups of {group}"),
                format_args!("{:?}", line.shape),
            )
        })?;
    }
    Ok(Declared { shape: line.shape, format, packing: Packing::Bundle })
}

/// The tensors that hold a weight: one, or codes, scales and what else belongs to them.
pub(super) fn stored_names(name: &str, line: &Declared) -> Vec<String> {
    match line.format {
        Format::F32 | Format::Bf16 => vec![name.to_string()],
        Format::W4a16 { .. } => line.packing.suffixes().iter().map(|suffix| format!("{name}{suffix}")).collect(),
    }
}

/// Checks that weight `name` is stored as declared, and in no other way.
pub(super) fn check(file: &Store, name: &str, line: &Declared) -> Result<(), Mismatch> {
    let wanted = stored_names(name, line);
    let mut all = vec![name.to_string()];
    all.extend(line.packing.suffixes().iter().map(|suffix| format!("{name}{suffix}")));
    let found: Vec<&str> = all.iter().filter(|n| file.get(n).is_some()).map(String::as_str).collect();
    rule(found == wanted, || {
        let expected = format!("{} as declared: stored as `{}`", line.format, wanted.join("` and `"));
        let found =
            if found.is_empty() { "nothing stored".into() } else { format!("`{}` stored", found.join("` and `")) };
        Mismatch::tensor(name, expected, found)
    })?;
    let Declared { shape, format, packing } = line;
    match *format {
        Format::F32 => tensor::typed(name, raw(file, name)?, &[Dtype::F32], shape),
        Format::Bf16 => tensor::typed(name, raw(file, name)?, &[Dtype::BF16], shape),
        Format::W4a16 { group } => {
            let [packed, scales] = [&wanted[0], &wanted[1]];
            let (dtype, codes) = packing.codes();
            tensor::typed(packed, raw(file, packed)?, &[dtype], &[shape[0], shape[1] / codes])?;
            let stored = raw(file, scales)?;
            tensor::typed(scales, stored, &[Dtype::BF16, Dtype::F32], &[shape[0], shape[1] / group])?;
            wanted
                .get(2)
                .map_or(Ok(()), |size| tensor::typed(size, raw(file, size)?, &[Dtype::I32, Dtype::I64], &[shape.len()]))
        }
    }
}

/// Checks what comes with the codes of a W4A16 weight: its scales are finite, its stored shape is the declared one.
pub(super) fn check_scales(file: &Store, name: &str, line: &Declared) -> Result<(), Mismatch> {
    if let Some(scales) = stored_names(name, line).get(1) {
        census::magnitudes(scales, raw(file, scales)?)?;
    }
    check_shape(file, name, line)
}

/// The second half of that.
pub(super) fn check_shape(file: &Store, name: &str, line: &Declared) -> Result<(), Mismatch> {
    let Some(size) = stored_names(name, line).into_iter().nth(2) else { return Ok(()) };
    let found = tensor::integers(raw(file, &size)?);
    let same = found.iter().copied().eq(line.shape.iter().map(|&n| n as i64));
    let expected = format_args!("{:?}, as the codes have it", line.shape);
    rule(same, || Mismatch::tensor(&size, expected, format_args!("{found:?}")))
}

/// The weight as stored; a vector is a matrix of one column.
pub(super) fn stored<'a>(file: &'a Store, name: &'a str, line: &Declared) -> Result<HostWeight<'a>, Mismatch> {
    let n = line.shape.first().copied().unwrap_or(1);
    let k = line.shape.iter().skip(1).product();
    let data = match line.format {
        Format::F32 => HostData::F32(raw(file, name)?.bytes.into()),
        Format::Bf16 => HostData::Bf16(raw(file, name)?.bytes.into()),
        Format::W4a16 { group } => {
            let names = stored_names(name, line);
            let scales = raw(file, &names[1])?;
            let scale_type = if scales.dtype == Dtype::F32 { ScaleType::F32 } else { ScaleType::Bf16 };
            let packed = raw(file, &names[0])?.bytes.into();
            HostData::W4a16 { packed, scales: scales.bytes.into(), scale_type, group }
        }
    };
    Ok(HostWeight { name, n, k, batch: 1, data })
}

pub(super) fn raw<'a>(file: &'a Store, name: &str) -> Result<Raw<'a>, Mismatch> {
    file.get(name).ok_or_else(|| Mismatch::tensor(name, "a stored tensor", "none"))
}
