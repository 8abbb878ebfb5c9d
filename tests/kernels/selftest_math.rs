//! Tile products and scalar arithmetic of `cuda_std` on both devices: bits where they are defined, bounds elsewhere.

use cuda_std::bf16;
use gpu::args::selftest::{SelftestMathArgs, SelftestMatrixArgs};
use gpu::kernels::selftest::{self as kernel, STORED_ROWS};
use kdtree::device::Device;
use kdtree::kernels::{selftest_math, selftest_matrix};

use super::support::{Outcome, Random, Suite, check, equal};

pub fn cases(suite: &mut Suite) {
    suite.both("selftest::matrix_small_numbers", |d| matrix(d, |r| (r.below(17) as f32 - 8.0) * 0.25));
    suite.both("selftest::matrix_wide_range", matrix_wide_range);
    suite.both("selftest::math_edges", |d| math(d, edges()));
    suite.both("selftest::math_sweep", |d| math(d, sweep()));
}

/// The tiles of a product and its results.
struct Product {
    a: Vec<bf16>,
    b: Vec<bf16>,
    c: Vec<f32>,
    fragments: Vec<u32>,
    d: Vec<f32>,
}

fn product(device: &Device, mut value: impl FnMut() -> f32) -> Result<Product, libtest_mimic::Failed> {
    let a: Vec<bf16> = (0..256).map(|_| bf16::from_f32(value())).collect();
    let b: Vec<bf16> = (0..128).map(|_| bf16::from_f32(value())).collect();
    let c: Vec<f32> = (0..128).map(|_| value()).collect();
    let (da, db, dc) = (device.upload(&a)?, device.upload(&b)?, device.upload(&c)?);
    let (fragments, d) = (device.alloc(12 * 32)?, device.alloc(3 * 128)?);
    d.fill(0xFF)?;
    let p = SelftestMatrixArgs {
        a: da.view(),
        b: db.view(),
        c: dc.view(),
        fragments: fragments.view_mut(),
        d: d.view_mut(),
    };
    selftest_matrix(device, p)?;
    Ok(Product { a, b, c, fragments: fragments.read()?, d: d.read()? })
}

/// Numbers so small and round that every sum is exact in any order.
fn matrix(device: &Device, value: fn(&mut Random) -> f32) -> Outcome {
    let mut random = Random::new(15);
    let p = product(device, || value(&mut random))?;
    let pair = |tile: &[bf16], row: usize, k: usize| {
        u32::from(tile[row * 16 + k].to_bits()) | u32::from(tile[row * 16 + k + 1].to_bits()) << 16
    };
    for (row, got) in p.fragments.chunks(32).enumerate() {
        let word = |lane: usize| {
            let (g, c) = (lane / 4, lane % 4 * 2);
            match row {
                0..8 => pair(&p.a, g + row % 2 * 8, c + row % 4 / 2 * 8),
                _ => pair(&p.b, g, c + row % 2 * 8),
            }
        };
        equal(&format!("word {row}"), got, &(0..32).map(word).collect::<Vec<_>>())?;
    }
    let want: Vec<f32> = (0..128)
        .map(|i| {
            let (row, n) = (i / 8, i % 8);
            (0..16).map(|k| p.a[row * 16 + k].to_f32() * p.b[n * 16 + k].to_f32()).sum::<f32>() + p.c[i]
        })
        .collect();
    equal("from rows", &p.d[..128], &want)?;
    equal("from columns", &p.d[128..256], &want)?;
    equal("stored by some lanes", &p.d[256..256 + 8 * STORED_ROWS], &want[..8 * STORED_ROWS])?;
    check(p.d[256 + 8 * STORED_ROWS..].iter().all(|v| v.is_nan()), || "rows are written that no lane stores".into())
}

