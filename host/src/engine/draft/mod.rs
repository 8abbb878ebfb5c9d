//! Drafters: who proposes the marginals that a round's tree is built from.

mod dflash;
mod recorded;

pub use dflash::DraftStages;
pub(super) use dflash::{DFlash, MAX_CANDIDATES};
pub(super) use recorded::Recorded;

use crate::model::Taps;

/// The drafter of an engine.
pub(super) enum Drafter {
    /// No speculation: each round verifies the root alone.
    None,
    /// Marginals stored with a golden, played back by position.
    Recorded(Recorded),
    /// The DFlash block drafter.
    DFlash(Box<DFlash>),
}

impl Drafter {
    /// Hidden states that the target leaves for it.
    pub fn taps(&self) -> Option<&Taps> {
        match self {
            Self::None | Self::Recorded(_) => None,
            Self::DFlash(drafter) => Some(&drafter.taps),
        }
    }
}
