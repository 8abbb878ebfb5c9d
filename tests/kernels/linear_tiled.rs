//! Dense products of many rows, by each kind of tile: every number of rows around a block's, ragged shapes, strides and
//! batches, and what a row's bits depend on.

use kdtree::device::Device;
use kdtree::kernels::Acts;
use kdtree::linear::{Many, Panels, Product, Tiles, Variant, Weight, explain, explain_fast};
use kdtree::linear::{linear, linear_by, panel_words, x_panels};
use kdtree::reference::linear as twin;

use super::linear::{Kind, Stored, Want, X, near, part};
use super::support::{Outcome, Random, Suite, check, equal};

/// A canary for outputs that nobody may write.
const UNTOUCHED: f32 = -77.25;
const KINDS: [Kind; 4] = [Kind::Bf16, Kind::W4, Kind::W4Wide, Kind::W4Coarse];

pub fn cases(suite: &mut Suite) {
    for tiles in Tiles::ALL {
        // Of f32 scales f16 would round some.
        for kind in KINDS.into_iter().filter(|&kind| tiles == Tiles::Warps || kind != Kind::W4Wide) {
            let name = |case: &str| format!("linear_tiled::{tiles:?}::{}::{case}", kind.name()).to_lowercase();
            let main = Kind::MAIN.contains(&kind);
            suite.both(name("rows"), move |d| some(d, tiles, kind, [20, 128], &[1, 9, 64, 65, 129, 257]));
            let case = move |d: &Device| some(d, tiles, kind, [20, 128], &(0..=300).collect::<Vec<_>>());
            suite.cuda(name("every_row_count"), case);
            for k in [16, 32, 96, 192, 320, 1040, 1152, 2880, 7392].into_iter().filter(|&k| kind.takes(k)) {
                for n in [1, 63, 65, 2880] {
                    let case = move |d: &Device| some(d, tiles, kind, [n, k], &[65, 130]);
                    match n == 65 && (main || k == 320) && k <= 1152 || n == 1 && k == 96 {
                        true => suite.both(name(&format!("{n}x{k}")), case),
                        false => suite.cuda(name(&format!("{n}x{k}")), case),
                    }
                }
            }
            suite.cuda(name("7168x2048"), move |d| some(d, tiles, kind, [7168, 2048], &[97]));
            // Those that wait for a GPU where another kind shows the same on the CPU.
            let mut add = |case: &str, run: fn(&Device, Tiles, Kind) -> Outcome| match main {
                true => suite.both(name(case), move |d| run(d, tiles, kind)),
                false => suite.cuda(name(case), move |d| run(d, tiles, kind)),
            };
            // More blocks of rows than are numbered together.
            add("slabs", |d, tiles, kind| some(d, tiles, kind, [140, 128], &[1100]));
            add("strides", strides);
            add("accumulate", accumulate);
            add("rows_are_independent", rows_are_independent);
            add("nan_stays_in_its_row", nan_stays_in_its_row);
            add("repeats", repeats);
        }
    }
    for kind in KINDS {
        suite.both(format!("linear_tiled::bits_of_few_rows::{}", kind.name()), move |d| bits_of_few_rows(d, kind));
    }
    suite.both("linear_tiled::f32_has_none", f32_has_none);
    suite.both("linear_tiled::which_may_be_fast", which_may_be_fast);
    suite.both("linear_tiled::rows_of_all_sizes", rows_of_all_sizes);
    for half in [false, true] {
        suite.both(format!("linear_tiled::panels::{}", if half { "f16" } else { "bf16" }), move |d| panels(d, half));
    }
    suite.both("linear_tiled::refuses", refuses);
}

/// `linear_by` tiles, with memory for panels that holds NaN.
fn multiply(device: &Device, p: &Product, tiles: Tiles) -> kdtree::device::Result<()> {
    let memory = device.alloc::<u32>(panel_words(p.rows, p.weight.k(), p.weight.batch()))?;
    memory.fill(0xFF)?;
    linear_by(device, &Product { many: Many::Fast(memory.view_mut()), ..*p }, Variant::Tiled(tiles))
}

/// Multiplies random rows and compares with the twin; unwritten outputs would be NaN.
fn some(device: &Device, tiles: Tiles, kind: Kind, [n, k]: [usize; 2], rows: &[usize]) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    let mut random = Random::new((n * 31 + k) as u64);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    for &rows in rows {
        let x = X::random(device, rows * k, &mut random)?;
        let y = device.alloc(rows * n)?;
        y.fill(0xFF)?;
        multiply(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()), tiles)?;
        let want = Want::dense(&x.seen_by(kind), [k, 0], &stored, rows);
        near(&format!("{rows} rows"), &y.read()?, &want)?;
    }
    Ok(())
}

