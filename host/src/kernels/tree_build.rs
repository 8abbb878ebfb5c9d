//! Launcher of [`gpu::kernels::tree_build`] and, for small budgets, [`gpu::kernels::tree_build_small`].

use cuda_std::{Global, GlobalMut};
use gpu::args::state::STATE_WORDS;
use gpu::args::tokens::TreeBuildArgs;
use gpu::kernels::{tree_build as kernel, tree_build_small as small};

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// The best-first trees of at most `budget` nodes under the bonus tokens of `sequences` sequences. Every array holds
/// those of all sequences, one after the other.
pub struct TreeBuild {
    /// `[levels, k]`.
    pub ids: Global<i32>,
    /// `[levels, k]`, each row descending.
    pub logp: Global<f32>,
    /// Gives the bonus token, takes the number of nodes and the error of a level with NaN or +inf.
    pub state: GlobalMut<u32>,
    /// `[budget + 1]`: token of each row; row 0 is the bonus.
    pub tokens: GlobalMut<i32>,
    /// `[budget + 1]`: row of the parent, -1 for the root and for rows behind the last node.
    pub parents: GlobalMut<i32>,
    /// `[budget + 1]`.
    pub depths: GlobalMut<u32>,
    /// `[budget + 1, ceil((budget + 1) / 32)]`: bit i of row r: r sees row i.
    pub ancestors: GlobalMut<u32>,
    pub sequences: usize,
    /// L: drafted positions.
    pub levels: usize,
    pub k: usize,
    pub budget: usize,
    pub growth: Growth,
}

/// What a tree takes besides the most probable prefixes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Prefixes whose log-probability is below it are not taken; -inf: all are.
    pub floor: f32,
    /// The chain of best tokens is taken before all else.
    pub spine: bool,
}

impl Growth {
    /// Nothing besides.
    pub const BEST_FIRST: Self = Self { floor: f32::NEG_INFINITY, spine: false };
}

/// The kernels that build trees; where both can, they build the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builder {
    /// Node by node, for small budgets and few candidates.
    Warp,
    /// All nodes at once.
    Block,
}

impl Builder {
    /// Whether it can build trees of `budget` nodes from `k` candidates a position.
    pub fn can(self, budget: usize, k: usize) -> bool {
        match self {
            Self::Warp => budget <= small::MAX_BUDGET && k <= small::MAX_K,
            Self::Block => budget <= kernel::MAX_BUDGET && k <= kernel::MAX_K,
        }
    }

    /// The one that is used.
    pub fn of(budget: usize, k: usize) -> Self {
        if Self::Warp.can(budget, k) { Self::Warp } else { Self::Block }
    }
}

/// Queues the build of the trees.
pub fn tree_build(device: &Device, p: TreeBuild) -> Result<()> {
    let builder = Builder::of(p.budget, p.k);
    tree_build_by(device, p, builder)
}

/// As [`tree_build`], by the kernel that is named.
pub fn tree_build_by(device: &Device, p: TreeBuild, builder: Builder) -> Result<()> {
    let name = kernel::TREE_BUILD.name();
    contract(name, builder == Builder::Block || builder.can(p.budget, p.k), || {
        format!("a budget of {} from {} candidates a position is too much for one warp", p.budget, p.k)
    })?;
    let (rows, n) = (p.budget + 1, p.sequences);
    contract(name, p.budget <= kernel::MAX_BUDGET, || {
        format!("a budget of {}; at most {} are possible", p.budget, kernel::MAX_BUDGET)
    })?;
    contract(name, p.levels <= kernel::MAX_LEVELS, || {
        format!("{} drafted positions; at most {} are possible", p.levels, kernel::MAX_LEVELS)
    })?;
    contract(name, (1..=kernel::MAX_K).contains(&p.k), || format!("k = {}; 1 to {} are possible", p.k, kernel::MAX_K))?;
    contract(name, !p.growth.floor.is_nan(), || "the least log-probability is NaN".into())?;
    holds(name, "ids", p.ids.len(), n * p.levels * p.k)?;
    holds(name, "logp", p.logp.len(), n * p.levels * p.k)?;
    holds(name, "state", p.state.len(), n * STATE_WORDS)?;
    holds(name, "tokens", p.tokens.len(), n * rows)?;
    holds(name, "parents", p.parents.len(), n * rows)?;
    holds(name, "depths", p.depths.len(), n * rows)?;
    holds(name, "ancestors", p.ancestors.len(), n * rows * rows.div_ceil(32))?;
    let args = TreeBuildArgs {
        ids: p.ids,
        logp: p.logp,
        state: p.state,
        tokens: p.tokens,
        parents: p.parents,
        depths: p.depths,
        ancestors: p.ancestors,
        levels: p.levels as u32,
        k: p.k as u32,
        budget: p.budget as u32,
        floor: p.growth.floor,
        spine: p.growth.spine as u32,
        columns: kernel::columns(p.budget, p.levels.min(p.budget), p.k),
    };
    let grid = [n as u32, 1, 1];
    if builder == Builder::Warp {
        return device.launch_overlapping(
            &small::TREE_BUILD_SMALL,
            Dims { grid, block: [small::THREADS, 1, 1], shared: 0 },
            args,
        );
    }
    // With all columns that count in shared memory, nothing looks for the others.
    let whole = args.columns as usize == p.k.min(p.budget);
    let entry = if whole { &kernel::TREE_BUILD } else { &kernel::TREE_BUILD_WIDE };
    let shared = kernel::shared_bytes(p.budget, p.levels, p.k);
    device.launch_overlapping(entry, Dims { grid, block: [kernel::THREADS, 1, 1], shared }, args)
}
