//! Dense products: every number of rows, ragged shapes, strides and batches, what is refused.

use kdtree::device::Device;
use kdtree::kernels::Acts;
use kdtree::linear::{Product, Tiles, Upload, Variant, Weight, explain, linear, linear_by};

use super::linear::{Kind, Stored, Want, X, near, part};
use super::support::{Outcome, Random, Suite, check, equal};

/// A canary for outputs that nobody may write.
const UNTOUCHED: f32 = -77.25;

/// A matrix whose blocks share rows of x, with a ragged last run of tiles and an odd last chunk.
const TALL: (usize, usize) = (12_300, 352);

pub fn cases(suite: &mut Suite) {
    for kind in Kind::ALL {
        let name = kind.name();
        suite.both(format!("linear::{name}::rows_0_to_128"), move |d| every_row_count(d, kind));
        for k in [32, 96, 192, 2880, 7392, 10944].into_iter().filter(|&k| kind.takes(k)) {
            let main = Kind::MAIN.contains(&kind);
            for n in [1, 63, 65] {
                let case = move |d: &Device| shape(d, kind, n, k);
                match n != 63 || main {
                    true => suite.both(format!("linear::{name}::{n}x{k}"), case),
                    false => suite.cuda(format!("linear::{name}::{n}x{k}"), case),
                }
            }
            let case = move |d: &Device| shape(d, kind, 2880, k);
            match (main, k <= 96) {
                (true, true) => suite.both(format!("linear::{name}::2880x{k}"), case),
                (true, false) => suite.cuda(format!("linear::{name}::2880x{k}"), case),
                _ => {}
            }
        }
        suite.both(format!("linear::{name}::strides"), move |d| strides(d, kind));
        suite.both(format!("linear::{name}::accumulate"), move |d| accumulate(d, kind));
        suite.both(format!("linear::{name}::rows_are_independent"), move |d| rows_are_independent(d, kind));
        suite.both(format!("linear::{name}::nan_stays_in_its_row"), move |d| nan_stays_in_its_row(d, kind));
        suite.cuda(format!("linear::{name}::each_row_count_is_independent"), move |d| {
            let shapes = [(40, 128), (33, 4224), (1_030, 1152), (4240, 1152), (5_800, 1152), (TALL.0, 1152)];
            shapes.into_iter().try_for_each(|(n, k)| each_count(d, kind, n, k, 1))
        });
        suite.both(format!("linear::{name}::repeats"), move |d| repeats(d, kind, 48, 1024, &[5, 40]));
        suite.cuda(format!("linear::{name}::repeats_tall"), move |d| repeats(d, kind, TALL.0, 384, &[8, 16, 64]));
    }
    // Matrices so tall that blocks share rows of x; both groups of a last chunk, and one.
    for kind in [Kind::Bf16, Kind::W4, Kind::W4Wide] {
        let name = kind.name();
        let (n, k) = TALL;
        suite.both(format!("linear::{name}::{n}x{k}"), move |d| one_product(d, kind, n, k, &[2, 9, 17, 40]));
        suite.both(format!("linear::{name}::tall_rows_are_independent"), move |d| each_count(d, kind, n, k, 21));
    }
    for kind in [Kind::Bf16, Kind::W4] {
        let case = move |d: &Device| one_product(d, kind, TALL.0, 1152, &[8, 16, 29, 64]);
        suite.cuda(format!("linear::{}::12300x1152", kind.name()), case);
    }
    // The shape of an expert's down projection in Kimi K2.6.
    for kind in Kind::MAIN {
        let case = move |d: &Device| one_product(d, kind, 7168, 2048, &[1, 17, 65]);
        suite.cuda(format!("linear::{}::7168x2048", kind.name()), case);
    }
    // More tiles than are few: up to 8 rows take another kernel.
    for kind in Kind::ALL {
        let case = move |d: &Device| one_product(d, kind, 4240, 128, &[1, 8, 12, 20, 40]);
        suite.both(format!("linear::{}::4240x128", kind.name()), case);
    }
    // K that only some kernels take.
    for (kind, k) in [(Kind::F32, 1), (Kind::F32, 5), (Kind::F32, 67), (Kind::F32, 1030), (Kind::Bf16, 16)] {
        suite.both(format!("linear::{}::17x{k}", kind.name()), move |d| one_product(d, kind, 17, k, &[1, 9]));
    }
    suite.both("linear::bf16::65x1040", |d| one_product(d, Kind::Bf16, 65, 1040, &[1, 9]));
    for kind in [Kind::Bf16, Kind::W4, Kind::W4Wide] {
        suite.both(format!("linear::{}::variants_agree", kind.name()), move |d| variants_agree(d, kind));
    }
    suite.both("linear::one_upload", one_upload);
    suite.both("linear::f32::unaligned", unaligned_f32);
    suite.both("linear::refuses", refuses);
    suite.both("linear::explains", explains);
}

