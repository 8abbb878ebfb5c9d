//! One program, two devices: buffers, launches, graphs and timers on a GPU or on the CPU.
//!
//! A [`Device`] is one in-order queue, which [`Device::beside`] divides in two for a while. `cpu.rs` runs the kernels'
//! own source, `cuda.rs` their PTX; nothing outside this room knows which. Every buffer has one owner; kernels get
//! views ([`cuda_std::Global`]).

mod buffer;
mod cpu;
mod cuda;
mod error;
mod libcuda;
mod ptx;

use std::sync::Arc;

pub use cuda_std::cpu::{Dims, Mode};
use cuda_std::{Element, Kernel};

pub use buffer::Buffer;
pub use cpu::available_memory;
pub use cuda::{CudaCard, CudaReport, cuda_report};
pub use error::DeviceError;

pub type Result<T> = std::result::Result<T, DeviceError>;

/// Which device to open: `--device auto | cpu | cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Cpu,
    Cuda(u32),
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(n)) => Ok(Self::Cuda(n)),
                _ => Err(format!("expected auto, cpu or cuda:N, found `{text}`")),
            },
        }
    }
}

/// What a device is, for summaries and `doctor`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Info {
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// The card's name, or the CPU mode.
    pub name: String,
    /// The target of the loaded PTX; none on the CPU.
    pub ptx: Option<String>,
    /// Bytes of device memory; none on the CPU.
    pub memory: Option<u64>,
    pub multiprocessors: u32,
    /// Bytes of the cache that all multiprocessors share; none on the CPU.
    pub l2: Option<u64>,
    /// Largest dynamic shared memory of a block, bytes.
    pub max_shared: u32,
}

/// What a launch may do beside running its blocks after the launch before it.
#[derive(Clone, Copy)]
struct How {
    /// Start before the launch before it has ended, where device and driver can do that.
    overlap: bool,
    /// Blocks of a cluster.
    cluster: u32,
}

/// A device and its one in-order queue. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<Backend>);

enum Backend {
    Cpu(cpu::CpuDevice),
    Cuda(cuda::CudaDevice),
}

/// Launches recorded once and replayed together.
pub struct Graph(Recorded);

enum Recorded {
    Cpu(cpu::Graph),
    Cuda(cuda::Graph),
}

/// A point in the queue's time.
pub struct Event(Mark);

enum Mark {
    Cpu(std::time::Instant),
    Cuda(cuda::Event),
}

macro_rules! on {
    ($self:ident, $d:ident => $e:expr) => {
        match &*$self.0 {
            Backend::Cpu($d) => $e,
            Backend::Cuda($d) => $e,
        }
    };
}

#[cfg(test)]
thread_local! {
    /// Names of the kernels that this thread has launched.
    pub(crate) static LAUNCHED: std::cell::RefCell<std::collections::BTreeSet<&'static str>> = Default::default();
}

impl Device {
    /// The CPU device.
    pub fn cpu(mode: Mode) -> Self {
        Self::cpu_within(mode, u32::MAX)
    }

    /// The CPU device as one whose blocks have at most `shared` bytes of shared memory.
    pub fn cpu_within(mode: Mode, shared: u32) -> Self {
        Self(Arc::new(Backend::Cpu(cpu::CpuDevice::new(mode, shared))))
    }

    /// GPU `ordinal`, with the PTX of target `ptx` (`sm_90`), or the best that device and driver accept.
    pub fn cuda(ordinal: u32, ptx: Option<&str>) -> Result<Self> {
        Self::cuda_within(ordinal, ptx, u32::MAX)
    }

    /// As [`Self::cuda`], with at most `shared` bytes of shared memory a block: plans are those of a smaller card, and
    /// a launch that asks for more is refused.
    pub fn cuda_within(ordinal: u32, ptx: Option<&str>, shared: u32) -> Result<Self> {
        Ok(Self(Arc::new(Backend::Cuda(cuda::CudaDevice::open(ordinal, ptx, shared)?))))
    }

    /// Opens what was chosen. `Auto` takes GPU 0 when a driver and a device are there, else the CPU in fast mode; the
    /// caller says which on stderr (`info`). A driver that is there but broken is an error, not a reason for the CPU.
    pub fn open(choice: Choice, ptx: Option<&str>) -> Result<Self> {
        match choice {
            Choice::Cpu if ptx.is_some() => {
                Err(DeviceError::Unsupported("--ptx chooses a GPU's kernels; the CPU device has none".into()))
            }
            Choice::Cpu => Ok(Self::cpu(Mode::Fast)),
            Choice::Cuda(n) => Self::cuda(n, ptx),
            Choice::Auto => match Self::cuda(0, ptx) {
                Err(DeviceError::NoDevice(why)) if ptx.is_some() => Err(DeviceError::NoDevice(why)),
                Err(DeviceError::NoDevice(_)) => Ok(Self::cpu(Mode::Fast)),
                other => other,
            },
        }
    }

    pub fn info(&self) -> Info {
        on!(self, d => d.info())
    }

    /// Bytes that are free for buffers, where that is known.
    pub fn free_memory(&self) -> Option<u64> {
        on!(self, d => d.free_memory())
    }

    /// Says that no more large buffers will be written: what only loading needs is given back.
    pub fn loaded(&self) {
        on!(self, d => d.loaded());
    }

