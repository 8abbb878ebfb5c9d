//! Typed views of global memory: [`Global`] reads, [`GlobalMut`] reads and writes.

use core::marker::PhantomData;

use crate::{Element, arch};

/// A view of `len` elements of global memory that a kernel reads. Plain data: it is part of argument structs.
///
/// An empty view (`Global::EMPTY`) stands for an argument that is absent.
#[repr(C)]
pub struct Global<T> {
    addr: u64,
    len: u64,
    elem: PhantomData<T>,
}

/// A view of `len` elements of global memory that a kernel reads and writes.
#[repr(C)]
pub struct GlobalMut<T> {
    addr: u64,
    len: u64,
    elem: PhantomData<T>,
}

/// `words` 32-bit words from element `i` on must lie inside the view and be aligned to their whole size.
#[inline(always)]
fn wide_addr<T: Element>(addr: u64, len: u64, i: usize, words: usize) -> u64 {
    let bytes = words * 4;
    let at = addr.wrapping_add(i.wrapping_mul(size_of::<T>()) as u64);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        crate::cpu::check_index(i, bytes.div_ceil(size_of::<T>()), len, at, bytes);
    }
    let _ = (len, bytes);
    at
}

#[inline(always)]
fn elem_addr<T: Element>(addr: u64, len: u64, i: usize) -> u64 {
    let at = addr.wrapping_add(i.wrapping_mul(size_of::<T>()) as u64);
    #[cfg(not(target_arch = "nvptx64"))]
    crate::cpu::check_index(i, 1, len, at, size_of::<T>());
    let _ = len;
    at
}

macro_rules! common {
    ($view:ident) => {
        impl<T> Clone for $view<T> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $view<T> {}

        impl<T: Element> $view<T> {
            pub const EMPTY: Self = Self { addr: 0, len: 0, elem: PhantomData };

            /// A view of `len` elements at device address `addr`.
            ///
            /// The address is not checked here. On the CPU device each access is checked against the live buffers;
            /// on a GPU an address outside them is a memory fault of the launch.
            pub const fn from_raw(addr: u64, len: usize) -> Self {
                Self { addr, len: len as u64, elem: PhantomData }
            }

            /// Number of elements.
            #[inline(always)]
            pub fn len(self) -> usize {
                self.len as usize
            }

            #[inline(always)]
            pub fn is_empty(self) -> bool {
                self.len == 0
            }

            /// Device address of the first element.
            #[inline(always)]
            pub fn addr(self) -> u64 {
                self.addr
            }

            /// Elements `start .. start + len`.
            #[inline(always)]
            pub fn slice(self, start: usize, len: usize) -> Self {
                #[cfg(not(target_arch = "nvptx64"))]
                crate::cpu::check_slice(start, len, self.len);
                Self { addr: self.addr + (start * size_of::<T>()) as u64, len: len as u64, elem: PhantomData }
            }

            /// Elements `start .. start + len`, on the host: for passing a part of a buffer to a launch.
            ///
            /// # Panics
            /// If the part lies outside the view.
            #[cfg(not(target_arch = "nvptx64"))]
            pub fn part(self, start: usize, len: usize) -> Self {
                assert!(
                    start.checked_add(len).is_some_and(|end| end as u64 <= self.len),
                    "elements {start}.. ({len} of them) of a view of {}",
                    self.len
                );
                Self { addr: self.addr + (start * size_of::<T>()) as u64, len: len as u64, elem: PhantomData }
            }

            /// Element `i` (`ld.global`).
            #[inline(always)]
            pub fn get(self, i: usize) -> T {
                // SAFETY: the address of an element of the view; bounds are the kernel's contract, checked on the CPU.
                unsafe { arch::load_global(elem_addr::<T>(self.addr, self.len, i)) }
            }

            /// Four bytes from element `i` on, as a word. `i` must be a multiple of 4 bytes.
            #[inline(always)]
            pub fn ld4(self, i: usize) -> u32 {
                // SAFETY: as in `get`; alignment is checked with the bounds.
                unsafe { arch::load_global(wide_addr::<T>(self.addr, self.len, i, 1)) }
            }

            /// Eight bytes from element `i` on (`ld.global.v2.u32`), 8-byte aligned.
            #[inline(always)]
            pub fn ld8(self, i: usize) -> [u32; 2] {
                // SAFETY: as in `ld4`.
                unsafe { arch::load_global_v2(wide_addr::<T>(self.addr, self.len, i, 2)) }
            }

            /// Sixteen bytes from element `i` on (`ld.global.v4.u32`), 16-byte aligned.
            #[inline(always)]
            pub fn ld16(self, i: usize) -> [u32; 4] {
                // SAFETY: as in `ld4`.
                unsafe { arch::load_global_v4(wide_addr::<T>(self.addr, self.len, i, 4)) }
            }
        }
    };
}
common!(Global);
common!(GlobalMut);

