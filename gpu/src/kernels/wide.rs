//! Products of up to 64 rows of x that a block's warps share: `y[m, n] = sum_k x[m, k] W[n, k]`, bit for bit those of
//! [`super::stream`].
//!
//! There each warp reads the rows of x that it multiplies, which with several of them is as much as the weights. Here a
//! block's warps have different weight rows and the same k, and read x from shared memory:
//!
//! ```text
//!            n: tiles of 16 weight rows
//!        +--------+--------+-- ... --+--------+    a block: W warps x NT tiles of one matrix, MT x 8 rows of x,
//!   k    | warp 0 | warp 1 |         |        |    and all of k (`wide`) or one slice of it (`split`)
//!        +--------+--------+-- ... --+--------+
//! ```
//!
//! Then what limits is how often x is read from the L2: once a block, whose tiles should therefore be many. With all of
//! k a block, only tall matrices have blocks enough. For others, blocks of a **cluster** have the same tiles and one
//! slice of k each.
//!
//! **The stages.** Weights go through a ring of each warp, as in `stream`. The chunks of x that belong to a stage are
//! copied by all threads, 16 bytes each, into the order in which lanes read them; one barrier of the block a stage says
//! that they are there and that the stage before it has been read.
//!
//! **The sums.** Fragments and the order of k in a step are those of `stream`. With all of k, a warp sums each slice
//! and adds the slices in ascending order. Blocks of a cluster write fragments of their slices to each other's shared
//! memory, where each adds up a share of them, in ascending order. On the CPU device, which has no clusters, `split` is
//! `wide`; on sm_80 it traps, and no plan has it. Rows past the last are computed as copies of the last and never
//! stored.

use cuda_std::async_copy::{cp_async_16_or_zero, cp_async_commit};
use cuda_std::{EMULATED, Global, Shared, bf16, cluster, dynamic_shared, math, mma, thread, warp};

use super::ring::{Ring, Stage, barrier_bytes, wait_groups};
use super::stream::{
    CHUNK_K, FRAGMENT, Format, LANE_K, Lane, MAX_SPLIT, STEP_K, STEPS, TILE_M, TILE_N, TILE_SUMS, chunk_index,
    slice_start,
};
use super::stream_rows::{Rows as _, Strided};
use crate::args::linear::StreamArgs;
use crate::unroll::unroll;

/// Elements of x that the lanes of a warp read together: a step of 8 rows.
pub const SPAN: usize = STEP_K * TILE_M;

/// How a block divides a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    /// Warps with different tiles of weights.
    pub warps: usize,
    /// Warps with the same tiles of weights and different rows of x.
    pub shares: usize,
    /// Tiles of weights of a warp.
    pub nt: usize,
    /// Tiles of rows of x of a warp.
    pub mt: usize,
    /// Chunks of a stage.
    pub chunks: usize,
    /// Stages.
    pub depth: usize,
    /// Blocks of a multiprocessor at once, as registers allow.
    pub blocks: u32,
}

