//! Products with weights. The model says `linear(weight, x, y)`; format, kernel, tile and split are chosen here.
//!
//! Start at `dense.rs` (whole rows) and `grouped.rs` (rows gathered by expert). `variant.rs` lists the dense kernels
//! and chooses among them, `plan.rs` says how they run, `format.rs` what weights look like on the host; `weight.rs` and
//! `pool.rs` keep them on the device, one pool a format. No other room launches a product kernel.

mod dense;
mod format;
mod gate_up;
mod gated;
mod grouped;
mod panels;
mod plan;
mod pool;
mod tiled;
mod upload;
mod variant;
mod weight;

pub use dense::{Product, linear, linear_by};
pub use format::{Format, GROUPS, HostData, HostWeight, ScaleType};
pub use gate_up::{GateUp, explain_gate_up, gate_up};
pub use gated::{Gated, explain_gated, gated};
pub use grouped::{ExpertWeights, Grouped, grouped_linear};
pub use panels::{Panels, panel_words, x_panels};
pub use plan::{
    Plan, Sorting, explain, explain_fast, explain_grouped, gate_up_kernel, gated_kernel, grouped_kernel, kernel,
};
pub use tiled::{Many, Tiles};
pub use upload::Upload;
pub use variant::Variant;
pub use weight::Weight;
