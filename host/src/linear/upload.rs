//! Weights on their way to the device: one buffer for their bytes as stored, taken again for each of them.

use std::cell::RefCell;

use cuda_std::Global;

use super::HostData;
use crate::device::{Buffer, Device, Result};

/// Where a weight's scales may begin: a multiple of what a kernel reads in one load, and more.
const ALIGN: usize = 256;

/// A weight on the device as it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    /// Values, or codes.
    pub values: Global<u8>,
    pub scales: Global<u8>,
    pub group: usize,
}

/// Loads weights on one thread, one after the other.
///
/// Copies and the kernels that repack run in one queue, so what is copied next cannot overtake the kernel that still
/// reads the bytes before it: nothing has to be waited for, or allocated, between two weights.
pub struct Upload {
    device: Device,
    stored: RefCell<Buffer<u8>>,
}

impl Upload {
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { device: device.clone(), stored: RefCell::new(device.alloc(0)?) })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Copies a weight into the buffer, where it stays until the next one.
    pub(crate) fn put(&self, data: &HostData) -> Result<Stored> {
        let (values, scales, group) = match data {
            HostData::F32(values) | HostData::Bf16(values) => (&values[..], &[][..], 0),
            HostData::W4a16 { packed, scales, group, .. } => (&packed[..], &scales[..], *group),
        };
        let start = values.len().next_multiple_of(ALIGN);
        let end = start + scales.len();
        if self.stored.borrow().len() < end {
            // The smaller one goes when what was queued has ended.
            self.stored.replace(self.device.alloc(end)?);
        }
        let buffer = self.stored.borrow();
        buffer.write(0, values)?;
        buffer.write(start, scales)?;
        let addr = buffer.view().addr();
        let part = |start: usize, bytes: &[u8]| Global::from_raw(addr + start as u64, bytes.len());
        Ok(Stored { values: part(0, values), scales: part(start, scales), group })
    }
}
