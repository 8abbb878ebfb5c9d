//! The CPU twin of each wrapper in `ptx.rs`: same names, same contracts.

use half::{bf16, f16};

use super::FaultKind;
use super::block::current;
use super::exchange::{Op, WORDS as MMA_WORDS, exchange, mma_m16n8k16 as warp_mma};
use super::memory;
use crate::Element;

pub use super::cluster::*;

macro_rules! special {
    ($($name:ident $field:ident $axis:literal;)*) => { $(
        #[inline(always)]
        pub fn $name() -> u32 {
            special!(@ $field)[$axis]
        }
    )* };
    (@ thread) => { current().index };
    (@ block) => { current().block().dims.block };
    (@ index) => { current().block().index.get() };
    (@ grid) => { current().block().dims.grid };
}
special! {
    thread_idx_x thread 0; thread_idx_y thread 1; thread_idx_z thread 2;
    block_dim_x block 0; block_dim_y block 1; block_dim_z block 2;
    block_idx_x index 0; block_idx_y index 1; block_idx_z index 2;
    grid_dim_x grid 0; grid_dim_y grid 1; grid_dim_z grid 2;
}

#[inline(always)]
pub fn lane_id() -> u32 {
    current().linear % 32
}

#[inline(always)]
pub fn warp_id() -> u32 {
    current().linear / 32
}

pub fn sync_threads() {
    let me = current();
    me.block().sync_threads(me);
}

/// The warp's lanes come together: the instruction is `.aligned`.
pub fn sync_numbered(id: u32, threads: u32) {
    let me = current();
    me.block().numbered.reach(me, id, threads, true);
}

pub fn arrive_numbered(id: u32, threads: u32) {
    let me = current();
    me.block().numbered.reach(me, id, threads, false);
}

pub fn sync_warp() {
    let me = current();
    exchange(me, Op::Barrier, &[], |_| me.block().meet_warp(me.linear as usize / 32), |_| {});
}

pub fn opaque(value: u32) -> u32 {
    value
}

pub fn fence_device() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::AcqRel);
}

/// Launches on the CPU device follow each other.
pub fn wait_for_previous() {}

pub fn start_next() {}

pub fn trap(what: &'static str) -> ! {
    current().fault(FaultKind::Trap, what.into())
}

fn shuffle(value: u32, src: u32) -> u32 {
    exchange(current(), Op::Shuffle, &[value], |_| {}, |lanes| lanes[src as usize][0])
}

pub fn shfl_idx(value: u32, src: u32) -> u32 {
    shuffle(value, src & 31)
}

pub fn shfl_xor(value: u32, mask: u32) -> u32 {
    shuffle(value, (lane_id() ^ mask) & 31)
}

pub fn shfl_down(value: u32, delta: u32) -> u32 {
    let src = lane_id() + (delta & 31);
    shuffle(value, if src < 32 { src } else { lane_id() })
}

pub fn shfl_up(value: u32, delta: u32) -> u32 {
    shuffle(value, lane_id().checked_sub(delta & 31).unwrap_or(lane_id()))
}

pub fn ballot(predicate: bool) -> u32 {
    let vote = |lanes: &[[u32; MMA_WORDS]; 32]| lanes.iter().enumerate().fold(0, |bits, (lane, w)| bits | w[0] << lane);
    exchange(current(), Op::Ballot, &[predicate as u32], |_| {}, vote)
}

pub fn redux_max(value: u32) -> u32 {
    let largest = |lanes: &[[u32; MMA_WORDS]; 32]| lanes.iter().fold(0, |most, w| most.max(w[0]));
    exchange(current(), Op::Max, &[value], |_| {}, largest)
}

pub fn redux_min(value: u32) -> u32 {
    let smallest = |lanes: &[[u32; MMA_WORDS]; 32]| lanes.iter().fold(u32::MAX, |least, w| least.min(w[0]));
    exchange(current(), Op::Min, &[value], |_| {}, smallest)
}

pub fn redux_add(value: u32) -> u32 {
    let sum = |lanes: &[[u32; MMA_WORDS]; 32]| lanes.iter().fold(0u32, |sum, w| sum.wrapping_add(w[0]));
    exchange(current(), Op::Sum, &[value], |_| {}, sum)
}

/// # Safety
/// `addr` is the address of a live `T`.
#[inline(always)]
pub unsafe fn load_global<T: Element>(addr: u64) -> T {
    // SAFETY: the caller's; checked mode has proven it.
    unsafe { (addr as *const T).read_unaligned() }
}

