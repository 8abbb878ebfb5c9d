//! Launchers of [`gpu::kernels::bandwidth`].

use cuda_std::{Global, GlobalMut};
use gpu::args::bandwidth::{CopyArgs, ReadArgs};
use gpu::kernels::bandwidth as kernel;

use super::{aligned, contract, holds};
use crate::device::{Device, Dims, Result};

/// Blocks a multiprocessor: as many as it holds at once.
const BLOCKS: u32 = 8;
/// Words of a load, and its bytes.
const WIDE: usize = 4;
const BYTES: u64 = 16;

fn dims(device: &Device) -> Dims {
    let blocks = device.info().multiprocessors * BLOCKS;
    Dims { grid: [blocks, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 }
}

/// Threads of a [`read_words`] launch: the sums that it writes.
pub fn read_threads(device: &Device) -> usize {
    let dims = dims(device);
    dims.grid[0] as usize * dims.block[0] as usize
}

fn check(name: &'static str, from: Global<u32>) -> Result<()> {
    contract(name, from.len().is_multiple_of(WIDE), || format!("{} words, expected a multiple of {WIDE}", from.len()))?;
    aligned(name, "the words", from.addr(), BYTES)
}

/// Queues `to = from`.
pub fn copy_words(device: &Device, from: Global<u32>, to: GlobalMut<u32>) -> Result<()> {
    let name = kernel::COPY_WORDS.name();
    check(name, from)?;
    holds(name, "the copy", to.len(), from.len())?;
    aligned(name, "the copy", to.addr(), BYTES)?;
    device.launch(&kernel::COPY_WORDS, dims(device), CopyArgs { from, to })
}

/// Queues the sums of [`read_threads`] threads' words.
pub fn read_words(device: &Device, from: Global<u32>, sums: GlobalMut<u32>) -> Result<()> {
    let name = kernel::READ_WORDS.name();
    check(name, from)?;
    holds(name, "the sums", sums.len(), read_threads(device))?;
    device.launch(&kernel::READ_WORDS, dims(device), ReadArgs { from, sums })
}
