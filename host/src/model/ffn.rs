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
use super::{Model, Rows};
use crate::device::{Device, Result};
use crate::kernels::{self, Acts};
use crate::linear::{GateUp, Grouped, Product, gate_up, grouped_linear, linear, tile_of_experts};

impl Model {
    pub(super) fn ffn(&self, device: &Device, state: GlobalMut<u32>, batch: Rows, layer: &Layer) -> Result<()> {
        let (s, c, rows) = (&self.scratch, &self.config, batch.rows);
        s.a.norm(device, s.x.view(), &layer.post_attention_layernorm, rows, c.hidden_size, c.rms_norm_eps)?;
        match &layer.ffn {
            Ffn::Dense(mlp) => {
                let act = self.gate_up(device, mlp, batch)?;
                let down = self.product(batch, &mlp.down_proj, act, s.x.view_mut());
                linear(device, &Product { accumulate: true, ..down })
            }
            Ffn::Experts(experts) => self.experts(device, state, batch, experts),
        }
    }

    /// `silu(gate a) * (up a)` of the scratch activations `a`.
    fn gate_up(&self, device: &Device, mlp: &Mlp, batch: Rows) -> Result<Acts> {
        let s = &self.scratch;
        linear(device, &self.product(batch, &mlp.gate_proj, s.a.acts(), s.gate.view_mut()))?;
        linear(device, &self.product(batch, &mlp.up_proj, s.a.acts(), s.up.view_mut()))?;
        s.act.swiglu(device, &s.gate, &s.up, batch.rows, mlp.gate_proj.n())?;
        Ok(s.act.acts())
    }

    fn experts(&self, device: &Device, state: GlobalMut<u32>, batch: Rows, w: &Experts) -> Result<()> {
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
        let tile = tile_of_experts(&[&w.gate_proj, &w.up_proj, &w.down_proj], pairs);
        kernels::expert_sort(
            device,
            kernels::ExpertSort {
                ids: s.expert_ids.view(),
                order: s.order.view_mut(),
                tiles: s.tiles.view_mut(),
                pairs,
                experts,
                tile,
            },
        )?;
        let (order, tiles) = (s.order.view(), s.tiles.view());
        gate_up(
            device,
            &GateUp {
                gate: &w.gate_proj,
                up: &w.up_proj,
                x: s.a.acts(),
                x_rows_per_token: top_k,
                order,
                tiles,
                tile,
                pairs,
                out_f32: s.act.f32.view_mut(),
                out_bf16: s.act.bf16.view_mut(),
                apart: [s.gate.view_mut(), s.up.view_mut()],
            },
        )?;
        let (weights, x, y) = (&w.down_proj, s.act.acts(), s.routed.view_mut());
        let settled = true;
        grouped_linear(device, &Grouped { weights, x, x_rows_per_token: 1, order, tiles, tile, pairs, settled, y })?;

        let shared = match &w.shared_experts {
            None => Global::EMPTY,
            Some(mlp) => {
                let act = self.gate_up(device, mlp, batch)?;
                linear(device, &self.product(batch, &mlp.down_proj, act, s.shared.view_mut()))?;
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
                rows,
                top_k,
                width: c.hidden_size,
            },
        )
    }
}
