//! The best-first tree: of all prefixes of ranked tokens, the `budget` with the largest score, where a score is the f32
//! sum of the log-probabilities along the path (the parent's score plus one), exactly and in the order of selection.
//!
//! Among candidates the largest score is taken; of equal ones that of the smaller parent, then of the smaller rank.
//! -inf is never taken, nor a score below `floor`; a log-probability above 0 counts as 0. Row 0 is the bonus token;
//! rows behind the last node are padding that sees only itself. With `spine` the chain of best tokens is taken first.
//! NaN or +inf in a column that the budget can reach (depth d, counted from 1, reaches `budget - d + 1` columns), or an
//! error already in the state, makes a tree without nodes.
//!
//! Grid: x = sequences, a block each. No queue: a child's score is at most its parent's, so the order of selection is
//! one fixed order of all prefixes, (score, parent, rank), and the tree is its first `budget`:
//!
//! * guess: the score of the last node, from histograms of the levels (see [`super::tree_draft`]);
//! * list: all prefixes of that score or more, level by level. The children of a node that count are a run of ranks
//!   found by halving; the runs of a level are laid side by side by a sum over the block. Where the list comes out
//!   shorter than the budget, or longer than [`listed`], the search for a score goes on between the two;
//! * sort: entries go to bins by score, and each counts those of its bin that are before it. Equal scores are ordered
//!   by their parents' places: where there are some, the count is repeated until no place changes;
//! * ties: where more prefixes tie with the last node than are listed at most, the list ends above them, and the
//!   children with that very score follow in the order of their parents until the tree is full.
//!
//! Then all threads write the rows; ancestor bits are gathered in shared memory, so that they leave in whole lines.

use cuda_std::{GlobalMut, Shared, dynamic_shared, kernel, math, static_shared, thread, warp};

use super::order;
use super::tree_draft::{Draft, Guess, guess_words, partition};
use super::tree_list::{List, block_max, block_sums, depth_of, parent_of, place, rank_of, smaller};
use crate::args::state::{BONUS, ERROR, NODES, STATE_WORDS};
use crate::args::tokens::TreeBuildArgs;
use crate::unroll::unroll;

/// Nodes at most, the root not counted.
pub const MAX_BUDGET: usize = 1024;
/// Drafted positions at most.
pub const MAX_LEVELS: usize = 31;
/// Candidates a position at most.
pub const MAX_K: usize = 1024;

/// Threads a block. More than 256: there is one block, and its steps are short.
pub const THREADS: u32 = 512;
/// Rows besides the root that a thread writes.
const OWNED: usize = 2;
const _: () = assert!(THREADS as usize * OWNED >= MAX_BUDGET);
/// Bins of the sort that a thread owns.
pub(super) const SORT_BINS: u32 = 2;

// Whether a level has NaN.
static_shared!(fn tree_build_bad() -> [u32; 1]);

/// Prefixes that are listed at most.
pub const fn listed(budget: u32) -> u32 {
    let (share, least) = (3 * budget, 256);
    if share > least { share } else { least }
}

/// Byte offsets of the arrays in shared memory.
pub(super) struct Arrays {
    /// What is listed.
    list: u32,
    /// What the steps work on in turn.
    pub(super) room: u32,
    staged: u32,
    end: u32,
}

impl Arrays {
    #[inline(always)]
    pub(super) const fn at(budget: u32, levels: u32, columns: u32) -> Self {
        let word = size_of::<u32>() as u32;
        let rows = listed(budget) + 1;
        // Score and place of the rows of the tree, in whole 16 bytes.
        let list = (2 * word * (budget + 1)).next_multiple_of(16);
        let room = (list + 2 * word * rows).next_multiple_of(16);
        // Entries (of two words), slots and rows; and the bins with an end.
        let sort = word * (4 * rows + SORT_BINS * THREADS + 1);
        let guess = word * guess_words(levels);
        let used = if sort > guess { sort } else { guess };
        let staged = room + used.next_multiple_of(16);
        Self { list, room, staged, end: staged + word * levels * columns }
    }
}

