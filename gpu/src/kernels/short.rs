//! Gathered products of a short k, four chunks: `y[pair, n] = sum_k x[pair, k] W[expert of pair][n, k]`.
//!
//! ```text
//!   tiles of weights, those of one tile of pairs after the other:
//!   | pairs 0, expert 3: tile 0 1 2 3 ..          | pairs 1, expert 7: tile 0 1 2 3 ..          | ..
//!   |--------- block 0 ---------|--------- block 1 ---------|--------- block 2 ---------|          equal runs
//!    w0 w1 w2 .. w7 w0 w1 w2 ..                                                                    a warp a tile
//! ```
//!
//! In [`super::stream`] such a k is one stage of a warp and unit: looking up the unit, the rows of x, the sums through
//! shared memory and the block's barrier would take as long as its product. Here no warp shares anything. A block has a
//! run of neighbouring tiles, which lie side by side in memory; its warps take them in turn, each all of k. The rows of
//! x stand in registers until a warp comes to other pairs, and a lane stores its own sums. The ring is that of the
//! stream, with a tile a stage.
//!
//! Chunks are added in ascending order, as one slice of k: the bits of the stream, which does not split so short a k.

use core::marker::PhantomData;

use cuda_std::{Global, bf16, math, mma, thread, warp};

use super::pairs::Pairs;
use super::ring::{Ring, Stage, ring_bytes};
use super::stream::{CHUNK_K, FRAGMENT, Format, LANE_K, Lane, SKIP, STEP_K, STEPS, TILE_M, TILE_N, WARPS};
use super::stream_rows::Rows;
use super::stream_work::leave;
use crate::args::linear::GroupedStreamArgs;
use crate::unroll::unroll;

/// Chunks of k: what a stage holds of its tile, and whose x a lane keeps.
pub const CHUNKS: usize = 4;

/// How a block divides such a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short {
    /// Stages of a warp's ring, a tile each.
    pub depth: usize,
    /// Blocks of a multiprocessor at once.
    pub blocks: u32,
}

impl Short {
    /// Bytes of dynamic shared memory: the rings.
    pub const fn shared_bytes(self, tile_words: usize) -> u32 {
        (WARPS as usize * ring_bytes(self.depth, CHUNKS * tile_words)) as u32
    }
}

/// Whether a product gathered by expert is one of these.
pub const fn is_short(k: usize) -> bool {
    k.div_ceil(CHUNK_K) == CHUNKS
}

/// Where a warp stands.
#[derive(Clone, Copy)]
struct Place {
    /// Which tile of pairs, and the matrix of its expert.
    pairs: u32,
    matrix: u32,
    /// The tile of weights.
    tile: u32,
    /// Tiles left, this one included.
    left: u32,
}

/// What all places of a launch share.
#[derive(Clone, Copy)]
struct Walk<P> {
    a: GroupedStreamArgs,
    /// Tiles of a matrix.
    tiles: u32,
    /// From a warp's tile to its next: matrices and tiles.
    by: [u32; 2],
    pairs: PhantomData<P>,
}

impl<P: Pairs> Walk<P> {
    #[inline(always)]
    fn of(a: GroupedStreamArgs) -> Self {
        let tiles = a.shape.n.div_ceil(TILE_N as u32);
        Self { a, tiles, by: [math::div(WARPS, tiles), math::rem(WARPS, tiles)], pairs: PhantomData }
    }

    /// The warp's first tile. Blocks' runs differ by one tile at most, the longer ones evenly among them.
    #[inline(always)]
    fn start(self) -> Place {
        let (all, grid) = (P::tiles(&self.a.rows) * self.tiles, thread::grid_dim_x());
        let (each, more) = (math::div(all, grid), math::rem(all, grid));
        let begin = |block: u32| block * each + math::div(block * more, grid);
        let (block, warp) = (thread::block_idx_x(), warp::warp_id());
        let (first, end) = (begin(block), begin(block + 1));
        let left = (end - first + WARPS - 1).saturating_sub(warp) / WARPS;
        let (pairs, tile) = (math::div(first + warp, self.tiles), math::rem(first + warp, self.tiles));
        let mut place = Place { pairs, matrix: SKIP, tile, left };
        if place.left > 0 {
            self.look_up(&mut place);
        }
        place
    }

    /// Finds the matrix of a place's pairs, or goes on to pairs that have one in this launch.
    #[inline(always)]
    fn look_up(self, place: &mut Place) {
        loop {
            place.matrix = P::rows(&self.a.rows, self.a.shape, place.pairs).1;
            if place.matrix != SKIP {
                return;
            }
            self.advance(place);
            if place.left == 0 {
                return;
            }
        }
    }

