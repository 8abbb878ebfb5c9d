//! Products for many rows at the speed of the tensor cores: `y[m, n] = sum_k x[m, k] W[n, k]`.
//!
//! ```text
//!               m: rows of x                 a block owns WN x NT tiles of 16 weight rows and WM x MT tiles of 8 rows
//!            +---------+---------+           of x, for all of k; its 8 warps stand WN along n and WM along m
//!      n     | warp 0  | warp 4  |
//!   weights  | warp 1  | warp 5  |           stage of shared memory, one chunk of 64 k:
//!            | warp 2  | warp 6  |             x       [rows of a block][64], pieces of 16 bytes permuted
//!            | warp 3  | warp 7  |             weights [tiles of a block], as they lie in memory
//!            +---------+---------+
//! ```
//!
//! Both operands come through a ring of `DEPTH` stages, filled `DEPTH - 1` chunks ahead by asynchronous copies of 16
//! bytes; one barrier of the block a chunk. Blocks that run at the same time share weights and rows in L2: units are
//! numbered in slabs of [`SLAB`] blocks of rows, within a slab first along the rows.
//!
//! **The sums** are those of [`super::stream`], bit for bit: steps of 32 k are summed by tensor cores from zero and
//! folded into f32 sums ([`Format::fold`]), in ascending order within one of the `k_split` slices of k, whose sums are
//! added in ascending order. There the slices go to different warps, here one warp takes them in turn and keeps two
//! sets of sums. So a row's bits are the same with any number of rows, small or large.
//!
//! Rows past the last are read as copies of the last and never stored, weight rows past n likewise.

use cuda_std::async_copy::{cp_async_16, cp_async_16_or_zero, cp_async_commit, cp_async_wait};
use cuda_std::{Global, Shared, bf16, dynamic_shared, kernel, math, mma, thread, warp};

use super::gemm_bf16::Bf16;
use super::gemm_w4a16::W4a16;
use super::stream::{CHUNK_K, FRAGMENT, Format, LANE_K, Lane, STEP_K, TILE_M, TILE_N, WARPS, chunk_index};
use super::stream_rows::{Rows, Strided};
use crate::args::linear::{StreamArgs, StreamShape};
use crate::unroll::unroll;

pub use super::stream::THREADS;

/// Blocks of rows that are multiplied with a run of weights before the next run begins: up to 1,024 rows, whose x stays
/// in the L2.
pub const SLAB: u32 = 8;
const LANES: usize = warp::WARP as usize;
/// Pieces of 16 bytes of a row's chunk.
const PIECES: usize = CHUNK_K / LANE_K;
/// Rows of x that the block's threads copy at a time, a piece each.
const COPY_ROWS: usize = THREADS as usize / PIECES;
/// Words of such a piece.
const PIECE_WORDS: usize = 4;

/// How a block divides its tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Tiles of weights of a warp.
    pub nt: usize,
    /// Tiles of rows of x of a warp.
    pub mt: usize,
    /// Warps along the weights; a divisor of [`WARPS`].
    pub wn: usize,
    /// Stages.
    pub depth: usize,
}

impl Tiling {
    /// Tiles of weights of a block.
    pub const fn tiles(self) -> usize {
        self.wn * self.nt
    }

    /// Rows of x of a block.
    pub const fn rows(self) -> usize {
        WARPS as usize / self.wn * self.mt * TILE_M
    }

    const fn x_bytes(self) -> usize {
        self.rows() * CHUNK_K * size_of::<bf16>()
    }

    const fn stage_bytes(self, tile_words: usize) -> usize {
        self.x_bytes() + self.tiles() * tile_words * size_of::<u32>()
    }

    /// Bytes of dynamic shared memory of a block: the stages, then where its rows begin.
    pub const fn shared_bytes(self, tile_words: usize) -> u32 {
        (self.depth * self.stage_bytes(tile_words) + self.rows() * size_of::<u32>()) as u32
    }
}

