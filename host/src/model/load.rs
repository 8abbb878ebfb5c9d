//! From a bundle to a loaded model.

use half::bf16;
use rayon::prelude::*;

use super::layer::{Attention, Experts, Ffn, Layer, Mlp};
use super::{Embedding, Model, Rope, Scratch, pass_rows, rope};
use crate::device::{Buffer, Device, DeviceError};
use crate::kernels::KvFormat;
use crate::linear::{ExpertWeights, HostData, HostWeight, ScaleType, Upload, Weight};
use crate::weights::{Bundle, WeightsError};

/// Why a model does not load.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Unsupported(String),
}

type Result<T> = std::result::Result<T, ModelError>;

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";
/// The three matrices of an expert.
const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// Experts whose scales are looked at together, by several threads, before they are uploaded.
const EXPERTS_AT_ONCE: usize = 16;

/// A product's weight by its checkpoint name.
pub(crate) fn load_weight(upload: &Upload, bundle: &Bundle, name: &str) -> Result<Weight> {
    Ok(Weight::load(upload, &bundle.weight(name)?)?)
}

/// A norm's weight or a bias, as f32.
pub(crate) fn norm_weight(device: &Device, bundle: &Bundle, name: &str) -> Result<Buffer<f32>> {
    Ok(device.upload(&bundle.vector_f32(name)?)?)
}

impl Model {
    /// Loads the target of `bundle` with a cache for `context` tokens and passes of up to `rows` rows, or of a prefill
    /// chunk.
    pub fn load(device: &Device, bundle: &Bundle, context: usize, rows: usize, kv: KvFormat) -> Result<Self> {
        // The order of loading below.
        let layers = (0..bundle.config().num_hidden_layers).map(|i| format!("model.layers.{i}."));
        let order: Vec<String> =
            [EMBEDDING.into()].into_iter().chain(layers).chain([NORM.into(), HEAD.into()]).collect();
        bundle.reading_ahead(&order, || Self::load_in_order(device, bundle, context, rows, kv))
    }

    fn load_in_order(device: &Device, bundle: &Bundle, context: usize, rows: usize, kv: KvFormat) -> Result<Self> {
        let config = bundle.config().clone();
        let rows = pass_rows(rows, context);
        let slots = context + rows;
        let head = config.qk_nope_head_dim + config.qk_rope_head_dim;
        let scaling = config.rope_scaling.as_ref();
        let table = rope::rope_table(config.qk_rope_head_dim, config.rope_theta, scaling, slots);
        let upload = Upload::new(device)?;
        let layers = (0..config.num_hidden_layers).map(|i| load_layer(device, &upload, bundle, i));
        Ok(Self {
            embedding: load_embedding(device, bundle)?,
            layers: layers.collect::<Result<_>>()?,
            norm: norm_weight(device, bundle, NORM)?,
            lm_head: load_weight(&upload, bundle, HEAD)?,
            rope: Rope::new(device, &table)?,
            softmax_scale: rope::softmax_scale(head, scaling),
            lora_norm_eps: bundle.settings().lora_norm_eps,
            cache: device.zeros(config.num_hidden_layers * slots * kv.row_bytes())?,
            kv,
            slots,
            rows,
            scratch: Scratch::new(device, &config, slots, rows)?,
            config,
        })
    }
}

fn load_embedding(device: &Device, bundle: &Bundle) -> Result<Embedding> {
    let table = bundle.weight(EMBEDDING)?;
    match &table.data {
        HostData::F32(bytes) => Ok(Embedding::F32(device.upload_bytes(bytes)?)),
        HostData::Bf16(bytes) => Ok(Embedding::Bf16(device.upload_bytes(bytes)?)),
        HostData::W4a16 { .. } => {
            Err(ModelError::Unsupported(format!("`{}` is w4a16; an embedding table is f32 or bf16", table.name)))
        }
    }
}

fn load_layer(device: &Device, upload: &Upload, bundle: &Bundle, index: usize) -> Result<Layer> {
    let config = bundle.config();
    let weight = |part: &str| load_weight(upload, bundle, &format!("model.layers.{index}.{part}.weight"));
    let vector = |part: &str| norm_weight(device, bundle, &format!("model.layers.{index}.{part}"));
    let mlp = |part: &str| -> Result<Mlp> {
        Ok(Mlp {
            gate_proj: weight(&format!("{part}.gate_proj"))?,
            up_proj: weight(&format!("{part}.up_proj"))?,
            down_proj: weight(&format!("{part}.down_proj"))?,
        })
    };
    let ffn = if index < config.first_k_dense_replace {
        Ffn::Dense(Box::new(mlp("mlp")?))
    } else {
        let [gate_proj, up_proj, down_proj] = load_experts(device, upload, bundle, index)?;
        Ffn::Experts(Box::new(Experts {
            gate: weight("mlp.gate")?,
            e_score_correction_bias: vector("mlp.gate.e_score_correction_bias")?,
            gate_proj,
            up_proj,
            down_proj,
            shared_experts: match config.n_shared_experts {
                0 => None,
                _ => Some(mlp("mlp.shared_experts")?),
            },
        }))
    };
    let (key_up, value_up, key_up_rounds) = load_kv_b(upload, bundle, index)?;
    Ok(Layer {
        input_layernorm: vector("input_layernorm.weight")?,
        attention: Attention {
            q_a_proj: weight("self_attn.q_a_proj")?,
            q_a_layernorm: vector("self_attn.q_a_layernorm.weight")?,
            q_b_proj: weight("self_attn.q_b_proj")?,
            kv_a_proj: weight("self_attn.kv_a_proj_with_mqa")?,
            kv_a_layernorm: vector("self_attn.kv_a_layernorm.weight")?,
            key_up,
            key_up_rounds,
            value_up,
            o_proj: weight("self_attn.o_proj")?,
        },
        post_attention_layernorm: vector("post_attention_layernorm.weight")?,
        ffn,
    })
}

