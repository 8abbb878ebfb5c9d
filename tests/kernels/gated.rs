//! Gate and up of dense rows together: the bits of two products and a SwiGLU, whichever kernel makes them.

use cuda_std::{GlobalMut, bf16};
use kdtree::device::Device;
use kdtree::kernels::{Swiglu, swiglu};
use kdtree::linear::{Gated, Product, Weight, explain_gated, gated, linear};

use super::linear::{Kind, Stored, X};
use super::support::{Outcome, Random, Suite, check, equal};

/// Rows that one kernel multiplies with both.
const FEW: usize = 8;

pub fn cases(suite: &mut Suite) {
    for kind in Kind::ALL {
        for (n, k) in [(1, 128), (33, 640), (300, 32)] {
            if kind.takes(k) {
                let rows = [0, 1, 2, 7, 8, 9, 17];
                suite.both(format!("gated::{}::{n}x{k}", kind.name()), move |d| as_apart(d, [kind; 2], [n, k], &rows));
            }
        }
    }
    suite.both("gated::unequal", |d| as_apart(d, [Kind::W4, Kind::Bf16], [40, 128], &[1, 8]));
    suite.both("gated::rows_0_to_40", |d| {
        as_apart(d, [Kind::W4; 2], [17, 64], &(0..=40).collect::<Vec<_>>())?;
        as_apart(d, [Kind::Bf16; 2], [17, 64], &(0..=40).collect::<Vec<_>>())
    });
    for kind in [Kind::Bf16, Kind::W4] {
        for (n, k) in [(2048, 7168), (18_432, 7168)] {
            let case = move |d: &Device| as_apart(d, [kind; 2], [n, k], &[1, 8, 9]);
            suite.cuda(format!("gated::{}::{n}x{k}", kind.name()), case);
        }
    }
    suite.cuda("gated::repeats", repeats);
    suite.both("gated::chosen", chosen);
    suite.both("gated::refuses", refuses);
    suite.both("beside::two_products", beside);
}

struct Pair {
    gate: Weight,
    up: Weight,
    shape: [usize; 2],
}

impl Pair {
    fn random(device: &Device, [of_gate, of_up]: [Kind; 2], [n, k]: [usize; 2]) -> kdtree::device::Result<Self> {
        let mut random = Random::new((n + 5 * k) as u64);
        let gate = Weight::new(device, &Stored::random(of_gate, [1, n, k], &mut random).host("gate"))?;
        let up = Weight::new(device, &Stored::random(of_up, [1, n, k], &mut random).host("up"))?;
        Ok(Self { gate, up, shape: [n, k] })
    }

    /// Both results, f32 and bf16, as bits.
    fn run(&self, device: &Device, x: &X, rows: usize) -> Result<[Vec<u32>; 2], libtest_mimic::Failed> {
        let [n, _] = self.shape;
        let (f32, rounded) = (device.alloc::<f32>(rows * n)?, device.alloc::<bf16>(rows * n)?);
        let apart = [device.alloc::<f32>(rows * n)?, device.alloc::<f32>(rows * n)?];
        f32.fill(0xFF)?;
        rounded.fill(0xFF)?;
        let gate = Product::plain(&self.gate, x.acts(), rows, apart[0].view_mut());
        let up = Product::plain(&self.up, x.acts(), rows, apart[1].view_mut());
        gated(device, &Gated { gate, up, out_f32: f32.view_mut(), out_bf16: rounded.view_mut() })?;
        let f32 = f32.read()?.into_iter().map(f32::to_bits).collect();
        Ok([f32, rounded.read()?.into_iter().map(|v| v.to_bits().into()).collect()])
    }
}

fn as_apart(device: &Device, kinds: [Kind; 2], [n, k]: [usize; 2], all_rows: &[usize]) -> Outcome {
    let pair = Pair::random(device, kinds, [n, k])?;
    let mut random = Random::new(37);
    for &rows in all_rows {
        let x = X::random(device, rows * k, &mut random)?;
        let [found, rounded] = pair.run(device, &x, rows)?;
        let [gate, up, want] = [(); 3].map(|()| device.alloc::<f32>(rows * n));
        let (gate, up, want) = (gate?, up?, want?);
        linear(device, &Product::plain(&pair.gate, x.acts(), rows, gate.view_mut()))?;
        linear(device, &Product::plain(&pair.up, x.acts(), rows, up.view_mut()))?;
        let (out_f32, out_bf16) = (want.view_mut(), GlobalMut::EMPTY);
        let (width, stride) = (n, n);
        swiglu(device, Swiglu { gate: gate.view(), up: up.view(), out_f32, out_bf16, rows, width, stride })?;
        let want = want.read()?;
        let bits: Vec<u32> = want.iter().map(|v| v.to_bits()).collect();
        equal(&format!("{rows} rows"), &found, &bits)?;
        let bits: Vec<u32> = want.iter().map(|&v| bf16::from_f32(v).to_bits().into()).collect();
        equal(&format!("{rows} rows, rounded"), &rounded, &bits)?;
    }
    Ok(())
}

