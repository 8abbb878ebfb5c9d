//! Matrix products: dense ones, and the routed experts of one layer.

use std::rc::Rc;

use cuda_std::bf16;

use super::routing::Counts;
use super::stored::{Numbers, Stored};
use super::{Case, Cases, Options, Run, farthest, refused, sets};
use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, Acts};
use crate::linear::{ExpertWeights, GateUp, Grouped, Many, Product, Tiles, Upload, Variant, Weight};
use crate::linear::{gate_up, grouped_linear, linear, linear_by, panel_words, tile_of_experts};
use crate::selfcheck::Random;

/// Dense shapes of K2.6, rows x columns of the weight: o_proj, q_b_proj, q_a_proj, kv_a_proj_with_mqa, gate and up of
/// the shared expert together, its down_proj, lm_head.
const K26: [&str; 7] = ["7168x8192", "12288x1536", "1536x7168", "576x7168", "4096x7168", "7168x2048", "163840x7168"];
/// f32 shapes of K2.6: the router.
const K26_F32: [&str; 1] = ["384x7168"];
/// A dense shape's weights as stored, and once for each set.
type Sets = ([usize; 2], Rc<Stored>, Rc<Vec<Weight>>);

/// Where the CPU device checks the arithmetic.
const TINY: [&str; 1] = ["48x256"];
/// Experts of K2.6: hidden and intermediate size of a whole layer, and of one of eight equal parts of it.
const K26_EXPERTS: [&str; 2] = ["7168x2048", "7168x256"];
const ROWS: [usize; 4] = [1, 8, 16, 64];
const EXPERT_ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const FEW_ROWS: [usize; 2] = [1, 8];

/// Outputs that are compared with sums in f64.
const COMPARED: usize = 64;
const SEED: u64 = 26;

