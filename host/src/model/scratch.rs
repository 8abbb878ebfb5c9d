//! Buffers between the operations of a pass, allocated once. A pass allocates nothing.

use cuda_std::bf16;

use super::ActsBuffer;
use crate::device::{Buffer, Device, Result};
use crate::kernels;
use crate::linear::panel_words;
use crate::weights::ModelConfig;

/// Sized for the rows of a pass in the widest use of each buffer.
pub struct Scratch {
    /// What products of many rows of a prompt bring x into.
    pub panels: Buffer<u32>,
    /// Residual stream, `[rows, hidden]`.
    pub x: Buffer<f32>,
    /// A norm's output, `[rows, hidden]` or `[rows, q_lora]`.
    pub a: ActsBuffer,
    /// The bf16 half of `a`, widened: the router's input.
    pub rounded: Buffer<f32>,
    pub q_a: Buffer<f32>,
    /// `[rows, heads, nope + rope]`.
    pub q: ActsBuffer,
    /// The bf16 half of `q`, widened.
    pub q_rounded: Buffer<f32>,
    /// `[rows, kv_lora + rope]`.
    pub kv: Buffer<f32>,
    /// Absorbed query before rounding, then attention's output: `[rows, heads, kv_lora]`.
    pub latent: ActsBuffer,
    pub q_abs: Buffer<bf16>,
    /// Partial results of attention's context splits.
    pub attention: Buffer<f32>,
    /// `[rows, heads, value]`.
    pub heads: ActsBuffer,
    pub gate: Buffer<f32>,
    pub up: Buffer<f32>,
    pub act: ActsBuffer,
    pub router: Buffer<f32>,
    pub expert_ids: Buffer<u32>,
    pub expert_weights: Buffer<f32>,
    pub order: Buffer<u32>,
    pub tiles: Buffer<u32>,
    /// `[rows, top_k, hidden]`.
    pub routed: Buffer<f32>,
    /// Of the shared experts, which run beside the others: as `gate`, `up` and `act`; then `[rows, hidden]`.
    pub shared_gate: Buffer<f32>,
    pub shared_up: Buffer<f32>,
    pub shared_act: ActsBuffer,
    pub shared: Buffer<f32>,
}

/// Values of the widest feed-forward of `rows` rows.
fn inner(c: &ModelConfig, rows: usize) -> usize {
    let pairs = rows * c.num_experts_per_tok;
    (rows * c.intermediate_size).max(pairs * c.moe_intermediate_size)
}

/// The same of the shared experts.
fn inner_shared(c: &ModelConfig, rows: usize) -> usize {
    rows * c.moe_intermediate_size * c.n_shared_experts
}

/// Words for the panels of the widest rows that a product of a prompt has.
fn panels(c: &ModelConfig, rows: usize) -> usize {
    let shared = c.moe_intermediate_size * c.n_shared_experts;
    let widest = [c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.v_head_dim, c.intermediate_size, shared];
    panel_words(rows, widest.into_iter().max().unwrap_or(0), 1)
}

/// Values of attention's workspace.
fn workspace(c: &ModelConfig, slots: usize, rows: usize) -> usize {
    // Fewer rows may be split into more parts.
    (1..=rows).map(|r| kernels::mla_workspace(slots, r, c.num_attention_heads)).max().unwrap_or(0)
}

/// Bytes that [`Scratch::new`] allocates.
pub fn scratch_bytes(c: &ModelConfig, slots: usize, rows: usize) -> usize {
    const WORD: usize = size_of::<f32>();
    // Activations in both roundings.
    const ACTS: usize = WORD + size_of::<bf16>();
    let (heads, pairs) = (rows * c.num_attention_heads, rows * c.num_experts_per_tok);
    let (hidden, key) = (rows * c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim);
    let attention = heads * c.qk_head_dim() * (ACTS + WORD)
        + heads * c.kv_lora_rank * ACTS
        + heads * key * size_of::<bf16>()
        + heads * c.v_head_dim * ACTS
        + workspace(c, slots, rows) * WORD
        + rows * (key + c.q_lora_rank) * WORD
        + panels(c, rows) * WORD;
    let experts = rows * c.n_routed_experts * WORD + (6 * pairs + 1) * WORD + pairs * c.hidden_size * WORD;
    let stream = 3 * hidden * WORD + rows * c.hidden_size.max(c.q_lora_rank) * ACTS;
    attention + experts + stream + (inner(c, rows) + inner_shared(c, rows)) * (2 * WORD + ACTS)
}

