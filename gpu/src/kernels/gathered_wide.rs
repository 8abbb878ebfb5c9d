//! Products of gathered rows where experts have many of them: up to 16 rows a tile of pairs, bit for bit those of
//! [`super::stream`] for 8.
//!
//! Twice the rows for one reading of the weights want twice the rows of x, which a warp of `stream` reads from the L2
//! for itself: at 16 rows as much as its weights. Here, as in [`super::wide`], a block's warps have different weight
//! rows and all of k, and read x from shared memory. A unit is a tile of pairs and a run of `WARPS x NT` tiles; gate
//! and up are two tiles of a warp, whose sums meet in its registers. What `wide` says of stages and sums holds here.

use cuda_std::async_copy::cp_async_16_or_zero;
use cuda_std::{Global, Shared, bf16, dynamic_shared, math, thread, warp};

use super::ring::{Ring, Sources, Stage, ring_bytes, wait_groups};
use super::stream::{
    CHUNK_K, FRAGMENT, Format, LANE_K, Lane, STEP_K, STEPS, TILE_M, TILE_N, Unit, WARPS, Work, chunk_index, slice_start,
};
use super::stream_rows::{Gathered, Rows as _};
use super::stream_work::{GateUp, Grouped, leave};
use super::turns::{Pace, Turn};
use super::wide::{Accumulators, SPAN, Wide, add, close_group, multiply};
use crate::args::linear::StreamShape;
use crate::unroll::unroll;

/// All of a launch.
#[derive(Clone, Copy)]
struct All<W> {
    work: W,
    pace: Pace,
    x: Global<bf16>,
    shape: StreamShape,
    /// Chunks of k.
    chunks: u32,
}

/// A launch's products, whose sums stand in registers.
pub trait WideWork: Work<Rows = Gathered> {
    /// Stores the sums of tiles of a warp.
    fn put<F: Format, const NT: usize, const MT: usize>(&self, unit: &Unit<Gathered>, sums: Accumulators<NT, MT>);
}

/// Calls `put(element of a row of the result, m, i)` for each sum that a lane holds.
#[inline(always)]
fn each<const MT: usize>(unit: &Unit<Gathered>, n: u32, tile: u32, mut put: impl FnMut(usize, usize, usize)) {
    let index = thread::opaque(warp::lane_id()) as usize;
    let (lane, count) = (Lane { g: index / 4, c: index % 4 }, thread::opaque(unit.rows.count() as u32) as usize);
    unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
        unroll!(i in 0 1 2 3; {
            let at = tile as usize * TILE_N + lane.g + i / 2 * TILE_M;
            let row = m * TILE_M + 2 * lane.c + i % 2;
            if row < count && at < n as usize {
                put(unit.rows.y(row) + at, m, i);
            }
        });
    });
}

impl<const N: usize> WideWork for Grouped<N> {
    #[inline(always)]
    fn put<F: Format, const NT: usize, const MT: usize>(&self, unit: &Unit<Gathered>, sums: Accumulators<NT, MT>) {
        unroll!(t in 0 1 2 3 below NT; {
            let (_, _, tile) = self.tile(unit, warp::warp_id(), t as u32);
            each::<MT>(unit, self.0.shape.n, tile, |to, m, i| self.0.y.set(to, sums[t][m][i] * F::UNIT));
        });
    }
}

impl<const N: usize> WideWork for GateUp<N> {
    #[inline(always)]
    fn put<F: Format, const NT: usize, const MT: usize>(&self, unit: &Unit<Gathered>, sums: Accumulators<NT, MT>) {
        let (_, _, tile) = self.tile(unit, warp::warp_id(), 0);
        each::<MT>(unit, self.0.shape.n, tile, |to, m, i| {
            let value = math::silu(sums[0][m][i] * F::UNIT) * (sums[1][m][i] * F::UNIT);
            if !self.0.out_f32.is_empty() {
                self.0.out_f32.set(to, value);
            }
            if !self.0.out_bf16.is_empty() {
                self.0.out_bf16.set(to, math::to_bf16(value));
            }
        });
    }
}

/// The stage that is filled next.
#[derive(Clone, Copy)]
struct Ahead<const NT: usize> {
    /// The unit of the stage that was filled last.
    turn: Turn<Gathered>,
    /// Its next chunk.
    chunk: u32,
    sources: Sources<NT>,
    /// The element of x that this thread copies first of chunk 0.
    x: usize,
}

impl<const NT: usize> Ahead<NT> {
    #[inline(always)]
    fn of<F: Format, W: WideWork>(all: &All<W>, turn: Turn<Gathered>) -> Self {
        let shape = all.shape;
        let mut sources = [Global::EMPTY; NT];
        unroll!(t in 0 1 2 3 below NT; {
            let (weights, matrix, tile) = all.work.tile(&turn.unit, warp::warp_id(), t as u32);
            // Tiles past the last are read as the last and never stored.
            let tile = tile.min(shape.n.div_ceil(TILE_N as u32) - 1);
            let at = chunk_index(matrix, shape.n, shape.k, tile, 0) as usize * F::TILE_WORDS;
            sources[t] = weights.slice(at, all.chunks as usize * F::TILE_WORDS);
        });
        Self { turn, chunk: 0, sources, x: 0 }
    }

