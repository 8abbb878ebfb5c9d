//! `decode --plan`: memory by purpose and the least that a token and a round must read, from metadata alone.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::cli::args::{Decode, DraftArg};
use crate::cli::commands::formats;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes, Count};
use crate::plan::{Floor, OnDevice, Plan, Request};
use crate::weights::Bundle;

/// Prints the plan.
pub fn run(args: &Decode, bundle: &Bundle, default_budget: usize) -> Result<()> {
    let most = bundle.config().max_position_embeddings;
    if let Some(context) = args.context.filter(|&c| c == 0 || c > most) {
        return Err(Failure::usage(format!("--context {context}: the model has 1 to {most}")));
    }
    let drafts = bundle.drafter().is_some() && args.draft != Some(DraftArg::None);
    let budget = if drafts { args.budget.map_or(default_budget, |b| b as usize) } else { 0 };
    let gpus = args.plan_gpus.clone().map_or_else(Vec::new, |list| list.0);
    let plan = Plan::new(bundle, &Request { context: args.context.unwrap_or(most), kv: args.kv, budget, gpus });
    if args.json { output::json(&document(bundle, &plan)) } else { output::put(text(bundle, &plan)) }
}

fn document(bundle: &Bundle, plan: &Plan) -> Value {
    let mut document = json!(plan);
    document["file"] = json!(bundle.path().display().to_string());
    document["name"] = json!(bundle.settings().name);
    document["formats"] = json!(formats(bundle, false));
    document["drafter_formats"] = json!(formats(bundle, true));
    document["token"]["bytes"] = json!(plan.token.weights.total().round() as u64);
    if let Some(round) = &plan.round {
        document["round"]["bytes"] = json!(round.weights.total().round() as u64);
    }
    document
}

fn text(bundle: &Bundle, plan: &Plan) -> String {
    let mut out = String::new();
    let mut row = |what: &str, bytes: u64, more: String| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "{what:<22} {:>9}  {more}", Bytes(bytes).to_string());
    };
    let name = &bundle.settings().name;
    row(name, plan.payload_bytes, format!("in {} tensors", plan.tensors));
    let (all, active) = (Count(plan.parameters), Count(plan.active_parameters));
    row("weights used", plan.weight_bytes, format!("{all} parameters, {active} a token"));
    for (role, part) in &plan.parts {
        row(&format!("  {}", role.name()), part.bytes, format!("{} weights", part.weights));
    }
    for (format, share) in formats(bundle, false) {
        row(&format!("  in {format}"), share.bytes as u64, format!("{} weights", share.weights));
    }
    let each = Bytes(plan.cache_bytes_a_token);
    row("cache", plan.cache_bytes, format!("{} tokens in {}, {each} each", plan.context, plan.kv));
    if plan.drafter_cache_bytes > 0 {
        row("drafter's cache", plan.drafter_cache_bytes, String::new());
    }
    row("scratch", plan.scratch_bytes, "a device".into());
    row("reserve", plan.reserve_bytes, "a device: driver, kernels, graphs".into());
    let _ = writeln!(out, "\nread at least");
    floor(&mut out, "a token", &plan.token);
    if let Some(round) = &plan.round {
        floor(&mut out, &format!("a round of {} nodes", plan.budget), round);
    }
    if !plan.devices.is_empty() {
        devices(&mut out, plan);
    }
    out
}

fn floor(out: &mut String, what: &str, floor: &Floor) {
    let (weights, cache) = (Bytes(floor.weights.total() as u64), Bytes(floor.cache.total() as u64));
    let _ = writeln!(
        out,
        "{what:<22} {:>9}  {:.1} experts a layer; up to {cache} of cache",
        weights.to_string(),
        floor.experts_a_layer
    );
}

/// Equal cards in one line.
fn devices(out: &mut String, plan: &Plan) {
    let head = ["GPUs", "weights", "cache", "total", "of", "token ms", "round ms"];
    let [gpus, weights, cache, total, of, token, round] = head;
    let _ = writeln!(out, "\n{gpus:<18} {weights:>9} {cache:>9} {total:>9} {of:>9}  {token:>15}  {round:>15}");
    for group in plan.devices.chunk_by(|a, b| a.gpu.name == b.gpu.name) {
        let OnDevice { gpu, weights, cache, total, free, fits, token_ms, round_ms, .. } = &group[0];
        let span = |ms: &[f64; 2]| format!("{:.2} to {:.2}", ms[0], ms[1]);
        let verdict = match fits {
            true => String::new(),
            false => format!("  does NOT fit: {} missing", Bytes(free.unsigned_abs())),
        };
        let bytes = [*weights, *cache, *total, gpu.memory].map(|b| Bytes(b).to_string());
        let [weights, cache, total, memory] = bytes;
        let name = format!("{}x{}", group.len(), gpu.name);
        let (token, round) = (span(token_ms), span(round_ms));
        let _ = writeln!(
            out,
            "{name:<18} {weights:>9} {cache:>9} {total:>9} {memory:>9}  {token:>15}  {round:>15}{verdict}"
        );
    }
    let _ = writeln!(out, "times: bytes over the nominal memory rate, the cache empty and full; nothing else counted");
}
