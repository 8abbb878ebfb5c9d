//! One checked launcher a kernel. A launcher checks the kernel's contract (shapes against buffers) and computes the
//! grid; nothing above this room and `linear` launches anything.

mod accept;
mod argmax;
mod bandwidth;
mod block_attention;
mod cache;
mod combine;
mod commit;
mod embed;
mod expert_sort;
mod mla_attention;
mod query;
mod rms_norm;
mod route;
mod rows;
mod selftest;
mod state;
mod swiglu;
mod top_k;
mod tree_build;
mod widen;

pub use accept::{Accept, accept};
pub use argmax::{
    Argmax, ArgmaxWorkspace, Draw, SampleLimits, Sampling, argmax, argmax_workspace, draw, sample_limits,
    sample_limits_workspace,
};
pub use bandwidth::{copy_words, read_threads, read_words};
pub use block_attention::{BlockAttention, block_attention};
pub use cache::{Cache, KvFormat};
pub use combine::{Combine, combine};
pub use commit::{Commit, GatherRows, advance, commit, gather_rows};
pub use embed::{Embed, Table, embed};
pub use expert_sort::{ExpertSort, expert_sort};
pub use mla_attention::{MlaAttention, MlaBlock, MlaPlan, mla_attention, mla_attention_as, mla_plan, mla_workspace};
pub use query::{HeadNormRope, KvAppend, Query, Rope, head_norm_rope, kv_append, query};
pub use rms_norm::{RmsNorm, rms_norm};
pub use route::{Route, route};
pub use rows::{RoundBf16, Tap, round_bf16, tap};
pub use selftest::{WordsTest, selftest_elements, selftest_math, selftest_matrix, selftest_words};
pub use state::initial_state;
pub use swiglu::{Swiglu, swiglu};
pub use top_k::{TopK, TopKWorkspace, top_k, top_k_workspace};
pub use tree_build::{Builder, Growth, TreeBuild, tree_build, tree_build_by};
pub use widen::widen_bf16;

use cuda_std::{Global, bf16};

use crate::device::DeviceError;

/// Activations: the same values unrounded and rounded once to bf16. A product reads the one that its weights want; what
/// nobody wants may be `EMPTY`.
#[derive(Clone, Copy)]
pub struct Acts {
    pub f32: Global<f32>,
    pub bf16: Global<bf16>,
}

/// A broken contract of `kernel`, found before the launch.
pub(crate) fn contract(kernel: &'static str, holds: bool, what: impl FnOnce() -> String) -> Result<(), DeviceError> {
    if holds { Ok(()) } else { Err(DeviceError::Contract { kernel, what: what() }) }
}

/// Blocks along a grid's y axis at most.
pub(crate) const MAX_GRID_Y: usize = 65535;

/// A buffer of `kernel` must hold at least `need` elements.
pub(crate) fn holds(kernel: &'static str, what: &'static str, len: usize, need: usize) -> Result<(), DeviceError> {
    contract(kernel, len >= need, || format!("{what} holds {len}, {need} are wanted"))
}

/// `kernel` reads `what` in pieces of `bytes`.
pub(crate) fn aligned(kernel: &'static str, what: &str, addr: u64, bytes: u64) -> Result<(), DeviceError> {
    contract(kernel, addr.is_multiple_of(bytes), || {
        format!("{what} at {addr:#x}, expected a multiple of {bytes} bytes")
    })
}

/// `kernel` reads the device-resident state.
pub(crate) fn state_holds(kernel: &'static str, len: usize) -> Result<(), DeviceError> {
    let words = gpu::args::state::STATE_WORDS;
    contract(kernel, len >= words, || format!("the state holds {len} words, expected {words}"))
}
