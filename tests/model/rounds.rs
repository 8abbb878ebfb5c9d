//! What a round leaves behind and what it may read: rejected rows that turn to NaN, graphs against single launches, and
//! trees beside plain chains of drafts.

use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Draft, Engine, EngineOptions, Growth, Outcome as Decoded, Request};
use kdtree::kernels::KvFormat;
use kdtree::weights::Bundle;
use libtest_mimic::Failed;

use super::support::{Outcome, Suite, check, equal, root};

const TINY: &str = "k26-tiny-int4";
const SMALL: &str = "k26-small-int4";

pub fn cases(suite: &mut Suite) {
    suite.model("rounds::poisoned::tiny", |d| poisoned(d, TINY, Draft::Recorded, 16, 24));
    suite.model("rounds::poisoned::f8", |d| {
        let options = EngineOptions { kv: KvFormat::F8, draft: Draft::Recorded, budget: 16, ..Default::default() };
        poisoned_as(d, TINY, options, 24)
    });
    suite.model("rounds::poisoned::small", |d| {
        poisoned(d, SMALL, Draft::Dflash, 16, if d.is_cuda() { 120 } else { 10 })
    });
    suite.cuda("rounds::poisoned::1024 nodes", |d| poisoned(d, SMALL, Draft::Dflash, 1024, 60));
    for count in [1, 64] {
        suite.model(format!("rounds::eager_and_replayed::{count}"), move |d| {
            eager_and_replayed(d, TINY, Draft::Recorded, 16, count)
        });
    }
    suite.cuda("rounds::eager_and_replayed::1000", |d| eager_and_replayed(d, SMALL, Draft::Dflash, 64, 1000));
    suite.model("rounds::spine_and_floor", spine_and_floor);
    suite.model("rounds::beyond_the_largest_budget", beyond);
}

fn decode(device: &Device, bundle: &Bundle, count: usize, options: EngineOptions) -> Result<Decoded, Failed> {
    let golden = &bundle.goldens()[0];
    let context = Some(golden.prompt.len() + count);
    let mut engine = Engine::open(bundle, device.clone(), EngineOptions { context, ..options })?;
    let request = Request { prompt: golden.prompt.clone(), max_new: count, stop_ids: vec![], golden: Some(golden) };
    Ok(engine.generate(&request, &mut |_| ControlFlow::Continue(()))?)
}

fn open(name: &str) -> Result<Bundle, Failed> {
    Ok(Bundle::open(&root().join("bundles").join(format!("{name}.kdtr")))?)
}

/// Tokens, gaps and rounds are the same to the bit.
fn alike(a: &Decoded, b: &Decoded) -> Outcome {
    equal("tokens", &a.ids, &b.ids)?;
    let bits = |d: &Decoded| d.gaps.iter().map(|gap| gap.to_bits()).collect::<Vec<_>>();
    equal("gaps", &bits(a), &bits(b))?;
    let rounds = |d: &Decoded| d.rounds.iter().map(|r| (r.nodes, r.accepted)).collect::<Vec<_>>();
    equal("rounds", &rounds(a), &rounds(b))
}

/// No round reads what the one before has left behind the committed rows.
fn poisoned(device: &Device, name: &str, draft: Draft, budget: usize, count: usize) -> Outcome {
    poisoned_as(device, name, EngineOptions { draft, budget, ..EngineOptions::default() }, count)
}

fn poisoned_as(device: &Device, name: &str, options: EngineOptions, count: usize) -> Outcome {
    let bundle = open(name)?;
    let poisoned = decode(device, &bundle, count, EngineOptions { poison: true, ..options })?;
    let rejected = poisoned.rounds.iter().any(|round| round.accepted < round.nodes);
    check(rejected, || "no round rejects a row".into())?;
    alike(&poisoned, &decode(device, &bundle, count, options)?)
}

/// Graphs captured once, with a state that changes each round, do what single launches do.
fn eager_and_replayed(device: &Device, name: &str, draft: Draft, budget: usize, count: usize) -> Outcome {
    let bundle = open(name)?;
    let options = EngineOptions { draft, budget, ..EngineOptions::default() };
    let eager = decode(device, &bundle, count, EngineOptions { eager: true, ..options })?;
    alike(&decode(device, &bundle, count, options)?, &eager)
}

/// Trees with the chain first and trees without unlikely nodes: other trees, the same text.
fn spine_and_floor(device: &Device) -> Outcome {
    let bundle = open(TINY)?;
    let golden = &bundle.goldens()[0];
    let count = 40;
    let options = EngineOptions { draft: Draft::Recorded, budget: 12, ..EngineOptions::default() };
    let best = decode(device, &bundle, count, options)?;
    let growth = |floor, spine| EngineOptions { growth: Growth { floor, spine }, ..options };
    let spine = decode(device, &bundle, count, growth(f32::NEG_INFINITY, true))?;
    let floor = decode(device, &bundle, count, growth(-2.0, false))?;
    for decoded in [&best, &spine, &floor] {
        equal("tokens", &decoded.ids, &golden.tokens[..count])?;
    }
    let nodes = |d: &Decoded| d.rounds.iter().map(|r| r.nodes).max();
    check(nodes(&floor) < nodes(&best), || {
        format!("{:?} nodes with a floor, {:?} without", nodes(&floor), nodes(&best))
    })
}

/// A budget that no tree can have is refused before anything is loaded onto the device.
fn beyond(device: &Device) -> Outcome {
    let bundle = open(TINY)?;
    let options = EngineOptions { draft: Draft::Recorded, budget: 1025, ..EngineOptions::default() };
    let error = decode(device, &bundle, 4, options).err().and_then(|e| e.message().map(str::to_owned));
    let error = error.unwrap_or_default();
    check(error.contains("at most 1024"), || format!("expected a refusal, found `{error}`"))
}
