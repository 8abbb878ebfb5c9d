//! `kdtree inspect`: what a bundle holds, and whether it is what it says.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{formats, open, some};
use crate::cli::args::Inspect;
use crate::cli::failure::Result;
use crate::cli::output::{self, Bytes, Count};
use crate::linear::Format;
use crate::text::Tokenizer;
use crate::weights::{Bundle, DrafterConfig, Golden, ModelConfig, RopeScaling, Verify, shortest};

pub fn run(args: &Inspect) -> Result<()> {
    let bundle = open(&args.bundle, Verify::WhenSmall, args.layers)?;
    let tokenizer = Tokenizer::of(&bundle)?;
    if args.json {
        output::json(&document(&bundle, tokenizer.as_ref()))
    } else {
        output::put(text(&bundle, tokenizer.as_ref()))
    }
}

fn hashes(bundle: &Bundle) -> &'static str {
    match (bundle.folder(), bundle.checked()) {
        (Some(_), _) => "none",
        (None, true) => "checked",
        (None, false) => "not checked",
    }
}

fn document(bundle: &Bundle, tokenizer: Option<&Tokenizer>) -> Value {
    let goldens = bundle.goldens().iter().map(|g| {
        let draft = g.draft.as_ref().map(|d| json!({ "positions": d.positions, "depth": d.depth, "width": d.width }));
        let gap = shortest(smallest(g));
        json!({ "prompt": g.prompt.len(), "tokens": g.tokens.len(), "smallest_gap": gap, "draft": draft })
    });
    json!({
        "file": bundle.path().display().to_string(),
        "bytes": bundle.file_bytes(),
        "parameters": parameters(bundle, false),
        "settings": bundle.settings(),
        "config": bundle.config(),
        "formats": formats(bundle, false),
        "drafter": bundle.drafter().map(|config| {
            json!({ "parameters": parameters(bundle, true), "config": config, "formats": formats(bundle, true) })
        }),
        "tokenizer": some(tokenizer.map(|t| json!({ "vocab_size": t.vocab_size(), "special_tokens": t.specials() }))),
        "goldens": goldens.collect::<Vec<_>>(),
        "folder": bundle.folder(),
        "manifest": {
            "verdict": "ok",
            "weights": bundle.manifest().len(),
            "tensors": bundle.tensor_count(),
            "hashes": hashes(bundle),
        },
    })
}

fn parameters(bundle: &Bundle, drafter: bool) -> usize {
    bundle.formats(drafter).values().map(|share| share.parameters).sum()
}

fn smallest(golden: &Golden) -> f32 {
    golden.gap.iter().copied().fold(f32::INFINITY, f32::min)
}

/// Two columns: what, and how much of it.
#[derive(Default)]
struct Sheet(String);

impl Sheet {
    fn row(&mut self, what: &str, value: impl std::fmt::Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{what:<11} {value}");
    }
}

fn text(bundle: &Bundle, tokenizer: Option<&Tokenizer>) -> String {
    let (c, mut sheet) = (bundle.config(), Sheet::default());
    sheet.row("bundle", format_args!("{}, {}", bundle.path().display(), Bytes(bundle.file_bytes())));
    let count = Count(parameters(bundle, false) as u64);
    sheet.row("model", format_args!("{}, {}, {count} parameters", bundle.settings().name, c.model_type));
    model(&mut sheet, c);
    match bundle.drafter() {
        Some(d) => drafter(&mut sheet, d, parameters(bundle, true)),
        None => sheet.row("drafter", "none"),
    }
    match tokenizer {
        Some(t) => {
            sheet.row("tokenizer", format_args!("tiktoken, {} tokens, {} special", t.vocab_size(), t.specials().len()));
        }
        None => sheet.row("tokenizer", "none: token ids only"),
    }
    goldens(&mut sheet, bundle.goldens());
    if let Some(folder) = bundle.folder() {
        let (shards, tensors, bytes) = (folder.shards, folder.tensors, Bytes(folder.payload_bytes));
        sheet.row("folder", format_args!("{shards} shards, {tensors} tensors, {bytes}"));
        if folder.skipped_tensors > 0 {
            let skipped = folder.skipped_tensors;
            sheet.row("", format_args!("{skipped} for images not used, {}", Bytes(folder.skipped_bytes)));
        }
        if folder.left_out > 0 {
            sheet.row("", format_args!("{} of layers not asked for", folder.left_out));
        }
    }
    let _ = writeln!(sheet.0);
    table(&mut sheet, bundle);
    let _ = writeln!(sheet.0);
    let (weights, tensors) = (bundle.manifest().len(), bundle.tensor_count());
    let hint = if bundle.checked() { "" } else { ": `kdtree verify` reads the content" };
    sheet.row("manifest", format_args!("ok: {weights} weights in {tensors} tensors, hashes {}{hint}", hashes(bundle)));
    sheet.0
}

