//! Nodes by row, and what the tree builder's threads do together.

use cuda_std::{Shared, dynamic_shared, static_shared, thread, warp};

use super::order;
use super::tree_build::{MAX_BUDGET, MAX_K, MAX_LEVELS, THREADS, listed};

const WARPS: u32 = THREADS / warp::WARP;

// A place: the parent's row, the rank among its children, the depth.
const DEPTH_BITS: u32 = 5;
pub(super) const RANK_BITS: u32 = 10;
const _: () = assert!(MAX_LEVELS < 1 << DEPTH_BITS && MAX_K <= 1 << RANK_BITS);
const _: () = assert!(listed(MAX_BUDGET as u32) < 1 << (u32::BITS - DEPTH_BITS - RANK_BITS));

static_shared!(fn tree_build_warps() -> [u32; WARPS as usize]);

/// Nodes by row, the root first.
#[derive(Clone, Copy)]
pub(super) struct List {
    pub(super) score: Shared<f32>,
    pub(super) place: Shared<u32>,
}

impl List {
    #[inline(always)]
    pub(super) fn at(byte_offset: u32, rows: u32) -> Self {
        let place = dynamic_shared(byte_offset + size_of::<f32>() as u32 * rows, rows);
        Self { score: dynamic_shared(byte_offset, rows), place }
    }

    #[inline(always)]
    pub(super) fn set(self, row: u32, score: f32, place: u32) {
        self.score.set(row as usize, score);
        self.place.set(row as usize, place);
    }

    #[inline(always)]
    pub(super) fn key(self, row: u32) -> u32 {
        order::key(self.score.get(row as usize))
    }
}

#[inline(always)]
pub(super) fn place(parent: u32, rank: u32, depth: u32) -> u32 {
    (parent << RANK_BITS | rank) << DEPTH_BITS | depth
}

#[inline(always)]
pub(super) fn parent_of(place: u32) -> u32 {
    place >> (RANK_BITS + DEPTH_BITS)
}

#[inline(always)]
pub(super) fn rank_of(place: u32) -> u32 {
    (place >> DEPTH_BITS) & ((1 << RANK_BITS) - 1)
}

#[inline(always)]
pub(super) fn depth_of(place: u32) -> u32 {
    place & ((1 << DEPTH_BITS) - 1)
}

#[inline(always)]
pub(super) fn smaller(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

/// The sum over the threads before this one, and over all. A barrier lies between two calls.
#[inline(always)]
pub(super) fn block_sums(value: u32) -> (u32, u32) {
    let (sums, w, lane) = (tree_build_warps(), warp::warp_id(), warp::lane_id());
    let upto = warp::inclusive_sum(value);
    if lane == warp::WARP - 1 {
        sums.set(w as usize, upto);
    }
    thread::sync_threads();
    let other = if lane < WARPS { sums.get(lane as usize) } else { 0 };
    (warp::sum(if lane < w { other } else { 0 }) + upto - value, warp::sum(other))
}

/// The largest value over the block, on all threads. A barrier lies between two calls.
#[inline(always)]
pub(super) fn block_max(value: u32) -> u32 {
    let (values, lane) = (tree_build_warps(), warp::lane_id());
    let mine = warp::max(value);
    if lane == 0 {
        values.set(warp::warp_id() as usize, mine);
    }
    thread::sync_threads();
    let all = warp::max(if lane < WARPS { values.get(lane as usize) } else { 0 });
    thread::sync_threads();
    all
}