fn shapes(device: &Device, asked: &[String], usual: &[&str], tiny: &[&str]) -> Result<Vec<[usize; 2]>> {
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

fn rows(device: &Device, asked: &[usize], usual: &[usize]) -> Vec<usize> {
    match (asked.is_empty(), device.is_cuda()) {
        (false, _) => asked.to_vec(),
        (true, true) => usual.to_vec(),
        (true, false) => FEW_ROWS.to_vec(),
    }
}

/// Rows of x on the device, as each format of weights reads them.
struct Rows {
    f32: Buffer<f32>,
    bf16: Buffer<bf16>,
}

impl Rows {
    fn upload(device: &Device, x: &[bf16]) -> Result<Self> {
        let f32 = device.upload(&x.iter().map(|v| v.to_f32()).collect::<Vec<f32>>())?;
        Ok(Self { f32, bf16: device.upload(x)? })
    }

    fn alloc(device: &Device, len: usize) -> Result<Self> {
        Ok(Self { f32: device.alloc(len)?, bf16: device.alloc(len)? })
    }

    fn acts(&self) -> Acts {
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
fn variant(device: &Device, options: &Options, operator: &str, stored: &Stored) -> Result<Option<Variant>> {
    let Some(variant) = options.variant else { return Ok(None) };
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
        let variant = variant(device, options, operator, stored)?;
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

/// The experts of a layer on the device, and one of each as stored: all experts of a projection are alike.
struct Layer {
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    stored: [Stored; 3],
}

impl Layer {
    fn new(device: &Device, numbers: Numbers, experts: usize, [hidden, inter]: [usize; 2]) -> Result<Self> {
        let mut random = Random::new(SEED);
        let shapes = [(inter, hidden), (inter, hidden), (hidden, inter)];
        let stored = shapes.map(|(n, k)| Stored::random(numbers, &mut random, n, k));
        let place = |stored: &Stored| {
            let all: Vec<_> = (0..experts).map(|_| stored.weight()).collect();
            ExpertWeights::new(device, "experts", &all)
        };
        Ok(Self { gate: place(&stored[0])?, up: place(&stored[1])?, down: place(&stored[2])?, stored })
    }
}

/// What one run needs beside the weights.
struct Tokens {
    rows: usize,
    /// Whether the weights read f32.
    f32: bool,
    ids: Buffer<u32>,
    weights: Buffer<f32>,
    order: Buffer<u32>,
    tiles: Buffer<u32>,
    x: Rows,
    act: Rows,
    /// Gate and up where they are multiplied apart.
    apart: [Buffer<f32>; 2],
    routed: Buffer<f32>,
    out: Buffer<f32>,
}

/// Sort, gate and up, SwiGLU, down, weighted sum; the router is not part of it.
pub fn experts<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let shapes = shapes(device, &options.shapes, &K26_EXPERTS, &["64x64"])?;
    let rows = rows(device, &options.rows, &EXPERT_ROWS);
    let counts = options.routing.counts(device)?;
    let mut layer: Option<([usize; 2], Rc<Layer>)> = None;
    let cases = shapes.into_iter().flat_map(move |shape| rows.clone().into_iter().map(move |m| (shape, m)));
    Ok(Box::new(cases.map(move |(shape, m)| {
        if layer.as_ref().is_none_or(|(of, _)| *of != shape) {
            layer = None;
            layer = Some((shape, Rc::new(Layer::new(device, options.numbers, counts.experts, shape)?)));
        }
        let Some((_, layer)) = &layer else { return Err(refused("no experts".into())) };
        expert_case(device, layer, counts, m, options)
    })))
}

fn expert_case(device: &Device, layer: &Rc<Layer>, counts: Counts, m: usize, options: &Options) -> Result<Case> {
    let Options { routing, numbers, .. } = *options;
    let Counts { experts, top_k } = counts;
    let [gate, up, down] = &layer.stored;
    let (hidden, inter, pairs) = (gate.k, gate.n, m * top_k);
    let of_expert = gate.bytes() + up.bytes() + down.bytes();
    let mut random = Random::new(SEED + 1);
    let distinct = |ids: &[u32]| ids.iter().collect::<std::collections::BTreeSet<_>>().len();
    let mut runs = Vec::new();
    let (mut bytes, mut error) = (0, None);
    let f32 = numbers == Numbers::F32;
    let apart = if f32 { pairs * inter } else { 0 };
    let first = routing.choose(&mut random, counts, m)?;
    let count = sets(device, distinct(&first) * of_expert);
    for set in 0..count {
        let ids = if set == 0 { first.clone() } else { routing.choose(&mut random, counts, m)? };
        bytes += distinct(&ids) * of_expert + m * hidden * (2 + 4);
        let host_x = random.bf16s(m * hidden);
        let weights: Vec<f32> = (0..pairs).map(|_| 0.5 + 0.4 * random.unit()).collect();
        let tokens = Rc::new(Tokens {
            rows: m,
            f32,
            ids: device.upload(&ids)?,
            weights: device.upload(&weights)?,
            order: device.alloc(pairs)?,
            tiles: device.alloc(1 + 3 * pairs)?,
            x: Rows::upload(device, &host_x)?,
            act: Rows::alloc(device, pairs * inter)?,
            apart: [device.alloc(apart)?, device.alloc(apart)?],
            routed: device.alloc(pairs * hidden)?,
            out: device.zeros(m * hidden)?,
        });
        let of_run = layer.clone();
        let for_run = tokens.clone();
        runs.push(Box::new(move |device: &Device| run_experts(device, &of_run, counts, &for_run)) as Run);
        if set == 0 {
            runs[0](device)?;
            error =
                Some(expert_error(&layer.stored, f32, &host_x, &weights[..top_k], &tokens.out.read()?, &mut random));
        }
    }
    Ok(Case {
        operator: "experts",
        shape: format!("{experts} of {hidden} x {inter}, top {top_k}"),
        rows: m,
        bytes: bytes / count,
        flops: 6 * pairs * hidden * inter,
        runs,
        error,
    })
}

fn run_experts(device: &Device, layer: &Layer, Counts { experts, top_k }: Counts, t: &Tokens) -> Result<()> {
    let pairs = t.rows * top_k;
    let (order, tiles) = (t.order.view(), t.tiles.view());
    let tile = tile_of_experts(&[&layer.gate, &layer.up, &layer.down], pairs);
    kernels::expert_sort(
        device,
        kernels::ExpertSort {
            ids: t.ids.view(),
            order: t.order.view_mut(),
            tiles: t.tiles.view_mut(),
            pairs,
            experts,
            tile,
        },
    )?;
    gate_up(
        device,
        &GateUp {
            gate: &layer.gate,
            up: &layer.up,
            x: t.x.acts(),
            x_rows_per_token: top_k,
            order,
            tiles,
            tile,
            pairs,
            out_f32: if t.f32 { t.act.f32.view_mut() } else { cuda_std::GlobalMut::EMPTY },
            out_bf16: t.act.bf16.view_mut(),
            apart: [t.apart[0].view_mut(), t.apart[1].view_mut()],
        },
    )?;
    let (weights, x, y) = (&layer.down, t.act.acts(), t.routed.view_mut());
    let settled = true;
    grouped_linear(device, &Grouped { weights, x, x_rows_per_token: 1, order, tiles, tile, pairs, settled, y })?;
    kernels::combine(
        device,
        kernels::Combine {
            y: t.routed.view(),
            weights: t.weights.view(),
            shared: cuda_std::Global::EMPTY,
            x: t.out.view_mut(),
            rows: t.rows,
            top_k,
            width: layer.down.n(),
        },
    )
}

/// Distance of the first row from the same in f64, with the activated values rounded to bf16 where the kernels do.
fn expert_error(
    [gate, up, down]: &[Stored; 3],
    f32: bool,
    x: &[bf16],
    weights: &[f32],
    out: &[f32],
    random: &mut Random,
) -> f64 {
    let act: Vec<f64> = (0..gate.n)
        .map(|n| {
            let (g, u) = (gate.dot(n, |k| x[k].to_f64()), up.dot(n, |k| x[k].to_f64()));
            let value = g / (1.0 + (-g).exp()) * u;
            if f32 { value } else { bf16::from_f64(value).to_f64() }
        })
        .collect();
    // Every expert holds the same values: the weighted sum is one product times the sum of the weights.
    let weight: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    farthest((0..COMPARED).map(|_| {
        let column = random.below(down.n);
        (f64::from(out[column]), weight * down.dot(column, |k| act[k]))
    }))
}
