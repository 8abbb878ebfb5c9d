//! What the content of a model is: by role and format how many weights, and how large their values or scales are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use safetensors::tensor::Dtype;
use serde::Serialize;

use super::container::Raw;
use super::manifest::{self, Declared};
use super::store::Store;
use super::{Mismatch, json, layout};
use crate::linear::Format;

/// What a weight is to the model, in the order of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Embedding,
    Attention,
    DenseFfn,
    Router,
    RoutedExperts,
    SharedExperts,
    Norms,
    Head,
    Drafter,
}

impl Role {
    pub const ALL: [Self; 9] = [
        Self::Embedding,
        Self::Attention,
        Self::DenseFfn,
        Self::Router,
        Self::RoutedExperts,
        Self::SharedExperts,
        Self::Norms,
        Self::Head,
        Self::Drafter,
    ];

    /// Of a weight by its name.
    pub fn of(name: &str) -> Self {
        let has = |part: &str| name.contains(part);
        match name {
            _ if name.starts_with(layout::DRAFTER) => Self::Drafter,
            "model.embed_tokens.weight" => Self::Embedding,
            "lm_head.weight" => Self::Head,
            _ if has("norm.weight") => Self::Norms,
            _ if has(".self_attn.") => Self::Attention,
            _ if has(".mlp.gate.") => Self::Router,
            _ if has(".mlp.experts.") => Self::RoutedExperts,
            _ if has(".mlp.shared_experts.") => Self::SharedExperts,
            _ => Self::DenseFfn,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::DenseFfn => "dense ffn",
            Self::Router => "router",
            Self::RoutedExperts => "routed experts",
            Self::SharedExperts => "shared experts",
            Self::Norms => "norms",
            Self::Head => "head",
            Self::Drafter => "drafter",
        }
    }
}

/// Magnitudes of values, or of scales.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Census {
    pub weights: usize,
    pub bytes: usize,
    /// Zeros among them.
    pub zeros: usize,
    /// Smallest but zero.
    #[serde(serialize_with = "json::short")]
    pub smallest: f32,
    #[serde(serialize_with = "json::short")]
    pub largest: f32,
}

pub type Table = BTreeMap<(Role, Format), Census>;

const NONE: Census = Census { weights: 0, bytes: 0, zeros: 0, smallest: f32::INFINITY, largest: 0.0 };

impl Census {
    fn and(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            bytes: self.bytes + other.bytes,
            zeros: self.zeros + other.zeros,
            smallest: self.smallest.min(other.smallest),
            largest: self.largest.max(other.largest),
        }
    }
}

/// Reads all values and scales of a model. One that is NaN or infinite is an error, and so is a stored shape that is
/// not the declared one. `done` grows by the bytes of each weight.
pub(super) fn take(store: &Store, manifest: &BTreeMap<String, Declared>, done: &AtomicU64) -> Result<Table, Mismatch> {
    let of_weight = |(name, line): (&String, &Declared)| {
        manifest::check_shape(store, name, line)?;
        let stored = manifest::stored_names(name, line);
        let counted = stored.get(1).unwrap_or(&stored[0]);
        let census = magnitudes(counted, manifest::raw(store, counted)?)?;
        let bytes = manifest::stored(store, name, line)?.bytes();
        done.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Table::from([((Role::of(name), line.format), Census { weights: 1, bytes, ..census })]))
    };
    manifest.par_iter().map(of_weight).try_reduce(Table::new, |mut a, b| {
        for (key, census) in b {
            let sum = a.get(&key).map_or(census, |&own| own.and(census));
            a.insert(key, sum);
        }
        Ok(a)
    })
}

/// The magnitudes of a tensor of f32 or bf16, all of which must be finite.
pub(super) fn magnitudes(name: &str, raw: Raw) -> Result<Census, Mismatch> {
    // Bits without the sign order as magnitudes do; from infinity on nothing is finite.
    let (census, bad) = match raw.dtype {
        Dtype::F32 => bits(raw.bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b))),
        _ => bits(raw.bytes.as_chunks::<2>().0.iter().map(|&b| u32::from(u16::from_le_bytes(b)) << 16)),
    };
    if !bad {
        return Ok(census);
    }
    super::tensor::finite(name, raw).map(|()| census)
}

fn bits(values: impl Iterator<Item = u32>) -> (Census, bool) {
    const INFINITY: u32 = 0x7f80_0000;
    let (mut zeros, mut least, mut most) = (0usize, INFINITY, 0u32);
    for value in values {
        let value = value & 0x7fff_ffff;
        zeros += usize::from(value == 0);
        most = most.max(value);
        least = least.min(if value == 0 { INFINITY } else { value });
    }
    let census = Census { zeros, smallest: f32::from_bits(least), largest: f32::from_bits(most), ..NONE };
    (census, most >= INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_of_values() {
        let values = [0.0f32, -3.0, 0.5, -0.0, 2.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        let raw = Raw { dtype: Dtype::BF16, shape: &[5], bytes: &bytes };
        let census = magnitudes("x", raw).unwrap();
        assert_eq!((census.zeros, census.smallest, census.largest), (2, 0.5, 3.0));
        let bytes: Vec<u8> = [1.0f32, f32::NAN].iter().flat_map(|v| v.to_le_bytes()).collect();
        let raw = Raw { dtype: Dtype::F32, shape: &[1, 2], bytes: &bytes };
        assert!(magnitudes("x", raw).unwrap_err().to_string().contains("column 1"));
    }

    #[test]
    fn roles_of_names() {
        for (name, role) in [
            ("model.layers.1.mlp.experts.0.up_proj.weight", Role::RoutedExperts),
            ("model.layers.1.mlp.gate.e_score_correction_bias", Role::Router),
            ("model.layers.0.mlp.gate_proj.weight", Role::DenseFfn),
            ("model.layers.1.self_attn.q_a_layernorm.weight", Role::Norms),
            ("drafter.layers.0.mlp.gate_proj.weight", Role::Drafter),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
