//! Ctrl-C. While a result is being produced it asks for an early end, so that what is there is printed; at any other
//! time, and the second time, it ends the process at once. The exit code is 130 either way.

use std::sync::atomic::{AtomicBool, Ordering};

const SIGINT: i32 = 2;
const EXIT_CODE: i32 = 130;

static POLITE: AtomicBool = AtomicBool::new(false);
static REQUESTED: AtomicBool = AtomicBool::new(false);

// SAFETY: both are declared as POSIX and the platform's C library have them.
#[cfg(unix)]
unsafe extern "C" {
    fn signal(signal: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(code: i32) -> !;
}

#[cfg(unix)]
extern "C" fn on_interrupt(_: i32) {
    // Atomics and `_exit` are all that a signal handler may touch here.
    if !POLITE.load(Ordering::SeqCst) || REQUESTED.swap(true, Ordering::SeqCst) {
        // SAFETY: `_exit` may be called in a signal handler and runs nothing of this process.
        unsafe { _exit(EXIT_CODE) }
    }
}

/// Installs the handler. Where there are no signals, Ctrl-C ends the process as the system does it.
pub fn install() {
    #[cfg(unix)]
    // SAFETY: the handler has the signature that `signal` wants, lives forever, and is async-signal-safe.
    unsafe {
        signal(SIGINT, on_interrupt);
    }
}

/// While it lives, the first Ctrl-C only sets a flag.
pub struct Polite(());

impl Polite {
    pub fn begin() -> Self {
        // What was asked for before is done.
        REQUESTED.store(false, Ordering::SeqCst);
        POLITE.store(true, Ordering::SeqCst);
        Self(())
    }

    /// Whether Ctrl-C was pressed.
    pub fn requested(&self) -> bool {
        REQUESTED.load(Ordering::SeqCst)
    }
}

impl Drop for Polite {
    fn drop(&mut self) {
        POLITE.store(false, Ordering::SeqCst);
    }
}
