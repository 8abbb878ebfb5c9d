//! The block's barriers, by LLVM's intrinsics: they stay where whole warps pass.

use core::arch::nvptx as nv;

// SAFETY: LLVM's own declarations of these intrinsics.
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_cta_sync(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn barrier_cta_arrive(id: u32, threads: u32);
}

#[inline(always)]
pub fn sync_threads() {
    // SAFETY: the barrier; all threads reach it by contract.
    unsafe { nv::_syncthreads() }
}

#[inline(always)]
pub fn sync_numbered(id: u32, threads: u32) {
    // SAFETY: a barrier of whole warps, which come together by contract.
    unsafe { barrier_cta_sync(id, threads) }
}

#[inline(always)]
pub fn arrive_numbered(id: u32, threads: u32) {
    // SAFETY: as in `sync_numbered`.
    unsafe { barrier_cta_arrive(id, threads) }
}
