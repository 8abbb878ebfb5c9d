//! What can go wrong on a device.

use super::Dims;

/// An error of a device. The command line maps it to exit code 4, or 5 when memory ran out.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// No driver or no GPU: what `--device auto` answers by taking the CPU.
    #[error("no CUDA device: {0}")]
    NoDevice(String),
    /// A driver call failed.
    #[error("{call} failed: {text} (CUDA error {code})")]
    Driver { call: &'static str, code: i32, text: String },
    /// The driver refused a launch, or a fault showed at it.
    #[error(
        "launch of `{kernel}` (grid {}, block {}, {} bytes of shared memory) failed: {text} (CUDA error {code})",
        shape(dims.grid), shape(dims.block), dims.shared
    )]
    Launch { kernel: &'static str, dims: Dims, code: i32, text: String },
    /// The PTX did not load.
    #[error("the kernels for {target} do not load: {text}")]
    Ptx { target: String, text: String },
    #[error("out of device memory: {bytes} bytes asked for")]
    OutOfMemory { bytes: usize },
    /// A kernel broke a rule on the CPU device.
    #[error(transparent)]
    Fault(#[from] cuda_std::cpu::Fault),
    /// Arguments that break a kernel's contract, found before the launch.
    #[error("{kernel}: {what}")]
    Contract { kernel: &'static str, what: String },
    #[error("{what} of elements {start}..{} of a buffer of {of}", start + len)]
    Range { what: &'static str, start: usize, len: usize, of: usize },
    #[error("{0}")]
    Unsupported(String),
    /// What nobody can ask for.
    #[error("{0}")]
    Request(String),
}

fn shape([x, y, z]: [u32; 3]) -> String {
    format!("{x}x{y}x{z}")
}
