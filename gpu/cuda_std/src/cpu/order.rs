//! What a thread has seen of what others did, and whether an access to a shared byte comes after the ones before it.
//!
//! A block has a clock, which moves on whenever somebody lets go of what was done: the block or a warp at its barrier,
//! a thread or warp that arrives elsewhere. Who waits there has then seen all that was done by those who arrived, up to
//! their arrival, and all that they had seen. An access that has not been seen races with a later one of another
//! thread, if one of the two writes.
//!
//! Exact for a byte's last writer, and for its reader where that was one thread. Of several readers the last is known,
//! and which warps the others are in: a race with one of these is found if nothing of its warp has been seen since the
//! first of them read.

use std::cell::{Cell, RefCell};

use super::MAX_SHARED;

/// Threads are actors by their number; then come whole warps, then copies, by the barrier that counts them.
const WARPS: u16 = 1024;
const COPIES: u16 = WARPS + 32;
/// Bytes of a barrier.
const BARRIER: usize = 8;

const _: () = assert!(COPIES as usize + MAX_SHARED / BARRIER < u16::MAX as usize);

/// The actor that all lanes of a warp are.
pub(super) fn whole_warp(warp: usize) -> u16 {
    WARPS + warp as u16
}

/// The actor that the copies are which the barrier at a shared address counts.
pub(super) fn copies_of(barrier: u32) -> u16 {
    COPIES + (barrier as usize / BARRIER) as u16
}

pub(super) fn is_copy(actor: u16) -> bool {
    actor >= COPIES
}

/// Up to which time the doings of some actors have been seen.
#[derive(Clone, Default)]
pub(super) struct Seen(Vec<(u16, u32)>);

impl Seen {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn note(&mut self, actor: u16, time: u32) {
        match self.0.iter_mut().find(|known| known.0 == actor) {
            Some(known) => known.1 = known.1.max(time),
            None => self.0.push((actor, time)),
        }
    }

    pub fn join(&mut self, other: &Self) {
        if self.0 == other.0 {
            return;
        }
        other.0.iter().for_each(|&(actor, time)| self.note(actor, time));
    }

    /// The latest time of the actors that `of` names; 0 where there is none.
    fn latest(&self, of: impl Fn(u16) -> bool) -> u32 {
        self.0.iter().filter(|known| of(known.0)).map(|known| known.1).max().unwrap_or(0)
    }
}

/// A thread's knowledge.
#[derive(Default)]
pub(super) struct Order {
    /// All that was done up to this time: the last barrier of the block.
    floor: Cell<u32>,
    /// The same of the thread's own warp.
    warp_floor: Cell<u32>,
    seen: RefCell<Seen>,
}

impl Order {
    /// The block has met.
    pub fn meet(&self, time: u32) {
        self.floor.set(time);
        self.seen.borrow_mut().clear();
    }

    /// The warp has met; together its lanes know `seen`.
    pub fn meet_warp(&self, time: u32, seen: &Seen) {
        self.warp_floor.set(time);
        if !seen.is_empty() {
            self.seen.borrow_mut().clone_from(seen);
        }
    }

    /// Has waited for something that those who arrived have left this knowledge at.
    pub fn learn(&self, seen: &Seen) {
        self.seen.borrow_mut().join(seen);
    }

    /// Adds what this thread knows to `seen`.
    pub fn tell(&self, seen: &mut Seen) {
        seen.join(&self.seen.borrow());
    }

    /// As [`Self::tell`], for a `thread` that arrives somewhere at `time`: with what it and its warp have done.
    pub fn arrive(&self, seen: &mut Seen, thread: u32, time: u32) {
        self.tell(seen);
        seen.note(whole_warp(thread as usize / 32), self.warp_floor.get());
        seen.note(thread as u16, time);
    }
}

/// A thread at a moment.
#[derive(Clone, Copy)]
pub(super) struct Now<'a> {
    time: u32,
    thread: u16,
    order: &'a Order,
    floor: u32,
}

