//! Products of tall matrices, up to 64 rows of x at a time: `y[m, n] = sum_k x[m, k] W[n, k]`, bit for bit those of
//! [`super::stream`].
//!
//! There each warp reads the rows of x that it multiplies, which with several of them is as much as the weights. Here a
//! block's warps have different weight rows and the same k, and read x from shared memory:
//!
//! ```text
//!            n: tiles of 16 weight rows
//!        +--------+--------+-- ... --+--------+    a unit: WARPS x NT tiles of one matrix, all of k, MT x 8 rows of x
//!   k    | warp 0 | warp 1 |         | warp 7 |    a block takes units in turn (persistent: unit, unit + grid, ...)
//!        +--------+--------+-- ... --+--------+
//! ```
//!
//! So it wants many weight rows: with fewer than a few blocks a multiprocessor, slices of k must go to different warps.
//!
//! **The stages.** Weights go through a ring of each warp, as in `stream`. The chunks of x that belong to a stage are
//! copied by all threads, 16 bytes each, into the order in which lanes read them; one barrier of the block a stage says
//! that they are there and that the stage before it has been read.
//!
//! **The sums.** A warp sums each slice of k and adds the slices in ascending order. Fragments and the order of k in a
//! step are those of `stream`. Rows past the last are computed as copies of the last and never stored.

use cuda_std::async_copy::{cp_async_16_or_zero, cp_async_commit};
use cuda_std::{Global, Shared, bf16, dynamic_shared, math, mma, thread, warp};

use super::ring::{Ring, Sources, Stage, ring_bytes, wait_groups};
use super::stream::{
    CHUNK_K, FRAGMENT, Format, LANE_K, Lane, STEP_K, STEPS, TILE_M, TILE_N, WARPS, chunk_index, slice_start,
};
use super::stream_rows::{Rows as _, Strided};
use crate::args::linear::StreamArgs;
use crate::unroll::unroll;

/// Elements of x that the lanes of a warp read together: a step of 8 rows.
pub const SPAN: usize = STEP_K * TILE_M;

/// How a block divides a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    /// Tiles of weights of a warp.
    pub nt: usize,
    /// Tiles of rows of x.
    pub mt: usize,
    /// Chunks of a stage.
    pub chunks: usize,
    /// Stages.
    pub depth: usize,
    /// Blocks of a multiprocessor at once, as registers allow.
    pub blocks: u32,
}

impl Wide {
    /// Weight rows of a unit.
    pub const fn rows(self) -> usize {
        WARPS as usize * self.nt * TILE_N
    }

    /// Elements of x of a stage.
    pub const fn x_elems(self) -> usize {
        self.chunks * STEPS * self.mt * SPAN
    }

    pub const fn ring(self, tile_words: usize) -> usize {
        ring_bytes(self.depth, self.nt * self.chunks * tile_words)
    }

    /// Bytes of dynamic shared memory: the rings, then the stages of x.
    pub const fn shared_bytes(self, tile_words: usize) -> u32 {
        (WARPS as usize * self.ring(tile_words) + self.depth * self.x_elems() * size_of::<bf16>()) as u32
    }
}

/// What a block multiplies at a time.
#[derive(Clone, Copy)]
struct Unit {
    matrix: u32,
    /// The run of tiles.
    run: u32,
    rows: Strided,
}

/// All of a launch.
#[derive(Clone, Copy)]
struct All {
    a: StreamArgs,
    /// Runs of a matrix's tiles, each a unit's.
    runs: u32,
    units: u32,
    /// Chunks of k.
    chunks: u32,
}

impl All {
    #[inline(always)]
    fn of(a: StreamArgs, variant: Wide) -> Self {
        let runs = a.shape.n.div_ceil(variant.rows() as u32);
        Self { a, runs, units: a.batch * a.row_blocks * runs, chunks: a.shape.k.div_ceil(CHUNK_K as u32) }
    }

    #[inline(always)]
    fn unit(&self, index: u32) -> Unit {
        let (rest, run) = (math::div(index, self.runs), math::rem(index, self.runs));
        let (matrix, block) = (math::div(rest, self.a.row_blocks), math::rem(rest, self.a.row_blocks));
        Unit { matrix, run, rows: Strided::of(self.a.rows, matrix, block) }
    }
}

/// The stage that is filled next.
#[derive(Clone, Copy)]
struct Ahead<const NT: usize> {
    /// The unit of the stage that was filled last, or one past the last unit.
    index: u32,
    /// Its next chunk.
    chunk: u32,
    sources: Sources<NT>,
    /// The element of x that this thread copies first of chunk 0.
    x: usize,
}