impl Wide {
    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        self.all() as u32 * warp::WARP
    }

    /// Warps of a block.
    const fn all(self) -> usize {
        self.warps * self.shares
    }

    /// Those that copy x: a power of two.
    const fn copiers(self) -> usize {
        1 << self.all().ilog2()
    }

    /// Tiles of rows of x of a block.
    pub const fn row_tiles(self) -> usize {
        self.mt * self.shares
    }

    /// Weight rows of a unit.
    pub const fn rows(self) -> usize {
        self.warps * self.nt * TILE_N
    }

    /// Elements of x of a stage.
    pub const fn x_elems(self) -> usize {
        self.chunks * STEPS * self.row_tiles() * SPAN
    }

    /// Bytes of the rings' barriers, which come first.
    pub const fn barriers(self) -> usize {
        self.warps * barrier_bytes(self.depth)
    }

    /// Bytes of the stages of x, which come next.
    pub const fn x_bytes(self) -> usize {
        self.depth * self.x_elems() * size_of::<bf16>()
    }

    /// Bytes of a warp's stages of weights.
    pub const fn ring(self, tile_words: usize) -> usize {
        self.depth * self.nt * self.chunks * tile_words * size_of::<u32>()
    }

    /// Fragments of a warp that a block of a cluster adds up.
    const fn own(self) -> usize {
        (self.nt * self.mt).div_ceil(MAX_SPLIT)
    }

    /// Words of the sums that a block of a cluster gets from all of them.
    const fn exchange(self) -> usize {
        MAX_SPLIT * self.all() * self.own() * TILE_SUMS
    }

    /// Bytes of dynamic shared memory: barriers, stages of x and of weights; in the end, in place of stages, the sums
    /// of a cluster's blocks.
    pub const fn shared_bytes(self, tile_words: usize) -> u32 {
        let (stages, sums) = (self.x_bytes() + self.warps * self.ring(tile_words), self.exchange() * size_of::<f32>());
        (self.barriers() + if stages > sums { stages } else { sums }) as u32
    }
}

/// What a block multiplies.
#[derive(Clone, Copy)]
struct Unit {
    /// The warp of this thread, in a register that all lanes share: among those with different tiles, and which of
    /// those that share these tiles.
    warp: u32,
    share: u32,
    matrix: u32,
    /// The run of tiles.
    run: u32,
    rows: Strided,
    /// The slice of k that is a cluster's block's.
    slice: u32,
    /// Chunks of k.
    first: u32,
    end: u32,
}

impl Unit {
    #[inline(always)]
    fn this<const TURNS: bool>(a: &StreamArgs, variant: Wide) -> Self {
        let block = thread::block_idx_x();
        let runs = a.shape.n.div_ceil(variant.rows() as u32);
        let (index, slice) = match TURNS {
            true => (block, 0),
            false => (math::div(block, cluster::size()), cluster::rank()),
        };
        let (rest, run) = (math::div(index, runs), math::rem(index, runs));
        let (matrix, rows) = (math::div(rest, a.row_blocks), math::rem(rest, a.row_blocks));
        let chunks = a.shape.k.div_ceil(CHUNK_K as u32);
        let (first, end) = match TURNS {
            true => (0, chunks),
            // Of a short k there are fewer slices than blocks.
            false => (slice_start(a.shape, slice).min(chunks), slice_start(a.shape, slice + 1).min(chunks)),
        };
        let all = warp::shfl(warp::warp_id(), 0);
        let (share, warp) = (all / variant.warps as u32, all % variant.warps as u32);
        Self { warp, share, matrix, run, rows: Strided::of(a.rows, matrix, rows), slice, first, end }
    }

    /// Tile `t` of this warp; it may lie past the last.
    #[inline(always)]
    fn tile(&self, variant: Wide, t: usize) -> u32 {
        (self.run * variant.warps as u32 + self.warp) * variant.nt as u32 + t as u32
    }
}

/// The weights of the stage that is filled next.
#[derive(Clone, Copy)]
struct Weights<const NT: usize> {
    /// The chunk of each tile, among all of the weights.
    chunk: [u32; NT],
    /// Chunks that are left.
    left: u32,
}

impl<const NT: usize> Weights<NT> {
    #[inline(always)]
    fn of(a: &StreamArgs, variant: Wide, unit: &Unit) -> Self {
        let mut chunk = [0; NT];
        unroll!(t in 0 1 2 3 below NT; {
            // Tiles past the last are read as the last and never stored.
            let tile = unit.tile(variant, t).min(a.shape.n.div_ceil(TILE_N as u32) - 1);
            chunk[t] = chunk_index(unit.matrix, a.shape.n, a.shape.k, tile, unit.first);
        });
        Self { chunk, left: unit.end - unit.first }
    }

