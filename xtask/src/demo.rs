//! The demonstration: a shipped INT4 bundle decoded with a DDTree, output and statistics as they come.

use crate::process;
use crate::{process::cargo, setup};
use anyhow::Result;
use std::path::Path;
use std::process::Command;

const BUNDLE: &str = "bundles/k26-small-int4.kdtr";

/// Sets up, builds the release binary, and decodes the bundle's first golden prompt.
pub fn run(root: &Path) -> Result<()> {
    process::step("setup", || setup::run(root))?;
    process::step("build", || process::run(cargo(root).args(["build", "--release", "--bin", "kdtree"])))?;
    let mut decode = Command::new(root.join("target/release/kdtree"));
    decode.current_dir(root).args(["decode", BUNDLE, "--golden", "0", "--draft", "dflash"]);
    decode.args(["--budget", "16", "--device", "auto"]);
    eprintln!("== {}", process::shown(&decode));
    process::run(&mut decode)
}
