//! Tensor-core products of a warpgroup, both operands in shared memory (`wgmma`, sm_90a alone; a trap elsewhere).
//!
//! A warpgroup is four neighbouring warps, the first a multiple of four; all its lanes call together. The 64 rows of
//! sums are the warps' in order, 16 each; a lane's words are those of [`crate::mma`]'s fragments D, 8 columns each.
//!
//! An operand is made of panels of 64 (or 32) rows with 64 values each, 128 bytes a row: the 16-byte piece p of row r
//! lies at p xor r mod 8. Panels follow each other, the first on a multiple of 1024 bytes.
//!
//! What threads have stored, and what `cp.async` has brought, is seen only behind [`fence_async`] by the thread that
//! did it, and a barrier.

use half::bf16;

#[cfg(not(target_arch = "nvptx64"))]
use crate::cpu::ops as arch;
#[cfg(target_arch = "nvptx64")]
use crate::ptx_wgmma as arch;

use crate::Shared;

/// Whether this target has the instructions; the CPU does as if.
pub const AVAILABLE: bool = cfg!(any(not(target_arch = "nvptx64"), target_feature = "sm_90a"));

/// Sums of 128 columns.
pub type WideSums = [[f32; 4]; 16];

/// Sums of 64 columns.
pub type Sums = [[f32; 4]; 8];

/// Values of a panel.
const PANEL: usize = 64 * 64;

/// Orders this thread's accesses to shared memory before products (`fence.proxy.async`).
#[inline(always)]
pub fn fence_async() {
    arch::fence_async();
}

/// Starts `d += a . b^T` over nine panels: of 64 rows of `a`, of 32 rows of `b`. Until [`wait_32`] neither `d` nor the
/// operands may be touched.
#[inline(always)]
pub fn start_nt_32(d: &mut [[f32; 4]; 4], a: Shared<bf16>, b: Shared<bf16>) {
    arch::wgmma_nt_32(d, a.addr_of(0, 9 * PANEL), b.addr_of(0, 9 * PANEL / 2));
}

/// Waits for what was started, the sums of which are `d`.
#[inline(always)]
pub fn wait_32(d: &mut [[f32; 4]; 4]) {
    arch::wgmma_wait_32(d);
}

/// Starts `d += w . v`: 32 columns of a panel of `w` from `column` (0 or 32) on, four panels of 32 rows of `v`. Until
/// [`wait_nn_32`] neither `d` nor the operands may be touched.
#[inline(always)]
pub fn start_nn_32(d: &mut [Sums; 4], w: Shared<bf16>, column: usize, v: Shared<bf16>) {
    arch::wgmma_nn_32(d, w.addr_of(column, PANEL - column), v.addr_of(0, 2 * PANEL));
}

/// As [`start_nn_32`], two panels of `v`.
#[inline(always)]
pub fn start_nn_32_half(d: [&mut Sums; 2], w: Shared<bf16>, column: usize, v: Shared<bf16>) {
    arch::wgmma_nn_32_half(d, w.addr_of(column, PANEL - column), v.addr_of(0, PANEL));
}

/// Waits for all that was started, if anything was; `d` are the sums of [`start_nn_32`].
#[inline(always)]
pub fn wait_nn_32(d: &mut [Sums; 4]) {
    arch::wgmma_wait_nn_32(d);
}

/// As [`wait_nn_32`], for [`start_nn_32_half`].
#[inline(always)]
pub fn wait_nn_32_half(d: [&mut Sums; 2]) {
    arch::wgmma_wait_nn_32_half(d);
}

/// Starts `a . b^T` over all 64 columns of the two panels of each of `b`: 128 columns of sums, their rows this warp's
/// 16. `a[i][j]` are the first operands, in registers, of two [`crate::mma`] products of 16 columns, those from `32 j`
/// on of `b[i]`. Until [`wait_sums`] neither the result nor `a` nor `b` may be touched. With `HALF` all operands are
/// f16.
#[inline(always)]
pub fn start_pair<const HALF: bool>(a: &[[[[u32; 4]; 2]; 2]; 2], b: [Shared<u32>; 2]) -> WideSums {
    arch::wgmma_registers_pair::<HALF>(a, b.map(|b| b.addr_of(0, PANEL)))
}

/// As [`start_pair`], added to `d`, which may be under way itself.
#[inline(always)]
pub fn add_pair<const HALF: bool>(d: &mut WideSums, a: &[[[[u32; 4]; 2]; 2]; 2], b: [Shared<u32>; 2]) {
    arch::wgmma_add_pair::<HALF>(d, a, b.map(|b| b.addr_of(0, PANEL)));
}

/// Waits until at most `PENDING` of what was started last is under way; `d` are the sums, `a` the operands of what is
/// over.
#[inline(always)]
pub fn wait_sums<const PENDING: u32>(d: &mut WideSums, a: &mut [[[[u32; 4]; 2]; 2]; 2]) {
    arch::wgmma_wait_sums::<PENDING>(d, a);
}
