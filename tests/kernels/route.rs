//! Router: exact choices with ties, infinities, signed zeros and negative biases; NaN rows; weights; scaling once.

use gpu::args::state::{ERROR, ERROR_LOGITS, ERROR_ROUTER, ERROR_ROW, NO_ROW};
use kdtree::device::Device;
use kdtree::kernels::{Route, initial_state, route};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};

/// K2.6's factor.
const SCALING: f32 = 2.827;
/// Keys nearer than this, and not of the same logit and bias, could be ordered differently by a rounding.
const NEAR: f64 = 1e-5;

pub fn cases(suite: &mut Suite) {
    for (rows, experts, top_k) in [
        (0, 8, 2),
        (1, 1, 1),
        (3, 8, 2),
        (2, 32, 4),
        (2, 257, 8),
        (9, 384, 8),
        (2, 1024, 8),
        (1, 8, 8),
        (1, 257, 257),
        (2, 384, 384),
    ] {
        let name = format!("route::top {top_k} of {experts}, {rows} rows");
        suite.both(name.clone(), move |d| drawn(d, rows, experts, top_k, |r| r.unit() * 4.0, |r| r.unit()));
        let level = |n: usize, by: f32| move |r: &mut Random| (r.below(2 * n) as f32 - n as f32) * by;
        suite.both(format!("{name}, ties"), move |d| drawn(d, rows, experts, top_k, level(6, 0.5), level(3, 0.25)));
    }
    suite.both("route::all_equal", |d| exact(d, &[0.25; 384], &[0.0; 384], 8, &[0, 1, 2, 3, 4, 5, 6, 7]));
    suite.both("route::all_minus_infinity", |d| exact(d, &[f32::NEG_INFINITY; 257], &[0.0; 257], 3, &[0, 1, 2]));
    suite.both("route::saturated", |d| exact(d, &[40.0, 50.0, f32::INFINITY, 45.0], &[0.0; 4], 4, &[0, 1, 2, 3]));
    suite.both("route::infinities", |d| {
        exact(d, &[f32::NEG_INFINITY, 0.0, f32::INFINITY, -1.0, 0.0], &[0.0; 5], 5, &[2, 1, 4, 3, 0])
    });
    suite.both("route::signed_zeros", |d| {
        // Keys: 0.5 - 0.5, 0 - 0, 0 + 0, 0.5 - 0.5: all zero.
        let none = f32::NEG_INFINITY;
        exact(d, &[-0.0, none, none, 0.0], &[-0.5, -0.0, 0.0, -0.5], 4, &[0, 1, 2, 3])
    });
    suite.both("route::bias_chooses_only", |d| exact(d, &[0.0, 2.0, 1.0, -3.0], &[-5.0, -5.0, -5.0, -4.0], 2, &[3, 1]));
    suite.both("route::scaling_once", scaling_once);
    suite.both("route::nan", nan);
    suite.both("route::rows_are_independent", independent);
    suite.both("route::refuses", refuses);
}

/// Ids, weights, state.
type Found = (Vec<u32>, Vec<f32>, Vec<u32>);

fn run(
    device: &Device,
    logits: &[f32],
    bias: &[f32],
    top_k: usize,
    norm: bool,
) -> Result<Found, libtest_mimic::Failed> {
    let rows = logits.len() / bias.len();
    let (d_logits, d_bias) = (device.upload(logits)?, device.upload(bias)?);
    let (ids, weights) = (device.alloc(rows * top_k)?, device.alloc(rows * top_k)?);
    ids.fill(0xFF)?;
    weights.fill(0xFF)?;
    let state = device.upload(&initial_state(0, 0, 0))?;
    let p = Route {
        logits: d_logits.view(),
        bias: d_bias.view(),
        ids: ids.view_mut(),
        weights: weights.view_mut(),
        state: state.view_mut(),
        rows,
        experts: bias.len(),
        top_k,
        scaling: SCALING,
        norm,
    };
    route(device, p)?;
    Ok((ids.read()?, weights.read()?, state.read()?))
}

/// Keys that differ are far apart, or come from the same logit and bias.
fn separated(logits: &[f32], bias: &[f32]) -> bool {
    let key = |e: usize| 1.0 / (1.0 + (-f64::from(logits[e])).exp()) + f64::from(bias[e]);
    let mut order: Vec<usize> = (0..bias.len()).collect();
    order.sort_by(|&a, &b| key(a).total_cmp(&key(b)));
    order.windows(2).all(|w| {
        let same = logits[w[0]] == logits[w[1]] && bias[w[0]] == bias[w[1]];
        same || (key(w[0]) - key(w[1])).abs() > NEAR
    })
}

