//! Launchers of [`gpu::kernels::rows`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::attention::{RoundBf16Args, TapArgs};
use gpu::kernels::rows as kernel;

use super::contract;
use crate::device::{Device, Dims, Result};

/// `out[i] = bf16(x[i])` for the first `n`.
pub struct RoundBf16 {
    pub x: Global<f32>,
    pub out: GlobalMut<bf16>,
    pub n: usize,
}

/// Queues the rounding of `n` values.
pub fn round_bf16(device: &Device, p: RoundBf16) -> Result<()> {
    let name = kernel::ROUND_BF16.name();
    contract(name, p.x.len() >= p.n, || format!("x holds {}, {} are read", p.x.len(), p.n))?;
    contract(name, p.out.len() >= p.n, || format!("the output holds {}, {} are written", p.out.len(), p.n))?;
    let args = RoundBf16Args { x: p.x, out: p.out, n: p.n as u64 };
    let blocks = p.n.div_ceil(kernel::THREADS as usize) as u32;
    device.launch(&kernel::ROUND_BF16, Dims { grid: [blocks, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 }, args)
}

/// `dst[r, offset + i] = src[r, i]`: one tap's columns of the drafter's features.
pub struct Tap {
    /// `[rows, width]`.
    pub src: Global<f32>,
    /// `[rows, stride]`.
    pub dst: GlobalMut<f32>,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
    pub offset: usize,
}

/// Queues the copy of `rows` rows.
pub fn tap(device: &Device, p: Tap) -> Result<()> {
    let name = kernel::TAP.name();
    contract(name, p.offset + p.width <= p.stride, || {
        format!("columns {}..{} of a stride of {}", p.offset, p.offset + p.width, p.stride)
    })?;
    contract(name, p.src.len() >= p.rows * p.width, || {
        format!("src holds {}, {} rows of {} are read", p.src.len(), p.rows, p.width)
    })?;
    contract(name, p.rows == 0 || p.dst.len() >= (p.rows - 1) * p.stride + p.offset + p.width, || {
        format!("dst holds {}, {} rows of stride {} are written", p.dst.len(), p.rows, p.stride)
    })?;
    let args =
        TapArgs { src: p.src, dst: p.dst, width: p.width as u32, stride: p.stride as u32, offset: p.offset as u32 };
    let grid = [p.rows as u32, p.width.div_ceil(kernel::THREADS as usize) as u32, 1];
    device.launch(&kernel::TAP, Dims { grid, block: [kernel::THREADS, 1, 1], shared: 0 }, args)
}
