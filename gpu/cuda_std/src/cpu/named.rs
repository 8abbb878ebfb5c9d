//! The block's numbered barriers, at which some of its warps meet.

use std::cell::RefCell;

use super::FaultKind;
use super::block::{State, Thread};
use super::exchange::{Op, WORDS, exchange};
use super::order::{Seen, whole_warp};

/// Numbers that there are; 0 is the block's own.
const COUNT: u32 = 16;
const WARP: u32 = 32;

#[derive(Default)]
struct Meeting {
    /// Threads that it is of, as the first to come has said.
    threads: u32,
    /// Warps that have come, a bit each.
    warps: u32,
    /// Meetings that are over.
    over: u32,
    /// What those know that have come, and what who has waited learns.
    arrived: Seen,
    left: Seen,
}

#[derive(Default)]
pub(super) struct NumberedBarriers([RefCell<Meeting>; COUNT as usize]);

impl NumberedBarriers {
    pub fn clear(&self) {
        self.0.iter().for_each(|meeting| *meeting.borrow_mut() = Meeting::default());
    }

    /// The warp comes to barrier `id`, at which `threads` threads meet; if it `waits`, until they all have.
    pub fn reach(&self, me: &Thread, id: u32, threads: u32, waits: bool) {
        if !(1..COUNT).contains(&id) {
            let what = format!("barrier {id}: a block has 1 to {} beside its own", COUNT - 1);
            me.fault(FaultKind::Divergence, what);
        }
        let most = me.block().dims.block.iter().product::<u32>();
        if threads == 0 || !threads.is_multiple_of(WARP) || threads > most {
            let what = format!("barrier {id} of {threads} threads: whole warps of the block's {most} meet at one");
            me.fault(FaultKind::Divergence, what);
        }
        let meeting = &self.0[id as usize];
        let last = |lanes: &mut [[u32; WORDS]; 32]| lanes[0][0] = self.come(me, id, threads);
        let before = exchange(me, Op::Numbered { id, threads, waits }, &[], last, |lanes| lanes[0][0]);
        if !waits {
            return;
        }
        while meeting.borrow().over == before {
            me.suspend(State::AtNumbered(id));
        }
        if me.block().checked {
            me.order.learn(&meeting.borrow().left);
        }
    }

    /// The last lane of a warp has come; how many meetings were over before.
    fn come(&self, me: &Thread, id: u32, threads: u32) -> u32 {
        let block = me.block();
        let mut meeting = self.0[id as usize].borrow_mut();
        let before = meeting.over;
        let warp = me.linear / WARP;
        if meeting.warps != 0 && meeting.threads != threads {
            let what =
                format!("comes to barrier {id} of {threads} threads, which others say is of {}", meeting.threads);
            me.fault(FaultKind::Divergence, what);
        }
        if meeting.warps >> warp & 1 != 0 {
            me.fault(FaultKind::Divergence, format!("comes to barrier {id} twice before {threads} threads have met"));
        }
        meeting.threads = threads;
        meeting.warps |= 1 << warp;
        if block.checked {
            block.tell_of_warp(warp as usize, &mut meeting.arrived);
            meeting.arrived.note(whole_warp(warp as usize), block.tick());
        }
        if meeting.warps.count_ones() * WARP == threads {
            let arrived = std::mem::take(&mut meeting.arrived);
            meeting.left.join(&arrived);
            meeting.warps = 0;
            meeting.over += 1;
            block.release(State::AtNumbered(id));
        }
        before
    }

    /// Threads that have come to `id`, and those that are to meet there.
    pub fn progress(&self, id: u32) -> (u32, u32) {
        let meeting = self.0[id as usize].borrow();
        (meeting.warps.count_ones() * WARP, meeting.threads)
    }

    /// A barrier that some have come to and others not.
    pub fn unfinished(&self) -> Option<u32> {
        (1..COUNT).find(|&id| self.progress(id).0 != 0)
    }
}
