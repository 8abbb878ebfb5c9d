//! Draws: the generator against its published vectors, the filters against the sorted row, draws against their twin and
//! against exact probabilities, and a tree against decoding one token at a time.

use cuda_std::Global;
use gpu::args::state::{ERROR, ERROR_LOGITS, ERROR_ROW, PATH, PATH_LEN, STATE_WORDS};
use gpu::args::tokens::record::RECORD_WORDS;
use gpu::kernels::order;
use gpu::philox::philox;
use kdtree::device::{Buffer, Device};
use kdtree::kernels::{
    Accept, Argmax, ArgmaxWorkspace, Draw, SampleLimits, Sampling, accept, argmax_workspace, draw, initial_state,
    sample_limits, sample_limits_workspace,
};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, equal};

const K2_VOCAB: usize = 163_840;
const COMMITTED: u32 = 50;

pub fn cases(suite: &mut Suite) {
    suite.host("draw::philox_vectors", false, vectors);
    suite.host("draw::gumbel_noise", false, noise);
    for (rows, vocab) in [(1, 1), (3, 5), (2, 4096), (3, 5003), (2, 20_000)] {
        suite.both(format!("draw::{rows}x{vocab}"), move |d| drawn(d, rows, vocab, Sampling::all(0.7, 11)));
    }
    suite.cuda("draw::65x163840", |d| drawn(d, 65, K2_VOCAB, Sampling::all(1.0, 12)));
    suite.both("draw::cold_is_greedy", cold);
    suite.both("draw::chi_square", chi_square);
    suite.both("draw::chi_square, filtered", chi_square_filtered);
    suite.both("draw::tree_and_plain", tree_and_plain);
    suite.both("draw::not_finite", not_finite);
    suite.both("draw::seeds_and_positions", seeds);
    for (rows, vocab) in [(1, 1), (2, 7), (3, 1000), (2, 5003), (1, 20_000)] {
        suite.both(format!("sample_limits::{rows}x{vocab}"), move |d| filters(d, rows, vocab, |r| r.unit() * 9.0));
        let few = |r: &mut Random| r.below(6) as f32 * 0.5;
        suite.both(format!("sample_limits::{rows}x{vocab}, ties"), move |d| filters(d, rows, vocab, few));
    }
    // More logits tie, or nearly, than candidates are sorted; and logits that are far apart.
    suite.both("sample_limits::1x9000, one value", |d| filters(d, 1, 9000, |_| 1.5));
    suite.both("sample_limits::1x9000, two values", |d| filters(d, 1, 9000, |r| r.below(2) as f32 * 1e-3));
    suite.both("sample_limits::1x9000, wide", |d| filters(d, 1, 9000, |r| r.unit() * 400.0));
    suite.both("sample_limits::1x9000, a thousand values", |d| filters(d, 1, 9000, |r| r.below(1000) as f32 * 1e-5));
    suite.cuda("sample_limits::9x163840", |d| filters(d, 9, K2_VOCAB, |r| r.unit() * 9.0));
    suite.cuda("sample_limits::2x163840, ties", |d| filters(d, 2, K2_VOCAB, |r| r.below(40) as f32 * 0.25));
    suite.both("sample_limits::infinities", infinities);
    suite.both("draw::refuses", refuses);
}

/// Of the authors' Random123 library: `philox4x32 10`.
fn vectors() -> Outcome {
    let of = |counter, key, words: [u32; 4]| equal("words", &philox(counter, key), &words);
    of([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8])?;
    of([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd])?;
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    of(pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1])
}

/// The kernel's noise, as the CPU computes it, over the whole range of words. Where u rounds near 1 the noise is below
/// -2, and what is lost of it never decides.
fn noise() -> Outcome {
    for i in 0..=4096u64 {
        let word = (i * (u64::from(u32::MAX) / 4096)) as u32;
        for word in [word, word ^ 1, (i as u32).wrapping_mul(77)] {
            let (got, want) = (f64::from(gpu::kernels::argmax::gumbel(word)), reference::gumbel(word));
            let limit = if word < u32::MAX / 16 * 15 { bounds::NOISE } else { 0.2 };
            check((got - want).abs() <= limit, || format!("noise of {word:#x} is {got}, expected {want}"))?;
        }
    }
    Ok(())
}

/// Leaves the limits of `rows` rows.
fn limit(
    device: &Device,
    logits: &Buffer<f32>,
    limits: &Buffer<u32>,
    sampling: Sampling,
    rows: usize,
    vocab: usize,
) -> Outcome {
    // What lies in the scratch memory does not matter.
    let scratch = device.alloc(sample_limits_workspace(rows, vocab))?;
    scratch.fill(0xFF)?;
    let (logits, limits, workspace) = (logits.view(), limits.view_mut(), scratch.view_mut());
    Ok(sample_limits(device, SampleLimits { logits, limits, workspace, sampling, rows, vocab })?)
}

