//! Launcher of [`gpu::kernels::mla_attention`] and [`gpu::kernels::mla_merge`].

use std::f32::consts::LOG2_E;

use cuda_std::{Global, GlobalMut, Kernel, bf16};
use gpu::args::attention::{KEY, LATENT, MlaAttentionArgs, MlaMergeArgs};
use gpu::kernels::mla_attention::{self as kernel, PART_KEYS};
use gpu::kernels::mla_merge::Form;
use gpu::kernels::mla_tile::Shape;
use gpu::kernels::{mla_merge, mla_wide};

use super::{Cache, KvFormat, aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// Blocks that the CPU device's launches are planned for, in place of its threads: the same on every machine.
const CPU_BLOCKS: usize = 128;

/// About what adding the parts takes on an H200: the second kernel, and one part of one query.
const MERGE_US: f64 = 1.5;
const PART_US: f64 = 0.0006;
/// Blocks that a launch has at most where the context is split: one for each multiprocessor of the largest GPUs.
const MAX_PROCESSORS: usize = 192;
/// The kernels with `wgmma`.
const WIDE_PTX: &str = "sm_90";

/// Attention over the latent cache: all rows see slots `0..S`, row r also slot S + i where ancestor bit i is set.
pub struct MlaAttention {
    /// `[rows, heads, KEY]`, see [`super::query`].
    pub q: Global<bf16>,
    /// Of one layer, rows up to S + `rows` appended. It is read only.
    pub cache: Cache,
    /// `[rows, ceil(rows / 32)]`.
    pub ancestors: Global<u32>,
    pub state: Global<u32>,
    /// Softmax scale.
    pub scale: f32,
    pub rows: usize,
    pub heads: usize,
    /// [`MlaPlan::workspace`] values at least.
    pub workspace: GlobalMut<f32>,
    /// `[rows, heads, LATENT]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, heads, LATENT]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
}

/// The kinds of a block, by the packed queries that it holds; the compact ones fit into 99 KiB of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlaBlock {
    /// Of sm_90 alone.
    Wide64,
    /// As `Wide64`, but two blocks share the columns of the values.
    WideHalves,
    Rows32,
    Rows16,
    Compact32,
    Compact16,
}

impl MlaBlock {
    pub const ALL: [Self; 6] =
        [Self::Wide64, Self::WideHalves, Self::Rows32, Self::Rows16, Self::Compact32, Self::Compact16];

    pub fn kernel(self, cache: KvFormat) -> &'static Kernel<MlaAttentionArgs> {
        match (cache, self) {
            (KvFormat::Bf16, Self::Wide64) => &mla_wide::MLA_ATTENTION_WIDE_64,
            (KvFormat::Bf16, Self::WideHalves) => &mla_wide::MLA_ATTENTION_WIDE_HALVES,
            (KvFormat::Bf16, Self::Rows32) => &kernel::MLA_ATTENTION_32,
            (KvFormat::Bf16, Self::Rows16) => &kernel::MLA_ATTENTION_16,
            (KvFormat::Bf16, Self::Compact32) => &kernel::MLA_ATTENTION_COMPACT_32,
            (KvFormat::Bf16, Self::Compact16) => &kernel::MLA_ATTENTION_COMPACT_16,
            (KvFormat::F8, Self::Wide64) => &mla_wide::MLA_ATTENTION_F8_WIDE_64,
            (KvFormat::F8, Self::WideHalves) => &mla_wide::MLA_ATTENTION_F8_WIDE_HALVES,
            (KvFormat::F8, Self::Rows32) => &kernel::MLA_ATTENTION_F8_32,
            (KvFormat::F8, Self::Rows16) => &kernel::MLA_ATTENTION_F8_16,
            (KvFormat::F8, Self::Compact32) => &kernel::MLA_ATTENTION_F8_COMPACT_32,
            (KvFormat::F8, Self::Compact16) => &kernel::MLA_ATTENTION_F8_COMPACT_16,
        }
    }

    /// As its kernels are called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wide64 => "wide_64",
            Self::WideHalves => "wide_halves",
            Self::Rows32 => "32",
            Self::Rows16 => "16",
            Self::Compact32 => "compact_32",
            Self::Compact16 => "compact_16",
        }
    }

    /// Whether a device has its instructions and shared memory.
    pub fn runs_on(self, device: &Device) -> bool {
        let info = device.info();
        let wide = !device.is_cuda() || info.ptx.as_deref() == Some(WIDE_PTX);
        self.size().2 <= info.max_shared && (wide || !matches!(self, Self::Wide64 | Self::WideHalves))
    }

    /// Blocks for `queries` packed queries.
    fn across(self, queries: usize) -> usize {
        let blocks = queries.div_ceil(self.size().0);
        if self == Self::WideHalves { 2 * blocks } else { blocks }
    }

    /// Packed queries of a block, keys of a round, and bytes of dynamic shared memory.
    fn size(self) -> (usize, usize, u32) {
        let of = |shape: Shape| (shape.rows(), shape.keys(), shape.shared_bytes());
        match self {
            Self::Wide64 | Self::WideHalves => (mla_wide::ROWS, mla_wide::KEYS, mla_wide::SHARED),
            Self::Rows32 => of(kernel::ROWS_32),
            Self::Rows16 => of(kernel::ROWS_16),
            Self::Compact32 => of(kernel::COMPACT_32),
            Self::Compact16 => of(kernel::COMPACT_16),
        }
    }

    /// About what a block takes on an H200 beside its rounds, with its queries and sums, and a round; only the
    /// proportions count.
    fn block_us(self) -> (f64, f64) {
        match self {
            Self::Wide64 => (7.2, 1.12),
            Self::WideHalves => (4.8, 1.1),
            Self::Rows32 => (4.5, 3.3),
            Self::Rows16 => (2.4, 2.7),
            Self::Compact32 => (0.0, 0.55),
            Self::Compact16 => (0.0, 0.6),
        }
    }
}

