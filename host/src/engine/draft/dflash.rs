//! The DFlash block drafter (arXiv 2602.06036): one bidirectional pass over `[bonus, MASK x L]` that attends the
//! target's hidden states.
//!
//! ```text
//! ctx   = hidden_norm(fc(concat of tapped hidden states))         one row a committed token
//! layer: K = [k_proj ctx ; k_proj a], V likewise, k_norm and RoPE on K       a = rms(h; input_layernorm)
//!        h += o_proj attention(RoPE(q_norm(q_proj a)), K, V)      every block row sees all of it,
//!                                                                 in a sliding layer a window up to itself
//!        h += down(silu(gate b) * up b)                           b = rms(h; post_attention_layernorm)
//! logits of depths 1..=L = lm_head rms(h[1..]; norm)              embedding and head are the target's
//! ```
//!
//! Keys and values of committed tokens stay in the drafter's cache, slots `0..S`; the block's rows lie behind them and
//! the next round overwrites them, which is how the cache is cut back.

mod stages;

use cuda_std::{Global, bf16};

use super::super::round::Round;
use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, Acts};
use crate::linear::{Gated, Product, Upload, Weight, gated, linear};
use crate::model::{ActsBuffer, Model, ModelError, Rope, Taps, norm_weight, rope};
use crate::weights::{Bundle, DrafterConfig};

pub use stages::DraftStages;

/// Candidates of a depth at most: what the top-K kernel returns. A tree of B nodes can want B of them.
pub const MAX_CANDIDATES: usize = gpu::kernels::top_k::MAX_K;

pub struct DFlash {
    config: DrafterConfig,
    pub taps: Taps,
    fc: Weight,
    hidden_norm: Buffer<f32>,
    norm: Buffer<f32>,
    layers: Vec<Layer>,
    rope: Rope,
    scratch: Scratch,
}

struct Layer {
    input_layernorm: Buffer<f32>,
    q_proj: Weight,
    k_proj: Weight,
    v_proj: Weight,
    q_norm: Buffer<f32>,
    k_norm: Buffer<f32>,
    o_proj: Weight,
    post_attention_layernorm: Buffer<f32>,
    gate_proj: Weight,
    up_proj: Weight,
    down_proj: Weight,
    /// Positions that a row of the block sees; all where there is none.
    window: Option<usize>,
    /// Rotated keys and values, `[slots, kv_heads * head_dim]`.
    keys: Buffer<bf16>,
    values: Buffer<bf16>,
}

struct Scratch {
    /// `[bonus, MASK x L]`; the bonus comes from the state.
    ids: Buffer<i32>,
    /// Features of the accepted path, `[rows, taps * hidden]`.
    features: ActsBuffer,
    h: Buffer<f32>,
    a: ActsBuffer,
    q: Buffer<f32>,
    kv: Buffer<f32>,
    q_rotated: Buffer<bf16>,
    attended: ActsBuffer,
    gate: Buffer<f32>,
    up: Buffer<f32>,
    act: ActsBuffer,
    logits: Buffer<f32>,
    /// Workspace of the top-K.
    top_k: Buffer<u32>,
    sums: Buffer<f32>,
}

impl DFlash {
    /// Loads the drafter of `bundle` for `target`, to propose `candidates` tokens a depth.
    pub fn load(
        device: &Device,
        bundle: &Bundle,
        config: DrafterConfig,
        target: &Model,
        candidates: usize,
    ) -> std::result::Result<Self, ModelError> {
        let slots = target.slots + config.block_size;
        let upload = Upload::new(device)?;
        let weight = |name: &str| crate::model::load_weight(&upload, bundle, &format!("drafter.{name}"));
        let vector = |name: &str| norm_weight(device, bundle, &format!("drafter.{name}"));
        let kv_width = config.num_key_value_heads * config.head_dim;
        let layer = |i: usize| -> std::result::Result<Layer, ModelError> {
            let weight = |part: &str| weight(&format!("layers.{i}.{part}.weight"));
            let vector = |part: &str| vector(&format!("layers.{i}.{part}.weight"));
            Ok(Layer {
                input_layernorm: vector("input_layernorm")?,
                q_proj: weight("self_attn.q_proj")?,
                k_proj: weight("self_attn.k_proj")?,
                v_proj: weight("self_attn.v_proj")?,
                q_norm: vector("self_attn.q_norm")?,
                k_norm: vector("self_attn.k_norm")?,
                o_proj: weight("self_attn.o_proj")?,
                post_attention_layernorm: vector("post_attention_layernorm")?,
                gate_proj: weight("mlp.gate_proj")?,
                up_proj: weight("mlp.up_proj")?,
                down_proj: weight("mlp.down_proj")?,
                window: config.window(i),
                keys: device.zeros(slots * kv_width)?,
                values: device.zeros(slots * kv_width)?,
            })
        };
        let hidden = config.hidden_size;
        let table = rope::rope_table(config.head_dim, config.rope_theta, config.rope_scaling.as_ref(), slots);
        let layers = config.dflash_config.target_layer_ids.clone();
        let taps = Taps { out: device.zeros(target.rows * layers.len() * hidden)?, layers };
        Ok(Self {
            fc: weight("fc.weight")?,
            hidden_norm: vector("hidden_norm.weight")?,
            norm: vector("norm.weight")?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<std::result::Result<_, _>>()?,
            rope: Rope::new(device, &table)?,
            scratch: Scratch::new(device, &config, target.rows, taps.layers.len(), candidates)?,
            taps,
            config,
        })
    }

