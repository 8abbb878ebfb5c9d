//! A block's shared memory, with a shadow of each byte that holds its last accesses.

use std::cell::{Cell, RefCell, UnsafeCell};

use super::block::Thread;
use super::{FaultKind, MAX_SHARED};

/// Stands for several threads or warps.
const MANY: u16 = u16::MAX;

/// Stands for an access that a barrier in shared memory has ordered: before every epoch that a thread can be in.
const COUNTED: u32 = u32::MAX;

/// Who touched a shared byte, and after how many barriers of the block and of the warp. Epoch 0: nobody.
#[derive(Clone, Copy, Default)]
struct Access {
    epoch: u32,
    warp_epoch: u32,
    thread: u16,
    warp: u16,
}

impl Access {
    fn of(me: &Thread) -> Self {
        let (thread, warp) = (me.linear as u16, (me.linear / 32) as u16);
        Self { epoch: me.epoch.get(), warp_epoch: me.warp_epoch.get(), thread, warp }
    }

    /// A barrier of the block or of the warp that both are in lies between this and `later`.
    fn before(self, later: Self) -> bool {
        self.epoch != later.epoch || (self.warp == later.warp && self.warp_epoch < later.warp_epoch)
    }

    fn races(self, later: Self) -> bool {
        self.thread != later.thread && !self.before(later)
    }

    /// Keeps what a later access can race with: all since the last barrier.
    fn add(&mut self, me: Self) {
        if self.before(me) {
            return *self = me;
        }
        if self.thread != me.thread {
            self.thread = MANY;
        }
        if self.warp != me.warp {
            self.warp = MANY;
        }
        self.warp_epoch = self.warp_epoch.max(me.warp_epoch);
    }
}

/// The last accesses to one shared byte.
#[derive(Clone, Copy, Default)]
struct Shadow {
    write: Access,
    read: Access,
    atomic: Access,
    /// 1 + the thread whose asynchronous copy to this byte is on its way.
    pending: u16,
}

/// A block's shared memory: dynamic from byte 0, static arrays behind it.
pub(super) struct SharedMemory {
    bytes: UnsafeCell<Vec<u128>>,
    shadow: RefCell<Vec<Shadow>>,
    statics: RefCell<Vec<(&'static str, u32)>>,
    used: Cell<usize>,
    dynamic: usize,
    pub checked: bool,
}

impl SharedMemory {
    pub fn new(dynamic: usize, checked: bool) -> Self {
        Self {
            bytes: UnsafeCell::new(vec![0; MAX_SHARED.div_ceil(16)]),
            shadow: RefCell::default(),
            statics: RefCell::default(),
            used: Cell::new(dynamic),
            dynamic,
            checked,
        }
    }

    /// Before a block: in checked mode all bytes become 0xFF (NaN in every float type) and count as never written.
    pub fn reset(&mut self) {
        if self.checked {
            let words = self.used.get().div_ceil(16);
            self.bytes.get_mut()[..words].fill(u128::MAX);
            self.shadow.get_mut().clear();
        }
        self.used.set(self.dynamic);
        self.statics.get_mut().clear();
    }

    /// Address of the static array `name`.
    pub fn fixed(&self, me: &Thread, name: &'static str, bytes: usize) -> u32 {
        let mut table = self.statics.borrow_mut();
        if let Some(&(_, at)) = table.iter().find(|(n, _)| *n == name) {
            return at;
        }
        let at = self.used.get().next_multiple_of(16);
        if at + bytes > MAX_SHARED {
            let what = format!("static shared array `{name}` ends at byte {}; {MAX_SHARED} are possible", at + bytes);
            me.fault(FaultKind::OutOfBounds, what);
        }
        self.used.set(at + bytes);
        table.push((name, at as u32));
        at as u32
    }

    /// Host address of a shared address.
    #[inline(always)]
    pub fn at(&self, addr: u32) -> *mut u8 {
        // SAFETY: views hold addresses below MAX_SHARED; in fast mode a wild index is the kernel's fault as on a GPU.
        unsafe { (*self.bytes.get()).as_mut_ptr().cast::<u8>().add(addr as usize) }
    }

    fn with_shadow(&self, addr: u32, bytes: usize, mut visit: impl FnMut(&mut Shadow)) {
        let mut shadow = self.shadow.borrow_mut();
        let end = addr as usize + bytes;
        if shadow.len() < end {
            shadow.resize(end.max(self.used.get()), Shadow::default());
        }
        shadow[addr as usize..end].iter_mut().for_each(&mut visit);
    }

