//! The feed-forward half of a layer: SwiGLU, dense or as a mixture of experts with one shared expert.
//!
//! ```text
//! a   = rms(x; post_attention_layernorm)
//! F(a) = down( silu(gate a) * (up a) )
//! dense:  x += F(a)
//! experts: p = sigmoid(W_gate bf16(a)); T = top-k of p + bias; g = p / sum_T p * scaling
//!          x += sum_{e in T} g_e F_e(a) + F_shared(a)
//! ```

use cuda_std::{Global, GlobalMut};

use super::layer::{Experts, Ffn, Layer, Mlp};
use super::{ActsBuffer, Model, Pass, Rows};
use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, Acts};
use crate::linear::{GateUp, Gated, Grouped, Product, Sorting, gate_up, gated, grouped_linear, linear};

impl Model {
    pub(super) fn ffn(&self, device: &Device, state: GlobalMut<u32>, batch: Rows, layer: &Layer) -> Result<()> {
        let (s, c, rows) = (&self.scratch, &self.config, batch.rows);
        s.a.norm(device, s.x.view(), &layer.post_attention_layernorm, rows, c.hidden_size, c.rms_norm_eps)?;
        match &layer.ffn {
            Ffn::Dense(mlp) => {
                self.gated(device, mlp, batch, [&s.gate, &s.up], &s.act)?;
                let down = self.product(batch, &mlp.down_proj, s.act.acts(), s.x.view_mut());
                linear(device, &Product { accumulate: true, ..down })
            }
            Ffn::Experts(experts) => self.experts(device, state, batch, experts),
        }
    }

    /// `silu(gate a) * (up a)` of the scratch activations `a`; both factors stand in `apart` where they must.
    fn gated(&self, device: &Device, mlp: &Mlp, batch: Rows, apart: [&Buffer<f32>; 2], act: &ActsBuffer) -> Result<()> {
        let a = self.scratch.a.acts();
        let gate = self.product(batch, &mlp.gate_proj, a, apart[0].view_mut());
        let up = self.product(batch, &mlp.up_proj, a, apart[1].view_mut());
        gated(device, &Gated { gate, up, out_f32: act.f32.view_mut(), out_bf16: act.bf16.view_mut() })
    }

    /// The shared experts run beside the others: a launch of either leaves multiprocessors idle at its beginning and
    /// its end. Not in a prompt, whose products need memory of their own and fill the device.
    fn experts(&self, device: &Device, state: GlobalMut<u32>, batch: Rows, w: &Experts) -> Result<()> {
        let (s, c) = (&self.scratch, &self.config);
        let routed = || self.routed_experts(device, state, batch, w);
        let shared = match &w.shared_experts {
            None => {
                routed()?;
                Global::EMPTY
            }
            Some(mlp) => {
                let shared = || {
                    self.gated(device, mlp, batch, [&s.shared_gate, &s.shared_up], &s.shared_act)?;
                    let act = s.shared_act.acts();
                    linear(device, &self.product(batch, &mlp.down_proj, act, s.shared.view_mut()))
                };
                match batch.pass {
                    Pass::Verify => device.beside(shared, routed)?,
                    Pass::Prefill => routed().and_then(|()| shared())?,
                }
                s.shared.view()
            }
        };
        kernels::combine(
            device,
            kernels::Combine {
                y: s.routed.view(),
                weights: s.expert_weights.view(),
                shared,
                x: s.x.view_mut(),
                rows: batch.rows,
                top_k: c.num_experts_per_tok,
                width: c.hidden_size,
            },
        )
    }

    /// The products of each token with its experts.
    fn routed_experts(&self, device: &Device, state: GlobalMut<u32>, batch: Rows, w: &Experts) -> Result<()> {
        let (s, c, rows) = (&self.scratch, &self.config, batch.rows);
        let (experts, top_k) = (c.n_routed_experts, c.num_experts_per_tok);
        let pairs = rows * top_k;
        // The router's input is rounded in every bundle, whatever the format of its weight.
        kernels::widen_bf16(device, s.a.bf16.view(), s.rounded.view_mut(), rows * c.hidden_size)?;
        let input = Acts { f32: s.rounded.view(), bf16: s.a.bf16.view() };
        linear(device, &self.product(batch, &w.gate, input, s.router.view_mut()))?;
        kernels::route(
            device,
            kernels::Route {
                logits: s.router.view(),
                bias: w.e_score_correction_bias.view(),
                ids: s.expert_ids.view_mut(),
                weights: s.expert_weights.view_mut(),
                state,
                rows,
                experts,
                top_k,
                scaling: c.routed_scaling_factor,
                norm: c.norm_topk_prob,
            },
        )?;
        let ids = s.expert_ids.view();
        let sorting = Sorting::of(&[&w.gate_proj, &w.up_proj, &w.down_proj], pairs);
        if let Sorting::Before(tile) = sorting {
            let (order, tiles) = (s.order.view_mut(), s.tiles.view_mut());
            kernels::expert_sort(device, kernels::ExpertSort { ids, order, tiles, pairs, experts, tile })?;
        }
        let (order, tiles) = (s.order.view(), s.tiles.view());
        gate_up(
            device,
            &GateUp {
                gate: &w.gate_proj,
                up: &w.up_proj,
                x: s.a.acts(),
                x_rows_per_token: top_k,
                sorting,
                ids,
                order,
                tiles,
                pairs,
                out_f32: s.act.f32.view_mut(),
                out_bf16: s.act.bf16.view_mut(),
                apart: [s.gate.view_mut(), s.up.view_mut()],
            },
        )?;
        let (weights, x, y) = (&w.down_proj, s.act.acts(), s.routed.view_mut());
        let settled = true;
        let down = Grouped { weights, x, x_rows_per_token: 1, sorting, ids, order, tiles, pairs, settled, y };
        grouped_linear(device, &down)
    }
}
