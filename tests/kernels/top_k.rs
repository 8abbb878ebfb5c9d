//! The drafter's candidates: exact ids with ties, log-probabilities, infinities, NaN, sizes around chunks.

use gpu::args::state::{ERROR, ERROR_DRAFT, ERROR_ROW};
use kdtree::device::Device;
use kdtree::kernels::{TopK, TopKWorkspace, initial_state, top_k, top_k_workspace};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, equal};

const K2_VOCAB: usize = 163_840;

pub fn cases(suite: &mut Suite) {
    for (rows, vocab, k) in [
        (0, 100, 4),
        (1, 1, 1),
        (2, 7, 7),
        (3, 64, 64),
        (2, 65, 64),
        (2, 1000, 8),
        (2, 2047, 1),
        (2, 2048, 64),
        (2, 2049, 64),
        (2, 2111, 64),
        (3, 4096, 16),
        (7, 5003, 7),
        (2, 8192, 100),
        (2, 8193, 64),
        (2, 12_289, 1024),
        (1, 9001, 1000),
    ] {
        suite.both(format!("top_k::{k} of {rows}x{vocab}"), move |d| drawn(d, rows, vocab, k, |r| r.unit() * 12.0));
        let few = |r: &mut Random| r.below(7) as f32 - 3.0;
        suite.both(format!("top_k::{k} of {rows}x{vocab}, ties"), move |d| drawn(d, rows, vocab, k, few));
    }
    suite.both("top_k::8 of 1x163840", |d| drawn(d, 1, K2_VOCAB, 8, |r| r.unit() * 12.0));
    suite.cuda("top_k::64 of 7x163840", |d| drawn(d, 7, K2_VOCAB, 64, |r| r.unit() * 12.0));
    suite.cuda("top_k::1024 of 7x163840", |d| drawn(d, 7, K2_VOCAB, 1024, |r| r.unit() * 12.0));
    suite.cuda("top_k::1 of 7x163840", |d| drawn(d, 7, K2_VOCAB, 1, |r| r.unit() * 12.0));
    suite.cuda("top_k::more_ties_than_room", |d| drawn(d, 3, K2_VOCAB, 64, |r| r.below(4) as f32));
    suite.cuda("top_k::64 of 31x524288", |d| drawn(d, 31, 524_288, 64, |r| r.below(50_000) as f32 * 1e-3));
    suite.both("top_k::all_equal", |d| same(d, &[-3.25; 2 * 2500], 2500, 64));
    suite.both("top_k::all_equal_in_many_chunks", |d| same(d, &[-3.25; 2 * 20_000], 20_000, 64));
    suite.both("top_k::few_finite_in_many_chunks", |d| {
        let mut logits = vec![f32::NEG_INFINITY; 20_000];
        (logits[19_999], logits[5], logits[10_000]) = (1.0, -2.0, 1.0);
        same(d, &logits, 20_000, 9)
    });
    suite.both("top_k::an_unaligned_row", |d| drawn(d, 3, 16_383, 33, |r| r.unit() * 12.0));
    suite.both("top_k::signed_zeros", |d| same(d, &[-0.0, 0.0, -1.0, 0.0, -0.0], 5, 5));
    suite.both("top_k::minus_infinities", |d| {
        let mut logits = vec![f32::NEG_INFINITY; 2100];
        (logits[2099], logits[5], logits[1000]) = (1.0, -2.0, 1.0);
        same(d, &logits, 2100, 9)
    });
    suite.both("top_k::large_logits", |d| same(d, &[1e30, -1e30, 1e38, 88.0, -1e38, 0.0], 6, 6));
    suite.both("top_k::one_likely_token", |d| {
        let mut logits = vec![-20.0; 3000];
        logits[2999] = 20.0;
        same(d, &logits, 3000, 3)
    });
    suite.both("top_k::far_ids", far_ids);
    suite.both("top_k::not_finite", not_finite);
    suite.both("top_k::one_row_alone", one_row_alone);
    suite.both("top_k::refuses", refuses);
}

struct Found {
    ids: Vec<i32>,
    logp: Vec<f32>,
    state: Vec<u32>,
}

fn run(device: &Device, logits: &[f32], vocab: usize, k: usize) -> Result<Found, libtest_mimic::Failed> {
    let rows = logits.len() / vocab;
    let (d_logits, state) = (device.upload(logits)?, device.upload(&initial_state(0, 0, 0))?);
    let (words, sums) = top_k_workspace(rows, vocab, k);
    let (words, sums) = (device.alloc(words)?, device.alloc(sums)?);
    let (ids, logp) = (device.alloc(rows * k)?, device.alloc(rows * k)?);
    let p = TopK {
        logits: d_logits.view(),
        ids: ids.view_mut(),
        logp: logp.view_mut(),
        state: state.view_mut(),
        workspace: TopKWorkspace { words: words.view_mut(), sums: sums.view_mut() },
        rows,
        vocab,
        k,
    };
    top_k(device, p)?;
    Ok(Found { ids: ids.read()?, logp: logp.read()?, state: state.read()? })
}