    /// Finds the row of x that this thread copies, once x may be read.
    #[inline(always)]
    fn find_row<const MT: usize>(&mut self) {
        let (Lane { g, c }, rows) = (Lane::this(), self.turn.unit.rows);
        let row = (warp::warp_id() as usize % MT * TILE_M + g).min(rows.count() - 1);
        self.x = rows.x(row) + c * LANE_K;
    }

    /// Starts filling stage `stage` with what comes next, if anything does.
    #[inline(always)]
    fn fill<F: Format, W: WideWork, const MT: usize, const CHUNKS: usize, const DEPTH: usize>(
        &mut self,
        all: &All<W>,
        ring: Ring<NT, DEPTH>,
        x: Shared<bf16>,
        stage: u32,
    ) {
        if self.chunk == all.chunks {
            self.turn = self.turn.next(&all.work, all.pace);
            if self.turn.index >= all.pace.end {
                ring.skip();
                close_group();
                return;
            }
            *self = Self::of::<F, W>(all, self.turn);
            self.find_row::<MT>();
        }
        let count = (all.chunks - self.chunk).min(CHUNKS as u32);
        let elems = CHUNKS * STEPS * MT * SPAN;
        let to = x.slice(stage as usize * elems, elems);
        // Spans of 8 rows and 32 k, one a warp and turn; a warp's are always of the same rows.
        unroll!(turn in 0 1 2 3; {
            let span = turn * WARPS as usize + warp::warp_id() as usize;
            let step = span / MT;
            if turn * (WARPS as usize) < CHUNKS * STEPS * MT && step < count as usize * STEPS {
                let k = self.chunk as usize * CHUNK_K + step * STEP_K;
                // Zeros past the last k: the weights are zero there, and so must x be, or a NaN would come in.
                let inside = k + Lane::this().c * LANE_K < all.shape.k as usize;
                let at = span * SPAN + warp::lane_id() as usize * LANE_K;
                cp_async_16_or_zero(to, at, all.x, self.x + k, inside);
            }
        });
        ring.fill(stage, self.sources, count * F::TILE_WORDS as u32);
        close_group();
        self.chunk += count;
        let rest = (all.chunks - self.chunk) as usize * F::TILE_WORDS;
        let words = count as usize * F::TILE_WORDS;
        unroll!(t in 0 1 2 3 below NT; { self.sources[t] = self.sources[t].slice(words, rest) });
    }
}

/// One block's units.
#[inline(always)]
pub fn run<F: Format, W: WideWork, const NT: usize, const MT: usize, const CHUNKS: usize, const DEPTH: usize>(
    work: W,
    rows_of_x: Global<bf16>,
    shape: StreamShape,
) {
    let variant = Wide { warps: WARPS as usize, shares: 1, nt: NT, mt: MT, chunks: CHUNKS, depth: DEPTH, blocks: 1 };
    let of_ring = ring_bytes(DEPTH, NT * CHUNKS * F::TILE_WORDS);
    let ring = Ring::<NT, DEPTH>::new(warp::warp_id() as usize * of_ring, CHUNKS * F::TILE_WORDS);
    let x = dynamic_shared::<bf16>((WARPS as usize * of_ring) as u32, (DEPTH * variant.x_elems()) as u32);
    let settled = work.settled();
    if !settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    if work.rows() == 0 {
        return leave(settled);
    }
    let pace = Pace::of(&work);
    let all = All { work, pace, x: rows_of_x, shape, chunks: shape.k.div_ceil(CHUNK_K as u32) };
    let mut turn = Turn::first(&work, pace);
    if turn.index >= pace.end {
        return leave(settled);
    }
    let mut ahead = Ahead::of::<F, W>(&all, turn);
    if settled {
        thread::wait_for_previous();
        thread::start_next();
    }
    ahead.find_row::<MT>();
    unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH - 1; {
        ahead.fill::<F, W, MT, CHUNKS, DEPTH>(&all, ring, x, stage as u32);
    });
    let mut stage = Stage::FIRST;
    let mut free = DEPTH as u32 - 1;
    while turn.index < pace.end {
        // Adding to minus zero changes nothing.
        let mut total = [[[-0.0; FRAGMENT]; MT]; NT];
        let mut sums = [[[0.0; FRAGMENT]; MT]; NT];
        let (mut chunk, mut slice, mut border) = (0, 1, slice_start(shape, 1));
        while chunk < all.chunks {
            wait_groups::<DEPTH>();
            ring.wait(stage);
            // All threads have seen the stage, and all have read the one that is filled now.
            thread::sync_threads();
            ahead.fill::<F, W, MT, CHUNKS, DEPTH>(&all, ring, x, free);
            let held = ring.stage(stage.index);
            let of_stage = x.slice(stage.index as usize * variant.x_elems(), variant.x_elems());
            unroll!(i in 0 1 2 3 below CHUNKS; {
                if chunk < all.chunks {
                    if chunk == border {
                        add(&mut total, &mut sums);
                        slice += 1;
                        border = slice_start(shape, slice);
                    }
                    multiply::<F, NT, MT, CHUNKS>(held, (of_stage, MT), i, &mut sums);
                    chunk += 1;
                }
            });
            free = stage.index;
            stage = stage.next::<DEPTH>();
        }
        add(&mut total, &mut sums);
        work.put::<F, NT, MT>(&turn.again(&work), total);
        // With two stages, the one ahead of a unit's last is the next unit's first.
        turn = if DEPTH == 2 { ahead.turn } else { turn.next(&work, pace) };
    }
}
