//! What the memory of a device can do, measured with plain kernels.

use super::{Run, timing};
use crate::device::{Device, Result};
use crate::kernels::{copy_words, read_threads, read_words};

/// Words of a buffer on a GPU: 1 GiB, beyond any cache.
const WORDS: usize = 1 << 28;
/// Words of a buffer on the CPU device, where rates mean nothing.
const FEW_WORDS: usize = 1 << 12;

/// Rates in GB/s: 10^9 bytes a second.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Memory {
    /// Bytes read and written by a copy.
    pub copy: f64,
    /// Bytes read by a sum.
    pub read: f64,
}

impl Memory {
    pub fn measure(device: &Device) -> Result<Self> {
        let words = if device.is_cuda() { WORDS } else { FEW_WORDS };
        let (from, to) = (device.zeros::<u32>(words)?, device.alloc::<u32>(words)?);
        let sums = device.alloc::<u32>(read_threads(device))?;
        let bytes = from.bytes() as f64;
        let (source, sink, partial) = (from.view(), to.view_mut(), sums.view_mut());
        let copy: Run = Box::new(move |device| copy_words(device, source, sink));
        let read: Run = Box::new(move |device| read_words(device, source, partial));
        let rate =
            |run, bytes: f64| Ok::<_, crate::device::DeviceError>(bytes / timing::time(device, &[run])?.us / 1e3);
        Ok(Self { copy: rate(copy, 2.0 * bytes)?, read: rate(read, bytes)? })
    }
}