/// What a call of [`Ahead::fill`] copies: weights may come before what the last launch wrote, x may not.
const WEIGHTS: u32 = 1;
const X: u32 = 2;

impl<const NT: usize> Ahead<NT> {
    #[inline(always)]
    fn of<F: Format, const MT: usize>(all: &All, index: u32) -> Self {
        let (unit, shape) = (all.unit(index), all.a.shape);
        let mut sources = [Global::EMPTY; NT];
        unroll!(t in 0 1 2 3 below NT; {
            // Tiles past the last are read as the last and never stored.
            let tile = (unit.run * WARPS + warp::warp_id()) * NT as u32 + t as u32;
            let tile = tile.min(shape.n.div_ceil(TILE_N as u32) - 1);
            let at = chunk_index(unit.matrix, shape.n, shape.k, tile, 0) as usize * F::TILE_WORDS;
            sources[t] = all.a.weights.slice(at, all.chunks as usize * F::TILE_WORDS);
        });
        let Lane { g, c } = Lane::this();
        let row = (warp::warp_id() as usize % MT * TILE_M + g).min(unit.rows.count() - 1);
        Self { index, chunk: 0, sources, x: unit.rows.x(row) + c * LANE_K }
    }

    /// Starts filling stage `stage` with what comes next, if anything does.
    #[inline(always)]
    fn fill<F: Format, const MT: usize, const CHUNKS: usize, const DEPTH: usize, const WHAT: u32>(
        &mut self,
        all: &All,
        ring: Ring<NT, DEPTH>,
        x: Shared<bf16>,
        stage: u32,
    ) {
        if self.chunk == all.chunks {
            let next = self.index + thread::grid_dim_x();
            if next >= all.units {
                ring.skip();
                close_group();
                return;
            }
            *self = Self::of::<F, MT>(all, next);
        }
        let count = (all.chunks - self.chunk).min(CHUNKS as u32);
        if WHAT & X != 0 {
            let elems = CHUNKS * STEPS * MT * SPAN;
            let to = x.slice(stage as usize * elems, elems);
            // Spans of 8 rows and 32 k, one a warp and turn; a warp's are always of the same rows.
            unroll!(turn in 0 1 2 3; {
                let span = turn * WARPS as usize + warp::warp_id() as usize;
                let step = span / MT;
                if turn * (WARPS as usize) < CHUNKS * STEPS * MT && step < count as usize * STEPS {
                    let k = self.chunk as usize * CHUNK_K + step * STEP_K;
                    // Zeros past the last k: the weights are zero there, and so must x be, or a NaN would come in.
                    let inside = k + Lane::this().c * LANE_K < all.a.shape.k as usize;
                    let at = span * SPAN + warp::lane_id() as usize * LANE_K;
                    cp_async_16_or_zero(to, at, all.a.x, self.x + k, inside);
                }
            });
        }
        if WHAT & WEIGHTS != 0 {
            ring.fill(stage, self.sources, count * F::TILE_WORDS as u32);
        } else {
            ring.skip();
        }
        close_group();
        self.chunk += count;
        let rest = (all.chunks - self.chunk) as usize * F::TILE_WORDS;
        let words = count as usize * F::TILE_WORDS;
        unroll!(t in 0 1 2 3 below NT; { self.sources[t] = self.sources[t].slice(words, rest) });
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

/// Adds the products of one chunk: the `i`th of the stage in `held` and `x`.
#[inline(always)]
pub fn multiply<F: Format, const NT: usize, const MT: usize, const CHUNKS: usize>(
    held: Shared<u32>,
    x: Shared<bf16>,
    i: usize,
    sums: &mut Accumulators<NT, MT>,
) {
    let lane = Lane::this();
    let mut tile = [F::load(held, i * F::TILE_WORDS, lane); NT];
    unroll!(t in 1 2 3 below NT; { tile[t] = F::load(held, (t * CHUNKS + i) * F::TILE_WORDS, lane) });
    unroll!(step in 0 1; {
        let mut operands = [F::operands(&tile[0], step); NT];
        unroll!(t in 1 2 3 below NT; { operands[t] = F::operands(&tile[t], step) });
        // No test for rows past the last: their products cost less than what a branch does to the order.
        unroll!(first in 0 4 below MT; {
            group::<F, NT, MT>(&tile, operands, step, x.slice(i * STEPS * MT * SPAN, STEPS * MT * SPAN), first, sums);
        });
    });
}

/// Tiles of rows whose products are under way together.
const GROUP: usize = 4;

/// Adds the products of a step with tiles of rows `first ..`, up to [`GROUP`] of them.
#[inline(always)]
fn group<F: Format, const NT: usize, const MT: usize>(
    tile: &[F::Chunk; NT],
    operands: [[[u32; 4]; 2]; NT],
    step: usize,
    x: Shared<bf16>,
    first: usize,
    sums: &mut Accumulators<NT, MT>,
) {
    let mut products = [[[0.0; FRAGMENT]; GROUP]; NT];
    let mut read = [[0; 4]; GROUP];
    unroll!(m in 0 1 2 3; {
        if first + m < MT {
            read[m] = x.ld16((step * MT + first + m) * SPAN + Lane::this().index() * LANE_K);
        }
    });
    // The first halves of all, then the second: each product waits for its own first half alone.
    unroll!(half in 0 1; {
        unroll!(m in 0 1 2 3; {
            unroll!(t in 0 1 2 3 below NT; {
                if first + m < MT {
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
            if first + m < MT {
                F::fold(&tile[t], step, products[t][m], &mut sums[t][first + m]);
            }
        });
    });
}

/// Puts a unit's products in their places.
#[inline(always)]
fn finish<F: Format, const NT: usize, const MT: usize>(a: &StreamArgs, unit: Unit, sums: Accumulators<NT, MT>) {
    // Or places of products would be worked out ahead of the loop over k, and held in registers that it needs.
    let index = thread::opaque(warp::lane_id()) as usize;
    let (lane, count) = (Lane { g: index / 4, c: index % 4 }, thread::opaque(unit.rows.count() as u32) as usize);
    unroll!(t in 0 1 2 3 below NT; {
        let tile = (unit.run as usize * WARPS as usize + warp::warp_id() as usize) * NT + t;
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            unroll!(i in 0 1 2 3; {
                let n = tile * TILE_N + lane.g + i / 2 * TILE_M;
                let row = m * TILE_M + 2 * lane.c + i % 2;
                if row < count && n < a.shape.n as usize {
                    let (to, sum) = (unit.rows.y(row) + n, sums[t][m][i] * F::UNIT);
                    a.y.set(to, if a.rows.accumulate != 0 { a.y.get(to) + sum } else { sum });
                }
            });
        });
    });
}

/// One block's units.
#[inline(always)]
pub fn run<F: Format, const NT: usize, const MT: usize, const CHUNKS: usize, const DEPTH: usize>(a: StreamArgs) {
    let variant = Wide { nt: NT, mt: MT, chunks: CHUNKS, depth: DEPTH, blocks: 1 };
    let of_ring = variant.ring(F::TILE_WORDS);
    let ring = Ring::<NT, DEPTH>::new(warp::warp_id() as usize * of_ring, CHUNKS * F::TILE_WORDS);
    let x = dynamic_shared::<bf16>((WARPS as usize * of_ring) as u32, (DEPTH * variant.x_elems()) as u32);
    let all = All::of(a, variant);

    let mut index = thread::block_idx_x();
    let mut ahead = Ahead::of::<F, MT>(&all, index);
    let mut behind = ahead;
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        ahead.fill::<F, MT, CHUNKS, DEPTH, WEIGHTS>(&all, ring, x, stage as u32);
    });
    thread::wait_for_previous();
    thread::start_next();
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        behind.fill::<F, MT, CHUNKS, DEPTH, X>(&all, ring, x, stage as u32);
    });
    let mut stage = Stage::FIRST;
    let mut free = DEPTH as u32 - 1;
    while index < all.units {
        // Adding to minus zero changes nothing.
        let mut total = [[[-0.0; FRAGMENT]; MT]; NT];
        let mut sums = [[[0.0; FRAGMENT]; MT]; NT];
        let (mut chunk, mut slice, mut border) = (0, 1, slice_start(a.shape, 1));
        while chunk < all.chunks {
            wait_groups::<DEPTH>();
            ring.wait(stage);
            // All threads have seen the stage, and all have read the one that is filled now.
            thread::sync_threads();
            ahead.fill::<F, MT, CHUNKS, DEPTH, { WEIGHTS | X }>(&all, ring, x, free);
            let held = ring.stage(stage.index);
            let of_stage = x.slice(stage.index as usize * variant.x_elems(), variant.x_elems());
            unroll!(i in 0 1 2 3 below CHUNKS; {
                if chunk < all.chunks {
                    if chunk == border {
                        add(&mut total, &mut sums);
                        slice += 1;
                        border = slice_start(a.shape, slice);
                    }
                    multiply::<F, NT, MT, CHUNKS>(held, of_stage, i, &mut sums);
                    chunk += 1;
                }
            });
            free = stage.index;
            stage = stage.next::<DEPTH>();
        }
        add(&mut total, &mut sums);
        finish::<F, NT, MT>(&a, all.unit(thread::opaque(index)), total);
        index += thread::grid_dim_x();
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
