//! What all matrix products share: `y[m, n] (+)= sum_k x[m, k] W[n, k]`.
//!
//! ```text
//!            n: 16-row tiles of W, one a warp (or k_split warps a tile)
//!          +------+------+------+
//!   k      | warp | warp |  ..  |   grid.y: blocks of tiles;  grid.z: the matrix (a batch entry)
//!   |      +------+------+------+   grid.x: blocks of rows of x (dense) or tiles of pairs (grouped)
//! ```
//!
//! A warp walks k in chunks of 64: `k_split` warps take the chunks of one tile in turn, and their sums are added in
//! ascending order through shared memory. How k is divided follows from the matrix's shape alone, so a row's bits do
//! not depend on how many rows go with it, nor on whether they come from a dense product or are gathered by expert.
//!
//! Each lane holds the sums of one fragment `D` of `mma.m16n8k16`, whatever the format: with `g = lane / 4` and
//! `c = lane % 4`, weight rows `g` and `g + 8` of the tile times rows `2c` and `2c + 1` of x.
//!
//! Rows past the last are read as copies of the last and never stored: no lane branches alone.

use cuda_std::{Element, Global, GlobalMut, dynamic_shared, math, mma, thread, warp};

use crate::args::linear::{ABSENT, DenseRows, GemmArgs, GemmShape, GroupedGemmArgs, GroupedRows};

/// Repeats a block with `i` = 0, 1, … below a constant of at most 8, written out: arrays indexed by `i` stay in
/// registers, which the compiler does not promise for a loop with a large body.
macro_rules! unroll {
    ($i:ident < $n:expr, $body:block) => {
        unroll!(@ $i $n, $body 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident $n:expr, $body:block $($value:literal)*) => { $(
        let $i: usize = $value;
        if $i < $n $body
    )* };
}
pub(crate) use unroll;

/// Weight rows of a tile: the rows of an `mma`'s first operand.
pub const TILE_N: usize = 16;
/// Rows of x of a tile: the columns of an `mma`'s second operand.
pub const TILE_M: usize = 8;
/// k that a warp takes at a time.
pub const CHUNK_K: usize = 64;
/// k whose products are summed before they are folded into a lane's sums.
pub const STEP_K: usize = 32;
/// Steps of a chunk.
pub const STEPS: usize = CHUNK_K / STEP_K;
/// Warps of a block.
pub const MAX_WARPS: u32 = 8;
/// Sums of one fragment that a lane holds.
pub const FRAGMENT: usize = 4;
/// Consecutive k that a lane reads of a row of bf16 at a time: 16 bytes.
pub const LANE_K: usize = 8;

/// Bytes of dynamic shared memory of a block whose warps hold `tiles` fragments each.
pub const fn shared_bytes(k_split: u32, warps: u32, tiles: usize) -> u32 {
    if k_split == 1 { 0 } else { warps * warp::WARP * (tiles * FRAGMENT * size_of::<f32>()) as u32 }
}

/// Fragments a warp holds at most: the `m64` entries.
pub const MAX_TILES: usize = 8;
const _: () = assert!(shared_bytes(MAX_WARPS, MAX_WARPS, MAX_TILES) <= crate::SHARED_LIMIT);

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
}

/// The part of a product that one warp sums.
#[derive(Clone, Copy)]
pub struct Part {
    pub n: usize,
    pub k: usize,
    pub wide: bool,
    pub matrix: usize,
    /// The tile of `TILE_N` weight rows.
    pub tile: usize,
    /// The first chunk, and how far the next is.
    pub chunk: usize,
    pub stride: usize,
}

impl Part {
    /// The lane's two weight rows, the last one in place of rows past it.
    #[inline(always)]
    pub fn weight_rows(&self, lane: Lane) -> [usize; 2] {
        let first = self.tile * TILE_N + lane.g;
        let last = self.n - 1;
        let start = self.matrix * self.n;
        [start + first.min(last), start + (first + TILE_M).min(last)]
    }
}

/// Rows of x that a block multiplies, and where their products go.
pub trait Rows: Copy {
    /// How many; at least 1.
    fn count(self) -> usize;
    /// The element of `x` at which row `m` begins.
    fn x(self, m: usize) -> usize;
    /// The element of `y` at which the products of row `m` begin.
    fn y(self, m: usize) -> usize;
}

