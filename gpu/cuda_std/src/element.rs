//! What may lie in device memory.

use half::bf16;

mod sealed {
    pub trait Sealed {}
}

/// A value that one load or store instruction moves. Plain bytes, size 1, 2, 4 or 8, aligned to its size.
///
/// Sealed, so that `size_of` and alignment are those listed here.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {}

macro_rules! element {
    ($($t:ty)*) => { $( impl sealed::Sealed for $t {} impl Element for $t {} )* };
}
element! { u8 u16 u32 i32 u64 f32 bf16 }
