//! Weights on their way to the device: one buffer for their bytes as stored, taken again for each of them.

use std::cell::{Ref, RefCell};

use crate::device::{Buffer, Device, Result};

/// Where a part of a weight may begin: a multiple of what a kernel reads in one load, and more.
const ALIGN: usize = 256;

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

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `parts` into the buffer, and says where each begins.
    pub(super) fn put<const N: usize>(&self, parts: [&[u8]; N]) -> Result<(Ref<'_, Buffer<u8>>, [usize; N])> {
        let mut end = 0;
        let starts = parts.map(|part| {
            let start = end;
            end += part.len().next_multiple_of(ALIGN);
            start
        });
        if self.stored.borrow().len() < end {
            // The smaller one goes when what was queued has ended.
            self.stored.replace(self.device.alloc(end)?);
        }
        let stored = self.stored.borrow();
        for (part, start) in parts.into_iter().zip(starts) {
            stored.write(start, part)?;
        }
        Ok((stored, starts))
    }
}