fn compare(found: &Found, logits: &[f32], vocab: usize, k: usize) -> Outcome {
    let (ids, logp) = reference::top_k(logits, vocab, k);
    equal("ids", &found.ids, &ids)?;
    for (i, (&g, &w)) in found.logp.iter().zip(&logp).enumerate() {
        let g = f64::from(g);
        // Scores far from zero are right to their own last bits.
        let near = (g - w).abs() <= bounds::LOG_PROBABILITY.max(w.abs() * 2e-7);
        check(g == w || near || (g.is_nan() && w.is_nan()), || format!("logp {i} is {g}, expected {w}"))?;
    }
    Ok(())
}

fn same(device: &Device, logits: &[f32], vocab: usize, k: usize) -> Outcome {
    let found = run(device, logits, vocab, k)?;
    compare(&found, logits, vocab, k)?;
    equal("state", &found.state, &initial_state(0, 0, 0))
}

fn drawn(device: &Device, rows: usize, vocab: usize, k: usize, value: impl Fn(&mut Random) -> f32) -> Outcome {
    let mut random = Random::new(33);
    same(device, &(0..rows * vocab).map(|_| value(&mut random)).collect::<Vec<_>>(), vocab, k)
}

fn far_ids(device: &Device) -> Outcome {
    let mut logits = Random::new(9).floats(K2_VOCAB);
    for (rank, id) in [163_839, 65_536, 65_535, 0].into_iter().enumerate() {
        logits[id] = 9.0 - rank as f32;
    }
    let found = run(device, &logits, K2_VOCAB, 4)?;
    equal("ids", &found.ids, &[163_839, 65_536, 65_535, 0])?;
    compare(&found, &logits, K2_VOCAB, 4)
}

fn not_finite(device: &Device) -> Outcome {
    for vocab in [2100, 9000] {
        not_finite_of(device, vocab)?;
    }
    Ok(())
}

fn not_finite_of(device: &Device, vocab: usize) -> Outcome {
    let k = 5;
    for (bad, all) in [(f32::NAN, false), (f32::INFINITY, false), (f32::NEG_INFINITY, true), (f32::NAN, true)] {
        for at in [0, 1999, vocab / 2, vocab - 1] {
            let mut logits = Random::new(2).floats(4 * vocab);
            for row in [1, 3] {
                if all {
                    logits[row * vocab..][..vocab].fill(bad);
                }
                logits[row * vocab + at] = bad;
            }
            let found = run(device, &logits, vocab, k)?;
            compare(&found, &logits, vocab, k)?;
            check(found.logp[k..2 * k].iter().all(|v| v.is_nan()), || format!("{bad} at {at} is lost"))?;
            equal("error and its row", &found.state[ERROR..=ERROR_ROW], &[ERROR_DRAFT, 1])?;
        }
    }
    // NaN in a chunk whose other logits are -inf.
    let mut logits = vec![f32::NEG_INFINITY; vocab];
    (logits[3], logits[2050]) = (1.0, f32::NAN);
    equal("error", &run(device, &logits, vocab, k)?.state[ERROR..=ERROR_ROW], &[ERROR_DRAFT, 0])
}

fn one_row_alone(device: &Device) -> Outcome {
    let (vocab, k) = (3001, 6);
    let logits = Random::new(12).floats(4 * vocab);
    let all = run(device, &logits, vocab, k)?;
    for row in 0..4 {
        let one = run(device, &logits[row * vocab..][..vocab], vocab, k)?;
        equal("ids", &one.ids, &all.ids[row * k..][..k])?;
        equal("logp", &one.logp, &all.logp[row * k..][..k])?;
    }
    for _ in 0..if device.is_cuda() { 200 } else { 3 } {
        equal("logp again", &run(device, &logits, vocab, k)?.logp, &all.logp)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (logits, ids, logp, state) =
        (device.zeros(16)?, device.zeros(8)?, device.zeros(8)?, device.upload(&initial_state(0, 0, 0))?);
    let (words, sums, short) = (device.zeros(1 << 14)?, device.zeros(4)?, device.zeros::<u32>(7)?);
    let workspace = TopKWorkspace { words: words.view_mut(), sums: sums.view_mut() };
    let small = TopKWorkspace { words: short.view_mut(), sums: sums.view_mut() };
    let p = |rows, vocab, k, workspace| TopK {
        logits: logits.view(),
        ids: ids.view_mut(),
        logp: logp.view_mut(),
        state: state.view_mut(),
        workspace,
        rows,
        vocab,
        k,
    };
    top_k(device, p(2, 8, 4, workspace))?;
    let bad = [
        p(1, 3, 4, workspace),
        p(1, 8, 0, workspace),
        p(1, 16, 1025, workspace),
        p(2, 9, 2, workspace),
        p(2, 8, 5, workspace),
        p(2, 8, 2, small),
        p(0, (1 << 19) + 1, 2, workspace),
    ];
    for bad in bad {
        let error = top_k(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("top_k_chunks: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
