//! Queries, cache rows and the drafter's heads: rotation at S + depth, norm, rounding, places.

use cuda_std::bf16;
use gpu::args::attention::{F8_ROTARY, F8_ROW, KEY, LATENT, ROPE};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::{Cache, HeadNormRope, KvAppend, KvFormat, Query, Rope, head_norm_rope, kv_append, query};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};
use super::tree::{Tree, state_words};

const EPS: f32 = 1e-6;

pub fn cases(suite: &mut Suite) {
    for (rows, heads, nope, committed) in [(0, 2, 128, 5), (1, 1, 128, 0), (5, 3, 128, 7), (2, 4, 32, 100)] {
        let name = format!("query::{rows}x{heads}x{nope}_at_{committed}");
        suite.both(name, move |d| query_against_reference(d, rows, heads, nope, committed));
    }
    for (rows, committed) in [(0, 3), (1, 0), (6, 0), (17, 40)] {
        suite.both(format!("kv_append::{rows}_at_{committed}"), move |d| append_against_reference(d, rows, committed));
    }
    suite.both("kv_append::siblings_share_a_position", siblings);
    for (rows, committed) in [(0, 3), (1, 0), (6, 0), (17, 40)] {
        suite.both(format!("kv_append_f8::{rows}_at_{committed}"), move |d| append_f8(d, rows, committed));
    }
    suite.both("kv_append_f8::edges", append_f8_edges);
    for (heads, dim) in [(1, 64), (8, 64), (9, 128), (64, 128)] {
        suite.both(format!("head_norm_rope::{heads}x{dim}"), move |d| heads_against_reference(d, heads, dim));
    }
    suite.both("head_norm_rope::plain_is_rounding", plain_heads);
    suite.both("query::refuses", refuses);
}

/// Tables of random angles, `[positions, pairs]`.
struct Tables {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Tables {
    fn random(random: &mut Random, positions: usize, pairs: usize) -> Self {
        let angles = random.floats(positions * pairs);
        Self {
            cos: angles.iter().map(|a| (3.0 * a).cos()).collect(),
            sin: angles.iter().map(|a| (3.0 * a).sin()).collect(),
        }
    }

