//! What works row by row between products: norms, activations, the experts' sum, embedding, copies and roundings.
//!
//! Their inputs have just been written and lie in L2 when the model runs; timed over memory that no cache holds.

use std::rc::Rc;

use cuda_std::bf16;

use super::{Case, Cases, Options, case, different, distance, prepared, rows, size};
use crate::device::{Device, Result};
use crate::kernels::{self, Table, initial_state};
use crate::reference;
use crate::selfcheck::Random;

/// K2.6: hidden size, intermediate size of dense layers, experts of a token, vocabulary.
const HIDDEN: usize = 7168;
const INTERMEDIATE: usize = 18432;
const TOP_K: usize = 8;
const VOCAB: usize = 163_840;
/// Features that K2.6's drafter taps, side by side.
const TAPS: usize = 6;
/// On the CPU device.
const TINY: usize = 260;
const ROWS: [usize; 3] = [1, 8, 64];
const EPS: f32 = 1e-5;
const F32: usize = size_of::<f32>();
const BF16: usize = size_of::<bf16>();

type OneCase = fn(&Device, usize, usize) -> Result<Case>;

/// One case for each number of rows; the shape is the width.
fn by_rows<'a>(device: &'a Device, options: &'a Options, usual: usize, one: OneCase) -> Result<Cases<'a>> {
    let width = size(options, if device.is_cuda() { usual } else { TINY })?;
    Ok(Box::new(rows(device, options, &ROWS).into_iter().map(move |rows| one(device, width, rows))))
}

/// `rms_norm` of the hidden state.
pub fn norm<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    by_rows(device, options, HIDDEN, |device, width, rows| {
        let bytes = rows * width * (2 * F32 + BF16) + width * F32;
        case(device, "norm", width.to_string(), rows, bytes, |random| {
            let (x, weight) = (random.floats(rows * width), random.floats(width));
            let (dx, dw) = (device.upload(&x)?, device.upload(&weight)?);
            let (out, rounded) = (Rc::new(device.alloc(rows * width)?), device.alloc(rows * width)?);
            let result = out.clone();
            let run = move |device: &Device| {
                let args = kernels::RmsNorm {
                    x: dx.view(),
                    weight: dw.view(),
                    out_f32: out.view_mut(),
                    out_bf16: rounded.view_mut(),
                    rows,
                    width,
                    stride: width,
                    eps: EPS,
                };
                kernels::rms_norm(device, args)
            };
            let error = move || Ok(distance(&result.read()?, &reference::rms_norm(&x, &weight, width, width, EPS)));
            Ok(prepared(run, error))
        })
    })
}

/// `swiglu` of a dense layer, gate and up side by side.
pub fn swiglu<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    by_rows(device, options, INTERMEDIATE, |device, width, rows| {
        let bytes = rows * width * (2 * F32 + BF16);
        case(device, "swiglu", width.to_string(), rows, bytes, |random| {
            let (gate, up) = (random.floats(rows * width), random.floats(rows * width));
            let (d_gate, d_up) = (device.upload(&gate)?, device.upload(&up)?);
            let out = Rc::new(device.alloc(rows * width)?);
            let result = out.clone();
            let run = move |device: &Device| {
                let args = kernels::Swiglu {
                    gate: d_gate.view(),
                    up: d_up.view(),
                    out_f32: cuda_std::GlobalMut::EMPTY,
                    out_bf16: out.view_mut(),
                    rows,
                    width,
                    stride: width,
                };
                kernels::swiglu(device, args)
            };
            let error = move || {
                let found: Vec<f32> = result.read()?.into_iter().map(bf16::to_f32).collect();
                Ok(distance(&found, &reference::swiglu(&gate, &up, width, width)))
            };
            Ok(prepared(run, error))
        })
    })
}

/// `combine`: the weighted sum of eight experts and the shared one.
pub fn combine<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    by_rows(device, options, HIDDEN, |device, width, rows| {
        let bytes = rows * (width * (TOP_K + 3) + TOP_K) * F32;
        case(device, "combine", format!("{TOP_K} of {width}"), rows, bytes, |random| {
            let (y, weights) = (random.floats(rows * TOP_K * width), random.floats(rows * TOP_K));
            let (shared, x) = (random.floats(rows * width), random.floats(rows * width));
            let (dy, dw) = (device.upload(&y)?, device.upload(&weights)?);
            let (d_shared, dx) = (device.upload(&shared)?, Rc::new(device.upload(&x)?));
            let result = dx.clone();
            let run = move |device: &Device| {
                let args = kernels::Combine {
                    y: dy.view(),
                    weights: dw.view(),
                    shared: d_shared.view(),
                    x: dx.view_mut(),
                    rows,
                    top_k: TOP_K,
                    width,
                };
                kernels::combine(device, args)
            };
            let error = move || {
                let want = reference::combine(&y, &weights, Some(&shared), &x, width, TOP_K);
                Ok(distance(&result.read()?, &want))
            };
            Ok(prepared(run, error))
        })
    })
}