/// Device buffers of draws.
struct Bench<'a> {
    device: &'a Device,
    logits: Buffer<f32>,
    depths: Buffer<u32>,
    limits: Buffer<u32>,
    pick: Buffer<i32>,
    best: Buffer<f32>,
    second: Buffer<f32>,
    parts: Buffer<u32>,
    tickets: Buffer<u32>,
    state: Buffer<u32>,
    rows: usize,
    vocab: usize,
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, logits: &[f32], vocab: usize, depths: &[u32]) -> Result<Self, libtest_mimic::Failed> {
        let rows = depths.len();
        let (parts, tickets) = argmax_workspace(rows, vocab);
        Ok(Self {
            device,
            logits: device.upload(logits)?,
            depths: device.upload(depths)?,
            limits: device.alloc(2 * rows)?,
            pick: device.alloc(rows)?,
            best: device.alloc(rows)?,
            second: device.alloc(rows)?,
            parts: device.alloc(parts)?,
            tickets: device.zeros(tickets)?,
            state: device.upload(&initial_state(COMMITTED, 0, rows as u32 - 1))?,
            rows,
            vocab,
        })
    }

    /// Leaves the limits of the first `rows` rows.
    fn limit(&self, sampling: Sampling, rows: usize) -> Outcome {
        limit(self.device, &self.logits, &self.limits, sampling, rows, self.vocab)
    }

    fn run(&self, sampling: Sampling) -> Outcome {
        if sampling.filters() {
            self.limit(sampling, self.rows)?;
        }
        self.draw(sampling)
    }

    /// Draws inside limits that are there already.
    fn draw(&self, sampling: Sampling) -> Outcome {
        let limits = if sampling.filters() { self.limits.view() } else { Global::EMPTY };
        let picks = Argmax {
            logits: self.logits.view(),
            pick: self.pick.view_mut(),
            best: self.best.view_mut(),
            second: self.second.view_mut(),
            state: self.state.view_mut(),
            workspace: ArgmaxWorkspace { parts: self.parts.view_mut(), tickets: self.tickets.view_mut() },
            rows: self.rows,
            vocab: self.vocab,
        };
        Ok(draw(self.device, Draw { picks, depths: self.depths.view(), limits, sampling })?)
    }

    fn picks(&self, sampling: Sampling) -> Result<Vec<i32>, libtest_mimic::Failed> {
        self.run(sampling)?;
        Ok(self.pick.read()?)
    }
}

fn drawn(device: &Device, rows: usize, vocab: usize, sampling: Sampling) -> Outcome {
    let mut random = Random::new(31);
    let logits: Vec<f32> = (0..rows * vocab).map(|_| random.unit() * 8.0).collect();
    let depths: Vec<u32> = (0..rows as u32).map(|row| row / 2).collect();
    let bench = Bench::new(device, &logits, vocab, &depths)?;
    let (picks, all) = (bench.picks(sampling)?, (0..vocab).collect::<Vec<_>>());
    let best = bench.best.read()?;
    for (row, logits) in logits.chunks(vocab).enumerate() {
        let want = reference::draw(logits, &all, &sampling, COMMITTED + depths[row] + 1);
        check(picks[row] == want.pick, || {
            let gap = want.best - want.second;
            format!("row {row}: token {}, expected {}, whose lead is {gap}", picks[row], want.pick)
        })?;
        let near = vocab < 100 || f64::from((best[row] - want.best).abs()) <= bounds::NOISE;
        check(near, || format!("row {row}: best {}, expected {}", best[row], want.best))?;
    }
    equal("state", &bench.state.read()?, &initial_state(COMMITTED, 0, rows as u32 - 1))
}

