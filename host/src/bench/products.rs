//! Dense matrix products, and what loading does to their weights.

use std::rc::Rc;

use cuda_std::{GlobalMut, bf16};

use super::stored::{Numbers, Stored};
use super::{Case, Cases, Options, Run, farthest, refused, sets};
use crate::device::{Buffer, Device, Result};
use crate::kernels::Acts;
use crate::linear::{Gated, Many, Product, Tiles, Upload, Variant, Weight, gated, linear, linear_by, panel_words};
use crate::selfcheck::Random;

/// Dense shapes of K2.6, rows x columns of the weight: o_proj, q_b_proj, q_a_proj, kv_a_proj_with_mqa, gate and up of
/// the shared expert together, its down_proj, lm_head.
const K26: [&str; 7] = ["7168x8192", "12288x1536", "1536x7168", "576x7168", "4096x7168", "7168x2048", "163840x7168"];
/// The shared expert's gate and up of K2.6.
const K26_SHARED: [&str; 1] = ["2048x7168"];
/// f32 shapes of K2.6: the router.
const K26_F32: [&str; 1] = ["384x7168"];
/// A dense shape's weights as stored, and once for each set.
type Sets = ([usize; 2], Rc<Stored>, Rc<Vec<Weight>>);

/// Where the CPU device checks the arithmetic.
const TINY: [&str; 1] = ["48x256"];
const ROWS: [usize; 4] = [1, 8, 16, 64];
const FEW_ROWS: [usize; 2] = [1, 8];

/// Outputs that are compared with sums in f64.
pub(super) const COMPARED: usize = 64;
const SEED: u64 = 26;

pub(super) fn shapes(device: &Device, asked: &[String], usual: &[&str], tiny: &[&str]) -> Result<Vec<[usize; 2]>> {
    let usual = if device.is_cuda() { usual } else { tiny };
    let texts: Vec<String> = match asked.is_empty() {
        true => usual.iter().map(ToString::to_string).collect(),
        false => asked.to_vec(),
    };
    let parse = |text: &String| {
        let numbers = text.split_once('x').and_then(|(a, b)| Some([a.parse().ok()?, b.parse().ok()?]));
        numbers.filter(|n: &[usize; 2]| !n.contains(&0)).ok_or_else(|| refused(format!("shape `{text}`: expected NxK")))
    };
    texts.iter().map(parse).collect()
}

pub(super) fn rows(device: &Device, asked: &[usize], usual: &[usize]) -> Vec<usize> {
    match (asked.is_empty(), device.is_cuda()) {
        (false, _) => asked.to_vec(),
        (true, true) => usual.to_vec(),
        (true, false) => FEW_ROWS.to_vec(),
    }
}

/// Rows of x on the device, as each format of weights reads them.
pub(super) struct Rows {
    pub f32: Buffer<f32>,
    pub bf16: Buffer<bf16>,
}

impl Rows {
    pub fn upload(device: &Device, x: &[bf16]) -> Result<Self> {
        let f32 = device.upload(&x.iter().map(|v| v.to_f32()).collect::<Vec<f32>>())?;
        Ok(Self { f32, bf16: device.upload(x)? })
    }

    pub fn alloc(device: &Device, len: usize) -> Result<Self> {
        Ok(Self { f32: device.alloc(len)?, bf16: device.alloc(len)? })
    }

    pub fn acts(&self) -> Acts {
        Acts { f32: self.f32.view(), bf16: self.bf16.view() }
    }
}

/// W4A16 with bf16 scales for 32.
pub fn w4a16<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    dense(device, options, "w4a16", Numbers::W4a16)
}

/// W4A16 with f32 scales for 32.
pub fn w4a16_f32<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    dense(device, options, "w4a16-f32", Numbers::W4a16F32)
}

/// bf16 weights.
pub fn bf16<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    dense(device, options, "bf16", Numbers::Bf16)
}

/// f32 weights: small models and the router.
pub fn f32<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    dense(device, options, "f32", Numbers::F32)
}

/// The variant that was asked for, if this format and device have it.
fn variant(device: &Device, options: &Options, operator: &str, numbers: Numbers) -> Result<Option<Variant>> {
    let Some(variant) = options.variant else { return Ok(None) };
    // Any matrix of the format tells.
    let stored = Stored::random(numbers, &mut Random::new(SEED), 1, 32);
    let has = |v: &Variant| v.kernel(&stored.weight()).is_some() && v.runs_on(device);
    if has(&variant) {
        return Ok(Some(variant));
    }
    let all: Vec<_> = Variant::ALL.into_iter().filter(has).map(|v| v.to_string()).collect();
    let expected = if all.is_empty() { "none".into() } else { all.join(", ") };
    Err(refused(format!("{operator} on this device: expected a variant of {expected}, found `{variant}`")))
}

