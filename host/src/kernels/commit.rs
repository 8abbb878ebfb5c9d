//! Launchers of [`gpu::kernels::commit`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::attention::{AdvanceArgs, CommitArgs, GatherRowsArgs};
use gpu::kernels::commit as kernel;

use super::{aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// Moves the accepted path's cache rows behind the committed ones, in every layer.
pub struct Commit {
    /// `[layers, slots, width]`.
    pub cache: GlobalMut<bf16>,
    pub state: Global<u32>,
    pub layers: usize,
    pub slots: usize,
    /// A multiple of 8.
    pub width: usize,
}

/// Queues the move. The committed length stays: see [`advance`].
pub fn commit(device: &Device, p: Commit) -> Result<()> {
    let name = kernel::COMMIT.name();
    state_holds(name, p.state.len())?;
    contract(name, p.width.is_multiple_of(kernel::COMMIT_COLUMNS), || {
        format!("width is {}; a multiple of {} is possible", p.width, kernel::COMMIT_COLUMNS)
    })?;
    contract(name, p.cache.len() == p.layers * p.slots * p.width, || {
        format!("the cache holds {}, expected [{}, {}, {}]", p.cache.len(), p.layers, p.slots, p.width)
    })?;
    aligned(name, "cache", p.cache.addr(), 16)?;
    let args = CommitArgs { cache: p.cache, state: p.state, slots: p.slots as u32, width: p.width as u32 };
    let blocks = (p.width / kernel::COMMIT_COLUMNS).div_ceil(kernel::THREADS as usize);
    let dims = Dims { grid: [p.layers as u32, blocks as u32, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::COMMIT, dims, args)
}

/// `dst[r] = src[path[r]]`: the drafter features of the accepted path.
pub struct GatherRows {
    /// `[rows, width]`.
    pub src: Global<f32>,
    /// `[count, width]`; rows past the path repeat row 0 of `src`.
    pub dst: GlobalMut<f32>,
    pub state: Global<u32>,
    pub count: usize,
    /// A multiple of 4.
    pub width: usize,
}

/// Queues the copy of `count` rows.
pub fn gather_rows(device: &Device, p: GatherRows) -> Result<()> {
    let name = kernel::GATHER_ROWS.name();
    state_holds(name, p.state.len())?;
    contract(name, p.width > 0 && p.width.is_multiple_of(kernel::GATHER_COLUMNS), || {
        format!("width is {}; a multiple of {} is possible", p.width, kernel::GATHER_COLUMNS)
    })?;
    contract(name, p.src.len() >= p.width, || format!("src holds {}, a row is {}", p.src.len(), p.width))?;
    contract(name, p.dst.len() >= p.count * p.width, || {
        format!("dst holds {}, {} rows of {} are written", p.dst.len(), p.count, p.width)
    })?;
    aligned(name, "src", p.src.addr(), 16)?;
    aligned(name, "dst", p.dst.addr(), 16)?;
    let args = GatherRowsArgs { src: p.src, dst: p.dst, state: p.state, width: p.width as u32 };
    let blocks = (p.width / kernel::GATHER_COLUMNS).div_ceil(kernel::THREADS as usize);
    let dims = Dims { grid: [p.count as u32, blocks as u32, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::GATHER_ROWS, dims, args)
}

/// Queues the end of a round: the committed length grows by the path, the next bonus becomes the bonus.
pub fn advance(device: &Device, state: GlobalMut<u32>) -> Result<()> {
    state_holds(kernel::ADVANCE.name(), state.len())?;
    let dims = Dims { grid: [1, 1, 1], block: [kernel::ADVANCE_THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::ADVANCE, dims, AdvanceArgs { state })
}
