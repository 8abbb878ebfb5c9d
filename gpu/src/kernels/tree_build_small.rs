//! The tree of [`super::tree_build`] for small budgets: node by node, in one warp.
//!
//! Grid: x = sequences, a block each. All threads bring the log-probabilities into shared memory; warp 0 selects; all
//! threads write the rows. A level's row is descending, so the best candidate under a node is its first child not
//! taken yet: the frontier has one entry a node, in registers (lane l owns nodes l and l + 32), and a step is one warp
//! minimum: scores are at most +0, and of such floats the larger has the smaller bits. A step takes what its
//! instructions take, one warp's: what the next step may add to a score lies in registers before it is known whose it
//! is, rows and columns of -inf behind the draft's stand for bounds, and the second half of the nodes is looked at once
//! there is one.

use cuda_std::{GlobalMut, Shared, kernel, math, static_shared, thread, warp};

use super::errors;
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
/// Nodes that a lane owns. The last one that is taken is nobody's parent, and has no owner where there are 64.
const OWNED: usize = 2;
const _: () = assert!(OWNED * warp::WARP as usize >= MAX_BUDGET);
/// Columns and rows of -inf behind those of the draft: a step looks at most two ahead.
const MARGIN: u32 = 2;
const ROOM: usize = (MAX_LEVELS + MARGIN as usize) * (MAX_K + MARGIN as usize);
/// Bits of an index into the draft in a packed node.
const INDEX_BITS: u32 = 16;
const _: () = assert!(ROOM <= 1 << INDEX_BITS);

static_shared!(fn tree_build_small_logp() -> [f32; ROOM]);
// Parent, and where the node's log-probability lies.
static_shared!(fn tree_build_small_nodes() -> [u32; MAX_ROWS]);
static_shared!(fn tree_build_small_bad() -> [u32; WARPS]);
static_shared!(fn tree_build_small_count() -> [u32; 1]);

/// A node as a parent: the frontier's entry of a node is its next child, the candidate.
#[derive(Clone, Copy)]
struct Parent {
    /// Bits of the candidate's score.
    bits: u32,
    /// The node's own score.
    score: f32,
    /// Where the candidate's log-probability lies, and, [`INDEX_BITS`] higher, its best child's.
    at: u32,
    /// Log-probability of the candidate's next sibling, and of its best child.
    sibling: f32,
    child: f32,
}

impl Parent {
    const NONE: Self = Self { bits: u32::MAX, score: 0.0, at: 0, sibling: 0.0, child: 0.0 };
}

/// Log-probabilities that the search can reach, `[levels + MARGIN, stride]`; none is -0.
#[derive(Clone, Copy)]
struct Draft {
    logp: Shared<f32>,
    levels: u32,
    k: u32,
    stride: u32,
    /// Bits of the least score that is taken.
    floor: u32,
}

impl Draft {
    /// A node whose next child has the rank `rank`.
    #[inline(always)]
    fn parent(self, score: f32, depth: u32, rank: u32) -> Parent {
        let (index, below) = (depth * self.stride + rank, (depth + 1) * self.stride);
        let bits = (score + self.logp.get(index as usize)).to_bits();
        self.looked(Parent { bits, score, at: below << INDEX_BITS | index, ..Parent::NONE })
    }

    /// The same with the values that its place names.
    #[inline(always)]
    fn looked(self, p: Parent) -> Parent {
        let (index, below) = (p.at & ((1 << INDEX_BITS) - 1), p.at >> INDEX_BITS);
        Parent { sibling: self.logp.get(index as usize + 1), child: self.logp.get(below as usize), ..p }
    }
}

