//! What a pass computes on the way, for comparison with other programs: of the target hidden states after each layer,
//! chosen experts and logits, of a drafter its stages. The passes are those of decoding: chunks of a prompt, then
//! single tokens.

use std::ops::ControlFlow;

use bytemuck::cast_slice;
use safetensors::tensor::{Dtype, TensorView};

use super::draft::{DFlash, DraftStages};
use super::round::Round;
use super::{EngineError, EngineOptions, Result};
use crate::device::Device;
use crate::kernels::KvFormat;
use crate::model::{CHUNK, Model, chunk_rows};
use crate::weights::Bundle;

/// Of every token, in order.
pub struct States {
    pub ids: Vec<i32>,
    /// For each layer the residual stream behind it, `[tokens, hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// For each layer with experts the chosen ones, `[tokens, top_k]`, best first; of a dense layer nothing.
    pub experts: Vec<Vec<u32>>,
    /// `[tokens, vocabulary]`.
    pub logits: Vec<f32>,
}

impl States {
    /// As a safetensors file: `ids`, `hidden.LAYER`, `experts.LAYER`, `logits`, a row a token.
    pub fn file(&self) -> std::result::Result<Vec<u8>, safetensors::SafeTensorError> {
        let mut tensors = vec![
            ("ids".to_string(), Dtype::I32, cast_slice::<_, u8>(&self.ids)),
            ("logits".into(), Dtype::F32, cast_slice(&self.logits)),
        ];
        for (layer, (hidden, experts)) in self.hidden.iter().zip(&self.experts).enumerate() {
            tensors.push((format!("hidden.{layer}"), Dtype::F32, cast_slice(hidden)));
            if !experts.is_empty() {
                // Far below 2^31.
                tensors.push((format!("experts.{layer}"), Dtype::I32, cast_slice(experts)));
            }
        }
        let view = |(name, dtype, bytes): (String, Dtype, _)| -> std::result::Result<_, _> {
            let bytes: &[u8] = bytes;
            let width = bytes.len() / (dtype.bitsize() / 8) / self.ids.len().max(1);
            Ok((name, TensorView::new(dtype, vec![self.ids.len(), width], bytes)?))
        };
        let views =
            tensors.into_iter().map(view).collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()?;
        safetensors::serialize(views, None)
    }
}

/// Passes over `ids`, the last `single` of them one at a time.
pub fn states(bundle: &Bundle, device: &Device, ids: &[i32], single: usize) -> Result<States> {
    let config = bundle.config();
    let most = config.max_position_embeddings;
    if ids.is_empty() || ids.len() > most {
        return Err(EngineError::Request(format!("{} tokens; 1 to {most} are possible", ids.len())));
    }
    if let Some(id) = ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= config.vocab_size)) {
        return Err(EngineError::Request(format!("token {id}; ids are 0 to {}", config.vocab_size - 1)));
    }
    let model = Model::load(device, bundle, ids.len(), 1, KvFormat::Bf16)?;
    device.loaded();
    let round = Round::new(device, config.vocab_size, 0, 1, 1, EngineOptions::default())?;
    let logits = device.alloc::<f32>(CHUNK.min(ids.len()) * config.vocab_size)?;
    let dense = config.first_k_dense_replace;
    let mut states = States {
        ids: ids.to_vec(),
        hidden: vec![Vec::new(); config.num_hidden_layers],
        experts: vec![Vec::new(); config.num_hidden_layers],
        logits: Vec::new(),
    };
    let (chunked, rest) = ids.split_at(ids.len() - single.min(ids.len()));
    let mut committed = 0;
    for chunk in chunked.chunks(chunk_rows(chunked.len())).chain(rest.chunks(1)) {
        round.set_state(committed, 0)?;
        let (rows, scratch) = (round.chunk(chunk)?, &model.scratch);
        let (hidden, experts) = (&mut states.hidden, &mut states.experts);
        let mut after = |layer: usize| {
            append(&scratch.x, chunk.len() * config.hidden_size, &mut hidden[layer])?;
            if layer >= dense {
                append(&scratch.expert_ids, chunk.len() * config.num_experts_per_tok, &mut experts[layer])?;
            }
            Ok(ControlFlow::Continue(()))
        };
        let _ = model.forward_watched(device, round.state.view_mut(), rows, None, 0, logits.view_mut(), &mut after)?;
        append(&logits, chunk.len() * config.vocab_size, &mut states.logits)?;
        committed += chunk.len();
    }
    Ok(states)
}

/// One round of the bundle's drafter with `candidates` for each depth: `features` `[S, taps * hidden]` are what the
/// target left for the positions `0..S`, `bonus` is the token behind them.
pub fn draft_stages(
    bundle: &Bundle,
    device: &Device,
    features: &[f32],
    bonus: i32,
    candidates: usize,
) -> Result<DraftStages> {
    let config = bundle.drafter().ok_or_else(|| EngineError::Request("the bundle holds no drafter".into()))?;
    let width = config.dflash_config.target_layer_ids.len() * config.hidden_size;
    let rows = features.len() / width;
    if rows == 0 || rows * width != features.len() {
        return Err(EngineError::Request(format!("{} features; {width} a position are wanted", features.len())));
    }
    let model = Model::load(device, bundle, rows + config.block_size, 1, KvFormat::Bf16)?;
    let drafter = DFlash::load(device, bundle, config.clone(), &model, candidates)?;
    device.loaded();
    let round = Round::new(device, config.vocab_size, 0, config.depth(), candidates, EngineOptions::default())?;
    Ok(drafter.stages(device, &model, &round, features, bonus)?)
}

/// Adds the first `len` elements of a buffer.
fn append<T>(from: &crate::device::Buffer<T>, len: usize, to: &mut Vec<T>) -> crate::device::Result<()>
where
    T: cuda_std::Element + bytemuck::Pod,
{
    let start = to.len();
    to.resize(start + len, T::zeroed());
    from.read_into(0, &mut to[start..])
}
