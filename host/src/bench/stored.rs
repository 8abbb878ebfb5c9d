//! Weights of random values as they are stored, and their values in f64.

use cuda_std::bf16;

use crate::linear::{HostData, HostWeight, ScaleType};
use crate::selfcheck::Random;

/// How weights are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Numbers {
    /// Codes of 4 bits, bf16 scales for 32 of them: K2.6's experts.
    #[default]
    W4a16,
    /// Codes of 4 bits, f32 scales for 32 of them.
    W4a16F32,
    Bf16,
    F32,
}

/// K2.6's group.
const GROUP: usize = 32;

/// A stored matrix `[n, k]` of random values.
pub struct Stored {
    pub n: usize,
    pub k: usize,
    numbers: Numbers,
    values: Vec<u8>,
    scales: Vec<u8>,
}

impl Stored {
    pub fn random(numbers: Numbers, random: &mut Random, n: usize, k: usize) -> Self {
        let values: Vec<u8> = match numbers {
            Numbers::W4a16 | Numbers::W4a16F32 => {
                let words = (0..(n * k / 2).div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
                words.take(n * k / 2).collect()
            }
            Numbers::Bf16 => (0..n * k).flat_map(|_| bf16::from_f32(random.unit() * 0.05).to_le_bytes()).collect(),
            Numbers::F32 => (0..n * k).flat_map(|_| (random.unit() * 0.05).to_le_bytes()).collect(),
        };
        let mut scale = || 0.01 + random.unit() * 0.009;
        let groups = 0..n * k / GROUP;
        let scales = match numbers {
            Numbers::W4a16 => groups.flat_map(|_| bf16::from_f32(scale()).to_le_bytes()).collect(),
            Numbers::W4a16F32 => groups.flat_map(|_| scale().to_le_bytes()).collect(),
            Numbers::Bf16 | Numbers::F32 => Vec::new(),
        };
        Self { n, k, numbers, values, scales }
    }

    pub fn weight(&self) -> HostWeight<'_> {
        let four_bits = |scale_type| HostData::W4a16 {
            packed: (&self.values).into(),
            scales: (&self.scales).into(),
            scale_type,
            group: GROUP,
        };
        let data = match self.numbers {
            Numbers::W4a16 => four_bits(ScaleType::Bf16),
            Numbers::W4a16F32 => four_bits(ScaleType::F32),
            Numbers::Bf16 => HostData::Bf16((&self.values).into()),
            Numbers::F32 => HostData::F32((&self.values).into()),
        };
        HostWeight { name: "bench", n: self.n, k: self.k, batch: 1, data }
    }

    /// Bytes that a product must read.
    pub fn bytes(&self) -> usize {
        self.values.len() + self.scales.len()
    }

    fn value(&self, row: usize, column: usize) -> f64 {
        let half = |bytes: &[u8], i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64();
        let float = |bytes: &[u8], i: usize| {
            f64::from(f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]))
        };
        let at = row * self.k + column;
        let code = || f64::from(self.values[at / 2] >> (4 * (at % 2)) & 15) - 8.0;
        match self.numbers {
            Numbers::W4a16 => code() * half(&self.scales, at / GROUP),
            Numbers::W4a16F32 => code() * float(&self.scales, at / GROUP),
            Numbers::Bf16 => half(&self.values, at),
            Numbers::F32 => float(&self.values, at),
        }
    }

    /// The product of a row with `x`.
    pub fn dot(&self, row: usize, x: impl Fn(usize) -> f64) -> f64 {
        (0..self.k).map(|k| x(k) * self.value(row, k)).sum()
    }
}