    /// Drafted positions, the tree's largest depth.
    pub fn depth(&self) -> usize {
        self.config.block_size - 1
    }

    /// Adds the committed rows' features to the drafter's cache: rows `0..rows` of the taps, at positions S and on.
    /// With `path`, the rows of the accepted path instead; those past its end repeat the root and are overwritten
    /// later.
    pub fn ingest(&self, device: &Device, state: Global<u32>, rows: usize, path: bool) -> Result<()> {
        let s = &self.scratch;
        let width = self.taps.layers.len() * self.config.hidden_size;
        let features = if path {
            let (src, dst) = (self.taps.out.view(), s.features.f32.view_mut());
            kernels::gather_rows(device, kernels::GatherRows { src, dst, state, count: rows, width })?;
            s.features.f32.view()
        } else {
            self.taps.out.view()
        };
        let out = s.features.bf16.view_mut();
        kernels::round_bf16(device, kernels::RoundBf16 { x: features, out, n: rows * width })?;
        let acts = Acts { f32: features, bf16: s.features.bf16.view() };
        linear(device, &Product::plain(&self.fc, acts, rows, s.h.view_mut()))?;
        self.normed(device, s.h.view(), &self.hidden_norm, rows)?;
        self.layers.iter().try_for_each(|layer| self.keys_values(device, state, layer, rows))
    }

    /// Leaves the best candidates of each depth and their log-probabilities in the round.
    pub fn propose(&self, device: &Device, target: &Model, round: &Round) -> Result<()> {
        let (s, c, state) = (&self.scratch, &self.config, round.state.view());
        let (rows, hidden) = (c.block_size, c.hidden_size);
        kernels::embed(
            device,
            kernels::Embed {
                ids: s.ids.view(),
                table: target.embedding.table(),
                state,
                x: s.h.view_mut(),
                rows,
                width: hidden,
                vocab: c.vocab_size,
            },
        )?;
        self.layers.iter().try_for_each(|layer| self.block(device, state, layer))?;
        self.normed(device, s.h.view().part(hidden, self.depth() * hidden), &self.norm, self.depth())?;
        linear(device, &Product::plain(&target.lm_head, s.a.acts(), self.depth(), s.logits.view_mut()))?;
        kernels::top_k(
            device,
            kernels::TopK {
                logits: s.logits.view(),
                ids: round.draft_ids.view_mut(),
                logp: round.draft_logp.view_mut(),
                state: round.state.view_mut(),
                workspace: kernels::TopKWorkspace { words: s.top_k.view_mut(), sums: s.sums.view_mut() },
                rows: self.depth(),
                vocab: c.vocab_size,
                k: round.candidates,
            },
        )
    }

