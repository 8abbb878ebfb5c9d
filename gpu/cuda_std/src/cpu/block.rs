//! One block: its threads as coroutines, its barrier, and the scheduler.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::barriers::BlockBarriers;
use super::exchange::Warp;
use super::memory::{AsyncQueue, Regions};
use super::named::NumberedBarriers;
use super::order::{Now, Order, Seen};
use super::shared::SharedMemory;
use super::{Dims, Fault, FaultKind, Mode};

/// Bytes of a coroutine's stack: a kernel's frames and a panic's report.
const STACK: usize = 128 * 1024;

/// Counted steps (accesses, barriers, warp operations) after which a thread is taken to be endless.
const MAX_STEPS: u64 = 1 << 28;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Ready,
    AtBarrier,
    AtWarp,
    /// At a barrier in shared memory.
    AtPhase,
    /// At the numbered barrier.
    AtNumbered(u32),
    Done,
}

/// A thread of the block that runs now. Lives as long as its block's run.
pub(super) struct Thread {
    pub index: [u32; 3],
    pub linear: u32,
    pub state: Cell<State>,
    pub order: Order,
    pub asyncs: RefCell<AsyncQueue>,
    /// The live buffer that the last global access fell in.
    pub region: Cell<(u64, u64)>,
    steps: Cell<u64>,
    yielder: Cell<*const Yielder<(), ()>>,
    pub block: *const Block,
}

thread_local! {
    static CURRENT: Cell<*const Thread> = const { Cell::new(ptr::null()) };
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// The GPU thread that this OS thread runs now, if it runs one.
#[inline(always)]
pub(super) fn running<'a>() -> Option<&'a Thread> {
    let at = CURRENT.get();
    // SAFETY: as in `current`.
    if at.is_null() { None } else { Some(unsafe { &*at }) }
}

/// The GPU thread that this OS thread runs now.
#[inline(always)]
pub(super) fn current<'a>() -> &'a Thread {
    let at = CURRENT.get();
    assert!(!at.is_null(), "a kernel operation outside a launch");
    // SAFETY: set by the scheduler around each resume to a thread that outlives it; used only inside that resume.
    unsafe { &*at }
}

impl Thread {
    #[inline(always)]
    pub fn block(&self) -> &Block {
        // SAFETY: the block outlives its threads.
        unsafe { &*self.block }
    }

    /// This thread at this moment of its block.
    #[inline(always)]
    pub fn now(&self) -> Now<'_> {
        Now::new(self.block().clock.get(), self.linear, &self.order)
    }

    /// Gives the OS thread to the scheduler until `state` is set to ready again.
    pub fn suspend(&self, state: State) {
        self.state.set(state);
        // SAFETY: set when the coroutine started and valid while it lives.
        unsafe { (*self.yielder.get()).suspend(()) };
    }

    /// Counts one step in checked mode.
    #[inline(always)]
    pub fn step(&self) {
        let steps = self.steps.get() + 1;
        self.steps.set(steps);
        if steps > MAX_STEPS {
            self.fault(FaultKind::Endless, format!("does not end (more than {MAX_STEPS} steps)"));
        }
    }

    /// Ends the launch with a fault of this thread.
    #[cold]
    pub fn fault(&self, kind: FaultKind, what: String) -> ! {
        let block = self.block();
        let fault = Fault { kind, kernel: block.kernel, block: block.index.get(), thread: Some(self.index), what };
        resume_unwind(Box::new(fault))
    }
}

/// A worker's block, used again for each block index that the worker takes.
pub(super) struct Block {
    pub kernel: &'static str,
    pub dims: Dims,
    pub checked: bool,
    pub index: Cell<[u32; 3]>,
    pub shared: SharedMemory,
    pub regions: Arc<Regions>,
    pub warps: Vec<Warp>,
    pub barriers: BlockBarriers,
    pub numbered: NumberedBarriers,
    threads: RefCell<Rc<[Thread]>>,
    arrived: Cell<u32>,
    /// Moves on whenever somebody lets go of what was done.
    clock: Cell<u32>,
    seed: u64,
}

impl Block {
    pub fn new(kernel: &'static str, dims: Dims, mode: Mode, regions: Arc<Regions>) -> Self {
        let count = dims.block.iter().product::<u32>();
        let (checked, seed) = match mode {
            Mode::Checked { seed } => (true, seed),
            Mode::Fast => (false, 0),
        };
        Self {
            kernel,
            dims,
            checked,
            index: Cell::new([0; 3]),
            shared: SharedMemory::new(dims.shared as usize, checked),
            regions,
            warps: (0..count / 32).map(|_| Warp::default()).collect(),
            barriers: BlockBarriers::default(),
            numbered: NumberedBarriers::default(),
            threads: RefCell::new(Rc::new([])),
            arrived: Cell::new(0),
            clock: Cell::new(1),
            seed,
        }
    }

