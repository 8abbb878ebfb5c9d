//! Greedy picks: ties, signed zeros, infinities, NaN in real and in padded rows, ids behind 65,535.

use gpu::args::state::{ERROR, ERROR_LOGITS, ERROR_ROUTER, ERROR_ROW};
use kdtree::device::Device;
use kdtree::kernels::{Argmax, ArgmaxWorkspace, argmax, argmax_workspace, initial_state};
use kdtree::reference;

use super::support::{Outcome, Random, Suite, check, equal};

const K2_VOCAB: usize = 163_840;

pub fn cases(suite: &mut Suite) {
    for (rows, vocab) in [(0, 5), (1, 1), (3, 2), (5, 31), (2, 257), (3, 4095), (2, 4096), (2, 4100), (2, 20_001)] {
        suite.both(format!("argmax::{rows}x{vocab}"), move |d| drawn(d, rows, vocab, |r| r.unit()));
        suite
            .both(format!("argmax::{rows}x{vocab}, ties"), move |d| drawn(d, rows, vocab, |r| r.below(9) as f32 - 4.0));
    }
    for rows in [1, 7, 65, 200] {
        suite.cuda(format!("argmax::{rows}x163840"), move |d| drawn(d, rows, K2_VOCAB, |r| r.unit()));
    }
    suite.both("argmax::the_same_alone_and_among_others", alone);
    suite.both("argmax::all_equal", |d| same(d, &[2.5; 3000], 3000));
    suite.both("argmax::signed_zeros", |d| same(d, &[-1.0, -0.0, 0.0, -0.0], 4));
    suite.both("argmax::minus_infinities", |d| same(d, &[f32::NEG_INFINITY, -7.0, f32::NEG_INFINITY], 3));
    suite.both("argmax::far_ids", far_ids);
    suite.both("argmax::unaligned_view", unaligned);
    suite.both("argmax::not_finite", not_finite);
    suite.both("argmax::padding_is_not_an_error", padding);
    suite.both("argmax::an_earlier_error_stays", earlier);
    suite.both("argmax::refuses", refuses);
}

struct Found {
    pick: Vec<i32>,
    best: Vec<f32>,
    second: Vec<f32>,
    state: Vec<u32>,
}

fn run(device: &Device, logits: &[f32], vocab: usize, state: &[u32]) -> Result<Found, libtest_mimic::Failed> {
    let rows = logits.len() / vocab;
    let (d_logits, d_state) = (device.upload(logits)?, device.upload(state)?);
    let (pick, best, second) = (device.alloc(rows)?, device.alloc(rows)?, device.alloc(rows)?);
    let (parts, tickets) = argmax_workspace(rows, vocab);
    let (parts, tickets) = (device.alloc(parts)?, device.zeros(tickets)?);
    let p = Argmax {
        logits: d_logits.view(),
        pick: pick.view_mut(),
        best: best.view_mut(),
        second: second.view_mut(),
        state: d_state.view_mut(),
        workspace: ArgmaxWorkspace { parts: parts.view_mut(), tickets: tickets.view_mut() },
        rows,
        vocab,
    };
    argmax(device, p)?;
    equal("tickets", &tickets.read()?, &vec![0; rows])?;
    Ok(Found { pick: pick.read()?, best: best.read()?, second: second.read()?, state: d_state.read()? })
}

fn same(device: &Device, logits: &[f32], vocab: usize) -> Outcome {
    let rows = logits.len() / vocab;
    let state = initial_state(0, 0, rows.saturating_sub(1) as u32);
    let found = run(device, logits, vocab, &state)?;
    let want = reference::argmax(logits, vocab);
    equal("pick", &found.pick, &want.iter().map(|p| p.pick).collect::<Vec<_>>())?;
    equal("best", &found.best, &want.iter().map(|p| p.best).collect::<Vec<_>>())?;
    equal("second", &found.second, &want.iter().map(|p| p.second).collect::<Vec<_>>())?;
    equal("state", &found.state, &state)
}

fn drawn(device: &Device, rows: usize, vocab: usize, value: impl Fn(&mut Random) -> f32) -> Outcome {
    let mut random = Random::new(21);
    same(device, &(0..rows * vocab).map(|_| value(&mut random)).collect::<Vec<_>>(), vocab)
}

fn far_ids(device: &Device) -> Outcome {
    let mut logits = vec![-1.0; K2_VOCAB];
    for ids in [[163_839, 65_536], [65_536, 65_535], [65_535, 0]] {
        // Both hold the maximum: the lower one is the pick, and then the only one.
        ids.iter().for_each(|&id| logits[id] = 3.0);
        let found = run(device, &logits, K2_VOCAB, &initial_state(0, 0, 0))?;
        equal("pick of two", &found.pick, &[ids[1] as i32])?;
        equal("second of two", &found.second, &[3.0])?;
        logits[ids[1]] = -1.0;
        let found = run(device, &logits, K2_VOCAB, &initial_state(0, 0, 0))?;
        equal("pick", &found.pick, &[ids[0] as i32])?;
        equal("second", &found.second, &[-1.0])?;
        logits[ids[0]] = -1.0;
    }
    Ok(())
}

