//! Checks of the matrix products, through `linear` and `grouped_linear` alone: each kernel of each format,
//! and the repacking.

use std::borrow::Cow;

use cuda_std::{GlobalMut, bf16};

use super::Random;
use super::compare::{Found, Probe, equal, near};
use crate::device::{self, Buffer, Device};
use crate::kernels::Acts;
use crate::linear::{
    ExpertWeights, GateUp, Gated, Grouped, HostData, HostWeight, Many, Panels, Product, ScaleType, Sorting, Variant,
    Weight, gate_up, gate_up_kernel, gated, gated_kernel, grouped_kernel, grouped_linear, kernel, linear, linear_by,
    panel_words, x_panels,
};
use crate::reference::{self, bounds, linear as twin};

/// Rows that no block of a streaming kernel divides, and more than one block of the kernels of many rows.
const FEW: usize = 37;
const MANY: usize = 130;
/// Weight rows that fill no tile, k that two warps share.
const SHAPE: [usize; 2] = [20, 1152];
/// Pairs of a tile, of most kernels.
const TILE: usize = 8;
/// A k of four chunks, which gathered products take in one piece; the last chunk is half empty.
const SHORT: [usize; 2] = [20, 224];

/// What a weight is stored as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    F32,
    Bf16,
    W4 { scales: ScaleType, group: usize },
}

const FORMATS: [Stored; 4] = [
    Stored::F32,
    Stored::Bf16,
    Stored::W4 { scales: ScaleType::Bf16, group: 32 },
    Stored::W4 { scales: ScaleType::F32, group: 32 },
];

/// The check of one product kernel.
pub struct Case {
    pub kernel: &'static str,
    stored: Stored,
    rows: Rows,
}

impl Stored {
    /// Whether warpgroups want x as f16; none where they do not multiply it.
    fn panels(self) -> Option<bool> {
        match self {
            Self::Bf16 => Some(false),
            Self::W4 { scales: ScaleType::Bf16, .. } => Some(true),
            _ => None,
        }
    }
}

/// What is multiplied.
#[derive(Clone, Copy)]
enum Rows {
    /// None: the one kernel of f32.
    Dense(Option<Variant>),
    /// x alone, as f16 or as bf16.
    Panels(bool),
    Grouped([usize; 2], Sorting),
    GateUp(Sorting),
    /// Gate and up of dense rows.
    Gated,
}

impl Case {
    /// One for each kernel.
    pub fn all() -> Vec<Self> {
        let mut cases: Vec<Self> = Vec::new();
        for stored in FORMATS {
            let sample = Sample::random(stored, SHAPE, &mut Random::new(0));
            let variants = Variant::ALL.into_iter().filter_map(|v| Some((v.kernel(&sample.host())?, Some(v))));
            let of_f32 = (stored == Stored::F32).then(|| (kernel(&sample.host(), FEW), None));
            cases.extend(variants.chain(of_f32).map(|(kernel, variant)| Self {
                kernel,
                stored,
                rows: Rows::Dense(variant),
            }));
            if let Some(half) = stored.panels() {
                let kernel = if half { "x_panels_half" } else { "x_panels" };
                cases.push(Self { kernel, stored, rows: Rows::Panels(half) });
            }
            let sortings = [Sorting::Before(TILE), Sorting::Before(2 * TILE), Sorting::Within];
            for (shape, sorting) in [SHAPE, SHORT].into_iter().flat_map(|shape| sortings.map(|way| (shape, way))) {
                let kernel = grouped_kernel(&Sample::random(stored, shape, &mut Random::new(0)).host(), sorting);
                if cases.iter().all(|case| case.kernel != kernel) {
                    cases.push(Self { kernel, stored, rows: Rows::Grouped(shape, sorting) });
                }
            }
            if let Some(kernel) = gated_kernel(&sample.host()) {
                cases.push(Self { kernel, stored, rows: Rows::Gated });
            }
            for sorting in sortings {
                if let Some(kernel) = gate_up_kernel(&sample.host(), sorting)
                    && cases.iter().all(|case| case.kernel != kernel)
                {
                    cases.push(Self { kernel, stored, rows: Rows::GateUp(sorting) });
                }
            }
        }
        cases
    }

    /// Whether a device has what the kernel needs.
    pub fn fits(&self, device: &Device) -> bool {
        !matches!(self.rows, Rows::Dense(Some(variant)) if !variant.runs_on(device))
    }