/// 128 weight rows and 128 rows of x, bf16 weights.
pub const BF16: Tiling = Tiling { nt: 2, mt: 8, wn: 4, depth: 3 };
/// 128 weight rows and 64 rows of x, 4-bit weights: their codes and scales take registers that 128 rows would need.
pub const W4A16: Tiling = Tiling { nt: 2, mt: 4, wn: 4, depth: 4 };

const _: () = {
    use super::gemm_w4a16::Scale;
    assert!(BF16.shared_bytes(Bf16::TILE_WORDS) <= crate::SHARED_LIMIT);
    assert!(W4A16.shared_bytes(<f32 as Scale>::TILE_WORDS) <= crate::SHARED_LIMIT);
};

/// Element of piece `piece` of row `row` of a stage's x. Eight lanes read four pieces of two rows at a time: odd rows
/// have their halves exchanged, so that those lie in different banks.
#[inline(always)]
fn piece_at(row: usize, piece: usize) -> usize {
    row * CHUNK_K + (piece ^ (row % 2 * (PIECES / 2))) * LANE_K
}

/// A stage of shared memory.
#[derive(Clone, Copy)]
struct Stage {
    x: Shared<bf16>,
    weights: Shared<u32>,
}

/// What a warp adds up.
type Sums<const NT: usize, const MT: usize> = [[[f32; FRAGMENT]; MT]; NT];

/// A warp's sums of a run of tiles of a matrix of `weights` and of `rows`.
#[inline(always)]
pub fn multiply<
    F: Format,
    R: Rows,
    const NT: usize,
    const MT: usize,
    const WN: usize,
    const DEPTH: usize,
    const XS: usize,
    const WS: usize,
>(
    (weights, matrix, run): (Global<u32>, u32, u32),
    (x, rows): (Global<bf16>, R),
    shape: StreamShape,
) -> Sums<NT, MT> {
    let tiling = Tiling { nt: NT, mt: MT, wn: WN, depth: DEPTH };
    let stage_of = |stage: u32| {
        let start = stage as usize * tiling.stage_bytes(F::TILE_WORDS);
        let (x_len, w_len) = (tiling.rows() * CHUNK_K, tiling.tiles() * F::TILE_WORDS);
        Stage {
            x: dynamic_shared(start as u32, x_len as u32),
            weights: dynamic_shared((start + tiling.x_bytes()) as u32, w_len as u32),
        }
    };
    let chunks = shape.k.div_ceil(CHUNK_K as u32);
    let count = rows.count();

    let thread = (thread::thread_idx_x() % THREADS) as usize;
    let warp = thread / LANES;
    let starts = dynamic_shared::<u32>((DEPTH * tiling.stage_bytes(F::TILE_WORDS)) as u32, tiling.rows() as u32);
    if thread < tiling.rows() {
        starts.set(thread, (rows.x(thread.min(count - 1)) / LANE_K) as u32);
    }
    thread::sync_threads();
    let last = shape.n.div_ceil(TILE_N as u32) - 1;
    let mut sources = [Global::EMPTY; WS];
    unroll!(i in 0 1 below WS; {
        // Tiles past the last are read as the last.
        let tile = (run * tiling.tiles() as u32 + (i * WARPS as usize + warp) as u32).min(last);
        let first = chunk_index(matrix, shape.n, shape.k, tile, 0) as usize * F::TILE_WORDS;
        sources[i] = weights.slice(first, chunks as usize * F::TILE_WORDS);
    });
    let fill = |stage: u32, chunk: u32| {
        // Found anew, as in `add_chunk`.
        let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
        let (row, piece, warp, lane) = (thread / PIECES, thread % PIECES, thread / LANES, thread % LANES);
        let to = stage_of(stage);
        let from = chunk * CHUNK_K as u32 + (piece * LANE_K) as u32;
        unroll!(i in 0 1 2 3 below XS; {
            let start = starts.get(row + i * COPY_ROWS) as usize * LANE_K;
            let at = piece_at(row + i * COPY_ROWS, piece);
            cp_async_16_or_zero(to.x, at, x, start + from as usize, from < shape.k);
        });
        unroll!(i in 0 1 below WS; {
            let tile = i * WARPS as usize + warp;
            unroll!(part in 0 1 2 3 below (F::TILE_WORDS / PIECE_WORDS).div_ceil(LANES); {
                let at = (part * LANES + lane) * PIECE_WORDS;
                if tile < tiling.tiles() && at < F::TILE_WORDS {
                    cp_async_16(to.weights, tile * F::TILE_WORDS + at, sources[i], chunk as usize * F::TILE_WORDS + at);
                }
            });
        });
    };

    unroll!(stage in 0 1 2 3 below DEPTH - 1; {
        if (stage as u32) < chunks {
            fill(stage as u32, stage as u32);
        }
        cp_async_commit();
    });
    let mut sums: Sums<NT, MT> = [[[0.0; FRAGMENT]; MT]; NT];
    let mut totals = sums;
    let (mut stage, mut free) = (0, DEPTH as u32 - 1);
    let mut chunk = 0;
    let mut slice = 1;
    while slice <= shape.k_split {
        let end = math::div(slice * chunks, shape.k_split);
        while chunk < end {
            wait::<DEPTH>();
            // All have seen the stage, and all have read the one that is filled now.
            thread::sync_threads();
            let next = chunk + DEPTH as u32 - 1;
            if next < chunks {
                fill(free, next);
            }
            cp_async_commit();
            add_chunk::<F, NT, MT, WN>(stage_of(stage), &mut sums);
            free = stage;
            stage = if stage + 1 == DEPTH as u32 { 0 } else { stage + 1 };
            chunk += 1;
        }
        unroll!(t in 0 1 2 3 below NT; {
            unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
                unroll!(i in 0 1 2 3; { totals[t][m][i] += sums[t][m][i]; });
                sums[t][m] = [0.0; FRAGMENT];
            });
        });
        slice += 1;
    }
    totals
}

