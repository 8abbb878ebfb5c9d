//! The best-first tree: of all prefixes of ranked tokens, the `budget` with the largest score, where a score is the f32
//! sum of the log-probabilities along the path (the parent's score plus one), exactly and in the order of selection.
//!
//! Among candidates the largest score is taken; of equal ones that of the smaller parent, then of the smaller rank.
//! -inf is never taken, nor a score below `floor`; a log-probability above 0 counts as 0. Row 0 is the bonus token;
//! rows behind the last node are padding that sees only itself. With `spine` the chain of best tokens is taken first.
//! NaN or +inf in a column that the budget can reach (depth d, counted from 1, reaches `budget - d + 1` columns), or an
//! error already in the state, makes a tree without nodes.
//!
//! Grid: x = sequences, a block each, a thread for every two nodes. No queue: a child's score is at most its parent's,
//! so the order of selection is one fixed order of all prefixes, (score, parent, rank), and the tree is its first
//! `budget`. Level by level, `nodes` holds the first `budget` of the prefixes up to that depth, in order, and the
//! level's nodes among them (the front) are expanded:
//!
//! * bound: a child of rank r (from 1) under the front's parent p (from 1), which is the f-th node, has `f + p * r - 1`
//!   others before it. So r <= (budget - f) / p, and the score where `f + p * r` reaches the budget is a lower bound
//!   of the last score that is taken. The largest of these bounds, and the last node's score once there are `budget`,
//!   cut the children of each parent to a run; at most sum(budget / p) are left, 7,262 for a budget of 1,024;
//! * sort: the runs are laid side by side and sorted by (score, parent, rank), one 64-bit integer each;
//! * merge: each node counts the children before it, each child the nodes, and those that land below the budget move
//!   there. Parents are renumbered on the way, so that the comparisons of the next level are again of integers.
//!
//! Then all threads write the rows; ancestor bits are gathered in shared memory, so that they leave in whole lines.

use cuda_std::{Global, GlobalMut, Shared, dynamic_shared, kernel, math, static_shared, thread, warp};

use super::{bitonic, errors, order};
use crate::args::state::{BONUS, ERROR, ERROR_DRAFT, NODES, STATE_WORDS};
use crate::args::tokens::TreeBuildArgs;
use crate::unroll::unroll;

/// Nodes at most, the root not counted.
pub const MAX_BUDGET: usize = 1024;
/// Drafted positions at most.
pub const MAX_LEVELS: usize = 31;
/// Candidates a position at most.
pub const MAX_K: usize = 1024;

const MAX_THREADS: u32 = 512;
const MIN_THREADS: u32 = 64;
const MAX_WARPS: usize = (MAX_THREADS / warp::WARP) as usize;

// A node is one integer whose descending order is the order of selection: the score's key, then the complement of
// (parent row, rank, depth).
const DEPTH_BITS: u32 = 5;
const RANK_BITS: u32 = 10;
const _: () = assert!(MAX_LEVELS < 1 << DEPTH_BITS && MAX_K <= 1 << RANK_BITS);
/// Key of a spine node's place in the order, less its depth; its score lies elsewhere.
const SPINE: u32 = u32::MAX;

// Whether a level has NaN, and two counters that alternate between levels: children kept.
static_shared!(fn tree_build_bad() -> [u32; 1]);
static_shared!(fn tree_build_kept() -> [u32; 2]);
static_shared!(fn tree_build_warps() -> [u32; MAX_WARPS]);
static_shared!(fn tree_build_spine() -> [f32; MAX_LEVELS]);

/// Nodes that a thread owns, in a row.
const OWNED: usize = 2;
const _: () = assert!(MAX_THREADS as usize * OWNED >= MAX_BUDGET);

/// Threads a block for `budget` nodes: two a node as far as possible. More than 256 from a budget of 128 on: steps of
/// the sort are short, and there is one block.
pub const fn threads(budget: usize) -> u32 {
    let threads = (2 * budget as u32).next_multiple_of(warp::WARP);
    if threads < MIN_THREADS {
        MIN_THREADS
    } else if threads > MAX_THREADS {
        MAX_THREADS
    } else {
        threads
    }
}

/// Children of one level that the bounds leave at most.
const fn children(budget: u32) -> u32 {
    let (mut sum, mut p) = (0, 1);
    while p <= budget {
        sum += budget / p;
        p += 1;
    }
    sum
}

/// Entries of the list that is sorted, for `budget` nodes.
pub const fn list_len(budget: u32) -> u32 {
    bitonic::padded(children(budget))
}