/// `embed` from a table of bf16.
pub fn embed<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let vocab = if device.is_cuda() { VOCAB } else { TINY };
    let width = size(options, if device.is_cuda() { HIDDEN } else { TINY })?;
    let mut random = Random::new(0);
    let table = random.bf16s(vocab * width);
    let on_device = Rc::new(device.upload(&table)?);
    let table = Rc::new(table);
    Ok(Box::new(rows(device, options, &ROWS).into_iter().map(move |rows| {
        let bytes = rows * (width * (BF16 + F32) + F32);
        case(device, "embed", format!("{vocab} x {width}"), rows, bytes, |random| {
            let ids: Vec<i32> = (0..rows).map(|_| random.below(vocab) as i32).collect();
            let (d_ids, x) = (device.upload(&ids)?, Rc::new(device.alloc::<f32>(rows * width)?));
            let (result, of_run, table) = (x.clone(), on_device.clone(), table.clone());
            let run = move |device: &Device| {
                let args = kernels::Embed {
                    ids: d_ids.view(),
                    table: Table::Bf16(of_run.view()),
                    state: cuda_std::Global::EMPTY,
                    x: x.view_mut(),
                    rows,
                    vocab,
                    width,
                };
                kernels::embed(device, args)
            };
            let error = move || {
                let row = |id: &i32| &table[*id as usize * width..(*id as usize + 1) * width];
                let want: Vec<f32> = ids.iter().flat_map(row).map(|v| v.to_f32()).collect();
                Ok(different(&result.read()?, &want))
            };
            Ok(prepared(run, error))
        })
    })))
}

/// `tap`, `gather_rows`, `round_bf16`, `widen_bf16`.
pub fn moves<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    const MOVES: [OneCase; 4] = [tap, gather, round, widen];
    let width = size(options, if device.is_cuda() { HIDDEN } else { TINY })?;
    let rows = rows(device, options, &ROWS);
    let cases = MOVES.into_iter().flat_map(move |one| rows.clone().into_iter().map(move |rows| (one, rows)));
    Ok(Box::new(cases.map(move |(one, rows)| one(device, width, rows))))
}

fn tap(device: &Device, width: usize, rows: usize) -> Result<Case> {
    case(device, "tap", format!("{width} of {}", TAPS * width), rows, 2 * rows * width * F32, |random| {
        let src = random.floats(rows * width);
        let (d_src, dst) = (device.upload(&src)?, Rc::new(device.zeros::<f32>(rows * TAPS * width)?));
        let result = dst.clone();
        let run = move |device: &Device| {
            let (src, dst) = (d_src.view(), dst.view_mut());
            kernels::tap(device, kernels::Tap { src, dst, rows, width, stride: TAPS * width, offset: width })
        };
        let error = move || {
            let found: Vec<f32> =
                result.read()?.chunks(TAPS * width).flat_map(|row| &row[width..2 * width]).copied().collect();
            Ok(different(&found, &src))
        };
        Ok(prepared(run, error))
    })
}

/// The features of a path of every second row, of all taps.
fn gather(device: &Device, width: usize, rows: usize) -> Result<Case> {
    use gpu::args::state::{MAX_PATH, PATH, PATH_LEN};
    let (rows, width) = (rows.min(MAX_PATH), width * TAPS);
    case(device, "gather", width.to_string(), rows, 2 * rows * width * F32, |random| {
        let src = random.floats(2 * rows * width);
        let mut state = initial_state(0, 0, 2 * rows as u32);
        state[PATH_LEN] = rows as u32;
        (0..rows).for_each(|r| state[PATH + r] = 2 * r as u32);
        let (d_src, state) = (device.upload(&src)?, device.upload(&state)?);
        let dst = Rc::new(device.alloc::<f32>(rows * width)?);
        let result = dst.clone();
        let run = move |device: &Device| {
            let (src, dst, state) = (d_src.view(), dst.view_mut(), state.view());
            kernels::gather_rows(device, kernels::GatherRows { src, dst, state, count: rows, width })
        };
        let error = move || {
            let want: Vec<f32> = src.chunks(width).step_by(2).flatten().copied().collect();
            Ok(different(&result.read()?, &want))
        };
        Ok(prepared(run, error))
    })
}

fn round(device: &Device, width: usize, rows: usize) -> Result<Case> {
    let n = rows * width;
    case(device, "round", width.to_string(), rows, n * (F32 + BF16), |random| {
        let x = random.floats(n);
        let (dx, out) = (device.upload(&x)?, Rc::new(device.alloc(n)?));
        let result = out.clone();
        let run = move |device: &Device| {
            kernels::round_bf16(device, kernels::RoundBf16 { x: dx.view(), out: out.view_mut(), n })
        };
        let error = move || {
            let want: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
            Ok(different(&result.read()?, &want))
        };
        Ok(prepared(run, error))
    })
}

fn widen(device: &Device, width: usize, rows: usize) -> Result<Case> {
    let n = rows * width;
    case(device, "widen", width.to_string(), rows, n * (F32 + BF16), |random| {
        let x = random.bf16s(n);
        let (dx, out) = (device.upload(&x)?, Rc::new(device.alloc(n)?));
        let result = out.clone();
        let run = move |device: &Device| kernels::widen_bf16(device, dx.view(), out.view_mut(), n);
        let error = move || Ok(different(&result.read()?, &x.iter().map(|v| v.to_f32()).collect::<Vec<f32>>()));
        Ok(prepared(run, error))
    })
}
