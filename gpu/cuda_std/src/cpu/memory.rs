//! Memory of the CPU device: live global buffers, checks of views, asynchronous copies.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use super::FaultKind;
use super::block::{Thread, current, running};

/// Live buffers by start address: (start, end), sorted.
pub(super) type Regions = Vec<(u64, u64)>;

static BUFFERS: RwLock<BTreeMap<u64, u64>> = RwLock::new(BTreeMap::new());

/// Makes a buffer known to the checks. The CPU device calls it for each allocation.
pub fn register(addr: u64, bytes: usize) {
    BUFFERS.write().unwrap_or_else(|e| e.into_inner()).insert(addr, addr + bytes as u64);
}

/// Forgets a buffer.
pub fn unregister(addr: u64) {
    BUFFERS.write().unwrap_or_else(|e| e.into_inner()).remove(&addr);
}

pub(super) fn regions() -> Arc<Regions> {
    Arc::new(BUFFERS.read().unwrap_or_else(|e| e.into_inner()).iter().map(|(&a, &b)| (a, b)).collect())
}

/// Checks a global access: `elems` elements from `i` on of a view of `len`, `bytes` bytes at `addr`.
#[inline(always)]
pub(crate) fn check_index(i: usize, elems: usize, len: u64, addr: u64, bytes: usize) {
    let me = current();
    if me.block().checked {
        check_global(me, i, elems, len, addr, bytes);
    }
}

/// As [`check_index`], of a bulk copy: any multiple of 16 bytes, 16-byte aligned.
pub(crate) fn check_bulk(i: usize, elems: usize, len: u64, addr: u64, bytes: usize) {
    const ALIGN: usize = 16;
    let me = current();
    if !me.block().checked {
        return;
    }
    if bytes == 0 || !bytes.is_multiple_of(ALIGN) || !addr.is_multiple_of(ALIGN as u64) {
        let what = format!("bulk copy of {bytes} bytes from {addr:#x}: both must be multiples of {ALIGN}");
        me.fault(FaultKind::OutOfBounds, what);
    }
    let part = elems * ALIGN / bytes;
    for piece in 0..bytes / ALIGN {
        check_global(me, i + piece * part, part, len, addr + (piece * ALIGN) as u64, ALIGN);
    }
}

fn check_global(me: &Thread, i: usize, elems: usize, len: u64, addr: u64, bytes: usize) {
    me.step();
    if i.checked_add(elems).is_none_or(|end| end as u64 > len) {
        me.fault(
            FaultKind::OutOfBounds,
            format!("global access to elements {i}..{} of a view of {len}", i.saturating_add(elems)),
        );
    }
    if !addr.is_multiple_of(bytes as u64) {
        me.fault(FaultKind::OutOfBounds, format!("global access of {bytes} bytes at {addr:#x} is not aligned"));
    }
    let end = addr.saturating_add(bytes as u64);
    let (from, to) = me.region.get();
    if addr < from || end > to {
        let regions = &me.block().regions;
        let next = regions.partition_point(|r| r.0 <= addr);
        match next.checked_sub(1).map(|n| regions[n]) {
            Some(r) if end <= r.1 => me.region.set(r),
            _ => me.fault(
                FaultKind::OutOfBounds,
                format!("global access of {bytes} bytes at {addr:#x} lies in no live buffer"),
            ),
        }
    }
}

/// Checks that a sub-view lies inside its view. Launchers cut views too, outside any launch: there it is a panic.
#[inline(always)]
pub(crate) fn check_slice(start: usize, part: usize, len: u64) {
    let holds = start.checked_add(part).is_some_and(|end| end as u64 <= len);
    let what = || format!("sub-view {start}..{} of a view of {len}", start.wrapping_add(part));
    match running() {
        Some(me) if me.block().checked && !holds => me.fault(FaultKind::OutOfBounds, what()),
        Some(_) => {}
        None => assert!(holds, "{}", what()),
    }
}

/// Checks a shared access against its array.
#[inline(always)]
pub(crate) fn check_shared_index(i: usize, elems: usize, len: u32, size: usize) {
    let me = current();
    if me.block().checked && i.checked_add(elems).is_none_or(|end| end > len as usize) {
        let end = i.saturating_add(elems);
        let what = format!("shared access to elements {i}..{end} of an array of {len} ({size} bytes each)");
        me.fault(FaultKind::OutOfBounds, what);
    }
}

/// Checks that a dynamic shared array lies inside what the launch asked for.
pub(crate) fn check_dynamic_shared(offset: u32, bytes: usize, align: usize) {
    let me = current();
    let given = me.block().dims.shared;
    if offset as usize + bytes > given as usize || !(offset as usize).is_multiple_of(align) {
        let what = format!("dynamic shared array at {offset}, {bytes} bytes, of {given} bytes launched");
        me.fault(FaultKind::OutOfBounds, what);
    }
}

/// Address of a static shared array of this block.
#[doc(hidden)]
pub fn static_shared(name: &'static str, bytes: usize) -> u32 {
    let me = current();
    me.block().shared.fixed(me, name, bytes)
}

#[derive(Clone, Copy)]
struct Copy16 {
    dst: u32,
    src: Option<u64>,
}

/// A thread's asynchronous copies: the open group, then closed groups, oldest first.
#[derive(Default)]
pub(super) struct AsyncQueue {
    open: Vec<Copy16>,
    groups: std::collections::VecDeque<Vec<Copy16>>,
}

/// Starts a copy of 16 bytes; `None` stores zeros. In fast mode it lands at once.
pub(super) fn start_copy(me: &Thread, dst: u32, src: Option<u64>) {
    let shared = &me.block().shared;
    let copy = Copy16 { dst, src };
    if shared.checked {
        shared.check_write(me, dst, 16, 1 + me.linear as u16);
        me.asyncs.borrow_mut().open.push(copy);
    } else {
        land(me, copy);
    }
}

fn land(me: &Thread, copy: Copy16) {
    let shared = &me.block().shared;
    if shared.checked {
        shared.clear_pending(copy.dst, 16);
        shared.check_write(me, copy.dst, 16, 0);
    }
    let to = shared.at(copy.dst);
    // SAFETY: both ranges were checked when the copy started (checked mode) or are the kernel's contract.
    unsafe {
        match copy.src {
            Some(src) => std::ptr::copy_nonoverlapping(src as *const u8, to, 16),
            None => std::ptr::write_bytes(to, 0, 16),
        }
    }
}

/// Closes the open group.
pub(super) fn commit_copies(me: &Thread) {
    let mut queue = me.asyncs.borrow_mut();
    let group = std::mem::take(&mut queue.open);
    queue.groups.push_back(group);
}

/// Lands the oldest groups until `left` remain.
pub(super) fn wait_copies(me: &Thread, left: usize) {
    loop {
        let group = {
            let mut queue = me.asyncs.borrow_mut();
            if queue.groups.len() <= left {
                return;
            }
            queue.groups.pop_front()
        };
        group.into_iter().flatten().for_each(|copy| land(me, copy));
    }
}
