//! What went wrong in a launch, and where.

use std::fmt;

/// The rule that a kernel broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The launch itself is not possible.
    Launch,
    /// An access outside its view, outside every live buffer, or not aligned.
    OutOfBounds,
    /// Two threads touched the same shared bytes with no barrier between, one of them writing.
    Race,
    /// Shared bytes used while an asynchronous copy to them has not been waited for.
    AsyncPending,
    /// Shared bytes read that nothing has written.
    Uninitialised,
    /// A barrier or warp operation that not all threads reach.
    Divergence,
    /// A thread that does not end.
    Endless,
    /// The kernel trapped or panicked.
    Trap,
}

/// An error of a launch on the CPU device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: &'static str,
    pub block: [u32; 3],
    pub thread: Option<[u32; 3]>,
    pub what: String,
}

impl Fault {
    pub(super) fn of_launch(kernel: &'static str, what: String) -> Self {
        Self { kind: FaultKind::Launch, kernel, block: [0; 3], thread: None, what }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`", self.kernel)?;
        if self.kind != FaultKind::Launch {
            let [x, y, z] = self.block;
            write!(f, ", block ({x}, {y}, {z})")?;
        }
        if let Some([x, y, z]) = self.thread {
            write!(f, ", thread ({x}, {y}, {z})")?;
        }
        write!(f, ": {}", self.what)
    }
}

impl std::error::Error for Fault {}