impl<T: Element> Global<T> {
    /// Sixteen bytes read once: not kept in L1, first to leave L2 (`ld.global.nc.L1::no_allocate.L2::evict_first`
    /// through a cache policy where the target has it). Only for memory that no thread writes during the launch.
    #[inline(always)]
    pub fn ld16_stream(self, i: usize) -> [u32; 4] {
        // SAFETY: as in `ld16`; read-only for the launch by this method's contract.
        unsafe { arch::load_global_v4_stream(wide_addr::<T>(self.addr, self.len, i, 4)) }
    }
}

impl<T: Element> GlobalMut<T> {
    /// The same elements, for reading.
    #[inline(always)]
    pub fn as_ref(self) -> Global<T> {
        Global { addr: self.addr, len: self.len, elem: PhantomData }
    }

    /// Stores element `i` (`st.global`).
    #[inline(always)]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: the address of an element of the view; bounds are the kernel's contract, checked on the CPU.
        unsafe { arch::store_global(elem_addr::<T>(self.addr, self.len, i), value) }
    }

    /// Stores four bytes from element `i` on.
    #[inline(always)]
    pub fn st4(self, i: usize, word: u32) {
        // SAFETY: as in `set`; alignment is checked with the bounds.
        unsafe { arch::store_global(wide_addr::<T>(self.addr, self.len, i, 1), word) }
    }

    /// Stores eight bytes from element `i` on.
    #[inline(always)]
    pub fn st8(self, i: usize, words: [u32; 2]) {
        // SAFETY: as in `st4`.
        unsafe { arch::store_global_v2(wide_addr::<T>(self.addr, self.len, i, 2), words) }
    }

    /// Stores sixteen bytes from element `i` on.
    #[inline(always)]
    pub fn st16(self, i: usize, words: [u32; 4]) {
        // SAFETY: as in `st4`.
        unsafe { arch::store_global_v4(wide_addr::<T>(self.addr, self.len, i, 4), words) }
    }
}

macro_rules! atomics {
    ($($name:ident: $doc:literal;)*) => { $(
        #[doc = $doc]
        #[inline(always)]
        pub fn $name(self, i: usize, value: u32) -> u32 {
            // SAFETY: the address of a u32 of the view; relaxed, device scope.
            unsafe { arch::global_atomics::$name(elem_addr::<u32>(self.addr, self.len, i), value) }
        }
    )* };
}

impl GlobalMut<u32> {
    atomics! {
        atomic_add: "Adds to word `i`, returns what was there (`atom.global.add.u32`, relaxed).";
        atomic_max: "Maximum into word `i`, returns what was there (`atom.global.max.u32`).";
        atomic_min: "Minimum into word `i`, returns what was there (`atom.global.min.u32`).";
        atomic_or: "Or into word `i`, returns what was there (`atom.global.or.b32`).";
        atomic_exch: "Exchanges word `i`, returns what was there (`atom.global.exch.b32`).";
    }

    /// Stores `value` in word `i` if it holds `expected`; returns what was there (`atom.global.cas.b32`).
    #[inline(always)]
    pub fn atomic_cas(self, i: usize, expected: u32, value: u32) -> u32 {
        // SAFETY: as the other atomics.
        unsafe { arch::global_atomics::atomic_cas(elem_addr::<u32>(self.addr, self.len, i), expected, value) }
    }
}