/// Sums that are rounded: within what 17 additions with truncated alignment may lose.
fn matrix_wide_range(device: &Device) -> Outcome {
    let mut random = Random::new(16);
    let p = product(device, || random.unit() * 2f32.powi(random.below(12) as i32 - 6))?;
    for i in 0..128 {
        let (row, n) = (i / 8, i % 8);
        let terms = || (0..16).map(|k| f64::from(p.a[row * 16 + k].to_f32()) * f64::from(p.b[n * 16 + k].to_f32()));
        let want = terms().sum::<f64>() + f64::from(p.c[i]);
        let largest = terms().fold(f64::from(p.c[i].abs()), |m, v| m.max(v.abs()));
        let bound = 17.0 * largest * 2f64.powi(-22);
        for (what, got) in [("rows", p.d[i]), ("columns", p.d[128 + i])] {
            check((f64::from(got) - want).abs() <= bound, || format!("{what}: value {i} is {got}, expected {want}"))?;
        }
    }
    equal("from columns as from rows", &p.d[128..256], &p.d[..128])
}

fn edges() -> Vec<f32> {
    let bits = [
        0x3F80_8000,
        0x3F81_8000,
        0x3F80_8001,
        0x3F80_7FFF,
        0xBF81_8000,
        0x3FFF_FFFF,
        0x7F7F_FFFF,
        0x7F7F_7FFF,
        0x7F80_0000,
        0xFF80_0000,
        0x0000_0000,
        0x8000_0000,
        0x0000_0001,
        0x0000_8000,
        0x0000_8001,
        0x0001_8000,
        0x007F_FFFF,
        0x8040_0000,
        0x7F80_0001,
        0xFFC0_0000,
        0x7FFF_FFFF,
        0x0080_0000,
    ];
    let named =
        [1.0, -1.0, 0.5, 2.0, 3.0, 126.0, 127.9, 128.0, 129.0, -126.0, -126.5, -127.0, -149.0, -150.0, -200.0, 88.8];
    bits.into_iter().map(f32::from_bits).chain(named).collect()
}

fn sweep() -> Vec<f32> {
    let mut random = Random::new(17);
    let small = (0..300).map(|i| (i - 150) as f32 * 0.21);
    let any = (0..300).map(|_| random.unit() * 2f32.powi(random.below(60) as i32 - 30));
    small.chain(any).collect()
}

/// What `ex2.approx` (two units in the last place and the rounding), `lg2.approx` and `rsqrt.approx` may lose.
const EXP2: f64 = 3e-7;
const LOG2: f64 = 3.2e-7;
const RSQRT: f64 = 1.4e-7;

