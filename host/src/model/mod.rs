//! The target model: K2.6's forward pass over a few rows, through [`crate::linear`] and the launchers.
//!
//! Lives here: which operation follows which, and the buffers between them. Does not live here: how a product is
//! computed (`linear`), how rows become a round (`engine`). Start with [`Model::forward`], then `layer.rs`.
//!
//! Formulas and tensor names are those of the DeepSeek-V3 layout that K2.6 has; values are rounded where
//! `docs/ARCHITECTURE.md` says.

mod attention;
mod ffn;
mod layer;
mod load;
pub mod rope;
mod scratch;

use std::ops::ControlFlow;

use cuda_std::{Global, GlobalMut, bf16};

use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, Acts, KvFormat};
use crate::linear::{Many, Product, Weight, linear};
use crate::weights::ModelConfig;
use layer::Layer;
pub use load::ModelError;
pub(crate) use load::{load_weight, norm_weight};
pub use scratch::{Scratch, scratch_bytes};

/// Rows that a forward pass can take at most: the largest tree and its root, as far as attention takes it.
pub const MAX_ROWS: usize = {
    let (tree, attention) = (gpu::kernels::tree_build::MAX_BUDGET + 1, gpu::kernels::mla_attention::MAX_ROWS);
    if tree < attention { tree } else { attention }
};

/// Rows of a prefill chunk at most: enough that K2.6's 384 experts have about ten rows each, whose weights are then
/// read once or twice for all of them, and that tensor cores are what limits the other products. More would cost
/// scratch memory, a megabyte a row.
pub const CHUNK: usize = 512;
const _: () = assert!(CHUNK <= MAX_ROWS);

/// Rows that the buffers of a pass are made for, where a tree has up to `tree` rows and a prompt up to `context`.
pub fn pass_rows(tree: usize, context: usize) -> usize {
    tree.max(CHUNK.min(context))
}

/// Rows of each chunk of a prompt but the last, which is shorter by less than there are chunks: chunks of equal size,
/// as a short one takes nearly as long as a full one. So all chunks of a prompt of more than [`CHUNK`] rows have half
/// as many or more, and the same kernels.
pub fn chunk_rows(prompt: usize) -> usize {
    prompt.div_ceil(prompt.div_ceil(CHUNK).max(1)).max(1)
}

/// What a pass is for, which decides by what kernels many rows are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// A chunk of a prompt: the fastest that the device has.
    Prefill,
    /// A tree, of any size: bits of a row are those that it has alone.
    Verify,
}

/// The rows of one forward pass: a tree, or a chain (a prefill chunk). All of it lies on the device.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Token ids, `[rows]`.
    pub ids: Global<i32>,
    /// Depth below the root, `[rows]`: position is committed length + depth.
    pub depths: Global<u32>,
    /// Bit `i` of row `r`: row `r` sees row `i`. `[rows, words]`.
    pub ancestors: Global<u32>,
    pub rows: usize,
    pub pass: Pass,
}

/// Hidden states that a drafter wants: after each layer of `layers`, side by side.
pub struct Taps {
    pub layers: Vec<usize>,
    /// `[rows of a pass, layers.len() * hidden]`.
    pub out: Buffer<f32>,
}

/// The embedding table, in its stored format.
pub(crate) enum Embedding {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
}

impl Embedding {
    pub fn table(&self) -> kernels::Table {
        match self {
            Self::F32(t) => kernels::Table::F32(t.view()),
            Self::Bf16(t) => kernels::Table::Bf16(t.view()),
        }
    }
}

/// cos and sin tables on the device, `[positions, dim / 2]`.
pub struct Rope {
    pub cos: Buffer<f32>,
    pub sin: Buffer<f32>,
}

impl Rope {
    pub fn new(device: &Device, table: &rope::RopeTable) -> Result<Self> {
        Ok(Self { cos: device.upload(&table.cos)?, sin: device.upload(&table.sin)? })
    }

    pub fn tables(&self) -> kernels::Rope {
        kernels::Rope { cos: self.cos.view(), sin: self.sin.view() }
    }
}

/// The loaded model with its cache.
pub struct Model {
    pub config: ModelConfig,
    pub(crate) embedding: Embedding,
    layers: Vec<Layer>,
    norm: Buffer<f32>,
    pub(crate) lm_head: Weight,
    rope: Rope,
    softmax_scale: f32,
    lora_norm_eps: f32,
    /// Latent and rotated key of each token: `[layers, slots, row_bytes]`.
    cache: Buffer<u8>,
    kv: KvFormat,
    /// Cache slots of a layer: the context and room for one round's rows behind it.
    pub(crate) slots: usize,
    /// Rows that one forward pass takes at most.
    pub(crate) rows: usize,
    pub(crate) scratch: Scratch,
}

impl Model {
    /// Runs all layers over `rows`, appends their cache rows behind the committed length, and leaves the logits of rows
    /// `first_logit..rows` in `logits` (`[rows - first_logit, vocabulary]`).
    ///
    /// `state` holds the committed length and takes a router's error (`gpu::args::state`). Only queues launches.
    pub fn forward(
        &self,
        device: &Device,
        state: GlobalMut<u32>,
        rows: Rows,
        taps: Option<&Taps>,
        first_logit: usize,
        logits: GlobalMut<f32>,
    ) -> Result<()> {
        let mut on = |_| Ok(ControlFlow::Continue(()));
        self.forward_watched(device, state, rows, taps, first_logit, logits, &mut on).map(|_| ())
    }