impl<'a> Now<'a> {
    pub fn new(time: u32, thread: u32, order: &'a Order) -> Self {
        Self { time, thread: thread as u16, order, floor: order.floor.get() }
    }

    fn warp(self) -> u16 {
        self.thread / 32
    }

    /// Whether what `actor` did at `time` has been seen.
    fn saw(self, actor: u16, time: u32) -> bool {
        let (thread, warp) = (actor < WARPS, actor / 32);
        time <= self.floor
            || actor == self.thread
            || (thread && warp == self.warp() && time <= self.order.warp_floor.get())
            || time <= self.order.seen.borrow().latest(|a| a == actor || (thread && a == WARPS + warp))
    }

    /// Up to when all lanes of a warp have been seen.
    fn all_of(self, warp: u16) -> u32 {
        let own = if warp == self.warp() { self.order.warp_floor.get() } else { 0 };
        own.max(self.order.seen.borrow().latest(|actor| actor == WARPS + warp)).max(self.floor)
    }

    /// Up to when some lane of a warp, other than this thread, has been seen.
    fn any_of(self, warp: u16) -> u32 {
        let lane = |actor: u16| actor < WARPS && actor / 32 == warp && actor != self.thread;
        self.all_of(warp).max(self.order.seen.borrow().latest(lane))
    }
}

/// The last write of a shared byte. Time 0: nobody's.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Write {
    time: u32,
    actor: u16,
}

impl Write {
    pub fn by(now: Now) -> Self {
        Self { time: now.time, actor: now.thread }
    }

    pub fn by_copy(actor: u16, time: u32) -> Self {
        Self { time, actor }
    }

    pub fn is_none(self) -> bool {
        self.time == 0
    }

    pub fn tell(self, seen: &mut Seen) {
        seen.note(self.actor, self.time);
    }

    /// Who wrote, if that has not been seen.
    #[inline(always)]
    pub fn race(self, now: Now) -> Option<u16> {
        (self.time > now.floor && !now.saw(self.actor, self.time)).then_some(self.actor)
    }
}

/// Reads of a shared byte, or atomics, that a later write must come after.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Accesses {
    first: u32,
    last: u32,
    /// Who came last; others before it are known by their warps.
    latest: u16,
    several: bool,
    warps: u32,
}

/// Stands for several threads.
pub(super) const MANY: u16 = u16::MAX;

impl Accesses {
    fn warps(self) -> impl Iterator<Item = u16> {
        (0..32).filter(move |warp| self.warps >> warp & 1 != 0)
    }

    /// Whose accesses certainly have not been seen.
    #[inline(always)]
    pub fn race(self, now: Now) -> Option<u16> {
        if self.last <= now.floor {
            return None;
        }
        self.race_since_barrier(now)
    }

    fn race_since_barrier(self, now: Now) -> Option<u16> {
        if self.latest != now.thread && !now.saw(self.latest, self.last) {
            return Some(if self.several { MANY } else { self.latest });
        }
        // In its own warp it may itself have been one of two.
        let own = 1 << now.warp();
        let others = |&warp: &u16| self.warps == own || warp != now.warp();
        let unseen = self.several && self.warps().filter(others).any(|warp| now.any_of(warp) < self.first);
        unseen.then_some(MANY)
    }

    fn all_seen(self, now: Now) -> bool {
        self.last <= now.floor
            || now.saw(self.latest, self.last)
                && (!self.several || self.warps().all(|warp| self.last <= now.all_of(warp)))
    }

    /// Keeps what a later access can race with.
    pub fn add(&mut self, now: Now) {
        let (first, warps) = (self.first, self.warps);
        let seen = self.all_seen(now);
        *self = Self { first: now.time, last: now.time, latest: now.thread, several: false, warps: 1 << now.warp() };
        if !seen {
            (self.first, self.several) = (first, true);
            self.warps |= warps;
        }
    }
}
