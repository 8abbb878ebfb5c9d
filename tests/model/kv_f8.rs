//! Decoding over an f8 cache: trees give the tokens of plain decoding over such a cache, up to a near-tie.

use std::ops::ControlFlow;

use kdtree::device::{Device, Mode};
use kdtree::engine::{Draft, Engine, EngineOptions, KvFormat, Outcome as Decoded, Request};
use kdtree::weights::{Bundle, Golden};
use libtest_mimic::Failed;

use super::support::{Outcome, Suite, check, equal, root};

const TINY: &str = "k26-tiny-int4";
const SMALL: &str = "k26-small-int4";
const CONTEXT: usize = 256;
const TOKENS: usize = 40;
const CHECKED_TOKENS: usize = 8;
/// Of the tokens of a golden, which are those of a bf16 cache, so many at least come out, on average over the goldens.
const EQUAL_SHARE: f64 = 0.3;
/// Goldens that are decoded; of the larger model on the CPU device fewer.
const GOLDENS: usize = 4;
const SMALL_ON_CPU: usize = 2;

pub fn cases(suite: &mut Suite) {
    suite.model(format!("kv_f8::{TINY}::recorded"), |d| trees(d, TINY, Draft::Recorded, &[1, 7, 16, 64]));
    suite.model(format!("kv_f8::{SMALL}::dflash::16"), |d| trees(d, SMALL, Draft::Dflash, &[16]));
    suite.cuda(format!("kv_f8::{SMALL}::dflash::64"), |d| trees(d, SMALL, Draft::Dflash, &[64]));
    suite.model("kv_f8::tokens_of_a_bf16_cache", against_bf16);
    suite.cpu("kv_f8::checked", |_| {
        let device = Device::cpu(Mode::Checked { seed: 5 });
        let (bundle, mut engine) = open(&device, TINY, Draft::Recorded, 7)?;
        decode(&mut engine, &bundle.goldens()[0], CHECKED_TOKENS).map(|_| ())
    });
}

fn open(device: &Device, name: &str, draft: Draft, budget: usize) -> Result<(Bundle, Engine), Failed> {
    let bundle = Bundle::open(&root().join("bundles").join(format!("{name}.kdtr")))?;
    let options = EngineOptions { kv: KvFormat::F8, context: Some(CONTEXT), draft, budget, ..Default::default() };
    let engine = Engine::open(&bundle, device.clone(), options)?;
    Ok((bundle, engine))
}

fn decode(engine: &mut Engine, golden: &Golden, count: usize) -> Result<Decoded, Failed> {
    let request = Request { prompt: golden.prompt.clone(), max_new: count, stop_ids: vec![], golden: Some(golden) };
    Ok(engine.generate(&request, &mut |_| ControlFlow::Continue(()))?)
}

/// Tokens before the first in which they differ.
fn equal_tokens(a: &[i32], b: &[i32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The first goldens of bundle `name`.
fn goldens<'a>(device: &Device, name: &str, bundle: &'a Bundle) -> &'a [Golden] {
    let count = if device.is_cuda() || name != SMALL { GOLDENS } else { SMALL_ON_CPU };
    &bundle.goldens()[..count.min(bundle.goldens().len())]
}

fn trees(device: &Device, name: &str, draft: Draft, budgets: &[usize]) -> Outcome {
    let (bundle, mut plain) = open(device, name, Draft::None, 0)?;
    let goldens = goldens(device, name, &bundle);
    let plain = |golden: &Golden| decode(&mut plain, golden, TOKENS.min(golden.tokens.len()));
    let plain = goldens.iter().map(plain).collect::<Result<Vec<_>, _>>()?;
    budgets.iter().try_for_each(|&budget| as_plain(device, name, draft, budget, goldens, &plain))
}

/// Trees of a budget give the tokens of plain decoding, in fewer rounds.
fn as_plain(
    device: &Device,
    name: &str,
    draft: Draft,
    budget: usize,
    goldens: &[Golden],
    plain: &[Decoded],
) -> Outcome {
    let (bundle, mut trees) = open(device, name, draft, budget)?;
    let tolerance = bundle.settings().gap_tolerance;
    let (mut rounds, mut tokens, mut whole) = (0, 0, 0);
    for (i, (golden, want)) in goldens.iter().zip(plain).enumerate() {
        let count = want.ids.len();
        let found = decode(&mut trees, golden, count)?;
        equal("tokens", &[found.ids.len()], &[count])?;
        let at = equal_tokens(&found.ids, &want.ids);
        if at == count {
            whole += 1;
        } else {
            let gap = found.gaps[at] + want.gaps[at];
            check(gap <= tolerance, || {
                format!("budget {budget}, golden {i}, token {at}: other tokens, {gap} apart, within {tolerance}")
            })?;
        }
        rounds += found.rounds.len();
        tokens += count;
    }
    check(whole > 0, || "every golden has a near-tie".into())?;
    check(budget < 7 || rounds * 3 < tokens * 2, || format!("{rounds} rounds of {budget} nodes for {tokens} tokens"))
}

/// The rounding of the cache is seen in the gaps, and costs few tokens.
fn against_bf16(device: &Device) -> Outcome {
    let (bundle, mut engine) = open(device, TINY, Draft::Recorded, 16)?;
    let (mut equal, mut tokens, mut moved) = (0, 0, 0f32);
    for golden in bundle.goldens() {
        let found = decode(&mut engine, golden, golden.tokens.len())?;
        let at = equal_tokens(&found.ids, &golden.tokens);
        moved = found.gaps[..at].iter().zip(&golden.gap).fold(moved, |m, (a, b)| m.max((a - b).abs()));
        (equal, tokens) = (equal + at, tokens + golden.tokens.len());
    }
    println!("{equal} of {tokens} tokens before the first other one; gaps moved by up to {moved}");
    check(moved > bundle.settings().gap_tolerance, || format!("gaps moved by {moved}: is the cache f8?"))?;
    check(equal as f64 >= EQUAL_SHARE * tokens as f64, || format!("{equal} of {tokens} tokens are those of bf16"))
}