/// Batched, rows apart by more than they hold, batch entries inside a row and rows inside a batch entry.
fn strides(device: &Device, tiles: Tiles, kind: Kind) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    let ([batch, n, k], rows) = ([3, 19, 128], 131);
    let mut random = Random::new(5);
    let stored = Stored::random(kind, [batch, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    for (x_stride, x_batch, y_stride, y_batch) in
        [(batch * 192 + 8, 192, batch * n + 1, n), (136, rows * 136, n + 2, rows * (n + 2)), (k, 0, batch * n, n)]
    {
        let x = X::random(device, rows * x_stride + batch * x_batch, &mut random)?;
        let y = device.upload(&vec![UNTOUCHED; rows * y_stride + batch * y_batch])?;
        let (acts, view) = (x.acts(), y.view_mut());
        let p = Product { x_stride, x_batch, y_stride, y_batch, ..Product::plain(&weight, acts, rows, view) };
        multiply(device, &p, tiles)?;
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

fn accumulate(device: &Device, tiles: Tiles, kind: Kind) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    let (n, k, rows) = (33, 640, 70);
    let mut random = Random::new(6);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, &mut random)?;
    let start = random.floats(rows * n);
    let (alone, added) = (device.zeros(rows * n)?, device.upload(&start)?);
    multiply(device, &Product::plain(&weight, x.acts(), rows, alone.view_mut()), tiles)?;
    let p = Product { accumulate: true, ..Product::plain(&weight, x.acts(), rows, added.view_mut()) };
    multiply(device, &p, tiles)?;
    let want: Vec<_> = start.iter().zip(alone.read()?).map(|(a, b)| (a + b).to_bits()).collect();
    let got: Vec<_> = added.read()?.into_iter().map(f32::to_bits).collect();
    equal("sum", &got, &want)
}

/// The bits of `rows` rows from row `first` of x on.
fn bits(
    device: &Device,
    (weight, x): (&Weight, &X),
    (first, rows): (usize, usize),
    multiply: impl Fn(&Device, &Product) -> kdtree::device::Result<()>,
) -> Result<Vec<u32>, libtest_mimic::Failed> {
    let (n, k) = (weight.n(), weight.k());
    let y = device.zeros(rows * n)?;
    let acts = Acts { f32: cuda_std::Global::EMPTY, bf16: part(x.acts().bf16, first * k, rows * k) };
    multiply(device, &Product::plain(weight, acts, rows, y.view_mut()))?;
    Ok(y.read()?.into_iter().map(f32::to_bits).collect())
}

/// A row has the same bits alone and anywhere among others.
fn rows_are_independent(device: &Device, tiles: Tiles, kind: Kind) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    for (n, k) in [(40, 128), (16, 1152), (33, 4224)] {
        if k > 1152 && !device.is_cuda() {
            continue;
        }
        let mut random = Random::new(8);
        let stored = Stored::random(kind, [1, n, k], &mut random);
        let weight = Weight::new(device, &stored.host("w"))?;
        let x = X::random(device, 300 * k, &mut random)?;
        let multiply = |d: &Device, p: &Product| multiply(d, p, tiles);
        let all = bits(device, (&weight, &x), (0, 300), multiply)?;
        for (first, rows) in [(0, 1), (299, 1), (3, 65), (100, 128), (171, 129), (64, 200)] {
            let some = bits(device, (&weight, &x), (first, rows), multiply)?;
            equal(&format!("{n}x{k}, rows {first}..+{rows}"), &some, &all[first * n..][..rows * n])?;
        }
    }
    Ok(())
}

/// Tiles of warps give the bits of the kernels of few rows.
fn bits_of_few_rows(device: &Device, kind: Kind) -> Outcome {
    for (n, k) in [(40, 128), (16, 1152), (33, 4224), (70, 8192)] {
        if k > 1152 && !device.is_cuda() {
            continue;
        }
        let mut random = Random::new(14);
        let stored = Stored::random(kind, [1, n, k], &mut random);
        let weight = Weight::new(device, &stored.host("w"))?;
        let x = X::random(device, 70 * k, &mut random)?;
        let all = bits(device, (&weight, &x), (0, 70), |d, p| multiply(d, p, Tiles::Warps))?;
        for (first, rows) in [(0, 1), (2, 16), (5, 32), (6, 64)] {
            let some = bits(device, (&weight, &x), (first, rows), linear)?;
            equal(&format!("{n}x{k}, rows {first}..+{rows}"), &some, &all[first * n..][..rows * n])?;
        }
    }
    Ok(())
}

