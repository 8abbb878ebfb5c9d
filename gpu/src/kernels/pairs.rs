//! Where products gathered by expert find their pairs: in lists that [`super::expert_sort`] has written, or, where
//! pairs are few, in lists of the block's own.
//!
//! So few pairs a warp sorts in less time than a launch takes to begin, so each block does it for itself, and nothing
//! is launched before the products. Up to [`ALONE`] pairs are not even sorted: each is a tile, in the order in which
//! they come.

use cuda_std::{Global, math, static_shared, thread, warp};

use super::expert_sort::{TILE, TILE_WORDS};
use super::stream_rows::{Gathered, Rows};
use crate::args::linear::{GroupedRows, StreamShape};
use crate::unroll::unroll;

/// Pairs that a block sorts for itself: a lane each.
pub const FEW: usize = warp::WARP as usize;

/// Pairs that are not sorted. Two of one expert would read its weights twice; a token's experts are different ones.
pub const ALONE: usize = 8;

/// Shuffles on their way together.
const TOGETHER: u32 = 8;

static_shared!(fn pairs_order() -> [u32; FEW]);
static_shared!(fn pairs_tiles() -> [u32; 1 + FEW * TILE_WORDS]);

/// Where the lists are.
pub trait Pairs: Copy {
    type Rows: Rows;
    /// As [`super::stream::Work::TIGHT`].
    const TIGHT: bool;

    /// Makes the lists. All threads of the block come here.
    fn prepare(rows: &GroupedRows);

    /// How many tiles there are.
    fn tiles(rows: &GroupedRows) -> u32;

    /// The pairs of a tile, and its expert's matrix of those that `slots` has.
    fn rows(rows: &GroupedRows, shape: StreamShape, tile: u32) -> (Self::Rows, u32);

    /// The expert's matrix of others.
    fn other(rows: &GroupedRows, slots: Global<u32>, tile: u32, matrix: u32) -> u32;
}

/// A launch before this one has written them.
#[derive(Clone, Copy)]
pub struct Listed;

impl Pairs for Listed {
    type Rows = Gathered;
    const TIGHT: bool = false;

    #[inline(always)]
    fn prepare(_: &GroupedRows) {}

    #[inline(always)]
    fn tiles(rows: &GroupedRows) -> u32 {
        rows.tiles.get(0)
    }

    #[inline(always)]
    fn rows(rows: &GroupedRows, shape: StreamShape, tile: u32) -> (Gathered, u32) {
        let word = |i| rows.tiles.get(1 + tile as usize * TILE_WORDS + i);
        let pairs = Gathered {
            order: rows.order,
            first: word(1),
            count: word(2),
            pairs_per_row: rows.pairs_per_row,
            n: shape.n,
            k: shape.k,
        };
        (pairs, rows.slots.get(word(0) as usize))
    }

    #[inline(always)]
    fn other(rows: &GroupedRows, slots: Global<u32>, tile: u32, _: u32) -> u32 {
        slots.get(rows.tiles.get(1 + tile as usize * TILE_WORDS) as usize)
    }
}

/// In the block's shared memory, of up to [`FEW`] pairs. In the place of its expert a tile has the expert's matrix, the
/// same of gate and of up.
#[derive(Clone, Copy)]
pub struct Within;

/// Pairs of a tile, looked up whenever they are asked for.
#[derive(Clone, Copy)]
pub struct Beside {
    tile: u32,
    pairs_per_row: u32,
    n: u32,
    k: u32,
}

impl Beside {
    #[inline(always)]
    fn pair(self, m: usize) -> u32 {
        pairs_order().get(pairs_tiles().get(1 + self.tile as usize * TILE_WORDS + 1) as usize + m)
    }
}

impl Rows for Beside {
    #[inline(always)]
    fn count(self) -> usize {
        pairs_tiles().get(1 + self.tile as usize * TILE_WORDS + 2) as usize
    }
    #[inline(always)]
    fn x(self, m: usize) -> usize {
        math::div(self.pair(m), self.pairs_per_row) as usize * self.k as usize
    }
    #[inline(always)]
    fn y(self, m: usize) -> usize {
        self.pair(m) as usize * self.n as usize
    }
}

impl Pairs for Within {
    type Rows = Beside;
    const TIGHT: bool = true;

    #[inline(always)]
    fn prepare(rows: &GroupedRows) {
        if warp::warp_id() == 0 {
            sort(rows);
        }
        thread::sync_threads();
    }

    #[inline(always)]
    fn tiles(_: &GroupedRows) -> u32 {
        pairs_tiles().get(0)
    }

    #[inline(always)]
    fn rows(rows: &GroupedRows, shape: StreamShape, tile: u32) -> (Beside, u32) {
        let pairs = Beside { tile, pairs_per_row: rows.pairs_per_row, n: shape.n, k: shape.k };
        (pairs, pairs_tiles().get(1 + tile as usize * TILE_WORDS))
    }

    #[inline(always)]
    fn other(_: &GroupedRows, _: Global<u32>, _: u32, matrix: u32) -> u32 {
        matrix
    }
}

/// The matrix of an expert; where all experts have one format, an expert is its own.
#[inline(always)]
fn matrix(slots: Global<u32>, expert: u32) -> u32 {
    if slots.is_empty() { expert } else { slots.get(expert as usize) }
}

/// What `expert_sort` writes, by one warp.
#[inline(always)]
fn sort(rows: &GroupedRows) {
    /// No expert.
    const NONE: u32 = u32::MAX;
    let (lane, pairs) = (warp::lane_id(), rows.ids.len() as u32);
    let (order, tiles) = (pairs_order(), pairs_tiles());
    let mine = if lane < pairs { rows.ids.get(lane as usize) } else { NONE };
    if lane < pairs && mine >= rows.experts {
        thread::trap("an expert id outside the experts");
    }
    // What a pair has in sorted order: pairs before it, pairs of its expert before it, all of its expert.
    let (mut place, mut rank, mut all) = (lane, 0, 1);
    if pairs > ALONE as u32 {
        let (mut before, mut first) = (0u32, 0);
        (rank, all) = (0, 0);
        while first < pairs {
            // Lanes past the last pair have no expert.
            unroll!(i in 0 1 2 3 4 5 6 7; {
                let other = first + i as u32;
                let id = warp::shfl(mine, other);
                before += (id < mine) as u32;
                rank += (id == mine && other < lane) as u32;
                all += (id == mine) as u32;
            });
            first += TOGETHER;
        }
        place = before + rank;
    }
    // A tile begins at every eighth pair of an expert; its number is that of the beginnings before it.
    let begins = lane < pairs && rank % TILE == 0;
    let mut beginnings = warp::ballot(begins);
    if pairs > ALONE as u32 {
        beginnings = warp::sum(if begins { 1 << place } else { 0 });
    }
    if lane < pairs {
        order.set(place as usize, lane);
    }
    if begins {
        let at = 1 + (beginnings & ((1 << place) - 1)).count_ones() as usize * TILE_WORDS;
        tiles.set(at, matrix(rows.slots, mine));
        tiles.set(at + 1, place);
        tiles.set(at + 2, TILE.min(all - rank));
    }
    if lane == 0 {
        tiles.set(0, beginnings.count_ones());
    }
}
