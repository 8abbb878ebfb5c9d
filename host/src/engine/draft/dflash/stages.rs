//! One round of the drafter, stage by stage, for comparison with other programs.

use cuda_std::bf16;

use super::{DFlash, Round};
use crate::device::{Buffer, Device, Result};
use crate::model::{Model, chunk_rows};

/// What a round computes on the way.
pub struct DraftStages {
    /// The fused features of each committed position, `[S, hidden]`.
    pub context: Vec<f32>,
    /// Of each layer the cached keys of those positions, `[S, kv_heads, head_dim]`.
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
    /// Of each depth, `[depth, vocabulary]`.
    pub logits: Vec<f32>,
    /// The best candidates and their log-probabilities, `[depth, candidates]`.
    pub ids: Vec<i32>,
    pub logp: Vec<f32>,
}

/// The first `len` values.
fn widened(buffer: &Buffer<bf16>, len: usize) -> Result<Vec<f32>> {
    Ok(buffer.read()?.into_iter().take(len).map(f32::from).collect())
}

impl DFlash {
    /// Takes `features` `[S, taps * hidden]` as those of the positions `0..S`, and drafts behind them and `bonus`.
    pub fn stages(
        &self,
        device: &Device,
        target: &Model,
        round: &Round,
        features: &[f32],
        bonus: i32,
    ) -> Result<DraftStages> {
        let (hidden, width) = (self.config.hidden_size, self.taps.layers.len() * self.config.hidden_size);
        let (mut committed, mut context) = (0, Vec::new());
        for chunk in features.chunks(chunk_rows(features.len() / width) * width) {
            let rows = chunk.len() / width;
            round.set_state(committed, 0)?;
            self.taps.out.write(0, chunk)?;
            self.ingest(device, round.state.view(), rows, false)?;
            context.extend(widened(&self.scratch.a.bf16, rows * hidden)?);
            committed += rows;
        }
        round.set_state(committed, bonus)?;
        self.propose(device, target, round)?;
        let cached = committed * self.config.num_key_value_heads * self.config.head_dim;
        let of_layers = |pick: fn(&super::Layer) -> &Buffer<bf16>| {
            self.layers.iter().map(|layer| widened(pick(layer), cached)).collect::<Result<Vec<_>>>()
        };
        let mut logits = self.scratch.logits.read()?;
        logits.truncate(self.depth() * self.config.vocab_size);
        Ok(DraftStages {
            context,
            keys: of_layers(|layer| &layer.keys)?,
            values: of_layers(|layer| &layer.values)?,
            logits,
            ids: round.draft_ids.read()?,
            logp: round.draft_logp.read()?,
        })
    }
}
