//! The tree of [`super::tree_build`] for small budgets: node by node, in one warp.
//!
//! Grid: x = sequences, a block each. All threads bring the log-probabilities into shared memory; warp 0 selects; all
//! threads write the rows. A level's row is descending, so the best candidate under a node is its first child not taken
//! yet: the frontier has one entry a node, at most `budget + 1`, in registers (lane l owns nodes l, l + 32, l + 64),
//! and a step is one warp maximum over integer keys. Level by level, seven sorts and merges take longer than 64 short
//! steps.

use cuda_std::{GlobalMut, Shared, kernel, math, static_shared, thread, warp};

use super::{errors, order};
use crate::args::state::{BONUS, ERROR, ERROR_DRAFT, NODES, STATE_WORDS};
use crate::args::tokens::TreeBuildArgs;
use crate::unroll::unroll;

/// Threads a block: one for each word of the ancestors, at most 65 rows of 3.
pub const THREADS: u32 = 256;
/// Nodes at most, the root not counted.
pub const MAX_BUDGET: usize = 64;
const MAX_LEVELS: usize = super::tree_build::MAX_LEVELS;
/// Candidates a position at most.
pub const MAX_K: usize = 64;

const MAX_ROWS: usize = MAX_BUDGET + 1;
const WARPS: usize = (THREADS / warp::WARP) as usize;
const LANES: usize = warp::WARP as usize;
/// Nodes that a lane owns.
const OWNED: usize = MAX_ROWS.div_ceil(LANES);
/// Bits of a rank in a packed (depth, rank).
const RANK_BITS: u32 = 8;

static_shared!(fn tree_build_small_logp() -> [f32; MAX_LEVELS * MAX_K]);
static_shared!(fn tree_build_small_parents() -> [u32; MAX_ROWS]);
static_shared!(fn tree_build_small_depths() -> [u32; MAX_ROWS]);
static_shared!(fn tree_build_small_ranks() -> [u32; MAX_ROWS]);
static_shared!(fn tree_build_small_bad() -> [u32; WARPS]);
static_shared!(fn tree_build_small_nodes() -> [u32; 1]);

/// A lane's nodes as parents: the frontier's entry of a node is its next child.
#[derive(Clone, Copy)]
struct Parent {
    /// Key of the candidate's score.
    key: u32,
    /// The node's own score.
    score: f32,
    depth: u32,
    /// Rank of the candidate.
    next: u32,
}

/// Log-probabilities that the search can reach.
#[derive(Clone, Copy)]
struct Draft {
    logp: Shared<f32>,
    levels: u32,
    k: u32,
    /// Least key that is taken.
    floor: u32,
}

impl Draft {
    /// Key of the child of rank `rank` under a node of `score` at `depth`.
    #[inline(always)]
    fn key(self, score: f32, depth: u32, rank: u32) -> u32 {
        if depth >= self.levels || rank >= self.k {
            return order::ABSENT;
        }
        let key = order::key(score + self.logp.get((depth * self.k + rank) as usize));
        if key < self.floor { order::ABSENT } else { key }
    }
}

/// Brings the first `levels` rows in; true on all threads if one of them cannot be used.
#[inline(always)]
fn stage(a: &TreeBuildArgs, state: GlobalMut<u32>, draft: Draft) -> bool {
    let t = thread::thread_idx_x();
    let first = thread::block_idx_x() as usize * (a.levels * a.k) as usize;
    let mut bad = false;
    let mut i = t;
    while i < draft.levels * draft.k {
        let v = a.logp.get(first + i as usize);
        let (level, column) = (math::div(i, draft.k), math::rem(i, draft.k));
        if column < a.budget - level && (v.is_nan() || v == f32::INFINITY) {
            bad = true;
            errors::report(state, ERROR_DRAFT, level);
        }
        draft.logp.set(i as usize, v.min(0.0));
        i += THREADS;
    }
    let votes = warp::ballot(bad);
    if warp::lane_id() == 0 {
        tree_build_small_bad().set(warp::warp_id() as usize, votes);
    }
    thread::sync_threads();
    let mut votes = 0;
    for w in 0..WARPS {
        votes |= tree_build_small_bad().get(w);
    }
    votes != 0
}

