//! Argument structs, shared text with the host. Each is passed by value as a kernel's one parameter.

pub mod attention;
pub mod bandwidth;
pub mod linear;
pub mod selftest;
pub mod state;
pub mod tokens;

use cuda_std::{Global, GlobalMut, bf16};

/// See [`crate::kernels::rms_norm`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmsNormArgs {
    /// `[rows, stride]`, the first `width` of each row are read.
    pub x: Global<f32>,
    /// `[width]`.
    pub weight: Global<f32>,
    /// `[rows, width]`, or empty.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, width]` rounded to nearest even, or empty.
    pub out_bf16: GlobalMut<bf16>,
    pub width: u32,
    pub stride: u32,
    pub eps: f32,
}

/// See [`crate::kernels::widen_bf16`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct WidenBf16Args {
    /// At least as many as `out`.
    pub x: Global<bf16>,
    pub out: GlobalMut<f32>,
}
