//! Launcher of [`gpu::kernels::route`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::RouteArgs;
use gpu::kernels::route as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// The `top_k` experts of each row and their weights.
pub struct Route {
    /// `[rows, experts]`.
    pub logits: Global<f32>,
    /// `[experts]`, for the choice only.
    pub bias: Global<f32>,
    /// `[rows, top_k]`, descending by score plus bias.
    pub ids: GlobalMut<u32>,
    /// `[rows, top_k]`.
    pub weights: GlobalMut<f32>,
    /// Takes the error of a row with NaN.
    pub state: GlobalMut<u32>,
    pub rows: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Factor of every weight, applied once.
    pub scaling: f32,
    /// Whether the weights are divided by their sum.
    pub norm: bool,
}

/// Queues the routing of `rows` rows.
pub fn route(device: &Device, p: Route) -> Result<()> {
    let name = kernel::ROUTE.name();
    let most = kernel::MAX_EXPERTS;
    contract(name, (1..=most).contains(&p.experts), || format!("{} experts; 1 to {most} are possible", p.experts))?;
    contract(name, (1..=p.experts).contains(&p.top_k), || format!("top {} of {} experts", p.top_k, p.experts))?;
    contract(name, p.bias.len() == p.experts, || {
        format!("bias has {}, there are {} experts", p.bias.len(), p.experts)
    })?;
    holds(name, "logits", p.logits.len(), p.rows * p.experts)?;
    holds(name, "ids", p.ids.len(), p.rows * p.top_k)?;
    holds(name, "weights", p.weights.len(), p.rows * p.top_k)?;
    holds(name, "state", p.state.len(), STATE_WORDS)?;
    let args = RouteArgs {
        logits: p.logits,
        bias: p.bias,
        ids: p.ids,
        weights: p.weights,
        state: p.state,
        experts: p.experts as u32,
        top_k: p.top_k as u32,
        scaling: p.scaling,
        norm: u32::from(p.norm),
    };
    let dims = Dims { grid: [p.rows as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::ROUTE, dims, args)
}