/// # Safety
/// As [`load_global`], writable.
#[inline(always)]
pub unsafe fn store_global<T: Element>(addr: u64, value: T) {
    // SAFETY: the caller's.
    unsafe { (addr as *mut T).write_unaligned(value) }
}

macro_rules! wide_global {
    ($($load:ident $store:ident $n:literal;)*) => { $(
        /// # Safety
        /// Live bytes at `addr`.
        #[inline(always)]
        pub unsafe fn $load(addr: u64) -> [u32; $n] {
            // SAFETY: the caller's.
            unsafe { (addr as *const [u32; $n]).read_unaligned() }
        }

        /// # Safety
        /// Live, writable bytes at `addr`.
        #[inline(always)]
        pub unsafe fn $store(addr: u64, words: [u32; $n]) {
            // SAFETY: the caller's.
            unsafe { (addr as *mut [u32; $n]).write_unaligned(words) }
        }
    )* };
}
wide_global! { load_global_v2 store_global_v2 2; load_global_v4 store_global_v4 4; }

/// # Safety
/// As [`load_global_v4`].
#[inline(always)]
pub unsafe fn load_global_v4_stream(addr: u64) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load_global_v4(addr) }
}

pub mod global_atomics {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    macro_rules! atomics {
        ($($name:ident $method:ident;)*) => { $(
            /// # Safety
            /// `addr` is a live, aligned word.
            pub unsafe fn $name(addr: u64, value: u32) -> u32 {
                // SAFETY: the caller's.
                unsafe { AtomicU32::from_ptr(addr as *mut u32) }.$method(value, Relaxed)
            }
        )* };
    }
    atomics! { atomic_add fetch_add; atomic_max fetch_max; atomic_min fetch_min; atomic_or fetch_or; atomic_exch swap; }

    /// # Safety
    /// `addr` is a live, aligned word.
    pub unsafe fn atomic_cas(addr: u64, expected: u32, value: u32) -> u32 {
        // SAFETY: the caller's.
        let word = unsafe { AtomicU32::from_ptr(addr as *mut u32) };
        word.compare_exchange(expected, value, Relaxed, Relaxed).unwrap_or_else(|old| old)
    }
}

pub mod shared_atomics {
    use super::current;

    macro_rules! atomics {
        ($($name:ident $op:expr;)*) => { $(
            /// # Safety
            /// `addr` is an aligned word of the block's shared memory.
            pub unsafe fn $name(addr: u32, value: u32) -> u32 {
                let me = current();
                let shared = &me.block().shared;
                shared.atomic(me, addr);
                let word = shared.at(addr).cast::<u32>();
                // SAFETY: the caller's; the block runs on one OS thread.
                unsafe {
                    let old = word.read();
                    let op: fn(u32, u32) -> u32 = $op;
                    word.write(op(old, value));
                    old
                }
            }
        )* };
    }
    atomics! { atomic_add u32::wrapping_add; atomic_max u32::max; atomic_or |a, b| a | b; }
}

#[inline(always)]
pub fn dynamic_shared_base() -> u32 {
    0
}

/// # Safety
/// `addr` is a `T` of the block's shared memory.
#[inline(always)]
pub unsafe fn load_shared<T: Element>(addr: u32) -> T {
    let me = current();
    let shared = &me.block().shared;
    shared.read(me, addr, size_of::<T>());
    // SAFETY: the caller's.
    unsafe { shared.at(addr).cast::<T>().read_unaligned() }
}

/// # Safety
/// As [`load_shared`].
#[inline(always)]
pub unsafe fn store_shared<T: Element>(addr: u32, value: T) {
    let me = current();
    let shared = &me.block().shared;
    shared.write(me, addr, size_of::<T>());
    // SAFETY: the caller's.
    unsafe { shared.at(addr).cast::<T>().write_unaligned(value) }
}

macro_rules! wide_shared {
    ($($load:ident $store:ident $n:literal;)*) => { $(
        /// # Safety
        /// Bytes of the block's shared memory.
        #[inline(always)]
        pub unsafe fn $load(addr: u32) -> [u32; $n] {
            let me = current();
            let shared = &me.block().shared;
            shared.read(me, addr, $n * 4);
            // SAFETY: the caller's.
            unsafe { shared.at(addr).cast::<[u32; $n]>().read_unaligned() }
        }

        /// # Safety
        /// Bytes of the block's shared memory.
        #[inline(always)]
        pub unsafe fn $store(addr: u32, words: [u32; $n]) {
            let me = current();
            let shared = &me.block().shared;
            shared.write(me, addr, $n * 4);
            // SAFETY: the caller's.
            unsafe { shared.at(addr).cast::<[u32; $n]>().write_unaligned(words) }
        }
    )* };
}
wide_shared! { load_shared_v2 store_shared_v2 2; load_shared_v4 store_shared_v4 4; }

