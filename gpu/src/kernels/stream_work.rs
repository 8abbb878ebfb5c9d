//! What the launches of [`super::stream`] multiply: dense rows, rows gathered by expert, and gate and up of experts
//! with SwiGLU between them and memory.

use core::marker::PhantomData;

use cuda_std::{Global, GlobalMut, bf16, math, thread};

use super::pairs::{Listed, Pairs, Within};
use super::stream::{FEW_ROWS, SKIP, Sums, TILE_N, Unit, WARPS, Work};
use super::stream_rows::{Rows, Strided, each, store};
use crate::args::linear::{ABSENT, GateUpArgs, GatedArgs, GroupedStreamArgs, StreamArgs, StreamShape};

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
        >($work::<{ $variant.nt }>::new($a), $a.x, $a.shape)
    };
}
pub(crate) use stream;

/// Runs a variant of the products whose blocks share x: all of k a block.
macro_rules! wide {
    ($format:ty, $variant:expr, $a:ident) => {
        $crate::kernels::stream_work::wide!($format, $variant, $a, true)
    };
    ($format:ty, $variant:expr, $a:ident, $turns:expr) => {
        $crate::kernels::wide::run::<
            $format,
            { $variant.warps },
            { $variant.shares },
            { $variant.nt },
            { $variant.mt },
            { $variant.chunks },
            { $variant.depth },
            { $turns },
        >($a)
    };
}
pub(crate) use wide;

/// The same of 64 rows, on sm_90 alone: elsewhere registers would be spilled, and no launcher takes it there.
macro_rules! wide_sm_90 {
    ($format:ty, $variant:expr, $a:ident) => {
        if cuda_std::EMULATED || cfg!(all(target_feature = "ptx80", not(target_feature = "ptx87"))) {
            $crate::kernels::stream_work::wide!($format, $variant, $a, true)
        } else {
            cuda_std::thread::trap("a product for sm_90")
        }
    };
}
pub(crate) use wide_sm_90;

/// The same, a slice of k a block of a cluster; the CPU device, which has no clusters, takes all of k.
macro_rules! split {
    ($format:ty, $variant:expr, $a:ident) => {
        if cuda_std::cluster::SOME || cuda_std::EMULATED {
            $crate::kernels::stream_work::wide!($format, $variant, $a, !cuda_std::cluster::SOME)
        } else {
            cuda_std::thread::trap("a product for clusters of blocks")
        }
    };
}
pub(crate) use split;

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
        >($work::<{ $variant.nt }>::new(own), $a.x, $a.shape)
    }};
}
pub(crate) use gathered_wide;

