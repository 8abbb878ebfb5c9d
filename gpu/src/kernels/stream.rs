//! Products for up to 64 rows at the speed of the memory: `y[m, n] = sum_k x[m, k] W[n, k]`, weights streamed once.
//!
//! ```text
//!            n: tiles of 16 weight rows
//!          +--------+--------+--          a unit: TEAMS x NT tiles of one matrix, all of k, up to MT x 8 rows of x
//!   k      | team 0 | team 1 |            a block takes units in turn (persistent: unit, unit + grid, ...)
//!   |      |  warp per slice  |            a warp owns NT tiles and one of k_split slices of k
//! ```
//!
//! **The stream.** A warp has a ring of `DEPTH` stages of shared memory to itself and fills it with asynchronous
//! copies, `DEPTH - 1` stages ahead of what it multiplies, across the borders of units: while one unit's sums are put
//! together, the next one's weights are on their way. No barrier of the block stands between a copy and its use.
//! Weights lie in memory in the order in which lanes read them ([`Format`]), so a stage is one contiguous run a tile.
//!
//! Weights never change: a launch that overlaps the one before it fills stages while that runs, and reads x after it.
//!
//! **The sums.** Slices of k follow from the shape alone; chunks are added in ascending order, then the slices through
//! shared memory. So a row's bits depend neither on how many rows go with it nor on the variant that multiplies it.
//!
//! Each lane holds the sums of fragments `D` of `mma.m16n8k16`: with `g = lane / 4` and `c = lane % 4`, weight rows `g`
//! and `g + 8` of a tile times rows `2c` and `2c + 1` of x. Within a step of 32 k, lane `c` takes k `8c .. 8c + 8` of
//! its rows, 16 bytes at a time: k 2c, 2c+1, 2c+8, 2c+9 of an `mma` are the lane's first four in the first `mma` of the
//! step, its last four in the second, for both operands. Rows past the last are copies of the last and never stored.

use cuda_std::{Global, Shared, bf16, dynamic_shared, math, mma, thread, warp};

use super::ring::{Ring, Sources, Stage, ring_bytes};
use super::stream_rows::Rows;
use super::stream_work::leave;
use super::turns::{Pace, Turn};
use crate::args::linear::StreamShape;
use crate::unroll::unroll;

/// Weight rows of a tile: the rows of an `mma`'s first operand.
pub const TILE_N: usize = 16;
/// Rows of x of a tile: the columns of an `mma`'s second operand.
pub const TILE_M: usize = 8;
/// k of a chunk: what lies together in memory for one tile.
pub const CHUNK_K: usize = 64;
/// k of a step: summed, then folded into a lane's sums.
pub const STEP_K: usize = 32;
/// Steps of a chunk.
pub const STEPS: usize = CHUNK_K / STEP_K;
/// Sums of one fragment that a lane holds.
pub const FRAGMENT: usize = 4;
/// Consecutive k that a lane reads of a row of x at a time: 16 bytes.
pub const LANE_K: usize = 8;
/// Warps of a block.
pub const WARPS: u32 = 8;
/// Threads of a block.
pub const THREADS: u32 = WARPS * warp::WARP;
/// Slices of k at most: the warps of a block.
pub const MAX_SPLIT: usize = WARPS as usize;
const LANES: usize = warp::WARP as usize;
/// Sums of a tile of weights and a tile of rows.
pub const TILE_SUMS: usize = FRAGMENT * LANES;

/// Slices of k that a dense product is summed in: by k alone, two chunks each at least.
pub const fn k_split(k: usize) -> usize {
    split(k, 2)
}

/// The same of products gathered by expert: a warp has 16 chunks of each at least, 8 where an expert has few tiles.
pub const fn k_split_grouped(n: usize, k: usize) -> usize {
    split(k, if n < FEW_ROWS { 8 } else { 16 })
}

/// Weight rows below which an expert has few tiles.
pub const FEW_ROWS: usize = 1024;

