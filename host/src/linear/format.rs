//! What weights look like on the host: bytes as a file holds them, unaligned, little endian.

use std::borrow::Cow;
use std::fmt;

use cuda_std::bf16;
use gpu::kernels::stream::STEP_K;

use crate::device::{DeviceError, Result};
use crate::kernels::contract;

/// Who reports a weight that no kernel can multiply.
const WEIGHT: &str = "weight";
/// The kernels for bf16 read 16 bytes of a row at a time, two lanes together.
const BF16_K: usize = 16;
/// Consecutive k that may share a scale: what the W4A16 kernels have.
pub const GROUPS: [usize; 3] = [32, 64, 128];

/// How a weight's values are stored and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(tag = "format", rename_all = "lowercase")]
pub enum Format {
    F32,
    Bf16,
    /// 4-bit codes with one scale for `group` consecutive k.
    W4a16 {
        group: usize,
    },
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::W4a16 { .. } => "w4a16",
        })
    }
}

/// How the scales of 4-bit codes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    Bf16,
    F32,
}

impl ScaleType {
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => size_of::<bf16>(),
            Self::F32 => size_of::<f32>(),
        }
    }
}

/// `batch` matrices `[n, k]`, one after the other.
pub struct HostWeight<'a> {
    pub name: &'a str,
    pub n: usize,
    pub k: usize,
    pub batch: usize,
    pub data: HostData<'a>,
}

/// The bytes of `rows = batch * n` rows of k values.
pub enum HostData<'a> {
    /// `[rows, k]`.
    F32(Cow<'a, [u8]>),
    /// `[rows, k]`.
    Bf16(Cow<'a, [u8]>),
    W4a16 {
        /// `[rows, k / 2]`, low nibble = even k, stored as q + 8.
        packed: Cow<'a, [u8]>,
        /// `[rows, k / group]`.
        scales: Cow<'a, [u8]>,
        scale_type: ScaleType,
        group: usize,
    },
}

impl HostWeight<'_> {
    pub fn format(&self) -> Format {
        match self.data {
            HostData::F32(_) => Format::F32,
            HostData::Bf16(_) => Format::Bf16,
            HostData::W4a16 { group, .. } => Format::W4a16 { group },
        }
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> usize {
        match &self.data {
            HostData::F32(bytes) | HostData::Bf16(bytes) => bytes.len(),
            HostData::W4a16 { packed, scales, .. } => packed.len() + scales.len(),
        }
    }

    /// That some kernel can multiply it, and that the bytes are those of its shape.
    pub fn check(&self) -> Result<()> {
        let Self { name, n, k, batch, .. } = *self;
        let holds =
            |holds: bool, what: &dyn Fn() -> String| contract(WEIGHT, holds, || format!("`{name}`: {}", what()));
        holds(n > 0 && k > 0 && batch > 0, &|| format!("{batch} matrices of {n} x {k}"))?;
        holds([n, k, batch].iter().all(|&size| size <= i32::MAX as usize), &|| {
            format!("{batch} matrices of {n} x {k}: a size above {}", i32::MAX)
        })?;
        let bytes = |what: &str, found: usize, of_row: usize| {
            let expected = (batch * n).checked_mul(of_row).ok_or(DeviceError::OutOfMemory { bytes: usize::MAX })?;
            holds(found == expected, &|| {
                format!("{what} of {batch} x {n} x {k} in {}: expected {expected} bytes, found {found}", self.format())
            })
        };
        match &self.data {
            HostData::F32(data) => bytes("values", data.len(), k * size_of::<f32>()),
            HostData::Bf16(data) => {
                holds(k.is_multiple_of(BF16_K), &|| format!("k = {k}: the bf16 kernels want a multiple of {BF16_K}"))?;
                bytes("values", data.len(), k * size_of::<bf16>())
            }
            HostData::W4a16 { packed, scales, scale_type, group } => {
                holds(GROUPS.contains(group), &|| {
                    format!("groups of {group}: the w4a16 kernels have groups of {GROUPS:?}")
                })?;
                holds(k.is_multiple_of(*group), &|| format!("k = {k} is not a multiple of its group, {group}"))?;
                bytes("codes", packed.len(), k / 2)?;
                bytes("scales", scales.len(), k / group * scale_type.bytes())
            }
        }
    }
}

const _: () = assert!(GROUPS[0] == STEP_K, "the kernels scale sums of the smallest group");