/// # Safety
/// 16 bytes at both ends.
pub unsafe fn cp_async_16(dst: u32, src: u64) {
    memory::start_copy(current(), dst, Some(src));
}

/// # Safety
/// As [`cp_async_16`] when `valid`.
pub unsafe fn cp_async_16_zfill(dst: u32, src: u64, valid: bool) {
    memory::start_copy(current(), dst, valid.then_some(src));
}

pub fn cp_async_commit() {
    memory::commit_copies(current());
}

pub fn cp_async_wait<const PENDING: u32>() {
    memory::wait_copies(current(), PENDING as usize);
}

/// # Safety
/// `addr` is an aligned word of the block's shared memory.
pub unsafe fn mbarrier_init(addr: u32, arrivals: u32) {
    let me = current();
    me.block().barriers.init(me, addr, arrivals);
}

pub fn fence_mbarrier_init() {}

/// # Safety
/// As [`mbarrier_init`].
pub unsafe fn mbarrier_arrive_expect(addr: u32, bytes: u32) {
    let me = current();
    me.block().barriers.arrive(me, addr, bytes);
}

/// # Safety
/// As [`mbarrier_init`].
pub unsafe fn mbarrier_arrive(addr: u32) {
    let me = current();
    me.block().barriers.arrive(me, addr, 0);
}

/// # Safety
/// As [`mbarrier_init`].
pub unsafe fn mbarrier_wait(addr: u32, parity: u32) {
    let me = current();
    me.block().barriers.wait(me, addr, parity);
}

/// # Safety
/// `bytes` bytes at both ends.
pub unsafe fn bulk_copy_once(dst: u32, src: u64, bytes: u32, barrier: u32) {
    let me = current();
    me.block().barriers.start(me, dst, src, bytes, barrier);
}

/// # Safety
/// As [`bulk_copy_once`].
pub unsafe fn bulk_copy(dst: u32, src: u64, bytes: u32, barrier: u32) {
    // SAFETY: the caller's; what differs is a hint.
    unsafe { bulk_copy_once(dst, src, bytes, barrier) }
}

pub fn mma_m16n8k16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma::<1, false>(d, [a], [b]);
}

pub fn mma_m16n8k16_x2(d: &mut [f32; 4], a: [[u32; 4]; 2], b: [u32; 4]) {
    mma::<2, false>(d, a, [[b[0], b[1]], [b[2], b[3]]]);
}

pub fn product_m16n8k32(a: [[u32; 4]; 2], b: [u32; 4]) -> [f32; 4] {
    let mut d = [0.0; 4];
    mma_m16n8k16_x2(&mut d, a, b);
    d
}

/// A lane leaves `d`, then each step's `a` and `b`.
fn mma<const STEPS: usize, const HALF: bool>(d: &mut [f32; 4], a: [[u32; 4]; STEPS], b: [[u32; 2]; STEPS]) {
    let me = current();
    let mut words = [0; MMA_WORDS];
    words[..4].copy_from_slice(&d.map(f32::to_bits));
    for step in 0..STEPS {
        words[4 + 6 * step..][..4].copy_from_slice(&a[step]);
        words[8 + 6 * step..][..2].copy_from_slice(&b[step]);
    }
    let lane = me.linear as usize % 32;
    *d = exchange(me, Op::Mma(STEPS), &words[..4 + 6 * STEPS], warp_mma::<STEPS, HALF>, |lanes| {
        std::array::from_fn(|i| f32::from_bits(lanes[lane][i]))
    });
}

/// Rows named by the lanes, then this lane's pair of matrix `i`. The last lane to come reads for all.
fn ldmatrix<const N: usize>(row: u32, transposed: bool) -> [u32; N] {
    let me = current();
    me.block().shared.check_row(me, row);
    let (warp, lane) = (me.linear as usize / 32, me.linear as usize % 32);
    let read = |lanes: &mut [[u32; MMA_WORDS]; 32]| {
        let rows: [[[u16; 8]; 8]; N] = std::array::from_fn(|i| {
            std::array::from_fn(|r| {
                let addr = lanes[i * 8 + r][0];
                // One of the lanes that get some of the row.
                me.block().read_as(warp, 4 * r, addr, 16);
                // SAFETY: each named row is 16 bytes of a view, checked when the lane named it.
                unsafe { me.block().shared.at(addr).cast::<[u16; 8]>().read_unaligned() }
            })
        });
        for (lane, words) in lanes.iter_mut().enumerate() {
            let (g, c) = (lane / 4, lane % 4 * 2);
            for (word, rows) in words.iter_mut().zip(&rows) {
                let pair = if transposed { [rows[c][g], rows[c + 1][g]] } else { [rows[g][c], rows[g][c + 1]] };
                *word = u32::from(pair[0]) | u32::from(pair[1]) << 16;
            }
        }
    };
    exchange(me, Op::LdMatrix, &[row], read, |lanes| std::array::from_fn(|i| lanes[lane][i]))
}

