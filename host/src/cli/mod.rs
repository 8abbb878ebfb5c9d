//! The command line: `args.rs` is what may be said, `commands/` what is done, `failure.rs` how it may end.

mod args;
mod commands;
mod failure;
mod interrupt;
mod output;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use args::{Bench, Cli, Command};

/// Runs the program.
pub fn main() -> ExitCode {
    interrupt::install();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    let done = match cli.command {
        Command::Decode(args) => commands::decode::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Tokenize(args) => commands::tokenize::run(&args),
        Command::States(args) => commands::states::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Bench(Bench::Kernel(args)) => commands::bench::run(&args),
        Command::Completions(args) => commands::completions::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Help and version are results; anything else that clap stops at is a usage error.
fn refused(error: &clap::Error) -> ExitCode {
    // A closed pipe is no reason to fail.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(2),
    }
}