/// At the lowest temperature the noise does not reach the difference of two logits.
fn cold(device: &Device) -> Outcome {
    let (rows, vocab) = (40, 300);
    let mut random = Random::new(37);
    let logits: Vec<f32> = (0..rows * vocab).map(|_| random.below(1 << 14) as f32 * 1e-3).collect();
    let depths: Vec<u32> = (0..rows as u32).collect();
    let picks = Bench::new(device, &logits, vocab, &depths)?.picks(Sampling::all(1e-6, 3))?;
    let want: Vec<_> = reference::argmax(&logits, vocab);
    for (row, want) in want.iter().enumerate().filter(|(_, want)| want.best > want.second) {
        equal(&format!("pick of row {row}"), &[picks[row]], &[want.pick])?;
    }
    // Every filter at its narrowest is greedy, too.
    for narrow in [Sampling { top_k: 1, ..Sampling::all(5.0, 3) }, Sampling { top_p: 1e-6, ..Sampling::all(5.0, 3) }] {
        let picks = Bench::new(device, &logits, vocab, &depths)?.picks(narrow)?;
        equal("picks", &picks, &want.iter().map(|w| w.pick).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Fails where counts are too far from what the probabilities say: a chance of some 1e-7. Cells of less than five
/// expected counts go together.
fn follows(what: &str, counts: &[usize], probabilities: &[f64]) -> Outcome {
    let total: usize = counts.iter().sum();
    let (mut sum, mut cells, mut rest) = (0.0, 0, (0, 0.0));
    for (&count, &p) in counts.iter().zip(probabilities) {
        check(p > 0.0 || count == 0, || format!("{what}: {count} draws of a token that has no probability"))?;
        let expected = p * total as f64;
        if expected < 5.0 {
            rest = (rest.0 + count, rest.1 + expected);
        } else {
            sum += (count as f64 - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rest.1 >= 5.0 {
        sum += (rest.0 as f64 - rest.1).powi(2) / rest.1;
        cells += 1;
    }
    let degrees = (cells - 1) as f64;
    let limit = degrees + 5.2 * (2.0 * degrees).sqrt() + 12.0;
    check(sum <= limit, || format!("{what}: chi-square {sum:.1} of {degrees} degrees, at most {limit:.1} expected"))
}

/// Draws of one row at many positions.
fn histogram(device: &Device, logits: &[f32], sampling: Sampling, draws: usize) -> Outcome {
    let vocab = logits.len();
    let depths: Vec<u32> = (0..draws as u32).collect();
    let bench = Bench::new(device, &logits.repeat(draws), vocab, &depths)?;
    // All rows are alike, and so are their limits.
    bench.limit(sampling, 1)?;
    let limit = bench.limits.read()?[..2].repeat(draws);
    bench.limits.write(0, &limit)?;
    bench.draw(sampling)?;
    let mut counts = vec![0; vocab];
    bench.pick.read()?.iter().for_each(|&id| counts[id as usize] += 1);
    let kept = reference::sample_kept(logits, &sampling);
    follows(&format!("{sampling:?}"), &counts, &reference::probabilities(logits, &kept, sampling.temperature))
}

fn chi_square(device: &Device) -> Outcome {
    let draws = if device.is_cuda() { 60_000 } else { 1000 };
    let logits: Vec<f32> = (0..37).map(|i| (i * i % 23) as f32 * 0.2 - 1.0).collect();
    for (temperature, seed) in [(1.0, 1), (0.3, 2), (4.0, u64::MAX)] {
        histogram(device, &logits, Sampling::all(temperature, seed), draws)?;
    }
    // All alike, and one that has nearly everything.
    histogram(device, &[0.5; 16], Sampling::all(1.0, 5), draws)?;
    histogram(device, &[9.0, 0.0, 1.0, 2.0], Sampling::all(1.0, 6), draws)
}

fn chi_square_filtered(device: &Device) -> Outcome {
    let draws = if device.is_cuda() { 60_000 } else { 800 };
    let logits: Vec<f32> = (0..37).map(|i| (i * i % 23) as f32 * 0.2 - 1.0).collect();
    let all = Sampling::all(0.8, 21);
    histogram(device, &logits, Sampling { top_k: 7, ..all }, draws)?;
    histogram(device, &logits, Sampling { top_p: 0.7, ..all }, draws)?;
    histogram(device, &logits, Sampling { min_p: 0.2, ..all }, draws)?;
    histogram(device, &logits, Sampling { top_k: 12, top_p: 0.8, min_p: 0.1, ..all }, draws)
}

/// Two tokens one after the other, from a tree that holds two of four first tokens and from one token at a time: the
/// same for every seed, and distributed as the product of the probabilities.
fn tree_and_plain(device: &Device) -> Outcome {
    const VOCAB: usize = 4;
    let first = [1.0, 0.2, -0.5, 0.6];
    let then: [[f32; VOCAB]; VOCAB] = [[0.0, 1.0, 0.3, 0.3], [2.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4], [0.0; VOCAB]];
    // The tree: the root, and below it tokens 3 and 0.
    let (tokens, parents) = (device.upload(&[9, 3, 0])?, device.upload(&[-1, 0, 0])?);
    let tree = Bench::new(device, &[first, then[3], then[0]].concat(), VOCAB, &[0, 1, 1])?;
    let plain = Bench::new(device, &[first, then[0], then[1], then[2], then[3]].concat(), VOCAB, &[0, 1, 1, 1, 1])?;
    let record = device.alloc(RECORD_WORDS)?;
    let mut counts = vec![0; VOCAB * VOCAB];
    let sampling = Sampling { top_k: 3, ..Sampling::all(0.9, 0) };
    // Limits do not depend on the seed.
    plain.limit(sampling, 5)?;
    tree.limit(sampling, 3)?;
    for seed in 0..if device.is_cuda() { 8000 } else { 400 } {
        let sampling = Sampling { seed, ..sampling };
        plain.draw(sampling)?;
        let one = plain.pick.read()?;
        let pair = (one[0] as usize, one[1 + one[0] as usize] as usize);
        tree.draw(sampling)?;
        let p = Accept {
            tokens: tokens.view(),
            parents: parents.view(),
            pick: tree.pick.view(),
            best: tree.best.view(),
            second: tree.second.view(),
            state: tree.state.view_mut(),
            record: record.view_mut(),
            sequences: 1,
            rows: 3,
        };
        accept(device, p)?;
        let (state, picks) = (tree.state.read()?, tree.pick.read()?);
        let path: Vec<i32> = (0..state[PATH_LEN]).map(|r| picks[state[PATH + r as usize] as usize]).collect();
        let want = if pair.0.is_multiple_of(3) { vec![pair.0 as i32, pair.1 as i32] } else { vec![pair.0 as i32] };
        equal(&format!("tokens of seed {seed}"), &path, &want)?;
        counts[pair.0 * VOCAB + pair.1] += 1;
    }
    let p = |logits: &[f32]| {
        let kept = reference::sample_kept(logits, &sampling);
        reference::probabilities(logits, &kept, sampling.temperature)
    };
    let joint = p(&first).into_iter().zip(&then).flat_map(|(a, row)| p(row).into_iter().map(move |b| a * b));
    follows("pairs", &counts, &joint.collect::<Vec<_>>())
}

fn not_finite(device: &Device) -> Outcome {
    for bad in [f32::NAN, f32::INFINITY] {
        for vocab in [30, 9000] {
            let mut logits = vec![0.5; 3 * vocab];
            logits[vocab + vocab / 2] = bad;
            for sampling in [Sampling::all(1.0, 4), Sampling { top_p: 0.5, top_k: 9, ..Sampling::all(1.0, 4) }] {
                let bench = Bench::new(device, &logits, vocab, &[0, 1, 2])?;
                let picks = bench.picks(sampling)?;
                check(picks[1] == -1 && picks[0] >= 0 && picks[2] >= 0, || format!("{bad}: {picks:?}"))?;
                equal("error and its row", &bench.state.read()?[ERROR..=ERROR_ROW], &[ERROR_LOGITS, 1])?;
            }
        }
    }
    // -inf is a token that is never drawn; a row of it is an error.
    let mut logits = vec![f32::NEG_INFINITY; 2 * 50];
    logits[7] = -3.0;
    let bench = Bench::new(device, &logits, 50, &[0, 1])?;
    equal("picks", &bench.picks(Sampling::all(1.0, 4))?, &[7, -1])
}

/// Rows at one position draw the same from the same logits; other positions and seeds draw otherwise.
fn seeds(device: &Device) -> Outcome {
    let vocab = 5000;
    let bench = Bench::new(device, &vec![0.0; 4 * vocab], vocab, &[3, 3, 4, 5])?;
    let picks = bench.picks(Sampling::all(1.0, 1))?;
    check(picks[0] == picks[1] && picks[1] != picks[2] && picks[2] != picks[3], || format!("{picks:?}"))?;
    for seed in [2, 1 << 32, 1 << 63] {
        let other = bench.picks(Sampling::all(1.0, seed))?;
        check(other[0] != picks[0], || format!("seed {seed} draws {other:?} like seed 1"))?;
    }
    // The next position of this row is the position of the next row.
    bench.state.write(0, &initial_state(COMMITTED + 1, 0, 3))?;
    equal("one position on", &[bench.picks(Sampling::all(1.0, 1))?[0]], &[picks[2]])
}

fn filters(device: &Device, rows: usize, vocab: usize, value: impl Fn(&mut Random) -> f32) -> Outcome {
    let mut random = Random::new(41);
    let logits: Vec<f32> = (0..rows * vocab).map(|_| value(&mut random)).collect();
    let (d_logits, limits) = (device.upload(&logits)?, device.alloc(2 * rows)?);
    for (temperature, top_k, top_p, min_p) in [
        (1.0, 1, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (0.5, 900, 1.0, 0.0),
        (1.0, 0, 0.5, 0.0),
        (0.2, 0, 0.9, 0.0),
        (3.0, 0, 0.999, 0.0),
        (1.0, 0, 1.0, 0.3),
        (1.0, 40, 0.8, 0.01),
        (2.0, 40, 0.8, 0.9),
    ] {
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed: 0 };
        limit(device, &d_logits, &limits, sampling, rows, vocab)?;
        let limits = limits.read()?;
        for (row, limit) in logits.chunks(vocab).zip(limits.chunks(2)) {
            kept_as_wanted(row, (limit[0], limit[1]), &sampling)?;
        }
    }
    Ok(())
}

/// The ids inside the limits are those of the twin, but for what its weights leave open at the end of top-p.
fn kept_as_wanted(row: &[f32], limit: (u32, u32), sampling: &Sampling) -> Outcome {
    let inside = |i: usize| order::key(row[i]) > limit.0 || (order::key(row[i]) == limit.0 && i as u32 <= limit.1);
    let want = reference::sample_kept(row, sampling);
    let got = (0..row.len()).filter(|&i| inside(i)).count();
    let all = Sampling { top_p: 1.0, min_p: 0.0, ..*sampling };
    let order = reference::sample_kept(row, &all);
    check(order[..got.min(order.len())].iter().all(|&i| inside(i)) && got <= order.len(), || {
        format!("{sampling:?}: the {got} ids kept are not the likeliest")
    })?;
    if got == want.len() {
        return Ok(());
    }
    let weight = |i: &usize| reference::sample_weight(row[*i], row[order[0]], sampling.temperature);
    let (total, differ): (u64, u64) =
        (order.iter().map(weight).sum(), order[got.min(want.len())..got.max(want.len())].iter().map(weight).sum());
    // Each weight is off by a rounding of the exponential.
    let open = sampling.top_p < 1.0 && differ as f64 <= 1e-6 * total as f64 + order.len() as f64;
    check(open, || format!("{sampling:?}: {got} ids kept, expected {}", want.len()))
}

fn infinities(device: &Device) -> Outcome {
    let mut logits = vec![f32::NEG_INFINITY; 600];
    (logits[3], logits[500]) = (2.0, 1.0);
    for (top_k, top_p, kept) in [(1, 1.0, 1), (2, 1.0, 2), (0, 0.9, 2), (0, 0.5, 1)] {
        let sampling = Sampling { top_k, top_p, ..Sampling::all(1.0, 0) };
        let (d_logits, limits) = (device.upload(&logits)?, device.alloc(2)?);
        limit(device, &d_logits, &limits, sampling, 1, 600)?;
        let limits = limits.read()?;
        let got = (0..600).filter(|&i| (order::key(logits[i]), !(i as u32)) >= (limits[0], !limits[1])).count();
        equal("kept", &[got], &[kept])?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let bench = Bench::new(device, &[0.0; 8], 4, &[0, 1])?;
    let good = Sampling::all(1.0, 0);
    bench.run(good)?;
    let bad = [
        Sampling { temperature: 0.0, ..good },
        Sampling { temperature: f32::NAN, ..good },
        Sampling { temperature: f32::INFINITY, ..good },
        Sampling { top_p: 0.0, ..good },
        Sampling { top_p: 1.5, ..good },
        Sampling { min_p: -0.1, ..good },
        Sampling { min_p: f32::NAN, ..good },
    ];
    for sampling in bad {
        let error = bench.run(sampling).err().and_then(|e| e.message().map(str::to_owned)).unwrap_or_default();
        let named = error.contains("draw: ") || error.contains("sample_limits: ");
        check(named, || format!("{sampling:?}: expected a refusal, found `{error}`"))?;
    }
    let (short, state) = (device.zeros::<u32>(1)?, device.zeros(STATE_WORDS)?);
    let picks = Argmax {
        logits: bench.logits.view(),
        pick: bench.pick.view_mut(),
        best: bench.best.view_mut(),
        second: bench.second.view_mut(),
        state: state.view_mut(),
        workspace: ArgmaxWorkspace { parts: bench.parts.view_mut(), tickets: bench.tickets.view_mut() },
        rows: 2,
        vocab: 4,
    };
    let p = |depths, limits| Draw { picks, depths, limits, sampling: good };
    for bad in [p(short.view(), Global::EMPTY), p(bench.depths.view(), short.view())] {
        let error = draw(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("draw: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
