//! The two products beside attention that go head by head: key-up, which makes absorbed queries, and value-up.

use std::rc::Rc;

use cuda_std::{Global, bf16};

use super::{Case, Cases, Options, Run, refused, sets};
use crate::device::{Device, Result};
use crate::kernels::Acts;
use crate::linear::{HostData, HostWeight, Many, Product, Weight, linear};
use crate::selfcheck::Random;

/// Heads of K2.6 on one GPU and on one of eight; its latent, and the values of a head that are no rotary ones.
const HEADS: [usize; 2] = [64, 8];
const FEW_HEADS: [usize; 1] = [2];
const LATENT: usize = 512;
const NOPE: usize = 128;
const ROWS: [usize; 3] = [1, 8, 64];
const FEW_ROWS: [usize; 2] = [1, 5];
/// Outputs that are compared with sums in f64.
const COMPARED: usize = 64;
const SEED: u64 = 31;

/// The shape is the number of heads.
pub fn absorb<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let number = |text: &String| {
        let heads = text.parse().ok().filter(|&heads: &usize| heads > 0);
        heads.ok_or_else(|| refused(format!("shape `{text}`: expected a number of heads")))
    };
    let heads: Vec<usize> = match (options.shapes.is_empty(), device.is_cuda()) {
        (false, _) => options.shapes.iter().map(number).collect::<Result<_>>()?,
        (true, true) => HEADS.to_vec(),
        (true, false) => FEW_HEADS.to_vec(),
    };
    let rows = match (options.rows.is_empty(), device.is_cuda()) {
        (false, _) => options.rows.clone(),
        (true, true) => ROWS.to_vec(),
        (true, false) => FEW_ROWS.to_vec(),
    };
    let sizes = [("key-up", LATENT, NOPE), ("value-up", NOPE, LATENT)];
    let cases = heads.into_iter().flat_map(move |heads| {
        let rows = rows.clone();
        sizes.into_iter().flat_map(move |size| rows.clone().into_iter().map(move |rows| (heads, size, rows)))
    });
    Ok(Box::new(cases.map(move |(heads, size, rows)| case(device, heads, size, rows))))
}

fn case(device: &Device, heads: usize, (what, n, k): (&str, usize, usize), rows: usize) -> Result<Case> {
    let mut random = Random::new(SEED);
    let values: Vec<bf16> = (0..heads * n * k).map(|_| bf16::from_f32(random.unit() * 0.05)).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let weight =
        || Weight::new(device, &HostWeight { name: what, n, k, batch: heads, data: HostData::Bf16((&bytes).into()) });
    let weights = Rc::new((0..sets(device, bytes.len())).map(|_| weight()).collect::<Result<Vec<_>>>()?);
    let host_x = random.bf16s(rows * heads * k);
    let (x, y) = (Rc::new(device.upload(&host_x)?), Rc::new(device.alloc::<f32>(rows * heads * n)?));
    let run_of = |i: usize| -> Run {
        let (weights, x, y) = (weights.clone(), x.clone(), y.clone());
        Box::new(move |device| {
            let product = Product {
                weight: &weights[i],
                x: Acts { f32: Global::EMPTY, bf16: x.view() },
                rows,
                x_stride: heads * k,
                x_batch: k,
                y: y.view_mut(),
                y_stride: heads * n,
                y_batch: n,
                accumulate: false,
                many: Many::AsFew,
            };
            linear(device, &product)
        })
    };
    run_of(0)(device)?;
    let found = y.read()?;
    let (mut off, mut largest) = (0f64, f64::MIN_POSITIVE);
    for _ in 0..COMPARED {
        let (row, head, column) = (random.below(rows), random.below(heads), random.below(n));
        let x = &host_x[(row * heads + head) * k..][..k];
        let w = &values[(head * n + column) * k..][..k];
        let want: f64 = x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum();
        let distance = (f64::from(found[(row * heads + head) * n + column]) - want).abs();
        // NaN would be lost in `max`.
        off = if distance.is_nan() { f64::INFINITY } else { off.max(distance) };
        largest = largest.max(want.abs());
    }
    Ok(Case {
        operator: "absorb",
        shape: format!("{heads} heads, {what} {n} x {k}"),
        rows,
        bytes: bytes.len() + rows * heads * (k * size_of::<bf16>() + n * size_of::<f32>()),
        flops: 2 * rows * heads * n * k,
        runs: (0..weights.len()).map(run_of).collect(),
        error: Some(off / largest),
    })
}
