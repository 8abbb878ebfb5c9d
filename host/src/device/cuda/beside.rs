//! Work beside other work: a second stream that forks off the first and joins it again.

use std::sync::MutexGuard;
use std::thread;

use cust::event::{Event, EventFlags};
use cust::stream::{Stream, StreamWaitEventFlags};

use super::card::{Card, cust_call};
use super::{CudaDevice, lock};
use crate::device::{DeviceError, Result};

/// While it lives, launches of its thread go to the second stream.
struct Beside<'a>(&'a CudaDevice);

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        *lock(&self.0.beside) = None;
    }
}

impl CudaDevice {
    /// Whether launches of this thread go to the second stream.
    pub(super) fn is_beside(&self) -> bool {
        *lock(&self.beside) == Some(thread::current().id())
    }

    /// As [`crate::device::Device::beside`].
    pub fn beside(&self, other: impl FnOnce() -> Result<()>, first: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.is_beside() {
            return Err(DeviceError::Unsupported("work beside work that is beside other work".into()));
        }
        let _one: MutexGuard<()> = lock(&self.besides);
        let recording = self.is_recording();
        self.card.call(|card| join(pair(card, recording)))?;
        let queued = {
            *lock(&self.beside) = Some(thread::current().id());
            let _beside = Beside(self);
            other()
        };
        let queued = queued.and_then(|()| first());
        // Also after an error: a recording whose streams are apart cannot be ended.
        let joined = self.card.call(|card| {
            let [first, other] = pair(card, recording);
            join([other, first])
        });
        queued.and(joined)
    }
}

/// The streams of a thread's launches.
fn pair(card: &Card, recording: bool) -> [&Stream; 2] {
    if recording { card.recorders() } else { card.streams() }
}

/// What comes next on stream `later` waits for all that is on `earlier`.
fn join([earlier, later]: [&Stream; 2]) -> Result<()> {
    let event = cust_call("cuEventCreate", Event::new(EventFlags::DISABLE_TIMING))?;
    cust_call("cuEventRecord", event.record(earlier))?;
    cust_call("cuStreamWaitEvent", later.wait_event(event, StreamWaitEventFlags::DEFAULT))
}
