//! `kdtree tokenize`: text to ids, or ids to text.

use std::path::Path;

use serde_json::json;

use super::prompt::{self, Prompt};
use super::{open, read_text};
use crate::cli::args::Tokenize;
use crate::cli::failure::{Failure, Result};
use crate::cli::output;
use crate::text::Tokenizer;
use crate::weights::Verify;

pub fn run(args: &Tokenize) -> Result<()> {
    let bundle = open(&args.bundle, Verify::WhenSmall, None)?;
    let file = args.bundle.display();
    let tokenizer =
        Tokenizer::of(&bundle)?.ok_or_else(|| Failure::usage(format!("{file}: the bundle holds no tokenizer")))?;
    if let Some(ids) = &args.ids {
        let text = tokenizer.decode(ids).map_err(|e| Failure::usage(format!("--ids: {e}")))?;
        return if args.json { output::json(&json!({ "ids": ids, "text": text })) } else { output::line(text) };
    }
    let given = match args.text.as_deref() {
        Some("-") => Some(read_text(Path::new("-"))?),
        text => text.map(str::to_string),
    };
    let Prompt { ids, text } = prompt::read(given, args.special, &args.conversation, &bundle, &tokenizer)?;
    if !args.json {
        let ids: Vec<String> = ids.iter().map(i32::to_string).collect();
        return output::line(ids.join(" "));
    }
    let mut tokens = Vec::with_capacity(ids.len());
    for &id in &ids {
        tokens.push(String::from_utf8_lossy(tokenizer.bytes(id)?));
    }
    output::json(&json!({ "ids": ids, "text": text, "tokens": tokens }))
}