/// A format of weights.
pub trait Weights: Copy {
    /// What it multiplies.
    type X: Element;

    /// Adds to `sums` the products of `part` with up to `TILES` tiles of rows.
    fn accumulate<R: Rows, const TILES: usize>(
        &self,
        part: Part,
        x: Global<Self::X>,
        rows: R,
        sums: &mut [[f32; FRAGMENT]; TILES],
    );
}

/// A format whose products run on tensor cores: bf16 operands, f32 sums.
///
/// Within a step of 32 k, lane `c` takes k `8c .. 8c + 8` of its rows, so that each row is read 16 bytes at a time: k
/// 2c, 2c+1, 2c+8, 2c+9 of an `mma` are the lane's first four in the first `mma` of the step, its last four in the
/// second. Both operands agree on that, and the order of k within a step is nobody else's business.
pub trait MmaWeights: Copy {
    /// A lane's share of a tile's chunk.
    type Chunk: Copy;

    /// Reads a lane's share.
    fn load(&self, part: Part, lane: Lane, chunk: usize) -> Self::Chunk;

    /// The first operands of both `mma`s of a step.
    fn operands(chunk: &Self::Chunk, step: usize) -> [[u32; 4]; 2];

    /// Adds a step's products to a lane's sums.
    fn fold(chunk: &Self::Chunk, step: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]);
}

/// [`Weights::accumulate`] of a tensor-core format.
#[inline(always)]
pub fn accumulate_mma<W: MmaWeights, R: Rows, const TILES: usize>(
    weights: &W,
    part: Part,
    x: Global<cuda_std::bf16>,
    rows: R,
    sums: &mut [[f32; FRAGMENT]; TILES],
) {
    let lane = Lane::this();
    let count = rows.count();
    let mut row = [0; TILES];
    unroll!(t < TILES, { row[t] = rows.x((t * TILE_M + lane.g).min(count - 1)) });
    let chunks = part.k.div_ceil(CHUNK_K);
    let mut chunk = part.chunk;
    while chunk < chunks {
        let held = weights.load(part, lane, chunk);
        unroll!(step < STEPS, {
            let k = chunk * CHUNK_K + step * STEP_K;
            if k < part.k {
                let a = W::operands(&held, step);
                let at = k + lane.c * LANE_K;
                unroll!(t < TILES, {
                    if t * TILE_M < count {
                        // Past k the weights are zero; so must x be, or a NaN behind it would come in.
                        let b = if at < part.k { x.ld16(row[t] + at) } else { [0; 4] };
                        let mut products = [0.0; FRAGMENT];
                        mma::mma_m16n8k16_x2(&mut products, a, b);
                        W::fold(&held, step, products, &mut sums[t]);
                    }
                });
            }
        });
        chunk += part.stride;
    }
}

/// One block's products: its warps' tiles of `matrix` times `rows`. All threads of the block come here together.
#[inline(always)]
fn multiply<W: Weights, R: Rows, const TILES: usize>(
    weights: &W,
    x: Global<W::X>,
    y: GlobalMut<f32>,
    shape: GemmShape,
    matrix: usize,
    rows: R,
    accumulate: bool,
) {
    let warps = thread::block_dim_x() / warp::WARP;
    let (team, member) = (math::div(warp::warp_id(), shape.k_split), math::rem(warp::warp_id(), shape.k_split));
    let tile = (thread::block_idx_y() * math::div(warps, shape.k_split) + team) as usize;
    let n = shape.n as usize;
    let count = rows.count();

    let mut sums = [[0.0; FRAGMENT]; TILES];
    if tile * TILE_N < n {
        let part = Part {
            n,
            k: shape.k as usize,
            wide: shape.wide != 0,
            matrix,
            tile,
            chunk: member as usize,
            stride: shape.k_split as usize,
        };
        weights.accumulate(part, x, rows, &mut sums);
    }

    if shape.k_split > 1 {
        let lanes = warp::WARP as usize;
        let partial = dynamic_shared::<f32>(0, warps * warp::WARP * (TILES * FRAGMENT) as u32);
        let at = |warp: u32, t: usize, i: usize| {
            ((warp as usize * TILES + t) * FRAGMENT + i) * lanes + warp::lane_id() as usize
        };
        if member > 0 {
            unroll!(t < TILES, {
                if t * TILE_M < count {
                    unroll!(i < FRAGMENT, { partial.set(at(warp::warp_id(), t, i), sums[t][i]) });
                }
            });
        }
        thread::sync_threads();
        if member == 0 {
            for other in 1..shape.k_split {
                unroll!(t < TILES, {
                    if t * TILE_M < count {
                        unroll!(i < FRAGMENT, { sums[t][i] += partial.get(at(warp::warp_id() + other, t, i)) });
                    }
                });
            }
        }
    }

    if member == 0 {
        let lane = Lane::this();
        unroll!(t < TILES, {
            unroll!(i < FRAGMENT, {
                let column = tile * TILE_N + lane.g + i / 2 * TILE_M;
                let m = t * TILE_M + lane.c * 2 + i % 2;
                if column < n && m < count {
                    let to = rows.y(m) + column;
                    let sum = sums[t][i];
                    y.set(to, if accumulate { y.get(to) + sum } else { sum });
                }
            });
        });
    }
}

