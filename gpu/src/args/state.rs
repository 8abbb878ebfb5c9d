//! Words of the device-resident state, `u32 [STATE_WORDS]`: what one round hands to the next without the host.

/// S: tokens whose cache rows are final.
pub const COMMITTED: usize = 0;
/// Id of the token that is chosen but not in the cache yet.
pub const BONUS: usize = 1;
/// n: selected nodes of the tree, the root not counted.
pub const NODES: usize = 2;
/// Rows of the accepted path, the root included; 0 after an error.
pub const PATH_LEN: usize = 3;
/// The target's pick at the end of the path.
pub const NEXT_BONUS: usize = 4;
/// 0, or the first error: one of the `ERROR_` codes.
pub const ERROR: usize = 5;
/// Lowest row of that error; [`NO_ROW`] while there is none.
pub const ERROR_ROW: usize = 6;
/// Row indices of the accepted path, ascending, [`MAX_PATH`] of them.
pub const PATH: usize = 8;
/// Longest path: 31 drafted tokens, the root, and one to spare.
pub const MAX_PATH: usize = 33;
/// Length of the state: `PATH + MAX_PATH` rounded up.
pub const STATE_WORDS: usize = 48;

/// A target row with NaN, +inf or no finite logit.
pub const ERROR_LOGITS: u32 = 1;
/// A drafter row whose log-probabilities are not defined.
pub const ERROR_DRAFT: u32 = 2;
/// A router row with NaN.
pub const ERROR_ROUTER: u32 = 3;
/// `ERROR_ROW` while there is no error: a state starts with it, so that rows can take the minimum.
pub const NO_ROW: u32 = u32::MAX;