/// The routed experts of a layer, expert by expert as they lie in a file, which is read once from front to back.
fn load_experts(device: &Device, upload: &Upload, bundle: &Bundle, index: usize) -> Result<[ExpertWeights; 3]> {
    let name = |part: &str, e: usize| format!("model.layers.{index}.mlp.experts.{e}.{part}.weight");
    let count = bundle.config().n_routed_experts;
    let room = |part: &str| -> Result<ExpertWeights> {
        let names: Vec<String> = (0..count).map(|e| name(part, e)).collect();
        let experts = names.iter().map(|name| bundle.described(name)).collect::<std::result::Result<Vec<_>, _>>()?;
        Ok(ExpertWeights::alloc(device, &format!("model.layers.{index}.mlp.experts.{part}"), &experts)?)
    };
    let all = [room(PARTS[0])?, room(PARTS[1])?, room(PARTS[2])?];
    for first in (0..count).step_by(EXPERTS_AT_ONCE) {
        let some = first..count.min(first + EXPERTS_AT_ONCE);
        let places: Vec<(usize, usize)> = some.flat_map(|e| (0..PARTS.len()).map(move |part| (e, part))).collect();
        let names: Vec<String> = places.iter().map(|&(e, part)| name(PARTS[part], e)).collect();
        // Several threads look at their scales, and so read them.
        let weights = names.par_iter().map(|name| bundle.weight(name)).collect::<std::result::Result<Vec<_>, _>>()?;
        for (&(e, part), weight) in places.iter().zip(&weights) {
            all[part].put(upload, e, weight)?;
        }
    }
    Ok(all)
}

/// `kv_b_proj` as its two halves: W_UK(h)^T `[heads, latent, nope]` and W_UV(h) `[heads, value, latent]`.
///
/// The key half is used transposed, along which a W4A16 group does not run: it becomes f32, value by value exactly
/// q * s, and its input is rounded to bf16 all the same (the returned flag).
fn load_kv_b(upload: &Upload, bundle: &Bundle, index: usize) -> Result<(Weight, Weight, bool)> {
    let c = bundle.config();
    let (heads, nope, value, latent) = (c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank);
    let name = format!("model.layers.{index}.self_attn.kv_b_proj.weight");
    let stored = bundle.weight(&name)?;
    // Rows of a head: the key half, then the value half.
    let values = |bytes: &[u8], row_bytes: usize| -> Vec<u8> {
        let head_bytes = (nope + value) * row_bytes;
        bytes.par_chunks_exact(head_bytes).flat_map_iter(|head| head[nope * row_bytes..].iter().copied()).collect()
    };
    let transposed = |bytes: &[u8], size: usize| -> Vec<u8> {
        let mut out = vec![0; heads * latent * nope * size];
        let of_heads = out.par_chunks_exact_mut(latent * nope * size);
        of_heads.zip(bytes.par_chunks_exact((nope + value) * latent * size)).for_each(|(out, head)| {
            for (i, to) in out.chunks_exact_mut(size).enumerate() {
                let (column, row) = (i / nope, i % nope);
                let at = (row * latent + column) * size;
                to.copy_from_slice(&head[at..at + size]);
            }
        });
        out
    };
    let (key, value_data) = match &stored.data {
        HostData::F32(b) => (HostData::F32(transposed(b, 4).into()), HostData::F32(values(b, latent * 4).into())),
        HostData::Bf16(b) => (HostData::Bf16(transposed(b, 2).into()), HostData::Bf16(values(b, latent * 2).into())),
        HostData::W4a16 { packed, scales, scale_type, group } => {
            let expanded: Vec<u8> = dequantize(packed, scales, *scale_type, *group);
            let value_data = HostData::W4a16 {
                packed: values(packed, latent / 2).into(),
                scales: values(scales, latent / group * scale_type.bytes()).into(),
                scale_type: *scale_type,
                group: *group,
            };
            (HostData::F32(transposed(&expanded, 4).into()), value_data)
        }
    };
    let rounds = matches!(stored.data, HostData::W4a16 { .. });
    let half = |n, k, data| HostWeight { name: &name, n, k, batch: heads, data };
    let key_up = Weight::load(upload, &half(latent, nope, key))?;
    let value_up = Weight::load(upload, &half(value, latent, value_data))?;
    Ok((key_up, value_up, rounds))
}

/// The little-endian f32 bytes of `q * s`, exact: a code has 4 bits and a bf16 scale 8, an f32 scale is rounded once.
fn dequantize(packed: &[u8], scales: &[u8], scale_type: ScaleType, group: usize) -> Vec<u8> {
    let scale = |i: usize| match scale_type {
        ScaleType::Bf16 => bf16::from_le_bytes([scales[2 * i], scales[2 * i + 1]]).to_f32(),
        ScaleType::F32 => f32::from_le_bytes(std::array::from_fn(|b| scales[4 * i + b])),
    };
    let codes = packed.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    codes.enumerate().flat_map(|(i, code)| ((f32::from(code) - 8.0) * scale(i / group)).to_le_bytes()).collect()
}