/// More than the static arrays take.
const STATIC_BYTES: u32 = 2048;
const _: () = assert!(shared_bytes(MAX_BUDGET, MAX_LEVELS, MAX_K) + STATIC_BYTES <= crate::SHARED_LIMIT);

/// Columns of each level that lie in shared memory; the others are read where they are.
pub const fn columns(budget: usize, levels: usize, k: usize) -> u32 {
    let width = if k < budget { k as u32 } else { budget as u32 };
    if levels == 0 {
        return width;
    }
    let at = Arrays::at(budget as u32, levels as u32, 0);
    let free = (crate::SHARED_LIMIT - STATIC_BYTES - at.end) / (size_of::<u32>() * levels) as u32;
    if width < free { width } else { free }
}

/// Dynamic shared memory for `budget` nodes of `levels` by `k` candidates.
pub const fn shared_bytes(budget: usize, levels: usize, k: usize) -> u32 {
    let levels = if levels < budget { levels } else { budget };
    Arrays::at(budget as u32, levels as u32, columns(budget, levels, k)).end
}

/// Rows whose children are looked for: `first`, if there is one, then `from..to`.
#[derive(Clone, Copy)]
struct Front {
    first: Option<u32>,
    from: u32,
    to: u32,
}

impl Front {
    #[inline(always)]
    fn len(self) -> u32 {
        self.to - self.from + self.first.is_some() as u32
    }

    #[inline(always)]
    fn row(self, p: u32) -> u32 {
        match self.first {
            Some(row) => {
                if p == 0 {
                    row
                } else {
                    self.from + p - 1
                }
            }
            None => self.from + p,
        }
    }
}

/// What the search works on.
#[derive(Clone, Copy)]
pub(super) struct Build<const WHOLE: bool> {
    draft: Draft<WHOLE>,
    /// What is listed, in any order that has parents first.
    pub(super) list: List,
    /// The tree, in order.
    pub(super) tree: List,
    pub(super) room: Shared<u32>,
    pub(super) budget: u32,
    /// Prefixes that are listed at most.
    pub(super) listed: u32,
    /// Least key that is taken.
    floor: u32,
    /// Nodes of the spine, rows 1 to `spine` of both lists.
    pub(super) spine: u32,
}

/// Scores of this key or more, but not of `below` or more.
#[derive(Clone, Copy)]
struct Keys {
    least: u32,
    below: u32,
}

impl<const WHOLE: bool> Build<WHOLE> {
    /// Key of the child of rank `rank` under a node at `depth`.
    #[inline(always)]
    fn child(self, score: f32, depth: u32, rank: u32) -> u32 {
        order::key(score + self.draft.get(depth, rank))
    }

    /// The ranks of `row`'s children with a key of `least` or more, but the spine's: first and end.
    #[inline(always)]
    fn run(self, list: List, row: u32, keys: Keys) -> (u32, u32) {
        let (score, depth) = (list.score.get(row as usize), depth_of(list.place.get(row as usize)));
        if depth >= self.draft.levels {
            return (0, 0);
        }
        let end = partition(self.draft.reach(depth), |rank| self.child(score, depth, rank) >= keys.least);
        let mut first = 0;
        if keys.below != u32::MAX {
            first = partition(end, |rank| self.child(score, depth, rank) >= keys.below);
        }
        (if row < self.spine && first == 0 { 1 } else { first }, end)
    }

