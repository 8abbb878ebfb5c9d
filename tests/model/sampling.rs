//! Drawn tokens: the same for a seed with and without a tree, up to a near-tie; greedy at the lowest temperature.

use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Draft, Engine, EngineOptions, Outcome as Decoded, Request, Sampling};
use kdtree::weights::Bundle;
use libtest_mimic::Failed;

use super::support::{Outcome, Suite, check, equal, root};

const CONTEXT: usize = 160;

pub fn cases(suite: &mut Suite) {
    let filtered = Sampling { top_k: 40, top_p: 0.95, min_p: 0.01, ..Sampling::all(0.8, 7) };
    suite.model("sampling::tiny", move |d| {
        let seeds = if d.is_cuda() { 20 } else { 2 };
        // Its logits lie far apart.
        tree_and_plain(d, "k26-tiny-int4", Draft::Recorded, 16, 24, Sampling { temperature: 2.0, ..filtered }, seeds)
    });
    suite.model("sampling::small", move |d| {
        let (tokens, seeds) = if d.is_cuda() { (100, 20) } else { (12, 1) };
        tree_and_plain(d, "k26-small-int4", Draft::Dflash, 8, tokens, filtered, seeds)
    });
    suite.cuda("sampling::small, no filters", |d| {
        tree_and_plain(d, "k26-small-int4", Draft::Dflash, 64, 100, Sampling::all(0.6, 900), 20)
    });
    suite.model("sampling::cold", cold);
}

fn open(device: &Device, bundle: &Bundle, draft: Draft, budget: usize, s: Sampling) -> Result<Engine, Failed> {
    let options =
        EngineOptions { context: Some(CONTEXT), draft, budget, sampling: Some(s), ..EngineOptions::default() };
    Ok(Engine::open(bundle, device.clone(), options)?)
}

fn decode(engine: &mut Engine, bundle: &Bundle, count: usize) -> Result<Decoded, Failed> {
    let golden = &bundle.goldens()[0];
    let prompt = golden.prompt[..golden.prompt.len().min(CONTEXT - count)].to_vec();
    let request = Request { prompt, max_new: count, stop_ids: vec![], golden: Some(golden) };
    Ok(engine.generate(&request, &mut |_| ControlFlow::Continue(()))?)
}

/// For each of `seeds` seeds: the tree's tokens are the plain ones up to the first that another order of sums in
/// attention can decide. At least one seed must draw otherwise than the first, and some drafts must be accepted.
fn tree_and_plain(
    device: &Device,
    name: &str,
    draft: Draft,
    budget: usize,
    count: usize,
    sampling: Sampling,
    seeds: u64,
) -> Outcome {
    let bundle = Bundle::open(&root().join("bundles").join(format!("{name}.kdtr")))?;
    let (mut rounds, mut tokens, mut different) = (0, 0, false);
    let mut first = Vec::new();
    for seed in sampling.seed..sampling.seed + seeds {
        let sampling = Sampling { seed, ..sampling };
        let plain = decode(&mut open(device, &bundle, Draft::None, 0, sampling)?, &bundle, count)?;
        let tree = decode(&mut open(device, &bundle, draft, budget, sampling)?, &bundle, count)?;
        equal("counts", &[plain.ids.len(), tree.ids.len()], &[count; 2])?;
        if let Some(at) = plain.ids.iter().zip(&tree.ids).position(|(a, b)| a != b) {
            // The lead of the token drawn, in logits.
            let lead = plain.gaps[at].min(tree.gaps[at]) * sampling.temperature;
            let tolerance = bundle.settings().tolerance(0);
            check(lead <= tolerance, || {
                let (a, b) = (plain.ids[at], tree.ids[at]);
                format!("seed {seed}, token {at}: {a} alone, {b} from the tree; the lead is {lead}, no near-tie")
            })?;
        }
        different |= !first.is_empty() && first != plain.ids;
        first = plain.ids;
        rounds += tree.rounds.len();
        tokens += tree.rounds.iter().map(|r| r.accepted + 1).sum::<usize>();
    }
    check(different || seeds == 1, || "all seeds draw the same".into())?;
    check(draft == Draft::Recorded || tokens > rounds, || {
        format!("{tokens} tokens in {rounds} rounds: no draft accepted")
    })
}

fn cold(device: &Device) -> Outcome {
    let bundle = Bundle::open(&root().join("bundles/k26-tiny-int4.kdtr"))?;
    let sampling = Sampling::all(Sampling::LEAST_TEMPERATURE, 5);
    let mut engine = open(device, &bundle, Draft::Recorded, 7, sampling)?;
    equal("tokens", &decode(&mut engine, &bundle, 32)?.ids, &bundle.goldens()[0].tokens[..32])
}
