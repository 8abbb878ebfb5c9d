//! Marginals recorded with a golden: entry `p` is what a drafter said when golden token `p` was the bonus.

use super::super::round::Round;
use super::super::{EngineError, Result};
use crate::weights::Marginals;

/// Plays recorded marginals of one shape, `[depth, width]` an entry.
pub struct Recorded {
    pub depth: usize,
    pub width: usize,
}

/// The recording of one golden.
pub struct Playback<'a>(&'a Marginals);

impl Recorded {
    /// The recording `marginals`, which must have this shape: the round's buffers do.
    pub fn of<'a>(&self, marginals: &'a Marginals) -> Result<Playback<'a>> {
        let (depth, width) = (marginals.depth, marginals.width);
        if (depth, width) != (self.depth, self.width) {
            let expected = (self.depth, self.width);
            return Err(EngineError::Request(format!(
                "the golden's drafts have depth and width {:?}; the bundle's first ones have {expected:?}",
                (depth, width)
            )));
        }
        Ok(Playback(marginals))
    }
}

impl Playback<'_> {
    /// Uploads the entry for the bonus being generated token `position`. Past the recording the last entry is played
    /// again: a wrong proposal costs acceptance, never a token.
    pub fn propose(&self, round: &Round, position: usize) -> Result<()> {
        let Some((ids, logp)) = self.0.at(position.min(self.0.positions - 1)) else {
            return Err(EngineError::Request("the golden's drafts are empty".into()));
        };
        round.draft_ids.write(0, ids)?;
        Ok(round.draft_logp.write(0, logp)?)
    }
}
