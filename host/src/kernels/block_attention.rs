//! Launcher of [`gpu::kernels::block_attention`].

use std::f32::consts::LOG2_E;

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::attention::BlockAttentionArgs;
use gpu::kernels::block_attention as kernel;

use super::{aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// The drafter's attention: every row sees slots `0..S + rows`, in both directions, or those of its window.
pub struct BlockAttention {
    /// `[rows, heads, head_dim]`.
    pub q: Global<bf16>,
    /// `[slots, kv_heads, head_dim]` of one layer.
    pub k: Global<bf16>,
    /// As `k`.
    pub v: Global<bf16>,
    pub state: Global<u32>,
    /// Softmax scale, `1 / sqrt(head_dim)`.
    pub scale: f32,
    pub rows: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// 64 or 128.
    pub head_dim: usize,
    /// Positions that a row sees, its own the last. `None`: all, later ones too.
    pub window: Option<usize>,
    /// `[rows, heads, head_dim]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, heads, head_dim]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
}

/// Queues the attention of `rows` rows.
pub fn block_attention(device: &Device, p: BlockAttention) -> Result<()> {
    let block = if p.head_dim == 64 { &kernel::BLOCK_ATTENTION_64 } else { &kernel::BLOCK_ATTENTION_128 };
    let name = block.name();
    let (values, kv_width) = (p.rows * p.heads * p.head_dim, p.kv_heads * p.head_dim);
    state_holds(name, p.state.len())?;
    contract(name, matches!(p.head_dim, 64 | 128), || format!("head_dim is {}; 64 and 128 are possible", p.head_dim))?;
    contract(name, p.kv_heads > 0 && p.heads.is_multiple_of(p.kv_heads), || {
        format!("{} heads for {} key heads; a multiple is possible", p.heads, p.kv_heads)
    })?;
    contract(name, p.q.len() >= values, || {
        format!("q holds {}, expected [{}, {}, {}]", p.q.len(), p.rows, p.heads, p.head_dim)
    })?;
    contract(name, p.window.is_none_or(|w| w > 0 && w <= i32::MAX as usize), || {
        format!("a window of {:?} positions; 1 to {} are possible", p.window, i32::MAX)
    })?;
    for (what, len) in [("k", p.k.len()), ("v", p.v.len())] {
        contract(name, len == p.k.len() && len.is_multiple_of(kv_width) && len >= p.rows * kv_width, || {
            format!("{what} holds {len}, expected as many rows of {kv_width} in k and v, {} at least", p.rows)
        })?;
    }
    for len in [p.out_f32.len(), p.out_bf16.len()] {
        contract(name, len == 0 || len >= values, || {
            format!("an output holds {len}, expected [{}, {}, {}]", p.rows, p.heads, p.head_dim)
        })?;
    }
    let views = [
        ("q", p.q.addr()),
        ("k", p.k.addr()),
        ("v", p.v.addr()),
        ("the f32 output", p.out_f32.addr()),
        ("the bf16 output", p.out_bf16.addr()),
    ];
    for (what, addr) in views {
        aligned(name, what, addr, 16)?;
    }
    let args = BlockAttentionArgs {
        q: p.q,
        k: p.k,
        v: p.v,
        state: p.state,
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        scale_log2: p.scale * LOG2_E,
        rows: p.rows as u32,
        heads: p.heads as u32,
        kv_heads: p.kv_heads as u32,
        window: p.window.unwrap_or(0) as u32,
    };
    let tiles = (p.rows * (p.heads / p.kv_heads)).div_ceil(kernel::TILE_ROWS);
    let dims = Dims {
        grid: [tiles as u32, p.kv_heads as u32, 1],
        block: [kernel::THREADS, 1, 1],
        shared: kernel::shared_bytes(p.head_dim),
    };
    device.launch(block, dims, args)
}
