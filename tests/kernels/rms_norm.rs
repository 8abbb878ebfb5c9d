//! RMSNorm over widths around a block's 256 threads, strided rows, both outputs.

use kdtree::kernels::{RmsNorm, rms_norm};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};
use kdtree::device::Device;

pub fn cases(suite: &mut Suite) {
    for (rows, width, stride) in [(0, 64, 64), (1, 1, 1), (3, 64, 96), (2, 255, 255), (5, 512, 576), (1, 7168, 7168)] {
        suite.both(format!("rms_norm::{rows}x{width}/{stride}"), move |d| against_reference(d, rows, width, stride));
    }
    suite.both("rms_norm::overflow_is_nan", overflow);
    suite.both("rms_norm::refuses_short_buffers", refuses);
}

/// Squares that leave f32 make their row NaN, never zeros, and no other row.
fn overflow(device: &Device) -> Outcome {
    let width = 64;
    let mut x = vec![1.0f32; 2 * width];
    x[width + 3] = 1e20;
    let (x, weight, y) = (device.upload(&x)?, device.upload(&vec![1.0; width])?, device.alloc(2 * width)?);
    let p = RmsNorm {
        x: x.view(),
        weight: weight.view(),
        out_f32: y.view_mut(),
        out_bf16: cuda_std::GlobalMut::EMPTY,
        rows: 2,
        width,
        stride: width,
        eps: 1e-5,
    };
    rms_norm(device, p)?;
    let y = y.read()?;
    check(y[..width].iter().all(|v| v.is_finite()), || "a finite row is not".into())?;
    check(y[width..].iter().all(|v| v.is_nan()), || "a row that overflows is not all NaN".into())
}

fn against_reference(device: &Device, rows: usize, width: usize, stride: usize) -> Outcome {
    let mut random = Random::new(7);
    let (x, weight) = (random.floats(rows * stride), random.floats(width));
    let (dx, dw) = (device.upload(&x)?, device.upload(&weight)?);
    let (y, rounded) = (device.alloc(rows * width)?, device.alloc(rows * width)?);
    y.fill(0xFF)?;
    let p = RmsNorm {
        x: dx.view(),
        weight: dw.view(),
        out_f32: y.view_mut(),
        out_bf16: rounded.view_mut(),
        rows,
        width,
        stride,
        eps: 1e-5,
    };
    rms_norm(device, p)?;
    let y = y.read()?;
    close("f32", &y, &reference::rms_norm(&x, &weight, width, stride, 1e-5), bounds::F32)?;
    let want: Vec<_> = y.iter().map(|&v| cuda_std::bf16::from_f32(v)).collect();
    equal("bf16", &rounded.read()?, &want)
}

fn refuses(device: &Device) -> Outcome {
    let (x, weight, y) = (device.zeros(10)?, device.zeros(4)?, device.zeros(8)?);
    let p = |rows, width| RmsNorm {
        x: x.view(),
        weight: weight.view(),
        out_f32: y.view_mut(),
        out_bf16: cuda_std::GlobalMut::EMPTY,
        rows,
        width,
        stride: 4,
        eps: 1e-5,
    };
    rms_norm(device, p(2, 4))?;
    for bad in [p(3, 4), p(2, 3), p(2, 0)] {
        let error = rms_norm(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("rms_norm: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
