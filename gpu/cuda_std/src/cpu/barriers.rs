//! Barriers in shared memory and the bulk copies that they count.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::FaultKind;
use super::block::{State, Thread};

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
        let phase = Phase { arrivals, wanted: arrivals, ..Phase::default() };
        self.0.borrow_mut().insert(addr, phase);
    }

    /// What `change` makes of the barrier at `addr`.
    fn with<T>(&self, me: &Thread, addr: u32, change: impl FnOnce(&mut Phase) -> T) -> T {
        if me.block().checked {
            me.step();
        }
        match self.0.borrow_mut().get_mut(&addr) {
            Some(phase) => change(phase),
            None => {
                let what = format!("uses shared byte {addr} as a barrier, which nothing has initialised");
                me.fault(FaultKind::Uninitialised, what)
            }
        }
    }

    pub fn arrive(&self, me: &Thread, addr: u32, bytes: u32) {
        let arrived = self.with(me, addr, |phase| {
            phase.announced += u64::from(bytes);
            let wanted = phase.wanted.checked_sub(1);
            phase.wanted = wanted.unwrap_or(0);
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

    /// Ends the phase of this parity if all has arrived; whether it is over.
    fn over(&self, me: &Thread, addr: u32, parity: u32) -> bool {
        self.with(me, addr, |phase| {
            if phase.parity == parity && phase.wanted == 0 && phase.started == phase.announced {
                phase.copies.drain(..).for_each(|copy| land(me, copy));
                let (arrivals, parity) = (phase.arrivals, phase.parity ^ 1);
                *phase = Phase { arrivals, wanted: arrivals, parity, ..Phase::default() };
                me.block().wake();
            }
            phase.parity != parity
        })
    }

    pub fn wait(&self, me: &Thread, addr: u32, parity: u32) {
        while !self.over(me, addr, parity) {
            me.suspend(State::AtPhase);
        }
        // What several threads arrive at orders as the block's barrier does, for who has waited.
        if self.with(me, addr, |phase| phase.arrivals > 1) {
            me.epoch.set(me.epoch.get() + 1);
        }
    }

    /// A copy that nobody has waited for: its destination and size.
    pub fn unfinished(&self) -> Option<(u32, u32)> {
        self.0.borrow().values().flat_map(|phase| &phase.copies).map(|copy| (copy.dst, copy.bytes)).next()
    }
}

fn land(me: &Thread, copy: Copy) {
    let shared = &me.block().shared;
    if shared.checked {
        shared.land(copy.dst, copy.bytes as usize);
    }
    // SAFETY: both ranges were checked when the copy started (checked mode) or are the kernel's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(copy.src as *const u8, shared.at(copy.dst), copy.bytes as usize);
    }
}
