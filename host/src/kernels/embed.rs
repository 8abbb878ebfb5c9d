//! Launcher of [`gpu::kernels::embed`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::EmbedArgs;
use gpu::kernels::embed as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// An embedding table `[vocab, width]` in its stored type.
#[derive(Clone, Copy)]
pub enum Table {
    F32(Global<f32>),
    Bf16(Global<bf16>),
}

/// `x[r, :] = table[ids[r], :]`.
pub struct Embed {
    /// `[rows]`, each in `0..vocab`: another id ends the launch with an error.
    pub ids: Global<i32>,
    pub table: Table,
    /// The state, whose bonus token replaces `ids[0]`; or `EMPTY`.
    pub state: Global<u32>,
    /// `[rows, width]`.
    pub x: GlobalMut<f32>,
    pub rows: usize,
    pub vocab: usize,
    pub width: usize,
}

/// Queues the look-up of `rows` rows.
pub fn embed(device: &Device, p: Embed) -> Result<()> {
    let name = kernel::EMBED.name();
    let (table_f32, table_bf16, len) = match p.table {
        Table::F32(table) => (table, Global::EMPTY, table.len()),
        Table::Bf16(table) => (Global::EMPTY, table, table.len()),
    };
    contract(name, p.width > 0, || "width 0".to_string())?;
    contract(name, p.vocab > 0 && len == p.vocab * p.width, || {
        format!("the table holds {len}, vocabulary {} of width {} is wanted", p.vocab, p.width)
    })?;
    contract(name, p.state.is_empty() || p.state.len() >= STATE_WORDS, || {
        format!("the state holds {}, {STATE_WORDS} words are wanted", p.state.len())
    })?;
    holds(name, "ids", p.ids.len(), p.rows)?;
    holds(name, "x", p.x.len(), p.rows * p.width)?;
    let args = EmbedArgs {
        ids: p.ids,
        table_f32,
        table_bf16,
        state: p.state,
        x: p.x,
        vocab: p.vocab as u32,
        width: p.width as u32,
    };
    let dims = Dims { grid: [p.rows as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::EMBED, dims, args)
}
