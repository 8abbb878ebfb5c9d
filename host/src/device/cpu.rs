//! The CPU device: launches run at once, in `cuda_std::cpu`.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cuda_std::Kernel;
use cuda_std::cpu::{self, Dims, Fault, Mode};

use super::{DeviceError, Info, Result};

/// Alignment of a buffer, as on a GPU.
const ALIGN: usize = 256;

type Launch = Box<dyn Fn() -> std::result::Result<(), Fault> + Send + Sync>;

pub struct CpuDevice {
    mode: Mode,
    /// Most dynamic shared memory of a block, bytes.
    max_shared: u32,
    /// Launches of the captures in progress, each of the thread that captures.
    captures: Mutex<HashMap<ThreadId, Vec<Launch>>>,
}

pub struct Graph(Vec<Launch>);

fn layout(bytes: usize) -> Result<Layout> {
    Layout::from_size_align(bytes, ALIGN).map_err(|_| DeviceError::OutOfMemory { bytes })
}

impl CpuDevice {
    pub fn new(mode: Mode, max_shared: u32) -> Self {
        Self { mode, max_shared: max_shared.min(cpu::MAX_SHARED as u32), captures: Mutex::default() }
    }

    pub fn info(&self) -> Info {
        let name = match self.mode {
            Mode::Fast => "CPU, fast mode (no checks)",
            Mode::Checked { .. } => "CPU, checked mode",
        };
        Info {
            device: "cpu".into(),
            name: name.into(),
            ptx: None,
            memory: None,
            multiprocessors: rayon::current_num_threads() as u32,
            l2: None,
            max_shared: self.max_shared,
        }
    }

    fn captures(&self) -> MutexGuard<'_, HashMap<ThreadId, Vec<Launch>>> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_capturing(&self, what: &str) -> Result<()> {
        match self.captures().contains_key(&thread::current().id()) {
            false => Ok(()),
            true => Err(DeviceError::Unsupported(format!("{what} while a graph is captured"))),
        }
    }

    pub fn alloc(&self, bytes: usize) -> Result<u64> {
        self.not_capturing("allocation")?;
        // SAFETY: the layout has a size above zero: `Buffer` does not ask for zero bytes.
        let at = unsafe { alloc(layout(bytes)?) };
        if at.is_null() {
            return Err(DeviceError::OutOfMemory { bytes });
        }
        // Bytes are always initialised, so that reading them back is defined; 0xFF is NaN in every float type.
        // SAFETY: just allocated, `bytes` long.
        unsafe { at.write_bytes(0xFF, bytes) };
        cpu::register(at as u64, bytes);
        Ok(at as u64)
    }

    /// Bytes that the system can give without taking them from others; unknown where it does not say.
    pub fn free_memory(&self) -> Option<u64> {
        available_memory()
    }

    pub fn loaded(&self) {}

    pub fn free(&self, addr: u64, bytes: usize) {
        cpu::unregister(addr);
        if let Ok(layout) = layout(bytes) {
            // SAFETY: `addr` came from `alloc` with this layout, and its one owner drops it.
            unsafe { dealloc(addr as *mut u8, layout) };
        }
    }

    pub fn fill(&self, addr: u64, byte: u8, bytes: usize) -> Result<()> {
        self.not_capturing("fill")?;
        // SAFETY: `Buffer` passes its own range.
        unsafe { (addr as *mut u8).write_bytes(byte, bytes) };
        Ok(())
    }

    pub fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        self.not_capturing("write")?;
        // SAFETY: `Buffer` has checked the range; host memory does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
        Ok(())
    }

    pub fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<()> {
        self.not_capturing("read")?;
        // SAFETY: as in `write`; every byte has been initialised by `alloc`.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    pub fn launch<A: Copy + Send + Sync + 'static>(&self, kernel: &Kernel<A>, dims: Dims, args: A) -> Result<()> {
        if dims.shared > self.max_shared {
            let what = format!(
                "{} bytes of dynamic shared memory; at most {} are possible on this device",
                dims.shared, self.max_shared
            );
            return Err(DeviceError::Contract { kernel: kernel.name(), what });
        }
        if let Some(launches) = self.captures().get_mut(&thread::current().id()) {
            let (kernel, mode) = (*kernel, self.mode);
            launches.push(Box::new(move || cpu::launch(&kernel, dims, args, mode)));
            return Ok(());
        }
        Ok(cpu::launch(kernel, dims, args, self.mode)?)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.not_capturing("synchronize")
    }

    pub fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.not_capturing("capture")?;
        let me = thread::current().id();
        self.captures().insert(me, Vec::new());
        let result = queue();
        let launches = self.captures().remove(&me);
        result.map(|()| Graph(launches.unwrap_or_default()))
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.not_capturing("replay")?;
        graph.0.iter().try_for_each(|launch| Ok(launch()?))
    }
}

/// `MemAvailable` of Linux.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"))?;
    Some(kib.trim().parse::<u64>().ok()? * 1024)
}