/// Rows at fixed strides, from `x` and `y` on.
#[derive(Clone, Copy)]
struct Strided {
    count: usize,
    x: usize,
    x_stride: usize,
    y: usize,
    y_stride: usize,
}

impl Rows for Strided {
    #[inline(always)]
    fn count(self) -> usize {
        self.count
    }
    #[inline(always)]
    fn x(self, m: usize) -> usize {
        self.x + m * self.x_stride
    }
    #[inline(always)]
    fn y(self, m: usize) -> usize {
        self.y + m * self.y_stride
    }
}

/// Body of a dense product. Grid: x = blocks of `rows_per_block` rows, y = blocks of tiles, z = batch entries.
#[inline(always)]
pub fn dense<W: Weights, const TILES: usize>(a: GemmArgs<W, W::X>) {
    let DenseRows { x_stride, x_batch, y_stride, y_batch, rows, rows_per_block, accumulate } = a.rows;
    let first = thread::block_idx_x() * rows_per_block;
    let matrix = thread::block_idx_z() as usize;
    let rows = Strided {
        count: rows_per_block.min(rows - first) as usize,
        x: matrix * x_batch as usize + first as usize * x_stride as usize,
        x_stride: x_stride as usize,
        y: matrix * y_batch as usize + first as usize * y_stride as usize,
        y_stride: y_stride as usize,
    };
    multiply::<W, Strided, TILES>(&a.weights, a.x, a.y, a.shape, matrix, rows, accumulate != 0);
}

/// The pairs of one tile: rows of `x` and `y` are packed.
#[derive(Clone, Copy)]
struct Gathered {
    order: Global<u32>,
    first: usize,
    count: usize,
    pairs_per_row: usize,
    n: usize,
    k: usize,
}

impl Rows for Gathered {
    #[inline(always)]
    fn count(self) -> usize {
        self.count
    }
    #[inline(always)]
    fn x(self, m: usize) -> usize {
        math::div_usize(self.order.get(self.first + m) as usize, self.pairs_per_row) * self.k
    }
    #[inline(always)]
    fn y(self, m: usize) -> usize {
        self.order.get(self.first + m) as usize * self.n
    }
}

/// Body of a product gathered by expert. Grid: x = blocks that take the tiles in turn, y = blocks of weight tiles.
#[inline(always)]
pub fn grouped<W: Weights>(a: GroupedGemmArgs<W, W::X>) {
    let GroupedRows { order, tiles, slots, pairs_per_row } = a.rows;
    let count = tiles.get(0) as usize;
    let mut tile = thread::block_idx_x() as usize;
    while tile < count {
        let word = |i| tiles.get(1 + tile * 3 + i);
        let matrix = slots.get(word(0) as usize);
        if matrix != ABSENT {
            let rows = Gathered {
                order,
                first: word(1) as usize,
                count: word(2) as usize,
                pairs_per_row: pairs_per_row as usize,
                n: a.shape.n as usize,
                k: a.shape.k as usize,
            };
            multiply::<W, Gathered, 1>(&a.weights, a.x, a.y, a.shape, matrix as usize, rows, false);
            if a.shape.k_split > 1 {
                // The next tile writes the partial sums that this one's first warps may still be reading.
                thread::sync_threads();
            }
        }
        tile += thread::grid_dim_x() as usize;
    }
}
