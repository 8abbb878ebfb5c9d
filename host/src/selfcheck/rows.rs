//! Checks of the kernels that work row by row: copies, norms, activations, and the experts' bookkeeping.

use cuda_std::bf16;

use super::Random;
use super::compare::{Found, Probe, close, equal, rounded};
use crate::kernels::{self, Combine, Embed, ExpertSort, RmsNorm, RoundBf16, Route, Swiglu, Table, Tap, initial_state};
use crate::reference::{self, bounds};

/// Both types of table; the bonus of the state in row 0.
pub fn embed(p: &Probe) -> Found {
    let (rows, vocab, width, bonus) = (5, 37, 65, 36);
    let mut random = Random::new(1);
    let mut ids: Vec<_> = (0..rows).map(|_| random.below(vocab) as i32).collect();
    let table = random.bf16s(vocab * width);
    let wide: Vec<_> = table.iter().map(|v| v.to_f32()).collect();
    let (d_ids, d_table, d_wide) = (p.device.upload(&ids)?, p.device.upload(&table)?, p.device.upload(&wide)?);
    let state = p.device.upload(&initial_state(9, bonus, 0))?;
    ids[0] = bonus as i32;
    let want = reference::embed(&ids, &wide, width);
    for table in [Table::F32(d_wide.view()), Table::Bf16(d_table.view())] {
        let x = p.device.alloc(rows * width)?;
        let args = Embed { ids: d_ids.view(), table, state: state.view(), x: x.view_mut(), rows, vocab, width };
        p.launch(|| kernels::embed(p.device, args))?;
        equal("x", &x.read()?, &want)?;
    }
    Ok(0.0)
}

pub fn rms_norm(p: &Probe) -> Found {
    let (rows, width, stride, eps) = (3, 512, 576, 1e-5);
    let mut random = Random::new(2);
    let (x, weight) = (random.floats(rows * stride), random.floats(width));
    let (dx, dw) = (p.device.upload(&x)?, p.device.upload(&weight)?);
    let (y, y_bf16) = (p.device.alloc(rows * width)?, p.device.alloc(rows * width)?);
    let args = RmsNorm {
        x: dx.view(),
        weight: dw.view(),
        out_f32: y.view_mut(),
        out_bf16: y_bf16.view_mut(),
        rows,
        width,
        stride,
        eps,
    };
    p.launch(|| kernels::rms_norm(p.device, args))?;
    let y = y.read()?;
    rounded(&y, &y_bf16.read()?)?;
    close("y", &y, &reference::rms_norm(&x, &weight, width, stride, eps), bounds::F32)
}

pub fn swiglu(p: &Probe) -> Found {
    let (rows, width, stride) = (3, 300, 320);
    let mut random = Random::new(3);
    let gate: Vec<_> = random.floats(rows * stride).into_iter().map(|v| v * 8.0).collect();
    let up = random.floats(rows * stride);
    let (d_gate, d_up) = (p.device.upload(&gate)?, p.device.upload(&up)?);
    let (y, y_bf16) = (p.device.alloc(rows * width)?, p.device.alloc(rows * width)?);
    let args = Swiglu {
        gate: d_gate.view(),
        up: d_up.view(),
        out_f32: y.view_mut(),
        out_bf16: y_bf16.view_mut(),
        rows,
        width,
        stride,
    };
    p.launch(|| kernels::swiglu(p.device, args))?;
    let y = y.read()?;
    rounded(&y, &y_bf16.read()?)?;
    close("y", &y, &reference::swiglu(&gate, &up, width, stride), bounds::F32)
}

/// Columns of wider rows; the others keep what they held.
pub fn tap(p: &Probe) -> Found {
    const BEFORE: f32 = 7.0;
    let (rows, width, stride, offset) = (3, 257, 600, 300);
    let src = Random::new(4).floats(rows * width);
    let mut want = vec![BEFORE; rows * stride];
    let (d_src, dst) = (p.device.upload(&src)?, p.device.upload(&want)?);
    p.launch(|| kernels::tap(p.device, Tap { src: d_src.view(), dst: dst.view_mut(), rows, width, stride, offset }))?;
    for (row, src) in want.chunks_mut(stride).zip(src.chunks(width)) {
        row[offset..offset + width].copy_from_slice(src);
    }
    equal("dst", &dst.read()?, &want)
}

/// Random values, and halves between two bf16: to the even one.
pub fn round_bf16(p: &Probe) -> Found {
    let n = 300;
    let mut x = Random::new(5).floats(n);
    (x[0], x[1], x[2]) = (f32::from_bits(0x3F80_8000), f32::from_bits(0x3F81_8000), f32::from_bits(0x3F80_8001));
    let (dx, out) = (p.device.upload(&x)?, p.device.alloc(n)?);
    p.launch(|| kernels::round_bf16(p.device, RoundBf16 { x: dx.view(), out: out.view_mut(), n }))?;
    rounded(&x, &out.read()?)
}

