//! Around the experts' products: the sort of pairs, SwiGLU, the weighted sum.

use cuda_std::{Global, GlobalMut, bf16};
use kdtree::device::Device;
use kdtree::kernels::{Combine, ExpertSort, Swiglu, combine, expert_sort, swiglu};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};

/// Pairs of a tile.
const TILES: [usize; 2] = [8, 16];

pub fn cases(suite: &mut Suite) {
    for (pairs, experts) in [
        (0, 8),
        (1, 1),
        (8, 8),
        (17, 3),
        (256, 257),
        (257, 384),
        (512, 384),
        (511, 512),
        (512, 513),
        (400, 1),
        (520, 384),
        (520, 1024),
        (3000, 7),
    ] {
        suite.both(format!("expert_sort::{pairs} pairs, {experts} experts"), move |d| {
            let mut random = Random::new(2);
            sort(d, &(0..pairs).map(|_| random.below(experts) as u32).collect::<Vec<_>>(), experts)
        });
    }
    suite.both("expert_sort::all_on_one", |d| sort(d, &[37; 520], 384));
    suite.both("expert_sort::512 on the last", |d| sort(d, &[511; 512], 512));
    suite.both("expert_sort::all_on_the_last", |d| sort(d, &[383; 513], 384));
    suite.both("expert_sort::duplicates_in_a_token", |d| sort(d, &[1, 1, 1, 0, 2, 2, 1, 1, 0], 4));
    suite.both("expert_sort::descending", |d| sort(d, &(0..384).rev().collect::<Vec<_>>(), 384));
    suite.both("expert_sort::tile_borders", |d| {
        sort(d, &[vec![0; 7], vec![1; 8], vec![2; 9], vec![3; 17], vec![4; 16]].concat(), 5)
    });
    suite.cpu("expert_sort::outside", outside);
    suite.both("expert_sort::refuses", sort_refuses);
    for (rows, width, stride) in [(0, 8, 8), (1, 1, 1), (3, 255, 255), (2, 256, 512), (5, 2048, 4096), (65, 40, 40)] {
        suite.both(format!("swiglu::{rows}x{width}/{stride}"), move |d| gated(d, rows, width, stride));
    }
    suite.both("swiglu::extremes", extremes);
    suite.both("swiglu::refuses", swiglu_refuses);
    for (rows, top_k, width) in [(0, 2, 8), (1, 1, 1), (3, 8, 257), (2, 8, 7168), (65, 2, 64), (2, 0, 5), (2, 11, 516)]
    {
        suite.both(format!("combine::{rows}x{top_k}x{width}"), move |d| summed(d, rows, top_k, width));
    }
    suite.both("combine::one_row_alone", one_row_alone);
    suite.both("combine::unaligned", unaligned);
    suite.both("combine::nan_stays", nan_stays);
    suite.both("combine::refuses", combine_refuses);
}

fn sort(device: &Device, ids: &[u32], experts: usize) -> Outcome {
    TILES.into_iter().try_for_each(|tile| sort_by(device, ids, experts, tile))
}

fn sort_by(device: &Device, ids: &[u32], experts: usize, tile: usize) -> Outcome {
    let pairs = ids.len();
    let d_ids = device.upload(ids)?;
    let (order, tiles) = (device.alloc::<u32>(pairs)?, device.alloc::<u32>(1 + 3 * pairs)?);
    order.fill(0xFF)?;
    tiles.fill(0xFF)?;
    let p = ExpertSort { ids: d_ids.view(), order: order.view_mut(), tiles: tiles.view_mut(), pairs, experts, tile };
    expert_sort(device, p)?;
    let (want_order, mut want_tiles) = reference::expert_sort(ids, experts, tile);
    // What lies behind the last tile is not written.
    want_tiles.resize(1 + 3 * pairs, u32::MAX);
    equal("order", &order.read()?, &want_order)?;
    equal("tiles", &tiles.read()?, &want_tiles)
}

