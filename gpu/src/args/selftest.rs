//! Arguments of [`crate::kernels::selftest`].

use cuda_std::{Global, GlobalMut, bf16};

/// Words in, words out: `selftest_warp`, `_indices`, `_wide`, `_async`, `_atomics`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SelftestWordsArgs {
    pub x: Global<u32>,
    pub y: GlobalMut<u32>,
}

/// Elements of every type, in and out, `ELEMENTS` of each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SelftestElementsArgs {
    pub x_u8: Global<u8>,
    pub x_u16: Global<u16>,
    pub x_u32: Global<u32>,
    pub x_i32: Global<i32>,
    pub x_u64: Global<u64>,
    pub x_f32: Global<f32>,
    pub x_bf16: Global<bf16>,
    pub y_u8: GlobalMut<u8>,
    pub y_u16: GlobalMut<u16>,
    pub y_u32: GlobalMut<u32>,
    pub y_i32: GlobalMut<i32>,
    pub y_u64: GlobalMut<u64>,
    pub y_f32: GlobalMut<f32>,
    pub y_bf16: GlobalMut<bf16>,
}

/// One product of tiles, and the fragments it is made of.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SelftestMatrixArgs {
    /// `[16, 16]`, rows of A.
    pub a: Global<bf16>,
    /// `[8, 16]`, columns of B.
    pub b: Global<bf16>,
    /// `[16, 8]`.
    pub c: Global<f32>,
    /// `[12, 32]`: words of `ldmatrix` x4, x4 transposed, x2, x2 transposed, by lane.
    pub fragments: GlobalMut<u32>,
    /// `[3, 16, 8]`: `a b + c` from rows, from columns, and again with some rows alone stored.
    pub d: GlobalMut<f32>,
}

/// Scalar arithmetic: every operation on every `i` of `n`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SelftestMathArgs {
    /// `[n]`.
    pub x: Global<f32>,
    /// `[n]`.
    pub y: Global<f32>,
    /// `[n]`, no zeros.
    pub words: Global<u32>,
    /// `[operations, n]`, bits of the results.
    pub out: GlobalMut<u32>,
    pub n: u32,
}
