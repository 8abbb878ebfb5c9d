//! The formats of the latent cache.

use cuda_std::{GlobalMut, bf16};
use gpu::args::attention::{F8_ROW, KEY};

use super::contract;
use crate::device::Result;

/// What a cached token's latent is kept as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    #[default]
    Bf16,
    // e4m3 with a scale for each 128 values; the rotated key stays bf16. (No doc: it would be help text.)
    F8,
}

impl KvFormat {
    pub const ALL: [Self; 2] = [Self::Bf16, Self::F8];

    /// Bytes of a token in one layer.
    pub const fn row_bytes(self) -> usize {
        match self {
            Self::Bf16 => KEY * size_of::<bf16>(),
            Self::F8 => F8_ROW,
        }
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F8 => "f8",
        })
    }
}

/// The rows of one layer.
#[derive(Clone, Copy)]
pub struct Cache {
    pub format: KvFormat,
    /// `[slots, row_bytes]`.
    pub bytes: GlobalMut<u8>,
}

impl Cache {
    /// `[slots, KEY]`.
    pub fn bf16(rows: GlobalMut<bf16>) -> Self {
        Self { format: KvFormat::Bf16, bytes: GlobalMut::from_raw(rows.addr(), rows.len() * size_of::<bf16>()) }
    }

    /// `[slots, F8_ROW]`.
    pub fn f8(bytes: GlobalMut<u8>) -> Self {
        Self { format: KvFormat::F8, bytes }
    }

    pub fn slots(self) -> usize {
        self.bytes.len() / self.format.row_bytes()
    }

    /// Whole rows, `rows` at least.
    pub(super) fn check(self, kernel: &'static str, rows: usize) -> Result<()> {
        let (each, bytes) = (self.format.row_bytes(), self.bytes.len());
        contract(kernel, bytes.is_multiple_of(each) && bytes >= rows * each, || {
            format!("the cache holds {bytes} bytes, expected {} rows of {each}, {rows} at least", self.format)
        })
    }
}