/// The chunk at which slice `slice` of k begins and the one before it ends.
#[inline(always)]
pub fn slice_start(shape: StreamShape, slice: u32) -> u32 {
    math::div(slice * shape.k.div_ceil(CHUNK_K as u32), shape.k_split)
}

const fn split(k: usize, least: usize) -> usize {
    let chunks = k.div_ceil(CHUNK_K);
    let mut split = 1;
    while split < MAX_SPLIT && split * 2 * least <= chunks {
        split *= 2;
    }
    split
}

/// The number of a tile's chunk among all of the weights; launchers see to it that 32 bits hold it.
#[inline(always)]
pub const fn chunk_index(matrix: u32, n: u32, k: u32, tile: u32, chunk: u32) -> u32 {
    (matrix * n.div_ceil(TILE_N as u32) + tile) * k.div_ceil(CHUNK_K as u32) + chunk
}

/// How a block divides a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Tiles of weights that a warp multiplies together.
    pub nt: usize,
    /// Tiles of rows of x.
    pub mt: usize,
    /// Chunks of a stage.
    pub chunks: usize,
    /// Stages of a warp's ring.
    pub depth: usize,
    /// Blocks of a multiprocessor at once: what registers allow; shared memory may allow fewer.
    pub blocks: u32,
}

impl Variant {
    /// Words of a stage whose tiles have `tile_words` a chunk.
    const fn stage_words(self, tile_words: usize) -> usize {
        self.nt * self.chunks * tile_words
    }

    /// Buffers of partial sums: with two, one barrier a unit is enough.
    const fn buffers(self) -> usize {
        if self.mt == 1 { 2 } else { 1 }
    }

    /// Whether a block has one unit alone, and the grid as many blocks as there are units: with many rows registers are
    /// few, and the next unit would want some.
    pub const fn alone(self) -> bool {
        self.mt > EARLY
    }

    /// Tiles of a warp whose sums are exchanged at a time: all, or one where the rows are many.
    const fn pass(self) -> usize {
        if self.alone() { 1 } else { self.nt }
    }

    /// Sums that a block's warps exchange at a time.
    const fn partial_sums(self) -> usize {
        WARPS as usize * self.pass() * self.mt * TILE_SUMS
    }

    /// Bytes of dynamic shared memory: the rings, then the partial sums.
    pub const fn shared_bytes(self, tile_words: usize) -> u32 {
        let rings = WARPS as usize * ring_bytes(self.depth, self.stage_words(tile_words));
        (rings + self.buffers() * self.partial_sums() * size_of::<f32>()) as u32
    }
}

/// Where a lane stands in a fragment.
#[derive(Clone, Copy)]
pub struct Lane {
    /// Row of the tile, 0..8; the lane also has row `g + 8`.
    pub g: usize,
    /// 0..4: which k it reads, and columns `2c` and `2c + 1` of the sums.
    pub c: usize,
}

impl Lane {
    #[inline(always)]
    pub fn this() -> Self {
        let lane = warp::lane_id() as usize;
        Self { g: lane / 4, c: lane % 4 }
    }

    #[inline(always)]
    pub fn index(self) -> usize {
        self.g * 4 + self.c
    }
}

/// A format of weights in the order in which lanes read them: `[matrices, tiles, chunks, TILE_WORDS]`.
pub trait Format: Copy {
    /// Words of one tile's chunk, a multiple of 4.
    const TILE_WORDS: usize;
    /// What sums must be multiplied by in the end, a power of two.
    const UNIT: f32;
    /// A lane's share of it.
    type Chunk: Copy;

    /// Reads a lane's share of the chunk whose first word is `at`.
    fn load(stage: Shared<u32>, at: usize, lane: Lane) -> Self::Chunk;

    /// The first operands of both `mma`s of a step.
    fn operands(chunk: &Self::Chunk, step: usize) -> [[u32; 4]; 2];

    /// Adds a step's products to a lane's sums.
    fn fold(chunk: &Self::Chunk, step: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]);
}