/// Multiplies random rows with `stored` and compares with the twin; unwritten outputs would be NaN.
fn product(device: &Device, stored: &Stored, weight: &Weight, rows: usize, random: &mut Random) -> Outcome {
    let [_, n, k] = stored.shape;
    let x = X::random(device, rows * k, random)?;
    let y = device.alloc(rows * n)?;
    y.fill(0xFF)?;
    linear(device, &Product::plain(weight, x.acts(), rows, y.view_mut()))?;
    let want = Want::dense(&x.seen_by(stored.kind), [k, 0], stored, rows);
    near(&format!("{rows} rows"), &y.read()?, &want)
}

fn one_product(device: &Device, kind: Kind, n: usize, k: usize, rows: &[usize]) -> Outcome {
    let mut random = Random::new((n * 31 + k) as u64);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    rows.iter().try_for_each(|&rows| product(device, &stored, &weight, rows, &mut random))
}

/// Weights of growing and shrinking sizes through one upload: what a later one overwrites has been repacked by then.
fn one_upload(device: &Device) -> Outcome {
    let mut random = Random::new(17);
    let upload = Upload::new(device)?;
    let shapes = [(20, 128), (70, 256), (19, 128), (64, 512), (33, 256)];
    let all: Vec<_> = Kind::ALL.iter().flat_map(|&kind| shapes.map(|(n, k)| (kind, n, k))).collect();
    let stored: Vec<_> = all.iter().map(|&(kind, n, k)| Stored::random(kind, [1, n, k], &mut random)).collect();
    let weights: Vec<_> =
        stored.iter().map(|s| Weight::load(&upload, &s.host("w"))).collect::<kdtree::device::Result<_>>()?;
    stored.iter().zip(&weights).try_for_each(|(stored, weight)| product(device, stored, weight, 3, &mut random))
}

fn every_row_count(device: &Device, kind: Kind) -> Outcome {
    let all: Vec<_> = (0..=128).collect();
    one_product(device, kind, 20, 128, &all)
}

fn shape(device: &Device, kind: Kind, n: usize, k: usize) -> Outcome {
    one_product(device, kind, n, k, &[1, 8, 17])
}

/// Batched, rows apart by more than they hold, batch entries inside a row and rows inside a batch entry.
fn strides(device: &Device, kind: Kind) -> Outcome {
    strided(device, kind, 128, 10)?;
    // Slices of k in different blocks of a cluster, where there are clusters.
    strided(device, kind, 1_152, 21)
}

