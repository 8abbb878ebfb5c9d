//! Warp shuffles, votes and reductions. All 32 lanes take part in each of them; a block is a whole number of warps.

use crate::arch;

/// Lanes of a warp.
pub const WARP: u32 = 32;

/// This thread's lane, 0..31 (the block's threads counted along x, then y, then z).
#[inline(always)]
pub fn lane_id() -> u32 {
    arch::lane_id()
}

/// This thread's warp in its block.
#[inline(always)]
pub fn warp_id() -> u32 {
    arch::warp_id()
}

/// Waits for the warp's lanes and orders their memory accesses (`bar.warp.sync`).
#[inline(always)]
pub fn sync_warp() {
    arch::sync_warp();
}

/// A 32-bit value that a shuffle can move.
pub trait Lane: Copy {
    fn to_bits(self) -> u32;
    fn from_bits(bits: u32) -> Self;
}

impl Lane for u32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
}

impl Lane for i32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self as u32
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits as i32
    }
}

impl Lane for f32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

/// The value of lane `src & 31` (`shfl.sync.idx`).
#[inline(always)]
pub fn shfl<T: Lane>(value: T, src: u32) -> T {
    T::from_bits(arch::shfl_idx(value.to_bits(), src))
}

/// The value of lane `lane ^ mask` (`shfl.sync.bfly`).
#[inline(always)]
pub fn shfl_xor<T: Lane>(value: T, mask: u32) -> T {
    T::from_bits(arch::shfl_xor(value.to_bits(), mask))
}

/// The value of lane `lane + delta`, the own one past the last lane (`shfl.sync.down`). `delta` counts modulo 32.
#[inline(always)]
pub fn shfl_down<T: Lane>(value: T, delta: u32) -> T {
    T::from_bits(arch::shfl_down(value.to_bits(), delta))
}

/// The value of lane `lane - delta`, the own one before the first lane (`shfl.sync.up`). `delta` counts modulo 32.
#[inline(always)]
pub fn shfl_up<T: Lane>(value: T, delta: u32) -> T {
    T::from_bits(arch::shfl_up(value.to_bits(), delta))
}

/// One bit a lane: whether its predicate holds (`vote.sync.ballot`).
#[inline(always)]
pub fn ballot(predicate: bool) -> u32 {
    arch::ballot(predicate)
}

/// Whether the predicate holds on any lane.
#[inline(always)]
pub fn any(predicate: bool) -> bool {
    ballot(predicate) != 0
}

/// Whether the predicate holds on every lane.
#[inline(always)]
pub fn all(predicate: bool) -> bool {
    ballot(predicate) == u32::MAX
}

/// Combines the lanes' values in a butterfly: every lane gets the same bits when `op` is commutative.
#[inline(always)]
pub fn reduce<T: Lane>(value: T, op: impl Fn(T, T) -> T) -> T {
    let mut v = value;
    let mut step = 16;
    while step > 0 {
        v = op(v, shfl_xor(v, step));
        step /= 2;
    }
    v
}

/// Largest value over the warp (`redux.sync.max.u32`).
#[inline(always)]
pub fn max(value: u32) -> u32 {
    arch::redux_max(value)
}

/// Smallest value over the warp (`redux.sync.min.u32`).
#[inline(always)]
pub fn min(value: u32) -> u32 {
    arch::redux_min(value)
}

/// Sum over the warp, modulo 2^32 (`redux.sync.add.u32`).
#[inline(always)]
pub fn sum(value: u32) -> u32 {
    arch::redux_add(value)
}

/// Sum over the warp, the same bits on every lane.
#[inline(always)]
pub fn reduce_sum(value: f32) -> f32 {
    reduce(value, |a, b| a + b)
}

/// Largest value over the warp; a NaN is passed over unless all are NaN.
#[inline(always)]
pub fn reduce_max(value: f32) -> f32 {
    reduce(value, f32::max)
}

/// Inclusive sum of lanes `0..=lane`.
#[inline(always)]
pub fn inclusive_sum(value: u32) -> u32 {
    let lane = lane_id();
    let mut v = value;
    let mut step = 1;
    while step < WARP {
        let below = shfl_up(v, step);
        if lane >= step {
            v = v.wrapping_add(below);
        }
        step *= 2;
    }
    v
}
