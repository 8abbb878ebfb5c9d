//! Arguments of the attention side: cache rows in and out, queries, the two attentions, the moves after a round.

use cuda_std::{Global, GlobalMut, bf16};

/// Values of a cached latent: the key's first part, and the whole value.
pub const LATENT: usize = 512;
/// Rotated values of a cached key and of a query.
pub const ROPE: usize = 64;
/// Values of a cache row: latent, then rotated key.
pub const KEY: usize = LATENT + ROPE;

/// A row of the f8 cache, in bytes: e4m3 codes of the latent, an f32 scale for each [`F8_GROUP`] of them, the rotated
/// key in bf16. Its pieces of 16 bytes are aligned.
pub const F8_ROW: usize = F8_ROTARY + 2 * ROPE;
/// Latent values that share a scale.
pub const F8_GROUP: usize = 128;
/// Where the scales begin, and the rotated key.
pub const F8_SCALES: usize = LATENT;
pub const F8_ROTARY: usize = F8_SCALES + LATENT / F8_GROUP * size_of::<f32>();
/// Largest e4m3 value.
pub const F8_LARGEST: f32 = 448.0;
/// Largest scale; a group with larger values than that allows becomes NaN.
pub const F8_LARGEST_SCALE: f32 = 128.0;

/// See [`crate::kernels::rows`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RoundBf16Args {
    pub x: Global<f32>,
    pub out: GlobalMut<bf16>,
    pub n: u64,
}

/// See [`crate::kernels::rows`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TapArgs {
    /// `[rows, width]`.
    pub src: Global<f32>,
    /// `[rows, stride]`: columns `offset .. offset + width` are written.
    pub dst: GlobalMut<f32>,
    pub width: u32,
    pub stride: u32,
    pub offset: u32,
}

/// See [`crate::kernels::commit`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GatherRowsArgs {
    /// `[rows, width]`.
    pub src: Global<f32>,
    /// `[count, width]`.
    pub dst: GlobalMut<f32>,
    /// [`super::state`].
    pub state: Global<u32>,
    pub width: u32,
}

/// See [`crate::kernels::commit`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CommitArgs {
    /// `[layers, slots, row_bytes]`, of any type.
    pub cache: GlobalMut<u8>,
    /// [`super::state`].
    pub state: Global<u32>,
    pub slots: u32,
    /// A multiple of 16.
    pub row_bytes: u32,
}

/// See [`crate::kernels::commit`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AdvanceArgs {
    /// [`super::state`].
    pub state: GlobalMut<u32>,
}

/// See [`crate::kernels::query`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct QueryArgs {
    /// `[rows, heads, nope + ROPE]`.
    pub q: Global<f32>,
    /// `[rows, heads, LATENT]`: the key-up product of the first `nope` of each head.
    pub q_lat: Global<f32>,
    /// `[positions, ROPE / 2]`.
    pub cos: Global<f32>,
    /// `[positions, ROPE / 2]`.
    pub sin: Global<f32>,
    /// `[rows]`.
    pub depths: Global<u32>,
    /// [`super::state`].
    pub state: Global<u32>,
    /// `[rows, heads, KEY]`.
    pub out: GlobalMut<bf16>,
    pub heads: u32,
    pub nope: u32,
}

/// See [`crate::kernels::kv_append`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KvAppendArgs {
    /// `[rows, KEY]`: latent, then rope key.
    pub t: Global<f32>,
    /// `[LATENT]`.
    pub weight: Global<f32>,
    /// `[positions, ROPE / 2]`.
    pub cos: Global<f32>,
    /// `[positions, ROPE / 2]`.
    pub sin: Global<f32>,
    /// `[rows]`.
    pub depths: Global<u32>,
    /// [`super::state`].
    pub state: Global<u32>,
    /// `[slots, KEY]` bf16 values of one layer, or `[slots]` rows of [`F8_ROW`] bytes.
    pub cache: GlobalMut<u8>,
    pub eps: f32,
}

/// See [`crate::kernels::mla_attention`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MlaAttentionArgs {
    /// `[rows, heads, KEY]`.
    pub q: Global<bf16>,
    /// As in [`KvAppendArgs`].
    pub cache: Global<u8>,
    /// `[rows, words]`.
    pub ancestors: Global<u32>,
    /// [`super::state`].
    pub state: Global<u32>,
    /// `[rows, heads, LATENT]`, or empty. Written when the context is one part.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, heads, LATENT]`, or empty. Written when the context is one part.
    pub out_bf16: GlobalMut<bf16>,
    /// `[parts, rows * heads, LATENT]`, weighted sums not yet divided; empty when the context is not split.
    pub partial: GlobalMut<f32>,
    /// `[parts, rows * heads, 2]`: base of the weights in base 2, their sum; empty when the context is not split.
    pub partial_max_sum: GlobalMut<f32>,
    /// Softmax scale times log2 e.
    pub scale_log2: f32,
    pub rows: u32,
    pub heads: u32,
    /// Words of a row of `ancestors`.
    pub words: u32,
}

/// See [`crate::kernels::mla_merge`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MlaMergeArgs {
    /// As in [`MlaAttentionArgs`].
    pub partial: Global<f32>,
    /// As in [`MlaAttentionArgs`].
    pub partial_max_sum: Global<f32>,
    /// `[rows * heads, LATENT]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[rows * heads, LATENT]`, or empty.
    pub out_bf16: GlobalMut<bf16>,
    /// [`super::state`].
    pub state: Global<u32>,
    pub rows: u32,
    /// Parts of the launch before.
    pub parts: u32,
    /// Packed queries.
    pub queries: u32,
}

/// See [`crate::kernels::head_norm_rope`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HeadNormRopeArgs {
    /// `[rows, heads, head_dim]`.
    pub x: Global<f32>,
    /// `[head_dim]`, or empty: no norm.
    pub weight: Global<f32>,
    /// `[positions, head_dim / 2]`, or empty: no rotation.
    pub cos: Global<f32>,
    /// As `cos`.
    pub sin: Global<f32>,
    /// [`super::state`].
    pub state: Global<u32>,
    /// `[out_rows, stride]`.
    pub out: GlobalMut<bf16>,
    pub heads: u32,
    pub head_dim: u32,
    pub stride: u32,
    pub base: u32,
    /// 1: output rows start at S; 0: at 0.
    pub to_cache: u32,
    pub eps: f32,
}

/// See [`crate::kernels::block_attention`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockAttentionArgs {
    /// `[rows, heads, head_dim]`.
    pub q: Global<bf16>,
    /// `[slots, kv_heads, head_dim]` of one layer.
    pub k: Global<bf16>,
    /// As `k`.
    pub v: Global<bf16>,
    /// [`super::state`].
    pub state: Global<u32>,
    /// `[rows, heads, head_dim]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, heads, head_dim]`, or empty.
    pub out_bf16: GlobalMut<bf16>,
    /// Softmax scale times log2 e.
    pub scale_log2: f32,
    pub rows: u32,
    pub heads: u32,
    pub kv_heads: u32,
    /// 0: every row sees everything. Otherwise a row sees this many positions, its own the last.
    pub window: u32,
}