pub fn ldmatrix_x4(row: u32) -> [u32; 4] {
    ldmatrix(row, false)
}

pub fn ldmatrix_x4_trans(row: u32) -> [u32; 4] {
    ldmatrix(row, true)
}

pub fn ldmatrix_x2(row: u32) -> [u32; 2] {
    ldmatrix(row, false)
}

pub fn ldmatrix_x2_trans(row: u32) -> [u32; 2] {
    ldmatrix(row, true)
}

/// The product is exact in f64, so only the sum is rounded before the result is; the two roundings are one unless the
/// first ends halfway between two f32 (whose spacing is larger below the normal range). Then, and only then, the
/// library's `fma` decides: without the instruction, which the least x86-64 lacks, it is many times slower.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    /// The bits that an f32 has not, and halfway among them.
    const REST: u64 = (1 << 29) - 1;
    const HALF: u64 = 1 << 28;
    #[cold]
    #[inline(never)]
    fn library(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    let sum = f64::from(a) * f64::from(b) + f64::from(c);
    let subnormal = sum.abs() < f64::from(f32::MIN_POSITIVE) && sum != 0.0;
    if sum.to_bits() & REST == HALF || subnormal { library(a, b, c) } else { sum as f32 }
}

/// Subnormal results flush to zero, as `ex2.approx.ftz` does.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let y = x.exp2();
    if y.is_subnormal() { 0.0 } else { y }
}

#[inline(always)]
pub fn log2(x: f32) -> f32 {
    x.log2()
}

#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    x.sqrt()
}

#[inline(always)]
pub fn ceil(x: f32) -> f32 {
    x.ceil()
}

#[inline(always)]
pub fn cvt_bf16x2(lo: f32, hi: f32) -> u32 {
    let bits = |x: f32| if x.is_nan() { 0x7FFF } else { bf16::from_f32(x).to_bits() as u32 };
    bits(lo) | bits(hi) << 16
}

pub fn cvt_f16x2(lo: f32, hi: f32) -> u32 {
    u32::from(f16::from_f32(lo).to_bits()) | u32::from(f16::from_f32(hi).to_bits()) << 16
}

/// See `ptx::dequant_half_low`.
pub fn dequant_half_low(word: u32, scale: u32) -> u32 {
    let one = |code: u32, scale: u32| (code as f32 - 8.0) * f16::from_bits(scale as u16).to_f32();
    cvt_f16x2(one(word & 15, scale), one(word >> 16 & 15, scale >> 16))
}

/// See `ptx::dequant_half_high`: of the next nibble of each half.
pub fn dequant_half_high(word: u32, scale: u32) -> u32 {
    dequant_half_low(word >> 4, scale)
}

/// See `ptx::dequant_pair`: the low nibble of each half, stored as q + 8, to bf16 q.
#[inline(always)]
pub fn dequant_pair(word: u32) -> u32 {
    let one = |code: u32| (code as f32 - 8.0).to_bits() >> 16;
    one(word & 15) | one(word >> 16 & 15) << 16
}

/// See `ptx::dequant_low`: as above, a quarter of q.
#[inline(always)]
pub fn dequant_low(word: u32) -> u32 {
    let one = |code: u32| ((code as f32 - 8.0) / 4.0).to_bits() >> 16;
    one(word & 15) | one(word >> 16 & 15) << 16
}

/// See `ptx::dequant_high`: of the next nibble of each half.
#[inline(always)]
pub fn dequant_high(word: u32) -> u32 {
    dequant_low(word >> 4)
}

/// See `ptx::e4m3_pair`.
#[inline(always)]
pub fn e4m3_pair<const HIGH: bool>(codes: u32, factor: u32) -> u32 {
    let codes = if HIGH { codes >> 16 } else { codes };
    let value = |code: u32| f32::from_bits((code & 0x80) << 24 | (code & 0x7F) << 20);
    let factor = [factor << 16, factor & 0xFFFF_0000].map(f32::from_bits);
    cvt_bf16x2(value(codes) * factor[0], value(codes >> 8) * factor[1])
}

pub fn fence_async() {}

