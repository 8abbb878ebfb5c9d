//! The PTX behind each operation: one wrapper an instruction. Nothing here checks anything.
//!
//! Warp-wide operations must stay where all lanes pass. LLVM keeps its own intrinsics there (they are `convergent`);
//! inline assembly cannot say so. Where there is no usable intrinsic (`mma`, `ldmatrix`) the assembly is not `pure`: a
//! pure one whose result only some lanes use is moved into their branch, which was seen. The passes that would copy
//! it into several branches are off on targets whose branches diverge.

use core::arch::asm;
use core::arch::global_asm;
use core::arch::nvptx as nv;

use crate::Element;
pub use crate::ptx_barriers::*;
#[cfg(target_feature = "ptx80")]
pub use crate::ptx_bulk::*;
pub use crate::ptx_cluster::*;
pub use crate::ptx_half::*;

global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

/// Every lane of a warp.
const ALL: u32 = 0xFFFF_FFFF;

// SAFETY: LLVM's own declarations of these intrinsics.
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn redux_sync_umax(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    fn redux_sync_umin(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    fn redux_sync_add(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_sync_bfly(mask: u32, value: u32, lanes: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shfl_sync_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn shfl_sync_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
}

macro_rules! special {
    ($($name:ident $intrinsic:ident;)*) => { $(
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reads a special register.
            unsafe { nv::$intrinsic() as u32 }
        }
    )* };
}
special! {
    thread_idx_x _thread_idx_x; thread_idx_y _thread_idx_y; thread_idx_z _thread_idx_z;
    block_dim_x _block_dim_x; block_dim_y _block_dim_y; block_dim_z _block_dim_z;
    block_idx_x _block_idx_x; block_idx_y _block_idx_y; block_idx_z _block_idx_z;
    grid_dim_x _grid_dim_x; grid_dim_y _grid_dim_y; grid_dim_z _grid_dim_z;
}

#[inline(always)]
pub fn lane_id() -> u32 {
    let r: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {}, %laneid;", out(reg32) r, options(pure, nomem, nostack, preserves_flags)) };
    r
}

#[inline(always)]
pub fn warp_id() -> u32 {
    (thread_idx_x() + block_dim_x() * (thread_idx_y() + block_dim_y() * thread_idx_z())) / 32
}

#[inline(always)]
pub fn sync_warp() {
    // SAFETY: a warp barrier of all lanes.
    unsafe { bar_warp_sync(ALL) }
}

#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only. Not `pure`: what is derived from it must not move.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) r, in(reg32) value, options(nomem, nostack, preserves_flags)) };
    r
}

#[inline(always)]
pub fn launch_bounds<const THREADS: u32, const BLOCKS: u32>() {
    // SAFETY: a comment, which `cuda_builder::bounds` looks for.
    unsafe {
        asm!("// launch bounds: {} {}", const THREADS, const BLOCKS, options(nomem, nostack, preserves_flags));
    }
}

#[inline(always)]
pub fn expect_blocks<const THREADS: u32, const BLOCKS: u32>() {
    // SAFETY: a comment, which `xtask::blocks` looks for.
    unsafe {
        asm!("// blocks expected: {} {}", const THREADS, const BLOCKS, options(nomem, nostack, preserves_flags));
    }
}

#[inline(always)]
pub fn fence_device() {
    // SAFETY: a memory fence.
    unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) }
}

#[inline(always)]
pub fn wait_for_previous() {
    // SAFETY: a wait of the whole launch; older targets have no launches that overlap.
    #[cfg(target_feature = "ptx80")]
    unsafe {
        asm!("griddepcontrol.wait;", options(nostack))
    }
}

#[inline(always)]
pub fn start_next() {
    // SAFETY: a hint to the launch that follows.
    #[cfg(target_feature = "ptx80")]
    unsafe {
        asm!("griddepcontrol.launch_dependents;", options(nostack))
    }
}

