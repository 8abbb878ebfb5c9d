//! A checkpoint folder in the published form and its converted file decode to the numpy reference's tokens; a drafter
//! with sliding layers accepts what the numpy drafter does.

use std::ops::ControlFlow;
use std::path::Path;

use kdtree::device::Device;
use kdtree::engine::{Draft, Engine, EngineOptions, Outcome as Decoded, Request};
use kdtree::weights::{Bundle, Conversion, Golden, Verify};
use libtest_mimic::Failed;
use serde_json::json;

use super::support::bundle::{Parts, shipped};
use super::support::checkpoint::Checkpoint;
use super::support::{Outcome, Suite, check, equal};

const TINY: &str = "k26-tiny-int4";
const SMALL: &str = "k26-small-int4";
const CONTEXT: usize = 256;
/// Tokens of a golden that are decoded here; `goldens` decodes all of them from the bundles.
const TOKENS: usize = 24;
/// Tokens of the rounds of golden 0 with a budget of 16, where both layers of the drafter see 24 positions only:
/// `bundles/tests/test_trees.py` finds the same with the numpy drafter. Without a window they are 8, 7, 6, 8, …
const WINDOW: usize = 24;
const WINDOWED_ROUNDS: [usize; 12] = [2, 1, 2, 3, 1, 1, 1, 2, 1, 2, 1, 1];

pub fn cases(suite: &mut Suite) {
    suite.model("checkpoint::folder", folder);
    suite.model("checkpoint::converted", converted);
    suite.model("checkpoint::sliding_drafter", sliding);
}

fn decode(device: &Device, bundle: &Bundle, golden: &Golden, draft: Draft, budget: usize) -> Result<Decoded, Failed> {
    let options = EngineOptions { context: Some(CONTEXT), draft, budget, ..EngineOptions::default() };
    let mut engine = Engine::open(bundle, device.clone(), options)?;
    let request = Request { prompt: golden.prompt.clone(), max_new: TOKENS, stop_ids: vec![], golden: None };
    let decoded = engine.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    equal("tokens", &decoded.ids, &golden.tokens[..TOKENS])?;
    Ok(decoded)
}

/// Decodes golden 0 of the tiny bundle from the model at `path`.
fn tiny(device: &Device, path: &Path) -> Outcome {
    let reference = Bundle::open(&shipped(TINY))?;
    let golden = &reference.goldens()[0];
    // As large models are opened: content is looked at when it is loaded, and files are read ahead.
    let bundle = Bundle::open_with(path, Verify::Never)?;
    let decoded = decode(device, &bundle, golden, Draft::None, 0)?;
    let tolerance = reference.settings().gap_tolerance;
    let apart = decoded.gaps.iter().zip(&golden.gap).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    check(apart <= tolerance, || format!("gaps differ by {apart}, tolerance {tolerance}"))
}

fn folder(device: &Device) -> Outcome {
    for multi_modal in [true, false] {
        let root = tempfile::tempdir()?;
        tiny(device, &Checkpoint::of(TINY, multi_modal).write(root.path()))?;
    }
    Ok(())
}

fn converted(device: &Device) -> Outcome {
    let root = tempfile::tempdir()?;
    let bundle = Bundle::open(&Checkpoint::of(TINY, true).write(&root.path().join("folder")))?;
    let conversion = Conversion::new(&bundle, None)?;
    // A file, and a folder of shards.
    for (name, shard) in [("file.kdtr", None), ("folder.kdtr", Some(1 << 19))] {
        let out = root.path().join(name);
        let written = conversion.write(&out, shard, 1 << 20, &mut |_, _| {})?;
        check((written.shards > 1) == shard.is_some(), || format!("{} shards", written.shards))?;
        tiny(device, &out)?;
    }
    Ok(())
}

fn sliding(device: &Device) -> Outcome {
    let mut parts = Parts::of(SMALL);
    parts.set("drafter_config", "layer_types", json!(["sliding_attention", "sliding_attention"]));
    parts.set("drafter_config", "sliding_window", json!(WINDOW));
    let root = tempfile::tempdir()?;
    let bundle = Bundle::open(&parts.write(root.path(), "sliding.kdtr"))?;
    let decoded = decode(device, &bundle, &bundle.goldens()[0], Draft::Dflash, 16)?;
    let rounds: Vec<usize> = decoded.rounds.iter().map(|round| round.accepted + 1).collect();
    equal("tokens of the rounds", &rounds[..WINDOWED_ROUNDS.len()], &WINDOWED_ROUNDS)
}