fn outside(device: &Device) -> Outcome {
    let (order, tiles) = (device.alloc(2)?, device.alloc(7)?);
    for id in [4, u32::MAX] {
        let ids = device.upload(&[0, id])?;
        let (order, tiles) = (order.view_mut(), tiles.view_mut());
        let p = ExpertSort { ids: ids.view(), order, tiles, pairs: 2, experts: 4, tile: TILES[0] };
        let error = expert_sort(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains("outside the experts"), || format!("id {id}: expected a trap, found `{error}`"))?;
    }
    Ok(())
}

fn sort_refuses(device: &Device) -> Outcome {
    let (ids, order, tiles) = (device.zeros(4)?, device.zeros(4)?, device.zeros(12)?);
    let p = |pairs, experts| ExpertSort {
        ids: ids.view(),
        order: order.view_mut(),
        tiles: tiles.view_mut(),
        pairs,
        experts,
        tile: TILES[0],
    };
    expert_sort(device, p(3, 1024))?;
    for bad in
        [p(4, 8), p(5, 8), p(3, 0), p(3, 1025), ExpertSort { tile: 0, ..p(3, 8) }, ExpertSort { tile: 17, ..p(3, 8) }]
    {
        let error = expert_sort(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("expert_sort: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}

fn swiglu_of(device: &Device, gate: &[f32], up: &[f32], width: usize, stride: usize) -> Outcome {
    let rows = gate.len().div_ceil(stride);
    let (d_gate, d_up) = (device.upload(gate)?, device.upload(up)?);
    let (y, rounded) = (device.alloc::<f32>(rows * width)?, device.alloc::<bf16>(rows * width)?);
    y.fill(0xFF)?;
    let p = |out_f32, out_bf16| Swiglu { gate: d_gate.view(), up: d_up.view(), out_f32, out_bf16, rows, width, stride };
    swiglu(device, p(y.view_mut(), GlobalMut::EMPTY))?;
    swiglu(device, p(GlobalMut::EMPTY, rounded.view_mut()))?;
    let y = y.read()?;
    close("f32", &y, &reference::swiglu(gate, up, width, stride), bounds::F32)?;
    let want: Vec<bf16> = y.iter().map(|&v| bf16::from_f32(v)).collect();
    let bits = |v: &[bf16]| v.iter().map(|x| if x.is_nan() { u16::MAX } else { x.to_bits() }).collect::<Vec<_>>();
    equal("bf16", &bits(&rounded.read()?), &bits(&want))
}

fn gated(device: &Device, rows: usize, width: usize, stride: usize) -> Outcome {
    let mut random = Random::new(4);
    let gate: Vec<f32> = random.floats(rows * stride).into_iter().map(|v| v * 8.0).collect();
    swiglu_of(device, &gate, &random.floats(rows * stride), width, stride)
}

fn extremes(device: &Device) -> Outcome {
    let gate = [0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30, 1e-30, f32::INFINITY, f32::NAN, 1.0];
    let mut up = [1.0; 12];
    up[11] = f32::NAN;
    swiglu_of(device, &gate, &up, gate.len(), gate.len())
}

fn swiglu_refuses(device: &Device) -> Outcome {
    let (x, y) = (device.zeros::<f32>(16)?, device.zeros::<f32>(8)?);
    let p = |rows, width, stride| Swiglu {
        gate: x.view(),
        up: x.view().slice(4, 12),
        out_f32: y.view_mut(),
        out_bf16: GlobalMut::EMPTY,
        rows,
        width,
        stride,
    };
    swiglu(device, p(2, 4, 8))?;
    for bad in [p(3, 4, 8), p(2, 5, 4), p(2, 0, 4), p(3, 4, 4)] {
        let error = swiglu(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("swiglu: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}

struct Sum {
    y: Vec<f32>,
    weights: Vec<f32>,
    shared: Option<Vec<f32>>,
    x: Vec<f32>,
    top_k: usize,
    width: usize,
}

impl Sum {
    fn draw(rows: usize, top_k: usize, width: usize, with_shared: bool) -> Self {
        let mut random = Random::new(6);
        Self {
            y: random.floats(rows * top_k * width),
            weights: random.floats(rows * top_k),
            shared: with_shared.then(|| random.floats(rows * width)),
            x: random.floats(rows * width),
            top_k,
            width,
        }
    }

    fn run(&self, device: &Device) -> Result<Vec<f32>, libtest_mimic::Failed> {
        let (y, weights, x) = (device.upload(&self.y)?, device.upload(&self.weights)?, device.upload(&self.x)?);
        let shared = self.shared.as_ref().map(|s| device.upload(s)).transpose()?;
        let p = Combine {
            y: y.view(),
            weights: weights.view(),
            shared: shared.as_ref().map_or(Global::EMPTY, |s| s.view()),
            x: x.view_mut(),
            rows: self.x.len() / self.width,
            top_k: self.top_k,
            width: self.width,
        };
        combine(device, p)?;
        Ok(x.read()?)
    }

    fn reference(&self) -> Vec<f64> {
        reference::combine(&self.y, &self.weights, self.shared.as_deref(), &self.x, self.width, self.top_k)
    }
}

fn summed(device: &Device, rows: usize, top_k: usize, width: usize) -> Outcome {
    for with_shared in [true, false] {
        let sum = Sum::draw(rows, top_k, width, with_shared);
        close("x", &sum.run(device)?, &sum.reference(), bounds::F32)?;
    }
    Ok(())
}

fn one_row_alone(device: &Device) -> Outcome {
    let (rows, top_k, width) = (4, 8, 100);
    let all = Sum::draw(rows, top_k, width, true);
    let x = all.run(device)?;
    for row in 0..rows {
        let part = |v: &[f32], each: usize| v[row * each..][..each].to_vec();
        let one = Sum {
            y: part(&all.y, top_k * width),
            weights: part(&all.weights, top_k),
            shared: all.shared.as_ref().map(|s| part(s, width)),
            x: part(&all.x, width),
            top_k,
            width,
        };
        equal("row", &one.run(device)?, &x[row * width..][..width])?;
    }
    Ok(())
}

/// Rows that begin between 16-byte words have the sums of those that do not.
fn unaligned(device: &Device) -> Outcome {
    let (rows, top_k, width) = (3, 8, 64);
    let sum = Sum::draw(rows, top_k, width, true);
    let shifted = |values: &[f32]| device.upload(&[&[f32::NAN], values].concat());
    let (y, x) = (shifted(&sum.y)?, shifted(&sum.x)?);
    let (weights, shared) = (device.upload(&sum.weights)?, shifted(&sum.shared.clone().unwrap_or_default())?);
    let p = Combine {
        y: y.view().part(1, sum.y.len()),
        weights: weights.view(),
        shared: shared.view().part(1, sum.x.len()),
        x: x.view_mut().part(1, sum.x.len()),
        rows,
        top_k,
        width,
    };
    combine(device, p)?;
    equal("x", &x.read()?[1..], &sum.run(device)?)
}

fn nan_stays(device: &Device) -> Outcome {
    let mut sum = Sum::draw(3, 2, 4, true);
    sum.weights[3] = f32::NAN;
    close("x", &sum.run(device)?, &sum.reference(), bounds::F32)?;
    check(sum.run(device)?[4..8].iter().all(|v| v.is_nan()), || "a NaN weight is lost".into())
}

fn combine_refuses(device: &Device) -> Outcome {
    let (y, weights, x) = (device.zeros(16)?, device.zeros(4)?, device.zeros(8)?);
    let p = |rows, top_k, width| Combine {
        y: y.view(),
        weights: weights.view(),
        shared: Global::EMPTY,
        x: x.view_mut(),
        rows,
        top_k,
        width,
    };
    combine(device, p(2, 2, 4))?;
    for bad in [p(2, 2, 5), p(2, 3, 2), p(3, 1, 4), p(1, 1, 0)] {
        let error = combine(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("combine: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