#[inline(always)]
pub fn trap(_what: &'static str) -> ! {
    // SAFETY: ends the launch.
    unsafe { nv::trap() }
}

macro_rules! shuffle {
    ($($name:ident $intrinsic:ident $clamp:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(value: u32, arg: u32) -> u32 {
            // SAFETY: all lanes take part.
            unsafe { $intrinsic(ALL, value, arg, $clamp) }
        }
    )* };
}
shuffle! {
    shfl_idx shfl_sync_idx 31; shfl_xor shfl_sync_bfly 31; shfl_down shfl_sync_down 31; shfl_up shfl_sync_up 0;
}

#[inline(always)]
pub fn ballot(predicate: bool) -> u32 {
    // SAFETY: all lanes take part.
    unsafe { vote_ballot_sync(ALL, predicate) }
}

#[inline(always)]
pub fn redux_max(value: u32) -> u32 {
    // SAFETY: all lanes take part.
    unsafe { redux_sync_umax(value, ALL) }
}

#[inline(always)]
pub fn redux_min(value: u32) -> u32 {
    // SAFETY: all lanes take part.
    unsafe { redux_sync_umin(value, ALL) }
}

#[inline(always)]
pub fn redux_add(value: u32) -> u32 {
    // SAFETY: all lanes take part.
    unsafe { redux_sync_add(value, ALL) }
}

/// # Safety
/// 8 live bytes at `addr`, 8-byte aligned.
#[inline(always)]
pub unsafe fn load_global_v2(addr: u64) -> [u32; 2] {
    let (a, b);
    // SAFETY: the caller's.
    unsafe {
        asm!("ld.global.v2.u32 {{{0}, {1}}}, [{2}];", out(reg32) a, out(reg32) b, in(reg64) addr,
            options(pure, readonly, nostack, preserves_flags));
    }
    [a, b]
}

/// # Safety
/// 16 live bytes at `addr`, 16-byte aligned.
#[inline(always)]
pub unsafe fn load_global_v4(addr: u64) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's.
    unsafe {
        asm!("ld.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
            in(reg64) addr, options(pure, readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// # Safety
/// As [`load_global_v4`], of memory that nothing writes during the launch.
#[inline(always)]
pub unsafe fn load_global_v4_stream(addr: u64) -> [u32; 4] {
    let (a, b, c, d);
    macro_rules! load {
        ($hint:literal) => {
            asm!(concat!("ld.global.nc", $hint, ".v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];"), out(reg32) a, out(reg32) b,
                out(reg32) c, out(reg32) d, in(reg64) addr, options(pure, readonly, nostack, preserves_flags))
        };
    }
    // SAFETY: the caller's. PTX before 7.4 has no such hint.
    unsafe {
        #[cfg(target_feature = "ptx74")]
        load!(".L1::no_allocate");
        #[cfg(not(target_feature = "ptx74"))]
        load!("");
    }
    [a, b, c, d]
}

/// # Safety
/// 8 live, writable bytes at `addr`, 8-byte aligned.
#[inline(always)]
pub unsafe fn store_global_v2(addr: u64, w: [u32; 2]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.global.v2.u32 [{0}], {{{1}, {2}}};", in(reg64) addr, in(reg32) w[0], in(reg32) w[1],
            options(nostack, preserves_flags));
    }
}

/// # Safety
/// 16 live, writable bytes at `addr`, 16-byte aligned.
#[inline(always)]
pub unsafe fn store_global_v4(addr: u64, w: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};", in(reg64) addr, in(reg32) w[0], in(reg32) w[1],
            in(reg32) w[2], in(reg32) w[3], options(nostack, preserves_flags));
    }
}

macro_rules! atomics {
    ($space:literal $addr:ty, $reg:ident; $($name:ident $op:literal;)*) => { $(
        /// # Safety
        /// `addr` is a live, aligned word of this space.
        #[inline(always)]
        pub unsafe fn $name(addr: $addr, value: u32) -> u32 {
            let r: u32;
            // SAFETY: the caller's.
            unsafe {
                asm!(concat!("atom.", $space, ".", $op, " {}, [{}], {};"), out(reg32) r, in($reg) addr,
                    in(reg32) value, options(nostack, preserves_flags));
            }
            r
        }
    )* };
}