    /// Starts filling a stage with what comes next, if anything does. Of the warps with the same tiles the first does
    /// it.
    #[inline(always)]
    fn fill<F: Format, const CHUNKS: usize, const DEPTH: usize>(
        &mut self,
        a: &StreamArgs,
        unit: &Unit,
        ring: Ring<NT, DEPTH>,
        stage: u32,
    ) {
        let count = self.left.min(CHUNKS as u32);
        if count == 0 {
            return ring.skip();
        }
        let mut sources = [Global::EMPTY; NT];
        unroll!(t in 0 1 2 3 below NT; {
            let (at, words) = (self.chunk[t] as usize * F::TILE_WORDS, count as usize * F::TILE_WORDS);
            sources[t] = a.weights.slice(at, words);
            self.chunk[t] += count;
        });
        if unit.share == 0 {
            ring.fill(stage, sources, count * F::TILE_WORDS as u32);
        } else {
            ring.skip();
        }
        self.left -= count;
    }
}

/// The x of the stage that is filled next.
#[derive(Clone, Copy)]
struct Inputs {
    /// Where what this thread copies begins, in runs of [`LANE_K`]: of the rows of even and of odd turns.
    rows: [u32; 2],
    /// Values of k that are left, from those on which this thread copies first.
    left: u32,
    /// Where it copies them in a stage.
    to: usize,
}

impl Inputs {
    #[inline(always)]
    fn of(a: &StreamArgs, variant: Wide, unit: &Unit) -> Self {
        let (Lane { g, c }, warp) = (Lane::this(), (unit.share as usize * variant.warps) + unit.warp as usize);
        let (warps, tiles) = (variant.copiers(), variant.row_tiles());
        // With more warps than tiles of rows, warps begin at different steps.
        let step = if warps > tiles { warp / tiles } else { 0 };
        let k = unit.first as usize * CHUNK_K + step * STEP_K + c * LANE_K;
        let row = |turn: usize| {
            let row = ((turn * warps + warp) % tiles * TILE_M + g).min(unit.rows.count() - 1);
            ((unit.rows.x(row) + k) / LANE_K) as u32
        };
        Self {
            rows: [row(0), row(1)],
            left: (a.shape.k as usize).saturating_sub(k) as u32,
            to: warp * SPAN + warp::lane_id() as usize * LANE_K,
        }
    }

    /// Starts copying what belongs to a stage of a unit with `left` chunks left; nobody reads more. Zeros past the last
    /// k: the weights are zero there, and so must x be, or a NaN would come in.
    #[inline(always)]
    fn fill(&mut self, a: &StreamArgs, variant: Wide, x: Shared<bf16>, stage: u32, left: u32) {
        let (warps, tiles, elems) = (variant.copiers(), variant.row_tiles(), variant.x_elems());
        let spans = variant.chunks * STEPS * tiles;
        let to = x.slice(stage as usize * elems, elems);
        let copies = warps == variant.all() || self.to < warps * SPAN;
        unroll!(turn in 0 1 2 3 4 5 6 7; {
            let at = self.to + turn * warps * SPAN;
            let read = match (turn * warps / tiles / STEPS, warps <= STEPS * tiles) {
                // The first chunk of a stage is.
                (0, true) => true,
                (chunk, true) => (chunk as u32) < left,
                // A turn is of more chunks than one.
                (_, false) => variant.chunks == 1 || at / (STEPS * tiles * SPAN) < left as usize,
            };
            if turn * warps < spans && copies && read && ((turn + 1) * warps <= spans || at < elems) {
                let k = turn * warps / tiles * STEP_K;
                let from = self.rows[turn % 2] as usize * LANE_K + k;
                cp_async_16_or_zero(to, at, a.x, from, k < self.left as usize);
            }
        });
        let step = variant.chunks * CHUNK_K;
        self.left = self.left.saturating_sub(step as u32);
        self.rows = self.rows.map(|row| row + (step / LANE_K) as u32);
    }
}

