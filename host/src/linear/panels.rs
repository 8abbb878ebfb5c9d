//! Launcher of [`gpu::kernels::panels`]: rows of x in the order in which warpgroups multiply them.

use cuda_std::{Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{DenseRows, PanelArgs};
use gpu::kernels::panels::{PAIR_WORDS, ROWS, THREADS, X_PANELS, X_PANELS_HALF, pairs};
use gpu::kernels::stream::LANE_K;

use crate::device::{Device, Dims, Result};
use crate::kernels::{contract, holds};

/// Words of the memory that `rows` rows of `k` values take in panels, for each entry of a batch; with their factors.
pub fn panel_words(rows: usize, k: usize, batch: usize) -> usize {
    words(rows, k, batch).into_iter().sum()
}

/// Words of the panels, and of the factors behind them.
fn words(rows: usize, k: usize, batch: usize) -> [usize; 2] {
    let blocks = batch * rows.div_ceil(ROWS);
    [blocks * pairs(k as u32) as usize * PAIR_WORDS, blocks * ROWS]
}

/// The kernel that brings x into panels of f16 or of bf16.
pub(super) fn entry(half: bool) -> &'static Kernel<PanelArgs> {
    if half { &X_PANELS_HALF } else { &X_PANELS }
}

/// Row `r` of batch entry `b` begins at element `r * x_stride + b * x_batch` of `x`.
#[derive(Clone, Copy)]
pub struct Panels {
    pub x: Global<bf16>,
    pub rows: usize,
    pub k: usize,
    pub batch: usize,
    pub x_stride: usize,
    pub x_batch: usize,
    /// f16, each row times a power of two; bf16 otherwise.
    pub half: bool,
    /// [`panel_words`] of it.
    pub memory: GlobalMut<u32>,
}

/// Queues bringing x into panels. Returns them and, of f16, what undoes each row's factor.
pub fn x_panels(device: &Device, p: &Panels) -> Result<(Global<u32>, Global<f32>)> {
    let Panels { x, rows, k, batch, x_stride, x_batch, half, memory } = *p;
    let entry = entry(half);
    let name = entry.name();
    let [panels, factors] = words(rows, k, batch);
    holds(name, "memory", memory.len(), panels + factors)?;
    let span = rows.saturating_sub(1) * x_stride + batch.saturating_sub(1) * x_batch + k;
    holds(name, "x", x.len(), span)?;
    let aligned = [k, x_stride, x_batch].iter().all(|size| size.is_multiple_of(LANE_K));
    contract(name, aligned, || format!("k {k}, strides {x_stride} and {x_batch}: expected multiples of {LANE_K}"))?;
    let undo = match half {
        true => GlobalMut::from_raw(memory.part(panels, factors).addr(), factors),
        false => GlobalMut::EMPTY,
    };
    let strides = DenseRows {
        x_stride: x_stride as u64,
        x_batch: x_batch as u64,
        y_stride: 0,
        y_batch: 0,
        rows: rows as u32,
        rows_per_block: ROWS as u32,
        accumulate: 0,
    };
    let panels = memory.part(0, panels);
    let dims = Dims { grid: [rows as u32, batch as u32, 1], block: [THREADS, 1, 1], shared: 0 };
    device.launch_overlapping(entry, dims, PanelArgs { x, panels, undo, rows: strides, k: k as u32 })?;
    Ok((panels.as_ref(), undo.as_ref()))
}
