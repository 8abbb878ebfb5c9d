//! How far a long step is, on stderr where that is a terminal.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::cli::output::Bytes;

/// Between two looks.
const EVERY: Duration = Duration::from_millis(200);

pub struct Progress {
    total: u64,
    shown: bool,
    terminal: bool,
    /// The step, since when, and what had been done by then.
    step: Option<(String, Instant, u64)>,
    last: Option<Instant>,
}

impl Progress {
    pub fn new(total: u64) -> Self {
        Self { total, shown: false, terminal: std::io::stderr().is_terminal(), step: None, last: None }
    }

    /// Shows that `done` bytes of step `what` are done, at most a few times a second.
    pub fn show(&mut self, what: &str, done: u64) {
        if !self.terminal {
            return;
        }
        let now = Instant::now();
        if self.step.as_ref().is_none_or(|(step, ..)| step != what) {
            self.step = Some((what.to_string(), now, done));
            self.last = None;
        }
        if self.last.is_some_and(|last| now - last < EVERY) && done < self.total {
            return;
        }
        self.last = Some(now);
        let (since, before) = self.step.as_ref().map_or((now, done), |(_, since, before)| (*since, *before));
        let text = line(what, done, self.total, done.saturating_sub(before), (now - since).as_secs_f64());
        // Nobody reading stderr is no reason to fail.
        let _ = write!(std::io::stderr().lock(), "\r\x1b[K{text}");
        self.shown = true;
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
            self.shown = false;
        }
    }
}

/// Does `work`, with a line that says how many of `total` bytes `done` counts.
pub fn watching<T>(what: &str, total: u64, done: impl Fn() -> u64 + Sync, work: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut bar = Progress::new(total);
            while !ended.load(Ordering::Acquire) {
                bar.show(what, done());
                std::thread::park_timeout(EVERY);
            }
            bar.clear();
        });
        // Also where `work` panics: the scope waits for the thread that watches.
        let _end = End(&ended, watch.thread().clone());
        work()
    })
}

/// Ends the thread that watches.
struct End<'a>(&'a AtomicBool, Thread);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

fn line(what: &str, done: u64, total: u64, fresh: u64, seconds: f64) -> String {
    let percent = if total == 0 { 100 } else { (u128::from(done) * 100 / u128::from(total)) as u64 };
    let head = format!("{what}: {percent} % of {}", Bytes(total));
    if fresh == 0 || seconds < 0.05 {
        return head;
    }
    let rate = fresh as f64 / seconds;
    let left = (total.saturating_sub(done)) as f64 / rate;
    format!("{head}, {}/s, {left:.0} s left", Bytes(rate as u64))
}

#[cfg(test)]
mod tests {
    use super::line;

    /// A panic of the work comes out, and does not wait for the thread that watches.
    #[test]
    #[should_panic(expected = "broken")]
    fn watching_ends_with_a_panic() {
        super::watching("working", 1, || 0, || panic!("broken"))
    }

    #[test]
    fn lines() {
        assert_eq!(line("loading", 0, 100, 0, 1.0), "loading: 0 % of 100 B");
        assert_eq!(line("loading", 50_000, 100_000, 50_000, 2.0), "loading: 50 % of 100 kB, 25.0 kB/s, 2 s left");
        assert_eq!(line("loading", 0, 0, 0, 0.0), "loading: 100 % of 0 B");
    }
}
