//! What the product cases share: weights of every format with their values, activations, and the bounds.

use std::borrow::Cow;

use cuda_std::{Element, Global, bf16};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::Acts;
use kdtree::linear::{Format, HostData, HostWeight, ScaleType};
use kdtree::reference::{bounds, linear as twin};

use super::support::{Outcome, Random, check};

/// A format with the type of its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    Bf16,
    /// bf16 scales, group 32.
    W4,
    /// f32 scales, group 32.
    W4Wide,
    /// bf16 scales, group 64.
    W4Middle,
    /// bf16 scales, group 128.
    W4Coarse,
}

impl Kind {
    /// Groups of 64 differ from those of 128 in the repacking alone: they have cases of their own.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::W4, Self::W4Wide, Self::W4Coarse];
    /// One of each kernel family.
    pub const MAIN: [Self; 3] = [Self::F32, Self::Bf16, Self::W4];

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::W4 => "w4a16",
            Self::W4Wide => "w4a16_s32",
            Self::W4Middle => "w4a16_g64",
            Self::W4Coarse => "w4a16_g128",
        }
    }

    pub fn group(self) -> usize {
        match self {
            Self::W4Middle => 64,
            Self::W4Coarse => 128,
            _ => 32,
        }
    }

    /// Whether a kernel takes this k.
    pub fn takes(self, k: usize) -> bool {
        match self {
            Self::F32 => true,
            Self::Bf16 => k.is_multiple_of(16),
            _ => k.is_multiple_of(self.group()),
        }
    }

    pub fn format(self) -> Format {
        match self {
            Self::F32 => Format::F32,
            Self::Bf16 => Format::Bf16,
            _ => Format::W4a16 { group: self.group() },
        }
    }
}

/// Every value within [`bounds::PRODUCT`], NaN and infinities in the same places.
pub fn near(what: &str, got: &[f32], want: &Want) -> Outcome {
    check(got.len() == want.y.len(), || format!("{what}: {} values, expected {}", got.len(), want.y.len()))?;
    for (i, &g) in got.iter().enumerate() {
        let (w, size) = (want.y[i], want.size[i]);
        let same = match w.is_finite() && w.abs() <= f64::from(f32::MAX) {
            true => (f64::from(g) - w).abs() <= bounds::PRODUCT * size,
            false => g.is_nan() == w.is_nan() && !g.is_finite() && (w.is_nan() || (g > 0.0) == (w > 0.0)),
        };
        check(same, || format!("{what}: value {i} is {g:e}, expected {w:e}; its terms add up to {size:e}"))?;
    }
    Ok(())
}

/// What a product must give.
pub struct Want {
    pub y: Vec<f64>,
    /// The sum of the magnitudes of each value's terms.
    pub size: Vec<f64>,
}

impl Want {
    /// `product(x, w)` is a twin's.
    pub fn of(x: &[f32], w: &[Vec<f64>], product: impl Fn(&[f32], &[Vec<f64>]) -> Vec<f64>) -> Self {
        let sizes: Vec<Vec<f64>> = w.iter().map(|w| w.iter().map(|v| v.abs()).collect()).collect();
        let x_size: Vec<_> = x.iter().map(|v| v.abs()).collect();
        Self { y: product(x, w), size: product(&x_size, &sizes) }
    }

    pub fn dense(x: &[f32], strides: [usize; 2], stored: &Stored, rows: usize) -> Self {
        let w = std::slice::from_ref(&stored.values);
        Self::of(x, w, |x, w| twin::linear(x, strides, &w[0], stored.shape, rows))
    }
}

/// Bytes of a weight, at an odd address as in a mapped file, and their values.
pub struct Stored {
    pub kind: Kind,
    pub shape: [usize; 3],
    /// Values or codes, one byte late.
    data: Vec<u8>,
    scales: Vec<u8>,
    pub values: Vec<f64>,
}

