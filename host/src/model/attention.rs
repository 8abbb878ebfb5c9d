//! Absorbed multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434, section 2.1; K2.6's form of it).
//!
//! ```text
//! a     = rms(x; input_layernorm)
//! q     = q_b_proj rms(q_a_proj a; q_a_layernorm)             per head: nope | rope
//! t     = kv_a_proj_with_mqa a                                latent | rotary key
//! cache = bf16( rms(t latent; kv_a_layernorm) | rope(t key) )
//! q_abs = bf16( W_UK(h)^T q_nope | rope(q_rope) )             per head
//! z     = softmax(scale q_abs cache^T) cache[..latent]        committed rows, then ancestors
//! x    += o_proj concat_h( W_UV(h) z(h) )
//! ```

use cuda_std::{Global, GlobalMut};

use super::layer::Layer;
use super::{Model, Rows};
use crate::device::{Device, Result};
use crate::kernels;
use crate::linear::{Format, Many, Product, linear};

impl Model {
    pub(super) fn attention(
        &self,
        device: &Device,
        state: Global<u32>,
        batch: Rows,
        index: usize,
        layer: &Layer,
    ) -> Result<()> {
        let (s, c, w) = (&self.scratch, &self.config, &layer.attention);
        let (rows, heads, latent) = (batch.rows, c.num_attention_heads, c.kv_lora_rank);
        let (nope, value) = (c.qk_nope_head_dim, c.v_head_dim);
        let query = c.qk_head_dim();
        let rope = self.rope.tables();

        s.a.norm(device, s.x.view(), &layer.input_layernorm, rows, c.hidden_size, c.rms_norm_eps)?;
        linear(device, &self.product(batch, &w.kv_a_proj, s.a.acts(), s.kv.view_mut()))?;
        kernels::kv_append(
            device,
            kernels::KvAppend {
                t: s.kv.view(),
                weight: w.kv_a_layernorm.view(),
                eps: self.lora_norm_eps,
                rope,
                depths: batch.depths,
                state,
                cache: self.layer_cache(index),
                rows,
            },
        )?;

        linear(device, &self.product(batch, &w.q_a_proj, s.a.acts(), s.q_a.view_mut()))?;
        s.a.norm(device, s.q_a.view(), &w.q_a_layernorm, rows, c.q_lora_rank, self.lora_norm_eps)?;
        linear(device, &self.product(batch, &w.q_b_proj, s.a.acts(), s.q.f32.view_mut()))?;
        s.q.round(device, rows * heads * query)?;
        let mut nope_part = s.q.acts();
        if w.key_up_rounds {
            kernels::widen_bf16(device, s.q.bf16.view(), s.q_rounded.view_mut(), rows * heads * query)?;
            nope_part.f32 = s.q_rounded.view();
        }
        linear(
            device,
            &Product {
                weight: &w.key_up,
                x: nope_part,
                rows,
                x_stride: heads * query,
                x_batch: query,
                y: s.latent.f32.view_mut(),
                y_stride: heads * latent,
                y_batch: latent,
                accumulate: false,
                many: Many::AsFew,
            },
        )?;
        kernels::query(
            device,
            kernels::Query {
                q: s.q.f32.view(),
                q_lat: s.latent.f32.view(),
                rope,
                depths: batch.depths,
                state,
                out: s.q_abs.view_mut(),
                rows,
                heads,
                nope,
            },
        )?;
        // One of the two is read.
        let (out_f32, out_bf16) = match w.value_up.format() {
            Format::F32 => (s.latent.f32.view_mut(), GlobalMut::EMPTY),
            Format::Bf16 | Format::W4a16 { .. } => (GlobalMut::EMPTY, s.latent.bf16.view_mut()),
        };
        kernels::mla_attention(
            device,
            kernels::MlaAttention {
                q: s.q_abs.view(),
                cache: self.layer_cache(index),
                ancestors: batch.ancestors,
                state,
                out_f32,
                out_bf16,
                workspace: s.attention.view_mut(),
                rows,
                heads,
                scale: self.softmax_scale,
            },
        )?;

        linear(
            device,
            &Product {
                weight: &w.value_up,
                x: s.latent.acts(),
                rows,
                x_stride: heads * latent,
                x_batch: latent,
                y: s.heads.f32.view_mut(),
                y_stride: heads * value,
                y_batch: value,
                accumulate: false,
                many: Many::AsFew,
            },
        )?;
        s.heads.round(device, rows * heads * value)?;
        let o = self.product(batch, &w.o_proj, s.heads.acts(), s.x.view_mut());
        linear(device, &Product { accumulate: true, ..o })
    }

    /// Cache rows of layer `index`.
    fn layer_cache(&self, index: usize) -> kernels::Cache {
        let len = self.slots * self.kv.row_bytes();
        kernels::Cache { format: self.kv, bytes: self.cache.view_mut().part(index * len, len) }
    }
}