    pub fn run(&self, p: &Probe) -> Found {
        match self.rows {
            Rows::Dense(None) => dense(p, self.stored, FEW, linear),
            Rows::Dense(Some(variant)) => {
                let rows = if matches!(variant, Variant::Tiled(_)) { MANY } else { FEW };
                dense(p, self.stored, rows, |d, product| linear_by(d, product, variant))
            }
            Rows::Panels(half) => panels(p, half),
            Rows::Grouped(shape, sorting) => grouped(p, self.stored, shape, sorting),
            Rows::GateUp(sorting) => both(p, self.stored, sorting),
            Rows::Gated => gated_rows(p, self.stored),
        }
    }
}

/// A weight's bytes and values.
struct Sample {
    stored: Stored,
    shape: [usize; 2],
    data: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f64>,
}

impl Sample {
    /// Values of about 1 / sqrt(k); scales are spread over four powers of two.
    fn random(stored: Stored, [n, k]: [usize; 2], random: &mut Random) -> Self {
        let size = 1.0 / (k as f32).sqrt();
        let mut floats = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit() * size).collect() };
        let bytes_bf16 =
            |floats: &[f32]| -> Vec<u8> { floats.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect() };
        let bytes_f32 = |floats: &[f32]| -> Vec<u8> { floats.iter().flat_map(|v| v.to_le_bytes()).collect() };
        let (data, scales, values) = match stored {
            Stored::F32 => {
                let data = bytes_f32(&floats(n * k));
                let values = twin::f32_values(&data);
                (data, Vec::new(), values)
            }
            Stored::Bf16 => {
                let data = bytes_bf16(&floats(n * k));
                let values = twin::bf16_values(&data);
                (data, Vec::new(), values)
            }
            Stored::W4 { scales: of, group } => {
                let codes: Vec<_> = (0..n * k / 2).map(|_| random.next() as u8).collect();
                let scale = |r: &mut Random| (1.0 + r.unit() / 2.0) * size * 0.25 / (1 << r.below(4)) as f32;
                let scales: Vec<_> = (0..n * k / group).map(|_| scale(random)).collect();
                let (scales, read) = match of {
                    ScaleType::F32 => (bytes_f32(&scales), twin::f32_values as fn(&[u8]) -> Vec<f64>),
                    ScaleType::Bf16 => (bytes_bf16(&scales), twin::bf16_values as fn(&[u8]) -> Vec<f64>),
                };
                let values = twin::w4a16_values(&codes, &read(&scales), k, group);
                (codes, scales, values)
            }
        };
        Self { stored, shape: [n, k], data, scales, values }
    }

    fn host(&self) -> HostWeight<'_> {
        let (data, scales) = (Cow::Borrowed(&self.data[..]), Cow::Borrowed(&self.scales[..]));
        let data = match self.stored {
            Stored::F32 => HostData::F32(data),
            Stored::Bf16 => HostData::Bf16(data),
            Stored::W4 { scales: scale_type, group } => HostData::W4a16 { packed: data, scales, scale_type, group },
        };
        let [n, k] = self.shape;
        HostWeight { name: "selfcheck", n, k, batch: 1, data }
    }
}

/// Activations on a device in both types, and as weights of one format read them.
struct X {
    seen: Vec<f32>,
    f32: Buffer<f32>,
    bf16: Buffer<bf16>,
}

impl X {
    fn upload(device: &Device, floats: &[f32], stored: Stored) -> device::Result<Self> {
        let rounded: Vec<_> = floats.iter().map(|&v| bf16::from_f32(v)).collect();
        let seen = match stored {
            Stored::F32 => floats.to_vec(),
            _ => rounded.iter().map(|v| v.to_f32()).collect(),
        };
        Ok(Self { seen, f32: device.upload(floats)?, bf16: device.upload(&rounded)? })
    }

    fn acts(&self) -> Acts {
        Acts { f32: self.f32.view(), bf16: self.bf16.view() }
    }
}

fn magnitudes<T: Copy>(values: &[T], abs: fn(T) -> T) -> Vec<T> {
    values.iter().map(|&v| abs(v)).collect()
}

fn dense(p: &Probe, stored: Stored, rows: usize, multiply: impl Fn(&Device, &Product) -> device::Result<()>) -> Found {
    let [n, k] = SHAPE;
    let mut random = Random::new(31);
    let sample = Sample::random(stored, SHAPE, &mut random);
    let weight = Weight::new(p.device, &sample.host())?;
    let (x, y) = (X::upload(p.device, &random.floats(rows * k), stored)?, p.device.alloc(rows * n)?);
    let memory = p.device.alloc(panel_words(rows, k, 1))?;
    let product = Product::plain(&weight, x.acts(), rows, y.view_mut());
    p.launch(|| multiply(p.device, &Product { many: Many::Fast(memory.view_mut()), ..product }))?;
    let product = |x: &[f32], w: &[f64]| twin::linear(x, [k, 0], w, [1, n, k], rows);
    let want = product(&x.seen, &sample.values);
    let size = product(&magnitudes(&x.seen, f32::abs), &magnitudes(&sample.values, f64::abs));
    near(&y.read()?, &want, &size, bounds::PRODUCT)
}

