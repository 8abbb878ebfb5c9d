//! `kdtree completions SHELL`.

use clap::CommandFactory;

use crate::cli::args::{Cli, Completions};
use crate::cli::failure::Result;
use crate::cli::output;

pub fn run(args: &Completions) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kdtree", &mut script);
    output::put(String::from_utf8_lossy(&script))
}
