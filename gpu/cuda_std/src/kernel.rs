//! What a launcher passes to a device.

/// A kernel's name in the PTX module and its entry on the CPU, with the argument struct as the type.
#[derive(Clone, Copy)]
pub struct Kernel<A: 'static> {
    name: &'static str,
    entry: fn(A),
}

impl<A: Copy + Send + Sync + 'static> Kernel<A> {
    #[doc(hidden)]
    pub const fn new(name: &'static str, entry: fn(A)) -> Self {
        Self { name, entry }
    }

    /// The entry's name in the PTX.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The body, run once a thread by the CPU device.
    pub fn entry(&self) -> fn(A) {
        self.entry
    }
}