/// Runs gathered products of a short k.
macro_rules! short {
    ($format:ty, $short:expr, $pairs:ty, $a:ident) => {
        cuda_std::thread::expect_blocks::<{ $crate::kernels::stream::THREADS }, { $short.blocks }>();
        $crate::kernels::short::run::<$format, $pairs, { $short.depth }>($a)
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

impl<const NT: usize> Dense<NT> {
    #[inline(always)]
    pub fn new(a: StreamArgs) -> Self {
        Self(a)
    }
}

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

/// Rows gathered by expert: a block of rows is a tile of pairs.
#[derive(Clone, Copy)]
pub struct GroupedBy<P, const NT: usize>(pub GroupedStreamArgs, PhantomData<P>);

/// The same, sorted before.
pub type Grouped<const NT: usize> = GroupedBy<Listed, NT>;
/// The same, few pairs.
pub type GroupedWithin<const NT: usize> = GroupedBy<Within, NT>;

impl<P, const NT: usize> GroupedBy<P, NT> {
    #[inline(always)]
    pub fn new(a: GroupedStreamArgs) -> Self {
        Self(a, PhantomData)
    }
}

impl<P: Pairs, const NT: usize> Work for GroupedBy<P, NT> {
    type Rows = P::Rows;
    const TIGHT: bool = P::TIGHT;

    #[inline(always)]
    fn prepare(&self) {
        P::prepare(&self.0.rows);
    }

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
        P::tiles(&self.0.rows)
    }

    /// One expert's: its rows of x stay near.
    #[inline(always)]
    fn neighbours(&self) -> bool {
        true
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<P::Rows> {
        let (rows, matrix) = P::rows(&self.0.rows, self.0.shape, rows);
        Unit { block, rows, matrices: [matrix, 0] }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<P::Rows>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        (self.0.weights, unit.matrices[0], tile_of(self.0.shape, unit.block, team, t, NT as u32))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<P::Rows>, first: u32, sums: &Sums<PASS, M>) {
        store(self.0.y, unit, (first, NT as u32), sums, self.0.shape, false);
    }
}

/// Gate and up of experts: tile 0 of a team is of gate, tile 1 the same rows of up.
#[derive(Clone, Copy)]
pub struct GateUpBy<P, const NT: usize>(pub GateUpArgs, PhantomData<P>);

/// The same, sorted before.
pub type GateUp<const NT: usize> = GateUpBy<Listed, NT>;
/// The same, few pairs.
pub type GateUpWithin<const NT: usize> = GateUpBy<Within, NT>;

impl<P, const NT: usize> GateUpBy<P, NT> {
    #[inline(always)]
    pub fn new(a: GateUpArgs) -> Self {
        Self(a, PhantomData)
    }
}

impl<P: Pairs, const NT: usize> Work for GateUpBy<P, NT> {
    type Rows = P::Rows;
    const TIGHT: bool = P::TIGHT;

    #[inline(always)]
    fn prepare(&self) {
        P::prepare(&self.0.rows);
    }

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
        P::tiles(&self.0.rows)
    }

    /// As above. With many tiles an expert, blocks side by side in memory are faster.
    #[inline(always)]
    fn neighbours(&self) -> bool {
        self.0.shape.n < FEW_ROWS as u32
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<P::Rows> {
        let (pairs, gate) = P::rows(&self.0.rows, self.0.shape, rows);
        let up = P::other(&self.0.rows, self.0.up_slots, rows, gate);
        Unit { block, rows: pairs, matrices: [gate, up] }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<P::Rows>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        let weights = if t == 0 { self.0.gate } else { self.0.up };
        (weights, unit.matrices[t as usize % 2], tile_of(self.0.shape, unit.block, team, 0, 1))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<P::Rows>, first: u32, sums: &Sums<PASS, M>) {
        store_gated((self.0.out_f32, self.0.out_bf16), unit, first, sums, self.0.shape);
    }
}

/// Gate and up of dense rows, as above.
#[derive(Clone, Copy)]
pub struct Gated<const NT: usize>(GatedArgs);

impl<const NT: usize> Gated<NT> {
    #[inline(always)]
    pub fn new(a: GatedArgs) -> Self {
        Self(a)
    }
}

impl<const NT: usize> Work for Gated<NT> {
    type Rows = Strided;
    const TIGHT: bool = true;

    #[inline(always)]
    fn settled(&self) -> bool {
        true
    }

    #[inline(always)]
    fn runs(&self) -> u32 {
        runs(self.0.shape, 1)
    }

    #[inline(always)]
    fn rows(&self) -> u32 {
        math::div(self.0.rows.rows + self.0.rows.rows_per_block - 1, self.0.rows.rows_per_block)
    }

    #[inline(always)]
    fn neighbours(&self) -> bool {
        false
    }

    #[inline(always)]
    fn unit(&self, rows: u32, block: u32) -> Unit<Strided> {
        Unit { block, rows: Strided::of(self.0.rows, 0, rows), matrices: [0; 2] }
    }

    #[inline(always)]
    fn tile(&self, unit: &Unit<Strided>, team: u32, t: u32) -> (Global<u32>, u32, u32) {
        let weights = if t == 0 { self.0.gate } else { self.0.up };
        (weights, 0, tile_of(self.0.shape, unit.block, team, 0, 1))
    }

    #[inline(always)]
    fn finish<const PASS: usize, const M: usize>(&self, unit: &Unit<Strided>, first: u32, sums: &Sums<PASS, M>) {
        store_gated((self.0.out_f32, self.0.out_bf16), unit, first, sums, self.0.shape);
    }
}

/// Stores gate and up together: tiles 0 and 1 of a team.
#[inline(always)]
fn store_gated<R: Rows, const PASS: usize, const MT: usize>(
    (out_f32, out_bf16): (GlobalMut<f32>, GlobalMut<bf16>),
    unit: &Unit<R>,
    first: u32,
    sums: &Sums<PASS, MT>,
    shape: StreamShape,
) {
    each(unit, shape, [first, 1, 1], |m, n, team, _, row| {
        let gate = sums.get(team, 0, row, m);
        let up = sums.get(team, 1, row, m);
        let value = math::silu(gate) * up;
        let to = unit.rows.y(m) + n;
        if !out_f32.is_empty() {
            out_f32.set(to, value);
        }
        if !out_bf16.is_empty() {
            out_bf16.set(to, math::to_bf16(value));
        }
    });
}

// A slot that has no matrix here is a unit that is not multiplied here.
const _: () = assert!(ABSENT == SKIP);
