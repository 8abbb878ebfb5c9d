//! bf16 to f32, bit for bit: every bf16 there is, and lengths around a block's 256 threads.

use cuda_std::bf16;
use kdtree::device::Device;
use kdtree::kernels::widen_bf16;

use super::support::{Outcome, Random, Suite, check, equal};

pub fn cases(suite: &mut Suite) {
    for n in [0, 1, 255, 256, 257, 1000] {
        suite.both(format!("widen_bf16::{n}"), move |d| exact(d, Random::new(5).bf16s(n)));
    }
    suite.both("widen_bf16::every_value", |d| exact(d, (0..=u16::MAX).map(bf16::from_bits).collect()));
    suite.both("widen_bf16::refuses", refuses);
}

fn exact(device: &Device, x: Vec<bf16>) -> Outcome {
    let (dx, y) = (device.upload(&x)?, device.alloc::<f32>(x.len())?);
    widen_bf16(device, dx.view(), y.view_mut(), x.len())?;
    let got: Vec<u32> = y.read()?.iter().map(|v| v.to_bits()).collect();
    let want: Vec<u32> = x.iter().map(|v| u32::from(v.to_bits()) << 16).collect();
    equal("bits", &got, &want)
}

fn refuses(device: &Device) -> Outcome {
    let (x, y) = (device.zeros::<bf16>(4)?, device.zeros::<f32>(4)?);
    let error = widen_bf16(device, x.view(), y.view_mut(), 5).err().map(|e| e.to_string()).unwrap_or_default();
    check(error.starts_with("widen_bf16: "), || format!("expected a refusal, found `{error}`"))
}