    /// The block's barrier, for the current thread.
    pub fn sync_threads(&self, me: &Thread) {
        let threads = self.threads.borrow().clone();
        if self.checked {
            me.step();
        }
        let arrived = self.arrived.get() + 1;
        if arrived == threads.len() as u32 {
            self.arrived.set(0);
            let time = self.tick();
            threads.iter().for_each(|t| t.order.meet(time));
            self.release(State::AtBarrier);
        } else {
            self.arrived.set(arrived);
            me.suspend(State::AtBarrier);
        }
    }

    /// Now, which will then be over.
    pub fn tick(&self) -> u32 {
        let now = self.clock.get();
        self.clock.set(now + 1);
        now
    }

    /// Orders what the lanes of a warp do, all of which are at its barrier.
    pub fn meet_warp(&self, warp: usize) {
        if self.checked {
            let (mut seen, time) = (Seen::default(), self.tick());
            self.tell_of_warp(warp, &mut seen);
            self.threads.borrow()[warp * 32..][..32].iter().for_each(|t| t.order.meet_warp(time, &seen));
        }
    }

    /// A read of shared memory by a lane of a warp, which another makes for it.
    pub fn read_as(&self, warp: usize, lane: usize, addr: u32, bytes: usize) {
        if self.checked {
            self.shared.read(&self.threads.borrow()[warp * 32 + lane], addr, bytes);
        }
    }

    /// Adds what the lanes of a warp know to `seen`.
    pub fn tell_of_warp(&self, warp: usize, seen: &mut Seen) {
        self.threads.borrow()[warp * 32..][..32].iter().for_each(|t| t.order.tell(seen));
    }

    /// Makes threads that wait at barriers in shared memory look again.
    pub fn wake(&self) {
        self.release(State::AtPhase);
    }

    /// Makes threads ready that are at one place.
    pub fn release(&self, from: State) {
        let threads = self.threads.borrow();
        threads.iter().filter(|t| t.state.get() == from).for_each(|t| t.state.set(State::Ready));
    }

    /// Makes the lanes of a warp ready again after an exchange.
    pub fn release_warp(&self, warp: usize) {
        let threads = self.threads.borrow();
        let lanes = &threads[warp * 32..warp * 32 + 32];
        lanes.iter().filter(|t| t.state.get() == State::AtWarp).for_each(|t| t.state.set(State::Ready));
    }

    /// Runs the block at `index` of the grid to its end.
    pub fn run(&mut self, index: [u32; 3], entry: &dyn Fn()) -> Result<(), Fault> {
        self.index.set(index);
        self.arrived.set(0);
        self.shared.reset();
        self.clock.set(1);
        self.barriers.clear();
        self.numbered.clear();
        self.warps.iter_mut().for_each(Warp::reset);
        let [bx, by, _] = self.dims.block;
        let count = self.dims.block.iter().product::<u32>();
        let this: *const Block = self;
        let threads: Rc<[Thread]> = (0..count)
            .map(|linear| Thread {
                index: [linear % bx, linear / bx % by, linear / (bx * by)],
                linear,
                state: Cell::new(State::Ready),
                order: Order::default(),
                asyncs: RefCell::default(),
                region: Cell::new((0, 0)),
                steps: Cell::new(0),
                yielder: Cell::new(ptr::null()),
                block: this,
            })
            .collect();
        *self.threads.borrow_mut() = threads.clone();
        let mut coroutines: Vec<_> = threads.iter().map(|t| spawn(t, entry)).collect();
        let result = self.schedule(&threads, &mut coroutines);
        CURRENT.set(ptr::null());
        if let Err(payload) = &result {
            // The other threads stand somewhere in the kernel: unwind them before the block goes.
            let _ = payload;
            for (thread, coroutine) in threads.iter().zip(&mut coroutines) {
                CURRENT.set(thread);
                coroutine.force_unwind();
            }
            CURRENT.set(ptr::null());
        }
        STACKS.with_borrow_mut(|pool| pool.extend(coroutines.into_iter().map(Coroutine::into_stack)));
        result
    }