/// Closes the group of this thread's copies of x where weights are not in it.
#[inline(always)]
pub fn close_group() {
    if cfg!(any(not(target_arch = "nvptx64"), target_feature = "ptx80")) {
        cp_async_commit();
    }
}

/// A warp's sums.
pub type Accumulators<const NT: usize, const MT: usize> = [[[f32; FRAGMENT]; MT]; NT];

/// Adds the products of one chunk: the `i`th of the stage in `held` and `x`, where a step has `spans` tiles of rows.
#[inline(always)]
pub fn multiply<F: Format, const NT: usize, const MT: usize, const CHUNKS: usize>(
    held: Shared<u32>,
    (x, spans): (Shared<bf16>, usize),
    i: usize,
    sums: &mut Accumulators<NT, MT>,
) {
    let lane = Lane::this();
    let load = |t: usize| F::load(held, (t * CHUNKS + i) * F::TILE_WORDS, lane);
    let mut tile = [load(0); NT];
    unroll!(t in 1 2 3 below NT; { tile[t] = load(t) });
    unroll!(step in 0 1; {
        if MT > GROUP && step > 0 {
            apart();
        }
        let of_chunk = x.slice(i * STEPS * spans * SPAN, ((STEPS - 1) * spans + MT) * SPAN);
        multiply_step::<F, NT, MT>(&tile, step, (of_chunk, step * spans), sums);
    });
}

/// Keeps reads apart: with many rows, operands of all would be read first, and registers would hold fewer sums.
#[inline(always)]
fn apart() {
    if !EMULATED {
        warp::sync_warp();
    }
}

/// Adds the products of one step: the weights of step `step` of `tile`, and x of the step.
#[inline(always)]
fn multiply_step<F: Format, const NT: usize, const MT: usize>(
    tile: &[F::Chunk; NT],
    step: usize,
    (x, span): (Shared<bf16>, usize),
    sums: &mut Accumulators<NT, MT>,
) {
    let mut operands = [F::operands(&tile[0], step); NT];
    unroll!(t in 1 2 3 below NT; { operands[t] = F::operands(&tile[t], step) });
    // No test for rows past the last: their products cost less than what a branch does to the order.
    unroll!(at in 0 1 2 3 4 5 6 7; {
        let first = at * together(NT);
        if first < MT {
            group::<F, NT, MT>(tile, operands, step, (x, span), first, sums);
        }
    });
}

/// Fragments of products that are under way together, at least.
const GROUP: usize = 4;

/// Tiles of rows of them, with `nt` tiles of weights.
const fn together(nt: usize) -> usize {
    GROUP / nt
}

/// Adds the products of a step with tiles of rows `first ..`, as many as are under way [`together`].
#[inline(always)]
fn group<F: Format, const NT: usize, const MT: usize>(
    tile: &[F::Chunk; NT],
    operands: [[[u32; 4]; 2]; NT],
    step: usize,
    (x, span): (Shared<bf16>, usize),
    first: usize,
    sums: &mut Accumulators<NT, MT>,
) {
    let mut products = [[[0.0; FRAGMENT]; GROUP]; NT];
    let mut read = [[0; 4]; GROUP];
    unroll!(m in 0 1 2 3; {
        if m < together(NT) && first + m < MT {
            read[m] = x.ld16((span + first + m) * SPAN + Lane::this().index() * LANE_K);
        }
    });
    // The first halves of all, then the second: each product waits for its own first half alone.
    unroll!(half in 0 1; {
        unroll!(m in 0 1 2 3; {
            unroll!(t in 0 1 2 3 below NT; {
                if m < together(NT) && first + m < MT {
                    if cfg!(target_arch = "nvptx64") {
                        let b = [read[m][2 * half], read[m][2 * half + 1]];
                        mma::mma_m16n8k16(&mut products[t][m], operands[t][half], b);
                    } else if half == 0 {
                        // The same sums; emulated lanes meet once instead of twice.
                        mma::mma_m16n8k16_x2(&mut products[t][m], operands[t], read[m]);
                    }
                }
            });
        });
    });
    unroll!(m in 0 1 2 3; {
        unroll!(t in 0 1 2 3 below NT; {
            if m < together(NT) && first + m < MT {
                F::fold(&tile[t], step, products[t][m], &mut sums[t][first + m]);
            }
        });
    });
}

