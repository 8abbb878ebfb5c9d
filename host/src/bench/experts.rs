//! The experts of one layer.

use std::fmt;
use std::rc::Rc;

use cuda_std::{Global, GlobalMut, bf16};

use super::products::{COMPARED, Rows, rows, shapes};
use super::routing::Counts;
use super::stored::{Numbers, Stored};
use super::{Case, Cases, Options, Run, SEED, farthest, refused, sets};
use crate::device::{Buffer, Device, Result};
use crate::kernels;
use crate::linear::{ExpertWeights, GateUp, Gated, Grouped, Product, Sorting, Weight};
use crate::linear::{gate_up, gated, grouped_linear, linear};
use crate::selfcheck::Random;

/// Experts of K2.6: hidden and intermediate size of a whole layer, and of one of eight equal parts of it.
const K26: [&str; 2] = ["7168x2048", "7168x256"];
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// How a layer's shared expert runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shared {
    /// Beside the routed ones, as in the model.
    Beside,
    /// After them.
    After,
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Beside => "beside",
            Self::After => "after",
        })
    }
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

/// The shared expert, in bf16: one of each matrix as stored, and on the device once for each set.
struct SharedExpert {
    stored: [Stored; 3],
    sets: Vec<[Weight; 3]>,
}

impl SharedExpert {
    fn new(device: &Device, [hidden, inter]: [usize; 2], count: usize) -> Result<Self> {
        let mut random = Random::new(SEED + 2);
        let shapes = [(inter, hidden), (inter, hidden), (hidden, inter)];
        let stored = shapes.map(|(n, k)| Stored::random(Numbers::Bf16, &mut random, n, k));
        let place = |stored: &Stored| Weight::new(device, &stored.weight());
        let set = |_| Ok([place(&stored[0])?, place(&stored[1])?, place(&stored[2])?]);
        let sets = (0..count).map(set).collect::<Result<_>>()?;
        Ok(Self { stored, sets })
    }

    fn bytes(&self) -> usize {
        self.stored.iter().map(Stored::bytes).sum()
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
    /// Of the shared expert: gate and up apart, activated, and its result; empty where there is none.
    shared_apart: [Buffer<f32>; 2],
    shared_act: Rows,
    shared: Buffer<f32>,
    out: Buffer<f32>,
}

/// Sort, gate and up, SwiGLU, down, weighted sum, and the shared expert where that is asked for; the router is not part
/// of it.
pub fn experts<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let shapes = shapes(device, &options.shapes, &K26, &["64x64"])?;
    let rows = rows(device, &options.rows, &ROWS);
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
    let Options { routing, numbers, shared: how, .. } = *options;
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
    let shared = match how {
        None => None,
        Some(how) => Some((how, Rc::new(SharedExpert::new(device, [hidden, inter], count)?))),
    };
    let [beside, wide] = if shared.is_some() { [m * inter, m * hidden] } else { [0; 2] };
    let shared_bytes = shared.as_ref().map_or(0, |(_, shared)| shared.bytes());
    for set in 0..count {
        let ids = if set == 0 { first.clone() } else { routing.choose(&mut random, counts, m)? };
        bytes += distinct(&ids) * of_expert + shared_bytes + m * hidden * (2 + 4);
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
            shared_apart: [device.alloc(beside)?, device.alloc(beside)?],
            shared_act: Rows::alloc(device, beside)?,
            shared: device.alloc(wide)?,
            out: device.zeros(m * hidden)?,
        });
        let of_run = layer.clone();
        let (for_run, beside) = (tokens.clone(), shared.clone());
        runs.push(Box::new(move |device: &Device| {
            let shared = beside.as_ref().map(|(how, shared)| (*how, &shared.sets[set]));
            run_layer(device, &of_run, shared, counts, &for_run)
        }) as Run);
        if set == 0 {
            runs[0](device)?;
            let shared = shared.as_ref().map(|(_, shared)| &shared.stored);
            let (out, weights) = (tokens.out.read()?, &weights[..top_k]);
            error = Some(expert_error(&layer.stored, shared, f32, &host_x, weights, &out, &mut random));
        }
    }
    Ok(Case {
        operator: "experts",
        shape: format!(
            "{experts} of {hidden} x {inter}, top {top_k}{}",
            how.map_or(String::new(), |how| format!(", shared {how}"))
        ),
        rows: m,
        bytes: bytes / count,
        flops: 6 * (pairs + if how.is_some() { m } else { 0 }) * hidden * inter,
        runs,
        error,
    })
}