/// How a launch is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaPlan {
    pub block: MlaBlock,
    /// Parts that the context is split into.
    pub parts: usize,
}

impl MlaPlan {
    /// Values of the workspace.
    pub fn workspace(self, rows: usize, heads: usize) -> usize {
        if self.parts == 1 { 0 } else { self.parts * rows * heads * (LATENT + 2) }
    }
}

/// The plan for a cache of `slots`.
pub fn mla_plan(device: &Device, slots: usize, rows: usize, heads: usize) -> MlaPlan {
    let processors = if device.is_cuda() { device.info().multiprocessors as usize } else { CPU_BLOCKS };
    let wide = device.is_cuda() && MlaBlock::Wide64.runs_on(device);
    let blocks: &[MlaBlock] = match MlaBlock::Rows32.runs_on(device) {
        true if wide => &[MlaBlock::Wide64, MlaBlock::WideHalves, MlaBlock::Rows32, MlaBlock::Rows16],
        true => &[MlaBlock::Rows32, MlaBlock::Rows16],
        false => &[MlaBlock::Compact32, MlaBlock::Compact16],
    };
    plan(blocks, processors.min(MAX_PROCESSORS), slots, rows * heads)
}

/// The cheapest by rounds and by what parts cost. The context is split only while all blocks run at once.
fn plan(blocks: &[MlaBlock], processors: usize, slots: usize, queries: usize) -> MlaPlan {
    let mut best = (f64::INFINITY, MlaPlan { block: blocks[0], parts: 1 });
    for &block in blocks {
        let ((_, keys_a_round, _), (own, round)) = (block.size(), block.block_us());
        let across = block.across(queries).max(1);
        let most = (processors / across).min(slots.div_ceil(PART_KEYS as usize)).clamp(1, kernel::MAX_PARTS);
        for parts in 1..=most {
            let steps = slots.div_ceil(PART_KEYS as usize) * (PART_KEYS / kernel::STEP) as usize;
            let keys = steps.div_ceil(parts) * kernel::STEP as usize;
            let (waves, rounds) = ((across * parts).div_ceil(processors), keys.div_ceil(keys_a_round));
            let merge = if parts == 1 { 0.0 } else { MERGE_US + (parts * queries) as f64 * PART_US };
            let us = waves as f64 * (own + rounds as f64 * round) + merge;
            if us < best.0 {
                best = (us, MlaPlan { block, parts });
            }
        }
    }
    best.1
}

/// Values of a workspace that does for up to `rows` rows on any device.
pub fn mla_workspace(slots: usize, rows: usize, heads: usize) -> usize {
    let parts = slots.div_ceil(PART_KEYS as usize).min(kernel::MAX_PARTS);
    let sums = MAX_PROCESSORS * mla_wide::ROWS;
    if parts == 1 { 0 } else { (parts * rows * heads).min(sums) * (LATENT + 2) }
}

/// The second kernel for so many parts: the least that loads all at once.
fn merge_of(parts: usize) -> (&'static Kernel<MlaMergeArgs>, Form) {
    let all = [
        (&mla_merge::MLA_MERGE_4, mla_merge::FORM_4),
        (&mla_merge::MLA_MERGE_17, mla_merge::FORM_17),
        (&mla_merge::MLA_MERGE_34, mla_merge::FORM_34),
    ];
    let found = all.into_iter().find(|(_, form)| parts <= form.parts());
    found.unwrap_or((&mla_merge::MLA_MERGE_136, mla_merge::FORM_136))
}

/// Queues the attention of `rows` rows. Keys are fetched while the launch before may still run: it must not write the
/// cache.
pub fn mla_attention(device: &Device, p: MlaAttention) -> Result<()> {
    let plan = mla_plan(device, p.cache.slots(), p.rows, p.heads);
    mla_attention_as(device, p, plan)
}