    /// [`Self::forward`], which calls `after` with the index of each layer when its launches are queued, and ends there
    /// if it says so.
    pub(crate) fn forward_watched(
        &self,
        device: &Device,
        state: GlobalMut<u32>,
        rows: Rows,
        taps: Option<&Taps>,
        first_logit: usize,
        logits: GlobalMut<f32>,
        after: &mut dyn FnMut(usize) -> Result<ControlFlow<()>>,
    ) -> Result<ControlFlow<()>> {
        let (s, c) = (&self.scratch, &self.config);
        let hidden = c.hidden_size;
        kernels::embed(
            device,
            kernels::Embed {
                ids: rows.ids,
                table: self.embedding.table(),
                state: Global::EMPTY,
                x: s.x.view_mut(),
                rows: rows.rows,
                width: hidden,
                vocab: c.vocab_size,
            },
        )?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(device, state.as_ref(), rows, index, layer)?;
            self.ffn(device, state, rows, layer)?;
            if let Some(taps) = taps {
                for slot in (0..taps.layers.len()).filter(|&slot| taps.layers[slot] == index) {
                    let tap = kernels::Tap {
                        src: s.x.view(),
                        dst: taps.out.view_mut(),
                        rows: rows.rows,
                        width: hidden,
                        stride: taps.layers.len() * hidden,
                        offset: slot * hidden,
                    };
                    kernels::tap(device, tap)?;
                }
            }
            if after(index)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        let wanted = rows.rows - first_logit;
        if wanted == 0 {
            return Ok(ControlFlow::Continue(()));
        }
        // Logits have the same bits in every pass.
        let x = s.x.view().part(first_logit * hidden, wanted * hidden);
        s.a.norm(device, x, &self.norm, wanted, hidden, c.rms_norm_eps)?;
        linear(device, &Product::plain(&self.lm_head, s.a.acts(), wanted, logits))?;
        Ok(ControlFlow::Continue(()))
    }

    /// `y = W x` of the rows of a pass, one after the other.
    fn product<'a>(&self, batch: Rows, weight: &'a Weight, x: Acts, y: GlobalMut<f32>) -> Product<'a> {
        let many = match batch.pass {
            Pass::Prefill => Many::Fast(self.scratch.panels.view_mut()),
            Pass::Verify => Many::AsFew,
        };
        Product { many, ..Product::plain(weight, x, batch.rows, y) }
    }

    /// NaN in the cache's rows from slot `from` on, in all layers: all bits set, in each format.
    pub fn poison(&self, from: usize) -> Result<()> {
        let (row, layers) = (self.kv.row_bytes(), self.config.num_hidden_layers);
        let nan = vec![u8::MAX; (self.slots - from) * row];
        (0..layers).try_for_each(|layer| self.cache.write((layer * self.slots + from) * row, &nan))
    }

    /// Moves the cache rows of the accepted path behind the committed length, in all layers.
    pub fn commit(&self, device: &Device, state: Global<u32>) -> Result<()> {
        kernels::commit(
            device,
            kernels::Commit {
                cache: self.cache.view_mut(),
                state,
                layers: self.config.num_hidden_layers,
                slots: self.slots,
                width: self.kv.row_bytes(),
            },
        )
    }
}

/// Activations in both roundings, owned.
pub struct ActsBuffer {
    pub f32: Buffer<f32>,
    pub bf16: Buffer<bf16>,
}

impl ActsBuffer {
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        Ok(Self { f32: device.alloc(len)?, bf16: device.alloc(len)? })
    }

    /// Queues rounding the first `n` values of the f32 half into the bf16 half.
    pub fn round(&self, device: &Device, n: usize) -> Result<()> {
        kernels::round_bf16(device, kernels::RoundBf16 { x: self.f32.view(), out: self.bf16.view_mut(), n })
    }

    /// Queues the RMSNorm of `rows` rows of `width` into both halves.
    pub fn norm(
        &self,
        device: &Device,
        x: Global<f32>,
        weight: &Buffer<f32>,
        rows: usize,
        width: usize,
        eps: f32,
    ) -> Result<()> {
        let (out_f32, out_bf16) = (self.f32.view_mut(), self.bf16.view_mut());
        let weight = weight.view();
        kernels::rms_norm(device, kernels::RmsNorm { x, weight, out_f32, out_bf16, rows, width, stride: width, eps })
    }

    pub fn acts(&self) -> Acts {
        Acts { f32: self.f32.view(), bf16: self.bf16.view() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_prompt() {
        for prompt in (1..3000).chain([100_000]) {
            let rows = chunk_rows(prompt);
            let (chunks, last) = (prompt.div_ceil(rows), prompt - (prompt - 1) / rows * rows);
            assert!(rows <= CHUNK && chunks == prompt.div_ceil(CHUNK), "{prompt} rows: {chunks} of {rows}");
            assert!(rows - last < chunks && (chunks == 1 || 2 * last >= CHUNK), "{prompt} rows: {rows}, then {last}");
        }
    }
}
