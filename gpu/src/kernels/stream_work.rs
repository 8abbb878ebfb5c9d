//! What the launches of [`super::stream`] multiply: dense rows, rows gathered by expert, and gate and up of experts with
//! SwiGLU between them and memory.

use cuda_std::{Global, math};

use super::stream::{Gathered, Rows as _, SKIP, Strided, Sums, TILE_N, Unit, WARPS, Work, each, store};
use crate::args::linear::{ABSENT, DenseRows, GateUpArgs, GroupedRows, GroupedStreamArgs, StreamArgs, StreamShape};

/// Runs a variant of the stream over one kind of work.
macro_rules! stream {
    ($format:ty, $variant:expr, $work:ident, $a:ident) => {
        $crate::kernels::stream::run::<
            $format,
            _,
            { $variant.nt },
            { $variant.mt },
            { $variant.chunks },
            { $variant.depth },
        >($work::<{ $variant.nt }>($a), $a.x, $a.shape)
    };
}
pub(crate) use stream;

/// Tiles that a block owns, and runs of them a matrix.
#[inline(always)]
fn runs(shape: StreamShape, tiles_of_team: u32) -> u32 {
    let own = math::div(WARPS, shape.k_split) * tiles_of_team;
    math::div(shape.n.div_ceil(TILE_N as u32) + own - 1, own)
}

/// The tile of a block's run that is tile `t` of a team.
#[inline(always)]
fn tile_of(shape: StreamShape, block: usize, team: usize, t: usize, tiles_of_team: usize) -> usize {
    (block * math::div(WARPS, shape.k_split) as usize + team) * tiles_of_team + t
}

/// Rows at fixed strides. Units: runs of tiles, within blocks of rows, within entries of the batch.
#[derive(Clone, Copy)]
pub struct Dense<const NT: usize>(pub StreamArgs);

impl<const NT: usize> Work for Dense<NT> {
    type Rows = Strided;

    #[inline(always)]
    fn settled(&self) -> bool {
        true
    }

    #[inline(always)]
    fn units(&self) -> u32 {
        self.0.batch * self.0.row_blocks * runs(self.0.shape, NT as u32)
    }

    #[inline(always)]
    fn unit(&self, index: u32) -> Unit<Strided> {
        let DenseRows { x_stride, x_batch, y_stride, y_batch, rows, rows_per_block, .. } = self.0.rows;
        let runs = runs(self.0.shape, NT as u32);
        let (rest, block) = (math::div(index, runs), math::rem(index, runs));
        let (matrix, rows_block) = (math::div(rest, self.0.row_blocks), math::rem(rest, self.0.row_blocks));
        let first = rows_block * rows_per_block;
        let rows = Strided {
            count: rows_per_block.min(rows - first) as usize,
            x: matrix as usize * x_batch as usize + first as usize * x_stride as usize,
            x_stride: x_stride as usize,
            y: matrix as usize * y_batch as usize + first as usize * y_stride as usize,
            y_stride: y_stride as usize,
        };
        Unit { block: block as usize, rows, matrices: [matrix as usize, 0] }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Strided>, team: usize, t: usize) -> (Global<u32>, usize, usize) {
        (self.0.weights, unit.matrices[0], tile_of(self.0.shape, unit.block, team, t, NT))
    }

    #[inline(always)]
    fn finish<const N: usize, const M: usize>(&self, unit: &Unit<Strided>, sums: &Sums<N, M>) {
        store(self.0.y, unit, sums, self.0.shape, self.0.rows.accumulate != 0);
    }
}

/// The pairs of tile `index / runs`, and which run of weight tiles.
#[inline(always)]
fn gathered(rows: GroupedRows, shape: StreamShape, runs: u32, index: u32) -> (u32, Unit<Gathered>) {
    let (tile, block) = (math::div(index, runs) as usize, math::rem(index, runs));
    let word = |i| rows.tiles.get(1 + tile * 3 + i);
    let pairs = Gathered {
        order: rows.order,
        first: word(1) as usize,
        count: word(2) as usize,
        pairs_per_row: rows.pairs_per_row,
        n: shape.n as usize,
        k: shape.k as usize,
    };
    (word(0), Unit { block: block as usize, rows: pairs, matrices: [SKIP; 2] })
}

#[inline(always)]
fn matrix(slots: Global<u32>, expert: u32) -> usize {
    let slot = slots.get(expert as usize);
    if slot == ABSENT { SKIP } else { slot as usize }
}

/// Rows gathered by expert. Units: runs of tiles, within tiles of pairs.
#[derive(Clone, Copy)]
pub struct Grouped<const NT: usize>(pub GroupedStreamArgs);

impl<const NT: usize> Work for Grouped<NT> {
    type Rows = Gathered;

    #[inline(always)]
    fn settled(&self) -> bool {
        self.0.rows.settled != 0
    }

    #[inline(always)]
    fn units(&self) -> u32 {
        self.0.rows.tiles.get(0) * runs(self.0.shape, NT as u32)
    }

    #[inline(always)]
    fn unit(&self, index: u32) -> Unit<Gathered> {
        let (expert, unit) = gathered(self.0.rows, self.0.shape, runs(self.0.shape, NT as u32), index);
        Unit { matrices: [matrix(self.0.rows.slots, expert), 0], ..unit }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Gathered>, team: usize, t: usize) -> (Global<u32>, usize, usize) {
        (self.0.weights, unit.matrices[0], tile_of(self.0.shape, unit.block, team, t, NT))
    }

    #[inline(always)]
    fn finish<const N: usize, const M: usize>(&self, unit: &Unit<Gathered>, sums: &Sums<N, M>) {
        store(self.0.y, unit, sums, self.0.shape, false);
    }
}

/// Gate and up of experts: tile 0 of a team is of gate, tile 1 the same rows of up.
#[derive(Clone, Copy)]
pub struct GateUp<const NT: usize>(pub GateUpArgs);

impl<const NT: usize> Work for GateUp<NT> {
    type Rows = Gathered;

    #[inline(always)]
    fn settled(&self) -> bool {
        self.0.rows.settled != 0
    }

    #[inline(always)]
    fn units(&self) -> u32 {
        self.0.rows.tiles.get(0) * runs(self.0.shape, 1)
    }

    #[inline(always)]
    fn unit(&self, index: u32) -> Unit<Gathered> {
        let (expert, unit) = gathered(self.0.rows, self.0.shape, runs(self.0.shape, 1), index);
        Unit { matrices: [matrix(self.0.rows.slots, expert), matrix(self.0.up_slots, expert)], ..unit }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Gathered>, team: usize, t: usize) -> (Global<u32>, usize, usize) {
        let weights = if t == 0 { self.0.gate } else { self.0.up };
        (weights, unit.matrices[t], tile_of(self.0.shape, unit.block, team, 0, 1))
    }

    #[inline(always)]
    fn finish<const N: usize, const M: usize>(&self, unit: &Unit<Gathered>, sums: &Sums<N, M>) {
        each(unit, self.0.shape, 1, |m, n, team, _, row| {
            let gate = sums.get(team as usize, 0, row as usize, m);
            let up = sums.get(team as usize, 1, row as usize, m);
            let value = math::silu(gate) * up;
            let to = unit.rows.y(m) + n;
            if !self.0.out_f32.is_empty() {
                self.0.out_f32.set(to, value);
            }
            if !self.0.out_bf16.is_empty() {
                self.0.out_bf16.set(to, math::to_bf16(value));
            }
        });
    }
}