/// As [`mla_attention`] with a plan of the caller's.
pub fn mla_attention_as(device: &Device, p: MlaAttention, plan: MlaPlan) -> Result<()> {
    let queries = p.rows * p.heads;
    let (block, (_, _, shared)) = (plan.block.kernel(p.cache.format), plan.block.size());
    let name = block.name();
    let words = p.rows.div_ceil(u32::BITS as usize);
    state_holds(name, p.state.len())?;
    contract(name, p.rows <= kernel::MAX_ROWS, || {
        format!("{} rows; at most {} are possible", p.rows, kernel::MAX_ROWS)
    })?;
    contract(name, plan.block.runs_on(device), || {
        format!("a block needs {shared} bytes of shared memory, or instructions, that the device has not")
    })?;
    contract(name, (1..=kernel::MAX_PARTS).contains(&plan.parts), || {
        format!("{} parts; 1 to {} are possible", plan.parts, kernel::MAX_PARTS)
    })?;
    p.cache.check(name, p.rows)?;
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
    let need = plan.workspace(p.rows, p.heads);
    contract(name, p.workspace.len() >= need, || {
        format!("the workspace holds {}, {need} are needed", p.workspace.len())
    })?;
    let views = [
        ("q", p.q.addr()),
        ("cache", p.cache.bytes.addr()),
        ("workspace", p.workspace.addr()),
        ("the f32 output", p.out_f32.addr()),
        ("the bf16 output", p.out_bf16.addr()),
    ];
    for (what, addr) in views {
        aligned(name, what, addr, 16)?;
    }

    let (partial, partial_max_sum) = match plan.parts {
        1 => (GlobalMut::EMPTY, GlobalMut::EMPTY),
        parts => {
            let values = parts * queries * LATENT;
            let pairs = p.workspace.addr() + (values * size_of::<f32>()) as u64;
            (GlobalMut::from_raw(p.workspace.addr(), values), GlobalMut::from_raw(pairs, parts * queries * 2))
        }
    };
    let args = MlaAttentionArgs {
        q: p.q,
        cache: p.cache.bytes.as_ref(),
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
    let across = plan.block.across(queries) as u32;
    let dims = Dims { grid: [across, plan.parts as u32, 1], block: [kernel::THREADS, 1, 1], shared };
    device.launch_overlapping(block, dims, args)?;
    if plan.parts == 1 {
        return Ok(());
    }
    let args = MlaMergeArgs {
        partial: partial.as_ref(),
        partial_max_sum: partial_max_sum.as_ref(),
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        state: p.state,
        rows: p.rows as u32,
        parts: plan.parts as u32,
        queries: queries as u32,
    };
    let (merge, form) = merge_of(plan.parts);
    let grid = [form.blocks(queries) as u32, 1, 1];
    device.launch_overlapping(merge, Dims { grid, block: [mla_merge::THREADS, 1, 1], shared: 0 }, args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_possible_and_fit_into_the_workspace() {
        let kinds: [&[MlaBlock]; 2] = [&MlaBlock::ALL[..4], &MlaBlock::ALL[4..]];
        for (blocks, processors) in kinds.into_iter().flat_map(|b| [1, 108, 132, 188, 192].map(|p| (b, p))) {
            for slots in [1, 63, 64, 65, 1089, 8193, 32768, 262_144] {
                for (rows, heads) in [(1, 1), (1, 8), (5, 8), (1, 64), (8, 64), (64, 64), (1025, 64)] {
                    let found = plan(blocks, processors, slots, rows * heads);
                    let across = found.block.across(rows * heads);
                    assert!(found.parts == 1 || across * found.parts <= processors, "{found:?}");
                    assert!((1..=kernel::MAX_PARTS).contains(&found.parts), "{found:?}");
                    assert!(found.workspace(rows, heads) <= mla_workspace(slots, rows, heads), "{found:?}");
                    assert!(found.workspace(rows, heads) <= mla_workspace(slots, 1025, heads), "{found:?}");
                }
            }
        }
    }

    #[test]
    fn few_queries_take_small_blocks_and_many_parts() {
        let plan = |slots, queries| plan(&MlaBlock::ALL[..4], 132, slots, queries);
        assert_eq!(plan(8193, 8), MlaPlan { block: MlaBlock::Rows16, parts: 129 });
        assert_eq!(plan(8193, 64), MlaPlan { block: MlaBlock::WideHalves, parts: 65 });
        assert_eq!(plan(8256, 4096), MlaPlan { block: MlaBlock::Wide64, parts: 2 });
        assert_eq!(plan(8193, 65_600), MlaPlan { block: MlaBlock::Wide64, parts: 1 });
    }
}
