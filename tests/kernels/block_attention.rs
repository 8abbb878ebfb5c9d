//! The drafter's attention: grouped heads, both head sizes, contexts around a step's border.

use cuda_std::bf16;
use kdtree::device::Device;
use kdtree::kernels::{BlockAttention, block_attention};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};
use super::tree::state_words;

pub fn cases(suite: &mut Suite) {
    for committed in [0, 1, 7, 8, 9, 15, 120, 121, 300] {
        for (rows, heads, kv_heads, head_dim) in [(8, 4, 2, 64), (8, 2, 1, 128)] {
            let name = format!("block_attention::context_{committed}_rows_{rows}_heads_{heads}_{kv_heads}_{head_dim}");
            suite.both(name, move |d| random(d, committed, rows, heads, kv_heads, head_dim));
        }
    }
    for (rows, heads, kv_heads, head_dim) in
        [(1, 1, 1, 64), (3, 3, 3, 128), (8, 16, 2, 128), (17, 6, 2, 64), (2, 8, 8, 64)]
    {
        let name = format!("block_attention::rows_{rows}_heads_{heads}_{kv_heads}_{head_dim}");
        suite.both(name, move |d| random(d, 37, rows, heads, kv_heads, head_dim));
    }
    for committed in [0, 3, 40, 150, 301] {
        for window in [1, 2, 7, 16, 33, 128, 1000] {
            for (rows, heads, kv_heads, head_dim) in [(8, 4, 2, 64), (8, 16, 2, 128)] {
                let name = format!("block_attention::window_{window}_context_{committed}_heads_{heads}_{head_dim}");
                suite.both(name, move |d| windowed(d, committed, window, rows, heads, kv_heads, head_dim));
            }
        }
    }
    suite.both("block_attention::window_ends_at_its_row", window_ends);
    suite.cuda("block_attention::kimi_4096", |d| random(d, 4096, 8, 64, 8, 128));
    suite.cuda("block_attention::kimi_4096_window_2048", |d| windowed(d, 4096, 2048, 8, 64, 8, 128));
    suite.both("block_attention::picks_one_key", picks);
    suite.both("block_attention::equal_and_huge_scores", extremes);
    suite.both("block_attention::nan_is_seen", nans);
    suite.both("block_attention::refuses", refuses);
}

struct Case {
    q: Vec<bf16>,
    /// `[committed + rows, kv_heads, head_dim]`; slots behind hold NaN.
    k: Vec<bf16>,
    v: Vec<bf16>,
    committed: usize,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    scale: f32,
}

impl Case {
    fn random(committed: usize, rows: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let mut random = Random::new(committed as u64 * 100 + rows as u64);
        let values = (committed + rows) * kv_heads * head_dim;
        Self {
            q: random.bf16s(rows * heads * head_dim),
            k: random.bf16s(values),
            v: random.bf16s(values),
            committed,
            rows,
            heads,
            kv_heads,
            head_dim,
            window: None,
            scale: 0.3,
        }
    }

    fn expected(&self) -> Vec<f64> {
        let Self { q, k, v, committed, window, heads, kv_heads, head_dim, scale, .. } = self;
        reference::block_attention(q, k, v, *committed, *window, *heads, *kv_heads, *head_dim, *scale)
    }

    fn run(&self, device: &Device) -> Result<Vec<f32>, libtest_mimic::Failed> {
        let poisoned = |values: &[bf16]| {
            let mut values = values.to_vec();
            values.resize(values.len() + 20 * self.kv_heads * self.head_dim, bf16::NAN);
            device.upload(&values)
        };
        let (q, k, v) = (device.upload(&self.q)?, poisoned(&self.k)?, poisoned(&self.v)?);
        let state = device.upload(&state_words(self.committed, &[]))?;
        let (out, rounded) = (device.alloc(self.q.len())?, device.alloc(self.q.len())?);
        out.fill(0xFF)?;
        let p = BlockAttention {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            state: state.view(),
            scale: self.scale,
            rows: self.rows,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: self.window,
            out_f32: out.view_mut(),
            out_bf16: rounded.view_mut(),
        };
        block_attention(device, p)?;
        let (out, rounded) = (out.read()?, rounded.read()?);
        for (i, (&value, &rounded)) in out.iter().zip(&rounded).enumerate() {
            let same = bf16::from_f32(value) == rounded || (value.is_nan() && rounded.is_nan());
            check(same, || format!("bf16: value {i} is {rounded}, expected {value} rounded"))?;
        }
        Ok(out)
    }
}