    fn block(&self, device: &Device, state: Global<u32>, layer: &Layer) -> Result<()> {
        let (s, c, rows) = (&self.scratch, &self.config, self.config.block_size);
        let (heads, kv_heads, head) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        self.normed(device, s.h.view(), &layer.input_layernorm, rows)?;
        linear(device, &Product::plain(&layer.q_proj, s.a.acts(), rows, s.q.view_mut()))?;
        let q = kernels::HeadNormRope {
            x: s.q.view(),
            weight: layer.q_norm.view(),
            eps: c.rms_norm_eps,
            rope: self.rope.tables(),
            state,
            out: s.q_rotated.view_mut(),
            rows,
            heads,
            head_dim: head,
            stride: heads * head,
            base: 0,
            to_cache: false,
        };
        kernels::head_norm_rope(device, q)?;
        self.keys_values(device, state, layer, rows)?;
        kernels::block_attention(
            device,
            kernels::BlockAttention {
                q: s.q_rotated.view(),
                k: layer.keys.view(),
                v: layer.values.view(),
                state,
                out_f32: s.attended.f32.view_mut(),
                out_bf16: s.attended.bf16.view_mut(),
                rows,
                heads,
                kv_heads,
                head_dim: head,
                window: layer.window,
                scale: 1.0 / (head as f32).sqrt(),
            },
        )?;
        let into_h = |weight, x| Product { accumulate: true, ..Product::plain(weight, x, rows, s.h.view_mut()) };
        linear(device, &into_h(&layer.o_proj, s.attended.acts()))?;
        self.normed(device, s.h.view(), &layer.post_attention_layernorm, rows)?;
        let gate = Product::plain(&layer.gate_proj, s.a.acts(), rows, s.gate.view_mut());
        let up = Product::plain(&layer.up_proj, s.a.acts(), rows, s.up.view_mut());
        gated(device, &Gated { gate, up, out_f32: s.act.f32.view_mut(), out_bf16: s.act.bf16.view_mut() })?;
        linear(device, &into_h(&layer.down_proj, s.act.acts()))
    }

    /// NaN in the cache's rows from slot `from` on.
    pub fn poison(&self, from: usize) -> Result<()> {
        let width = self.config.num_key_value_heads * self.config.head_dim;
        self.layers.iter().flat_map(|layer| [&layer.keys, &layer.values]).try_for_each(|cache| {
            let nan = vec![bf16::NAN; cache.len() - from * width];
            cache.write(from * width, &nan)
        })
    }

    /// Keys and values of the scratch activations `a`, to cache slots S and on.
    fn keys_values(&self, device: &Device, state: Global<u32>, layer: &Layer, rows: usize) -> Result<()> {
        let (s, c) = (&self.scratch, &self.config);
        let to_cache = |weight, rope, out| kernels::HeadNormRope {
            x: s.kv.view(),
            weight,
            eps: c.rms_norm_eps,
            rope,
            state,
            out,
            rows,
            heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            stride: c.num_key_value_heads * c.head_dim,
            base: 0,
            to_cache: true,
        };
        linear(device, &Product::plain(&layer.k_proj, s.a.acts(), rows, s.kv.view_mut()))?;
        kernels::head_norm_rope(device, to_cache(layer.k_norm.view(), self.rope.tables(), layer.keys.view_mut()))?;
        linear(device, &Product::plain(&layer.v_proj, s.a.acts(), rows, s.kv.view_mut()))?;
        kernels::head_norm_rope(device, to_cache(Global::EMPTY, kernels::Rope::NONE, layer.values.view_mut()))
    }

    fn normed(&self, device: &Device, x: Global<f32>, weight: &Buffer<f32>, rows: usize) -> Result<()> {
        self.scratch.a.norm(device, x, weight, rows, self.config.hidden_size, self.config.rms_norm_eps)
    }
}

impl Scratch {
    /// `rows`: of the target's passes at most.
    fn new(device: &Device, c: &DrafterConfig, rows: usize, taps: usize, candidates: usize) -> Result<Self> {
        // Ingestion takes up to a prefill chunk, the block its own rows.
        let rows = rows.max(c.block_size);
        let (q_width, kv_width) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let (top_k, sums) = kernels::top_k_workspace(c.block_size, c.vocab_size, candidates);
        let ids = vec![c.dflash_config.mask_token_id; c.block_size];
        Ok(Self {
            ids: device.upload(&ids)?,
            features: ActsBuffer::new(device, rows * taps * c.hidden_size)?,
            h: device.alloc(rows * c.hidden_size)?,
            a: ActsBuffer::new(device, rows * c.hidden_size)?,
            q: device.alloc(c.block_size * q_width)?,
            kv: device.alloc(rows * kv_width)?,
            q_rotated: device.alloc(c.block_size * q_width)?,
            attended: ActsBuffer::new(device, c.block_size * q_width)?,
            gate: device.alloc(c.block_size * c.intermediate_size)?,
            up: device.alloc(c.block_size * c.intermediate_size)?,
            act: ActsBuffer::new(device, c.block_size * c.intermediate_size)?,
            logits: device.alloc(c.block_size * c.vocab_size)?,
            top_k: device.alloc(top_k)?,
            sums: device.alloc(sums)?,
        })
    }
}