    /// Appends the children of the front with such keys to the `count` nodes of `list`, as long as there are no more
    /// than `most`. Returns how many nodes there would be.
    #[inline(always)]
    fn expand(self, list: List, front: Front, keys: Keys, count: u32, most: u32) -> u32 {
        let t = thread::thread_idx_x();
        let (runs, firsts) =
            (self.room.slice(0, THREADS as usize), self.room.slice(THREADS as usize, THREADS as usize));
        let (mut base, mut count) = (0, count);
        while base < front.len() && count <= most {
            let parents = smaller(front.len() - base, THREADS);
            let (mut first, mut end) = (0, 0);
            if t < parents {
                (first, end) = self.run(list, front.row(base + t), keys);
            }
            let (start, all) = block_sums(end.saturating_sub(first));
            runs.set(t as usize, start);
            firsts.set(t as usize, first);
            thread::sync_threads();
            let fit = smaller(all, most - count);
            let mut i = t;
            while i < fit {
                // The last run that starts at or before i.
                let p = partition(parents, |p| runs.get(p as usize) <= i) - 1;
                let (row, rank) = (front.row(base + p), i - runs.get(p as usize) + firsts.get(p as usize));
                let (score, depth) = (list.score.get(row as usize), depth_of(list.place.get(row as usize)));
                list.set(count + 1 + i, score + self.draft.get(depth, rank), place(row, rank, depth + 1));
                i += THREADS;
            }
            thread::sync_threads();
            (base, count) = (base + THREADS, count + all);
        }
        count
    }

    /// Lists the prefixes with a key of `least` or more; returns their number, or more than `listed` where there are
    /// too many.
    #[inline(always)]
    fn enumerate(self, least: u32) -> u32 {
        let (mut from, mut count, mut level) = (self.spine + 1, self.spine, 0);
        while level < self.draft.levels && count <= self.listed {
            // The root, or the spine's node of this depth.
            let first = if level <= self.spine { Some(level) } else { None };
            let front = Front { first, from, to: count + 1 };
            if front.len() == 0 {
                break;
            }
            from = count + 1;
            count = self.expand(self.list, front, Keys { least, below: u32::MAX }, count, self.listed);
            level += 1;
        }
        count
    }

    /// The largest key of a child that is not among the `count` listed, which have `least` or more; below the floor
    /// where there is none.
    #[inline(always)]
    fn next_key(self, count: u32, least: u32) -> u32 {
        let mut next = order::ABSENT;
        let mut row = thread::thread_idx_x();
        while row <= count {
            let depth = depth_of(self.list.place.get(row as usize));
            let (first, end) = self.run(self.list, row, Keys { least, below: u32::MAX });
            let rank = if end > first { end } else { first };
            if depth < self.draft.levels && rank < self.draft.reach(depth) {
                let key = self.child(self.list.score.get(row as usize), depth, rank);
                next = if key > next { key } else { next };
            }
            row += THREADS;
        }
        block_max(next)
    }

    /// Lists the budget's nodes and some more, or all but those of one key. Returns their number, and that key.
    #[inline(always)]
    fn search(self, guess: Guess) -> (u32, Option<u32>) {
        let most = order::key(0.0);
        let clamped = |score: f32| {
            let key = order::key(score);
            if key < self.floor { self.floor } else { key }
        };
        // Above `many` or at `few` lies the key of the last node: `many` lists too many, `few` too few.
        let (mut many, mut few) = (self.floor - 1, most + 1);
        let (mut least, mut step, mut tries) = (clamped(guess.score), guess.step, 0);
        loop {
            let count = self.enumerate(least);
            if least == few {
                return (count, Some(many));
            }
            if count > self.listed {
                many = least;
            } else if count >= self.budget {
                return (count, None);
            } else {
                let next = self.next_key(count, least);
                if next < self.floor {
                    return (count, None);
                }
                few = next + 1;
                if few - many == 1 {
                    return (count, Some(many));
                }
            }
            if few - many == 1 {
                least = few;
                continue;
            }
            tries += 1;
            // Where many tie, the next key says more than a step; then steps that grow; then halving.
            let short = count <= self.listed;
            let toward = order::value(least) + if short { -step } else { step };
            let toward = if toward < 0.0 { clamped(toward) } else { most };
            let halved = many + (few - many) / 2;
            least = match tries {
                2 | 4 | 6 if short => few - 1,
                0..8 if toward > many && toward < few => toward,
                _ => halved,
            };
            step *= 2.0;
        }
    }