/// Dynamic shared memory for `budget` nodes.
pub const fn shared_bytes(budget: usize) -> u32 {
    Arrays::at(budget as u32, list_len(budget as u32)).end
}

/// More than the static arrays above take.
const STATIC_BYTES: u32 = 512;
const _: () = assert!(shared_bytes(MAX_BUDGET) + STATIC_BYTES <= crate::SHARED_LIMIT);

/// Byte offsets of the arrays in shared memory.
struct Arrays {
    list: u32,
    front: u32,
    runs: u32,
    moved: u32,
    logp: u32,
    end: u32,
}

impl Arrays {
    #[inline(always)]
    const fn at(budget: u32, listed: u32) -> Self {
        let (word, wide) = (size_of::<u32>() as u32 * budget, size_of::<u64>() as u32);
        let list = 2 * wide * budget;
        let front = list + wide * listed;
        Self { list, front, runs: front + word, moved: front + 2 * word, logp: front + 3 * word, end: front + 4 * word }
    }
}

/// What the levels work on.
#[derive(Clone, Copy)]
struct Build {
    /// Two halves of `budget` nodes: the present ones, and those of the next level.
    nodes: Shared<u64>,
    /// Children of a level.
    list: Shared<u64>,
    /// Rows of the nodes that are expanded, in order; the root's is 0.
    front: Shared<u32>,
    /// Where each parent's children start in `list`.
    runs: Shared<u32>,
    /// New place of each node.
    moved: Shared<u32>,
    /// The level's log-probabilities.
    logp: Shared<f32>,
    budget: u32,
    /// Columns that count.
    width: u32,
    /// Least key that is taken.
    floor: u32,
    /// Nodes of the spine, 0 without.
    spine: u32,
}

#[inline(always)]
fn node(key: u32, parent: u32, rank: u32, depth: u32) -> u64 {
    let place = (parent << RANK_BITS | rank) << DEPTH_BITS | depth;
    (key as u64) << u32::BITS | !place as u64
}

#[inline(always)]
fn key_of(node: u64) -> u32 {
    (node >> u32::BITS) as u32
}

#[inline(always)]
fn parent_of(node: u64) -> u32 {
    !(node as u32) >> (RANK_BITS + DEPTH_BITS)
}

#[inline(always)]
fn rank_of(node: u64) -> u32 {
    (!(node as u32) >> DEPTH_BITS) & ((1 << RANK_BITS) - 1)
}

#[inline(always)]
fn depth_of(node: u64) -> u32 {
    !(node as u32) & ((1 << DEPTH_BITS) - 1)
}

/// Place in the order of node `slot` of this thread's.
#[inline(always)]
fn owned(slot: usize) -> u32 {
    thread::thread_idx_x() * OWNED as u32 + slot as u32
}

/// For each of two searches the first index in `0..len` where `before` no longer holds; it holds for a prefix. Both go
/// on together, so that their loads overlap, and may look at index 0 whatever `len` is; `most` is the larger length.
#[inline(always)]
fn partition(most: u32, len: [u32; OWNED], before: impl Fn(usize, u32) -> bool) -> [u32; OWNED] {
    let mut at = [0; OWNED];
    let mut step = if most > 0 { 1 << (u32::BITS - 1 - most.leading_zeros()) } else { 0 };
    while step > 0 {
        unroll!(slot in 0 1; {
            let next = at[slot] + step;
            let inside = next <= len[slot];
            if before(slot, if inside { next - 1 } else { 0 }) && inside {
                at[slot] = next;
            }
        });
        step /= 2;
    }
    at
}

/// The sum over the threads before this one, and over all. The values of earlier calls lie behind a barrier.
#[inline(always)]
fn block_sums(value: u32) -> (u32, u32) {
    let (sums, w) = (tree_build_warps(), warp::warp_id());
    let upto = warp::inclusive_sum(value);
    if warp::lane_id() == warp::WARP - 1 {
        sums.set(w as usize, upto);
    }
    thread::sync_threads();
    let (mut before, mut all) = (0, 0);
    let mut other = 0;
    while other < thread::block_dim_x() / warp::WARP {
        let sum = sums.get(other as usize);
        before += if other < w { sum } else { 0 };
        all += sum;
        other += 1;
    }
    (before + upto - value, all)
}

#[inline(always)]
fn block_max(value: u32) -> u32 {
    let values = tree_build_warps();
    let largest = |x, y| if x > y { x } else { y };
    let mine = warp::reduce(value, largest);
    if warp::lane_id() == 0 {
        values.set(warp::warp_id() as usize, mine);
    }
    thread::sync_threads();
    let warps = thread::block_dim_x() / warp::WARP;
    let lane = warp::lane_id();
    let all = warp::reduce(if lane < warps { values.get(lane as usize) } else { 0 }, largest);
    thread::sync_threads();
    all
}