    /// Goes to the warp's next tile; says whether that is one of other pairs.
    #[inline(always)]
    fn advance(self, place: &mut Place) -> bool {
        let before = place.pairs;
        place.left -= 1;
        place.tile += self.by[1];
        place.pairs += self.by[0];
        if place.tile >= self.tiles {
            place.tile -= self.tiles;
            place.pairs += 1;
        }
        place.pairs != before
    }

    /// The same, and looks up the matrix.
    #[inline(always)]
    fn step(self, place: &mut Place) -> bool {
        let other = self.advance(place);
        if other && place.left > 0 {
            self.look_up(place);
        }
        other
    }
}

/// Rows of x of a tile of pairs as a lane sees them.
#[derive(Clone, Copy)]
struct Inputs {
    /// Operands of row `g`.
    x: [[[u32; 4]; STEPS]; CHUNKS],
    /// Where the products of rows `2c` and `2c + 1` begin, and whether there are such rows.
    y: [usize; 2],
    has: [bool; 2],
}

impl Inputs {
    #[inline(always)]
    fn of<R: Rows>(x: Global<bf16>, rows: R, k: u32) -> Self {
        let Lane { g, c } = Lane::this();
        let count = rows.count();
        let (first, left) = (rows.x(g.min(count - 1)) + c * LANE_K, (k as usize).saturating_sub(c * LANE_K));
        let mut operands = [[[0; 4]; STEPS]; CHUNKS];
        unroll!(i in 0 1 2 3; {
            unroll!(step in 0 1; {
                // Zeros past k, where NaN may lie.
                let at = i * CHUNK_K + step * STEP_K;
                if at < left {
                    operands[i][step] = x.ld16(first + at);
                }
            });
        });
        let y = |m: usize| rows.y(m.min(count - 1));
        Self { x: operands, y: [y(2 * c), y(2 * c + 1)], has: [2 * c < count, 2 * c + 1 < count] }
    }
}

/// One warp's tiles.
#[inline(always)]
pub fn run<F: Format, P: Pairs, const DEPTH: usize>(a: GroupedStreamArgs) {
    let words = CHUNKS * F::TILE_WORDS;
    let ring = Ring::<1, DEPTH>::new(warp::warp_id() as usize * ring_bytes(DEPTH, words), words);
    let (lane, n) = (Lane::this(), a.shape.n as usize);
    let settled = a.rows.settled != 0;
    if !settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    P::prepare(&a.rows);
    let walk = Walk::<P>::of(a);
    let mut now = walk.start();
    if now.left == 0 {
        return leave(settled);
    }
    let mut ahead = now;
    let mut fill = |stage: u32| {
        if ahead.left == 0 {
            return ring.skip();
        }
        let first = (ahead.matrix as usize * walk.tiles as usize + ahead.tile as usize) * words;
        ring.fill(stage, [a.weights.slice(first, words)], words as u32);
        walk.step(&mut ahead);
    };
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; { fill(stage as u32) });
    if settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    let mut stage = Stage::FIRST;
    let mut free = DEPTH as u32 - 1;
    let rows = |place: Place| P::rows(&a.rows, a.shape, place.pairs).0;
    let mut inputs = Inputs::of(a.x, rows(now), a.shape.k);
    loop {
        ring.wait(stage);
        // All lanes have seen the stage, and all have read the one that is filled now.
        warp::sync_warp();
        fill(free);
        let held = ring.stage(stage.index);
        let mut sums = [0.0; FRAGMENT];
        unroll!(i in 0 1 2 3; {
            let chunk = F::load(held, i * F::TILE_WORDS, lane);
            unroll!(step in 0 1; {
                let mut products = [0.0; FRAGMENT];
                mma::mma_m16n8k16_x2(&mut products, F::operands(&chunk, step), inputs.x[i][step]);
                F::fold(&chunk, step, products, &mut sums);
            });
        });
        let row = now.tile as usize * TILE_N + lane.g;
        unroll!(half in 0 1; {
            let row = row + half * TILE_M;
            unroll!(m in 0 1; {
                if inputs.has[m] && row < n {
                    a.y.set(inputs.y[m] + row, sums[half * 2 + m] * F::UNIT);
                }
            });
        });
        let other = walk.step(&mut now);
        if now.left == 0 {
            return;
        }
        if other {
            inputs = Inputs::of(a.x, rows(now), a.shape.k);
        }
        free = stage.index;
        stage = stage.next::<DEPTH>();
    }
}
