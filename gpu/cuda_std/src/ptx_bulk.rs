//! Barriers in shared memory and the bulk copies that they count: sm_90 and later.

use core::arch::asm;

/// # Safety
/// `addr` is an 8-byte aligned word of the shared window that no copy counts on.
#[inline(always)]
pub unsafe fn mbarrier_init(addr: u32, arrivals: u32) {
    // SAFETY: the caller's.
    unsafe { asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) addr, in(reg32) arrivals, options(nostack)) }
}

#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: fences.
    unsafe { asm!("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", options(nostack)) }
}

/// # Safety
/// `addr` is an initialised barrier.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect(addr: u32, bytes: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [{}], {}; }}", in(reg32) addr,
            in(reg32) bytes, options(nostack));
    }
}

/// # Safety
/// As [`mbarrier_arrive_expect`].
#[inline(always)]
pub unsafe fn mbarrier_arrive(addr: u32) {
    // SAFETY: the caller's.
    unsafe { asm!("{{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [{}]; }}", in(reg32) addr, options(nostack)) }
}

/// # Safety
/// As [`mbarrier_arrive_expect`].
#[inline(always)]
pub unsafe fn mbarrier_wait(addr: u32, parity: u32) {
    loop {
        let over: u32;
        // SAFETY: the caller's.
        unsafe {
            asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{1}], {2}; selp.u32 {0}, 1, 0, p; }}",
                out(reg32) over, in(reg32) addr, in(reg32) parity, options(nostack));
        }
        if over != 0 {
            break;
        }
    }
}

/// # Safety
/// `bytes` live bytes at both ends, all a multiple of 16; `barrier` is initialised.
#[inline(always)]
pub unsafe fn bulk_copy_once(dst: u32, src: u64, bytes: u32, barrier: u32) {
    /// What `createpolicy.fractional.L2::evict_first` gives for all of a range.
    const EVICT_FIRST: u64 = 0x12F0_0000_0000_0000;
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint \
              [{}], [{}], {}, [{}], {};", in(reg32) dst, in(reg64) src, in(reg32) bytes, in(reg32) barrier,
            in(reg64) EVICT_FIRST, options(nostack));
    }
}

/// # Safety
/// As [`bulk_copy_once`].
#[inline(always)]
pub unsafe fn bulk_copy(dst: u32, src: u64, bytes: u32, barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) dst, in(reg64) src, in(reg32) bytes, in(reg32) barrier, options(nostack));
    }
}