/// k that fills no pair of chunks; a row of zeros.
fn panels(p: &Probe, half: bool) -> Found {
    let k = 208;
    let mut x: Vec<_> = Random::new(32).floats(MANY * k).into_iter().map(bf16::from_f32).collect();
    x[k..2 * k].fill(bf16::ZERO);
    let memory = p.device.zeros(panel_words(MANY, k, 1))?;
    let from = p.device.upload(&x)?;
    let (x_stride, memory_view) = (k, memory.view_mut());
    let of = Panels { x: from.view(), rows: MANY, k, batch: 1, x_stride, x_batch: 0, half, memory: memory_view };
    p.launch(|| x_panels(p.device, &of).map(|_| ()))?;
    let found = memory.read()?;
    let value = |at: usize| (found[at / 2] >> (at % 2 * 16)) as u16;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for (row, x) in x.chunks(k).enumerate() {
        got.extend((0..k).map(|k_at| u32::from(value(twin::panel_index(row, k_at, k)))));
        match half {
            true => want.extend(twin::half_row(x).0.into_iter().map(u32::from)),
            false => want.extend(x.iter().map(|v| u32::from(v.to_bits()))),
        }
    }
    equal("x", &got, &want)
}

/// Ten tokens, two of three experts each.
struct Tokens {
    k: usize,
    experts: Vec<usize>,
    ids: Buffer<u32>,
    order: Buffer<u32>,
    tiles: Buffer<u32>,
    x: X,
}

const EXPERTS: usize = 3;
const PAIRS: usize = 20;
/// Experts of a token.
const SHARE: usize = 2;

impl Tokens {
    fn random(
        device: &Device,
        stored: Stored,
        k: usize,
        sorting: Sorting,
        random: &mut Random,
    ) -> device::Result<Self> {
        let experts: Vec<_> = (0..PAIRS).map(|_| random.below(EXPERTS)).collect();
        let ids: Vec<_> = experts.iter().map(|&e| e as u32).collect();
        let (order, mut tiles) = reference::expert_sort(&ids, EXPERTS, sorting.tile());
        tiles.resize(1 + 3 * PAIRS, u32::MAX);
        let x = X::upload(device, &random.floats(PAIRS / SHARE * k), stored)?;
        let (order, tiles) = (device.upload(&order)?, device.upload(&tiles)?);
        Ok(Self { k, experts, ids: device.upload(&ids)?, order, tiles, x })
    }

    /// The products in f64, and what their terms add up to.
    fn products(&self, samples: &[Sample]) -> [Vec<f64>; 2] {
        let values: Vec<_> = samples.iter().map(|s| s.values.clone()).collect();
        let sizes: Vec<_> = values.iter().map(|v| magnitudes(v, f64::abs)).collect();
        let of = |x: &[f32], w: &[Vec<f64>]| twin::grouped(x, SHARE, &self.experts, w, self.k);
        [of(&self.x.seen, &values), of(&magnitudes(&self.x.seen, f32::abs), &sizes)]
    }
}

/// Random experts, stored and on the device.
fn experts(
    p: &Probe,
    stored: Stored,
    shape: [usize; 2],
    random: &mut Random,
) -> device::Result<(Vec<Sample>, ExpertWeights)> {
    let samples: Vec<_> = (0..EXPERTS).map(|_| Sample::random(stored, shape, random)).collect();
    let hosts: Vec<_> = samples.iter().map(Sample::host).collect();
    let weights = ExpertWeights::new(p.device, "selfcheck", &hosts)?;
    Ok((samples, weights))
}

fn grouped(p: &Probe, stored: Stored, shape @ [n, k]: [usize; 2], sorting: Sorting) -> Found {
    let mut random = Random::new(32);
    let (samples, weights) = experts(p, stored, shape, &mut random)?;
    let tokens = Tokens::random(p.device, stored, k, sorting, &mut random)?;
    let y = p.device.alloc(PAIRS * n)?;
    let args = Grouped {
        weights: &weights,
        x: tokens.x.acts(),
        x_rows_per_token: SHARE,
        sorting,
        ids: tokens.ids.view(),
        order: tokens.order.view(),
        tiles: tokens.tiles.view(),
        pairs: PAIRS,
        settled: false,
        y: y.view_mut(),
    };
    p.launch(|| grouped_linear(p.device, &args))?;
    let [want, size] = tokens.products(&samples);
    near(&y.read()?, &want, &size, bounds::PRODUCT)
}