/// Eight values of piece `piece` of row `row` of the panel at `addr`.
fn panel_piece(addr: u32, row: usize, piece: usize) -> [f32; 8] {
    // SAFETY: inside a view: checked by the caller of the operation.
    let words = unsafe { load_shared_v4(addr + (row * 128 + (piece ^ (row % 8)) * 16) as u32) };
    std::array::from_fn(|i| f32::from_bits(if i % 2 == 0 { words[i / 2] << 16 } else { words[i / 2] & 0xFFFF_0000 }))
}

/// A lane's first row of the 64, and first column of each 8.
fn warpgroup_place() -> (usize, usize) {
    let linear = current().linear as usize % 128;
    (linear / 32 * 16 + linear % 32 / 4, linear % 4 * 2)
}

pub fn wgmma_wait_32(_d: &mut [[f32; 4]; 4]) {}

pub fn wgmma_wait_nn_32(_d: &mut [[[f32; 4]; 8]; 4]) {}

pub fn wgmma_wait_nn_32_half(_d: [&mut [[f32; 4]; 8]; 2]) {}

pub fn wgmma_nt_32(d: &mut [[f32; 4]; 4], a: u32, b: u32) {
    sync_warp();
    let (row, column) = warpgroup_place();
    for panel in 0..9 {
        for piece in 0..8 {
            let rows = [row, row + 8].map(|row| panel_piece(a + panel * 8192, row, piece));
            for (n, d) in d.iter_mut().enumerate() {
                for (i, d) in d.iter_mut().enumerate() {
                    let key = panel_piece(b + panel * 4096, 8 * n + column + i % 2, piece);
                    rows[i / 2].iter().zip(key).for_each(|(x, y)| *d += x * y);
                }
            }
        }
    }
}

pub fn wgmma_wait_sums<const PENDING: u32>(_d: &mut [[f32; 4]; 16], _a: &mut [[[[u32; 4]; 2]; 2]; 2]) {}

pub fn wgmma_registers_pair<const HALF: bool>(a: &[[[[u32; 4]; 2]; 2]; 2], b: [u32; 2]) -> [[f32; 4]; 16] {
    let mut d = [[0.0; 4]; 16];
    wgmma_add_pair::<HALF>(&mut d, a, b);
    d
}

/// A step's second operands lie in four pieces of a row.
pub fn wgmma_add_pair<const HALF: bool>(d: &mut [[f32; 4]; 16], a: &[[[[u32; 4]; 2]; 2]; 2], b: [u32; 2]) {
    let lane = current().linear as usize % 32;
    for (a, b) in a.iter().zip(b) {
        for (step, a) in a.iter().enumerate() {
            for (n, d) in d.iter_mut().enumerate() {
                let row = 8 * n + lane / 4;
                let pair = |piece: usize| {
                    let at = b + (row * 128 + ((step * 4 + piece) ^ (row % 8)) * 16 + lane % 4 * 4) as u32;
                    // SAFETY: inside a view: checked by the caller of the operation.
                    unsafe { load_shared::<u32>(at) }
                };
                let b = [[pair(0), pair(1)], [pair(2), pair(3)]];
                if HALF { mma::<2, true>(d, *a, b) } else { mma::<2, false>(d, *a, b) }
            }
        }
    }
}

/// `w` points at the first of its columns: the pieces are named from there.
pub fn wgmma_nn_32(d: &mut [[[f32; 4]; 8]; 4], w: u32, v: u32) {
    add_nn_32(d.iter_mut(), w, v);
}

pub fn wgmma_nn_32_half(d: [&mut [[f32; 4]; 8]; 2], w: u32, v: u32) {
    add_nn_32(d.into_iter(), w, v);
}

#[expect(clippy::needless_range_loop, reason = "k numbers weights and rows of values alike")]
fn add_nn_32<'a>(panels: impl Iterator<Item = &'a mut [[f32; 4]; 8]>, w: u32, v: u32) {
    sync_warp();
    let mut panels: Vec<_> = panels.collect();
    let (row, column) = warpgroup_place();
    let first = (w / 16 % 8) as usize;
    let w = w & !127;
    for piece in 0..4 {
        let weights = [row, row + 8].map(|row| panel_piece(w, row, first + piece));
        for k in 0..8 {
            for (panel, d) in panels.iter_mut().enumerate() {
                for (n, d) in d.iter_mut().enumerate() {
                    let values = panel_piece(v + panel as u32 * 4096, 8 * piece + k, n);
                    for (i, d) in d.iter_mut().enumerate() {
                        *d += weights[i / 2][k] * values[column + i % 2];
                    }
                }
            }
        }
    }
}
