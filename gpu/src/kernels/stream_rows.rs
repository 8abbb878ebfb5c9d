//! Rows of x that a unit of [`super::stream`] multiplies, and how a block's threads put the unit's sums in their
//! places.

use cuda_std::{Global, GlobalMut, math, thread};

use super::stream::{EARLY, Sums, THREADS, TILE_N, Unit, WARPS};
use crate::args::linear::{DenseRows, StreamShape};

/// Rows of x that a unit multiplies, and where their products go.
pub trait Rows: Copy {
    /// How many; at least 1.
    fn count(self) -> usize;
    /// The element of `x` at which row `m` begins.
    fn x(self, m: usize) -> usize;
    /// The element of `y` at which the products of row `m` begin.
    fn y(self, m: usize) -> usize;
}

/// Rows at fixed strides, from `x` and `y` on.
#[derive(Clone, Copy)]
pub struct Strided {
    pub count: u32,
    pub x: usize,
    pub x_stride: u32,
    pub y: usize,
    pub y_stride: u32,
}

impl Strided {
    /// Rows `block * rows_per_block ..` of entry `matrix` of the batch.
    #[inline(always)]
    pub fn of(strides: DenseRows, matrix: u32, block: u32) -> Self {
        let DenseRows { x_stride, x_batch, y_stride, y_batch, rows, rows_per_block, .. } = strides;
        let first = block * rows_per_block;
        Self {
            count: rows_per_block.min(rows - first),
            x: matrix as usize * x_batch as usize + first as usize * x_stride as usize,
            x_stride: x_stride as u32,
            y: matrix as usize * y_batch as usize + first as usize * y_stride as usize,
            y_stride: y_stride as u32,
        }
    }
}

impl Rows for Strided {
    #[inline(always)]
    fn count(self) -> usize {
        self.count as usize
    }
    #[inline(always)]
    fn x(self, m: usize) -> usize {
        self.x + m * self.x_stride as usize
    }
    #[inline(always)]
    fn y(self, m: usize) -> usize {
        self.y + m * self.y_stride as usize
    }
}

/// The pairs of one tile: rows of `x` and `y` are packed.
#[derive(Clone, Copy)]
pub struct Gathered {
    pub order: Global<u32>,
    pub first: u32,
    pub count: u32,
    pub pairs_per_row: u32,
    /// Elements of a row of y, and of x.
    pub n: u32,
    pub k: u32,
}

impl Rows for Gathered {
    #[inline(always)]
    fn count(self) -> usize {
        self.count as usize
    }
    #[inline(always)]
    fn x(self, m: usize) -> usize {
        math::div(self.order.get(self.first as usize + m), self.pairs_per_row) as usize * self.k as usize
    }
    #[inline(always)]
    fn y(self, m: usize) -> usize {
        self.order.get(self.first as usize + m) as usize * self.n as usize
    }
}

/// Calls `put(m, n, team, tile, row)` for each sum of a pass that this thread owns: product of weight row `n` with row
/// `m` of x, which is row `row` of tile `tile` of the pass of `team`. The pass is `tiles` tiles from `first` on of the
/// `of_team` of each team.
#[inline(always)]
pub fn each<R: Rows>(
    unit: &Unit<R>,
    shape: StreamShape,
    [first, tiles, of_team]: [u32; 3],
    mut put: impl FnMut(usize, usize, u32, u32, u32),
) {
    let teams = math::div(WARPS, shape.k_split);
    let own = teams * tiles * TILE_N as u32;
    let all = own * unit.rows.count() as u32;
    let mut at = thread::thread_idx_x();
    while at < all {
        let (m, r) = (math::div(at, own), math::rem(at, own));
        let (tile, row) = (r / TILE_N as u32, r % TILE_N as u32);
        let (team, tile) = (math::div(tile, tiles), math::rem(tile, tiles));
        let n = ((unit.block * teams + team) * of_team + first + tile) * TILE_N as u32 + row;
        if n < shape.n {
            put(m as usize, n as usize, team, tile, row);
        }
        at += THREADS;
    }
}

/// Stores sums as they are, or added to what is there. `of_team`: tiles of a team.
#[inline(always)]
pub fn store<R: Rows, const PASS: usize, const MT: usize>(
    y: GlobalMut<f32>,
    unit: &Unit<R>,
    (first, of_team): (u32, u32),
    sums: &Sums<PASS, MT>,
    mut shape: StreamShape,
    accumulate: bool,
) {
    if MT > EARLY {
        // Or places of sums would be worked out ahead of the loop over k, where registers are few.
        shape.k_split = thread::opaque(shape.k_split);
    }
    each(unit, shape, [first, PASS as u32, of_team], |m, n, team, tile, row| {
        let sum = sums.get(team, tile, row, m);
        let to = unit.rows.y(m) + n;
        y.set(to, if accumulate { y.get(to) + sum } else { sum });
    });
}