fn random(device: &Device, committed: usize, rows: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Outcome {
    let case = Case::random(committed, rows, heads, kv_heads, head_dim);
    let got = case.run(device)?;
    close("f32", &got, &case.expected(), bounds::ATTENTION)?;
    equal("again", &case.run(device)?, &got)
}

fn windowed(
    device: &Device,
    committed: usize,
    window: usize,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Outcome {
    let case = Case::random(committed, rows, heads, kv_heads, head_dim);
    let case = Case { window: Some(window), ..case };
    close("f32", &case.run(device)?, &case.expected(), bounds::ATTENTION)
}

/// With equal scores a row gets the mean of what it sees: values are their slots, so the mean tells both ends.
fn window_ends(device: &Device) -> Outcome {
    for (committed, window) in [(0, 3), (20, 5), (37, 64)] {
        let (rows, head_dim) = (6, 64);
        let mut case = Case::random(committed, rows, 2, 1, head_dim);
        case.q.fill(bf16::ZERO);
        case.window = Some(window);
        case.v.chunks_mut(head_dim).enumerate().for_each(|(slot, v)| v.fill(bf16::from_f32(slot as f32)));
        for (i, out) in case.run(device)?.chunks(head_dim).enumerate() {
            let last = committed + i / 2;
            let first = (last + 1).saturating_sub(window);
            let mean = (first + last) as f32 / 2.0;
            check((out[0] - mean).abs() < 1e-2, || format!("row {}: {}, expected {mean}", i / 2, out[0]))?;
        }
    }
    Ok(())
}

/// Each query is one key's direction, so large that only this key counts: the output is its value to the bit.
fn picks(device: &Device) -> Outcome {
    for (heads, kv_heads, head_dim) in [(4, 2, 64), (2, 1, 128)] {
        let mut case = Case::random(150, 8, heads, kv_heads, head_dim);
        case.scale = 4.0;
        // Signs only: a key's score with itself is head_dim, with another about sqrt(head_dim).
        case.k.iter_mut().for_each(|v| *v = if v.to_f32() < 0.0 { bf16::NEG_ONE } else { bf16::ONE });
        let slots = case.committed + case.rows;
        for shift in [0, 31, 62, 93, 124] {
            let at = |i: usize| {
                let (row, head) = (i / heads, i % heads);
                let slot = (row * 5 + head * 11 + shift) % slots;
                (slot * kv_heads + head / (heads / kv_heads)) * head_dim
            };
            for (i, q) in case.q.chunks_mut(head_dim).enumerate() {
                q.copy_from_slice(&case.k[at(i)..at(i) + head_dim]);
            }
            for (i, out) in case.run(device)?.chunks(head_dim).enumerate() {
                let want: Vec<f32> = case.v[at(i)..at(i) + head_dim].iter().map(|v| v.to_f32()).collect();
                equal(&format!("query {i}"), out, &want)?;
            }
        }
    }
    Ok(())
}

/// All weights equal: the mean. Scores of 1e30: the largest alone.
fn extremes(device: &Device) -> Outcome {
    let mut case = Case::random(140, 8, 2, 1, 128);
    case.q.fill(bf16::ZERO);
    close("mean", &case.run(device)?, &case.expected(), 1e-5)?;
    case.q.chunks_mut(128).for_each(|q| q[0] = bf16::from_f32(-1e15));
    case.k.chunks_mut(128).enumerate().for_each(|(j, k)| k[0] = bf16::from_f32(1e15 * (j + 1) as f32));
    close("huge", &case.run(device)?, &case.expected(), bounds::ATTENTION)
}

/// A NaN in a key or a value reaches every query of its group, and no other group.
fn nans(device: &Device) -> Outcome {
    let case = Case::random(60, 3, 4, 2, 64);
    let clean = case.run(device)?;
    let at = (50 * 2 + 1) * 64 + 5;
    let mut k = case.k.clone();
    k[at] = bf16::NAN;
    let got = Case { k, ..case }.run(device)?;
    for (i, (got, clean)) in got.chunks(64).zip(clean.chunks(64)).enumerate() {
        match i % 4 / 2 {
            0 => equal(&format!("query {i}"), got, clean)?,
            _ => check(got.iter().all(|v| v.is_nan()), || format!("query {i} swallows a NaN key"))?,
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (q, k, state) = (device.zeros(2 * 64)?, device.zeros(4 * 64)?, device.upload(&state_words(0, &[]))?);
    let out = device.zeros(2 * 64)?;
    let p = |rows, heads, kv_heads, head_dim| BlockAttention {
        q: q.view(),
        k: k.view(),
        v: k.view(),
        state: state.view(),
        scale: 1.0,
        rows,
        heads,
        kv_heads,
        head_dim,
        window: None,
        out_f32: out.view_mut(),
        out_bf16: cuda_std::GlobalMut::EMPTY,
    };
    block_attention(device, p(2, 1, 1, 64))?;
    let bad = [(p(3, 1, 1, 64), "q holds"), (p(1, 2, 3, 64), "a multiple"), (p(1, 1, 1, 96), "64 and 128")];
    for (p, why) in bad {
        let error = block_attention(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("block_attention_") && error.contains(why), || {
            format!("expected `{why}`, found `{error}`")
        })?;
    }
    Ok(())
}