/// Puts a fragment of products, of tile `tile` of weights and tile `m` of rows, in its place.
#[inline(always)]
fn put<F: Format>(a: &StreamArgs, rows: Strided, tile: usize, m: usize, lane: Lane, sums: [f32; FRAGMENT]) {
    let count = thread::opaque(rows.count() as u32) as usize;
    unroll!(i in 0 1 2 3; {
        let n = tile * TILE_N + lane.g + i / 2 * TILE_M;
        let row = m * TILE_M + 2 * lane.c + i % 2;
        if row < count && n < a.shape.n as usize {
            let (to, sum) = (rows.y(row) + n, sums[i] * F::UNIT);
            a.y.set(to, if a.rows.accumulate != 0 { a.y.get(to) + sum } else { sum });
        }
    });
}

/// The lane's place, worked out anew: places of products would else be worked out ahead of the loop over k, and held in
/// registers that it needs.
#[inline(always)]
fn lane_again() -> Lane {
    let index = thread::opaque(warp::lane_id()) as usize;
    Lane { g: index / 4, c: index % 4 }
}

/// Puts a warp's products in their places.
#[inline(always)]
fn finish<F: Format, const NT: usize, const MT: usize>(
    a: &StreamArgs,
    variant: Wide,
    unit: &Unit,
    sums: Accumulators<NT, MT>,
) {
    let lane = lane_again();
    unroll!(t in 0 1 2 3 below NT; {
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            put::<F>(a, unit.rows, unit.tile(variant, t) as usize, unit.share as usize * MT + m, lane, sums[t][m]);
        });
    });
}

/// Adds the slices of the blocks of a cluster, each of which puts a share of the products in their places.
#[inline(always)]
fn exchange<F: Format, const NT: usize, const MT: usize>(
    a: &StreamArgs,
    variant: Wide,
    unit: &Unit,
    sums: Accumulators<NT, MT>,
) {
    let (lane, own, words) = (lane_again(), variant.own(), variant.exchange());
    let buffer = dynamic_shared::<u32>(variant.barriers() as u32, words as u32);
    let warp = (unit.share as usize * variant.warps) + unit.warp as usize;
    let at = |slice: u32, i: usize| {
        ((slice as usize * variant.all() + warp) * own + i) * TILE_SUMS + lane.index() * FRAGMENT
    };
    // All have read their last stage.
    cluster::sync();
    unroll!(t in 0 1 2 3 below NT; {
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            let (to, i) = ((t * MT + m) / own, (t * MT + m) % own);
            cluster::st16(buffer, at(unit.slice, i), sums[t][m].map(f32::to_bits), to as u32);
        });
    });
    cluster::sync();
    unroll!(i in 0 1 2 3 below own; {
        let fragment = unit.slice as usize * own + i;
        if fragment < NT * MT {
            let mut total = buffer.ld16(at(0, i)).map(f32::from_bits);
            unroll!(slice in 1 2 3 4 5 6 7; {
                if (slice as u32) < a.shape.k_split {
                    let sum = buffer.ld16(at(slice as u32, i)).map(f32::from_bits);
                    unroll!(j in 0 1 2 3; { total[j] += sum[j] });
                }
            });
            let tile = unit.tile(variant, 0) as usize + fragment / MT;
            put::<F>(a, unit.rows, tile, unit.share as usize * MT + fragment % MT, lane, total);
        }
    });
}

/// A block's unit: with all of k, slices in turn, or a slice of it.
#[inline(always)]
pub fn run<
    F: Format,
    const W: usize,
    const SHARES: usize,
    const NT: usize,
    const MT: usize,
    const CHUNKS: usize,
    const DEPTH: usize,
    const TURNS: bool,
