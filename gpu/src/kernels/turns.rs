//! The order in which a block of [`super::stream`] takes its units.

use cuda_std::{math, thread};

use super::stream::{SKIP, Unit, Work};
use super::stream_rows::Rows;

/// From a block's unit to its next.
#[derive(Clone, Copy)]
pub struct Pace {
    runs: u32,
    /// The block's first unit.
    first: u32,
    /// Units from one to the next: also as rows and runs.
    step: u32,
    rows: u32,
    run: u32,
    /// Where the block's units end.
    pub end: u32,
}

impl Pace {
    #[inline(always)]
    pub fn of<W: Work>(work: &W) -> Self {
        let (runs, grid, block) = (work.runs(), thread::grid_dim_x(), thread::block_idx_x());
        let units = work.rows() * runs;
        if work.neighbours() {
            // Equal shares; the first blocks have one more, so that no multiprocessor has two more than another.
            let (each, more) = (math::div(units, grid), math::rem(units, grid));
            let first = block * each + block.min(more);
            return Self { runs, first, step: 1, rows: 0, run: 1, end: first + each + (block < more) as u32 };
        }
        Self { runs, first: block, step: grid, rows: math::div(grid, runs), run: math::rem(grid, runs), end: units }
    }
}

/// A unit that this launch multiplies.
#[derive(Clone, Copy)]
pub struct Turn<R> {
    /// Its number, or one past the last.
    pub index: u32,
    /// Which rows.
    pub rows: u32,
    pub unit: Unit<R>,
}

impl<R: Rows> Turn<R> {
    #[inline(always)]
    pub fn first<W: Work<Rows = R>>(work: &W, pace: Pace) -> Self {
        let index = pace.first;
        let inside = index.min(pace.end.max(1) - 1);
        let rows = math::div(inside, pace.runs);
        let turn = Self { index, rows, unit: work.unit(rows, math::rem(inside, pace.runs)) };
        if turn.unit.matrices[0] == SKIP { turn.next(work, pace) } else { turn }
    }

    /// The unit, looked up again: a loop that needs it at its end need not hold it.
    #[inline(always)]
    pub fn again<W: Work<Rows = R>>(&self, work: &W) -> Unit<R> {
        work.unit(thread::opaque(self.rows), self.unit.block)
    }

    #[inline(always)]
    pub fn next<W: Work<Rows = R>>(mut self, work: &W, pace: Pace) -> Self {
        loop {
            self.index += pace.step;
            if self.index >= pace.end {
                return self;
            }
            let mut run = self.unit.block + pace.run;
            self.rows += pace.rows;
            if run >= pace.runs {
                run -= pace.runs;
                self.rows += 1;
            }
            self.unit = work.unit(self.rows, run);
            if self.unit.matrices[0] != SKIP {
                return self;
            }
        }
    }
}
