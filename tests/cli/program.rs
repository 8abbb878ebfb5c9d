use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use super::bundle::shipped as bundle;

/// `KDTREE_BIN`, the binary of a dist folder, or the one that cargo built.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("KDTREE_BIN") {
        return path.into();
    }
    let shipped = std::env::var_os("KDTREE_ROOT").map(|root| PathBuf::from(root).join("kdtree"));
    let built = || option_env!("CARGO_BIN_EXE_kdtree").map(PathBuf::from);
    shipped.filter(|path| path.is_file()).or_else(built).expect("set KDTREE_BIN to the kdtree binary")
}

/// The binary without what a user's shell may say about terminals and GPUs.
pub fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(binary());
    command.args(args).env_remove("COLUMNS").env_remove("CLICOLOR_FORCE").stdin(Stdio::null());
    command
}

/// What a run did.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub time: Duration,
}

impl Run {
    fn new(output: Output, time: Duration) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr), time }
    }

    /// Fails unless the run ended with `code` and said each of `words` on stderr.
    pub fn expect(&self, code: i32, words: &[&str]) -> &Self {
        let said = words.iter().all(|word| self.stderr.contains(word));
        assert!(
            self.code == Some(code) && said,
            "expected exit code {code} and {words:?}, found {:?}\nstdout: {}\nstderr: {}",
            self.code,
            self.stdout,
            self.stderr
        );
        self
    }

    /// The one JSON document on stdout.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    let start = Instant::now();
    let output = command(args).output().expect("the binary starts");
    Run::new(output, start.elapsed())
}

/// Runs with `input` on stdin.
pub fn run_with_input<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, input: &[u8]) -> Run {
    let start = Instant::now();
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // A program that ends without reading closes the pipe, which is its right.
    let _ = child.stdin.take().expect("stdin is piped").write_all(input);
    Run::new(child.wait_with_output().expect("the binary ends"), start.elapsed())
}
