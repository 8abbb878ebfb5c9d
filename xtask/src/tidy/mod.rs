//! Checks the rules of CONTRIBUTING.md that neither rustfmt nor clippy checks. A finding names file, line and rule.

mod rules;
mod source;

pub use source::Source;

use crate::{kernels, workspace};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Larger files are data, not text of ours.
const LARGEST_TEXT: u64 = 2 << 20;

/// Prints every finding; any is an error.
pub fn run(root: &Path) -> Result<()> {
    let gemms: BTreeSet<String> = kernels::in_source(root)?.into_iter().filter(|name| name.contains("gemm")).collect();
    let (mut findings, mut files) = (Vec::new(), 0);
    for path in workspace::files(root, "")? {
        let full = root.join(&path);
        if fs::metadata(&full).with_context(|| format!("look at {}", path.display()))?.len() > LARGEST_TEXT {
            continue;
        }
        // What is not UTF-8 is not text.
        if let Ok(text) = fs::read_to_string(&full) {
            files += 1;
            findings.extend(rules::check(&path.to_string_lossy(), &text, &gemms));
        }
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    if !findings.is_empty() {
        bail!("{} findings in {files} files; CONTRIBUTING.md explains the rules", findings.len());
    }
    eprintln!("{files} files are tidy");
    Ok(())
}