/// Calls `put(m, n, sum)` for the sums of row m of a block's and weight row n of its matrix.
#[inline(always)]
fn each<F: Format, const NT: usize, const MT: usize, const WN: usize>(
    totals: &Sums<NT, MT>,
    run: u32,
    (count, n): (usize, usize),
    mut put: impl FnMut(usize, usize, f32),
) {
    // Found anew: the product has no registers to keep it in.
    let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
    let (warp, lane) = (thread / LANES, thread % LANES);
    let (along_n, along_m) = (warp % WN, warp / WN);
    let first = (run as usize * WN + along_n) * NT * TILE_N + lane / 4;
    unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
        unroll!(column in 0 1; {
            let row = (along_m * MT + m) * TILE_M + lane % 4 * 2 + column;
            if row < count {
                unroll!(t in 0 1 2 3 below NT; {
                    unroll!(half in 0 1; {
                        let at = first + t * TILE_N + half * TILE_M;
                        if at < n {
                            put(row, at, totals[t][m][half * 2 + column] * F::UNIT);
                        }
                    });
                });
            }
        });
    });
}

/// Waits until the oldest stage has been filled.
#[inline(always)]
fn wait<const DEPTH: usize>() {
    match DEPTH {
        2 => cp_async_wait::<0>(),
        3 => cp_async_wait::<1>(),
        _ => cp_async_wait::<2>(),
    }
}