pub mod global_atomics {
    use core::arch::asm;
    atomics! { "global" u64, reg64;
    atomic_add "add.u32"; atomic_max "max.u32"; atomic_min "min.u32"; atomic_or "or.b32"; atomic_exch "exch.b32"; }

    /// # Safety
    /// `addr` is a live, aligned global word.
    #[inline(always)]
    pub unsafe fn atomic_cas(addr: u64, expected: u32, value: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller's.
        unsafe {
            asm!("atom.global.cas.b32 {}, [{}], {}, {};", out(reg32) r, in(reg64) addr, in(reg32) expected,
                in(reg32) value, options(nostack, preserves_flags));
        }
        r
    }
}

pub mod shared_atomics {
    use core::arch::asm;
    atomics! { "shared" u32, reg32; atomic_add "add.u32"; atomic_max "max.u32"; atomic_or "or.b32"; }
}

#[inline(always)]
pub fn dynamic_shared_base() -> u32 {
    let r: u32;
    // SAFETY: the address of the extern array declared above.
    unsafe { asm!("mov.u32 {}, dyn_smem;", out(reg32) r, options(pure, nomem, nostack, preserves_flags)) };
    r
}

macro_rules! scalar {
    ($space:literal $addr:ty, $reg:ident; $load:ident $store:ident) => {
        /// # Safety
        /// `addr` is a live, aligned `T` of this space.
        #[inline(always)]
        pub unsafe fn $load<T: Element>(addr: $addr) -> T {
            macro_rules! load {
                ($op:literal $class:ident $bits:ty) => {{
                    let r: $bits;
                    asm!(concat!("ld.", $space, ".", $op, " {}, [{}];"), out($class) r, in($reg) addr,
                        options(pure, readonly, nostack, preserves_flags));
                    r
                }};
            }
            // SAFETY: the bits read are those of a T of the same size; the address is the caller's.
            unsafe {
                match size_of::<T>() {
                    1 => core::mem::transmute_copy(&(load!("u8" reg16 u16) as u8)),
                    2 => core::mem::transmute_copy(&load!("u16" reg16 u16)),
                    4 => core::mem::transmute_copy(&load!("u32" reg32 u32)),
                    _ => core::mem::transmute_copy(&load!("u64" reg64 u64)),
                }
            }
        }

        /// # Safety
        /// `addr` is a live, aligned, writable `T` of this space.
        #[inline(always)]
        pub unsafe fn $store<T: Element>(addr: $addr, value: T) {
            macro_rules! store {
                ($op:literal $class:ident $bits:expr) => {
                    asm!(concat!("st.", $space, ".", $op, " [{}], {};"), in($reg) addr, in($class) $bits,
                        options(nostack, preserves_flags))
                };
            }
            // SAFETY: the bits written are those of `value`; the address is the caller's.
            unsafe {
                match size_of::<T>() {
                    1 => store!("u8" reg16 core::mem::transmute_copy::<T, u8>(&value) as u16),
                    2 => store!("u16" reg16 core::mem::transmute_copy::<T, u16>(&value)),
                    4 => store!("u32" reg32 core::mem::transmute_copy::<T, u32>(&value)),
                    _ => store!("u64" reg64 core::mem::transmute_copy::<T, u64>(&value)),
                }
            }
        }
    };
}
scalar! { "global" u64, reg64; load_global store_global }
scalar! { "shared" u32, reg32; load_shared store_shared }

/// # Safety
/// 8 live bytes of the shared window, 8-byte aligned.
#[inline(always)]
pub unsafe fn load_shared_v2(addr: u32) -> [u32; 2] {
    let (a, b);
    // SAFETY: the caller's.
    unsafe {
        asm!("ld.shared.v2.u32 {{{0}, {1}}}, [{2}];", out(reg32) a, out(reg32) b, in(reg32) addr,
            options(pure, readonly, nostack, preserves_flags));
    }
    [a, b]
}