/// A row that starts 4 bytes behind a 16-byte border takes the narrow loads.
fn unaligned(device: &Device) -> Outcome {
    let mut random = Random::new(1);
    let logits = random.floats(5001);
    let (d_logits, state) = (device.upload(&logits)?, device.upload(&initial_state(0, 0, 0))?);
    let (pick, best, second) = (device.alloc(1)?, device.alloc(1)?, device.alloc(1)?);
    let (parts, tickets) = (device.alloc(argmax_workspace(1, 5000).0)?, device.zeros(1)?);
    let p = Argmax {
        logits: d_logits.view().slice(1, 5000),
        pick: pick.view_mut(),
        best: best.view_mut(),
        second: second.view_mut(),
        state: state.view_mut(),
        workspace: ArgmaxWorkspace { parts: parts.view_mut(), tickets: tickets.view_mut() },
        rows: 1,
        vocab: 5000,
    };
    argmax(device, p)?;
    equal("pick", &pick.read()?, &[reference::argmax(&logits[1..], 5000)[0].pick])
}

fn not_finite(device: &Device) -> Outcome {
    let vocab = 5000;
    for (bad, all) in [(f32::NAN, false), (f32::INFINITY, false), (f32::NEG_INFINITY, true), (f32::NAN, true)] {
        for at in [0, 1, 4095, 4096, 4999] {
            let mut logits = Random::new(2).floats(4 * vocab);
            for row in [1, 3] {
                if all {
                    logits[row * vocab..][..vocab].fill(bad);
                }
                logits[row * vocab + at] = bad;
            }
            let found = run(device, &logits, vocab, &initial_state(0, 0, 3))?;
            let want = reference::argmax(&logits, vocab);
            equal("pick", &found.pick, &want.iter().map(|p| p.pick).collect::<Vec<_>>())?;
            check(found.pick[1] == -1 && found.pick[3] == -1, || format!("{bad} at {at} has a pick"))?;
            check(found.best[1].is_nan() == bad.is_nan(), || format!("{bad} at {at}: best {}", found.best[1]))?;
            equal("error and its row", &found.state[ERROR..=ERROR_ROW], &[ERROR_LOGITS, 1])?;
        }
    }
    Ok(())
}

fn padding(device: &Device) -> Outcome {
    let mut logits = Random::new(2).floats(4 * 100);
    (logits[2 * 100], logits[3 * 100]) = (f32::NAN, f32::INFINITY);
    let state = initial_state(5, 6, 1);
    let found = run(device, &logits, 100, &state)?;
    equal("picks of the padding", &found.pick[2..], &[-1, -1])?;
    equal("state", &found.state, &state)?;
    let found = run(device, &logits, 100, &initial_state(5, 6, 2))?;
    equal("error and its row", &found.state[ERROR..=ERROR_ROW], &[ERROR_LOGITS, 2])
}

fn earlier(device: &Device) -> Outcome {
    let mut state = initial_state(0, 0, 0);
    (state[ERROR], state[ERROR_ROW]) = (ERROR_ROUTER, 3);
    equal("state", &run(device, &[f32::NAN; 4], 4, &state)?.state, &state)
}

fn refuses(device: &Device) -> Outcome {
    let (logits, pick, x, short) = (device.zeros(8)?, device.zeros(2)?, device.zeros(2)?, device.zeros::<u32>(8)?);
    let state = device.upload(&initial_state(0, 0, 0))?;
    let (parts, tickets, none) = (device.zeros(8)?, device.zeros(2)?, device.zeros(0)?);
    let workspace = ArgmaxWorkspace { parts: parts.view_mut(), tickets: tickets.view_mut() };
    let p = |rows, vocab, state| Argmax {
        logits: logits.view(),
        pick: pick.view_mut(),
        best: x.view_mut(),
        second: x.view_mut(),
        state,
        workspace,
        rows,
        vocab,
    };
    let state = || state.view_mut();
    argmax(device, p(2, 4, state()))?;
    let no_tickets =
        Argmax { workspace: ArgmaxWorkspace { tickets: none.view_mut(), ..workspace }, ..p(2, 4, state()) };
    let no_parts = Argmax { workspace: ArgmaxWorkspace { parts: none.view_mut(), ..workspace }, ..p(2, 4, state()) };
    let bad = [p(2, 5, state()), p(3, 2, state()), p(1, 0, state()), p(1, 4, short.view_mut()), no_tickets, no_parts];
    for bad in bad {
        let error = argmax(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("argmax: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}

/// A row alone is divided into more parts than among others.
fn alone(device: &Device) -> Outcome {
    let vocab = 30_000;
    let mut random = Random::new(5);
    let logits: Vec<f32> = (0..40 * vocab).map(|_| random.below(20_000) as f32 * 1e-3).collect();
    let all = run(device, &logits, vocab, &initial_state(0, 0, 39))?;
    for row in [0, 17, 39] {
        let one = run(device, &logits[row * vocab..][..vocab], vocab, &initial_state(0, 0, 0))?;
        let (one, of_all) = ([one.best[0], one.second[0]], [all.best[row], all.second[row]]);
        equal("best and second", &one, &of_all)?;
    }
    Ok(())
}