    pub fn is_cuda(&self) -> bool {
        matches!(&*self.0, Backend::Cuda(_))
    }

    /// A buffer of `len` elements with no defined content (0xFF bytes on the CPU in checked mode).
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::new(self, len)
    }

    /// A buffer of `len` zeros.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.alloc(len)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// A buffer with the given content.
    pub fn upload<T: Element + bytemuck::Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let buffer = self.alloc(values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// A buffer with the elements that `bytes` are, which need no alignment.
    pub fn upload_bytes<T: Element + bytemuck::Pod>(&self, bytes: &[u8]) -> Result<Buffer<T>> {
        let buffer = self.alloc(bytes.len() / size_of::<T>())?;
        buffer.write_bytes(bytes)?;
        Ok(buffer)
    }

    /// Queues a launch. A grid with a zero queues nothing.
    ///
    /// Views in `args` must be of live buffers of this device and the dimensions those of the kernel's contract: the
    /// launchers in `kernels/` and `linear/` check them. On the CPU device the launch has ended on return.
    pub fn launch<A: Copy + Send + Sync + 'static>(&self, kernel: &Kernel<A>, dims: Dims, args: A) -> Result<()> {
        self.queue(kernel, dims, args, How { overlap: false, cluster: 1 })
    }

    /// As [`Self::launch`], of a kernel that may start before the launch before it has ended: it calls
    /// `thread::wait_for_previous` before it touches what that launch writes, and before it writes anything.
    pub fn launch_overlapping<A: Copy + Send + Sync + 'static>(
        &self,
        kernel: &Kernel<A>,
        dims: Dims,
        args: A,
    ) -> Result<()> {
        self.queue(kernel, dims, args, How { overlap: true, cluster: 1 })
    }

    /// Whether [`Self::launch_clusters`] can be called: from sm_90 on.
    pub fn has_clusters(&self) -> bool {
        match &*self.0 {
            Backend::Cpu(_) => false,
            Backend::Cuda(d) => d.has_clusters(),
        }
    }

    /// As [`Self::launch_overlapping`], with `cluster` blocks along x together in a cluster.
    pub fn launch_clusters<A: Copy + Send + Sync + 'static>(
        &self,
        kernel: &Kernel<A>,
        dims: Dims,
        cluster: u32,
        args: A,
    ) -> Result<()> {
        if !self.has_clusters() {
            let what = format!("`{}` in clusters of {cluster} blocks; sm_90 and later have them", kernel.name());
            return Err(DeviceError::Unsupported(what));
        }
        self.queue(kernel, dims, args, How { overlap: true, cluster })
    }

    fn queue<A: Copy + Send + Sync + 'static>(&self, kernel: &Kernel<A>, dims: Dims, args: A, how: How) -> Result<()> {
        if dims.grid.contains(&0) {
            return Ok(());
        }
        #[cfg(test)]
        LAUNCHED.with_borrow_mut(|names| names.insert(kernel.name()));
        match &*self.0 {
            Backend::Cpu(d) => d.launch(kernel, dims, args),
            Backend::Cuda(d) => d.launch(kernel.name(), dims, (&raw const args).cast(), how),
        }
    }

    /// Queues the launches of `other` and of `first`, each in its own order, so that the two may run at once: after all
    /// that was queued before, and before all that is queued next. Neither touches what the other writes; `other` has
    /// launches alone, no copies. The CPU device runs them one after the other.
    pub fn beside(&self, other: impl FnOnce() -> Result<()>, first: impl FnOnce() -> Result<()>) -> Result<()> {
        match &*self.0 {
            Backend::Cpu(_) => other().and_then(|()| first()),
            Backend::Cuda(d) => d.beside(other, first),
        }
    }

    /// Waits until all that was queued has ended.
    pub fn synchronize(&self) -> Result<()> {
        on!(self, d => d.synchronize())
    }

    /// Records the launches that `queue` makes on this thread instead of running them. Nothing may be allocated, read
    /// or written in it.
    pub fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        match &*self.0 {
            Backend::Cpu(d) => Ok(Graph(Recorded::Cpu(d.capture(queue)?))),
            Backend::Cuda(d) => Ok(Graph(Recorded::Cuda(d.capture(queue)?))),
        }
    }

    /// Queues a recorded graph. It must be of this device.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        match (&*self.0, &graph.0) {
            (Backend::Cpu(d), Recorded::Cpu(g)) => d.replay(g),
            (Backend::Cuda(d), Recorded::Cuda(g)) => d.replay(g),
            _ => Err(DeviceError::Unsupported("a graph of another device".into())),
        }
    }

    /// Marks this point of the queue.
    pub fn record(&self) -> Result<Event> {
        match &*self.0 {
            Backend::Cpu(_) => Ok(Event(Mark::Cpu(std::time::Instant::now()))),
            Backend::Cuda(d) => Ok(Event(Mark::Cuda(d.record()?))),
        }
    }

    /// Microseconds from `start` to `end`; waits for `end`.
    pub fn elapsed_us(&self, start: &Event, end: &Event) -> Result<f64> {
        match (&start.0, &end.0) {
            (Mark::Cpu(a), Mark::Cpu(b)) => Ok(b.duration_since(*a).as_secs_f64() * 1e6),
            (Mark::Cuda(a), Mark::Cuda(b)) => cuda::elapsed_us(a, b),
            _ => Err(DeviceError::Unsupported("events of two devices".into())),
        }
    }
}