fn strided(device: &Device, kind: Kind, k: usize, rows: usize) -> Outcome {
    let [batch, n] = [3, 19];
    let mut random = Random::new(5);
    let stored = Stored::random(kind, [batch, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    check(weight.batch() == batch && weight.n() == n && weight.k() == k, || "shape".into())?;
    for (x_stride, x_batch, y_stride, y_batch) in [
        (batch * (k + 64) + 8, k + 64, batch * n + 1, n),
        (k + 8, rows * (k + 8), n + 2, rows * (n + 2)),
        (k, 0, batch * n, n),
    ] {
        let x = X::random(device, rows * x_stride + batch * x_batch, &mut random)?;
        let y = device.upload(&vec![UNTOUCHED; rows * y_stride + batch * y_batch])?;
        let (acts, view) = (x.acts(), y.view_mut());
        let p = Product { x_stride, x_batch, y_stride, y_batch, ..Product::plain(&weight, acts, rows, view) };
        linear(device, &p)?;
        let want = Want::dense(&x.seen_by(kind), [x_stride, x_batch], &stored, rows);
        let mut got = y.read()?;
        let mut picked = Vec::new();
        for r in 0..rows {
            for b in 0..batch {
                let at = r * y_stride + b * y_batch;
                picked.extend_from_slice(&got[at..at + n]);
                got[at..at + n].fill(UNTOUCHED);
            }
        }
        near("strided", &picked, &want)?;
        check(got.iter().all(|&v| v == UNTOUCHED), || "something outside the rows was written".into())?;
    }
    Ok(())
}

fn accumulate(device: &Device, kind: Kind) -> Outcome {
    [(640, 11), (1_152, 23)].into_iter().try_for_each(|(k, rows)| accumulated(device, kind, k, rows))
}

fn accumulated(device: &Device, kind: Kind, k: usize, rows: usize) -> Outcome {
    let n = 33;
    let mut random = Random::new(6);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, &mut random)?;
    let start = random.floats(rows * n);
    let (alone, added) = (device.zeros(rows * n)?, device.upload(&start)?);
    linear(device, &Product::plain(&weight, x.acts(), rows, alone.view_mut()))?;
    let p = Product { accumulate: true, ..Product::plain(&weight, x.acts(), rows, added.view_mut()) };
    linear(device, &p)?;
    let want: Vec<_> = start.iter().zip(alone.read()?).map(|(a, b)| (a + b).to_bits()).collect();
    let got: Vec<_> = added.read()?.into_iter().map(f32::to_bits).collect();
    equal("sum", &got, &want)
}

/// A row has the same bits alone, first of 2, and anywhere among 8, 9, 64 and 65 rows.
fn rows_are_independent(device: &Device, kind: Kind) -> Outcome {
    for (n, k) in [(40, 128), (16, 1152), (33, 4224)] {
        let mut random = Random::new(8);
        let stored = Stored::random(kind, [1, n, k], &mut random);
        let weight = Weight::new(device, &stored.host("w"))?;
        let x = X::random(device, 65 * k, &mut random)?;
        let bits = |first: usize, rows: usize| -> Result<Vec<u32>, libtest_mimic::Failed> {
            let y = device.zeros(rows * n)?;
            let acts = x.acts();
            let f32 = part(acts.f32, first * k, rows * k);
            let bf16 = part(acts.bf16, first * k, rows * k);
            let acts = Acts { f32, bf16 };
            linear(device, &Product::plain(&weight, acts, rows, y.view_mut()))?;
            Ok(y.read()?.into_iter().map(f32::to_bits).collect())
        };
        let all = bits(0, 65)?;
        for (first, rows) in [(0, 1), (64, 1), (3, 2), (5, 8), (7, 9), (1, 64), (20, 33)] {
            equal(&format!("{n}x{k}, rows {first}..+{rows}"), &bits(first, rows)?, &all[first * n..][..rows * n])?;
        }
    }
    Ok(())
}

/// Each row of the first 1, 1 + `by`, … 64 of them has the bits that it has alone.
fn each_count(device: &Device, kind: Kind, n: usize, k: usize, by: usize) -> Outcome {
    let rows = 64;
    let mut random = Random::new(14);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, &mut random)?;
    let y = device.alloc(rows * n)?;
    let bits = |first: usize, rows: usize| -> Result<Vec<u32>, libtest_mimic::Failed> {
        y.fill(0xFF)?;
        let f32 = part(x.acts().f32, first * k, rows * k);
        let acts = Acts { f32, bf16: part(x.acts().bf16, first * k, rows * k) };
        linear(device, &Product::plain(&weight, acts, rows, y.view_mut()))?;
        Ok(y.read()?[..rows * n].iter().map(|v| v.to_bits()).collect())
    };
    let mut alone = Vec::new();
    for row in 0..rows {
        // On the CPU only those rows that are compared.
        alone.push(if device.is_cuda() || row % by == 0 { bits(row, 1)? } else { Vec::new() });
    }
    for count in (1..=rows).step_by(by) {
        let all = bits(0, count)?;
        for (row, alone) in alone.iter().enumerate().take(count).filter(|(_, alone)| !alone.is_empty()) {
            equal(&format!("{n}x{k}, row {row} of {count}"), &all[row * n..][..n], alone)?;
        }
    }
    Ok(())
}

