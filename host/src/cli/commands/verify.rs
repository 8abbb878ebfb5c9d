//! `kdtree verify`: everything that `open` checks, and the content of every tensor whatever the size of the file. Of
//! W4A16 weights the table shows the scales.

use serde_json::json;

use super::{open, progress::watching};
use crate::cli::args::Verify;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::text::Tokenizer;
use crate::weights::{self, Bundle, Table, WeightsError};

pub fn run(args: &Verify) -> Result<()> {
    let bundle = open(&args.bundle, weights::Verify::Never, args.layers)?;
    let (file, bytes) = (args.bundle.display(), Bytes(bundle.file_bytes()));
    output::note(format_args!("{file}: structure as declared; reading {bytes}"));
    let done = || bundle.verified_bytes();
    let hashed = watching("hashing files", bundle.file_bytes(), done, || bundle.verify_files());
    let hashed = hashed.map_err(hash_failure)?;
    let before = done();
    let table = watching("verifying", bundle.verify_bytes(), || done() - before, || bundle.verify());
    let table = table.map_err(hash_failure)?;
    let tokenizer = Tokenizer::of(&bundle)?;
    if let Some(tokenizer) = &tokenizer {
        check_texts(&bundle, tokenizer)?;
    }
    let hashes = match bundle.folder() {
        None => "of every tensor".to_string(),
        Some(folder) => format!("known of {hashed} of {} shards", folder.shards),
    };
    if args.json {
        let rows = table.iter().map(|((role, format), census)| {
            let mut row = json!(census);
            row["role"] = json!(role);
            row["format"] = json!(format.to_string());
            row
        });
        return output::json(&json!({
            "file": file.to_string(),
            "verdict": "ok",
            "weights": bundle.manifest().len(),
            "tensors": bundle.tensor_count(),
            "bytes": bundle.file_bytes(),
            "goldens": bundle.goldens().len(),
            "hashes": hashes,
            "table": rows.collect::<Vec<_>>(),
        }));
    }
    output::put(lines(&table))?;
    let (weights, tensors) = (bundle.manifest().len(), bundle.tensor_count());
    output::line(format_args!("{file}: ok, {weights} weights in {tensors} tensors, hashes {hashes}"))
}

fn hash_failure(error: WeightsError) -> Failure {
    match error {
        WeightsError::Hash { .. } | WeightsError::FileHash { .. } => Failure::Verification(error.to_string()),
        other => other.into(),
    }
}

/// A line for each role and format: how many weights, and how large their values, or scales, are.
fn lines(table: &Table) -> String {
    let head = ["role", "format", "weights", "bytes", "zeros", "smallest", "largest"];
    let row = |[role, format, weights, bytes, zeros, smallest, largest]: [String; 7]| {
        format!("{role:<15} {format:<6} {weights:>8} {bytes:>9} {zeros:>9} {smallest:>10} {largest:>10}\n")
    };
    let mut text = row(head.map(String::from));
    for ((role, format), c) in table {
        let numbers = [c.smallest, c.largest].map(|value| format!("{value:.3e}"));
        let [smallest, largest] = numbers;
        let (weights, bytes, zeros) = (c.weights.to_string(), Bytes(c.bytes as u64).to_string(), c.zeros.to_string());
        text += &row([role.name().into(), format.to_string(), weights, bytes, zeros, smallest, largest]);
    }
    text
}

/// The stored texts of the goldens are what their tokens spell.
fn check_texts(bundle: &Bundle, tokenizer: &Tokenizer) -> Result<()> {
    for (i, (golden, text)) in bundle.goldens().iter().zip(bundle.golden_texts()).enumerate() {
        for (part, ids, expected) in [("prompt", &golden.prompt, &text.prompt), ("tokens", &golden.tokens, &text.text)]
        {
            let found = tokenizer.decode(ids)?;
            if found != *expected {
                let file = bundle.path().display();
                return Err(Failure::Verification(format!(
                    "{file}: tensor `golden.{i}.{part}`: expected {expected:?}, found {found:?}"
                )));
            }
        }
    }
    Ok(())
}
