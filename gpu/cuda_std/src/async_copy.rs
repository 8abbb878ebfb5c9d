//! Asynchronous copies from global to shared memory (`cp.async`, sm_80 and later), in groups.
//!
//! A copy may land any time until its group has been waited for; other threads see it only after a barrier that
//! follows the wait. On the CPU device in checked mode it lands as late as that allows.

use crate::{Element, Global, Shared, arch};

/// Starts a copy of 16 bytes, both ends 16-byte aligned, past L1 (`cp.async.cg.shared.global`).
#[inline(always)]
pub fn cp_async_16<T: Element>(dst: Shared<T>, dst_index: usize, src: Global<T>, src_index: usize) {
    let elems = 16 / size_of::<T>();
    let to = dst.addr_of(dst_index, elems);
    let from = src.addr().wrapping_add(src_index.wrapping_mul(size_of::<T>()) as u64);
    #[cfg(not(target_arch = "nvptx64"))]
    crate::cpu::check_index(src_index, elems, src.len() as u64, from, 16);
    // SAFETY: both ranges lie inside their views.
    unsafe { arch::cp_async_16(to, from) }
}

/// As [`cp_async_16`], but zeros are stored and nothing is read unless `valid` (`cp.async` with source size 0).
/// `src_index` may lie anywhere when not valid.
#[inline(always)]
pub fn cp_async_16_or_zero<T: Element>(
    dst: Shared<T>,
    dst_index: usize,
    src: Global<T>,
    src_index: usize,
    valid: bool,
) {
    let elems = 16 / size_of::<T>();
    let to = dst.addr_of(dst_index, elems);
    let index = if valid { src_index } else { 0 };
    let from = src.addr().wrapping_add(index.wrapping_mul(size_of::<T>()) as u64);
    #[cfg(not(target_arch = "nvptx64"))]
    if valid {
        crate::cpu::check_index(index, elems, src.len() as u64, from, 16);
    }
    // SAFETY: both ranges lie inside their views; with size 0 the source is not read.
    unsafe { arch::cp_async_16_zfill(to, from, valid) }
}

/// Closes the group of the copies started since the last one (`cp.async.commit_group`).
#[inline(always)]
pub fn cp_async_commit() {
    arch::cp_async_commit();
}

/// Waits until at most `PENDING` of this thread's latest groups are still on their way (`cp.async.wait_group`).
#[inline(always)]
pub fn cp_async_wait<const PENDING: u32>() {
    arch::cp_async_wait::<PENDING>();
}