    fn upload(&self, device: &Device) -> Result<(Buffer<f32>, Buffer<f32>), libtest_mimic::Failed> {
        Ok((device.upload(&self.cos)?, device.upload(&self.sin)?))
    }
}

fn rope((cos, sin): &(Buffer<f32>, Buffer<f32>)) -> Rope {
    Rope { cos: cos.view(), sin: sin.view() }
}

fn to_f32(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// A tree of mixed depths, and its positions after `committed`.
fn positions(rows: usize, committed: usize) -> (Vec<u32>, Vec<usize>) {
    let depths = Tree { parents: (0..rows).map(|i| i / 2).collect() }.depths();
    let positions = depths.iter().map(|&d| committed + d as usize).collect();
    (depths, positions)
}

fn query_against_reference(device: &Device, rows: usize, heads: usize, nope: usize, committed: usize) -> Outcome {
    let mut random = Random::new(21);
    let (q, q_lat) = (random.floats(rows * heads * (nope + ROPE)), random.floats(rows * heads * LATENT));
    let tables = Tables::random(&mut random, committed + 8, ROPE / 2);
    let (depths, positions) = positions(rows, committed);
    let (dq, dlat, dd) = (device.upload(&q)?, device.upload(&q_lat)?, device.upload(&depths)?);
    let (dt, state) = (tables.upload(device)?, device.upload(&state_words(committed, &[]))?);
    let out = device.alloc(rows * heads * KEY)?;
    out.fill(0xFF)?;
    let p = Query {
        q: dq.view(),
        q_lat: dlat.view(),
        rope: rope(&dt),
        depths: dd.view(),
        state: state.view(),
        out: out.view_mut(),
        rows,
        heads,
        nope,
    };
    query(device, p)?;
    let got = out.read()?;
    let want = reference::query(&q, &q_lat, &tables.cos, &tables.sin, &positions, heads);
    close("query", &to_f32(&got), &want, bounds::ROUNDED)?;
    for (i, (got, latent)) in got.chunks(KEY).zip(q_lat.chunks(LATENT)).enumerate() {
        let latent: Vec<_> = latent.iter().map(|&v| bf16::from_f32(v)).collect();
        equal(&format!("latent of query {i}"), &got[..LATENT], &latent)?;
    }
    Ok(())
}

/// Appends the rows of a tree behind a cache of `committed` rows of ones; returns the cache.
fn append(
    device: &Device,
    t: &[f32],
    weight: &[f32],
    tables: &Tables,
    depths: &[u32],
    committed: usize,
) -> Result<Vec<bf16>, libtest_mimic::Failed> {
    let bytes = append_to(device, KvFormat::Bf16, t, weight, tables, depths, committed)?;
    Ok(bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect())
}

/// As [`append`] in either format, behind bytes of bf16 ones.
fn append_to(
    device: &Device,
    kv: KvFormat,
    t: &[f32],
    weight: &[f32],
    tables: &Tables,
    depths: &[u32],
    committed: usize,
) -> Result<Vec<u8>, libtest_mimic::Failed> {
    let rows = depths.len();
    let (dt, dw, dd) = (device.upload(t)?, device.upload(weight)?, device.upload(depths)?);
    let (dtab, state) = (tables.upload(device)?, device.upload(&state_words(committed, &[]))?);
    let before = bf16::ONE.to_le_bytes().repeat((committed + rows + 2) * kv.row_bytes() / 2);
    let cache = device.upload(&before)?;
    let p = KvAppend {
        t: dt.view(),
        weight: dw.view(),
        eps: EPS,
        rope: rope(&dtab),
        depths: dd.view(),
        state: state.view(),
        cache: Cache { format: kv, bytes: cache.view_mut() },
        rows,
    };
    kv_append(device, p)?;
    Ok(cache.read()?)
}

/// Codes are the nearest, but for ties that sums in f32 see otherwise; scales and rotated keys as the twin has them.
fn append_f8(device: &Device, rows: usize, committed: usize) -> Outcome {
    let mut random = Random::new(27);
    let (t, weight) = (random.floats(rows * KEY), random.floats(LATENT));
    let tables = Tables::random(&mut random, committed + 8, ROPE / 2);
    let (depths, positions) = positions(rows, committed);
    let got = append_to(device, KvFormat::F8, &t, &weight, &tables, &depths, committed)?;
    let want = reference::kv_append(&t, &weight, EPS, &tables.cos, &tables.sin, &positions);
    let (before, new) = got.split_at(committed * F8_ROW);
    let (new, behind) = new.split_at(rows * F8_ROW);
    let untouched =
        before.iter().chain(behind).copied().eq(bf16::ONE.to_le_bytes().repeat((committed + 2) * F8_ROW / 2));
    check(untouched, || "a row of the cache outside S..S + rows has changed".into())?;
    close("values", &to_f32(&reference::f8_values(new)), &want, bounds::F8)?;
    let mut ties = 0;
    for (row, (got, want)) in new.chunks(F8_ROW).zip(reference::f8_rows(&want).chunks(F8_ROW)).enumerate() {
        ties += got[..LATENT].iter().zip(want).filter(|(a, b)| a != b).count();
        let near = got[..LATENT].iter().zip(want).all(|(&a, &b)| a.abs_diff(b) <= 1);
        check(near, || format!("row {row}: a code is not the nearest"))?;
        equal(&format!("scales of row {row}"), &got[LATENT..F8_ROTARY], &want[LATENT..F8_ROTARY])?;
    }
    check(ties * 200 <= rows * LATENT, || format!("{ties} codes of {rows} rows differ"))
}

/// Zeros, one large value, values too large and NaN: each group of 128 on its own.
fn append_f8_edges(device: &Device) -> Outcome {
    let tables = Tables::random(&mut Random::new(29), 8, ROPE / 2);
    // The norm of a row of ones is one, and so the weight is what is kept.
    let (t, mut weight) = (vec![1.0; KEY], vec![0f32; LATENT]);
    weight[128..256].fill(1e-3);
    (weight[130], weight[256], weight[300], weight[384]) = (448.0, 57_000.0, -1.0, 1e6);
    let got = append_to(device, KvFormat::F8, &t, &weight, &tables, &[0], 0)?;
    let values = to_f32(&reference::f8_values(&got[..F8_ROW]));
    equal("zeros", &values[..128], &[0.0; 128])?;
    equal("the large value and its neighbours", &values[129..132], &[0.001953125, 448.0, 0.001953125])?;
    equal("the largest", &[values[256], values[300]], &[57_344.0, -1.0])?;
    check(values[384..512].iter().all(|v| v.is_nan()), || "values too large became numbers".into())?;
    weight[7] = f32::NAN;
    let got = append_to(device, KvFormat::F8, &t, &weight, &tables, &[0], 0)?;
    let values = to_f32(&reference::f8_values(&got[..F8_ROW]));
    check(values[..128].iter().all(|v| v.is_nan()), || "a NaN became a number".into())?;
    check(values[128..384].iter().all(|v| v.is_finite()), || "a NaN has left its group".into())
}

fn append_against_reference(device: &Device, rows: usize, committed: usize) -> Outcome {
    let mut random = Random::new(22);
    let (t, weight) = (random.floats(rows * KEY), random.floats(LATENT));
    let tables = Tables::random(&mut random, committed + 8, ROPE / 2);
    let (depths, positions) = positions(rows, committed);
    let cache = append(device, &t, &weight, &tables, &depths, committed)?;
    let (before, new) = cache.split_at(committed * KEY);
    let want = reference::kv_append(&t, &weight, EPS, &tables.cos, &tables.sin, &positions);
    close("new rows", &to_f32(&new[..rows * KEY]), &want, bounds::ROUNDED)?;
    let untouched = before.iter().chain(&new[rows * KEY..]).all(|&v| v == bf16::ONE);
    check(untouched, || "a row of the cache outside S..S + rows has changed".into())
}

/// Equal rows at one depth give equal cache rows in their own slots; at another depth, another rotation.
fn siblings(device: &Device) -> Outcome {
    let mut random = Random::new(23);
    let (row, weight) = (random.floats(KEY), random.floats(LATENT));
    let tables = Tables::random(&mut random, 20, ROPE / 2);
    let cache = append(device, &row.repeat(4), &weight, &tables, &[0, 1, 1, 2], 9)?;
    let slot = |i: usize| &cache[(9 + i) * KEY..(10 + i) * KEY];
    equal("siblings", slot(1), slot(2))?;
    equal("latents", &slot(0)[..LATENT], &slot(3)[..LATENT])?;
    for other in [0, 3] {
        check(slot(1)[LATENT..] != slot(other)[LATENT..], || format!("row {other} is rotated like row 1"))?;
    }
    Ok(())
}

/// Norm and rotation, into rows of a wider stride: at S + base and at base.
fn heads_against_reference(device: &Device, heads: usize, dim: usize) -> Outcome {
    let (rows, committed, base) = (3, 4, 2);
    let (width, stride) = (heads * dim, heads * dim + 8);
    let mut random = Random::new(24);
    let (x, weight) = (random.floats(rows * width), random.floats(dim));
    let tables = Tables::random(&mut random, committed + base + rows, dim / 2);
    let (dx, dw, dt) = (device.upload(&x)?, device.upload(&weight)?, tables.upload(device)?);
    let state = device.upload(&state_words(committed, &[]))?;
    for to_cache in [false, true] {
        let first = base + if to_cache { committed } else { 0 };
        let out = device.upload(&vec![bf16::ONE; (first + rows + 1) * stride])?;
        let p = HeadNormRope {
            x: dx.view(),
            weight: dw.view(),
            eps: EPS,
            rope: rope(&dt),
            state: state.view(),
            out: out.view_mut(),
            rows,
            heads,
            head_dim: dim,
            stride,
            base,
            to_cache,
        };
        head_norm_rope(device, p)?;
        let mut got = out.read()?;
        for row in 0..rows {
            let x = &x[row * width..(row + 1) * width];
            let tables = Some((&tables.cos[..], &tables.sin[..]));
            let want = reference::head_norm_rope(x, dim, Some(&weight), EPS, tables, committed + base + row);
            let at = (first + row) * stride;
            close(&format!("row {row}, to_cache {to_cache}"), &to_f32(&got[at..at + width]), &want, bounds::ROUNDED)?;
            got[at..at + width].fill(bf16::ONE);
        }
        check(got.iter().all(|&v| v == bf16::ONE), || "a value between or outside the rows has changed".into())?;
    }
    Ok(())
}

/// Without weight and table the values are rounded, and no more.
fn plain_heads(device: &Device) -> Outcome {
    let x = Random::new(25).floats(2 * 4 * 64);
    let (dx, state) = (device.upload(&x)?, device.upload(&state_words(1, &[]))?);
    let out = device.alloc(3 * 256)?;
    let p = HeadNormRope {
        x: dx.view(),
        weight: cuda_std::Global::EMPTY,
        eps: EPS,
        rope: Rope::NONE,
        state: state.view(),
        out: out.view_mut(),
        rows: 2,
        heads: 4,
        head_dim: 64,
        stride: 256,
        base: 0,
        to_cache: true,
    };
    head_norm_rope(device, p)?;
    let want: Vec<_> = x.iter().map(|&v| bf16::from_f32(v)).collect();
    equal("rows", &out.read()?[256..], &want)
}

/// Short buffers are refused; a slot or a position that only the device knows ends the launch on the CPU.
fn refuses(device: &Device) -> Outcome {
    let tables = Tables::random(&mut Random::new(26), 8, ROPE / 2).upload(device)?;
    let short = Tables::random(&mut Random::new(26), 4, ROPE / 2).upload(device)?;
    let (t, weight, depths) = (device.zeros(2 * KEY)?, device.zeros(LATENT)?, device.zeros(2)?);
    let cache = device.zeros(6 * KEY)?;
    let states = [
        device.upload(&state_words(0, &[]))?,
        device.upload(&state_words(5, &[]))?,
        device.upload(&state_words(4, &[]))?,
    ];
    let p = |rows, state: usize| KvAppend {
        t: t.view(),
        weight: weight.view(),
        eps: EPS,
        rope: rope(&tables),
        depths: depths.view(),
        state: states[state].view(),
        cache: Cache::bf16(cache.view_mut()),
        rows,
    };
    kv_append(device, p(2, 0))?;
    let mut bad = vec![
        (p(3, 0), "depths"),
        (KvAppend { rope: Rope { sin: cuda_std::Global::EMPTY, ..rope(&tables) }, ..p(2, 0) }, "sines"),
    ];
    if !device.is_cuda() {
        bad.extend([
            (p(2, 1), "past the last slot"),
            (KvAppend { rope: rope(&short), ..p(2, 2) }, "past the rotation table"),
        ]);
    }
    for (p, why) in bad {
        let error = kv_append(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains("kv_append") && error.contains(why), || format!("expected `{why}`, found `{error}`"))?;
    }
    Ok(())
}