/// A NaN or an infinity reaches every output of its row and no other, also when it lies behind the last row.
fn nan_stays_in_its_row(device: &Device, tiles: Tiles, kind: Kind) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    let (n, k, rows) = (18, 160, 69);
    let k = if kind.takes(k) { k } else { 128 };
    let mut random = Random::new(9);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let mut floats = random.floats((rows + 1) * k);
    floats[2 * k + 3] = f32::NAN;
    floats[rows * k..].fill(f32::NAN);
    let x = X::upload(device, floats)?;
    let y = device.alloc(rows * n)?;
    multiply(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()), tiles)?;
    let want = Want::dense(&x.seen_by(kind), [k, 0], &stored, rows);
    check(want.y.iter().filter(|v| v.is_nan()).count() == n, || "the twin has one row of NaN".into())?;
    near("with a NaN", &y.read()?, &want)
}

/// The same launch gives the same bits: 200 times on a GPU, 3 on the CPU (each with its own schedule).
fn repeats(device: &Device, tiles: Tiles, kind: Kind) -> Outcome {
    if !tiles.runs_on(device) {
        return Ok(());
    }
    let (n, k, rows) = (150, 1024, 140);
    let rows = if device.is_cuda() { rows * 4 } else { rows };
    let mut random = Random::new(10);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, &mut random)?;
    let multiply = |d: &Device, p: &Product| multiply(d, p, tiles);
    let first = bits(device, (&weight, &x), (0, rows), multiply)?;
    for _ in 1..if device.is_cuda() { 200 } else { 3 } {
        equal("repeat", &bits(device, (&weight, &x), (0, rows), multiply)?, &first)?;
    }
    Ok(())
}

