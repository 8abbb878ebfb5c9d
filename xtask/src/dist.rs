//! Makes `dist/`: what runs tests and benches on a machine that has a GPU and no Rust.
//!
//! ```text
//! dist/kdtree         the stripped binary     dist/test-bin/   test programs      dist/run-tests.sh   runs them all
//! dist/bundles/       the shipped bundles     dist/tests/      data of the tests
//! ```

use crate::process::{self, cargo, step};
use crate::{setup, workspace};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the folder may take, bundles above [`LARGE_BUNDLE`] not counted. Each of the three programs has all kernels
/// twice: as PTX of three targets, and as code of the CPU device.
const LIMIT: u64 = 40_000_000;
const LARGE_BUNDLE: u64 = 2_000_000;
/// The profile of the programs: the host's code small, the kernels fast.
const PROFILE: &str = "dist";

/// Tests of the command line run it with `--device cpu`: a GPU machine adds nothing to what they say here.
const CPU_ONLY: [&str; 1] = ["cli"];

const RUN_TESTS: &str = r#"#!/usr/bin/env bash
# Runs every test program of this folder on this machine's GPU. Needs the driver and nothing else.
# Arguments go to each program, for instance a filter. KDTREE_REQUIRE_GPU=0 lets GPU tests be ignored.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
chmod +x kdtree test-bin/*
export KDTREE_ROOT="$PWD" KDTREE_REQUIRE_GPU="${KDTREE_REQUIRE_GPU:-1}"
failed=()
echo "== doctor"
./kdtree doctor || failed+=(doctor)
for program in test-bin/*; do
    echo "== ${program#test-bin/}"
    "$program" "$@" || failed+=("${program#test-bin/}")
done
if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "all test programs passed"
"#;

/// Builds and fills `dist/`, with the bundles or without, and prints what it weighs.
pub fn run(root: &Path, with_bundles: bool) -> Result<()> {
    step("setup", || setup::run(root))?;
    step("build", || process::run(cargo(root).args(["build", "--profile", PROFILE, "--bin", "kdtree"])))?;
    let programs = step("build tests", || test_programs(root))?;
    let dist = root.join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("remove {}", dist.display()))?;
    }
    make(&dist.join("test-bin"))?;
    strip(&root.join("target").join(PROFILE).join("kdtree"), &dist.join("kdtree"))?;
    for (name, program) in &programs {
        if !has_tests(program)? {
            println!("left out, it has no tests: {name}");
            continue;
        }
        strip(program, &dist.join("test-bin").join(name))?;
    }
    copy_data(root, &dist, "tests", &["rs"])?;
    if with_bundles {
        copy_data(root, &dist, "bundles", &["py", "txt"])?;
    }
    let script = dist.join("run-tests.sh");
    fs::write(&script, RUN_TESTS).with_context(|| format!("write {}", script.display()))?;
    process::run(Command::new("chmod").arg("+x").arg(&script))?;
    weigh(root)
}

/// The test programs of `tests/`, with the names they get. Unit tests need no GPU and stay here.
fn test_programs(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut command = cargo(root);
    command.args(["test", "--no-run", "--profile", PROFILE, "--package", "kdtree-engine", "--test", "*"]);
    command.arg("--message-format=json-render-diagnostics");
    command.stderr(std::process::Stdio::inherit());
    let messages = process::output(&mut command)?;
    let mut programs: Vec<_> = messages.lines().filter_map(test_program).collect();
    programs.retain(|(name, _)| !CPU_ONLY.contains(&name.as_str()));
    if programs.is_empty() {
        bail!("cargo built no test programs");
    }
    Ok(programs)
}

/// Name and path in one of cargo's messages, if it is about a test program.
fn test_program(message: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let program = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
    let name = message["target"]["name"].as_str()?;
    let name = match message["target"]["kind"][0].as_str()? {
        "test" => name.to_string(),
        kind => format!("{name}-{kind}-unit"),
    };
    Some((name, program.into()))
}

/// Whether a test program lists any test; both harnesses in use answer alike.
fn has_tests(program: &Path) -> Result<bool> {
    let list = process::output(Command::new(program).args(["--list", "--format", "terse"]))?;
    Ok(list.lines().any(|line| line.ends_with(": test")))
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    process::run(Command::new("strip").arg("-o").arg(to).arg(from)).context("stripping needs binutils")
}

/// Copies the files below `dir` but those with one of the extensions `without`.
fn copy_data(root: &Path, dist: &Path, dir: &str, without: &[&str]) -> Result<()> {
    if !root.join(dir).is_dir() {
        return Ok(());
    }
    for path in workspace::files(root, dir)? {
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        if without.contains(&extension.unwrap_or_default().as_str()) {
            continue;
        }
        let to = dist.join(&path);
        make(to.parent().unwrap_or(dist))?;
        fs::copy(root.join(&path), &to).with_context(|| format!("copy {} to {}", path.display(), to.display()))?;
    }
    Ok(())
}

fn make(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))
}

/// Prints each file's size and refuses a folder that is too heavy to carry about.
fn weigh(root: &Path) -> Result<()> {
    let dist = root.join("dist");
    let (mut counted, mut large) = (0, 0);
    for path in workspace::files(&dist, "")? {
        let bytes = fs::metadata(dist.join(&path)).with_context(|| format!("look at {}", path.display()))?.len();
        let is_large = path.starts_with("bundles") && bytes > LARGE_BUNDLE;
        *(if is_large { &mut large } else { &mut counted }) += bytes;
        println!("{:>9.2} MB  {}{}", bytes as f64 / 1e6, path.display(), if is_large { "  (large)" } else { "" });
    }
    let (small, big) = (counted as f64 / 1e6, large as f64 / 1e6);
    println!("{small:>9.2} MB  in dist/, and {big:.2} MB of large bundles");
    if counted > LIMIT {
        bail!("dist/ without large bundles: at most {} MB, found {small:.2} MB", LIMIT / 1_000_000);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let message = |kind: &str, test: bool, program: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"target\":{{\"kind\":[\"{kind}\"],\"name\":\"kernels\"}},\
                 \"profile\":{{\"test\":{test}}},\"executable\":{program}}}"
            )
        };
        let found = |text: String| test_program(&text).map(|(name, _)| name);
        assert_eq!(found(message("test", true, "\"x/kernels-1\"")), Some("kernels".into()));
        assert_eq!(found(message("lib", true, "\"x/kernels-2\"")), Some("kernels-lib-unit".into()));
        assert_eq!(found(message("bin", false, "\"x/kernels\"")), None);
        assert_eq!(found(message("lib", false, "null")), None);
        assert_eq!(found("not json".into()), None);
    }

    #[test]
    fn the_script_is_good_bash() {
        process::run(Command::new("bash").args(["-n", "-c", RUN_TESTS])).unwrap();
    }
}
