//! Clusters of blocks: sm_90 and later. Before that each block is a cluster of its own.

#[cfg(target_feature = "ptx80")]
use core::arch::asm;

macro_rules! special {
    ($($name:ident $register:literal $else:literal;)*) => { $(
        #[cfg(target_feature = "ptx80")]
        #[inline(always)]
        pub fn $name() -> u32 {
            let r: u32;
            // SAFETY: reads a special register.
            unsafe {
                asm!(concat!("mov.u32 {}, %", $register, ";"), out(reg32) r,
                    options(pure, nomem, nostack, preserves_flags));
            }
            r
        }

        #[cfg(not(target_feature = "ptx80"))]
        #[inline(always)]
        pub fn $name() -> u32 {
            $else
        }
    )* };
}
special! {
    cluster_size "cluster_nctaid.x" 1;
    cluster_rank "cluster_ctaid.x" 0;
}

#[cfg(target_feature = "ptx80")]
#[inline(always)]
pub fn cluster_sync() {
    // SAFETY: the barrier of the cluster; all threads reach it by contract.
    unsafe { asm!("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", options(nostack)) }
}

#[cfg(not(target_feature = "ptx80"))]
#[inline(always)]
pub fn cluster_sync() {
    crate::ptx::sync_threads();
}

/// # Safety
/// 16 bytes of the shared window that block `rank` of the cluster has too, 16-byte aligned.
#[cfg(target_feature = "ptx80")]
#[inline(always)]
pub unsafe fn store_cluster_v4(addr: u32, w: [u32; 4], rank: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .b32 a; mapa.shared::cluster.u32 a, {0}, {1}; \
              st.shared::cluster.v4.u32 [a], {{{2}, {3}, {4}, {5}}}; }}", in(reg32) addr, in(reg32) rank,
            in(reg32) w[0], in(reg32) w[1], in(reg32) w[2], in(reg32) w[3], options(nostack, preserves_flags));
    }
}

/// # Safety
/// As above.
#[cfg(not(target_feature = "ptx80"))]
#[inline(always)]
pub unsafe fn store_cluster_v4(addr: u32, w: [u32; 4], _rank: u32) {
    // SAFETY: the caller's.
    unsafe { crate::ptx::store_shared_v4(addr, w) }
}