/// A NaN or an infinity reaches every output of its row and no other, also when it lies behind the last row.
fn nan_stays_in_its_row(device: &Device, kind: Kind) -> Outcome {
    // The last chunk is half one.
    [(160, 9), (1_056, 20)].into_iter().try_for_each(|(k, rows)| {
        let k = if kind.takes(k) { k } else { k / 128 * 128 };
        nan_stays(device, kind, k, rows)
    })
}

fn nan_stays(device: &Device, kind: Kind, k: usize, rows: usize) -> Outcome {
    let n = 18;
    let mut random = Random::new(9);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let mut floats = random.floats((rows + 1) * k);
    floats[2 * k + 3] = f32::NAN;
    floats[rows * k..].fill(f32::NAN);
    let x = X::upload(device, floats)?;
    let y = device.alloc(rows * n)?;
    linear(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()))?;
    let want = Want::dense(&x.seen_by(kind), [k, 0], &stored, rows);
    check(want.y.iter().filter(|v| v.is_nan()).count() == n, || "the twin has one row of NaN".into())?;
    near("with a NaN", &y.read()?, &want)
}

/// Every kernel that adds slices of k in the order of the stream gives the same bits, for any number of rows.
fn variants_agree(device: &Device, kind: Kind) -> Outcome {
    // Ragged tiles; slices of two and three chunks, the last chunk half one; fewer slices than blocks of a cluster.
    [(1_184, &[5, 16, 37, 64][..]), (320, &[20])].into_iter().try_for_each(|(k, rows)| agree(device, kind, k, rows))
}

fn agree(device: &Device, kind: Kind, k: usize, rows: &[usize]) -> Outcome {
    let n = 150;
    let mut random = Random::new(15);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    for &rows in rows {
        let x = X::random(device, rows * k, &mut random)?;
        let y = device.alloc(rows * n)?;
        let p = Product::plain(&weight, x.acts(), rows, y.view_mut());
        let mut first = None;
        let exists = |v: &Variant| v.kernel(&stored.host("w")).is_some() && v.runs_on(device);
        let own = |v: &Variant| *v != Variant::Tiled(Tiles::Warpgroups) && exists(v);
        for variant in Variant::ALL.into_iter().filter(own) {
            y.fill(0xFF)?;
            linear_by(device, &p, variant)?;
            let bits: Vec<_> = y.read()?.into_iter().map(f32::to_bits).collect();
            let (name, want) = first.get_or_insert_with(|| (variant, bits.clone()));
            equal(&format!("{rows} rows by {variant} and {name}"), &bits, want)?;
        }
        near("variants", &y.read()?, &Want::dense(&x.seen_by(kind), [k, 0], &stored, rows))?;
    }
    Ok(())
}

/// The same launch gives the same bits: 200 times on a GPU, 3 on the CPU (each with its own schedule).
fn repeats(device: &Device, kind: Kind, n: usize, k: usize, counts: &[usize]) -> Outcome {
    counts.iter().try_for_each(|&rows| repeat(device, kind, n, k, rows))
}

fn repeat(device: &Device, kind: Kind, n: usize, k: usize, rows: usize) -> Outcome {
    let mut random = Random::new(10);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, &mut random)?;
    let y = device.zeros(rows * n)?;
    let mut first = Vec::new();
    for _ in 0..if device.is_cuda() { 200 } else { 3 } {
        y.fill(0xFF)?;
        linear(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()))?;
        let bits: Vec<_> = y.read()?.into_iter().map(f32::to_bits).collect();
        if first.is_empty() {
            first = bits;
        } else {
            equal("repeat", &bits, &first)?;
        }
    }
    Ok(())
}

