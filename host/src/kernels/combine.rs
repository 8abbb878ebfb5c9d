//! Launcher of [`gpu::kernels::combine`].

use cuda_std::{Global, GlobalMut};
use gpu::args::tokens::CombineArgs;
use gpu::kernels::combine as kernel;

use super::{MAX_GRID_Y, contract, holds};
use crate::device::{Device, Dims, Result};

/// `x += sum_j weights[j] * y[j] + shared`, row by row.
pub struct Combine {
    /// `[rows * top_k, width]`.
    pub y: Global<f32>,
    /// `[rows, top_k]`.
    pub weights: Global<f32>,
    /// `[rows, width]`, or `EMPTY`.
    pub shared: Global<f32>,
    /// `[rows, width]`, the residual stream.
    pub x: GlobalMut<f32>,
    pub rows: usize,
    pub top_k: usize,
    pub width: usize,
}

/// Queues the sums of `rows` rows.
pub fn combine(device: &Device, p: Combine) -> Result<()> {
    let name = kernel::COMBINE.name();
    contract(name, p.width > 0, || "width 0".to_string())?;
    holds(name, "y", p.y.len(), p.rows * p.top_k * p.width)?;
    holds(name, "weights", p.weights.len(), p.rows * p.top_k)?;
    holds(name, "x", p.x.len(), p.rows * p.width)?;
    contract(name, p.shared.is_empty() || p.shared.len() >= p.rows * p.width, || {
        format!("shared holds {}, {} are wanted", p.shared.len(), p.rows * p.width)
    })?;
    let wide = kernel::WIDE * size_of::<f32>();
    let aligned = |addr: u64| addr.is_multiple_of(wide as u64);
    let wide =
        p.width.is_multiple_of(kernel::WIDE) && [p.y.addr(), p.shared.addr(), p.x.addr()].into_iter().all(aligned);
    let (threads, own) = if wide { (kernel::WIDE_THREADS, kernel::WIDE) } else { (kernel::THREADS, 1) };
    let parts = p.width.div_ceil(threads as usize * own);
    contract(name, parts <= MAX_GRID_Y, || format!("width {} needs {parts} blocks a row", p.width))?;
    let args = CombineArgs {
        y: p.y,
        weights: p.weights,
        shared: p.shared,
        x: p.x,
        width: p.width as u32,
        top_k: p.top_k as u32,
        wide: wide as u32,
    };
    let dims = Dims { grid: [p.rows as u32, parts as u32, 1], block: [threads, 1, 1], shared: 0 };
    device.launch_overlapping(&kernel::COMBINE, dims, args)
}