fn model(sheet: &mut Sheet, c: &ModelConfig) {
    let (layers, dense) = (c.num_hidden_layers, c.first_k_dense_replace);
    sheet
        .row("layers", format_args!("{layers} ({dense} dense), hidden {}, vocabulary {}", c.hidden_size, c.vocab_size));
    sheet.row(
        "attention",
        format_args!(
            "{} heads of {} + {} (rotated), values {}, latent {}, query rank {}",
            c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank, c.q_lora_rank
        ),
    );
    sheet.row(
        "experts",
        format_args!(
            "{} of width {}, {} a token, {} shared; dense width {}",
            c.n_routed_experts, c.moe_intermediate_size, c.num_experts_per_tok, c.n_shared_experts, c.intermediate_size
        ),
    );
    sheet.row("context", format_args!("{}{}", c.max_position_embeddings, yarn(c.rope_scaling.as_ref())));
}

fn yarn(scaling: Option<&RopeScaling>) -> String {
    scaling.map_or_else(String::new, |s| format!(" (YaRN x{} from {})", s.factor, s.original_max_position_embeddings))
}

fn drafter(sheet: &mut Sheet, d: &DrafterConfig, parameters: usize) {
    let taps: Vec<String> = d.dflash_config.target_layer_ids.iter().map(usize::to_string).collect();
    let count = Count(parameters as u64);
    sheet.row(
        "drafter",
        format_args!(
            "DFlash, {count} parameters, {} layers, block {}, after target layers {}",
            d.num_hidden_layers,
            d.block_size,
            taps.join(", ")
        ),
    );
}

fn goldens(sheet: &mut Sheet, goldens: &[Golden]) {
    if goldens.is_empty() {
        return sheet.row("goldens", "none");
    }
    for (i, g) in goldens.iter().enumerate() {
        let draft = g.draft.as_ref().map_or(String::new(), |d| format!(", drafts {} deep, {} wide", d.depth, d.width));
        let what = if i == 0 { "goldens" } else { "" };
        let (prompt, tokens, gap) = (g.prompt.len(), g.tokens.len(), smallest(g));
        sheet.row(what, format_args!("{i}: prompt of {prompt}, {tokens} tokens, smallest gap {gap:.3}{draft}"));
    }
}

fn table(sheet: &mut Sheet, bundle: &Bundle) {
    let _ = writeln!(sheet.0, "{:<11} {:>6} {:>8} {:>11} {:>9}", "format", "group", "weights", "parameters", "bytes");
    for drafter in [false, true] {
        for (format, share) in bundle.formats(drafter) {
            let group = match format {
                Format::W4a16 { group } => group.to_string(),
                _ => String::new(),
            };
            let owner = if drafter { "  drafter" } else { "" };
            let _ = writeln!(
                sheet.0,
                "{:<11} {group:>6} {:>8} {:>11} {:>9}{owner}",
                format.to_string(),
                share.weights,
                Count(share.parameters as u64),
                Bytes(share.bytes as u64)
            );
        }
    }
}