/// Brings the first `levels` rows in; true on all threads if one of them cannot be used.
#[inline(always)]
fn stage(a: &TreeBuildArgs, state: GlobalMut<u32>, draft: Draft) -> bool {
    let first = thread::block_idx_x() as usize * (a.levels * a.k) as usize;
    let stride = draft.stride;
    let end = (draft.levels + MARGIN) * stride;
    let mut bad = false;
    let mut base = thread::thread_idx_x();
    while base < end {
        // Four loads on their way at once.
        let (mut places, mut values) = ([(0, 0); 4], [f32::NEG_INFINITY; 4]);
        unroll!(i in 0 1 2 3; {
            let at = base + i as u32 * THREADS;
            let (level, column) = (math::div(at, stride), math::rem(at, stride));
            places[i] = (level, column);
            if level < draft.levels && column < draft.k {
                values[i] = a.logp.get(first + (level * draft.k + column) as usize);
            }
        });
        unroll!(i in 0 1 2 3; {
            let ((level, column), v) = (places[i], values[i]);
            if level < draft.levels && column < a.budget - level && (v.is_nan() || v == f32::INFINITY) {
                bad = true;
                errors::report(state, ERROR_DRAFT, level);
            }
            let at = base + i as u32 * THREADS;
            if at < end {
                // -0 becomes +0.
                draft.logp.set(at as usize, v.min(0.0) + 0.0);
            }
        });
        base += 4 * THREADS;
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

/// Takes nodes until there are `until`, which lie in the first `SLOTS` slots; leaves each of them. Returns their number
/// and whether there may be more.
#[inline(always)]
fn take<const SLOTS: usize>(draft: Draft, own: &mut [Parent; OWNED], nodes: u32, until: u32) -> (u32, bool) {
    let (taken, lane) = (tree_build_small_nodes(), warp::lane_id());
    let (mut nodes, mut more) = (nodes, true);
    while nodes < until && more {
        let first = own[0].bits;
        let second = own[1].bits;
        let best = warp::min(if SLOTS == 1 || first < second { first } else { second });
        // The smallest node with that score: nodes ascend with the slot first, then with the lane.
        let low = warp::ballot(first == best);
        let in_first = SLOTS == 1 || low != 0;
        let lanes = if SLOTS == 1 || low != 0 { low } else { warp::ballot(second == best) };
        let from = lanes.trailing_zeros();
        let at = warp::shfl(if in_first { own[0].at } else { own[1].at }, from);
        let child = warp::shfl(if in_first { own[0].child } else { own[1].child }, from);
        let parent = from + if in_first { 0 } else { warp::WARP };
        more = best <= draft.floor;
        nodes += more as u32;
        if lane == 0 && more {
            taken.set(nodes as usize, parent << INDEX_BITS | (at & ((1 << INDEX_BITS) - 1)));
        }
        let score = f32::from_bits(best);
        let below = at >> INDEX_BITS;
        let new = Parent {
            bits: (score + child).to_bits(),
            score,
            at: (below + draft.stride) << INDEX_BITS | below,
            ..Parent::NONE
        };
        unroll!(slot in 0 1 below SLOTS; {
            let (node, old) = (slot as u32 * warp::WARP + lane, own[slot]);
            let next = Parent { bits: (old.score + old.sibling).to_bits(), at: old.at + 1, ..old };
            let kept = if node == parent && more { next } else { old };
            // Values are on their way until the next step wants them.
            own[slot] = draft.looked(if node == nodes && more { new } else { kept });
        });
    }
    (nodes, more)
}

/// Takes up to `budget` nodes; leaves each of them and returns their number. Warp 0 only.
#[inline(always)]
fn select(draft: Draft, budget: u32, spine: bool) -> u32 {
    let (taken, lane) = (tree_build_small_nodes(), warp::lane_id());
    let mut own = [Parent::NONE; OWNED];
    if lane == 0 {
        own[0] = draft.parent(0.0, 0, 0);
    }
    let mut nodes = 0;
    let mut score = 0.0;
    // The chain: the root and every node of it have their first child.
    while spine && nodes < draft.levels {
        let index = nodes * draft.stride;
        score += draft.logp.get(index as usize);
        if score.to_bits() > draft.floor {
            break;
        }
        if lane == nodes {
            own[0] = draft.parent(own[0].score, nodes, 1);
        }
        nodes += 1;
        if lane == nodes {
            own[0] = draft.parent(score, nodes, 0);
        }
        if lane == 0 {
            taken.set(nodes as usize, (nodes - 1) << INDEX_BITS | index);
        }
    }
    // The last lane's first node is the last that one slot holds.
    let half = if budget < warp::WARP - 1 { budget } else { warp::WARP - 1 };
    let (nodes, more) = take::<1>(draft, &mut own, nodes, half);
    if more { take::<OWNED>(draft, &mut own, nodes, budget).0 } else { nodes }
}

#[kernel]
pub fn tree_build_small(a: TreeBuildArgs) {
    let taken = tree_build_small_nodes();
    let t = thread::thread_idx_x();
    let sequence = thread::block_idx_x() as usize;
    let state = a.state.slice(sequence * STATE_WORDS, STATE_WORDS);
    // A tree of `budget` nodes is at most that deep.
    let levels = if a.levels < a.budget { a.levels } else { a.budget };
    // -inf is not taken.
    let lowest = f32::MIN.to_bits();
    let floor = if a.floor > f32::MIN { (a.floor + 0.0).to_bits() } else { lowest };
    let draft = Draft { logp: tree_build_small_logp(), levels, k: a.k, stride: a.k + MARGIN, floor };

    thread::wait_for_previous();
    thread::start_next();
    let (earlier, bonus) = (state.get(ERROR), state.get(BONUS) as i32);
    let failed = stage(&a, state, draft) || earlier != 0;
    if warp::warp_id() == 0 {
        // Nothing is above 0.
        let nodes = if failed || a.floor > 0.0 { 0 } else { select(draft, a.budget, a.spine != 0) };
        if warp::lane_id() == 0 {
            tree_build_small_count().set(0, nodes);
            state.set(NODES, nodes);
        }
    }
    thread::sync_threads();
    let nodes = tree_build_small_count().get(0);

    let rows = a.budget + 1;
    if t < rows {
        let (mut token, mut parent, mut depth) = (0, -1, 0);
        if t == 0 {
            token = bonus;
        } else if t <= nodes {
            let node = taken.get(t as usize);
            let index = node & ((1 << INDEX_BITS) - 1);
            let (above, rank) = (math::div(index, draft.stride), math::rem(index, draft.stride));
            depth = above + 1;
            parent = (node >> INDEX_BITS) as i32;
            let drafted = sequence * (a.levels * a.k) as usize;
            token = a.ids.get(drafted + (above * a.k + rank) as usize);
        }
        let at = sequence * rows as usize + t as usize;
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
            node = taken.get(node as usize) >> INDEX_BITS;
        }
        a.ancestors.set(sequence * (rows * words) as usize + t as usize, bits);
    }
}
