//! `gate_up`: `silu(gate x) * (up x)` of rows gathered by expert, the first half of an expert's SwiGLU.

use cuda_std::{Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{GateUpArgs, StreamShape};

use super::grouped::{ExpertPool, Gathered, aligned_x};
use super::plan::{Plan, Sorting, gate_up_entry};
use super::pool::Kind;
use super::{ExpertWeights, Grouped, grouped_linear};
use crate::device::{Device, Result};
use crate::kernels::{Acts, Swiglu, contract, swiglu};

/// Who reports matrices that do not fit together.
const GATE_UP: &str = "gate_up";

/// `out[pair, :] = silu(gate[e] x) * (up[e] x)`, e the expert of the pair, x row `pair / x_rows_per_token`.
pub struct GateUp<'a> {
    pub gate: &'a ExpertWeights,
    pub up: &'a ExpertWeights,
    /// As in [`Grouped`], as are the six that follow.
    pub x: Acts,
    pub x_rows_per_token: usize,
    pub sorting: Sorting,
    pub ids: Global<u32>,
    pub order: Global<u32>,
    pub tiles: Global<u32>,
    pub pairs: usize,
    /// `[pairs, n]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[pairs, n]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
    /// `[pairs, n]` each, where both products stand before they are combined. Not used where one kernel does all.
    pub apart: [GlobalMut<f32>; 2],
}

/// Whether one kernel multiplies both: every expert's two matrices are of one kind, and none is f32.
fn together(gate: &ExpertWeights, up: &ExpertWeights) -> bool {
    gate.kinds() == up.kinds() && !gate.kinds().contains(&Kind::F32)
}

fn plan(experts: &ExpertPool, weights: &ExpertWeights, pairs: usize, sorting: Sorting) -> Option<Plan> {
    Plan::gate_up(experts, weights.n(), weights.k(), pairs, sorting)
}

/// How [`gate_up`] would run with `pairs` pairs, where one kernel multiplies both.
pub fn explain_gate_up(gate: &ExpertWeights, up: &ExpertWeights, pairs: usize, sorting: Sorting) -> Option<Vec<Plan>> {
    together(gate, up).then(|| gate.pools().iter().filter_map(|experts| plan(experts, gate, pairs, sorting)).collect())
}

/// Queues both products and what combines them: one launch for each format present, or three where the formats of an
/// expert's two matrices differ or are f32. The results have the same bits either way.
pub fn gate_up(device: &Device, p: &GateUp) -> Result<()> {
    let (n, k) = (p.gate.n(), p.gate.k());
    contract(GATE_UP, (p.up.n(), p.up.k(), p.up.len()) == (n, k, p.gate.len()), || {
        let (up, gate) = (p.up, p.gate);
        format!(
            "`{}` [{}, {n}, {k}] and `{}` [{}, {}, {}]",
            gate.name(),
            gate.len(),
            up.name(),
            up.len(),
            up.n(),
            up.k()
        )
    })?;
    if p.pairs == 0 {
        return Ok(());
    }
    if !together(p.gate, p.up) {
        return apart(device, p);
    }
    for (gate, up) in p.gate.pools().iter().zip(p.up.pools()) {
        // `together` has seen that none is f32.
        let Some(entry) = gate_up_entry(gate.pool.kind, p.sorting) else { continue };
        let Some(plan) = plan(gate, p.gate, p.pairs, p.sorting) else { continue };
        p.launch(device, plan, entry, [gate, up])?;
    }
    Ok(())
}

impl GateUp<'_> {
    fn launch(
        &self,
        device: &Device,
        plan: Plan,
        entry: &Kernel<GateUpArgs>,
        [gate, up]: [&ExpertPool; 2],
    ) -> Result<()> {
        let Self { x_rows_per_token, sorting, ids, order, tiles, pairs, out_f32, out_bf16, .. } = *self;
        let (name, x, weights) = (entry.name(), self.x.bf16, self.gate);
        let gathered = Gathered { weights, x_len: x.len(), x_rows_per_token, pairs, sorting, ids, order, tiles };
        gathered.check(name, plan.format, gate.pool.kind)?;
        aligned_x(name, weights.name(), x.addr())?;
        for (what, len) in [("the f32 output", out_f32.len()), ("the bf16 output", out_bf16.len())] {
            if len > 0 {
                gathered.holds(name, what, len, pairs * plan.n)?;
            }
        }
        let args = GateUpArgs {
            gate: gate.pool.words(),
            up: up.pool.words(),
            x,
            out_f32,
            out_bf16,
            shape: StreamShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split as u32 },
            // Gate and up are of one kind, and so in the same slots.
            rows: gathered.rows(gate, false),
            up_slots: up.slots.view(),
        };
        device.launch_overlapping(entry, plan.dims(device), args)
    }
}

fn apart(device: &Device, p: &GateUp) -> Result<()> {
    let GateUp { x, x_rows_per_token, sorting, ids, order, tiles, pairs, apart, .. } = *p;
    for (weights, y) in [p.gate, p.up].into_iter().zip(apart) {
        grouped_linear(
            device,
            &Grouped { weights, x, x_rows_per_token, sorting, ids, order, tiles, pairs, settled: false, y },
        )?;
    }
    let read = |y: GlobalMut<f32>| Global::from_raw(y.addr(), y.len());
    let (gate, up, width) = (read(apart[0]), read(apart[1]), p.gate.n());
    let (out_f32, out_bf16) = (p.out_f32, p.out_bf16);
    swiglu(device, Swiglu { gate, up, out_f32, out_bf16, rows: pairs, width, stride: width })
}