fn both(p: &Probe, stored: Stored, sorting: Sorting) -> Found {
    let mut random = Random::new(34);
    let (gate_samples, gate) = experts(p, stored, SHAPE, &mut random)?;
    let (up_samples, up) = experts(p, stored, SHAPE, &mut random)?;
    let tokens = Tokens::random(p.device, stored, SHAPE[1], sorting, &mut random)?;
    let y = p.device.alloc(PAIRS * SHAPE[0])?;
    let args = GateUp {
        gate: &gate,
        up: &up,
        x: tokens.x.acts(),
        x_rows_per_token: SHARE,
        sorting,
        ids: tokens.ids.view(),
        order: tokens.order.view(),
        tiles: tokens.tiles.view(),
        pairs: PAIRS,
        out_f32: y.view_mut(),
        out_bf16: GlobalMut::EMPTY,
        apart: [GlobalMut::EMPTY; 2],
    };
    p.launch(|| gate_up(p.device, &args))?;
    let ([g, g_size], [u, u_size]) = (tokens.products(&gate_samples), tokens.products(&up_samples));
    combined(&y.read()?, [&g, &g_size], [&u, &u_size])
}

fn gated_rows(p: &Probe, stored: Stored) -> Found {
    const ROWS: usize = 7;
    let mut random = Random::new(35);
    let [n, k] = SHAPE;
    let samples = [(); 2].map(|()| Sample::random(stored, SHAPE, &mut random));
    let [gate, up] = [Weight::new(p.device, &samples[0].host())?, Weight::new(p.device, &samples[1].host())?];
    let x = X::upload(p.device, &random.floats(ROWS * k), stored)?;
    let y = p.device.alloc(ROWS * n)?;
    let product = |weight| Product::plain(weight, x.acts(), ROWS, GlobalMut::from_raw(y.view().addr(), ROWS * n));
    let (out_f32, out_bf16) = (y.view_mut(), GlobalMut::EMPTY);
    p.launch(|| gated(p.device, &Gated { gate: product(&gate), up: product(&up), out_f32, out_bf16 }))?;
    let of = |sample: &Sample| {
        let dense = |x: &[f32], w: &[f64]| twin::linear(x, [k, 0], w, [1, n, k], ROWS);
        [dense(&x.seen, &sample.values), dense(&magnitudes(&x.seen, f32::abs), &magnitudes(&sample.values, f64::abs))]
    };
    let ([g, g_size], [u, u_size]) = (of(&samples[0]), of(&samples[1]));
    combined(&y.read()?, [&g, &g_size], [&u, &u_size])
}

/// SwiGLU stretches the error of its first factor by at most 1.1 times the second, and the other way round.
fn combined(got: &[f32], [g, g_size]: [&[f64]; 2], [u, u_size]: [&[f64]; 2]) -> Found {
    let want: Vec<_> = g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    let size = |i: usize| 1.1 * (g_size[i] * u[i].abs() + g[i].abs() * u_size[i]) + want[i].abs();
    let size: Vec<_> = (0..want.len()).map(size).collect();
    near(got, &want, &size, bounds::PRODUCT)
}

pub fn repack_bf16(p: &Probe) -> Found {
    repack(p, Stored::Bf16)
}

pub fn repack_bf16_scales(p: &Probe) -> Found {
    repack(p, Stored::W4 { scales: ScaleType::Bf16, group: 64 })
}

pub fn repack_f32_scales(p: &Probe) -> Found {
    repack(p, Stored::W4 { scales: ScaleType::F32, group: 64 })
}

/// Rows of the unit matrix read every repacked value back, exactly. The time is that of the upload, too.
fn repack(p: &Probe, stored: Stored) -> Found {
    let [n, k] = [20, 128];
    let sample = Sample::random(stored, [n, k], &mut Random::new(33));
    let weight = p.launch(|| Weight::new(p.device, &sample.host()))?;
    let unit: Vec<_> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    let (x, y) = (X::upload(p.device, &unit, stored)?, p.device.alloc(k * n)?);
    linear(p.device, &Product::plain(&weight, x.acts(), k, y.view_mut()))?;
    let want: Vec<_> = (0..k * n).map(|i| sample.values[i % n * k + i / n] as f32).collect();
    equal("values", &y.read()?, &want)
}