/// What a block multiplies at a time.
#[derive(Clone, Copy)]
pub struct Unit<R> {
    /// Which run of `TEAMS x tiles of a team` tiles.
    pub block: u32,
    pub rows: R,
    /// What [`Work::tile`] needs to find the weights; [`SKIP`] when this launch has none for the unit.
    pub matrices: [u32; 2],
}

/// In [`Unit::matrices`]: another launch multiplies this unit.
pub const SKIP: u32 = u32::MAX;

/// A launch's products.
pub trait Work: Copy {
    type Rows: Rows;

    /// Whether the work itself takes so many registers that few are left.
    const TIGHT: bool = false;

    /// Comes before all that follows, once what the launch before the last wrote may be read.
    #[inline(always)]
    fn prepare(&self) {}

    /// Whether units and weights may be read while the launch before this one runs.
    fn settled(&self) -> bool;

    /// Runs of tiles of a matrix. Units are those of the first rows, then of the next.
    fn runs(&self) -> u32;

    /// Rows, in blocks that a unit multiplies, times matrices.
    fn rows(&self) -> u32;

    /// Whether a block takes neighbouring units, else every so many.
    fn neighbours(&self) -> bool;

    /// Run `block` of block of rows `rows`.
    fn unit(&self, rows: u32, block: u32) -> Unit<Self::Rows>;

    /// The weights of tile `t` of a team, and which matrix and tile of them it is.
    fn tile(&self, unit: &Unit<Self::Rows>, team: u32, t: u32) -> (Global<u32>, u32, u32);

    /// Stores what a thread of the block owns of the sums of tiles `first .. first + PASS` of each team.
    fn finish<const PASS: usize, const MT: usize>(&self, unit: &Unit<Self::Rows>, first: u32, sums: &Sums<PASS, MT>);
}

/// The partial sums of a block.
pub struct Sums<const PASS: usize, const MT: usize> {
    partial: Shared<f32>,
    split: u32,
}

impl<const PASS: usize, const MT: usize> Sums<PASS, MT> {
    #[inline(always)]
    fn at(warp: usize, t: usize, mt: usize, i: usize, lane: usize) -> usize {
        ((warp * PASS + t) * MT + mt) * TILE_SUMS + i * LANES + lane
    }

    /// The product of row `n` of a team's tile `t` with row `m` of x: the slices of k in ascending order.
    #[inline(always)]
    pub fn get(&self, team: u32, t: u32, n: u32, m: usize) -> f32 {
        let n = n as usize;
        let lane = n % TILE_M * 4 + m % TILE_M / 2;
        let i = n / TILE_M * 2 + m % 2;
        let first = Self::at((team * self.split) as usize, t as usize, m / TILE_M, i, lane);
        let mut sum = self.partial.get(first);
        for slice in 1..self.split {
            sum += self.partial.get(first + slice as usize * PASS * MT * TILE_SUMS);
        }
        sum
    }
}

/// What a warp multiplies of each unit.
#[derive(Clone, Copy)]
struct Slice {
    team: u32,
    /// Chunks `first .. end`.
    first: u32,
    end: u32,
}

impl Slice {
    #[inline(always)]
    fn this(shape: StreamShape) -> Self {
        let (team, member) = (math::div(warp::warp_id(), shape.k_split), math::rem(warp::warp_id(), shape.k_split));
        Self { team, first: slice_start(shape, member), end: slice_start(shape, member + 1) }
    }
}

/// The stage that is filled next.
#[derive(Clone, Copy)]
struct Ahead<R, const NT: usize> {
    /// The unit of the stage that was filled last.
    turn: Turn<R>,
    /// Chunks of it that are left.
    left: u32,
    sources: Sources<NT>,
}

impl<R: Rows, const NT: usize> Ahead<R, NT> {
    #[inline(always)]
    fn of<F: Format, W: Work<Rows = R>>(turn: Turn<R>, work: &W, shape: StreamShape, slice: Slice) -> Self {
        let mut sources = [Global::EMPTY; NT];
        unroll!(t in 0 1 2 3 below NT; {
            let (weights, matrix, tile) = work.tile(&turn.unit, slice.team, t as u32);
            // Tiles past the last are read as the last and never stored.
            let tile = tile.min(shape.n.div_ceil(TILE_N as u32) - 1);
            let first = chunk_index(matrix, shape.n, shape.k, tile, slice.first) as usize * F::TILE_WORDS;
            sources[t] = weights.slice(first, (slice.end - slice.first) as usize * F::TILE_WORDS);
        });
        Self { turn, left: slice.end - slice.first, sources }
    }

