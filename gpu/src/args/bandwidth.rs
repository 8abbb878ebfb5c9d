//! Arguments of the kernels that measure what the memory can do.

use cuda_std::{Global, GlobalMut};

/// See [`crate::kernels::bandwidth`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CopyArgs {
    /// A multiple of 4 words.
    pub from: Global<u32>,
    pub to: GlobalMut<u32>,
}

/// See [`crate::kernels::bandwidth`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ReadArgs {
    /// A multiple of 4 words.
    pub from: Global<u32>,
    /// `[threads of the grid]`: each thread's sum.
    pub sums: GlobalMut<u32>,
}
