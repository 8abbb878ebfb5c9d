//! Makes the shipped bundles, or checks that they are what the generator makes.

use crate::{process, setup};
use anyhow::Result;
use std::path::Path;
use std::process::Command;

/// The generator, relative to the workspace.
pub const GENERATOR: &str = "bundles/make.py";

/// Runs the generator; with `check` it compares and writes nothing.
pub fn run(root: &Path, check: bool) -> Result<()> {
    let mut command = Command::new(setup::python(root));
    command.current_dir(root).arg(GENERATOR);
    if check {
        command.arg("--check");
    }
    process::run(&mut command)
}
