//! Where a thread is, and the block's barrier.

use crate::arch;

macro_rules! indices {
    ($($name:ident $doc:literal;)*) => { $(
        #[doc = $doc]
        #[inline(always)]
        pub fn $name() -> u32 {
            arch::$name()
        }
    )* };
}

indices! {
    thread_idx_x "`%tid.x`";
    thread_idx_y "`%tid.y`";
    thread_idx_z "`%tid.z`";
    block_dim_x "`%ntid.x`";
    block_dim_y "`%ntid.y`";
    block_dim_z "`%ntid.z`";
    block_idx_x "`%ctaid.x`";
    block_idx_y "`%ctaid.y`";
    block_idx_z "`%ctaid.z`";
    grid_dim_x "`%nctaid.x`";
    grid_dim_y "`%nctaid.y`";
    grid_dim_z "`%nctaid.z`";
}

/// Waits for every thread of the block and orders their memory accesses (`bar.sync 0`). All threads must reach it.
#[inline(always)]
pub fn sync_threads() {
    arch::sync_threads();
}

/// Waits at barrier `id`, 1 to 15, until `threads` threads have come there, whole warps of the block, and orders the
/// memory accesses of those that have (`bar.sync id, threads`). All lanes of a warp come together, all who come name
/// the same number of threads, and a warp comes once a meeting; then the barrier can be used again.
#[inline(always)]
pub fn sync_numbered(id: u32, threads: u32) {
    arch::sync_numbered(id, threads);
}

/// Comes to barrier `id` as [`sync_numbered`] does, but does not wait: those who do see what this warp has done so far
/// (`bar.arrive id, threads`).
#[inline(always)]
pub fn arrive_numbered(id: u32, threads: u32) {
    arch::arrive_numbered(id, threads);
}

/// Orders this thread's writes before its later ones for the whole device (`fence.acq_rel.gpu`).
#[inline(always)]
pub fn fence_device() {
    arch::fence_device();
}

/// `value`, but the compiler does not know that: what a loop derives from it is derived anew in each round, where it
/// would otherwise be kept in registers from the start.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    arch::opaque(value)
}

/// Waits until the launch before this one is over and its writes are seen (`griddepcontrol.wait`, sm_90 and later).
///
/// A launch that overlaps the one before it (`Device::launch_overlapping`) may start before that has ended: until here
/// it touches nothing that the earlier launch writes, and writes nothing. Any other launch passes at once.
#[inline(always)]
pub fn wait_for_previous() {
    arch::wait_for_previous();
}

/// Lets the next launch start, if it overlaps this one, once every block has come here or ended
/// (`griddepcontrol.launch_dependents`). Called after [`wait_for_previous`]: so a launch that has started knows that
/// all but the one before it are over.
#[inline(always)]
pub fn start_next() {
    arch::start_next();
}

/// Has the builder write `.maxntid THREADS` and `.minnctapersm BLOCKS` at the kernel that calls it, as
/// `#[kernel(threads = .., blocks = ..)]` does: rustc has no attribute for either.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub fn launch_bounds<const THREADS: u32, const BLOCKS: u32>() {
    arch::launch_bounds::<THREADS, BLOCKS>();
}

/// Leaves in the PTX that `BLOCKS` blocks of `THREADS` threads are meant to be on a multiprocessor at once: `cargo
/// xtask ptx` sees to it that their registers fit.
#[inline(always)]
pub fn expect_blocks<const THREADS: u32, const BLOCKS: u32>() {
    #[cfg(target_arch = "nvptx64")]
    arch::expect_blocks::<THREADS, BLOCKS>();
}

/// Stops the launch with an error (`trap`). On the CPU device the fault carries `what`.
#[inline(always)]
pub fn trap(what: &'static str) -> ! {
    arch::trap(what)
}