/// f32 products read x at any element, with the same bits as aligned.
fn unaligned_f32(device: &Device) -> Outcome {
    let (n, k, rows) = (9, 64, 3);
    let mut random = Random::new(11);
    let stored = Stored::random(Kind::F32, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let floats = random.floats(rows * k);
    let mut results = Vec::new();
    for shift in 0..4 {
        let x = X::upload(device, [vec![f32::NAN; shift], floats.clone()].concat())?;
        let y = device.zeros(rows * n)?;
        let f32 = part(x.acts().f32, shift, rows * k);
        let acts = Acts { f32, ..x.acts() };
        linear(device, &Product::plain(&weight, acts, rows, y.view_mut()))?;
        results.push(y.read()?);
    }
    (1..4).try_for_each(|shift| equal("shifted", &results[shift], &results[0]))
}

fn refuses(device: &Device) -> Outcome {
    let mut random = Random::new(12);
    let stored = Stored::random(Kind::W4, [1, 8, 64], &mut random);
    let weight = Weight::new(device, &stored.host("q_proj"))?;
    let x = X::random(device, 200, &mut random)?;
    let y = device.zeros::<f32>(16)?;
    let plain = |rows| Product::plain(&weight, x.acts(), rows, y.view_mut());
    let says = |p: Product, what: &str| {
        let error = linear(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("gemm_w4a16_m8_few: `q_proj`") && error.contains(what), || {
            format!("expected a refusal with `{what}`, found `{error}`")
        })
    };
    linear(device, &plain(2))?;
    linear(device, &plain(0))?;
    says(plain(3), "y holds 16, expected 24")?;
    says(Product { x_stride: 160, ..plain(2) }, "x holds 200, expected 224")?;
    says(Product { x_stride: 68, ..plain(2) }, "rows must begin at multiples of 8 elements")?;
    says(Product { y_stride: 7, ..plain(2) }, "overlap")?;
    let acts = Acts { bf16: cuda_std::Global::EMPTY, ..x.acts() };
    says(Product { x: acts, ..plain(1) }, "activations that are absent")?;
    let acts = Acts { bf16: part(x.acts().bf16, 1, 64), ..x.acts() };
    says(Product { x: acts, ..plain(1) }, "x begins 2 bytes past a multiple of 16")
}

fn explains(device: &Device) -> Outcome {
    let stored = Stored::random(Kind::W4, [1, 40, 1088], &mut Random::new(13));
    let weight = Weight::new(device, &stored.host("w"))?;
    let text = explain(device, &weight, 65).to_string();
    let plain = "w4a16 1 x [40, 1088] x 65 rows: gemm_w4a16_m32_few, 16 x 24 a block, k in 64s over 8 warps, \
                9 units, blocks of 256, 44416 shared, 29376 weight bytes";
    let clusters = "w4a16 1 x [40, 1088] x 65 rows: gemm_w4a16_split64_few, 64 x 40 a block, k in 64s over 8 blocks, \
                    2 units, blocks of 128, 63168 shared, 29376 weight bytes";
    let want = if device.has_clusters() { clusters } else { plain };
    check(text == want, || format!("expected `{want}`, found `{text}`"))?;
    let text = explain(device, &weight, 257).to_string();
    let want = "w4a16 1 x [40, 1088] x 257 rows: gemm_w4a16_tiled, 128 x 64 a block, k in 64s in 8 slices, 5 units, \
                blocks of 256, 51456 shared, 29376 weight bytes";
    check(text == want, || format!("expected `{want}`, found `{text}`"))?;
    check(weight.bytes() == 29376, || format!("{} bytes", weight.bytes()))?;
    check(explain(device, &weight, 65).flops() == 2 * 65 * 40 * 1088, || "flops".into())
}