    /// A read by `me` of `bytes` bytes: initialised, landed, and ordered after the last write.
    #[inline(always)]
    pub fn read(&self, me: &Thread, addr: u32, bytes: usize) {
        if self.checked {
            self.check_read(me, addr, bytes);
        }
    }

    /// A write by `me`: nothing on its way, and ordered after the last reads and the last write.
    #[inline(always)]
    pub fn write(&self, me: &Thread, addr: u32, bytes: usize) {
        if self.checked {
            self.check_write(me, addr, bytes, 0);
        }
    }

    fn check_read(&self, me: &Thread, addr: u32, bytes: usize) {
        me.step();
        self.check_aligned(me, addr, bytes);
        let access = Access::of(me);
        self.with_shadow(addr, bytes, |s| {
            s.written(me, addr, "reads");
            s.not_racing(me, access, addr, "reads", [WRITE, ATOMIC]);
            s.read.add(access);
        });
    }

    pub fn check_write(&self, me: &Thread, addr: u32, bytes: usize, pending_mark: u16) {
        me.step();
        self.check_aligned(me, addr, bytes);
        let access = Access::of(me);
        self.with_shadow(addr, bytes, |s| {
            s.landed(me, addr);
            s.not_racing(me, access, addr, "writes", [WRITE, READ, ATOMIC]);
            (s.write, s.pending) = (access, pending_mark);
        });
    }

    /// An atomic: not ordered against other atomics, but against plain accesses as a write is.
    pub fn atomic(&self, me: &Thread, addr: u32) {
        if !self.checked {
            return;
        }
        me.step();
        self.check_aligned(me, addr, 4);
        let access = Access::of(me);
        self.with_shadow(addr, 4, |s| {
            s.written(me, addr, "updates");
            s.not_racing(me, access, addr, "updates", [WRITE, READ]);
            s.atomic.add(access);
        });
    }

    /// Rows of `ldmatrix` are aligned to their 16 bytes.
    pub fn check_row(&self, me: &Thread, addr: u32) {
        if self.checked {
            self.check_aligned(me, addr, 16);
        }
    }

    fn check_aligned(&self, me: &Thread, addr: u32, bytes: usize) {
        if !(addr as usize).is_multiple_of(bytes) {
            me.fault(FaultKind::OutOfBounds, format!("shared access of {bytes} bytes at byte {addr} is not aligned"));
        }
    }

    /// Bytes of a bulk copy that a barrier has counted: whoever has waited there may touch them.
    pub fn land(&self, addr: u32, bytes: usize) {
        let counted = Access { epoch: COUNTED, ..Access::default() };
        self.with_shadow(addr, bytes, |s| (s.write, s.pending) = (counted, 0));
    }

    pub fn clear_pending(&self, addr: u32, bytes: usize) {
        self.with_shadow(addr, bytes, |s| s.pending = 0);
    }
}

/// The kinds of an access, with the words for a race.
type Kind = (fn(&Shadow) -> Access, &'static str);
const WRITE: Kind = (|s| s.write, "wrote");
const READ: Kind = (|s| s.read, "read");
const ATOMIC: Kind = (|s| s.atomic, "updated");

impl Shadow {
    /// Written, and no copy on its way.
    fn written(&self, me: &Thread, addr: u32, does: &str) {
        self.landed(me, addr);
        if self.write.epoch == 0 {
            me.fault(FaultKind::Uninitialised, format!("{does} shared byte {addr}, which nothing has written"));
        }
    }

    #[inline(always)]
    fn landed(&self, me: &Thread, addr: u32) {
        if self.pending != 0 {
            pending(me, addr, self.pending - 1);
        }
    }

    #[inline(always)]
    fn not_racing<const N: usize>(&self, me: &Thread, access: Access, addr: u32, does: &str, kinds: [Kind; N]) {
        for (last, did) in kinds {
            if last(self).races(access) {
                race(me, addr, does, did, last(self).thread);
            }
        }
    }
}

#[cold]
fn pending(me: &Thread, addr: u32, owner: u16) -> ! {
    let what =
        format!("touches shared byte {addr} while thread {owner}'s asynchronous copy to it has not been waited for");
    me.fault(FaultKind::AsyncPending, what)
}

#[cold]
fn race(me: &Thread, addr: u32, does: &str, did: &str, other: u16) -> ! {
    let who = if other == MANY { "several threads".to_string() } else { format!("thread {other}") };
    me.fault(FaultKind::Race, format!("{does} shared byte {addr}, which {who} {did} with no barrier between"))
}
