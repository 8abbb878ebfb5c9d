//! Launcher of [`gpu::kernels::mla_attention`] and [`gpu::kernels::mla_merge`].

use std::f32::consts::LOG2_E;

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::attention::{KEY, LATENT, MlaAttentionArgs, MlaMergeArgs};
use gpu::kernels::{mla_attention as kernel, mla_merge};

use super::{aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// Blocks that a launch should have where the context allows: about two for each multiprocessor of a large GPU.
const BLOCKS_WANTED: usize = 256;
/// Slots that a split is worth: below, writing and merging partials costs more than the keys.
const SLOTS_PER_SPLIT: usize = 256;

/// Attention over the latent cache: all rows see slots `0..S`, row r also slot S + i where ancestor bit i is set.
pub struct MlaAttention {
    /// `[rows, heads, KEY]`, see [`super::query`].
    pub q: Global<bf16>,
    /// `[slots, KEY]` of one layer, rows up to S + `rows` appended.
    pub cache: Global<bf16>,
    /// `[rows, ceil(rows / 32)]`.
    pub ancestors: Global<u32>,
    pub state: Global<u32>,
    /// Softmax scale.
    pub scale: f32,
    pub rows: usize,
    pub heads: usize,
    /// [`mla_workspace`] values at least.
    pub workspace: GlobalMut<f32>,
    /// `[rows, heads, LATENT]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, heads, LATENT]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
}

/// Packed rows of a block: the small one for a few queries, else the large one, which reads a key once for 64.
fn block_rows(queries: usize) -> usize {
    if queries < kernel::LARGE_ROWS { kernel::SMALL_ROWS } else { kernel::LARGE_ROWS }
}

/// Parts that the context is split into, for a cache of `slots`.
pub fn mla_splits(slots: usize, rows: usize, heads: usize) -> usize {
    let queries = (rows * heads).max(1);
    let tiles = queries.div_ceil(block_rows(queries));
    BLOCKS_WANTED.div_ceil(tiles).min(slots.div_ceil(SLOTS_PER_SPLIT)).max(1)
}

/// Values of the workspace of a launch.
pub fn mla_workspace(slots: usize, rows: usize, heads: usize) -> usize {
    match mla_splits(slots, rows, heads) {
        1 => 0,
        splits => splits * rows * heads * (LATENT + 2),
    }
}

/// Queues the attention of `rows` rows.
pub fn mla_attention(device: &Device, p: MlaAttention) -> Result<()> {
    let queries = p.rows * p.heads;
    let (block, tile) = match block_rows(queries) {
        kernel::SMALL_ROWS => (&kernel::MLA_ATTENTION_16, kernel::SMALL_ROWS),
        _ => (&kernel::MLA_ATTENTION_64, kernel::LARGE_ROWS),
    };
    let name = block.name();
    let (slots, words) = (p.cache.len() / KEY, p.rows.div_ceil(u32::BITS as usize));
    state_holds(name, p.state.len())?;
    contract(name, p.rows <= kernel::MAX_ROWS, || {
        format!("{} rows; at most {} are possible", p.rows, kernel::MAX_ROWS)
    })?;
    contract(name, p.cache.len().is_multiple_of(KEY) && slots >= p.rows, || {
        format!("the cache holds {}, expected rows of {KEY}, {} at least", p.cache.len(), p.rows)
    })?;
    contract(name, p.q.len() >= queries * KEY, || {
        format!("q holds {}, expected [{}, {}, {KEY}]", p.q.len(), p.rows, p.heads)
    })?;
    contract(name, p.ancestors.len() >= p.rows * words, || {
        format!("ancestors hold {}, expected [{}, {words}]", p.ancestors.len(), p.rows)
    })?;
    for len in [p.out_f32.len(), p.out_bf16.len()] {
        contract(name, len == 0 || len >= queries * LATENT, || {
            format!("an output holds {len}, expected [{}, {}, {LATENT}]", p.rows, p.heads)
        })?;
    }
    let need = mla_workspace(slots, p.rows, p.heads);
    contract(name, p.workspace.len() >= need, || {
        format!("the workspace holds {}, {need} are needed", p.workspace.len())
    })?;
    let views = [
        ("q", p.q.addr()),
        ("cache", p.cache.addr()),
        ("workspace", p.workspace.addr()),
        ("the f32 output", p.out_f32.addr()),
        ("the bf16 output", p.out_bf16.addr()),
    ];
    for (what, addr) in views {
        aligned(name, what, addr, 16)?;
    }

    let splits = mla_splits(slots, p.rows, p.heads);
    let (partial, partial_max_sum) = match splits {
        1 => (GlobalMut::EMPTY, GlobalMut::EMPTY),
        _ => {
            let values = splits * queries * LATENT;
            let pairs = p.workspace.addr() + (values * size_of::<f32>()) as u64;
            (GlobalMut::from_raw(p.workspace.addr(), values), GlobalMut::from_raw(pairs, splits * queries * 2))
        }
    };
    let args = MlaAttentionArgs {
        q: p.q,
        cache: p.cache,
        ancestors: p.ancestors,
        state: p.state,
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        partial,
        partial_max_sum,
        scale_log2: p.scale * LOG2_E,
        rows: p.rows as u32,
        heads: p.heads as u32,
        words: words as u32,
    };
    let dims = Dims {
        grid: [queries.div_ceil(tile) as u32, splits as u32, 1],
        block: [kernel::THREADS, 1, 1],
        shared: kernel::shared_bytes(tile),
    };
    device.launch(block, dims, args)?;
    if splits == 1 {
        return Ok(());
    }
    let args = MlaMergeArgs {
        partial: partial.as_ref(),
        partial_max_sum: partial_max_sum.as_ref(),
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        splits: splits as u32,
    };
    let dims = Dims { grid: [queries as u32, 1, 1], block: [mla_merge::THREADS, 1, 1], shared: 0 };
    device.launch(&mla_merge::MLA_MERGE, dims, args)
}
