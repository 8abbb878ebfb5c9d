//! Bulk asynchronous copies from global to shared memory (`cp.async.bulk`, sm_90 and later), and the barriers in shared
//! memory that count their bytes (`mbarrier`).
//!
//! A barrier goes through phases. A phase ends when as many threads have arrived as [`Barriers::init`] named and all
//! bytes that arrivals announced have landed; then the next begins. A waiting thread names the parity of the phase it
//! waits for: 0 for the first, 1 for the second, 0 for the third. Who has waited sees what was copied.
//!
//! On the CPU device in checked mode a copy lands only in the wait that ends its phase; bytes touched before, or by a
//! thread that has neither waited nor met one that has, and copies that nobody has waited for when the block ends, are
//! faults.

use crate::{Element, Global, Shared, arch};

/// Barriers in shared memory.
#[derive(Clone, Copy)]
pub struct Barriers(Shared<u64>);

impl Barriers {
    /// One barrier a word.
    #[inline(always)]
    pub fn new(words: Shared<u64>) -> Self {
        Self(words)
    }

    /// Makes barrier `i`, of `arrivals` arrivals a phase (`mbarrier.init`). One thread does so, then [`fence_init`],
    /// then the threads that use it meet at a barrier of the block or warp.
    #[inline(always)]
    pub fn init(self, i: usize, arrivals: u32) {
        // SAFETY: a word of the view.
        unsafe { arch::mbarrier_init(self.0.addr_of(i, 1), arrivals) }
    }

    /// Arrives at barrier `i` and announces `bytes` bytes of copies (`mbarrier.arrive.expect_tx`).
    #[inline(always)]
    pub fn arrive_expecting(self, i: usize, bytes: u32) {
        // SAFETY: as in `init`.
        unsafe { arch::mbarrier_arrive_expect(self.0.addr_of(i, 1), bytes) }
    }

    /// Arrives at barrier `i` (`mbarrier.arrive`).
    #[inline(always)]
    pub fn arrive(self, i: usize) {
        // SAFETY: as in `init`.
        unsafe { arch::mbarrier_arrive(self.0.addr_of(i, 1)) }
    }

    /// Waits until the phase of barrier `i` that has this parity is over (`mbarrier.try_wait.parity`).
    #[inline(always)]
    pub fn wait(self, i: usize, parity: u32) {
        // SAFETY: as in `init`.
        unsafe { arch::mbarrier_wait(self.0.addr_of(i, 1), parity) }
    }
}

/// Makes barriers that this thread has initialised known to bulk copies (`fence.mbarrier_init`, `fence.proxy.async`).
#[inline(always)]
pub fn fence_init() {
    arch::fence_mbarrier_init();
}

/// Starts a copy of `elems` elements, counted by barrier `i`: 16-byte aligned at both ends, a multiple of 16 bytes.
/// Read once: first to leave the L2.
#[inline(always)]
pub fn copy_once<T: Element>(
    dst: Shared<T>,
    dst_index: usize,
    src: Global<T>,
    src_index: usize,
    elems: usize,
    barriers: Barriers,
    i: usize,
) {
    let (to, from, bytes) = ends(dst, dst_index, src, src_index, elems);
    // SAFETY: both ranges lie inside their views, the barrier in its.
    unsafe { arch::bulk_copy_once(to, from, bytes, barriers.0.addr_of(i, 1)) }
}

/// As [`copy_once`], for what other blocks read too: no hint to the L2.
#[inline(always)]
pub fn copy<T: Element>(
    dst: Shared<T>,
    dst_index: usize,
    src: Global<T>,
    src_index: usize,
    elems: usize,
    barriers: Barriers,
    i: usize,
) {
    let (to, from, bytes) = ends(dst, dst_index, src, src_index, elems);
    // SAFETY: as in `copy_once`.
    unsafe { arch::bulk_copy(to, from, bytes, barriers.0.addr_of(i, 1)) }
}

/// Where a copy goes and comes from, both inside their views, and its bytes.
#[inline(always)]
fn ends<T: Element>(
    dst: Shared<T>,
    dst_index: usize,
    src: Global<T>,
    src_index: usize,
    elems: usize,
) -> (u32, u64, u32) {
    let bytes = elems * size_of::<T>();
    let from = src.addr().wrapping_add(src_index.wrapping_mul(size_of::<T>()) as u64);
    #[cfg(not(target_arch = "nvptx64"))]
    crate::cpu::check_bulk(src_index, elems, src.len() as u64, from, bytes);
    (dst.addr_of(dst_index, elems), from, bytes as u32)
}