    /// Starts filling `stage` with what comes next, if anything does: of the same unit, if that is `alone`.
    #[inline(always)]
    fn fill<F: Format, W: Work<Rows = R>, const CHUNKS: usize, const DEPTH: usize>(
        &mut self,
        (work, pace): (&W, Pace),
        shape: StreamShape,
        slice: Slice,
        ring: Ring<NT, DEPTH>,
        stage: u32,
        alone: bool,
    ) {
        if self.left == 0 {
            if alone {
                return ring.skip();
            }
            self.turn = self.turn.next(work, pace);
            if self.turn.index >= pace.end {
                return ring.skip();
            }
            *self = Self::of::<F, W>(self.turn, work, shape, slice);
        }
        let count = self.left.min(CHUNKS as u32);
        let words = count * F::TILE_WORDS as u32;
        ring.fill(stage, self.sources, words);
        self.left -= count;
        let rest = self.left as usize * F::TILE_WORDS;
        unroll!(t in 0 1 2 3 below NT; { self.sources[t] = self.sources[t].slice(words as usize, rest) });
    }
}

/// Tiles of rows whose operands are read before the weights are waited for.
pub const EARLY: usize = 2;

/// Tiles of rows up to which none is left out: rows past the last are copies of it.
const UNTESTED: usize = 4;

/// A unit's rows as a lane sees them.
#[derive(Clone, Copy)]
struct Inputs<const MT: usize> {
    x: Global<bf16>,
    /// The elements at which the lane's rows begin, plus where the lane reads in a step.
    row: [usize; MT],
    /// The same in runs of [`LANE_K`], where rows are many: half the registers.
    short: [u32; MT],
    count: usize,
    k: u32,
}

/// Operands of a row's chunk: 16 bytes a step.
type Operands = [[u32; 4]; STEPS];

impl<const MT: usize> Inputs<MT> {
    #[inline(always)]
    fn of<R: Rows>(x: Global<bf16>, rows: R, k: u32) -> Self {
        let count = rows.count();
        let (mut row, mut short) = ([0; MT], [0; MT]);
        let Lane { g, c } = Lane::this();
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            row[m] = rows.x((m * TILE_M + g).min(count - 1)) + c * LANE_K;
            short[m] = (row[m] / LANE_K) as u32;
        });
        Self { x, row, short, count, k }
    }

    /// Whether tile `m` is multiplied. Only where there are many is one without rows worth a branch, which costs more
    /// than the products of a few.
    #[inline(always)]
    fn has(self, m: usize) -> bool {
        MT <= UNTESTED || m * TILE_M < self.count
    }

    /// Operands of `COUNT` chunks from `chunk` on of the lane's row of tile `m`; zeros past k, where NaN may lie.
    #[inline(always)]
    fn read<const COUNT: usize>(self, m: usize, chunk: u32) -> [Operands; COUNT] {
        let mut read = [[[0; 4]; STEPS]; COUNT];
        let first = chunk * CHUNK_K as u32;
        if first + (COUNT * CHUNK_K) as u32 <= self.k {
            // One address for all.
            let near = self.x.slice(self.row[m] + first as usize, COUNT * CHUNK_K - STEP_K + LANE_K);
            unroll!(i in 0 1 2 3 below COUNT; {
                unroll!(step in 0 1; { read[i][step] = near.ld16(i * CHUNK_K + step * STEP_K) });
            });
        } else {
            let left = self.k.saturating_sub(first + (Lane::this().c * LANE_K) as u32) as usize;
            unroll!(i in 0 1 2 3 below COUNT; {
                unroll!(step in 0 1; {
                    let at = i * CHUNK_K + step * STEP_K;
                    if at < left {
                        read[i][step] = self.x.ld16(self.row[m] + first as usize + at);
                    }
                });
            });
        }
        read
    }

    /// The operand of one step of a chunk.
    #[inline(always)]
    fn step(self, m: usize, chunk: u32, step: usize) -> [u32; 4] {
        let first = chunk as usize * CHUNK_K + step * STEP_K;
        let inside = first + Lane::this().c * LANE_K < self.k as usize;
        if inside { self.x.ld16(self.short[m] as usize * LANE_K + first) } else { [0; 4] }
    }
}