/// Adds the products of this warp's share of a stage.
#[inline(always)]
fn add_chunk<F: Format, const NT: usize, const MT: usize, const WN: usize>(stage: Stage, sums: &mut Sums<NT, MT>) {
    // Found anew for each stage: the addresses of its parts would take a register each.
    let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
    let (warp, lane) = (thread / LANES, thread % LANES);
    let lane = Lane { g: lane / 4, c: lane % 4 };
    let (tile, row) = (warp % WN * NT, warp / WN * MT * TILE_M);
    unroll!(step in 0 1; {
        if step > 0 {
            // Or both steps' operands would be read at once, for which there are no registers.
            warp::sync_warp();
        }
        let at = piece_at(row + lane.g, step * (STEP_K / LANE_K) + lane.c);
        let held = |t: usize| F::load(stage.weights, (tile + t) * F::TILE_WORDS, lane);
        let mut a = [[[0; 4]; 2]; NT];
        unroll!(t in 0 1 2 3 below NT; { a[t] = F::operands(&held(t), step) });
        unroll!(m in 0 1 2 3 4 5 6 7 below MT; {
            let x = stage.x.ld16(at + m * TILE_M * CHUNK_K);
            unroll!(t in 0 1 2 3 below NT; {
                let products = mma::product_m16n8k32(a[t], x);
                F::fold(&held(t), step, products, &mut sums[t][m]);
            });
        });
    });
}

/// Dense rows: unit -> entry of the batch, run of weights, block of rows.
#[inline(always)]
fn dense<
    F: Format,
    const NT: usize,
    const MT: usize,
    const WN: usize,
    const DEPTH: usize,
    const XS: usize,
    const WS: usize,
>(
    a: StreamArgs,
) {
    thread::wait_for_previous();
    thread::start_next();
    let place = Place::of((a.shape.n, a.row_blocks), (WN * NT) as u32, thread::block_idx_x());
    let (weights, rows) = ((a.weights, place.matrix, place.run), Strided::of(a.rows, place.matrix, place.block));
    let totals = multiply::<F, _, NT, MT, WN, DEPTH, XS, WS>(weights, (a.x, rows), a.shape);
    let place = Place::of((a.shape.n, a.row_blocks), (WN * NT) as u32, thread::opaque(thread::block_idx_x()));
    let rows = Strided::of(a.rows, place.matrix, place.block);
    each::<F, NT, MT, WN>(&totals, place.run, (rows.count(), a.shape.n as usize), |m, n, sum| {
        let to = rows.y(m) + n;
        a.y.set(to, if a.rows.accumulate != 0 { a.y.get(to) + sum } else { sum });
    });
}

/// What a block multiplies.
pub(super) struct Place {
    pub matrix: u32,
    /// Which run of tiles of weights.
    pub run: u32,
    /// Which block of rows.
    pub block: u32,
}

impl Place {
    /// `own`: tiles of a run.
    #[inline(always)]
    pub fn of((n, row_blocks): (u32, u32), own: u32, unit: u32) -> Self {
        let runs = math::div(n.div_ceil(TILE_N as u32) + own - 1, own);
        let of_matrix = runs * row_blocks;
        let (matrix, unit) = (math::div(unit, of_matrix), math::rem(unit, of_matrix));
        let (slab, unit) = (math::div(unit, runs * SLAB), math::rem(unit, runs * SLAB));
        let width = SLAB.min(row_blocks - slab * SLAB);
        Self { matrix, run: math::div(unit, width), block: slab * SLAB + math::rem(unit, width) }
    }
}

/// Runs a tiling over dense rows.
macro_rules! tiled {
    ($format:ty, $tiling:expr, $a:ident) => {
        dense::<
            $format,
            { $tiling.nt },
            { $tiling.mt },
            { $tiling.wn },
            { $tiling.depth },
            { $tiling.rows() / COPY_ROWS },
            { $tiling.tiles().div_ceil(WARPS as usize) },
        >($a)
    };
}

/// bf16 weights.
#[kernel]
pub fn gemm_bf16_tiled(a: StreamArgs) {
    tiled!(Bf16, BF16, a);
}

/// 4-bit weights, bf16 scales.
#[kernel]
pub fn gemm_w4a16_tiled(a: StreamArgs) {
    tiled!(W4a16<bf16>, W4A16, a);
}

/// 4-bit weights, f32 scales.
#[kernel]
pub fn gemm_w4a16_s32_tiled(a: StreamArgs) {
    tiled!(W4a16<f32>, W4A16, a);
}
