//! Launcher of [`gpu::kernels::rms_norm`].

use cuda_std::{Global, GlobalMut, bf16};
use gpu::args::RmsNormArgs;
use gpu::kernels::rms_norm as kernel;

use super::contract;
use crate::device::{Device, Dims, Result};

/// `weight * x / sqrt(mean(x^2) + eps)`, row by row.
pub struct RmsNorm {
    /// `[rows, stride]`, the first `width` of each row.
    pub x: Global<f32>,
    /// `[width]`.
    pub weight: Global<f32>,
    /// `[rows, width]`, or `EMPTY`.
    pub out_f32: GlobalMut<f32>,
    /// `[rows, width]`, or `EMPTY`.
    pub out_bf16: GlobalMut<bf16>,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
    pub eps: f32,
}

/// Queues the norm of `rows` rows.
pub fn rms_norm(device: &Device, p: RmsNorm) -> Result<()> {
    let name = kernel::RMS_NORM.name();
    let need = p.rows * p.width;
    contract(name, p.width > 0 && p.width <= p.stride, || format!("width {} of stride {}", p.width, p.stride))?;
    contract(name, p.weight.len() == p.width, || format!("weight has {}, width is {}", p.weight.len(), p.width))?;
    contract(name, p.rows == 0 || p.x.len() >= (p.rows - 1) * p.stride + p.width, || {
        format!("x holds {}, {} rows of stride {} are wanted", p.x.len(), p.rows, p.stride)
    })?;
    for len in [p.out_f32.len(), p.out_bf16.len()] {
        contract(name, len == 0 || len >= need, || format!("an output holds {len}, {need} are written"))?;
    }
    let args = RmsNormArgs {
        x: p.x,
        weight: p.weight,
        out_f32: p.out_f32,
        out_bf16: p.out_bf16,
        width: p.width as u32,
        stride: p.stride as u32,
        eps: p.eps,
    };
    let dims = Dims { grid: [p.rows as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::RMS_NORM, dims, args)
}
