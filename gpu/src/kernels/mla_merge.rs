//! Adds the parts of a context that [`super::mla_attention`] left undivided.
//!
//! ```text
//! out[q] = sum_p 2^(base[p, q] - B) partial[p, q] / sum_p 2^(base[p, q] - B) sum[p, q]        B = largest base
//! ```
//!
//! A lane owns 4 neighbouring columns of a query. Latency is all there is: so each lane has all loads of its parts
//! under way at once, and the more parts there are, the more lanes take them in turn, groups of a warp first
//! ([`Form`]). A warp finds the shares of all parts by itself, a lane those of every 32nd part, and hands them round;
//! there is no barrier but one where two warps add up.
//!
//! The order of additions follows from the number of parts alone: those of a group ascending, then the groups of a warp
//! in pairs, then the warps ascending.

use cuda_std::{kernel, math, static_shared, thread, warp};

use super::fragments::{softmax_base, store};
use super::mla_attention::{MAX_PARTS, parts_used};
use crate::args::attention::{LATENT, MlaMergeArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;

/// Columns of a lane.
const COLUMNS: usize = 4;
const LANES: usize = warp::WARP as usize;
const WARPS: usize = THREADS as usize / LANES;
/// Parts whose shares a lane finds at most.
const MAX_PAIRS: usize = MAX_PARTS.div_ceil(LANES);

/// How parts and columns are spread over lanes.
#[derive(Clone, Copy)]
pub struct Form {
    /// Neighbouring lanes that own columns; each further group of as many in a warp has other parts.
    across: usize,
    /// Warps that take the parts of the same columns in turn.
    share: usize,
    /// Parts that a lane loads at once.
    batch: usize,
}

/// For up to 4, 17 and 34 parts, and for more.
pub const FORM_4: Form = Form { across: 32, share: 1, batch: 4 };
pub const FORM_17: Form = Form { across: 32, share: 1, batch: 17 };
pub const FORM_34: Form = Form { across: 16, share: 1, batch: 17 };
pub const FORM_136: Form = Form { across: 8, share: 2, batch: 17 };

impl Form {
    /// Groups of lanes with parts of their own.
    const fn groups(self) -> usize {
        LANES / self.across * self.share
    }

    /// Warps that own the columns of a query, each so many of them.
    const fn units(self) -> usize {
        LATENT / (self.across * COLUMNS)
    }

    /// Parts that are loaded at once.
    pub const fn parts(self) -> usize {
        self.groups() * self.batch
    }

    /// Blocks of a launch.
    pub const fn blocks(self, queries: usize) -> usize {
        (queries * self.units() * self.share).div_ceil(WARPS)
    }
}

const _: () = assert!(FORM_4.parts() == 4 && FORM_17.parts() == 17 && FORM_34.parts() == 34 && FORM_136.parts() == 136);
const _: () =
    assert!((FORM_136.units() * FORM_136.share).is_multiple_of(WARPS), "all threads of a block reach its barrier");

static_shared!(fn mla_merge_sums() -> [f32; WARPS / 2 * FORM_136.across * COLUMNS]);

#[kernel(threads = THREADS, blocks = 6)]
pub fn mla_merge_4(a: MlaMergeArgs) {
    merge::<32, 1, 4, 1>(a);
}

#[kernel(threads = THREADS, blocks = 2)]
pub fn mla_merge_17(a: MlaMergeArgs) {
    merge::<32, 1, 17, 1>(a);
}

#[kernel(threads = THREADS, blocks = 2)]
pub fn mla_merge_34(a: MlaMergeArgs) {
    merge::<16, 1, 17, 2>(a);
}

#[kernel(threads = THREADS, blocks = 2)]
pub fn mla_merge_136(a: MlaMergeArgs) {
    merge::<8, 2, 17, MAX_PAIRS>(a);
}

/// `PAIRS`: parts whose shares a lane finds.
#[inline(always)]
fn merge<const ACROSS: usize, const SHARE: usize, const BATCH: usize, const PAIRS: usize>(a: MlaMergeArgs) {
    let form = Form { across: ACROSS, share: SHARE, batch: BATCH };
    let t = thread::thread_idx_x() as usize % THREADS as usize;
    let (warp, lane) = (t / LANES, t % LANES);
    let unit = (thread::block_idx_x() as usize * WARPS + warp) / SHARE;
    let (own, groups) = (warp % SHARE, form.groups());
    let group = own * (LANES / ACROSS) + lane / ACROSS;
    let queries = a.queries as usize;
    let (query, column) = (unit / form.units(), (unit % form.units() * ACROSS + lane % ACROSS) * COLUMNS);
    let parts = parts_used(a.state.get(state::COMMITTED) + a.rows, a.parts) as usize;
    // Advanced from part to part: to multiply for each takes more registers.
    let (mut from, step) = ((group * queries + query) * LATENT + column, groups * queries * LATENT);
    let mut pair = (lane * queries + query) * 2;
    thread::wait_for_previous();
    thread::start_next();
    if parts == 1 || query >= queries {
        return;
    }

    let mut pairs = [[f32::NEG_INFINITY, 0.0]; PAIRS];
    unroll!(i in 0 1 2 3 4 5 6 7 below PAIRS; {
        if i > 0 {
            pair += 2 * LANES * queries;
        }
        if lane + i * LANES < parts {
            pairs[i] = a.partial_max_sum.ld8(pair).map(f32::from_bits);
        }
    });
    let mut values = [[0u32; COLUMNS]; BATCH];
    unroll!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 below BATCH; {
        if group + i * groups < parts {
            values[i] = a.partial.ld16(from);
        }
        from += step;
    });
    let mut largest = f32::NEG_INFINITY;
    unroll!(i in 0 1 2 3 4 5 6 7 below PAIRS; {
        largest = largest.max(pairs[i][0]);
    });
    let base = softmax_base(warp::reduce_max(largest));
    let (mut shares, mut total) = ([0f32; PAIRS], 0.0);
    unroll!(i in 0 1 2 3 4 5 6 7 below PAIRS; {
        shares[i] = math::exp2(pairs[i][0] - base);
        total = math::fma(shares[i], pairs[i][1], total);
    });
    let total = warp::reduce_sum(total);

    let mut acc = [0f32; COLUMNS];
    let mut add = |share: f32, value: [u32; COLUMNS]| {
        unroll!(j in 0 1 2 3; {
            acc[j] = math::fma(share, f32::from_bits(value[j]), acc[j]);
        });
    };
    // Part p is the lane p mod 32's; a group's parts of one step lie within 32. Absent ones have share 0.
    unroll!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 below BATCH; {
        if i * groups / LANES < PAIRS {
            let share = shares[i * groups / LANES % PAIRS];
            add(warp::shfl(share, ((group + i * groups) % LANES) as u32), values[i]);
        }
    });
    if form.parts() < PAIRS * LANES {
        let mut part = group + form.parts();
        while part < parts {
            let base_of = f32::from_bits(a.partial_max_sum.ld4((part * queries + query) * 2));
            add(math::exp2(base_of - base), a.partial.ld16(from));
            from += step;
            part += groups;
        }
    }
    unroll!(j in 0 1 2 3; {
        if ACROSS <= 8 {
            acc[j] += warp::shfl_xor(acc[j], 8);
        }
        if ACROSS <= 16 {
            acc[j] += warp::shfl_xor(acc[j], 16);
        }
    });
    if SHARE == 2 {
        let sums = mla_merge_sums();
        let at = (warp / SHARE * ACROSS + lane % ACROSS) * COLUMNS;
        if own == 1 && lane < ACROSS {
            sums.st16(at, acc.map(f32::to_bits));
        }
        thread::sync_threads();
        if own == 0 {
            let other = sums.ld16(at).map(f32::from_bits);
            unroll!(j in 0 1 2 3; {
                acc[j] += other[j];
            });
        }
    }
    if own == 0 && lane < ACROSS {
        unroll!(j in 0 1 2 3; {
            acc[j] *= 1.0 / total;
        });
        store(a.out_f32, a.out_bf16, query * LATENT + column, acc);
    }
}