impl Build {
    /// Half `side` of the nodes.
    #[inline(always)]
    fn half(self, side: u32) -> Shared<u64> {
        self.nodes.slice((side * self.budget) as usize, self.budget as usize)
    }

    /// Whether the front of `level` starts with a spine node (or the root before them).
    #[inline(always)]
    fn spine_in_front(self, level: u32) -> bool {
        self.spine > 0 && level <= self.spine
    }

    /// The score of the front's parent `p`, of row `row`.
    #[inline(always)]
    fn score(self, nodes: Shared<u64>, level: u32, p: u32, row: u32) -> f32 {
        if level == 0 {
            0.0
        } else if p == 0 && self.spine_in_front(level) {
            tree_build_spine().get(level as usize - 1)
        } else {
            order::value(key_of(nodes.get(row as usize - 1)))
        }
    }

    /// Key of the child of rank `rank` (from 0) under `score`.
    #[inline(always)]
    fn child(self, score: f32, rank: u32) -> u32 {
        order::key(score + self.logp.get(rank as usize))
    }

    /// First rank of parent `p`'s children that are not in the tree already.
    #[inline(always)]
    fn first_rank(self, level: u32, p: u32) -> u32 {
        (p == 0 && level < self.spine) as u32
    }

    /// Lays the children of `parents` nodes that may be taken side by side in the list. Returns their number, the same
    /// on all threads. `count` nodes are there.
    #[inline(always)]
    fn expand(self, nodes: Shared<u64>, level: u32, parents: u32, count: u32) -> u32 {
        let t = thread::thread_idx_x();
        let (mut scores, mut most, mut bound) = ([0.0; OWNED], [0; OWNED], self.floor);
        unroll!(slot in 0 1; {
            let at = owned(slot);
            if at < parents {
                let row = self.front.get(at as usize);
                scores[slot] = self.score(nodes, level, at, row);
                let p = at + 1 - self.spine_in_front(level) as u32;
                let p = if p > 0 { p } else { 1 };
                let free = self.budget - row;
                let whole = math::div(free, p);
                let last = whole + (whole * p < free) as u32;
                if last > 0 && last <= self.width {
                    let key = self.child(scores[slot], last - 1);
                    bound = if key > bound { key } else { bound };
                }
                most[slot] = if whole < self.width { whole } else { self.width };
            }
        });
        if count == self.budget && t == 0 {
            let key = key_of(nodes.get(count as usize - 1));
            bound = if key > bound { key } else { bound };
        }
        let bound = block_max(bound);
        let mut run = [0; OWNED];
        let taken = partition(self.width, most, |slot, rank| {
            let score = if slot == 0 { scores[0] } else { scores[1] };
            self.child(score, rank) >= bound
        });
        unroll!(slot in 0 1; {
            let taken = taken[slot];
            let first = self.first_rank(level, owned(slot));
            run[slot] = taken.saturating_sub(first);
        });
        let (start, all) = block_sums(run[0] + run[1]);
        if owned(0) < parents {
            self.runs.set(owned(0) as usize, start);
        }
        if owned(1) < parents {
            self.runs.set(owned(1) as usize, start + run[0]);
        }
        thread::sync_threads();
        let (threads, end) = (thread::block_dim_x(), if all > 0 { bitonic::padded(all) } else { 0 });
        let mut i = t;
        while i < end {
            // The last run that starts at or before the entry.
            let after =
                partition(parents, [parents; OWNED], |slot, p| self.runs.get(p as usize) <= i + slot as u32 * threads);
            unroll!(slot in 0 1; {
                let i = i + slot as u32 * threads;
                if i < end {
                    let mut child = 0;
                    if i < all {
                        let p = after[slot] - 1;
                        let row = self.front.get(p as usize);
                        let rank = i - self.runs.get(p as usize) + self.first_rank(level, p);
                        child = node(self.child(self.score(nodes, level, p, row), rank), row, rank, level + 1);
                    }
                    self.list.set(i as usize, child);
                }
            });
            i += OWNED as u32 * threads;
        }
        thread::sync_threads();
        all
    }