/// f32 weights have one kernel for any number of rows.
fn f32_has_none(device: &Device) -> Outcome {
    let stored = Stored::random(Kind::F32, [1, 40, 64], &mut Random::new(15));
    let weight = Weight::new(device, &stored.host("w"))?;
    check(explain(device, &weight, 300).kernel == "gemm_f32", || explain(device, &weight, 300).to_string())?;
    for variant in Variant::ALL {
        check(variant.kernel(&stored.host("w")).is_none(), || format!("{variant} for f32"))?;
        let x = X::random(device, 130 * 64, &mut Random::new(17))?;
        let y = device.zeros::<f32>(130 * 40)?;
        let p = Product::plain(&weight, x.acts(), 130, y.view_mut());
        let error = linear_by(device, &p, variant).err().map(|e| e.to_string()).unwrap_or_default();
        let wanted = format!("`w`: f32 weights have no variant {variant}");
        check(error.contains(&wanted), || format!("expected a refusal with `{wanted}`, found `{error}`"))?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let mut random = Random::new(16);
    let stored = Stored::random(Kind::W4, [1, 8, 64], &mut random);
    let weight = Weight::new(device, &stored.host("q_proj"))?;
    let x = X::random(device, 70 * 64, &mut random)?;
    let y = device.zeros::<f32>(69 * 8)?;
    let p = Product::plain(&weight, x.acts(), 70, y.view_mut());
    let error = linear(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
    let wanted = "`q_proj` [1, 8, 64] x 70 rows: y holds 552, expected 560";
    check(error.contains(wanted), || format!("expected a refusal with `{wanted}`, found `{error}`"))
}

/// Prompts take warpgroups where they are exact, and too little memory for panels is refused.
fn which_may_be_fast(device: &Device) -> Outcome {
    let fast = Tiles::Warpgroups.runs_on(device);
    let mut random = Random::new(18);
    for (kind, name) in [(Kind::W4, "gemm_w4a16_wgmma"), (Kind::Bf16, "gemm_bf16_wgmma")] {
        let stored = Stored::random(kind, [1, 40, 64], &mut random);
        let weight = Weight::new(device, &stored.host("w"))?;
        let plan = explain_fast(device, &weight, 97);
        check((plan.kernel == name) == fast, || plan.to_string())?;
        check(plan.to_string().contains(", after x_panels") == fast, || plan.to_string())?;
        check(explain_fast(device, &weight, 96).kernel != name, || "96 rows are streamed".into())?;
        check(explain(device, &weight, 512).kernel != name, || "trees have the bits of few rows".into())?;
        let x = X::random(device, 130 * 64, &mut random)?;
        let (y, memory) = (device.zeros::<f32>(130 * 40)?, device.zeros::<u32>(100)?);
        let many = Many::Fast(memory.view_mut());
        let p = Product { many, ..Product::plain(&weight, x.acts(), 130, y.view_mut()) };
        let found = linear(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(found.contains("memory holds 100, ") == fast, || format!("found `{found}`"))?;
    }
    // 30 powers of two between scales: more than f16 has digits for.
    let mut stored = Stored::random(Kind::W4, [1, 40, 64], &mut random);
    stored.scale_rows(|row| if row == 7 { 2f32.powi(-40) } else { 1.0 });
    let weight = Weight::new(device, &stored.host("w"))?;
    check(explain_fast(device, &weight, 300).kernel == "gemm_w4a16_tiled", || "scales too far apart".into())
}

/// Rows and weights whose sizes f16 could not hold.
fn rows_of_all_sizes(device: &Device) -> Outcome {
    if !Tiles::Warpgroups.runs_on(device) {
        return Ok(());
    }
    let (n, k, rows) = (40, 192, 131);
    for size in [1e-20f32, 1e-6, 1e6] {
        let mut random = Random::new(19);
        let mut stored = Stored::random(Kind::W4, [1, n, k], &mut random);
        stored.scale_rows(|row| if row % 2 == 0 { size } else { size / 1024.0 });
        let weight = Weight::new(device, &stored.host("w"))?;
        let mut floats = random.floats(rows * k);
        for (row, x) in floats.chunks_mut(k).enumerate() {
            let size = [1.0, 1e20, 1e-8, 0.0][row % 4];
            x.iter_mut().for_each(|x| *x *= size);
            x[row % k] *= 16.0;
        }
        let x = X::upload(device, floats)?;
        let y = device.alloc(rows * n)?;
        y.fill(0xFF)?;
        multiply(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()), Tiles::Warpgroups)?;
        let want = Want::dense(&x.seen_by(Kind::W4), [k, 0], &stored, rows);
        near(&format!("weights of {size}"), &y.read()?, &want)?;
    }
    Ok(())
}

/// Every value of x in its place, zeros behind the last k, and the factors of the rows.
fn panels(device: &Device, half: bool) -> Outcome {
    let mut random = Random::new(20);
    for (rows, k) in [(1, 16), (129, 208), (260, 64), (131, 2096)] {
        let (x_stride, batch) = (k + 8, 2);
        let x_batch = rows * x_stride;
        let mut x: Vec<_> = random.floats(batch * x_batch).into_iter().map(cuda_std::bf16::from_f32).collect();
        for (row, x) in x.chunks_mut(x_stride).enumerate() {
            match row % 5 {
                1 => x.iter_mut().for_each(|x| *x = cuda_std::bf16::from_f32(x.to_f32() * 1e-38)),
                2 => x.iter_mut().for_each(|x| *x = cuda_std::bf16::from_f32(x.to_f32() * 1e38)),
                3 => x[row % k] = cuda_std::bf16::from_f32([0.0, -0.0, f32::INFINITY, f32::NAN][row % 4]),
                _ => (),
            }
        }
        let memory = device.alloc::<u32>(panel_words(rows, k, batch))?;
        memory.fill(0xFF)?;
        let from = device.upload(&x)?;
        let of = Panels { x: from.view(), rows, k, batch, x_stride, x_batch, half, memory: memory.view_mut() };
        x_panels(device, &of)?;
        let found = memory.read()?;
        let value = |at: usize| (found[at / 2] >> (at % 2 * 16)) as u16;
        let (blocks, padded) = (rows.div_ceil(128), k.next_multiple_of(128));
        for (row, x) in x.chunks(x_stride).enumerate() {
            let (entry, within) = (row / rows, row % rows);
            let (want, undo) = match half {
                true => twin::half_row(&x[..k]),
                false => (x[..k].iter().map(|v| v.to_bits()).collect(), 1.0),
            };
            for at in 0..padded {
                let (got, want) =
                    (value(entry * blocks * 128 * padded + twin::panel_index(within, at, k)), want.get(at).copied());
                let nan = half && x.get(at).is_some_and(|x| x.is_nan()) && got & 0x7FFF > 0x7C00;
                check(nan || got == want.unwrap_or(0), || format!("row {row}, k {at}: {got:x}, expected {want:x?}"))?;
            }
            let factors = batch * blocks * 64 * padded;
            let got = f32::from_bits(found[factors + entry * blocks * 128 + within]);
            check(!half || got == undo, || format!("row {row}: factor {got}, expected {undo}"))?;
        }
    }
    Ok(())
}
