//! A weight on the device.

use gpu::kernels::tiled_wgmma::{LARGEST_SCALE, LEAST_SCALE};

use super::pool::{Kind, Pool};
use super::upload::Stored;
use super::{Format, HostData, HostWeight, ScaleType, Upload};
use crate::device::{Device, Result};

/// A matrix `[n, k]`, or a batch of them, on the device and ready for its kernel.
pub struct Weight {
    name: String,
    format: Format,
    n: usize,
    k: usize,
    pool: Pool,
    /// See [`half_factor`].
    half: Option<f32>,
}

impl Weight {
    /// One weight alone.
    pub fn new(device: &Device, weight: &HostWeight) -> Result<Self> {
        Self::load(&Upload::new(device)?, weight)
    }

    /// Checks, uploads and, where the kernel wants another order, repacks on the device.
    pub fn load(upload: &Upload, weight: &HostWeight) -> Result<Self> {
        weight.check()?;
        let HostWeight { n, k, batch, .. } = *weight;
        let pool = Pool::alloc(upload.device(), Kind::of(&weight.data), batch, n, k)?;
        pool.put(upload, 0, weight)?;
        let half = half_factor(&weight.data);
        Ok(Self { name: weight.name.to_string(), format: weight.format(), n, k, pool, half })
    }

    /// Queues the repacking of what is stored as this weight was.
    pub(crate) fn repack(&self, device: &Device, stored: Stored) -> Result<()> {
        self.pool.repack(device, 0, self.pool.count, stored)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs: rows of each matrix.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Terms of each sum: columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Matrices.
    pub fn batch(&self) -> usize {
        self.pool.count
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// What brings the scales of 4-bit codes into the range of f16, exactly; none where nothing does.
    pub(super) fn half_factor(&self) -> Option<f32> {
        self.half
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }
}

/// Bits of a bf16 without its sign; those behind the exponent; the exponent's bias and that of infinities.
const SIZE: u16 = 0x7FFF;
const FRACTION: u32 = 7;
const BIAS: i32 = 127;
const NOT_FINITE: i32 = 255;

/// The power of two that brings the largest scale of 4-bit codes to the top of what `wgmma` takes as f16. None where
/// that would round the least of them, where one is not finite, and for what has no bf16 scales.
fn half_factor(data: &HostData) -> Option<f32> {
    let HostData::W4a16 { scales, scale_type: ScaleType::Bf16, .. } = data else { return None };
    let sizes = || scales.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) & SIZE).filter(|&size| size != 0);
    // Subnormals have the digits of the least exponent.
    let exponent = |size: u16| i32::from(size >> FRACTION).max(1) - BIAS;
    let (Some(most), Some(least)) = (sizes().max(), sizes().min()) else { return Some(1.0) };
    if i32::from(most >> FRACTION) == NOT_FINITE {
        return None;
    }
    // The inverse must be normal too.
    let factor = (LARGEST_SCALE - exponent(most)).min(BIAS - 1);
    (exponent(least) + factor >= LEAST_SCALE).then(|| 2f32.powi(factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_std::bf16;

    fn factor(scales: &[f32]) -> Option<f32> {
        let scales: Vec<u8> = scales.iter().flat_map(|&s| bf16::from_f32(s).to_le_bytes()).collect();
        let scale_type = ScaleType::Bf16;
        half_factor(&HostData::W4a16 { packed: (&[][..]).into(), scales: scales.into(), scale_type, group: 32 })
    }

    #[test]
    fn scales_in_the_range_of_f16() {
        assert_eq!(factor(&[1.0, -0.5, 0.0]), Some(4096.0));
        assert_eq!(factor(&[1.99, 2f32.powi(-29)]), Some(4096.0), "29 powers of two fit");
        assert_eq!(factor(&[1.0, 2f32.powi(-30)]), None, "and 30 do not");
        assert_eq!(factor(&[0.0, 0.0]), Some(1.0));
        assert_eq!(factor(&[3e38]), Some(2f32.powi(12 - 127)));
        assert_eq!(factor(&[1e-39]), Some(2f32.powi(126)));
        assert_eq!(factor(&[f32::NAN, 1.0]), None);
        assert_eq!(factor(&[f32::INFINITY]), None);
    }

    /// All scales and codes that are taken are exact in f16.
    #[test]
    fn products_of_codes_and_scales_are_exact() {
        for exponent in LEAST_SCALE..=LARGEST_SCALE {
            for fraction in 0..128 {
                let scale = (1.0 + fraction as f32 / 128.0) * 2f32.powi(exponent);
                for q in -8..=7 {
                    let value = q as f32 * scale;
                    assert_eq!(half::f16::from_f32(value).to_f32(), value, "{q} * {scale}");
                }
            }
        }
    }
}
