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

/// Stops the launch with an error (`trap`). On the CPU device the fault carries `what`.
#[inline(always)]
pub fn trap(what: &'static str) -> ! {
    arch::trap(what)
}
