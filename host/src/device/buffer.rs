//! A typed buffer of device memory with one owner.

use std::marker::PhantomData;

use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut};

use super::{Backend, Device, DeviceError, Result};

/// `len` elements of device memory, freed on drop.
pub struct Buffer<T: Element> {
    device: Device,
    addr: u64,
    len: usize,
    elem: PhantomData<T>,
}

macro_rules! on {
    ($self:ident, $d:ident => $e:expr) => {
        match &*$self.device.0 {
            Backend::Cpu($d) => $e,
            Backend::Cuda($d) => $e,
        }
    };
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(DeviceError::OutOfMemory { bytes: usize::MAX })?;
        let mut buffer = Self { device: device.clone(), addr: 0, len, elem: PhantomData };
        if bytes > 0 {
            buffer.addr = on!(buffer, d => d.alloc(bytes)?);
        }
        Ok(buffer)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements, for a kernel to read.
    pub fn view(&self) -> Global<T> {
        Global::from_raw(self.addr, self.len)
    }

    /// The elements, for a kernel to read and write. Queue order keeps launches apart; within one launch the kernel's
    /// contract says who writes what.
    pub fn view_mut(&self) -> GlobalMut<T> {
        GlobalMut::from_raw(self.addr, self.len)
    }

    fn check(&self, what: &'static str, start: usize, len: usize) -> Result<u64> {
        match start.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.addr + (start * size_of::<T>()) as u64),
            _ => Err(DeviceError::Range { what, start, len, of: self.len }),
        }
    }

    /// Queues setting every byte to `byte`.
    pub fn fill(&self, byte: u8) -> Result<()> {
        match self.bytes() {
            0 => Ok(()),
            bytes => on!(self, d => d.fill(self.addr, byte, bytes)),
        }
    }

    /// Writes `values` from element `start` on; returns when they may be dropped. What is queued later sees them.
    pub fn write(&self, start: usize, values: &[T]) -> Result<()>
    where
        T: Pod,
    {
        let addr = self.check("write", start, values.len())?;
        match values.is_empty() {
            true => Ok(()),
            false => on!(self, d => d.write(addr, bytemuck::cast_slice(values))),
        }
    }

    /// Writes the elements that `bytes` are from the first one on; `bytes` need no alignment.
    pub fn write_bytes(&self, bytes: &[u8]) -> Result<()>
    where
        T: Pod,
    {
        let len = bytes.len().div_ceil(size_of::<T>());
        let addr = self.check("write", 0, len)?;
        match bytes.is_empty() {
            true => Ok(()),
            false => on!(self, d => d.write(addr, bytes)),
        }
    }

    /// Reads into `values` from element `start` on, after all that was queued.
    pub fn read_into(&self, start: usize, values: &mut [T]) -> Result<()>
    where
        T: Pod,
    {
        let addr = self.check("read", start, values.len())?;
        match values.is_empty() {
            true => Ok(()),
            false => on!(self, d => d.read(addr, bytemuck::cast_slice_mut(values))),
        }
    }

    /// All elements, after all that was queued.
    pub fn read(&self) -> Result<Vec<T>>
    where
        T: Pod,
    {
        let mut values = vec![T::zeroed(); self.len];
        self.read_into(0, &mut values)?;
        Ok(values)
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.addr != 0 {
            on!(self, d => d.free(self.addr, self.bytes()));
        }
    }
}