fn drawn(
    device: &Device,
    rows: usize,
    experts: usize,
    top_k: usize,
    logit: impl Fn(&mut Random) -> f32,
    offset: impl Fn(&mut Random) -> f32,
) -> Outcome {
    let mut random = Random::new(17);
    let bias: Vec<f32> = (0..experts).map(|_| offset(&mut random)).collect();
    let mut logits = Vec::new();
    for _ in 0..rows {
        // Of many experts a row's nearest keys are often too near: take the first row that decides every place.
        let row = (0..10_000).find_map(|_| {
            let row: Vec<f32> = (0..experts).map(|_| logit(&mut random)).collect();
            let mut spread = row.clone();
            if experts > 300 {
                // Logits of this many experts on a grid: no two keys by chance in one place.
                spread.iter_mut().for_each(|z| *z = (*z * 16.0).round() / 16.0);
            }
            separated(&spread, &bias).then_some(spread)
        });
        logits.extend(row.ok_or("no row with separated keys")?);
    }
    for norm in [true, false] {
        let (ids, weights, state) = run(device, &logits, &bias, top_k, norm)?;
        let (want_ids, want_weights) = reference::route(&logits, &bias, top_k, SCALING, norm);
        equal("ids", &ids, &want_ids)?;
        // Roundings of the sum add up with its length.
        close("weights", &weights, &want_weights, bounds::F32.max(top_k as f64 * 1e-8))?;
        equal("state", &state, &initial_state(0, 0, 0))?;
    }
    Ok(())
}

fn exact(device: &Device, logits: &[f32], bias: &[f32], top_k: usize, want: &[u32]) -> Outcome {
    let (ids, weights, state) = run(device, logits, bias, top_k, true)?;
    equal("ids", &ids, want)?;
    let (want_ids, want_weights) = reference::route(logits, bias, top_k, SCALING, true);
    equal("ids of the twin", &want_ids, want)?;
    close("weights", &weights, &want_weights, bounds::F32)?;
    equal("error", &state[ERROR..ERROR + 1], &[0])
}

fn scaling_once(device: &Device) -> Outcome {
    let logits: Vec<f32> = (0..8).map(|e| e as f32 * 0.25).collect();
    let (_, weights, _) = run(device, &logits, &[0.0; 8], 4, true)?;
    close("sum of the weights", &[weights.iter().sum()], &[f64::from(SCALING)], bounds::F32)?;
    let (_, weights, _) = run(device, &[0.0; 8], &[0.0; 8], 4, false)?;
    close("weight of p = 1/2", &weights, &[f64::from(SCALING) / 2.0; 4], bounds::F32)
}

fn nan(device: &Device) -> Outcome {
    let mut random = Random::new(5);
    let (rows, experts, top_k) = (6, 40, 4);
    for (broken, at) in [(vec![2, 4], 39), (vec![0], 0), (vec![5], 17)] {
        let mut logits = random.floats(rows * experts);
        broken.iter().for_each(|&row| logits[row * experts + at] = f32::NAN);
        let bias = vec![0.0; experts];
        let (ids, weights, state) = run(device, &logits, &bias, top_k, true)?;
        let (want_ids, want_weights) = reference::route(&logits, &bias, top_k, SCALING, true);
        equal("ids", &ids, &want_ids)?;
        close("weights", &weights, &want_weights, bounds::F32)?;
        equal("error and its row", &state[ERROR..=ERROR_ROW], &[ERROR_ROUTER, broken[0] as u32])?;
    }
    let mut bias = vec![0.0; experts];
    bias[3] = f32::NAN;
    let (_, weights, state) = run(device, &random.floats(experts), &bias, top_k, true)?;
    check(weights.iter().all(|w| w.is_nan()) && state[ERROR] == ERROR_ROUTER, || "NaN in the bias is lost".into())?;
    // An earlier error stays.
    let mut words = initial_state(0, 0, 0);
    (words[ERROR], words[ERROR_ROW]) = (ERROR_LOGITS, 7);
    let (state, d_logits, d_bias) = (device.upload(&words)?, device.upload(&[f32::NAN; 2])?, device.zeros(2)?);
    let (ids, weights) = (device.alloc(1)?, device.alloc(1)?);
    let p = Route {
        logits: d_logits.view(),
        bias: d_bias.view(),
        ids: ids.view_mut(),
        weights: weights.view_mut(),
        state: state.view_mut(),
        rows: 1,
        experts: 2,
        top_k: 1,
        scaling: SCALING,
        norm: true,
    };
    route(device, p)?;
    equal("state", &state.read()?, &words)?;
    check(initial_state(0, 0, 0)[ERROR_ROW] == NO_ROW, || "a new state has no error row".into())
}

fn independent(device: &Device) -> Outcome {
    let mut random = Random::new(8);
    let (logits, bias) = (random.floats(5 * 64), random.floats(64));
    let (ids, weights, _) = run(device, &logits, &bias, 6, true)?;
    for row in 0..5 {
        let (one_ids, one_weights, _) = run(device, &logits[row * 64..][..64], &bias, 6, true)?;
        equal("ids", &one_ids, &ids[row * 6..][..6])?;
        equal("weights", &one_weights, &weights[row * 6..][..6])?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (x, bias, ids, weights) = (device.zeros(16)?, device.zeros(8)?, device.zeros(8)?, device.zeros(8)?);
    let state = device.upload(&initial_state(0, 0, 0))?;
    let p = |rows, experts, top_k| Route {
        logits: x.view(),
        bias: bias.view(),
        ids: ids.view_mut(),
        weights: weights.view_mut(),
        state: state.view_mut(),
        rows,
        experts,
        top_k,
        scaling: 1.0,
        norm: true,
    };
    route(device, p(2, 8, 4))?;
    for bad in [p(3, 8, 2), p(2, 8, 5), p(1, 8, 9), p(1, 8, 0), p(1, 7, 2), p(1, 0, 0), p(1, 1025, 2)] {
        let error = route(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("route: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
