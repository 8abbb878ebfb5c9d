//! Launcher of [`gpu::kernels::swiglu`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::tokens::SwigluArgs;
use gpu::kernels::swiglu as kernel;

use super::{MAX_GRID_Y, contract, holds};
use crate::device::{Device, Dims, Result};

/// `silu(gate) * up`, element by element.
pub struct Swiglu {
    /// `[rows, stride]`, the first `width` of each row.
    pub gate: Global<f32>,
    /// `[rows, stride]`, the first `width` of each row.
    pub up: Global<f32>,
    /// `[rows, width]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, width]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

/// Queues the product of `rows` rows.
pub fn swiglu(device: &Device, p: Swiglu) -> Result<()> {
    let name = kernel::SWIGLU.name();
    let need = p.rows * p.width;
    contract(name, p.width > 0 && p.width <= p.stride, || format!("width {} of stride {}", p.width, p.stride))?;
    for (what, len) in [("gate", p.gate.len()), ("up", p.up.len())] {
        holds(name, what, len, if p.rows == 0 { 0 } else { (p.rows - 1) * p.stride + p.width })?;
    }
    for len in [p.out_f32.len(), p.out_bf16.len()] {
        contract(name, len == 0 || len >= need, || format!("an output holds {len}, {need} are written"))?;
    }
    let parts = p.width.div_ceil(kernel::THREADS as usize);
    contract(name, parts <= MAX_GRID_Y, || format!("width {} needs {parts} blocks a row", p.width))?;
    let args = SwigluArgs {
        gate: p.gate,
        up: p.up,
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        width: p.width as u32,
        stride: p.stride as u32,
    };
    let dims = Dims { grid: [p.rows as u32, parts as u32, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::SWIGLU, dims, args)
}