/// # Safety
/// 16 live bytes of the shared window, 16-byte aligned.
#[inline(always)]
pub unsafe fn load_shared_v4(addr: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's.
    unsafe {
        asm!("ld.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
            in(reg32) addr, options(pure, readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// # Safety
/// As [`load_shared_v2`].
#[inline(always)]
pub unsafe fn store_shared_v2(addr: u32, w: [u32; 2]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.shared.v2.u32 [{0}], {{{1}, {2}}};", in(reg32) addr, in(reg32) w[0], in(reg32) w[1],
            options(nostack, preserves_flags));
    }
}

/// # Safety
/// As [`load_shared_v4`].
#[inline(always)]
pub unsafe fn store_shared_v4(addr: u32, w: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.shared.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};", in(reg32) addr, in(reg32) w[0], in(reg32) w[1],
            in(reg32) w[2], in(reg32) w[3], options(nostack, preserves_flags));
    }
}

/// # Safety
/// 16 bytes at both ends, 16-byte aligned; the source stays unwritten until the group is waited for.
#[inline(always)]
pub unsafe fn cp_async_16(dst: u32, src: u64) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.cg.shared.global [{0}], [{1}], 16;", in(reg32) dst, in(reg64) src,
            options(nostack, preserves_flags));
    }
}

