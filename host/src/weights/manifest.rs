//! The manifest: which weights a bundle holds and in which format each is stored. What is declared must be stored, and
//! nothing else may be. Nothing falls back to another format.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;
use serde_json::Value;

use super::container::{Container, Raw};
use super::error::rule;
use super::tensor;
use super::{Mismatch, json};
use crate::linear::{Format, GROUPS, HostData, HostWeight, ScaleType};

const KEY: &str = "manifest";
pub(super) const PACKED: &str = ".qw";
pub(super) const SCALES: &str = ".sc";

/// One line of the manifest.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Declared {
    pub shape: Vec<usize>,
    #[serde(flatten)]
    pub format: Format,
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
    Ok(Declared { shape: line.shape, format })
}

/// The tensors that hold a weight.
pub(super) fn stored_names(name: &str, format: Format) -> Vec<String> {
    match format {
        Format::F32 | Format::Bf16 => vec![name.to_string()],
        Format::W4a16 { .. } => vec![format!("{name}{PACKED}"), format!("{name}{SCALES}")],
    }
}

/// Checks that weight `name` is stored as declared, and in no other way.
pub(super) fn check(file: &Container, name: &str, line: &Declared) -> Result<(), Mismatch> {
    let wanted = stored_names(name, line.format);
    let all = [name.to_string(), format!("{name}{PACKED}"), format!("{name}{SCALES}")];
    let found: Vec<&str> = all.iter().filter(|n| file.get(n).is_some()).map(String::as_str).collect();
    rule(found == wanted, || {
        let expected = format!("{} as declared: stored as `{}`", line.format, wanted.join("` and `"));
        let found =
            if found.is_empty() { "nothing stored".into() } else { format!("`{}` stored", found.join("` and `")) };
        Mismatch::tensor(name, expected, found)
    })?;
    let Declared { shape, format } = line;
    match *format {
        Format::F32 => tensor::typed(name, raw(file, name)?, &[Dtype::F32], shape),
        Format::Bf16 => tensor::typed(name, raw(file, name)?, &[Dtype::BF16], shape),
        Format::W4a16 { group } => {
            let [packed, scales] = [&wanted[0], &wanted[1]];
            tensor::typed(packed, raw(file, packed)?, &[Dtype::U8], &[shape[0], shape[1] / 2])?;
            let stored = raw(file, scales)?;
            tensor::typed(scales, stored, &[Dtype::BF16, Dtype::F32], &[shape[0], shape[1] / group])?;
            tensor::finite(scales, stored)
        }
    }
}

/// The weight as stored; a vector is a matrix of one column.
pub(super) fn stored<'a>(file: &'a Container, name: &'a str, line: &Declared) -> Result<HostWeight<'a>, Mismatch> {
    let n = line.shape.first().copied().unwrap_or(1);
    let k = line.shape.iter().skip(1).product();
    let data = match line.format {
        Format::F32 => HostData::F32(raw(file, name)?.bytes.into()),
        Format::Bf16 => HostData::Bf16(raw(file, name)?.bytes.into()),
        Format::W4a16 { group } => {
            let scales = raw(file, &format!("{name}{SCALES}"))?;
            let scale_type = if scales.dtype == Dtype::F32 { ScaleType::F32 } else { ScaleType::Bf16 };
            let packed = raw(file, &format!("{name}{PACKED}"))?.bytes.into();
            HostData::W4a16 { packed, scales: scales.bytes.into(), scale_type, group }
        }
    };
    Ok(HostWeight { name, n, k, batch: 1, data })
}

pub(super) fn raw<'a>(file: &'a Container, name: &str) -> Result<Raw<'a>, Mismatch> {
    file.get(name).ok_or_else(|| Mismatch::tensor(name, "a stored tensor", "none"))
}
