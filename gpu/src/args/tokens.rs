//! Arguments of the kernels around tokens: embedding, routing, picks and the tree.

use cuda_std::{Global, GlobalMut, bf16};

/// See [`crate::kernels::embed`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EmbedArgs {
    /// `[rows]`.
    pub ids: Global<i32>,
    /// `[vocab, width]`, or empty.
    pub table_f32: Global<f32>,
    /// `[vocab, width]`, read when `table_f32` is empty.
    pub table_bf16: Global<bf16>,
    /// Its bonus is row 0's id; or empty.
    pub state: Global<u32>,
    /// `[rows, width]`.
    pub x: GlobalMut<f32>,
    pub vocab: u32,
    pub width: u32,
}

/// See [`crate::kernels::route`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RouteArgs {
    /// `[rows, experts]`.
    pub logits: Global<f32>,
    /// `[experts]`.
    pub bias: Global<f32>,
    /// `[rows, top_k]`.
    pub ids: GlobalMut<u32>,
    /// `[rows, top_k]`.
    pub weights: GlobalMut<f32>,
    pub state: GlobalMut<u32>,
    pub experts: u32,
    pub top_k: u32,
    pub scaling: f32,
    /// 1: weights are divided by their sum.
    pub norm: u32,
}

/// See [`crate::kernels::expert_sort`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExpertSortArgs {
    /// `[pairs]`.
    pub ids: Global<u32>,
    /// `[pairs]`.
    pub order: GlobalMut<u32>,
    /// `[1 + 3 * pairs]`.
    pub tiles: GlobalMut<u32>,
    pub pairs: u32,
    pub experts: u32,
}

/// See [`crate::kernels::swiglu`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SwigluArgs {
    /// `[rows, stride]`, the first `width` of each row.
    pub gate: Global<f32>,
    /// `[rows, stride]`, the first `width` of each row.
    pub up: Global<f32>,
    /// `[rows, width]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, width]` rounded to nearest even, or empty.
    pub out_bf16: GlobalMut<bf16>,
    pub width: u32,
    pub stride: u32,
}

/// See [`crate::kernels::combine`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CombineArgs {
    /// `[rows * top_k, width]`.
    pub y: Global<f32>,
    /// `[rows, top_k]`.
    pub weights: Global<f32>,
    /// `[rows, width]`, or empty.
    pub shared: Global<f32>,
    /// `[rows, width]`.
    pub x: GlobalMut<f32>,
    pub width: u32,
    pub top_k: u32,
}

/// See [`crate::kernels::argmax`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArgmaxArgs {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows]`.
    pub pick: GlobalMut<i32>,
    /// `[rows]`.
    pub best: GlobalMut<f32>,
    /// `[rows]`.
    pub second: GlobalMut<f32>,
    pub state: GlobalMut<u32>,
    pub vocab: u32,
}

/// See [`crate::kernels::top_k`]: both of its kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TopKArgs {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows, chunks, k]`: keys of the candidates.
    pub keys: GlobalMut<u32>,
    /// `[rows, chunks, k]`: ids of the candidates.
    pub candidates: GlobalMut<u32>,
    /// `[rows, chunks, 2]`: largest logit, and the sum of exponentials relative to it.
    pub sums: GlobalMut<f32>,
    /// `[rows, k]`.
    pub ids: GlobalMut<i32>,
    /// `[rows, k]`.
    pub logp: GlobalMut<f32>,
    pub state: GlobalMut<u32>,
    pub vocab: u32,
    pub k: u32,
    /// Logits a chunk.
    pub chunk: u32,
    pub chunks: u32,
}

/// See [`crate::kernels::tree_build`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TreeBuildArgs {
    /// `[depths, k]`.
    pub ids: Global<i32>,
    /// `[depths, k]`, each row descending.
    pub logp: Global<f32>,
    pub state: GlobalMut<u32>,
    /// `[budget + 1]`.
    pub tokens: GlobalMut<i32>,
    /// `[budget + 1]`.
    pub parents: GlobalMut<i32>,
    /// `[budget + 1]`.
    pub depths: GlobalMut<u32>,
    /// `[budget + 1, words]`.
    pub ancestors: GlobalMut<u32>,
    pub levels: u32,
    pub k: u32,
    pub budget: u32,
}

/// See [`crate::kernels::accept`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AcceptArgs {
    /// `[rows]`.
    pub tokens: Global<i32>,
    /// `[rows]`.
    pub parents: Global<i32>,
    /// `[rows]`.
    pub pick: Global<i32>,
    pub state: GlobalMut<u32>,
    /// `[RECORD_WORDS]`, see [`record`].
    pub record: GlobalMut<u32>,
    pub rows: u32,
}

/// Words of the record that the host reads after a round, `u32 [RECORD_WORDS]`.
pub mod record {
    /// Rows of the accepted path, the root included; 0 after an error.
    pub const PATH_LEN: usize = 0;
    /// Nodes of the tree, the root not counted.
    pub const NODES: usize = 1;
    /// As the state's `ERROR`.
    pub const ERROR: usize = 2;
    /// As the state's `ERROR_ROW`.
    pub const ERROR_ROW: usize = 3;
    /// As the state's `NEXT_BONUS`.
    pub const NEXT_BONUS: usize = 4;
    /// Tokens of the path behind the root, `PATH_LEN - 1` of them, then zeros.
    pub const TOKENS: usize = 5;
    /// Length of the record.
    pub const RECORD_WORDS: usize = 40;
}
