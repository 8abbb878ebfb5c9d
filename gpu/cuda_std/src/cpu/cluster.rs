//! The CPU device has no clusters: each block is one of its own.

use super::ops::{store_shared_v4, sync_threads};

#[inline(always)]
pub fn cluster_size() -> u32 {
    1
}

#[inline(always)]
pub fn cluster_rank() -> u32 {
    0
}

pub fn cluster_sync() {
    sync_threads();
}

/// # Safety
/// As [`store_shared_v4`].
pub unsafe fn store_cluster_v4(addr: u32, w: [u32; 4], _rank: u32) {
    // SAFETY: the caller's.
    unsafe { store_shared_v4(addr, w) }
}
