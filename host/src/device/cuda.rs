//! The CUDA device: cust over the driver found by `libcuda.rs`.
//!
//! One context, module and in-order stream a device ([`card::Card`]). Every call makes the context current on its
//! thread first, so a device can be used from any thread. A graph is recorded on a stream of its own: launches of other
//! threads go on to the ordinary one meanwhile. After a fault of a kernel every call answers that fault.

mod beside;
mod card;
mod report;
mod staging;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use cust::event::EventFlags;
use cust::sys;

use super::{DeviceError, Dims, How, Info, Result, libcuda};
use card::{Card, cust_call, sys_call};
use staging::{STAGED_FROM, Staging};

pub use report::{CudaCard, CudaReport, cuda_report};

const WARP: u64 = 32;
const MAX_THREADS: u64 = 1024;

pub struct CudaDevice {
    card: Arc<Card>,
    /// Held while a graph is recorded.
    recording: Mutex<()>,
    /// The thread that records it: its launches go into the graph.
    recorder: Mutex<Option<ThreadId>>,
    /// Held while something is queued beside other work.
    besides: Mutex<()>,
    /// The thread whose launches go to the second stream.
    beside: Mutex<Option<ThreadId>>,
    /// Buffers dropped by the thread that records, meanwhile; freeing one would spoil the recording.
    dropped: Mutex<Vec<u64>>,
    /// Pinned memory for large writes, from the first of them until `loaded`.
    staging: Mutex<Option<Staging>>,
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.loaded();
    }
}

/// An executable graph. It keeps its card's context and module.
pub struct Graph {
    card: Arc<Card>,
    exec: sys::CUgraphExec,
}

// SAFETY: a handle that the driver takes from any thread; it is launched on one stream, in order.
unsafe impl Send for Graph {}
// SAFETY: as above; nothing changes it after it has been made.
unsafe impl Sync for Graph {}

pub struct Event {
    card: Arc<Card>,
    /// Taken on drop, once the context is current.
    event: Option<cust::event::Event>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Microseconds from `start` to `end`, waiting for both.
pub fn elapsed_us(start: &Event, end: &Event) -> Result<f64> {
    if !Arc::ptr_eq(&start.card, &end.card) {
        return Err(DeviceError::Unsupported("events of two devices".into()));
    }
    let (Some(from), Some(to)) = (&start.event, &end.event) else {
        return Err(DeviceError::Unsupported("an event that is being dropped".into()));
    };
    end.card.call(|_| {
        cust_call("cuEventSynchronize", from.synchronize())?;
        cust_call("cuEventSynchronize", to.synchronize())?;
        let milliseconds = cust_call("cuEventElapsedTime", to.elapsed_time_f32(from))?;
        Ok(f64::from(milliseconds) * 1e3)
    })
}

impl CudaDevice {
    pub fn open(ordinal: u32, ptx: Option<&str>, shared: u32) -> Result<Self> {
        Ok(Self {
            card: Arc::new(Card::open(ordinal, ptx, shared)?),
            recording: Mutex::default(),
            recorder: Mutex::default(),
            besides: Mutex::default(),
            beside: Mutex::default(),
            dropped: Mutex::default(),
            staging: Mutex::default(),
        })
    }

    pub fn info(&self) -> Info {
        let facts = &self.card.facts;
        Info {
            device: format!("cuda:{}", facts.ordinal),
            name: facts.name.clone(),
            ptx: Some(self.card.target.into()),
            memory: Some(facts.memory),
            multiprocessors: facts.multiprocessors,
            l2: Some(u64::from(facts.l2)),
            max_shared: facts.max_shared,
        }
    }

    /// Whether the loaded kernels know clusters, and the driver can launch them.
    pub fn has_clusters(&self) -> bool {
        self.card.target != "sm_80" && libcuda::has_launch_ex()
    }

    /// Whether this thread records a graph.
    fn is_recording(&self) -> bool {
        *lock(&self.recorder) == Some(thread::current().id())
    }

