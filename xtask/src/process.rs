//! Running other programs, and timing steps made of them.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{env, io};

/// Cargo in the workspace's folder, without what the cargo that runs this program told it about itself: a build script
/// that looks at such a variable would run again each time.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") || text == "CARGO_BIN_NAME" {
            command.env_remove(&name);
        }
    }
    command.current_dir(root);
    command
}

/// Runs a program with this one's streams; an exit code other than 0 is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("start {}", shown(command)))?;
    if !status.success() {
        bail!("`{}`: {status}", shown(command));
    }
    Ok(())
}

/// Runs a program and returns its stdout; an exit code other than 0 is an error that quotes stderr.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start {}", shown(command)))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_string();
        bail!("`{}`: {}\n{words}", shown(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program can be started at all.
pub fn exists(program: &str) -> bool {
    let probe = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    !matches!(probe, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// A command line as one would type it, without variables.
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args()).map(|word| word.to_string_lossy().into_owned());
    words.collect::<Vec<_>>().join(" ")
}

/// Runs one named step and says how long it took. An error names the step.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("== {name}");
    let start = Instant::now();
    let result = work();
    let seconds = start.elapsed().as_secs_f64();
    match &result {
        Ok(_) => eprintln!("   {name}: {seconds:.1} s"),
        Err(_) => eprintln!("   {name}: FAILED after {seconds:.1} s"),
    }
    result.with_context(|| format!("step `{name}` failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_step_program_and_code() {
        let error = step("planted", || run(Command::new("false").arg("x"))).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("step `planted`") && text.contains("`false x`") && text.contains('1'), "{text}");
    }

    #[test]
    fn stderr_of_a_failed_program_is_quoted() {
        let error = output(Command::new("sh").args(["-c", "echo reason >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("reason"), "{error}");
    }

    #[test]
    fn absent_programs_are_noticed() {
        assert!(exists("sh") && !exists("no-such-program-at-all"));
    }
}