/// What a warp adds up.
type Accumulators<const NT: usize, const MT: usize> = [[[f32; FRAGMENT]; MT]; NT];

/// Multiplies the first `COUNT` chunks of a stage, from `chunk` on, once `arrive` has seen it filled.
#[inline(always)]
fn multiply<F: Format, const NT: usize, const MT: usize, const CHUNKS: usize, const COUNT: usize>(
    inputs: Inputs<MT>,
    chunk: u32,
    sums: &mut Accumulators<NT, MT>,
    arrive: impl FnOnce() -> Shared<u32>,
) {
    let lane = Lane::this();
    // With few rows, x is on its way while the warp waits for weights.
    let mut xs = [[[[0; 4]; STEPS]; COUNT]; EARLY];
    if MT <= EARLY {
        unroll!(m in 0 1 below MT; { xs[m] = inputs.read(m, chunk) });
    }
    let held = arrive();
    unroll!(i in 0 1 2 3 below COUNT; {
        if MT <= EARLY {
            unroll!(t in 0 1 2 3 below NT; {
                let tile = F::load(held, (t * CHUNKS + i) * F::TILE_WORDS, lane);
                unroll!(step in 0 1; {
                    let a = F::operands(&tile, step);
                    unroll!(m in 0 1 below MT; { add::<F>(&tile, step, a, xs[m % EARLY][i][step], &mut sums[t][m]) });
                });
            });
        } else {
            // A step's operands of all rows stand in registers while the tiles pass.
            unroll!(step in 0 1; {
                let mut x = [[0; 4]; MT];
                unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
                    if inputs.has(m) {
                        x[m] = inputs.step(m, chunk + i as u32, step);
                    }
                });
                unroll!(t in 0 1 2 3 below NT; {
                    let tile = F::load(held, (t * CHUNKS + i) * F::TILE_WORDS, lane);
                    let a = F::operands(&tile, step);
                    unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
                        if inputs.has(m) {
                            add::<F>(&tile, step, a, x[m], &mut sums[t][m]);
                        }
                    });
                });
            });
        }
    });
}

/// Adds a step's products of a tile and a tile of rows.
#[inline(always)]
fn add<F: Format>(tile: &F::Chunk, step: usize, a: [[u32; 4]; 2], x: [u32; 4], sums: &mut [f32; FRAGMENT]) {
    let mut products = [0.0; FRAGMENT];
    mma::mma_m16n8k16_x2(&mut products, a, x);
    F::fold(tile, step, products, sums);
}