    fn in_order(&self, what: &str) -> Result<()> {
        match (self.is_recording(), self.is_beside()) {
            (false, false) => Ok(()),
            (true, _) => Err(DeviceError::Unsupported(format!("{what} while a graph is captured"))),
            (_, true) => Err(DeviceError::Unsupported(format!("{what} beside other work"))),
        }
    }

    pub fn alloc(&self, bytes: usize) -> Result<u64> {
        const OUT_OF_MEMORY: i32 = 2;
        self.in_order("allocation")?;
        self.card.call(|_| {
            let mut addr = 0;
            // SAFETY: `addr` holds one address.
            match sys_call("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut addr, bytes) }) {
                Ok(()) => Ok(addr),
                Err(DeviceError::Driver { code: OUT_OF_MEMORY, .. }) => Err(DeviceError::OutOfMemory { bytes }),
                Err(error) => Err(error),
            }
        })
    }

    /// Frees at once when all that was queued has ended; a buffer is dropped rarely, and never in a round.
    pub fn free(&self, addr: u64, _bytes: usize) {
        if self.is_recording() {
            return lock(&self.dropped).push(addr);
        }
        // After a fault nothing can be freed any more; the driver does so when the program ends.
        let _ = self.card.call(|card| {
            card.synchronize()?;
            // SAFETY: an address from `alloc`, freed once by its owner; nothing queued uses it any more.
            sys_call("cuMemFree", unsafe { sys::cuMemFree_v2(addr) })
        });
    }

    /// Bytes that are free for buffers.
    pub fn free_memory(&self) -> Option<u64> {
        let free = self.card.call(|_| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: both hold one number.
            sys_call("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
            Ok(free as u64)
        });
        free.ok()
    }

    /// Gives back what only loading needs.
    pub fn loaded(&self) {
        if let Some(mut staging) = lock(&self.staging).take() {
            // Without its context the memory is gone already.
            let _ = self.card.call(|_| {
                staging.free();
                Ok(())
            });
        }
    }

    pub fn fill(&self, addr: u64, byte: u8, bytes: usize) -> Result<()> {
        self.in_order("fill")?;
        self.card.call(|card| {
            // SAFETY: `Buffer` passes its own range.
            sys_call("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(addr, byte, bytes, card.stream()) })
        })
    }

    pub fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        self.in_order("write")?;
        if bytes.len() >= STAGED_FROM {
            let mut staging = lock(&self.staging);
            return self.card.call(|card| match staging.as_mut() {
                Some(staging) => staging.write(card, addr, bytes),
                None => staging.insert(Staging::new()?).write(card, addr, bytes),
            });
        }
        self.card.call(|card| {
            let from = bytes.as_ptr().cast();
            // SAFETY: `Buffer` has checked the range; the copy has ended when `bytes` goes.
            let code = unsafe { sys::cuMemcpyHtoDAsync_v2(addr, from, bytes.len(), card.stream()) };
            sys_call("cuMemcpyHtoDAsync", code)?;
            card.synchronize()
        })
    }

