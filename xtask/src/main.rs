//! The project's chores: `cargo xtask COMMAND`. Each command sets up what it needs and says what it does.

mod blocks;
mod bundles;
mod demo;
mod dist;
mod kernels;
mod process;
mod ptx;
mod ptxas;
mod setup;
mod test;
mod tidy;
mod workspace;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test              set up, then all that CI runs: format, tidy, clippy, ptx, Python tests, bundles, cargo test
  demo              set up, build, and decode a shipped INT4 bundle with a DDTree (CUDA if there is a GPU, else CPU)
  dist              make dist/: binary, tests and bundles that run on a machine with a GPU and no Rust
                      --no-bundles   leave the bundles out
  ptx               compile the kernels for every architecture, assemble them, print registers and shared memory
  bundles           make the shipped bundles again
                      --check        compare with what is there, write nothing
  setup             install what is missing: the device toolchain, Python, ptxas (test and demo call it)
  tidy              check the rules of CONTRIBUTING.md that no other tool checks

variables: KDTREE_DEVICE_RUSTC (rustc for kernels), KDTREE_PTX_ARCHS (for instance sm_90), KDTREE_PTXAS (the assembler)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = workspace::root()?;
    match words.as_slice() {
        ["test"] => test::run(&root),
        ["demo"] => demo::run(&root),
        ["dist"] => dist::run(&root, true),
        ["dist", "--no-bundles"] => dist::run(&root, false),
        ["ptx"] => setup::run(&root).and_then(|()| ptx::run(&root)),
        ["bundles"] => setup::run(&root).and_then(|()| bundles::run(&root, false)),
        ["bundles", "--check"] => setup::run(&root).and_then(|()| bundles::run(&root, true)),
        ["setup"] => setup::run(&root),
        ["tidy"] => tidy::run(&root),
        [] | ["help" | "-h" | "--help"] => {
            print!("{USAGE}");
            Ok(())
        }
        _ => bail!("`{}` is not a command of mine\n\n{USAGE}", words.join(" ")),
    }
}