fn math(device: &Device, x: Vec<f32>) -> Outcome {
    let n = x.len();
    let mut random = Random::new(18);
    let y: Vec<f32> = (0..n).map(|i| x[(i * 7 + 3) % n]).collect();
    let w: Vec<u32> = (0..n).map(|i| (random.next() >> (32 + i % 32)) as u32 | 1).collect();
    let (dx, dy, dw) = (device.upload(&x)?, device.upload(&y)?, device.upload(&w)?);
    let out = device.alloc(kernel::MATH_ROWS * n)?;
    out.fill(0xEE)?;
    let p = SelftestMathArgs { x: dx.view(), y: dy.view(), words: dw.view(), out: out.view_mut(), n: n as u32 };
    selftest_math(device, p)?;
    let out = out.read()?;
    let row = |r: usize| &out[r * n..(r + 1) * n];
    let f = |v: f32| f64::from(v);

    // Relative bounds; the argument's own rounding weighs with its size where a constant multiplies it first.
    let near = |name: &str, r: usize, want: &dyn Fn(f64) -> f64, bound: &dyn Fn(f64, f64) -> f64| -> Outcome {
        for (i, &bits) in row(r).iter().enumerate() {
            let (got, want) = (f(f32::from_bits(bits)), want(f(x[i])));
            let tiny = f(f32::MIN_POSITIVE) * 1.001;
            let same = got == want || (got.is_nan() && want.is_nan()) || (want.abs() < tiny && got.abs() < tiny);
            let overflow =
                got.is_infinite() && want.abs() > f(f32::MAX) * (1.0 - 1e-5) && got.signum() == want.signum();
            let fine = same || overflow || (got - want).abs() <= bound(f(x[i]), want);
            check(fine, || format!("{name}({:?}) is {got:?}, expected {want:?}", x[i]))?;
        }
        Ok(())
    };
    let scaled = |x: f64, want: f64| want.abs() * 2.0 * EXP2 * (2.0 + x.abs());
    near("exp2", 0, &f64::exp2, &|_, want| want.abs() * EXP2)?;
    near("log2", 1, &f64::log2, &|_, want| LOG2.max(want.abs() * EXP2))?;
    near("rsqrt", 2, &|v| 1.0 / v.sqrt(), &|_, want| want.abs() * RSQRT)?;
    near("exp", 4, &f64::exp, &scaled)?;
    near("ln", 5, &f64::ln, &|_, want| LOG2.max(want.abs() * 2.0 * EXP2))?;
    near("sigmoid", 6, &|v| 1.0 / (1.0 + (-v).exp()), &scaled)?;
    // -inf / inf is NaN, in f32 as here; below -88 the quotient may already be a zero.
    near("silu", 7, &|v| v / (1.0 + (-v).exp()), &|x, want| if x < -87.0 { 1e-35 } else { scaled(x, want) })?;

    let exact = |name: &str, r: usize, want: &dyn Fn(usize) -> u32| -> Outcome {
        let want: Vec<u32> = (0..n).map(want).collect();
        equal(name, row(r), &want).map_err(|e| format!("{e:?}, words {w:x?}").into())
    };
    let float = |name: &str, r: usize, want: &dyn Fn(usize) -> f32| -> Outcome {
        for (i, &bits) in row(r).iter().enumerate() {
            let (got, want) = (f32::from_bits(bits), want(i));
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            check(same, || format!("{name} of {:?}, {:?} is {got:?}, expected {want:?}", x[i], y[i]))?;
        }
        Ok(())
    };
    let round = |v: f32| if v.is_nan() { 0x7FFF } else { u32::from(bf16::from_f32(v).to_bits()) };
    let code = |i: usize, nibble: u32| round((w[i] >> (4 * nibble) & 15) as f32 - 8.0);
    let quarter = |i: usize, nibble: u32| round(((w[i] >> (4 * nibble) & 15) as f32 - 8.0) / 4.0);
    let quad = |i: usize| (u64::from(x[i].to_bits()) << 20 | u64::from(y[i].to_bits()), u64::from(w[i]));
    float("sqrt", 3, &|i| x[i].sqrt())?;
    float("ceil", 26, &|i| x[i].ceil())?;
    float("fma", 8, &|i| x[i].mul_add(y[i], -x[i]))?;
    exact("to_bf16", 9, &|i| round(x[i]))?;
    exact("pack_bf16", 10, &|i| round(x[i]) | round(y[i]) << 16)?;
    exact("bf16_lo", 11, &|i| w[i] << 16)?;
    exact("bf16_hi", 12, &|i| w[i] & 0xFFFF_0000)?;
    exact("from_bf16", 13, &|i| w[i] << 16)?;
    for pair in 0..4 {
        exact("dequant_pairs", 14 + pair as usize, &|i| code(i, pair) | code(i, pair + 4) << 16)?;
        exact("dequant_quarters", 22 + pair as usize, &|i| quarter(i, pair) | quarter(i, pair + 4) << 16)?;
    }
    exact("div", 18, &|i| x[i].to_bits() / w[i])?;
    exact("rem", 19, &|i| x[i].to_bits() % w[i])?;
    exact("div_usize", 20, &|i| (quad(i).0 / quad(i).1) as u32)?;
    exact("rem_usize", 21, &|i| (quad(i).0 % quad(i).1) as u32)
}