    pub fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<()> {
        self.in_order("read")?;
        self.card.call(|card| {
            let to = bytes.as_mut_ptr().cast();
            // SAFETY: as in `write`.
            let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to, addr, bytes.len(), card.stream()) };
            sys_call("cuMemcpyDtoHAsync", code)?;
            card.synchronize()
        })
    }

    /// Queues `kernel`; `args` points to its argument struct, which the driver copies.
    pub fn launch(&self, kernel: &'static str, dims: Dims, args: *const c_void, how: How) -> Result<()> {
        let threads = dims.block.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads == 0 || threads > MAX_THREADS || !threads.is_multiple_of(WARP) {
            let what = format!("{threads} threads a block; whole warps up to {MAX_THREADS} are possible");
            return Err(DeviceError::Contract { kernel, what });
        }
        let (recording, beside) = (self.is_recording(), self.is_beside());
        self.card.call(|card| {
            let of = dims;
            let function = card.function(kernel, dims.shared)?;
            let pair = if recording { card.recorders() } else { card.streams() };
            let stream = pair[usize::from(beside)].as_inner();
            let ([gx, gy, gz], [bx, by, bz]) = (dims.grid, dims.block);
            let mut params = [args.cast_mut()];
            let (params, extra) = (params.as_mut_ptr(), std::ptr::null_mut());
            let overlap = how.overlap && card.overlaps;
            if overlap || how.cluster > 1 {
                let dims = (dims.grid, dims.block, dims.shared);
                // SAFETY: as below; `Device::launch_overlapping` and `launch_clusters` pass kernels that wait.
                let code = unsafe { libcuda::launch_ex(function, dims, (overlap, how.cluster), stream, params) };
                return sys_call("cuLaunchKernelEx", code).map_err(|error| card::of_launch(error, kernel, of));
            }
            // SAFETY: the kernel takes one struct, and `Device::launch` passes one of the type that its descriptor has.
            let code =
                unsafe { sys::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, dims.shared, stream, params, extra) };
            sys_call("cuLaunchKernel", code).map_err(|error| card::of_launch(error, kernel, dims))
        })
    }

    pub fn synchronize(&self) -> Result<()> {
        self.in_order("synchronize")?;
        self.card.call(Card::synchronize)
    }

    pub fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.in_order("capture")?;
        let _one = lock(&self.recording);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.card.call(|card| {
            // SAFETY: the recorder is this card's; one recording at a time.
            sys_call("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(card.recorder(), mode) })
        })?;
        let recording = Recording::start(self);
        let queued = queue();
        let graph = recording.end();
        queued?;
        let graph = graph?;
        self.card.call(|_| {
            let mut exec = std::ptr::null_mut();
            // SAFETY: `exec` holds one handle; the graph is whole.
            let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0) };
            sys_call("cuGraphInstantiate", code)?;
            Ok(Graph { card: self.card.clone(), exec })
        })
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.in_order("replay")?;
        if !Arc::ptr_eq(&self.card, &graph.card) {
            return Err(DeviceError::Unsupported("a graph of another device".into()));
        }
        self.card.call(|card| {
            // SAFETY: a graph of this card, alive for the call.
            sys_call("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.exec, card.stream()) })
        })
    }

    pub fn record(&self) -> Result<Event> {
        self.in_order("an event")?;
        self.card.call(|card| {
            let event = cust_call("cuEventCreate", cust::event::Event::new(EventFlags::DEFAULT))?;
            let event = Event { card: self.card.clone(), event: Some(event) };
            if let Some(event) = &event.event {
                cust_call("cuEventRecord", event.record(&card.stream))?;
            }
            Ok(event)
        })
    }
}

/// A recording in progress: ends with its scope, also when what it records fails or panics.
struct Recording<'a> {
    device: &'a CudaDevice,
    open: bool,
}

/// A recorded graph that is not executable yet.
struct Recorded(sys::CUgraph);

impl<'a> Recording<'a> {
    fn start(device: &'a CudaDevice) -> Self {
        *lock(&device.recorder) = Some(thread::current().id());
        Self { device, open: true }
    }

    fn end(mut self) -> Result<Recorded> {
        self.close()
    }

    fn close(&mut self) -> Result<Recorded> {
        self.open = false;
        let graph = self.device.card.call(|card| {
            let mut graph = std::ptr::null_mut();
            // SAFETY: ends the recording that this thread began; `graph` holds one handle.
            sys_call("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(card.recorder(), &mut graph) })?;
            Ok(Recorded(graph))
        });
        *lock(&self.device.recorder) = None;
        let dropped = std::mem::take(&mut *lock(&self.device.dropped));
        dropped.into_iter().for_each(|addr| self.device.free(addr, 0));
        graph
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.open {
            let _ = self.close();
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: a graph of this owner; null when the recording failed, which the driver refuses.
        unsafe { sys::cuGraphDestroy(self.0) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: an executable graph of this owner; the driver lets a replay in progress end first.
        let _ = self.card.call(|_| sys_call("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.exec) }));
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let event = self.event.take();
        let _ = self.card.call(|_| {
            drop(event);
            Ok(())
        });
    }
}
