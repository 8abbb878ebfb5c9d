//! Typed views of shared memory. Addresses are 32-bit offsets into the block's window.

use core::marker::PhantomData;

use crate::{Element, arch};

/// A view of `len` elements of the block's shared memory.
pub struct Shared<T> {
    addr: u32,
    len: u32,
    elem: PhantomData<T>,
}

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

/// `len` elements of dynamic shared memory, `byte_offset` bytes from its start (128-byte aligned there).
#[inline(always)]
pub fn dynamic_shared<T: Element>(byte_offset: u32, len: u32) -> Shared<T> {
    #[cfg(not(target_arch = "nvptx64"))]
    crate::cpu::check_dynamic_shared(byte_offset, len as usize * size_of::<T>(), align_of::<T>());
    Shared { addr: arch::dynamic_shared_base() + byte_offset, len, elem: PhantomData }
}

#[doc(hidden)]
#[inline(always)]
pub fn static_shared_view<T: Element>(addr: u32, len: u32) -> Shared<T> {
    Shared { addr, len, elem: PhantomData }
}

/// Declares a static shared array and the function that gives its view, beside the kernel that uses it:
/// `static_shared!(fn rms_norm_partial() -> [f32; 8]);`
///
/// The name must be unique in the crate: it is the symbol in the PTX. Aligned to 16 bytes.
#[macro_export]
macro_rules! static_shared {
    (fn $name:ident() -> [$t:ty; $n:expr]) => {
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::global_asm!(
            concat!(".shared .align 16 .b8 ", stringify!($name), "[{bytes}];"),
            bytes = const $n * ::core::mem::size_of::<$t>()
        );

        #[inline(always)]
        fn $name() -> $crate::Shared<$t> {
            #[cfg(target_arch = "nvptx64")]
            let addr = {
                let addr: u32;
                // SAFETY: reads the address of the array declared above.
                unsafe {
                    ::core::arch::asm!(concat!("mov.u32 {}, ", stringify!($name), ";"), out(reg32) addr,
                        options(pure, nomem, nostack, preserves_flags));
                }
                addr
            };
            #[cfg(not(target_arch = "nvptx64"))]
            let addr = $crate::cpu::static_shared(stringify!($name), $n * ::core::mem::size_of::<$t>());
            $crate::static_shared_view::<$t>(addr, $n as u32)
        }
    };
}

impl<T: Element> Shared<T> {
    #[inline(always)]
    pub fn len(self) -> usize {
        self.len as usize
    }

    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Byte address in the shared window, for `ldmatrix` and asynchronous copies.
    #[inline(always)]
    pub(crate) fn addr_of(self, i: usize, elems: usize) -> u32 {
        #[cfg(not(target_arch = "nvptx64"))]
        crate::cpu::check_shared_index(i, elems, self.len, size_of::<T>());
        let _ = elems;
        self.addr + i as u32 * size_of::<T>() as u32
    }

    #[inline(always)]
    fn wide(self, i: usize, bytes: usize) -> u32 {
        self.addr_of(i, bytes.div_ceil(size_of::<T>()))
    }

    /// Elements `start .. start + len`.
    #[inline(always)]
    pub fn slice(self, start: usize, len: usize) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        crate::cpu::check_slice(start, len, self.len as u64);
        Self { addr: self.addr + (start * size_of::<T>()) as u32, len: len as u32, elem: PhantomData }
    }

    /// Element `i` (`ld.shared`).
    #[inline(always)]
    pub fn get(self, i: usize) -> T {
        // SAFETY: an element of the view; bounds are the kernel's contract, checked on the CPU.
        unsafe { arch::load_shared(self.addr_of(i, 1)) }
    }

    /// Stores element `i` (`st.shared`).
    #[inline(always)]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: as in `get`.
        unsafe { arch::store_shared(self.addr_of(i, 1), value) }
    }

    /// Four bytes from element `i` on, 4-byte aligned.
    #[inline(always)]
    pub fn ld4(self, i: usize) -> u32 {
        // SAFETY: as in `get`.
        unsafe { arch::load_shared(self.wide(i, 4)) }
    }

    /// Eight bytes from element `i` on (`ld.shared.v2.u32`), 8-byte aligned.
    #[inline(always)]
    pub fn ld8(self, i: usize) -> [u32; 2] {
        // SAFETY: as in `get`.
        unsafe { arch::load_shared_v2(self.wide(i, 8)) }
    }

    /// Sixteen bytes from element `i` on (`ld.shared.v4.u32`), 16-byte aligned.
    #[inline(always)]
    pub fn ld16(self, i: usize) -> [u32; 4] {
        // SAFETY: as in `get`.
        unsafe { arch::load_shared_v4(self.wide(i, 16)) }
    }

    /// Stores four bytes from element `i` on.
    #[inline(always)]
    pub fn st4(self, i: usize, word: u32) {
        // SAFETY: as in `get`.
        unsafe { arch::store_shared(self.wide(i, 4), word) }
    }

    /// Stores eight bytes from element `i` on.
    #[inline(always)]
    pub fn st8(self, i: usize, words: [u32; 2]) {
        // SAFETY: as in `get`.
        unsafe { arch::store_shared_v2(self.wide(i, 8), words) }
    }

    /// Stores sixteen bytes from element `i` on.
    #[inline(always)]
    pub fn st16(self, i: usize, words: [u32; 4]) {
        // SAFETY: as in `get`.
        unsafe { arch::store_shared_v4(self.wide(i, 16), words) }
    }
}

impl Shared<u32> {
    /// Adds to word `i`, returns what was there (`atom.shared.add.u32`).
    #[inline(always)]
    pub fn atomic_add(self, i: usize, value: u32) -> u32 {
        // SAFETY: a word of the view.
        unsafe { arch::shared_atomics::atomic_add(self.addr_of(i, 1), value) }
    }

    /// Maximum into word `i`, returns what was there (`atom.shared.max.u32`).
    #[inline(always)]
    pub fn atomic_max(self, i: usize, value: u32) -> u32 {
        // SAFETY: a word of the view.
        unsafe { arch::shared_atomics::atomic_max(self.addr_of(i, 1), value) }
    }

    /// Or into word `i`, returns what was there (`atom.shared.or.b32`).
    #[inline(always)]
    pub fn atomic_or(self, i: usize, value: u32) -> u32 {
        // SAFETY: a word of the view.
        unsafe { arch::shared_atomics::atomic_or(self.addr_of(i, 1), value) }
    }
}