/// 200 launches give the same bits.
fn repeats(device: &Device) -> Outcome {
    for kind in [Kind::Bf16, Kind::W4] {
        let pair = Pair::random(device, [kind; 2], [264, 1152])?;
        let x = X::random(device, FEW * 1152, &mut Random::new(38))?;
        let first = pair.run(device, &x, FEW)?;
        for _ in 0..200 {
            check(pair.run(device, &x, FEW)? == first, || format!("{}: other bits", kind.name()))?;
        }
    }
    Ok(())
}

fn chosen(device: &Device) -> Outcome {
    let of = |kinds, rows| {
        let pair = Pair::random(device, kinds, [32, 64])?;
        Ok::<_, libtest_mimic::Failed>(
            explain_gated(&pair.gate, &pair.up, rows).map(|plan| (plan.kernel, plan.flops())),
        )
    };
    let flops = |rows: usize| 2 * 2 * rows * 32 * 64;
    equal("bf16", &[of([Kind::Bf16; 2], 8)?], &[Some(("gated_gemm_bf16", flops(8)))])?;
    equal("w4a16", &[of([Kind::W4; 2], 1)?], &[Some(("gated_gemm_w4a16", flops(1)))])?;
    let none =
        [of([Kind::Bf16; 2], 9)?, of([Kind::Bf16, Kind::W4], 1)?, of([Kind::F32; 2], 1)?, of([Kind::W4Wide; 2], 1)?];
    equal("apart", &none, &[None; 4])
}

fn refuses(device: &Device) -> Outcome {
    let [a, b] = [Pair::random(device, [Kind::W4; 2], [32, 64])?, Pair::random(device, [Kind::W4; 2], [48, 64])?];
    let x = X::random(device, 2 * 64, &mut Random::new(39))?;
    let out = device.zeros::<f32>(2 * 48)?;
    let refused = |up: &Weight, rows: usize, held: usize, what: &str| {
        let product = |weight| Product::plain(weight, x.acts(), rows, out.view_mut());
        let out_f32 = GlobalMut::from_raw(out.view().addr(), held);
        let p = Gated { gate: product(&a.gate), up: product(up), out_f32, out_bf16: GlobalMut::EMPTY };
        let error = gated(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains(what), || format!("expected a refusal with `{what}`, found `{error}`"))
    };
    let apart = "gated: `gate` [1, 32, 64] x 2 rows of x 64 apart, of y 32 apart and `up` [1, 48, 64]";
    refused(&b.up, 2, 64, apart)?;
    refused(&a.up, 2, 63, "the f32 output holds 63, expected 64")?;
    refused(&a.up, 3, 96, "x holds 128, expected 192")?;
    let other = X::random(device, 2 * 64, &mut Random::new(41))?;
    let product = |weight, x: &X| Product::plain(weight, x.acts(), 2, out.view_mut());
    let with_up = |up: Product| {
        let p = Gated { gate: product(&a.gate, &x), up, out_f32: out.view_mut(), out_bf16: GlobalMut::EMPTY };
        let error = gated(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains("for the same x, y without gaps"), || format!("expected a refusal, found `{error}`"))
    };
    with_up(product(&a.up, &other))?;
    with_up(Product { y_stride: 40, ..product(&a.up, &x) })?;
    with_up(Product { accumulate: true, ..product(&a.up, &x) })
}

/// What runs beside other work has the bits that it has after it, queued and recorded; and what follows sees both.
fn beside(device: &Device) -> Outcome {
    let (n, k) = (256, 512);
    let pair = Pair::random(device, [Kind::Bf16; 2], [n, k])?;
    let x = X::random(device, k, &mut Random::new(40))?;
    let want = pair.run(device, &x, 1)?;
    let [gate, up, out] = [(); 3].map(|()| device.alloc::<f32>(n));
    let (gate, up, out) = (gate?, up?, out?);
    let queue = |device: &Device| {
        let product = |weight, y: &kdtree::device::Buffer<f32>| {
            linear(device, &Product::plain(weight, x.acts(), 1, y.view_mut()))
        };
        device.beside(|| product(&pair.up, &up), || product(&pair.gate, &gate))?;
        let (out_f32, out_bf16) = (out.view_mut(), GlobalMut::EMPTY);
        let (rows, width, stride) = (1, n, n);
        swiglu(device, Swiglu { gate: gate.view(), up: up.view(), out_f32, out_bf16, rows, width, stride })
    };
    let poison = || [&gate, &up, &out].into_iter().try_for_each(|buffer| buffer.fill(0xFF));
    let found = || Ok::<_, kdtree::device::DeviceError>(out.read()?.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    for _ in 0..20 {
        poison()?;
        queue(device)?;
        equal("queued", &found()?, &want[0])?;
    }
    let graph = device.capture(|| (0..3).try_for_each(|_| queue(device)))?;
    for _ in 0..20 {
        poison()?;
        device.replay(&graph)?;
        equal("recorded", &found()?, &want[0])?;
    }
    if device.is_cuda() {
        let inner = device.beside(|| device.beside(|| Ok(()), || Ok(())), || Ok(()));
        let error = inner.err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains("beside"), || format!("expected a refusal, found `{error}`"))?;
    }
    poison()?;
    queue(device)?;
    equal("after a refusal", &found()?, &want[0])
}