/// Takes up to `budget` nodes; writes parent, depth and rank of each, and returns their number. Warp 0 only.
#[inline(always)]
fn select(draft: Draft, budget: u32, spine: bool) -> u32 {
    let (parents, depths, ranks) = (tree_build_small_parents(), tree_build_small_depths(), tree_build_small_ranks());
    let lane = warp::lane_id();
    let mut own = [Parent { key: order::ABSENT, score: 0.0, depth: 0, next: 0 }; OWNED];
    if lane == 0 {
        own[0].key = draft.key(0.0, 0, 0);
    }
    let (mut nodes, mut on_spine) = (0, spine);
    while nodes < budget {
        let mut best = order::ABSENT;
        unroll!(slot in 0 1 2; {
            best = if own[slot].key > best { own[slot].key } else { best };
        });
        let mut best = warp::max(best);
        if on_spine {
            // The first child of the last node, as long as it may be taken.
            let mut child = order::ABSENT;
            unroll!(slot in 0 1 2; {
                child = if slot as u32 * warp::WARP + lane == nodes { own[slot].key } else { child };
            });
            let child = warp::max(child);
            on_spine = child != order::ABSENT;
            best = if on_spine { child } else { best };
        }
        if best == order::ABSENT {
            break;
        }
        // The smallest node with that key: nodes ascend with the slot first, then with the lane.
        let (mut parent, mut packed) = (0, 0);
        unroll!(slot in 2 1 0; {
            let lanes = warp::ballot(own[slot].key == best);
            if lanes != 0 {
                parent = (slot * LANES) as u32 + lanes.trailing_zeros();
                packed = own[slot].depth << RANK_BITS | own[slot].next;
            }
        });
        if on_spine {
            parent = nodes;
            packed = nodes << RANK_BITS;
        }
        let packed = warp::shfl(packed, parent);
        let (depth, rank) = (packed >> RANK_BITS, packed & ((1 << RANK_BITS) - 1));
        nodes += 1;
        if lane == 0 {
            parents.set(nodes as usize, parent);
            depths.set(nodes as usize, depth + 1);
            ranks.set(nodes as usize, rank);
        }
        unroll!(slot in 0 1 2; {
            let (node, p) = (slot as u32 * warp::WARP + lane, &mut own[slot]);
            if node == parent {
                p.next += 1;
                p.key = draft.key(p.score, p.depth, p.next);
            }
            if node == nodes {
                p.score = order::value(best);
                p.depth = depth + 1;
                p.key = draft.key(p.score, p.depth, p.next);
            }
        });
    }
    nodes
}

#[kernel]
pub fn tree_build_small(a: TreeBuildArgs) {
    let (parents, depths, ranks) = (tree_build_small_parents(), tree_build_small_depths(), tree_build_small_ranks());
    let t = thread::thread_idx_x();
    let sequence = thread::block_idx_x() as usize;
    let state = a.state.slice(sequence * STATE_WORDS, STATE_WORDS);
    // A tree of `budget` nodes is at most that deep.
    let levels = if a.levels < a.budget { a.levels } else { a.budget };
    let (lowest, floor) = (order::key(f32::NEG_INFINITY) + 1, order::key(a.floor));
    let floor = if floor > lowest { floor } else { lowest };
    let draft = Draft { logp: tree_build_small_logp(), levels, k: a.k, floor };

    let failed = stage(&a, state, draft) || state.get(ERROR) != 0;
    if warp::warp_id() == 0 {
        let nodes = if failed { 0 } else { select(draft, a.budget, a.spine != 0) };
        if warp::lane_id() == 0 {
            tree_build_small_nodes().set(0, nodes);
            state.set(NODES, nodes);
        }
    }
    thread::sync_threads();
    let nodes = tree_build_small_nodes().get(0);

    let rows = a.budget + 1;
    let row = t as usize;
    if t < rows {
        let (mut token, mut parent, mut depth) = (0, -1, 0);
        if t == 0 {
            token = state.get(BONUS) as i32;
        } else if t <= nodes {
            depth = depths.get(row);
            parent = parents.get(row) as i32;
            let drafted = sequence * (a.levels * a.k) as usize;
            token = a.ids.get(drafted + ((depth - 1) * a.k + ranks.get(row)) as usize);
        }
        let at = sequence * rows as usize + row;
        a.tokens.set(at, token);
        a.parents.set(at, parent);
        a.depths.set(at, depth);
    }

    let words = rows.div_ceil(u32::BITS);
    if t < rows * words {
        let (row, word) = (math::div(t, words), math::rem(t, words));
        let (mut node, mut bits) = (row, 0);
        loop {
            if node / u32::BITS == word {
                bits |= 1 << (node % u32::BITS);
            }
            if node == 0 || row > nodes {
                break;
            }
            node = parents.get(node as usize);
        }
        a.ancestors.set(sequence * (rows * words) as usize + t as usize, bits);
    }
}