    /// Merges the first of `children` sorted ones into the `count` nodes, from half `side` to the other. Returns how
    /// many children are in the tree: the next front.
    #[inline(always)]
    fn merge(self, side: u32, level: u32, count: u32, children: u32) -> u32 {
        let (t, old, new) = (thread::thread_idx_x(), self.half(side), self.half(1 - side));
        let kept = tree_build_kept();
        let behind = self.budget;
        // This thread's nodes and this thread's children, and where they go.
        let (mut mine, mut mine_to) = ([0; OWNED], [behind; OWNED]);
        let (mut child, mut child_to) = ([0; OWNED], [behind; OWNED]);
        let mut votes = 0;
        unroll!(slot in 0 1; {
            let at = owned(slot) as usize;
            if at < count as usize {
                mine[slot] = old.get(at);
            }
            if at < children as usize {
                child[slot] = self.list.get(at);
            }
        });
        let of = |pair: [u64; OWNED], slot: usize| if slot == 0 { pair[0] } else { pair[1] };
        let passed = partition(children, [children; OWNED], |slot, i| self.list.get(i as usize) > of(mine, slot));
        let behind_of = partition(count, [count; OWNED], |slot, i| old.get(i as usize) > of(child, slot));
        unroll!(slot in 0 1; {
            let at = owned(slot);
            if at < count {
                mine_to[slot] = at + passed[slot];
                self.moved.set(at as usize, mine_to[slot]);
            }
            if at < children {
                child_to[slot] = at + behind_of[slot];
            }
            votes += warp::ballot(child_to[slot] < behind).count_ones();
        });
        if warp::lane_id() == 0 && votes != 0 {
            kept.atomic_add((level % 2) as usize, votes);
        }
        thread::sync_threads();
        let renumbered = |node_: u64| {
            let parent = parent_of(node_);
            let parent = if parent == 0 { 0 } else { self.moved.get(parent as usize - 1) + 1 };
            let key = key_of(node_);
            node(key, parent, rank_of(node_), depth_of(node_))
        };
        let spine = self.spine > level;
        unroll!(slot in 0 1; {
            if mine_to[slot] < behind {
                new.set(mine_to[slot] as usize, renumbered(mine[slot]));
            }
            if child_to[slot] < behind {
                new.set(child_to[slot] as usize, renumbered(child[slot]));
                self.front.set((owned(slot) + spine as u32) as usize, child_to[slot] + 1);
            }
        });
        if t == 0 {
            if spine {
                self.front.set(0, level + 1);
            }
            kept.set(1 - (level % 2) as usize, 0);
        }
        kept.get((level % 2) as usize) + spine as u32
    }
}

/// Whether a value that the budget can reach cannot be used; the same on all threads.
#[inline(always)]
fn unusable(a: &TreeBuildArgs, state: GlobalMut<u32>, logp: Global<f32>, levels: u32, width: u32) -> bool {
    let t = thread::thread_idx_x();
    let bad = tree_build_bad();
    if t == 0 {
        bad.set(0, (state.get(ERROR) != 0) as u32);
        tree_build_kept().set(0, 0);
    }
    thread::sync_threads();
    let mut i = t;
    while i < levels * width {
        let (level, column) = (math::div(i, width), math::rem(i, width));
        let v = logp.get((level * a.k + column) as usize);
        if column < a.budget - level && (v.is_nan() || v == f32::INFINITY) {
            bad.atomic_or(0, 1);
            errors::report(state, ERROR_DRAFT, level);
        }
        i += thread::block_dim_x();
    }
    thread::sync_threads();
    bad.get(0) != 0
}

/// The chain of best tokens as the first nodes. Returns their number; warp 0 writes them.
#[inline(always)]
fn seed(build: Build, logp: Global<f32>, k: u32, levels: u32) -> u32 {
    let lane = warp::lane_id();
    let own = if lane < levels { logp.get((lane * k) as usize).min(0.0) } else { f32::NEG_INFINITY };
    let (mut score, mut depth) = (0.0, 0);
    loop {
        score += warp::shfl(own, depth);
        if depth == levels || order::key(score) < build.floor {
            return depth;
        }
        if thread::thread_idx_x() == 0 {
            tree_build_spine().set(depth as usize, score);
            build.nodes.set(depth as usize, node(SPINE - depth, depth, 0, depth + 1));
        }
        depth += 1;
    }
}