    /// Appends nodes with the key `key` alone to the tree's `count`, in order. Returns their number.
    #[inline(always)]
    fn append(self, key: u32, count: u32) -> u32 {
        let (mut from, mut count) = (0, count);
        while from <= count && count < self.budget {
            let front = Front { first: None, from, to: count + 1 };
            from = count + 1;
            let all = self.expand(self.tree, front, Keys { least: key, below: key + 1 }, count, self.budget);
            count = smaller(all, self.budget);
        }
        count
    }
}

/// The chain of best tokens as the first nodes of the list. Returns their number, the same on all threads.
#[inline(always)]
fn seed<const WHOLE: bool>(build: Build<WHOLE>) -> u32 {
    let (lane, draft) = (warp::lane_id(), build.draft);
    let own = if lane < draft.levels { draft.get(lane, 0) } else { f32::NEG_INFINITY };
    let (mut score, mut depth) = (0.0, 0);
    loop {
        score += warp::shfl(own, depth);
        if depth == draft.levels || order::key(score) < build.floor {
            return depth;
        }
        if thread::thread_idx_x() == 0 {
            build.list.set(depth + 1, score, place(depth, 0, depth + 1));
        }
        depth += 1;
    }
}

/// Takes the tree; returns the number of its nodes.
#[inline(always)]
fn select<const WHOLE: bool>(mut build: Build<WHOLE>, floor: f32, spine: bool) -> u32 {
    if thread::thread_idx_x() == 0 {
        build.list.set(0, 0.0, 0);
    }
    if spine {
        build.spine = seed(build);
    }
    let block_min = |cost: f32| f32::from_bits(!block_max(!cost.to_bits()));
    let guess = build.draft.guess(build.room, floor, block_min);
    let (count, tied) = build.search(guess);
    build.sort(count);
    let count = smaller(count, build.budget);
    match tied {
        Some(key) => build.append(key, count),
        None => count,
    }
}

/// For drafts of which all that counts is staged.
#[kernel]
pub fn tree_build(a: TreeBuildArgs) {
    build::<true>(a);
}

/// For drafts with more columns than are staged.
#[kernel]
pub fn tree_build_wide(a: TreeBuildArgs) {
    build::<false>(a);
}

