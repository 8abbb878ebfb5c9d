//! A weight on the device.

use super::pool::{Kind, Pool};
use super::upload::Stored;
use super::{Format, HostWeight, Upload};
use crate::device::{Device, Result};

/// A matrix `[n, k]`, or a batch of them, on the device and ready for its kernel.
pub struct Weight {
    name: String,
    format: Format,
    n: usize,
    k: usize,
    pool: Pool,
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
        Ok(Self { name: weight.name.to_string(), format: weight.format(), n, k, pool })
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

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }
}