/// Takes the tree; returns its nodes in order.
#[inline(always)]
fn select(mut build: Build, a: &TreeBuildArgs, logp: Global<f32>, levels: u32) -> Shared<u64> {
    let t = thread::thread_idx_x();
    if a.spine != 0 {
        build.spine = seed(build, logp, a.k, levels);
    }
    if t == 0 {
        build.front.set(0, 0);
    }
    let (mut side, mut level, mut parents, mut count) = (0, 0, 1, build.spine);
    let column = |level: u32, column: u32| {
        let inside = column < build.width && level < levels;
        if inside { logp.get((level * a.k + column) as usize).min(0.0) } else { 0.0 }
    };
    // A level's log-probabilities are on their way while the one before is worked on.
    let behind = t + thread::block_dim_x();
    let (mut next, mut next_behind) = (column(0, t), column(0, behind));
    while level < levels && parents > 0 {
        if t < build.width {
            build.logp.set(t as usize, next);
        }
        if behind < build.width {
            build.logp.set(behind as usize, next_behind);
        }
        (next, next_behind) = (column(level + 1, t), column(level + 1, behind));
        thread::sync_threads();
        let children = build.expand(build.half(side), level, parents, count);
        if children == 0 && build.spine <= level {
            break;
        }
        if children > 0 {
            bitonic::sort_descending(build.list, bitonic::padded(children));
        }
        parents = build.merge(side, level, count, children);
        count = if count + children < build.budget { count + children } else { build.budget };
        side = 1 - side;
        level += 1;
    }
    thread::sync_threads();
    build.half(side).slice(0, count as usize)
}

#[kernel]
pub fn tree_build(a: TreeBuildArgs) {
    let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let (sequence, k, rows) = (thread::block_idx_x() as usize, a.k as usize, a.budget + 1);
    let state = a.state.slice(sequence * STATE_WORDS, STATE_WORDS);
    let drafted = a.levels as usize * k;
    let (ids, logp) = (a.ids.slice(sequence * drafted, drafted), a.logp.slice(sequence * drafted, drafted));
    // A tree of `budget` nodes is at most that deep and that wide.
    let levels = if a.levels < a.budget { a.levels } else { a.budget };
    let width = if a.k < a.budget { a.k } else { a.budget };
    let at = Arrays::at(a.budget, a.listed);
    let lowest = order::key(f32::NEG_INFINITY) + 1;
    let floor = order::key(a.floor);
    let build = Build {
        nodes: dynamic_shared(0, 2 * a.budget),
        list: dynamic_shared(at.list, a.listed),
        front: dynamic_shared(at.front, a.budget),
        runs: dynamic_shared(at.runs, a.budget),
        moved: dynamic_shared(at.moved, a.budget),
        logp: dynamic_shared(at.logp, a.budget),
        budget: a.budget,
        width,
        floor: if floor > lowest { floor } else { lowest },
        spine: 0,
    };
    let failed = levels == 0 || unusable(&a, state, logp, levels, width);
    let nodes = if failed { build.nodes.slice(0, 0) } else { select(build, &a, logp, levels) };
    let count = nodes.len() as u32;
    if t == 0 {
        state.set(NODES, count);
    }

    let first = sequence * rows as usize;
    let mut row = t;
    while row < rows {
        let (mut token, mut parent, mut depth) = (0, -1, 0);
        if row == 0 {
            token = state.get(BONUS) as i32;
        } else if row <= count {
            let node = nodes.get(row as usize - 1);
            depth = depth_of(node);
            parent = parent_of(node) as i32;
            token = ids.get(((depth - 1) * a.k + rank_of(node)) as usize);
        }
        a.tokens.set(first + row as usize, token);
        a.parents.set(first + row as usize, parent);
        a.depths.set(first + row as usize, depth);
        row += threads;
    }

    // Ancestor bits, as many rows at a time as fit where the list was.
    let words = rows.div_ceil(u32::BITS);
    let room = 2 * a.listed;
    let bits = dynamic_shared::<u32>(at.list, room);
    let step = math::div(room, words);
    let mut from = 0;
    while from < rows {
        let part = if rows - from < step { rows - from } else { step };
        let mut i = t;
        while i < part * words {
            bits.set(i as usize, 0);
            i += threads;
        }
        thread::sync_threads();
        let mut row = t;
        while row < part {
            let mut node = from + row;
            let inside = node <= count;
            loop {
                let word = (row * words + node / u32::BITS) as usize;
                bits.set(word, bits.get(word) | 1 << (node % u32::BITS));
                if node == 0 || !inside {
                    break;
                }
                node = parent_of(nodes.get(node as usize - 1));
            }
            row += threads;
        }
        thread::sync_threads();
        let mut i = t;
        while i < part * words {
            a.ancestors.set((first + from as usize) * words as usize + i as usize, bits.get(i as usize));
            i += threads;
        }
        thread::sync_threads();
        from += step;
    }
}
