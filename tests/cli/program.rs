use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
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
    /// What it took, or its processor time where the machine was busy with other things: that is no shorter than a run
    /// alone on one processor. A program that only waits is told by [`PATIENCE`].
    pub time: Duration,
}

/// How much longer than its processor time a run may take on a busy machine.
const PATIENCE: u32 = 20;

impl Run {
    /// Waits for a child that was started at `start` with both outputs piped.
    fn end(mut child: Child, start: Instant) -> Self {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let errors = std::thread::spawn(move || text(stderr.expect("stderr is piped")));
        let stdout = text(stdout.expect("stdout is piped"));
        let stderr = errors.join().expect("stderr is read");
        let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
        // SAFETY: a child of this process that nothing else waits for; both places outlive the call.
        let ended = unsafe { libc::wait4(child.id() as libc::pid_t, &mut status, 0, usage.as_mut_ptr()) };
        assert_eq!(ended, child.id() as libc::pid_t, "the child ends");
        // SAFETY: zeroed, which is a value, and written by `wait4`.
        let usage = unsafe { usage.assume_init() };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        let processor = Duration::from_secs_f64(seconds(usage.ru_utime) + seconds(usage.ru_stime));
        let wall = start.elapsed();
        let busy = wall < processor * PATIENCE;
        let time = if busy { wall.min(processor) } else { wall };
        Self { code: ExitStatus::from_raw(status).code(), stdout, stderr, time }
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

fn text(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("a pipe is read");
    String::from_utf8(bytes).expect("output is UTF-8")
}

pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    let start = Instant::now();
    let child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    Run::end(child.expect("the binary starts"), start)
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
    Run::end(child, start)
}
