//! Everything CI runs, cheapest first; the first failure ends it. The test runner comes last, so that its summary
//! closes the output.

use crate::process::{self, cargo, step};
use crate::{bundles, ptx, setup, tidy};
use anyhow::Result;
use std::path::Path;
use std::process::Command;

const PYTHON_TESTS: &str = "bundles/tests";

/// Runs all steps.
pub fn run(root: &Path) -> Result<()> {
    step("setup", || setup::run(root))?;
    step("format", || process::run(cargo(root).args(["fmt", "--all", "--check"])))?;
    step("tidy", || tidy::run(root))?;
    step("clippy", || {
        process::run(cargo(root).args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    step("ptx", || ptx::run(root))?;
    present(root, PYTHON_TESTS, "python tests", || {
        let mut command = Command::new(setup::python(root));
        command.current_dir(root).env("PYTHONPATH", root.join("bundles"));
        process::run(command.args(["-m", "unittest", "discover", "-s", PYTHON_TESTS]))
    })?;
    present(root, bundles::GENERATOR, "bundles", || bundles::run(root, true))?;
    step("documentation tests", || process::run(cargo(root).args(["test", "--quiet", "--workspace", "--doc"])))?;
    eprintln!("== cargo test");
    process::run(cargo(root).args(["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]))
}

/// A step whose subject may not be there; that is said, never passed over.
fn present(root: &Path, path: &str, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    if root.join(path).exists() {
        return step(name, work);
    }
    eprintln!("== {name}: NOT RUN, there is no {path}");
    Ok(())
}
