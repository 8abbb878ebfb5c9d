//! Clusters of blocks that run together and write to each other's shared memory (sm_90 and later). A launch without
//! clusters, and any on older targets and on the CPU device, has clusters of one block.

use crate::{Shared, arch};

/// Whether there are clusters of more than one block.
pub const SOME: bool = cfg!(all(target_arch = "nvptx64", target_feature = "ptx80"));

/// Blocks of a cluster, side by side along x (`%cluster_nctaid.x`).
#[inline(always)]
pub fn size() -> u32 {
    arch::cluster_size()
}

/// Which of them this block is (`%cluster_ctaid.x`).
#[inline(always)]
pub fn rank() -> u32 {
    arch::cluster_rank()
}

/// Waits for every thread of the cluster and orders their accesses to shared memory (`barrier.cluster`). All threads
/// must reach it.
#[inline(always)]
pub fn sync() {
    arch::cluster_sync();
}

/// Stores sixteen bytes from word `i` on where block `rank` of the cluster has the same view
/// (`st.shared::cluster.v4.u32`): 16-byte aligned. That block has started; it ends only after a barrier of the cluster.
#[inline(always)]
pub fn st16(view: Shared<u32>, i: usize, words: [u32; 4], rank: u32) {
    // SAFETY: inside the view, which every block of the cluster has at the same address.
    unsafe { arch::store_cluster_v4(view.addr_of(i, 4), words, rank) }
}
