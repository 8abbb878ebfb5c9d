//! `kdtree verify`: everything that `open` checks, and the content of every tensor whatever the size of the file.

use serde_json::json;

use crate::cli::args::Verify;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::text::Tokenizer;
use crate::weights::{self, Bundle, WeightsError};

pub fn run(args: &Verify) -> Result<()> {
    let bundle = Bundle::open_with(&args.bundle, weights::Verify::Never)?;
    output::note(format_args!(
        "{}: structure as declared; hashing {}",
        args.bundle.display(),
        Bytes(bundle.file_bytes() as u64)
    ));
    bundle.verify().map_err(|error| match error {
        WeightsError::Hash { .. } => Failure::Verification(error.to_string()),
        other => other.into(),
    })?;
    let tokenizer = Tokenizer::of(&bundle)?;
    if let Some(tokenizer) = &tokenizer {
        check_texts(&bundle, tokenizer)?;
    }
    if args.json {
        return output::json(&json!({
            "file": args.bundle.display().to_string(),
            "verdict": "ok",
            "weights": bundle.manifest().len(),
            "tensors": bundle.tensor_count(),
            "bytes": bundle.file_bytes(),
            "goldens": bundle.goldens().len(),
        }));
    }
    let (weights, tensors) = (bundle.manifest().len(), bundle.tensor_count());
    output::line(format_args!("{}: ok, {weights} weights in {tensors} tensors", args.bundle.display()))
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