impl Scratch {
    pub fn new(device: &Device, c: &ModelConfig, slots: usize, rows: usize) -> Result<Self> {
        let (heads, pairs) = (c.num_attention_heads, rows * c.num_experts_per_tok);
        let (inner, shared, workspace) = (inner(c, rows), inner_shared(c, rows), workspace(c, slots, rows));
        Ok(Self {
            panels: device.alloc(panels(c, rows))?,
            x: device.alloc(rows * c.hidden_size)?,
            a: ActsBuffer::new(device, rows * c.hidden_size.max(c.q_lora_rank))?,
            rounded: device.alloc(rows * c.hidden_size)?,
            q_a: device.alloc(rows * c.q_lora_rank)?,
            q: ActsBuffer::new(device, rows * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))?,
            q_rounded: device.alloc(rows * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))?,
            kv: device.alloc(rows * (c.kv_lora_rank + c.qk_rope_head_dim))?,
            latent: ActsBuffer::new(device, rows * heads * c.kv_lora_rank)?,
            q_abs: device.alloc(rows * heads * (c.kv_lora_rank + c.qk_rope_head_dim))?,
            attention: device.alloc(workspace)?,
            heads: ActsBuffer::new(device, rows * heads * c.v_head_dim)?,
            gate: device.alloc(inner)?,
            up: device.alloc(inner)?,
            act: ActsBuffer::new(device, inner)?,
            router: device.alloc(rows * c.n_routed_experts)?,
            expert_ids: device.alloc(pairs)?,
            expert_weights: device.alloc(pairs)?,
            order: device.alloc(pairs)?,
            tiles: device.alloc(1 + 3 * pairs)?,
            routed: device.alloc(pairs * c.hidden_size)?,
            shared_gate: device.alloc(shared)?,
            shared_up: device.alloc(shared)?,
            shared_act: ActsBuffer::new(device, shared)?,
            shared: device.alloc(rows * c.hidden_size)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Mode;
    use crate::weights::Bundle;

    /// The plan's sum is what is allocated.
    #[test]
    fn bytes_of_all_buffers() {
        let bundle = Bundle::open(std::path::Path::new("bundles/k26-tiny-int4.kdtr")).unwrap();
        for (slots, rows) in [(100, 64), (5000, 96)] {
            let s = Scratch::new(&Device::cpu(Mode::Fast), bundle.config(), slots, rows).unwrap();
            let acts = [&s.a, &s.q, &s.latent, &s.heads, &s.act, &s.shared_act].map(|a| a.f32.bytes() + a.bf16.bytes());
            let floats = [
                &s.x,
                &s.rounded,
                &s.q_a,
                &s.q_rounded,
                &s.kv,
                &s.attention,
                &s.gate,
                &s.up,
                &s.router,
                &s.expert_weights,
                &s.routed,
                &s.shared_gate,
                &s.shared_up,
                &s.shared,
            ];
            let words = [&s.panels, &s.expert_ids, &s.order, &s.tiles].map(Buffer::bytes);
            let sum = acts.iter().sum::<usize>() + floats.iter().map(|b| b.bytes()).sum::<usize>();
            let sum = sum + words.iter().sum::<usize>() + s.q_abs.bytes();
            assert_eq!(scratch_bytes(bundle.config(), slots, rows), sum, "{slots} slots, {rows} rows");
        }
    }
}
