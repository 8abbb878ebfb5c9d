//! The goldens of each bundle, token for token: plain, with recorded drafts, and with the DFlash drafter.
//!
//! A tiny bundle's gaps (best minus second logit) are compared too, within the tolerance that it states: its tokens
//! alone would not notice a small error. The trained model's move too much with the order of sums to say anything.

use std::ops::ControlFlow;

use kdtree::device::{Device, Mode};
use kdtree::engine::{Draft, Engine, EngineOptions, Outcome as Decoded, Request};
use kdtree::weights::{Bundle, Golden};
use libtest_mimic::Failed;

use super::support::{Outcome, Suite, check, equal, root};

const TINY: [&str; 4] = ["k26-tiny-f32", "k26-tiny-bf16", "k26-tiny-int4", "k26-tiny-mixed"];
const SMALL: &str = "k26-small-int4";
/// Goldens of [`SMALL`] that the CPU device decodes; what is accepted on average is found by `acceptance` there.
const SMALL_ON_CPU: usize = 3;
/// The CPU device decodes all goldens of a tiny bundle plain and with one budget; with others the shortest prompt and
/// the longest.
const ENDS: [usize; 2] = [0, 3];
const WHOLE_ON_CPU: usize = 16;
const BUDGETS: [usize; 5] = [0, 1, 7, 16, 64];
const CONTEXT: usize = 256;
/// Tokens that the checked case decodes: two rounds and a prefill.
const CHECKED_TOKENS: usize = 12;
/// Accepted length a round, against the numpy reference over the same prompts.
const ACCEPTANCE_WITHIN: f64 = 0.05;

pub fn cases(suite: &mut Suite) {
    for name in TINY {
        suite.model(format!("{name}::plain"), move |d| tiny(d, name, Draft::None, 0));
        for budget in BUDGETS {
            suite.model(format!("{name}::recorded::{budget}"), move |d| tiny(d, name, Draft::Recorded, budget));
        }
        suite.cpu(format!("{name}::checked"), move |_| checked(name));
    }
    suite.model(format!("{SMALL}::dflash::16"), |d| small(d, Draft::Dflash, 16));
    suite.cuda(format!("{SMALL}::plain"), |d| small(d, Draft::None, 0));
    for budget in [4, 8, 32, 64] {
        suite.cuda(format!("{SMALL}::dflash::{budget}"), move |d| small(d, Draft::Dflash, budget));
    }
}

fn open(device: &Device, name: &str, draft: Draft, budget: usize) -> Result<(Bundle, Engine), Failed> {
    let bundle = Bundle::open(&root().join("bundles").join(format!("{name}.kdtr")))?;
    let engine = Engine::open(
        &bundle,
        device.clone(),
        EngineOptions { context: Some(CONTEXT), draft, budget, ..Default::default() },
    )?;
    Ok((bundle, engine))
}

/// Decodes the first `count` tokens of a golden and compares them.
fn decode(engine: &mut Engine, i: usize, golden: &Golden, count: usize) -> Result<Decoded, Failed> {
    let request = Request { prompt: golden.prompt.clone(), max_new: count, stop_ids: vec![], golden: Some(golden) };
    let decoded = engine.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    equal(&format!("golden {i}"), &decoded.ids, &golden.tokens[..count])?;
    Ok(decoded)
}

fn tiny(device: &Device, name: &str, draft: Draft, budget: usize) -> Outcome {
    let (bundle, mut engine) = open(device, name, draft, budget)?;
    let (mut longest, mut shortest) = (0, usize::MAX);
    let all = device.is_cuda() || draft == Draft::None || budget == WHOLE_ON_CPU;
    for (i, golden) in bundle.goldens().iter().enumerate().filter(|(i, _)| all || ENDS.contains(i)) {
        let decoded = decode(&mut engine, i, golden, golden.tokens.len())?;
        let tolerance = bundle.settings().gap_tolerance;
        let apart = |(a, b): (&f32, &f32)| (a - b).abs() > tolerance;
        if let Some(at) = decoded.gaps.iter().zip(&golden.gap).position(apart) {
            let (found, expected) = (decoded.gaps[at], golden.gap[at]);
            return Err(format!("golden {i}, token {at}: gap {found}, expected {expected} within {tolerance}").into());
        }
        let (rounds, tokens) = (decoded.rounds.len(), golden.tokens.len());
        for round in &decoded.rounds {
            (longest, shortest) = (longest.max(round.accepted), shortest.min(round.accepted));
        }
        if budget == 0 {
            check(rounds == tokens - 1, || format!("golden {i}: {rounds} plain rounds for {tokens} tokens"))?;
        } else if budget >= 16 {
            check(rounds * 2 < tokens, || {
                format!("golden {i}: {rounds} rounds of {budget} nodes for {tokens} tokens")
            })?;
        }
    }
    let depth = bundle.goldens()[0].draft.as_ref().map_or(0, |m| m.depth);
    let whole = budget == *BUDGETS.last().unwrap_or(&0);
    let expected = if whole { depth } else { longest };
    check(longest == expected && shortest < depth, || format!("rounds accept {shortest} to {longest} of {depth}"))
}

/// The first tokens of the first golden with every access checked.
fn checked(name: &str) -> Outcome {
    let (bundle, mut engine) = open(&Device::cpu(Mode::Checked { seed: 3 }), name, Draft::Recorded, 7)?;
    decode(&mut engine, 0, &bundle.goldens()[0], CHECKED_TOKENS).map(|_| ())
}

fn small(device: &Device, draft: Draft, budget: usize) -> Outcome {
    let (bundle, mut engine) = open(device, SMALL, draft, budget)?;
    let (mut rounds, mut committed) = (0, 0);
    let count = if device.is_cuda() { bundle.goldens().len() } else { SMALL_ON_CPU };
    for (i, golden) in bundle.goldens().iter().enumerate().take(count) {
        let decoded = decode(&mut engine, i, golden, golden.tokens.len())?;
        rounds += decoded.rounds.len();
        committed += decoded.rounds.iter().map(|r| r.accepted + 1).sum::<usize>();
    }
    if draft == Draft::None || count < bundle.goldens().len() {
        return Ok(());
    }
    let expected = bundle.settings().expected_acceptance.as_ref().and_then(|e| e.get(&budget.to_string()));
    let expected = *expected.ok_or_else(|| format!("the bundle states no acceptance for budget {budget}"))?;
    let found = committed as f64 / rounds as f64;
    check((found / expected - 1.0).abs() <= ACCEPTANCE_WITHIN, || {
        format!("{found:.3} tokens a round, expected {expected:.3} within {ACCEPTANCE_WITHIN}")
    })
}
