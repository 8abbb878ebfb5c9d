//! A block's shared memory, with a shadow of each byte that holds its last accesses.

use std::cell::{Cell, RefCell, UnsafeCell};

use super::block::Thread;
use super::order::Write;
use super::shadow::{Shadow, Shadows};
use super::{FaultKind, MAX_SHARED};

thread_local! {
    /// Memory of blocks that are over: what it holds is as undefined as on a GPU.
    static SPARE: RefCell<Vec<Vec<u128>>> = const { RefCell::new(Vec::new()) };
}

/// A block's shared memory: dynamic from byte 0, static arrays behind it.
pub(super) struct SharedMemory {
    bytes: UnsafeCell<Vec<u128>>,
    shadow: RefCell<Shadows>,
    statics: RefCell<Vec<(&'static str, u32)>>,
    used: Cell<usize>,
    dynamic: usize,
    pub checked: bool,
}

impl SharedMemory {
    pub fn new(dynamic: usize, checked: bool) -> Self {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        Self {
            bytes: UnsafeCell::new(spare.unwrap_or_else(|| vec![0; MAX_SHARED.div_ceil(16)])),
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

    fn with_shadow(&self, addr: u32, bytes: usize, visit: impl FnMut(&mut Shadow)) {
        self.shadow.borrow_mut().visit(addr as usize, bytes, self.used.get(), visit);
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
        let now = me.now();
        self.with_shadow(addr, bytes, |s| s.reads(me, now, addr));
    }

    pub fn check_write(&self, me: &Thread, addr: u32, bytes: usize, pending_mark: u16) {
        me.step();
        self.check_aligned(me, addr, bytes);
        let now = me.now();
        self.with_shadow(addr, bytes, |s| s.writes(me, now, addr, pending_mark));
    }

    /// An atomic: not ordered against other atomics, but against plain accesses as a write is.
    pub fn atomic(&self, me: &Thread, addr: u32) {
        if !self.checked {
            return;
        }
        me.step();
        self.check_aligned(me, addr, 4);
        let now = me.now();
        self.with_shadow(addr, 4, |s| s.updates(me, now, addr));
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
    pub fn land(&self, addr: u32, bytes: usize, by: Write) {
        self.with_shadow(addr, bytes, |s| s.land(by));
    }

    pub fn clear_pending(&self, addr: u32, bytes: usize) {
        self.with_shadow(addr, bytes, |s| s.pending = 0);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let bytes = std::mem::take(self.bytes.get_mut());
        SPARE.with_borrow_mut(|spare| spare.push(bytes));
    }
}
