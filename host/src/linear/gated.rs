//! `gated`: `silu(gate x) * (up x)` of dense rows, the first half of a SwiGLU.

use cuda_std::{Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{GatedArgs, StreamShape};

use super::plan::{Plan, gated_entry};
use super::{Product, Weight, linear};
use crate::device::{Device, Result};
use crate::kernels::{Swiglu, contract, swiglu};

/// Who reports matrices that do not fit together.
const GATED: &str = "gated";

/// Both products of the same rows, and what becomes of them.
pub struct Gated<'a> {
    /// Their `y` are where the products stand before they are combined, rows one after the other; not used where one
    /// kernel does all.
    pub gate: Product<'a>,
    pub up: Product<'a>,
    /// `[rows, n]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, n]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
}

/// How [`gated`] would run with `rows` rows, where one kernel multiplies both.
pub fn explain_gated(gate: &Weight, up: &Weight, rows: usize) -> Option<Plan> {
    together(gate, up, rows).map(|(_, plan)| plan)
}

fn together(gate: &Weight, up: &Weight, rows: usize) -> Option<(&'static Kernel<GatedArgs>, Plan)> {
    let entry = gated_entry(gate.pool().kind, gate.n(), rows)?;
    (gate.pool().kind == up.pool().kind).then_some(())?;
    Some((entry, Plan::gated(gate, rows, entry.name())?))
}

/// Queues both products and what combines them: one launch where rows are few and both have one format, or three. The
/// results have the same bits either way.
pub fn gated(device: &Device, p: &Gated) -> Result<()> {
    let Gated { gate, up, out_f32, out_bf16 } = p;
    let (rows, width) = (gate.rows, gate.weight.n());
    let sizes = |p: &Product| (p.rows, p.weight.n(), p.weight.k(), p.weight.batch(), p.x_stride, p.accumulate);
    let stored = |p: &Product| p.weight.batch() == 1 && !p.accumulate && p.y_stride == width;
    let read = |p: &Product| [p.x.f32.addr(), p.x.bf16.addr()];
    contract(GATED, sizes(gate) == sizes(up) && stored(gate) && stored(up) && read(gate) == read(up), || {
        let what = |p: &Product| {
            let (name, batch, n, k) = (p.weight.name(), p.weight.batch(), p.weight.n(), p.weight.k());
            let [rows, from, to] = [p.rows, p.x_stride, p.y_stride];
            format!("`{name}` [{batch}, {n}, {k}] x {rows} rows of x {from} apart, of y {to} apart")
        };
        format!(
            "{} and {}: expected one matrix each, of one size, for the same x, y without gaps",
            what(gate),
            what(up)
        )
    })?;
    if rows == 0 {
        return Ok(());
    }
    for (what, len) in [("the f32 output", out_f32.len()), ("the bf16 output", out_bf16.len())] {
        contract(GATED, len == 0 || len >= rows * width, || {
            format!("`{}` x {rows} rows: {what} holds {len}, expected {}", gate.weight.name(), rows * width)
        })?;
    }
    let Some((entry, plan)) = together(gate.weight, up.weight, rows) else {
        linear(device, gate)?;
        linear(device, up)?;
        let read = |y: GlobalMut<f32>| Global::from_raw(y.addr(), y.len());
        let (gate, up, stride) = (read(gate.y), read(up.y), width);
        return swiglu(device, Swiglu { gate, up, out_f32: *out_f32, out_bf16: *out_bf16, rows, width, stride });
    };
    gate.check_rows(&plan)?;
    let args = GatedArgs {
        gate: gate.weight.pool().words(),
        up: up.weight.pool().words(),
        x: gate.x.bf16,
        out_f32: *out_f32,
        out_bf16: *out_bf16,
        shape: StreamShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split as u32 },
        rows: gate.dense_rows(&plan),
    };
    device.launch_overlapping(entry, plan.dims(device), args)
}
