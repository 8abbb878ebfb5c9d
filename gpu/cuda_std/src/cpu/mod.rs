//! The CPU device: runs a kernel's own source.
//!
//! A block's threads are coroutines on one OS thread (`block.rs`); blocks run in parallel. Warp operations exchange
//! values through `exchange.rs`. In checked mode every access is checked: global accesses (`memory.rs`) against their
//! view and the live buffers; shared accesses (`shared.rs`) against their array, against other threads' accesses that
//! have not been seen (`order.rs`), and against asynchronous copies still on their way; barriers (`barriers.rs`,
//! `named.rs`) and warp operations must be reached by all; a block must end. A broken rule is a [`Fault`] that names
//! kernel, block and thread.

mod barriers;
mod block;
mod cluster;
mod exchange;
mod fault;
mod memory;
mod named;
pub mod ops;
mod order;
mod shadow;
mod shared;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use crate::Kernel;
pub use fault::{Fault, FaultKind};
#[doc(hidden)]
pub use memory::static_shared;
pub(crate) use memory::{check_bulk, check_dynamic_shared, check_index, check_shared_index, check_slice};
pub use memory::{register, unregister};

/// Grid and block shape in threads, and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// How the CPU device runs a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All checks; threads are scheduled in an order shuffled by the seed, async copies land late.
    Checked { seed: u64 },
    /// No checks.
    Fast,
}

/// Largest shared memory of a block, static and dynamic together: the smallest of the supported GPUs' maxima is
/// checked by the build; the CPU device allows the largest (227 KiB).
pub const MAX_SHARED: usize = 227 * 1024;

/// Runs every block of a launch and waits for it.
///
/// A grid with a zero runs nothing. The block must be whole warps, at most 1,024 threads.
pub fn launch<A: Copy + Send + Sync + 'static>(
    kernel: &Kernel<A>,
    dims: Dims,
    args: A,
    mode: Mode,
) -> Result<(), Fault> {
    let threads = dims.block.iter().map(|&n| u64::from(n)).product::<u64>();
    if threads == 0 || threads > 1024 || !threads.is_multiple_of(32) {
        let what = format!("{threads} threads a block; whole warps up to 1024 are possible");
        return Err(Fault::of_launch(kernel.name(), what));
    }
    if dims.shared as usize > MAX_SHARED {
        let what = format!("{} bytes of dynamic shared memory; at most {MAX_SHARED} are possible", dims.shared);
        return Err(Fault::of_launch(kernel.name(), what));
    }
    let blocks = dims.grid.iter().map(|&n| u64::from(n)).product::<u64>();
    let regions = memory::regions();
    let entry = kernel.entry();
    let run = |block: &mut block::Block, n: u64| {
        let [gx, gy, _] = dims.grid.map(u64::from);
        let index = [(n % gx) as u32, (n / gx % gy) as u32, (n / (gx * gy)) as u32];
        block.run(index, &|| entry(args))
    };
    let new_block = || block::Block::new(kernel.name(), dims, mode, regions.clone());
    if blocks == 1 {
        return run(&mut new_block(), 0);
    }
    (0..blocks).into_par_iter().try_for_each_init(new_block, run)
}
