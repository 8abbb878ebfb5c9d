//! The weights of a layer.

use super::{Model, Pass};
use crate::device::{Buffer, Device};
use crate::kernels::mla_plan;
use crate::linear::{
    ExpertWeights, Plan, Sorting, Weight, explain, explain_fast, explain_gate_up, explain_gated, explain_grouped,
};

/// One decoder layer.
pub(super) struct Layer {
    pub input_layernorm: Buffer<f32>,
    pub attention: Attention,
    pub post_attention_layernorm: Buffer<f32>,
    pub ffn: Ffn,
}

/// `self_attn.*`; `kv_b_proj` is kept as its two halves.
pub(super) struct Attention {
    pub q_a_proj: Weight,
    pub q_a_layernorm: Buffer<f32>,
    pub q_b_proj: Weight,
    pub kv_a_proj: Weight,
    pub kv_a_layernorm: Buffer<f32>,
    /// W_UK(h)^T, `[heads, latent, nope]`.
    pub key_up: Weight,
    /// Whether the input of `key_up` is rounded to bf16 although its weight is kept as f32.
    pub key_up_rounds: bool,
    /// W_UV(h), `[heads, value, latent]`.
    pub value_up: Weight,
    pub o_proj: Weight,
}

pub(super) enum Ffn {
    Dense(Box<Mlp>),
    Experts(Box<Experts>),
}

/// `gate_proj`, `up_proj` and `down_proj` of a dense layer or of the shared experts.
pub(super) struct Mlp {
    pub gate_proj: Weight,
    pub up_proj: Weight,
    pub down_proj: Weight,
}

/// `mlp.*` of a layer with experts.
pub(super) struct Experts {
    pub gate: Weight,
    pub e_score_correction_bias: Buffer<f32>,
    pub gate_proj: ExpertWeights,
    pub up_proj: ExpertWeights,
    pub down_proj: ExpertWeights,
    pub shared_experts: Option<Mlp>,
}

impl Model {
    /// Which kernel, tile and split each product of a pass over `rows` rows takes, and attention, one line each.
    pub fn explain(&self, device: &Device, pass: Pass, rows: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let as_few = |w: &Weight| format!("{}: {}", w.name(), explain(device, w, rows));
        let dense = |w: &Weight| match pass {
            Pass::Prefill => format!("{}: {}", w.name(), explain_fast(device, w, rows)),
            Pass::Verify => as_few(w),
        };
        let mlp = |m: &Mlp| match explain_gated(&m.gate_proj, &m.up_proj, rows) {
            Some(plan) => vec![format!("{}: {plan}", m.gate_proj.name()), dense(&m.down_proj)],
            None => [&m.gate_proj, &m.up_proj, &m.down_proj].map(dense).to_vec(),
        };
        for layer in &self.layers {
            let a = &layer.attention;
            lines.extend([&a.kv_a_proj, &a.q_a_proj, &a.q_b_proj].map(dense));
            lines.extend([&a.key_up, &a.value_up].map(as_few));
            lines.push(dense(&a.o_proj));
            match &layer.ffn {
                Ffn::Dense(m) => lines.extend(mlp(m)),
                Ffn::Experts(e) => {
                    lines.push(dense(&e.gate));
                    let pairs = rows * self.config.num_experts_per_tok;
                    let sorting = Sorting::of(&[&e.gate_proj, &e.up_proj, &e.down_proj], pairs);
                    let grouped = |w: &ExpertWeights, plans: Vec<Plan>| -> Vec<String> {
                        plans.iter().map(|plan| format!("{}: {plan}", w.name())).collect()
                    };
                    match explain_gate_up(&e.gate_proj, &e.up_proj, pairs, sorting) {
                        Some(plans) => lines.extend(grouped(&e.gate_proj, plans)),
                        None => {
                            for w in [&e.gate_proj, &e.up_proj] {
                                lines.extend(grouped(w, explain_grouped(w, pairs, sorting)));
                            }
                        }
                    }
                    lines.extend(grouped(&e.down_proj, explain_grouped(&e.down_proj, pairs, sorting)));
                    lines.extend(e.shared_experts.iter().flat_map(mlp));
                }
            }
        }
        // Of a prompt the last row alone has logits.
        match pass {
            Pass::Prefill => lines.push(format!("{}: {}", self.lm_head.name(), explain(device, &self.lm_head, 1))),
            Pass::Verify => lines.push(as_few(&self.lm_head)),
        }
        let plan = mla_plan(device, self.slots, rows, self.config.num_attention_heads);
        let (kernel, parts) = (plan.block.kernel(self.kv).name(), plan.parts);
        lines.push(format!("attention over a cache in {}: {kernel}, context in up to {parts} parts", self.kv));
        lines
    }
}