impl Stored {
    /// Random values of about 1 / sqrt(k); scales are spread over four powers of two.
    pub fn random(kind: Kind, [batch, n, k]: [usize; 3], random: &mut Random) -> Self {
        let count = batch * n * k;
        let size = 1.0 / (k as f32).sqrt();
        match kind {
            Kind::F32 => {
                let floats: Vec<_> = (0..count).map(|_| random.unit() * size).collect();
                Self::new(kind, [batch, n, k], bytemuck::cast_slice(&floats), &[])
            }
            Kind::Bf16 => {
                let floats: Vec<_> = (0..count).map(|_| bf16::from_f32(random.unit() * size)).collect();
                Self::new(kind, [batch, n, k], bytemuck::cast_slice(&floats), &[])
            }
            _ => {
                let codes: Vec<_> = (0..count / 2).map(|_| random.next() as u8).collect();
                let scale = |r: &mut Random| (1.0 + r.unit() / 2.0) * size * 0.25 / (1 << r.below(4)) as f32;
                let scales: Vec<_> = (0..count / kind.group()).map(|_| scale(random)).collect();
                Self::with_scales(kind, [batch, n, k], &codes, &scales)
            }
        }
    }

    /// Codes and scales, the latter rounded to the kind's type.
    pub fn with_scales(kind: Kind, shape: [usize; 3], codes: &[u8], scales: &[f32]) -> Self {
        match kind {
            Kind::W4Wide => Self::new(kind, shape, codes, bytemuck::cast_slice(scales)),
            _ => {
                let rounded: Vec<_> = scales.iter().map(|&s| bf16::from_f32(s)).collect();
                Self::new(kind, shape, codes, bytemuck::cast_slice(&rounded))
            }
        }
    }

    pub fn new(kind: Kind, shape: [usize; 3], data: &[u8], scales: &[u8]) -> Self {
        let values = match kind {
            Kind::F32 => twin::f32_values(data),
            Kind::Bf16 => twin::bf16_values(data),
            Kind::W4Wide => twin::w4a16_values(data, &twin::f32_values(scales), shape[2], kind.group()),
            Kind::W4 | Kind::W4Middle | Kind::W4Coarse => {
                twin::w4a16_values(data, &twin::bf16_values(scales), shape[2], kind.group())
            }
        };
        let late = |bytes: &[u8]| [&[0xFF], bytes].concat();
        Self { kind, shape, data: late(data), scales: late(scales), values }
    }

    /// The same 4-bit codes, the bf16 scales of each row times its `size`.
    pub fn scale_rows(&mut self, size: impl Fn(usize) -> f32) {
        let of_row = self.shape[2] / self.kind.group();
        let scale = |b: &[u8]| bf16::from_le_bytes([b[0], b[1]]).to_f32();
        let scales = self.scales[1..].chunks(2).enumerate().map(|(i, b)| scale(b) * size(i / of_row));
        *self = Self::with_scales(self.kind, self.shape, &self.data[1..], &scales.collect::<Vec<_>>());
    }

    pub fn host<'a>(&'a self, name: &'a str) -> HostWeight<'a> {
        let (data, scales) = (Cow::Borrowed(&self.data[1..]), Cow::Borrowed(&self.scales[1..]));
        let scale_type = if self.kind == Kind::W4Wide { ScaleType::F32 } else { ScaleType::Bf16 };
        let data = match self.kind {
            Kind::F32 => HostData::F32(data),
            Kind::Bf16 => HostData::Bf16(data),
            _ => HostData::W4a16 { packed: data, scales, scale_type, group: self.kind.group() },
        };
        let [batch, n, k] = self.shape;
        HostWeight { name, n, k, batch, data }
    }
}

/// Activations on a device in both types.
pub struct X {
    floats: Vec<f32>,
    f32: Buffer<f32>,
    bf16: Buffer<bf16>,
}

impl X {
    pub fn upload(device: &Device, floats: Vec<f32>) -> kdtree::device::Result<Self> {
        let rounded: Vec<_> = floats.iter().map(|&v| bf16::from_f32(v)).collect();
        Ok(Self { f32: device.upload(&floats)?, bf16: device.upload(&rounded)?, floats })
    }

    pub fn random(device: &Device, count: usize, random: &mut Random) -> kdtree::device::Result<Self> {
        Self::upload(device, random.floats(count))
    }

    pub fn acts(&self) -> Acts {
        Acts { f32: self.f32.view(), bf16: self.bf16.view() }
    }

    /// What weights of this kind read.
    pub fn seen_by(&self, kind: Kind) -> Vec<f32> {
        match kind {
            Kind::F32 => self.floats.clone(),
            _ => self.floats.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
        }
    }
}

/// Elements `start .. start + len` of a view.
pub fn part<T: Element>(view: Global<T>, start: usize, len: usize) -> Global<T> {
    assert!(start + len <= view.len(), "a part outside its view");
    Global::from_raw(view.addr() + (start * size_of::<T>()) as u64, len)
}