/// One block's units.
#[inline(always)]
pub fn run<F: Format, W: Work, const NT: usize, const MT: usize, const CHUNKS: usize, const DEPTH: usize>(
    work: W,
    x: Global<bf16>,
    shape: StreamShape,
) {
    let variant = Variant { nt: NT, mt: MT, chunks: CHUNKS, depth: DEPTH, blocks: 1 };
    let warp = warp::warp_id() as usize;
    let of_ring = ring_bytes(DEPTH, variant.stage_words(F::TILE_WORDS));
    let ring = Ring::<NT, DEPTH>::new(warp * of_ring, CHUNKS * F::TILE_WORDS);
    let partial = |buffer: usize| {
        let sums = variant.partial_sums();
        let start = WARPS as usize * of_ring + buffer * sums * size_of::<f32>();
        dynamic_shared::<f32>(start as u32, sums as u32)
    };
    let alone = variant.alone();
    let slice = Slice::this(shape);
    let lane = Lane::this();
    let settled = work.settled();
    if !settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    work.prepare();
    if work.rows() == 0 {
        return leave(settled);
    }
    let pace = Pace::of(&work);
    let mut turn = Turn::first(&work, pace);
    if turn.index >= pace.end {
        return leave(settled);
    }
    let mut ahead = Ahead::of::<F, W>(turn, &work, shape, slice);
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        ahead.fill::<F, W, CHUNKS, DEPTH>((&work, pace), shape, slice, ring, stage as u32, alone);
    });
    if settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    let mut stage = Stage::FIRST;
    let mut free = DEPTH as u32 - 1;
    let mut buffer = 0;
    while turn.index < pace.end {
        let inputs = Inputs::<MT>::of(x, turn.unit.rows, shape.k);
        let mut sums = [[[0.0; FRAGMENT]; MT]; NT];
        let mut chunk = slice.first;
        while chunk < slice.end {
            let mut arrive = || {
                ring.wait(stage);
                // All lanes have seen the stage, and all have read the one that is filled now.
                warp::sync_warp();
                ahead.fill::<F, W, CHUNKS, DEPTH>((&work, pace), shape, slice, ring, free, alone);
                ring.stage(stage.index)
            };
            if chunk + CHUNKS as u32 <= slice.end {
                multiply::<F, NT, MT, CHUNKS, CHUNKS>(inputs, chunk, &mut sums, arrive);
            } else if CHUNKS > 2 && chunk + 2 == slice.end {
                multiply::<F, NT, MT, CHUNKS, 2>(inputs, chunk, &mut sums, arrive);
            } else {
                let held = arrive();
                let words = held.len() - (CHUNKS - 1) * F::TILE_WORDS;
                for i in 0..slice.end - chunk {
                    let from_here = || held.slice(i as usize * F::TILE_WORDS, words);
                    multiply::<F, NT, MT, CHUNKS, 1>(inputs, chunk + i, &mut sums, from_here);
                }
            }
            chunk += CHUNKS as u32;
            free = stage.index;
            stage = stage.next::<DEPTH>();
        }
        if MT <= EARLY {
            let exchange = Sums::<NT, MT> { partial: partial(buffer), split: shape.k_split };
            // Where registers are few, not held through the loop over k.
            let (warp, lane) = match W::TIGHT {
                true => (thread::opaque(warp as u32) as usize, thread::opaque(warp::lane_id()) as usize),
                false => (warp, lane.index()),
            };
            unroll!(t in 0 1 2 3 below NT; {
                put::<F, MT>(exchange.partial, Sums::<NT, MT>::at(warp, t, 0, 0, lane), sums[t]);
            });
            thread::sync_threads();
            work.finish(&turn.unit, 0, &exchange);
        } else {
            // Looked up anew: in the loop over k registers are few.
            let unit = work.unit(thread::opaque(turn.rows), thread::opaque(turn.unit.block));
            let exchange = Sums::<1, MT> { partial: partial(0), split: thread::opaque(shape.k_split) };
            unroll!(t in 0 1 2 3 below NT; {
                if t > 0 {
                    thread::sync_threads();
                }
                put::<F, MT>(exchange.partial, Sums::<1, MT>::at(warp, 0, 0, 0, lane.index()), sums[t]);
                thread::sync_threads();
                work.finish(&unit, t as u32, &exchange);
            });
        }
        if variant.buffers() == 1 {
            thread::sync_threads();
        } else {
            buffer = 1 - buffer;
        }
        if alone {
            break;
        }
        // With two stages, the one ahead of a unit's last is the next unit's first.
        turn = if DEPTH == 2 { ahead.turn } else { turn.next(&work, pace) };
    }
}

/// Stores a lane's sums of a tile from `first` on.
#[inline(always)]
fn put<F: Format, const MT: usize>(partial: Shared<f32>, first: usize, sums: [[f32; FRAGMENT]; MT]) {
    unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
        unroll!(i in 0 1 2 3; { partial.set(first + m * TILE_SUMS + i * LANES, sums[m][i] * F::UNIT) });
    });
}
