//! Launcher of [`gpu::kernels::widen_bf16`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::WidenBf16Args;
use gpu::kernels::widen_bf16 as kernel;

use super::holds;
use crate::device::{Device, Dims, Result};

/// Queues `out[i] = f32(x[i])` for `n` values.
pub fn widen_bf16(device: &Device, x: Global<bf16>, out: GlobalMut<f32>, n: usize) -> Result<()> {
    let name = kernel::WIDEN_BF16.name();
    holds(name, "x", x.len(), n)?;
    holds(name, "out", out.len(), n)?;
    let args = WidenBf16Args { x, out: out.part(0, n) };
    let dims =
        Dims { grid: [n.div_ceil(kernel::THREADS as usize) as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::WIDEN_BF16, dims, args)
}
