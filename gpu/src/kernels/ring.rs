//! A warp's ring of stages in shared memory, filled by asynchronous copies.
//!
//! From sm_90 on one lane starts bulk copies, and a barrier a stage counts their bytes: an instruction or two a stage.
//! Before that each lane copies 16 bytes at a time, in one group a stage. Either way a stage may be read after [`wait`]
//! and the warp's barrier that follows it, and filled again after the next such barrier.
//!
//! [`wait`]: Ring::wait

use cuda_std::{Global, Shared, dynamic_shared, warp};

use crate::unroll::unroll;

/// Bytes of the barriers of a warp's ring: 8 a stage, so that the next ring begins at a multiple of 16.
pub const fn barrier_bytes(depth: usize) -> usize {
    (depth * size_of::<u64>()).next_multiple_of(16)
}

/// Bytes of a ring of `depth` stages of `words` words.
pub const fn ring_bytes(depth: usize, words: usize) -> usize {
    barrier_bytes(depth) + depth * words * size_of::<u32>()
}

/// What the parts of a stage are filled with: each from the first word of its view.
pub type Sources<const NT: usize> = [Global<u32>; NT];

/// `DEPTH` stages of `NT` parts.
#[derive(Clone, Copy)]
pub struct Ring<const NT: usize, const DEPTH: usize> {
    stages: Shared<u32>,
    /// Words of a part.
    part: usize,
    #[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
    barriers: cuda_std::bulk::Barriers,
}

/// A stage, and which time around the ring it is.
#[derive(Clone, Copy)]
pub struct Stage {
    pub index: u32,
    parity: u32,
}

impl Stage {
    pub const FIRST: Self = Self { index: 0, parity: 0 };

    #[inline(always)]
    pub fn next<const DEPTH: usize>(self) -> Self {
        let wraps = self.index + 1 == DEPTH as u32;
        Self { index: if wraps { 0 } else { self.index + 1 }, parity: self.parity ^ wraps as u32 }
    }
}

impl<const NT: usize, const DEPTH: usize> Ring<NT, DEPTH> {
    /// The ring `start` bytes into dynamic shared memory; parts of `part` words. All lanes of its warp come here.
    #[inline(always)]
    pub fn new(start: usize, part: usize) -> Self {
        Self::apart([start, start + barrier_bytes(DEPTH)], part, true)
    }

    /// The same, with [`barrier_bytes`] of barriers at `start` and the stages from `stages` on. Of warps that share a
    /// ring one makes it and fills it; the others wait at its barriers after the block's barrier has followed.
    #[inline(always)]
    pub fn apart([start, stages]: [usize; 2], part: usize, makes: bool) -> Self {
        let _ = (start, makes);
        let ring = Self {
            stages: dynamic_shared(stages as u32, (DEPTH * NT * part) as u32),
            part,
            #[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
            barriers: cuda_std::bulk::Barriers::new(dynamic_shared(start as u32, DEPTH as u32)),
        };
        #[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
        {
            if makes && warp::lane_id() == 0 {
                unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH; { ring.barriers.init(stage, 1) });
                cuda_std::bulk::fence_init();
            }
            warp::sync_warp();
        }
        ring
    }

    /// The words of a stage: its parts one after the other.
    #[inline(always)]
    pub fn stage(self, stage: u32) -> Shared<u32> {
        self.stages.slice(stage as usize * NT * self.part, NT * self.part)
    }

    /// Starts filling a stage with `words` words of each source.
    #[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
    #[inline(always)]
    pub fn fill(self, stage: u32, sources: Sources<NT>, words: u32) {
        if warp::lane_id() == 0 {
            let barrier = stage as usize;
            self.barriers.arrive_expecting(barrier, (NT * size_of::<u32>()) as u32 * words);
            unroll!(t in 0 1 2 3 below NT; {
                let (to, words) = (self.stage(stage), words as usize);
                cuda_std::bulk::copy_once(to, t * self.part, sources[t], 0, words, self.barriers, barrier);
            });
        }
    }

    /// As above, 16 bytes a lane and copy. A warp that has nothing to fill calls [`Self::skip`] in its place.
    #[cfg(not(any(not(target_arch = "nvptx64"), target_feature = "ptx80")))]
    #[inline(always)]
    pub fn fill(self, stage: u32, sources: Sources<NT>, words: u32) {
        const PIECE: usize = 4;
        let lanes = warp::WARP as usize;
        unroll!(t in 0 1 2 3 below NT; {
            let mut piece = warp::lane_id() as usize;
            while piece * PIECE < words as usize {
                let to = t * self.part + piece * PIECE;
                cuda_std::async_copy::cp_async_16(self.stage(stage), to, sources[t], piece * PIECE);
                piece += lanes;
            }
        });
        cuda_std::async_copy::cp_async_commit();
    }

    /// Keeps the count of groups where nothing is filled.
    #[inline(always)]
    pub fn skip(self) {
        #[cfg(not(any(not(target_arch = "nvptx64"), target_feature = "ptx80")))]
        cuda_std::async_copy::cp_async_commit();
    }

    /// Waits until the oldest stage has been filled; the warp's barrier must follow.
    #[inline(always)]
    pub fn wait(self, stage: Stage) {
        #[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
        self.barriers.wait(stage.index as usize, stage.parity);
        #[cfg(not(any(not(target_arch = "nvptx64"), target_feature = "ptx80")))]
        {
            let _ = stage;
            wait_groups::<DEPTH>();
        }
    }
}

/// Waits for the oldest of the groups of copies that fill a ring of `DEPTH` stages, one group a stage.
#[inline(always)]
pub fn wait_groups<const DEPTH: usize>() {
    use cuda_std::async_copy::cp_async_wait;
    match DEPTH {
        2 => cp_async_wait::<0>(),
        3 => cp_async_wait::<1>(),
        4 => cp_async_wait::<2>(),
        5 => cp_async_wait::<3>(),
        6 => cp_async_wait::<4>(),
        7 => cp_async_wait::<5>(),
        _ => cp_async_wait::<6>(),
    }
}
