//! Buffers between the operations of a pass, allocated once. A pass allocates nothing.

use cuda_std::bf16;

use super::{ActsBuffer, MAX_ROWS};
use crate::device::{Buffer, Device, Result};
use crate::kernels;
use crate::weights::ModelConfig;

/// Sized for [`MAX_ROWS`] rows of the widest use of each buffer.
pub struct Scratch {
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
    /// `[rows, hidden]`.
    pub shared: Buffer<f32>,
}

impl Scratch {
    pub fn new(device: &Device, c: &ModelConfig, slots: usize) -> Result<Self> {
        let rows = MAX_ROWS;
        let (heads, pairs) = (c.num_attention_heads, rows * c.num_experts_per_tok);
        let inner = (rows * c.intermediate_size)
            .max(pairs * c.moe_intermediate_size)
            .max(rows * c.moe_intermediate_size * c.n_shared_experts);
        // Fewer rows may be split into more parts.
        let workspace = (1..=rows).map(|r| kernels::mla_workspace(slots, r, heads)).max().unwrap_or(0);
        Ok(Self {
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
            shared: device.alloc(rows * c.hidden_size)?,
        })
    }
}