    /// Resumes ready threads, warp by warp, until all are done.
    fn schedule(&self, threads: &[Thread], coroutines: &mut [Co<'_>]) -> Result<(), Fault> {
        let mut random = Random::new(self.seed, self.index.get());
        let mut warps: Vec<usize> = (0..self.warps.len()).collect();
        let mut lanes: Vec<usize> = (0..32).collect();
        loop {
            let mut progress = false;
            if self.checked {
                random.shuffle(&mut warps);
            }
            for &warp in &warps {
                loop {
                    let mut ran = false;
                    if self.checked {
                        random.shuffle(&mut lanes);
                    }
                    for &lane in &lanes {
                        let n = warp * 32 + lane;
                        if threads[n].state.get() == State::Ready {
                            ran = true;
                            CURRENT.set(&threads[n]);
                            let result = catch_unwind(AssertUnwindSafe(|| coroutines[n].resume(())));
                            match result {
                                Ok(CoroutineResult::Yield(())) => {}
                                Ok(CoroutineResult::Return(())) => threads[n].state.set(State::Done),
                                Err(payload) => return Err(self.fault_of(payload, &threads[n])),
                            }
                        }
                    }
                    if !ran {
                        break;
                    }
                    progress = true;
                }
            }
            if threads.iter().all(|t| t.state.get() == State::Done) {
                return self.unfinished().map_or(Ok(()), Err);
            }
            if !progress {
                return Err(self.divergence(threads));
            }
        }
    }

    /// A panic of the kernel's own code becomes a fault too.
    fn fault_of(&self, payload: Box<dyn Any + Send>, thread: &Thread) -> Fault {
        let text = match payload.downcast::<Fault>() {
            Ok(fault) => return *fault,
            Err(other) => match other.downcast::<String>() {
                Ok(text) => *text,
                Err(other) => other.downcast::<&str>().map_or("panicked".into(), |text| text.to_string()),
            },
        };
        Fault {
            kind: FaultKind::Trap,
            kernel: self.kernel,
            block: self.index.get(),
            thread: Some(thread.index),
            what: text,
        }
    }

    /// A copy that would land after the block has gone; a barrier that not all have come to.
    fn unfinished(&self) -> Option<Fault> {
        let (kind, what) = if let Some((dst, bytes)) = self.barriers.unfinished() {
            let what = format!("ends while a bulk copy of {bytes} bytes to shared byte {dst} is on its way");
            (FaultKind::AsyncPending, what)
        } else {
            let id = self.numbered.unfinished()?;
            let (come, threads) = self.numbered.progress(id);
            (FaultKind::Divergence, format!("ends when {come} threads have come to barrier {id} of {threads}"))
        };
        Some(Fault { kind, kernel: self.kernel, block: self.index.get(), thread: None, what })
    }

    /// Nobody can run: some threads wait for others that are elsewhere.
    fn divergence(&self, threads: &[Thread]) -> Fault {
        let place = |t: &Thread| match t.state.get() {
            State::AtBarrier => "at the block's barrier".to_string(),
            State::AtWarp => "in a warp operation".to_string(),
            State::AtPhase => "at a barrier in shared memory".to_string(),
            State::AtNumbered(id) => {
                let (come, threads) = self.numbered.progress(id);
                format!("at barrier {id}, to which {come} of {threads} threads have come")
            }
            State::Done => "at its end".to_string(),
            State::Ready => "ready".to_string(),
        };
        let waiting = |t: &&Thread| !matches!(t.state.get(), State::Ready | State::Done);
        // A lane that waits for its warp says more than the barrier that the others wait at.
        let first = threads.iter().find(|t| t.state.get() == State::AtWarp).or(threads.iter().find(waiting));
        let (thread, what) = match first {
            None => (None, "no thread can run".to_string()),
            Some(t) => {
                let peers = match t.state.get() {
                    State::AtWarp => &threads[t.linear as usize / 32 * 32..t.linear as usize / 32 * 32 + 32],
                    _ => threads,
                };
                let absent = peers.iter().find(|p| p.state.get() != t.state.get());
                let other = absent.map_or("every other thread waits too".to_string(), |p| {
                    let [x, y, z] = p.index;
                    format!("thread ({x}, {y}, {z}) is {}", place(p))
                });
                (Some(t.index), format!("waits {}, but {other}", place(t)))
            }
        };
        Fault { kind: FaultKind::Divergence, kernel: self.kernel, block: self.index.get(), thread, what }
    }
}

type Co<'a> = Coroutine<(), (), (), DefaultStack>;

fn spawn<'a>(thread: &Thread, entry: &'a dyn Fn()) -> Co<'a> {
    let stack = STACKS.with_borrow_mut(Vec::pop);
    let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK).expect("memory for a coroutine's stack"));
    let thread: *const Thread = thread;
    // SAFETY: only the lifetime changes; the coroutine is finished or unwound before `run` returns, and `entry`
    // outlives `run`.
    let entry: &'static dyn Fn() = unsafe { std::mem::transmute::<&'a dyn Fn(), &'static dyn Fn()>(entry) };
    Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
        // SAFETY: the thread lives in `run`, as long as the coroutine.
        unsafe { (*thread).yielder.set(yielder) };
        entry();
    })
}

/// A small generator (xorshift64*) for schedules: reproducible, and no more than that.
struct Random(u64);

impl Random {
    fn new(seed: u64, index: [u32; 3]) -> Self {
        let mut s = seed ^ 0x9E37_79B9_7F4A_7C15;
        for i in index {
            s = (s ^ u64::from(i)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            s ^= s >> 29;
        }
        Self(s | 1)
    }

    fn shuffle(&mut self, items: &mut [usize]) {
        for i in (1..items.len()).rev() {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let j = (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % (i + 1);
            items.swap(i, j);
        }
    }
}