/// # Safety
/// As [`cp_async_16`] when `valid`; else nothing is read.
#[inline(always)]
pub unsafe fn cp_async_16_zfill(dst: u32, src: u64, valid: bool) {
    let size = if valid { 16u32 } else { 0 };
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.cg.shared.global [{0}], [{1}], 16, {2};", in(reg32) dst, in(reg64) src, in(reg32) size,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub fn cp_async_commit() {
    // SAFETY: closes a group of copies.
    unsafe { asm!("cp.async.commit_group;", options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn cp_async_wait<const PENDING: u32>() {
    // SAFETY: waits for copies.
    unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn mma_m16n8k16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    // SAFETY: registers only; all lanes take part.
    unsafe {
        asm!("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, \
              {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            options(nomem, nostack, preserves_flags));
    }
}

/// The same with zeros to add to, which take no registers.
#[inline(always)]
fn mma_m16n8k16_from_zero(a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
    let mut d = [0.0; 4];
    // SAFETY: registers only; all lanes take part.
    unsafe {
        asm!("{{ .reg .f32 z; mov.f32 z, 0f00000000; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 \
              {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{z, z, z, z}}; }}",
            out(reg32) d[0], out(reg32) d[1], out(reg32) d[2], out(reg32) d[3],
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            options(nomem, nostack, preserves_flags));
    }
    d
}

#[inline(always)]
pub fn product_m16n8k32(a: [[u32; 4]; 2], b: [u32; 4]) -> [f32; 4] {
    let mut d = mma_m16n8k16_from_zero(a[0], [b[0], b[1]]);
    mma_m16n8k16(&mut d, a[1], [b[2], b[3]]);
    d
}

#[inline(always)]
pub fn mma_m16n8k16_x2(d: &mut [f32; 4], a: [[u32; 4]; 2], b: [u32; 4]) {
    mma_m16n8k16(d, a[0], [b[0], b[1]]);
    mma_m16n8k16(d, a[1], [b[2], b[3]]);
}

macro_rules! ldmatrix {
    ($($name:ident $trans:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(row: u32) -> [u32; 4] {
            let (a, b, c, d);
            // SAFETY: every lane names 16 bytes of the shared window by the caller's contract.
            unsafe {
                asm!(concat!("ldmatrix.sync.aligned.m8n8.x4", $trans, ".shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];"),
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row,
                    options(readonly, nostack, preserves_flags));
            }
            [a, b, c, d]
        }
    )* };
}
ldmatrix! { ldmatrix_x4 ""; ldmatrix_x4_trans ".trans"; }

macro_rules! ldmatrix2 {
    ($($name:ident $trans:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(row: u32) -> [u32; 2] {
            let (a, b);
            // SAFETY: every lane names 16 bytes of the shared window by the caller's contract.
            unsafe {
                asm!(concat!("ldmatrix.sync.aligned.m8n8.x2", $trans, ".shared.b16 {{{0}, {1}}}, [{2}];"),
                    out(reg32) a, out(reg32) b, in(reg32) row,
                    options(readonly, nostack, preserves_flags));
            }
            [a, b]
        }
    )* };
}
ldmatrix2! { ldmatrix_x2 ""; ldmatrix_x2_trans ".trans"; }

macro_rules! unary {
    ($($name:ident $op:literal;)*) => { $(
        #[inline(always)]
        pub fn $name(x: f32) -> f32 {
            let r: f32;
            // SAFETY: registers only.
            unsafe {
                asm!(concat!($op, " {}, {};"), out(reg32) r, in(reg32) x,
                    options(pure, nomem, nostack, preserves_flags));
            }
            r
        }
    )* };
}
unary! {
    exp2 "ex2.approx.ftz.f32"; log2 "lg2.approx.f32"; rsqrt "rsqrt.approx.f32"; sqrt "sqrt.rn.f32";
    ceil "cvt.rpi.f32.f32";
}

#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let r: f32;
    // SAFETY: registers only.
    unsafe {
        asm!("fma.rn.f32 {}, {}, {}, {};", out(reg32) r, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

#[inline(always)]
pub fn cvt_bf16x2(lo: f32, hi: f32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) r, in(reg32) hi, in(reg32) lo,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// `(word & 0x000F000F | 0x43004300) - 136` per half. As one fma with -1 * 136 + x: sm_80 has no bf16 subtraction.
#[inline(always)]
pub fn dequant_pair(word: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 t; lop3.b32 t, {1}, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {0}, t, {2}, {3}; }}",
            out(reg32) r, in(reg32) word, in(reg32) 0x3F80_3F80u32, in(reg32) 0xC308_C308u32,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// `((word & 0x000F000F | 0x43004300) - 136) / 4` per half. As one fma: sm_80 has no bf16 subtraction.
#[inline(always)]
pub fn dequant_low(word: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 t; lop3.b32 t, {1}, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {0}, t, {2}, {3}; }}",
            out(reg32) r, in(reg32) word, in(reg32) 0x3E80_3E80u32, in(reg32) 0xC208_C208u32,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// `(word & 0x00F000F0) * 2^127 - 2` per half, the bits read as bf16: a subnormal, `16 q * 2^-133`.
#[inline(always)]
pub fn dequant_high(word: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 t; and.b32 t, {1}, 0x00F000F0; fma.rn.bf16x2 {0}, t, {2}, {3}; }}",
            out(reg32) r, in(reg32) word, in(reg32) 0x7F00_7F00u32, in(reg32) 0xC000_C000u32,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// Two e4m3 codes (bytes 0 and 1, or with `HIGH` 2 and 3) as a bf16 pair: their bits are those of a bf16 value 2^120
/// times smaller, subnormal ones included; `factor` is a pair that makes good for that.
#[inline(always)]
pub fn e4m3_pair<const HIGH: bool>(codes: u32, factor: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 x, t; prmt.b32 x, {1}, 0, {4}; shr.u32 t, x, 4; and.b32 t, t, 0x07F007F0; ",
            "lop3.b32 x, x, 0x80008000, t, 0xEA; fma.rn.bf16x2 {0}, x, {2}, {3}; }}",
            out(reg32) r, in(reg32) codes, in(reg32) factor, in(reg32) 0x8000_8000u32,
            const if HIGH { 0x3424 } else { 0x1404 }, options(pure, nomem, nostack, preserves_flags));
    }
    r
}
