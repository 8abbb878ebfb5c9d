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
    /// Pairs of a tile at most.
    pub tile: u32,
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
    /// 1 when all rows can be read 16 bytes at a time.
    pub wide: u32,
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
    /// `[rows, parts, PART_WORDS]`, unless a row is one part.
    pub parts: GlobalMut<u32>,
    /// `[rows]`: 0 before and after.
    pub tickets: GlobalMut<u32>,
    pub vocab: u32,
    /// Logits a part.
    pub part: u32,
}

/// See [`crate::kernels::argmax`]: `draw`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DrawArgs {
    pub picks: ArgmaxArgs,
    /// `[rows]`.
    pub depths: Global<u32>,
    /// `[rows, 2]`: the last key and id that are kept; or empty.
    pub limits: Global<u32>,
    pub seed: [u32; 2],
    pub inverse_temperature: f32,
}

/// See [`crate::kernels::sample_limits`]: all of its kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SampleLimitsArgs {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows, 2]`.
    pub limits: GlobalMut<u32>,
    /// `[rows, ROW_WORDS]`, then `[rows, chunks]`: maxima of the chunks.
    pub words: GlobalMut<u32>,
    pub vocab: u32,
    pub inverse_temperature: f32,
    /// 0: all.
    pub top_k: u32,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
}

/// See [`crate::kernels::top_k`]: both of its kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TopKArgs {
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[rows, chunks * groups]`: keys of the groups' largest logits.
    pub groups_max: GlobalMut<u32>,
    /// `[rows, chunks, 2]`: largest logit, and the sum of exponentials relative to it.
    pub sums: GlobalMut<f32>,
    /// `[rows, MAX_CANDIDATES]`: (complement of the id, key), in any order.
    pub candidates: GlobalMut<u32>,
    /// `[rows, 2]`: candidates of a row, blocks that have come to its end.
    pub counts: GlobalMut<u32>,
    /// `[rows, k]`.
    pub ids: GlobalMut<i32>,
    /// `[rows, k]`.
    pub logp: GlobalMut<f32>,
    pub state: GlobalMut<u32>,
    pub vocab: u32,
    pub k: u32,
    /// Groups of a chunk; 0: no bound, every logit is a candidate.
    pub groups: u32,
    /// Candidates that are sorted at most.
    pub room: u32,
}

/// See [`crate::kernels::tree_build`]. Arrays of all sequences, one after the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TreeBuildArgs {
    /// `[levels, k]`.
    pub ids: Global<i32>,
    /// `[levels, k]`, each row descending.
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
    /// Scores below it are not taken.
    pub floor: f32,
    /// 1: the chain of best tokens is taken first.
    pub spine: u32,
    /// Columns of `logp` that lie in shared memory.
    pub columns: u32,
}

/// See [`crate::kernels::accept`]. Arrays of all sequences, one after the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AcceptArgs {
    /// `[rows]`.
    pub tokens: Global<i32>,
    /// `[rows]`.
    pub parents: Global<i32>,
    /// `[rows]`.
    pub pick: Global<i32>,
    /// `[rows]`.
    pub best: Global<f32>,
    /// `[rows]`.
    pub second: Global<f32>,
    pub state: GlobalMut<u32>,
    /// `[RECORD_WORDS]`, see [`record`].
    pub record: GlobalMut<u32>,
    pub rows: u32,
}

/// Words of the record, all that the host reads after a round: `u32 [RECORD_WORDS]`.
pub mod record {
    use crate::args::state::MAX_PATH;

    /// Rows of the accepted path, the root included; 0 after an error.
    pub const PATH_LEN: usize = 0;
    /// Nodes of the tree, the root not counted.
    pub const NODES: usize = 1;
    /// As the state's `ERROR`.
    pub const ERROR: usize = 2;
    /// As the state's `ERROR_ROW`.
    pub const ERROR_ROW: usize = 3;
    /// The target's pick at each row of the path, `PATH_LEN` of them, then zeros: the tokens of the path behind the
    /// root, and the next bonus.
    pub const PICKS: usize = 4;
    /// Bits of the gap at each row of the path, best minus second: f32, then zeros.
    pub const GAPS: usize = PICKS + MAX_PATH;
    /// Length of the record.
    pub const RECORD_WORDS: usize = GAPS + MAX_PATH;
}
