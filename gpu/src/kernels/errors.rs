//! How a kernel reports values that are not numbers: a code and a row in the state, never a trap, so that a captured
//! round runs to its end and the host reads one record.

use cuda_std::GlobalMut;

use crate::args::state::{ERROR, ERROR_ROW};

const NONE: u32 = 0;

/// Records `code` at `row`, unless another code is there already. Of several rows with this code the lowest stays,
/// whatever the order of the calls.
#[inline(always)]
pub fn report(state: GlobalMut<u32>, code: u32, row: u32) {
    let before = state.atomic_cas(ERROR, NONE, code);
    if before == NONE || before == code {
        state.atomic_min(ERROR_ROW, row);
    }
}