#[inline(always)]
fn build<const WHOLE: bool>(a: TreeBuildArgs) {
    let t = thread::thread_idx_x();
    let (sequence, k, rows) = (thread::block_idx_x() as usize, a.k as usize, a.budget + 1);
    let state = a.state.slice(sequence * STATE_WORDS, STATE_WORDS);
    let drafted = a.levels as usize * k;
    let (ids, logp) = (a.ids.slice(sequence * drafted, drafted), a.logp.slice(sequence * drafted, drafted));
    // A tree of `budget` nodes is at most that deep.
    let levels = smaller(a.levels, a.budget);
    let listed = listed(a.budget);
    let at = Arrays::at(a.budget, levels, a.columns);
    let lowest = order::key(f32::NEG_INFINITY) + 1;
    let floor = order::key(a.floor);
    let build = Build::<WHOLE> {
        draft: Draft {
            all: logp,
            staged: dynamic_shared(at.staged, levels * a.columns),
            columns: a.columns,
            levels,
            k: a.k,
            budget: a.budget,
        },
        list: List::at(at.list, listed + 1),
        tree: List::at(0, rows),
        room: dynamic_shared(at.room, (at.staged - at.room) / size_of::<u32>() as u32),
        budget: a.budget,
        listed,
        floor: if floor > lowest { floor } else { lowest },
        spine: 0,
    };
    thread::wait_for_previous();
    thread::start_next();
    let (bad, bonus) = (tree_build_bad(), state.get(BONUS) as i32);
    if t == 0 {
        bad.set(0, (state.get(ERROR) != 0) as u32);
    }
    thread::sync_threads();
    if levels > 0 && build.draft.stage(state) {
        bad.atomic_or(0, 1);
    }
    thread::sync_threads();
    let failed = levels == 0 || bad.get(0) != 0;
    let count = if failed { 0 } else { select(build, a.floor, a.spine != 0) };
    if t == 0 {
        state.set(NODES, count);
    }
    // The list and all behind it are free.
    thread::sync_threads();

    let first = sequence * rows as usize;
    // Tokens are on their way while ancestors are gathered.
    let mut tokens = [0; OWNED];
    unroll!(i in 0 1; {
        let row = 1 + t + i as u32 * THREADS;
        if row <= count {
            let place = build.tree.place.get(row as usize);
            tokens[i] = ids.get(((depth_of(place) - 1) * a.k + rank_of(place)) as usize);
        }
    });
    let words = rows.div_ceil(u32::BITS);
    let out = a.ancestors.slice(first * words as usize, (rows * words) as usize);
    let bits = dynamic_shared::<u32>(at.list, (at.end - at.list) / size_of::<u32>() as u32);
    see(build.tree.place, count, rows, bits, out);
    if t == 0 {
        a.tokens.set(first, bonus);
        a.parents.set(first, -1);
        a.depths.set(first, 0);
    }
    unroll!(i in 0 1; {
        let row = 1 + t + i as u32 * THREADS;
        if row < rows {
            let place = if row <= count { Some(build.tree.place.get(row as usize)) } else { None };
            a.tokens.set(first + row as usize, tokens[i]);
            a.parents.set(first + row as usize, place.map_or(-1, |place| parent_of(place) as i32));
            a.depths.set(first + row as usize, place.map_or(0, depth_of));
        }
    });
}

/// Words of a 16-byte access.
const WIDE: u32 = 4;

/// Writes which rows each of `rows` sees, as many of them at a time as fit in `bits`.
#[inline(always)]
fn see(places: Shared<u32>, count: u32, rows: u32, bits: Shared<u32>, out: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let words = rows.div_ceil(u32::BITS);
    // Parts of a multiple of four rows are of whole 16 bytes.
    let step = math::div(bits.len() as u32, words) / WIDE * WIDE;
    let wide = out.addr().is_multiple_of(size_of::<[u32; WIDE as usize]>() as u64);
    let mut from = 0;
    while from < rows {
        let part = smaller(rows - from, step);
        let all = part * words;
        let mut i = t * WIDE;
        while i < all.next_multiple_of(WIDE) {
            bits.st16(i as usize, [0; WIDE as usize]);
            i += THREADS * WIDE;
        }
        thread::sync_threads();
        let mut row = t;
        while row < part {
            // Ancestors descend, and so do their words.
            let mut node = from + row;
            let (inside, mut word, mut seen) = (node <= count, node / u32::BITS, 1 << (node % u32::BITS));
            while node != 0 && inside {
                node = parent_of(places.get(node as usize));
                if node / u32::BITS != word {
                    bits.set((row * words + word) as usize, seen);
                    (word, seen) = (node / u32::BITS, 0);
                }
                seen |= 1 << (node % u32::BITS);
            }
            bits.set((row * words + word) as usize, seen);
            row += THREADS;
        }
        thread::sync_threads();
        let start = (from * words) as usize;
        let whole = if wide { all / WIDE * WIDE } else { 0 };
        let mut i = t * WIDE;
        while i < whole {
            out.st16(start + i as usize, bits.ld16(i as usize));
            i += THREADS * WIDE;
        }
        let mut i = whole + t;
        while i < all {
            out.set(start + i as usize, bits.get(i as usize));
            i += THREADS;
        }
        thread::sync_threads();
        from += step;
    }
}