>(
    a: StreamArgs,
) {
    let variant = Wide { warps: W, shares: SHARES, nt: NT, mt: MT, chunks: CHUNKS, depth: DEPTH, blocks: 1 };
    let unit = Unit::this::<TURNS>(&a, variant);
    let warp = unit.warp as usize;
    let x = dynamic_shared::<bf16>(variant.barriers() as u32, (DEPTH * variant.x_elems()) as u32);
    let stages = variant.barriers() + variant.x_bytes() + warp * variant.ring(F::TILE_WORDS);
    let barriers = warp * barrier_bytes(DEPTH);
    let ring = Ring::<NT, DEPTH>::apart([barriers, stages], CHUNKS * F::TILE_WORDS, unit.share == 0);
    let mut weights = Weights::<NT>::of(&a, variant, &unit);
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        weights.fill::<F, CHUNKS, DEPTH>(&a, &unit, ring, stage as u32);
    });
    thread::wait_for_previous();
    thread::start_next();
    let mut inputs = Inputs::of(&a, variant, &unit);
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        let filled = unit.first + (stage * CHUNKS) as u32;
        if filled < unit.end {
            // With all of k a block, what nobody reads are zeros at the very end: not worth a test.
            let left = if TURNS && !EMULATED { u32::MAX } else { unit.end - filled };
            inputs.fill(&a, variant, x, stage as u32, left);
        }
        ring.skip();
        close_group();
    });
    if SHARES > 1 {
        // Barriers are there before another warp waits at them.
        thread::sync_threads();
    }
    // Adding to minus zero changes nothing.
    let mut total = [[[-0.0; FRAGMENT]; MT]; NT];
    let mut sums = [[[0.0; FRAGMENT]; MT]; NT];
    let (mut chunk, mut slice, mut border) = (unit.first, 1, slice_start(a.shape, 1));
    let mut stage = Stage::FIRST;
    let mut free = DEPTH as u32 - 1;
    while chunk < unit.end {
        wait_groups::<DEPTH>();
        ring.wait(stage);
        // All threads have seen the stage, and all have read the one that is filled now.
        thread::sync_threads();
        if weights.left > 0 {
            inputs.fill(&a, variant, x, free, if TURNS && !EMULATED { u32::MAX } else { weights.left });
        }
        weights.fill::<F, CHUNKS, DEPTH>(&a, &unit, ring, free);
        close_group();
        let held = ring.stage(stage.index);
        let skip = unit.share as usize * MT * SPAN;
        let of_stage = x.slice(stage.index as usize * variant.x_elems() + skip, variant.x_elems() - skip);
        let rows = (of_stage, variant.row_tiles());
        unroll!(i in 0 1 2 3 below CHUNKS; {
            if i == 0 || chunk + (i as u32) < unit.end {
                if TURNS && chunk + i as u32 == border {
                    add(&mut total, &mut sums);
                    slice += 1;
                    border = slice_start(a.shape, slice);
                }
                multiply::<F, NT, MT, CHUNKS>(held, rows, i, &mut sums);
            }
        });
        chunk += CHUNKS as u32;
        free = stage.index;
        stage = stage.next::<DEPTH>();
    }
    if TURNS {
        add(&mut total, &mut sums);
        finish::<F, NT, MT>(&a, variant, &unit, total);
    } else {
        exchange::<F, NT, MT>(&a, variant, &unit, sums);
    }
}

/// Adds a slice's sums to those before it, and clears them.
#[inline(always)]
pub fn add<const NT: usize, const MT: usize>(total: &mut Accumulators<NT, MT>, sums: &mut Accumulators<NT, MT>) {
    unroll!(t in 0 1 2 3 below NT; {
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            unroll!(i in 0 1 2 3; {
                total[t][m][i] += sums[t][m][i];
                sums[t][m][i] = 0.0;
            });
        });
    });
}
