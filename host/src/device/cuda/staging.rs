//! Pinned memory between the files that are mapped and the GPU.
//!
//! A copy from pageable memory goes through the driver's own small buffers on one thread, and page faults of a mapped
//! file come one by one. Here several threads copy (and fault, and so read) one piece while the GPU fetches the ones
//! before. A piece may be overwritten when the event behind its copy has passed.

use std::ptr::NonNull;

use cust::sys;
use rayon::prelude::*;

use super::card::{Card, sys_call};
use crate::device::Result;

/// Copies of fewer bytes are not worth a stage.
pub(super) const STAGED_FROM: usize = 64 << 10;
/// Bytes of a piece.
const PIECE: usize = 16 << 20;
/// Pieces in flight.
const PIECES: usize = 4;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// What one thread copies at a time: large enough that the kernel reads a file ahead.
const SHARE: usize = 1 << 20;

/// A ring of pinned pieces.
pub(super) struct Staging {
    pieces: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: NonNull<u8>,
    /// Recorded behind the copy out of it.
    copied: sys::CUevent,
}

// SAFETY: pinned host memory with one owner; it is reached through `&mut` only.
unsafe impl Send for Staging {}

impl Staging {
    /// Pins the pieces; the context of `card` is current.
    pub fn new() -> Result<Self> {
        let mut staging = Self { pieces: Vec::with_capacity(PIECES), next: 0 };
        for _ in 0..PIECES {
            let (mut at, mut copied) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: `at` holds one address.
            sys_call("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut at, PIECE) })?;
            // SAFETY: `copied` holds one handle.
            sys_call("cuEventCreate", unsafe { sys::cuEventCreate(&mut copied, NO_TIMING) })?;
            if let Some(memory) = NonNull::new(at.cast::<u8>()) {
                staging.pieces.push(Piece { memory, copied });
            }
        }
        Ok(staging)
    }

    /// Queues a copy of `bytes` to device address `addr`; `bytes` may go when this returns.
    pub fn write(&mut self, card: &Card, addr: u64, bytes: &[u8]) -> Result<()> {
        for (i, from) in bytes.chunks(PIECE).enumerate() {
            let at = self.next;
            self.next = (at + 1) % self.pieces.len();
            let piece = &self.pieces[at];
            // SAFETY: a live event. One that was never recorded has passed.
            sys_call("cuEventSynchronize", unsafe { sys::cuEventSynchronize(piece.copied) })?;
            // SAFETY: the piece is `PIECE` bytes of pinned memory, initialised by this copy before anyone reads it; the
            // GPU's copy out of it has ended, and `&mut self` keeps everyone else away.
            let to = unsafe { std::slice::from_raw_parts_mut(piece.memory.as_ptr(), from.len()) };
            to.par_chunks_mut(SHARE).zip(from.par_chunks(SHARE)).for_each(|(to, from)| to.copy_from_slice(from));
            let target = addr + (i * PIECE) as u64;
            // SAFETY: `Buffer` has checked the range; the piece stays as it is until the event has passed.
            let code = unsafe { sys::cuMemcpyHtoDAsync_v2(target, to.as_ptr().cast(), to.len(), card.stream()) };
            sys_call("cuMemcpyHtoDAsync", code)?;
            // SAFETY: a live event and a live stream of one context.
            sys_call("cuEventRecord", unsafe { sys::cuEventRecord(piece.copied, card.stream()) })?;
        }
        Ok(())
    }

    /// Waits for the copies and unpins; the context is current.
    pub fn free(&mut self) {
        for piece in self.pieces.drain(..) {
            // After a fault the driver frees all when the program ends.
            // SAFETY: a live event, destroyed once; the memory is from `cuMemAllocHost`, freed once, and the copies out
            // of it have ended when the event has passed.
            unsafe {
                let _ = sys::cuEventSynchronize(piece.copied);
                let _ = sys::cuEventDestroy_v2(piece.copied);
                let _ = sys::cuMemFreeHost(piece.memory.as_ptr().cast());
            }
        }
    }
}
