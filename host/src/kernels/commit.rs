//! Launchers of [`gpu::kernels::commit`].

use cuda_std::{Element, Global, GlobalMut};
use gpu::args::attention::{AdvanceArgs, CommitArgs, GatherRowsArgs};
use gpu::kernels::commit as kernel;

use super::{aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// Moves the accepted path's cache rows behind the committed ones, in every layer.
pub struct Commit<T> {
    /// `[layers, slots, width]`.
    pub cache: GlobalMut<T>,
    pub state: Global<u32>,
    pub layers: usize,
    pub slots: usize,
    /// A multiple of 16 bytes.
    pub width: usize,
}

/// Queues the move. The committed length stays: see [`advance`].
pub fn commit<T: Element>(device: &Device, p: Commit<T>) -> Result<()> {
    let name = kernel::COMMIT.name();
    let row_bytes = p.width * size_of::<T>();
    state_holds(name, p.state.len())?;
    contract(name, row_bytes.is_multiple_of(kernel::COMMIT_BYTES), || {
        format!("a row is {row_bytes} bytes; a multiple of {} is possible", kernel::COMMIT_BYTES)
    })?;
    contract(name, p.cache.len() == p.layers * p.slots * p.width, || {
        format!("the cache holds {}, expected [{}, {}, {}]", p.cache.len(), p.layers, p.slots, p.width)
    })?;
    aligned(name, "cache", p.cache.addr(), kernel::COMMIT_BYTES as u64)?;
    let cache = GlobalMut::from_raw(p.cache.addr(), p.cache.len() * size_of::<T>());
    let args = CommitArgs { cache, state: p.state, slots: p.slots as u32, row_bytes: row_bytes as u32 };
    let blocks = (row_bytes / kernel::COMMIT_BYTES).div_ceil(kernel::COMMIT_THREADS as usize);
    let dims = Dims { grid: [p.layers as u32, blocks as u32, 1], block: [kernel::COMMIT_THREADS, 1, 1], shared: 0 };
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