pub fn widen_bf16(p: &Probe) -> Found {
    let n = 300;
    let x = Random::new(6).bf16s(n);
    let (dx, out) = (p.device.upload(&x)?, p.device.alloc(n)?);
    p.launch(|| kernels::widen_bf16(p.device, dx.view(), out.view_mut(), n))?;
    equal("out", &out.read()?, &x.iter().map(|v: &bf16| v.to_f32()).collect::<Vec<_>>())
}

/// Logits 0.1 apart and biases of 0 and 1 on scores below 1: no rounding changes the order.
pub fn route(p: &Probe) -> Found {
    let (rows, experts, top_k, scaling) = (4, 64, 8, 2.827);
    let logit = |i: usize| ((i * 37 + i / experts * 11) % experts) as f32 * 0.1 - 3.0;
    let logits: Vec<_> = (0..rows * experts).map(logit).collect();
    let bias: Vec<_> = (0..experts).map(|e| if e % 16 == 0 { 1.0 } else { 0.0 }).collect();
    let (d_logits, d_bias) = (p.device.upload(&logits)?, p.device.upload(&bias)?);
    let (ids, weights) = (p.device.alloc(rows * top_k)?, p.device.alloc(rows * top_k)?);
    let before = initial_state(0, 0, 0);
    let state = p.device.upload(&before)?;
    let args = Route {
        logits: d_logits.view(),
        bias: d_bias.view(),
        ids: ids.view_mut(),
        weights: weights.view_mut(),
        state: state.view_mut(),
        rows,
        experts,
        top_k,
        scaling,
        norm: true,
    };
    p.launch(|| kernels::route(p.device, args))?;
    let (want_ids, want_weights) = reference::route(&logits, &bias, top_k, scaling, true);
    equal("ids", &ids.read()?, &want_ids)?;
    equal("state", &state.read()?, &before)?;
    close("weights", &weights.read()?, &want_weights, bounds::F32)
}

pub fn expert_sort(p: &Probe) -> Found {
    let (pairs, experts, tile) = (100, 24, 8);
    let mut random = Random::new(7);
    let ids: Vec<_> = (0..pairs).map(|_| random.below(experts) as u32).collect();
    let (d_ids, order) = (p.device.upload(&ids)?, p.device.alloc(pairs)?);
    let tiles = p.device.alloc(1 + 3 * pairs)?;
    let args = ExpertSort { ids: d_ids.view(), order: order.view_mut(), tiles: tiles.view_mut(), pairs, experts, tile };
    p.launch(|| kernels::expert_sort(p.device, args))?;
    let (want_order, want_tiles) = reference::expert_sort(&ids, experts, tile);
    equal("order", &order.read()?, &want_order)?;
    equal("tiles", &tiles.read()?[..want_tiles.len()], &want_tiles)
}

pub fn combine(p: &Probe) -> Found {
    let (rows, top_k, width) = (3, 4, 300);
    let mut random = Random::new(8);
    let (y, weights) = (random.floats(rows * top_k * width), random.floats(rows * top_k));
    let (shared, x) = (random.floats(rows * width), random.floats(rows * width));
    let (dy, dw) = (p.device.upload(&y)?, p.device.upload(&weights)?);
    let (ds, dx) = (p.device.upload(&shared)?, p.device.upload(&x)?);
    let args = Combine { y: dy.view(), weights: dw.view(), shared: ds.view(), x: dx.view_mut(), rows, top_k, width };
    p.launch(|| kernels::combine(p.device, args))?;
    let want = reference::combine(&y, &weights, Some(&shared), &x, width, top_k);
    close("x", &dx.read()?, &want, bounds::F32)
}

pub fn copy_words(p: &Probe) -> Found {
    let words: Vec<u32> = (0..1000).map(|i: u32| i.wrapping_mul(0x9E37_79B9)).collect();
    let (from, to) = (p.device.upload(&words)?, p.device.alloc(words.len())?);
    p.launch(|| kernels::copy_words(p.device, from.view(), to.view_mut()))?;
    equal("to", &to.read()?, &words)
}

pub fn read_words(p: &Probe) -> Found {
    let words: Vec<u32> = (0..1000).map(|i: u32| i.wrapping_mul(0x9E37_79B9)).collect();
    let (from, sums) = (p.device.upload(&words)?, p.device.alloc(kernels::read_threads(p.device))?);
    p.launch(|| kernels::read_words(p.device, from.view(), sums.view_mut()))?;
    let all = |words: &[u32]| words.iter().fold(0u32, |sum, &word| sum.wrapping_add(word));
    equal("the sum of the sums", &[all(&sums.read()?)], &[all(&words)])
}
