//! What the launches of [`super::stream`] multiply: dense rows, rows gathered by expert, and gate and up of experts
//! with SwiGLU between them and memory.

use cuda_std::{Global, math, thread};

use super::stream::{FEW_ROWS, SKIP, Sums, TILE_N, Unit, WARPS, Work};
use super::stream_rows::{Gathered, Rows as _, Strided, each, store};
use crate::args::linear::{ABSENT, GateUpArgs, GroupedRows, GroupedStreamArgs, StreamArgs, StreamShape};

/// Runs a variant of the stream over one kind of work.
macro_rules! stream {
    ($format:ty, $variant:expr, $work:ident, $a:ident) => {
        cuda_std::thread::expect_blocks::<{ $crate::kernels::stream::THREADS }, { $variant.blocks }>();
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

/// Runs a variant of the products of tall matrices.
macro_rules! wide {
    ($format:ty, $variant:expr, $a:ident) => {
        cuda_std::thread::expect_blocks::<{ $crate::kernels::stream::THREADS }, { $variant.blocks }>();
        $crate::kernels::wide::run::<
            $format,
            { $variant.nt },
            { $variant.mt },
            { $variant.chunks },
            { $variant.depth },
        >($a)
    };
}
pub(crate) use wide;

/// Runs gathered products of many rows an expert: each warp has tiles of its own and all of k.
macro_rules! gathered_wide {
    ($format:ty, $variant:expr, $work:ident, $a:ident) => {{
        cuda_std::thread::expect_blocks::<{ $crate::kernels::stream::THREADS }, { $variant.blocks }>();
        let mut own = $a;
        own.shape.k_split = 1;
        $crate::kernels::gathered_wide::run::<
            $format,
            _,
            { $variant.nt },
            { $variant.mt },
            { $variant.chunks },
            { $variant.depth },
        >($work::<{ $variant.nt }>(own), $a.x, $a.shape)
    }};
}
pub(crate) use gathered_wide;

/// Runs gathered products of a short k.
macro_rules! short {
    ($format:ty, $short:expr, $a:ident) => {
        cuda_std::thread::expect_blocks::<{ $crate::kernels::stream::THREADS }, { $short.blocks }>();
        $crate::kernels::short::run::<$format, { $short.depth }>($a)
    };
}
pub(crate) use short;

/// A block that has nothing to do waits too: the next launch takes the end of this one for the end of the one before.
#[inline(always)]
pub fn leave(settled: bool) {
    if settled {
        thread::wait_for_previous();
    }
}

/// Runs of tiles of a matrix, each a block's.
#[inline(always)]
fn runs(shape: StreamShape, tiles_of_team: u32) -> u32 {
    let own = math::div(WARPS, shape.k_split) * tiles_of_team;
    math::div(shape.n.div_ceil(TILE_N as u32) + own - 1, own)
}

/// The tile of a block's run that is tile `t` of a team.
#[inline(always)]
fn tile_of(shape: StreamShape, block: u32, team: u32, t: u32, tiles_of_team: u32) -> u32 {
    (block * math::div(WARPS, shape.k_split) + team) * tiles_of_team + t
}

/// Rows at fixed strides, in blocks, within entries of the batch.
#[derive(Clone, Copy)]
pub struct Dense<const NT: usize>(pub StreamArgs);

impl<const NT: usize> Work for Dense<NT> {
    type Rows = Strided;

    #[inline(always)]
    fn settled(&self) -> bool {
        true
    }

    #[inline(always)]
    fn runs(&self) -> u32 {
        runs(self.0.shape, NT as u32)
    }

    #[inline(always)]
    fn rows(&self) -> u32 {
        self.0.batch * self.0.row_blocks
    }

    #[inline(always)]
    fn neighbours(&self) -> bool {
        false
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<Strided> {
        let blocks = self.0.row_blocks;
        let (matrix, rows) = if blocks == 1 { (rows, 0) } else { (math::div(rows, blocks), math::rem(rows, blocks)) };
        let rows = Strided::of(self.0.rows, matrix, rows);
        Unit { block, rows, matrices: [matrix, 0] }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Strided>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        (self.0.weights, unit.matrices[0], tile_of(self.0.shape, unit.block, team, t, NT as u32))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<Strided>, first: u32, sums: &Sums<PASS, M>) {
        store(self.0.y, unit, (first, NT as u32), sums, self.0.shape, self.0.rows.accumulate != 0);
    }
}

/// The pairs of a tile of them, and its expert.
#[inline(always)]
pub fn gathered(rows: GroupedRows, shape: StreamShape, tile: u32, block: u32) -> (u32, Unit<Gathered>) {
    let word = |i| rows.tiles.get(1 + tile as usize * 3 + i);
    let pairs = Gathered {
        order: rows.order,
        first: word(1),
        count: word(2),
        pairs_per_row: rows.pairs_per_row,
        n: shape.n,
        k: shape.k,
    };
    (word(0), Unit { block, rows: pairs, matrices: [SKIP; 2] })
}

/// Rows gathered by expert: a block of rows is a tile of pairs.
#[derive(Clone, Copy)]
pub struct Grouped<const NT: usize>(pub GroupedStreamArgs);

impl<const NT: usize> Work for Grouped<NT> {
    type Rows = Gathered;

    #[inline(always)]
    fn settled(&self) -> bool {
        self.0.rows.settled != 0
    }

    #[inline(always)]
    fn runs(&self) -> u32 {
        runs(self.0.shape, NT as u32)
    }

    #[inline(always)]
    fn rows(&self) -> u32 {
        self.0.rows.tiles.get(0)
    }

    /// One expert's: its rows of x stay near.
    #[inline(always)]
    fn neighbours(&self) -> bool {
        true
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<Gathered> {
        let (expert, unit) = gathered(self.0.rows, self.0.shape, rows, block);
        Unit { matrices: [self.0.rows.slots.get(expert as usize), 0], ..unit }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Gathered>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        (self.0.weights, unit.matrices[0], tile_of(self.0.shape, unit.block, team, t, NT as u32))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<Gathered>, first: u32, sums: &Sums<PASS, M>) {
        store(self.0.y, unit, (first, NT as u32), sums, self.0.shape, false);
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
    fn runs(&self) -> u32 {
        runs(self.0.shape, 1)
    }

    #[inline(always)]
    fn rows(&self) -> u32 {
        self.0.rows.tiles.get(0)
    }

    /// As above. With many tiles an expert, blocks side by side in memory are faster.
    #[inline(always)]
    fn neighbours(&self) -> bool {
        self.0.shape.n < FEW_ROWS as u32
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<Gathered> {
        let (expert, unit) = gathered(self.0.rows, self.0.shape, rows, block);
        let slots = [self.0.rows.slots, self.0.up_slots];
        Unit { matrices: slots.map(|slots| slots.get(expert as usize)), ..unit }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Gathered>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        let weights = if t == 0 { self.0.gate } else { self.0.up };
        (weights, unit.matrices[t as usize % 2], tile_of(self.0.shape, unit.block, team, 0, 1))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<Gathered>, first: u32, sums: &Sums<PASS, M>) {
        each(unit, self.0.shape, [first, 1, 1], |m, n, team, _, row| {
            let gate = sums.get(team, 0, row, m);
            let up = sums.get(team, 1, row, m);
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

// A slot that has no matrix here is a unit that is not multiplied here.
const _: () = assert!(ABSENT == SKIP);