fn dense<'a>(device: &'a Device, options: &'a Options, operator: &'static str, numbers: Numbers) -> Result<Cases<'a>> {
    let usual = if numbers == Numbers::F32 { &K26_F32[..] } else { &K26 };
    let shapes = shapes(device, &options.shapes, usual, &TINY)?;
    let rows = rows(device, &options.rows, &ROWS);
    let variant = variant(device, options, operator, numbers)?;
    let mut weights: Option<Sets> = None;
    let cases = shapes.into_iter().flat_map(move |shape| rows.clone().into_iter().map(move |m| (shape, m)));
    Ok(Box::new(cases.map(move |([n, k], m)| {
        let mut random = Random::new(SEED);
        if weights.as_ref().is_none_or(|(of, ..)| *of != [n, k]) {
            weights = None;
            let stored = Stored::random(numbers, &mut random, n, k);
            let count = sets(device, stored.bytes());
            let on_device = (0..count).map(|_| Weight::new(device, &stored.weight())).collect::<Result<Vec<_>>>()?;
            weights = Some(([n, k], Rc::new(stored), Rc::new(on_device)));
        }
        let Some((_, stored, on_device)) = &weights else { return Err(refused("no weights".into())) };
        let host_x = random.bf16s(m * k);
        let x = Rc::new(Rows::upload(device, &host_x)?);
        let y = Rc::new(device.alloc::<f32>(m * n)?);
        let fast = variant == Some(Variant::Tiled(Tiles::Warpgroups));
        let panels = Rc::new(device.alloc::<u32>(if fast { panel_words(m, k, 1) } else { 0 })?);
        let run_of = |i: usize| -> Run {
            let (weights, x, y, panels) = (on_device.clone(), x.clone(), y.clone(), panels.clone());
            Box::new(move |device| {
                let many = if fast { Many::Fast(panels.view_mut()) } else { Many::AsFew };
                let product = Product { many, ..Product::plain(&weights[i], x.acts(), m, y.view_mut()) };
                variant.map_or_else(|| linear(device, &product), |variant| linear_by(device, &product, variant))
            })
        };
        run_of(0)(device)?;
        let found = y.read()?;
        let error = farthest((0..COMPARED).map(|_| {
            let (row, column) = (random.below(m), random.below(n));
            let want = stored.dot(column, |i| host_x[row * k + i].to_f64());
            (f64::from(found[row * n + column]), want)
        }));
        Ok(Case {
            operator,
            shape: format!("{n} x {k}{}", variant.map_or(String::new(), |variant| format!(", {variant}"))),
            rows: m,
            bytes: stored.bytes() + m * (2 * k + 4 * n),
            flops: 2 * m * n * k,
            runs: (0..on_device.len()).map(run_of).collect(),
            error: Some(error),
        })
    })))
}

/// What loading does on the device: `repack_w4a16`, with both types of scale, and `repack_bf16`.
pub fn repack<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    const FORMATS: [(&str, Numbers); 3] =
        [("w4a16", Numbers::W4a16), ("w4a16-f32", Numbers::W4a16F32), ("bf16", Numbers::Bf16)];
    let shapes = shapes(device, &options.shapes, &K26[..1], &TINY)?;
    let cases = shapes.into_iter().flat_map(|shape| FORMATS.map(|format| (shape, format)));
    Ok(Box::new(cases.map(move |([n, k], (name, numbers))| {
        let stored = Stored::random(numbers, &mut Random::new(SEED), n, k);
        let bytes = 2 * stored.bytes();
        let runs = (0..sets(device, bytes)).map(|_| {
            let upload = Upload::new(device)?;
            let weight = Weight::load(&upload, &stored.weight())?;
            let from = upload.put(&stored.weight().data)?;
            Ok(Box::new(move |_: &Device| weight.repack(upload.device(), from)) as Run)
        });
        let (operator, shape) = ("repack", format!("{name} {n} x {k}"));
        Ok(Case { operator, shape, rows: n, bytes, flops: 0, runs: runs.collect::<Result<_>>()?, error: None })
    })))
}

/// Gate and up of dense rows with SwiGLU, in each format; the shape is that of either matrix.
pub fn gate<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    const FORMATS: [(&str, Numbers); 2] = [("bf16", Numbers::Bf16), ("w4a16", Numbers::W4a16)];
    let shapes = shapes(device, &options.shapes, &K26_SHARED, &TINY)?;
    let rows = rows(device, &options.rows, &ROWS);
    let cases = shapes.into_iter().flat_map(move |shape| {
        let rows = rows.clone();
        FORMATS.into_iter().flat_map(move |format| rows.clone().into_iter().map(move |m| (shape, format, m)))
    });
    Ok(Box::new(cases.map(move |([n, k], (name, numbers), m)| {
        let mut random = Random::new(SEED);
        let stored = [(); 2].map(|()| Stored::random(numbers, &mut random, n, k));
        let bytes = stored.iter().map(Stored::bytes).sum::<usize>() + m * (2 * k + 2 * n);
        let host_x = random.bf16s(m * k);
        let x = Rc::new(Rows::upload(device, &host_x)?);
        let out = Rc::new(device.alloc::<f32>(m * n)?);
        let apart = Rc::new([device.alloc::<f32>(m * n)?, device.alloc::<f32>(m * n)?]);
        let run_of = || -> Result<Run> {
            let [gate, up] = [&stored[0], &stored[1]].map(|stored| Weight::new(device, &stored.weight()));
            let (gate, up, x, out, apart) = (gate?, up?, x.clone(), out.clone(), apart.clone());
            Ok(Box::new(move |device| {
                let gate = Product::plain(&gate, x.acts(), m, apart[0].view_mut());
                let up = Product::plain(&up, x.acts(), m, apart[1].view_mut());
                gated(device, &Gated { gate, up, out_f32: out.view_mut(), out_bf16: GlobalMut::EMPTY })
            }))
        };
        let runs = (0..sets(device, bytes)).map(|_| run_of()).collect::<Result<Vec<_>>>()?;
        runs[0](device)?;
        let found = out.read()?;
        let error = farthest((0..COMPARED).map(|_| {
            let (row, column) = (random.below(m), random.below(n));
            let [gate, up] = [&stored[0], &stored[1]].map(|s| s.dot(column, |i| host_x[row * k + i].to_f64()));
            (f64::from(found[row * n + column]), gate / (1.0 + (-gate).exp()) * up)
        }));
        let (shape, flops) = (format!("{name} 2 x {n} x {k}"), 4 * m * n * k);
        Ok(Case { operator: "gate", shape, rows: m, bytes, flops, runs, error: Some(error) })
    })))
}
