//! Prompts of more rows than a chunk, and of as many: the engine's chunks, by the kernels of prompts, against small
//! ones by the kernels whose bits are those of few rows.

use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Engine, EngineOptions, Request, StopReason, states};
use kdtree::kernels::{self, KvFormat};
use kdtree::model::{CHUNK, Model, Pass, Rows};
use kdtree::weights::Bundle;
use libtest_mimic::Failed;

use super::support::bundle::shipped;
use super::support::{Outcome, Suite, check, close, equal};

/// Rows that are streamed, whatever the pass.
const SMALL: usize = 64;
/// Logits against logits: what other sums come to before two roundings to bf16 in these small models; with f32 weights
/// only the cache rounds.
const LIMIT: f64 = 1e-2;
const LIMIT_F32: f64 = 1e-3;
/// So many other tokens in a prompt's middle make more.
const CHANGED: usize = 256;

pub fn cases(suite: &mut Suite) {
    // Without roundings: what is added up, not by which kernel.
    suite.model("chunks::k26-tiny-f32::512", |d| same(d, "k26-tiny-f32", CHUNK, LIMIT_F32));
    suite.cuda("chunks::k26-tiny-f32::511", |d| same(d, "k26-tiny-f32", CHUNK - 1, LIMIT_F32));
    suite.cuda("chunks::k26-tiny-f32::1100", |d| same(d, "k26-tiny-f32", 2 * CHUNK + 76, LIMIT_F32));
    suite.cuda("chunks::k26-tiny-f32::differ", |d| differ(d, "k26-tiny-f32", CHUNK + 1, 1, LIMIT_F32));
    suite.model("chunks::one_more", |d| same(d, "k26-tiny-int4", CHUNK + 1, LIMIT));
    for name in ["k26-tiny-bf16", "k26-tiny-int4"] {
        for length in [97, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 76] {
            suite.cuda(format!("chunks::{name}::{length}"), move |d| same(d, name, length, LIMIT));
        }
        suite.cuda(format!("chunks::{name}::engine"), move |d| first_token(d, name, CHUNK + 1));
        suite.cuda(format!("chunks::{name}::differ"), move |d| differ(d, name, CHUNK + 1, CHANGED, LIMIT));
    }
    suite.model("chunks::stops_inside", stops_inside);
}

/// Any tokens.
fn prompt(bundle: &Bundle, length: usize) -> Vec<i32> {
    let vocab = bundle.config().vocab_size;
    (0..length).map(|i| ((i * i + 7 * i + 3) % vocab) as i32).collect()
}

/// The logits behind a prompt that goes through the model as trees that are chains, a few rows at a time.
fn few_rows(device: &Device, bundle: &Bundle, ids: &[i32]) -> Result<Vec<f64>, Failed> {
    let model = Model::load(device, bundle, ids.len(), 1, KvFormat::Bf16)?;
    let out = device.zeros::<f32>(bundle.config().vocab_size)?;
    let mut committed = 0;
    for chunk in ids.chunks(SMALL) {
        let (rows, words) = (chunk.len(), chunk.len().div_ceil(32));
        let state = device.upload(&kernels::initial_state(committed as u32, 0, 0))?;
        let (ids_of, depths) = (device.upload(chunk)?, device.upload(&(0..rows as u32).collect::<Vec<_>>())?);
        let sees = |row: usize, word: usize| (0..32).map(|i| u32::from(word * 32 + i <= row) << i).sum::<u32>();
        let ancestors = device.upload(&(0..rows * words).map(|i| sees(i / words, i % words)).collect::<Vec<_>>())?;
        let (ids_of, depths, ancestors) = (ids_of.view(), depths.view(), ancestors.view());
        let chain = Rows { ids: ids_of, depths, ancestors, rows, pass: Pass::Verify };
        committed += rows;
        let first_logit = if committed == ids.len() { rows - 1 } else { rows };
        model.forward(device, state.view_mut(), chain, None, first_logit, out.view_mut())?;
        device.synchronize()?;
    }
    Ok(out.read()?.into_iter().map(f64::from).collect())
}

/// The same in the engine's chunks.
fn prefilled(device: &Device, bundle: &Bundle, ids: &[i32]) -> Result<Vec<f32>, Failed> {
    let all = states(bundle, device, ids, 0)?.logits;
    Ok(all[all.len() - bundle.config().vocab_size..].to_vec())
}

fn engine(device: &Device, bundle: &Bundle, context: usize) -> Result<Engine, Failed> {
    let options = EngineOptions { context: Some(context), ..Default::default() };
    Ok(Engine::open(bundle, device.clone(), options)?)
}

/// One prompt by both kinds of chunks.
fn same(device: &Device, name: &str, length: usize, limit: f64) -> Outcome {
    let bundle = Bundle::open(&shipped(name))?;
    let ids = prompt(&bundle, length);
    close("logits", &prefilled(device, &bundle, &ids)?, &few_rows(device, &bundle, &ids)?, limit)
}

/// The limit is small enough to tell prompts apart.
fn differ(device: &Device, name: &str, length: usize, changed: usize, limit: f64) -> Outcome {
    let bundle = Bundle::open(&shipped(name))?;
    let mut ids = prompt(&bundle, length);
    let want = few_rows(device, &bundle, &ids)?;
    ids[length / 3..][..changed].iter_mut().for_each(|id| *id ^= 1);
    let apart = close("logits", &prefilled(device, &bundle, &ids)?, &want, limit).is_err();
    check(apart, || format!("a prompt with {changed} other tokens in its middle has these logits too"))
}

/// The engine's first token is the best of these logits.
fn first_token(device: &Device, name: &str, length: usize) -> Outcome {
    let bundle = Bundle::open(&shipped(name))?;
    let ids = prompt(&bundle, length);
    let logits = prefilled(device, &bundle, &ids)?;
    let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).map(|id| id as i32);
    let request = Request { prompt: ids, max_new: 1, stop_ids: vec![], golden: None };
    let decoded = engine(device, &bundle, length + 1)?.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    equal("token", &decoded.ids, best.as_slice())
}

/// Who ends the output inside a chunk gets nothing, and the next prompt is not disturbed.
fn stops_inside(device: &Device) -> Outcome {
    let bundle = Bundle::open(&shipped("k26-tiny-int4"))?;
    let golden = &bundle.goldens()[0];
    let mut engine = engine(device, &bundle, CHUNK)?;
    let request = |prompt: &[i32]| Request { prompt: prompt.to_vec(), max_new: 4, stop_ids: vec![], golden: None };
    let mut asked = 0;
    // Before the only chunk, and behind its first layer.
    let stopped = engine.generate(&request(&prompt(&bundle, SMALL)), &mut |step| {
        asked += usize::from(step.ids.is_empty());
        if asked == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    check(stopped.ids.is_empty() && stopped.stop == StopReason::Stopped, || format!("{:?}", stopped.ids))?;
    equal("runs", &[asked], &[2])?;
    let decoded = engine.generate(&request(&golden.prompt), &mut |_| ControlFlow::Continue(()))?;
    equal("the golden", &decoded.ids, &golden.tokens[..4])
}
