//! Barriers in shared memory and the bulk copies that they count.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::FaultKind;
use super::block::{State, Thread};
use super::order::{Seen, Write, copies_of};

/// A bulk copy on its way.
struct Copy {
    dst: u32,
    src: u64,
    bytes: u32,
}

/// A barrier's phase.
#[derive(Default)]
struct Phase {
    /// Arrivals of every phase, and those that this one still wants.
    arrivals: u32,
    wanted: u32,
    /// Bytes that arrivals have announced, and those that copies have brought or will bring.
    announced: u64,
    started: u64,
    parity: u32,
    copies: Vec<Copy>,
    made: Write,
    /// What those know that have arrived, and what who waits for a phase that is over learns.
    arrived: Seen,
    over: Seen,
}

/// A block's barriers, by shared address.
#[derive(Default)]
pub(super) struct BlockBarriers(RefCell<BTreeMap<u32, Phase>>);

impl BlockBarriers {
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    pub fn init(&self, me: &Thread, addr: u32, arrivals: u32) {
        me.block().shared.write(me, addr, 8);
        if arrivals == 0 {
            me.fault(FaultKind::Divergence, "makes a barrier of no arrivals".into());
        }
        let phase = Phase { arrivals, wanted: arrivals, made: Write::by(me.now()), ..Phase::default() };
        self.0.borrow_mut().insert(addr, phase);
    }

    /// What `change` makes of the barrier at `addr`.
    fn with<T>(&self, me: &Thread, addr: u32, change: impl FnOnce(&mut Phase) -> T) -> T {
        if me.block().checked {
            me.step();
        }
        let mut all = self.0.borrow_mut();
        let Some(phase) = all.get_mut(&addr) else {
            let what = format!("uses shared byte {addr} as a barrier, which nothing has initialised");
            me.fault(FaultKind::Uninitialised, what);
        };
        if me.block().checked
            && let Some(maker) = phase.made.race(me.now())
        {
            let what = format!("uses the barrier at shared byte {addr}, which thread {maker} made, with none between");
            me.fault(FaultKind::Race, what);
        }
        change(phase)
    }

    pub fn arrive(&self, me: &Thread, addr: u32, bytes: u32) {
        let arrived = self.with(me, addr, |phase| {
            phase.announced += u64::from(bytes);
            let wanted = phase.wanted.checked_sub(1);
            phase.wanted = wanted.unwrap_or(0);
            if me.block().checked {
                me.order.arrive(&mut phase.arrived, me.linear, me.block().tick());
            }
            wanted.is_some()
        });
        if !arrived {
            let what = format!("arrives at the barrier at shared byte {addr} once more than its phase has arrivals");
            me.fault(FaultKind::Divergence, what);
        }
        me.block().wake();
    }

    pub fn start(&self, me: &Thread, dst: u32, src: u64, bytes: u32, addr: u32) {
        let shared = &me.block().shared;
        if shared.checked {
            for piece in (0..bytes).step_by(16) {
                shared.check_write(me, dst + piece, 16, 1 + me.linear as u16);
            }
        }
        self.with(me, addr, |phase| {
            phase.started += u64::from(bytes);
            phase.copies.push(Copy { dst, src, bytes });
        });
        me.block().wake();
    }

    /// Ends the phase of this parity if all has arrived; whether it is over, and then what is learnt from it.
    fn over(&self, me: &Thread, addr: u32, parity: u32) -> bool {
        self.with(me, addr, |phase| {
            if phase.parity == parity && phase.wanted == 0 && phase.started == phase.announced {
                let by = Write::by_copy(copies_of(addr), me.block().tick());
                phase.over.join(&phase.arrived);
                if !phase.copies.is_empty() {
                    by.tell(&mut phase.over);
                }
                phase.copies.drain(..).for_each(|copy| land(me, copy, by));
                phase.arrived.clear();
                (phase.wanted, phase.announced, phase.started) = (phase.arrivals, 0, 0);
                phase.parity ^= 1;
                me.block().wake();
            }
            let over = phase.parity != parity;
            if over && me.block().checked {
                me.order.learn(&phase.over);
            }
            over
        })
    }

    pub fn wait(&self, me: &Thread, addr: u32, parity: u32) {
        while !self.over(me, addr, parity) {
            me.suspend(State::AtPhase);
        }
    }

    /// A copy that nobody has waited for: its destination and size.
    pub fn unfinished(&self) -> Option<(u32, u32)> {
        self.0.borrow().values().flat_map(|phase| &phase.copies).map(|copy| (copy.dst, copy.bytes)).next()
    }
}

fn land(me: &Thread, copy: Copy, by: Write) {
    let shared = &me.block().shared;
    if shared.checked {
        shared.land(copy.dst, copy.bytes as usize, by);
    }
    // SAFETY: both ranges were checked when the copy started (checked mode) or are the kernel's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(copy.src as *const u8, shared.at(copy.dst), copy.bytes as usize);
    }
}