/// A layer as the model runs it, but for its router.
fn run_layer(
    device: &Device,
    layer: &Layer,
    shared: Option<(Shared, &[Weight; 3])>,
    counts: Counts,
    t: &Tokens,
) -> Result<()> {
    let routed = || run_experts(device, layer, counts, t);
    let result = match shared {
        None => {
            routed()?;
            Global::EMPTY
        }
        Some((how, [gate, up, down])) => {
            let other = || {
                let gate = Product::plain(gate, t.x.acts(), t.rows, t.shared_apart[0].view_mut());
                let up = Product::plain(up, t.x.acts(), t.rows, t.shared_apart[1].view_mut());
                let (out_f32, out_bf16) = (GlobalMut::EMPTY, t.shared_act.bf16.view_mut());
                gated(device, &Gated { gate, up, out_f32, out_bf16 })?;
                linear(device, &Product::plain(down, t.shared_act.acts(), t.rows, t.shared.view_mut()))
            };
            match how {
                Shared::Beside => device.beside(other, routed)?,
                Shared::After => routed().and_then(|()| other())?,
            }
            t.shared.view()
        }
    };
    kernels::combine(
        device,
        kernels::Combine {
            y: t.routed.view(),
            weights: t.weights.view(),
            shared: result,
            x: t.out.view_mut(),
            rows: t.rows,
            top_k: counts.top_k,
            width: layer.down.n(),
        },
    )
}

fn run_experts(device: &Device, layer: &Layer, Counts { experts, top_k }: Counts, t: &Tokens) -> Result<()> {
    let pairs = t.rows * top_k;
    let (ids, order, tiles) = (t.ids.view(), t.order.view(), t.tiles.view());
    let sorting = Sorting::of(&[&layer.gate, &layer.up, &layer.down], pairs);
    if let Sorting::Before(tile) = sorting {
        let (order, tiles) = (t.order.view_mut(), t.tiles.view_mut());
        kernels::expert_sort(device, kernels::ExpertSort { ids, order, tiles, pairs, experts, tile })?;
    }
    gate_up(
        device,
        &GateUp {
            gate: &layer.gate,
            up: &layer.up,
            x: t.x.acts(),
            x_rows_per_token: top_k,
            sorting,
            ids,
            order,
            tiles,
            pairs,
            out_f32: if t.f32 { t.act.f32.view_mut() } else { GlobalMut::EMPTY },
            out_bf16: t.act.bf16.view_mut(),
            apart: [t.apart[0].view_mut(), t.apart[1].view_mut()],
        },
    )?;
    let (weights, x, y) = (&layer.down, t.act.acts(), t.routed.view_mut());
    let settled = true;
    let down = Grouped { weights, x, x_rows_per_token: 1, sorting, ids, order, tiles, pairs, settled, y };
    grouped_linear(device, &down)
}

/// Distance of the first row from the same in f64, with the activated values rounded to bf16 where the kernels do.
fn expert_error(
    routed: &[Stored; 3],
    shared: Option<&[Stored; 3]>,
    f32: bool,
    x: &[bf16],
    weights: &[f32],
    out: &[f32],
    random: &mut Random,
) -> f64 {
    let act = |[gate, up, _]: &[Stored; 3], f32: bool| -> Vec<f64> {
        let value = |n| {
            let (g, u) = (gate.dot(n, |k| x[k].to_f64()), up.dot(n, |k| x[k].to_f64()));
            let value = g / (1.0 + (-g).exp()) * u;
            if f32 { value } else { bf16::from_f64(value).to_f64() }
        };
        (0..gate.n).map(value).collect()
    };
    let of_routed = act(routed, f32);
    let of_shared = shared.map(|shared| (&shared[2], act(shared, false)));
    // Every expert holds the same values: the weighted sum is one product times the sum of the weights.
    let weight: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    farthest((0..COMPARED).map(|_| {
        let column = random.below(routed[2].n);
        let shared = of_shared.as_ref().map_or(0.0, |(down, act)| down.dot(column, |k| act[k]));
        (f64::from(out[column]), weight * routed[2].dot(column, |k| of_routed[k]) + shared)
    }))
}
