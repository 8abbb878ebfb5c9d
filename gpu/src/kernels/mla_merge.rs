//! Adds the parts of a context that [`super::mla_attention`] left undivided.
//!
//! ```text
//! out[q] = sum_p 2^(base[p, q] - B) partial[p, q] / sum_p 2^(base[p, q] - B) sum[p, q]        B = largest base
//! ```
//!
//! A thread owns 4 neighbouring columns. Few parts or many queries ([`mla_merge_few`]): it adds the parts in ascending
//! order, [`BATCH`] loads at a time and as many ahead; a block has two queries. Else a block has one query and a
//! quarter of the columns, and its 8 groups of threads take the parts in turn, so that enough loads are under way; the
//! first are started before the shares of the parts are known. The order follows from the kernel and the number of
//! parts: those of a group ascending, then the groups.

use cuda_std::{kernel, math, static_shared, thread, warp};

use super::fragments::{softmax_base, store};
use super::mla_attention::{MAX_PARTS, parts_used};
use crate::args::attention::{LATENT, MlaMergeArgs};
use crate::args::state;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Parts that a thread of `mla_merge_few` loads at a time.
pub const BATCH: usize = 8;
/// Queries of its block.
pub const FEW_QUERIES: usize = THREADS as usize * COLUMNS / LATENT;
/// Blocks that share a query's columns in `mla_merge`.
pub const QUARTERS: usize = LATENT / (LANES * COLUMNS);

/// Columns of a thread.
const COLUMNS: usize = 4;
/// Groups of threads with their own parts, and threads of each.
const GROUPS: usize = 8;
const LANES: usize = THREADS as usize / GROUPS;
/// Parts that a thread loads at a time.
const AHEAD: usize = 16;
const WARPS: usize = (THREADS / warp::WARP) as usize;

const _: () = assert!(MAX_PARTS <= THREADS as usize, "a thread finds the share of one part");

static_shared!(fn mla_merge_shares() -> [f32; MAX_PARTS]);
static_shared!(fn mla_merge_warps() -> [f32; 2 * WARPS]);
static_shared!(fn mla_merge_sums() -> [f32; THREADS as usize * COLUMNS]);

#[kernel]
pub fn mla_merge_few(a: MlaMergeArgs) {
    let t = thread::thread_idx_x() as usize;
    let queries = a.queries as usize;
    let query = thread::block_idx_x() as usize * FEW_QUERIES + t / (LATENT / COLUMNS);
    let column = t % (LATENT / COLUMNS) * COLUMNS;
    let parts = parts_used(a.state.get(state::COMMITTED) + a.rows, a.parts) as usize;
    thread::wait_for_previous();
    thread::start_next();
    if parts == 1 || query >= queries {
        return;
    }
    let load = |part: usize| a.partial.ld16((part * queries + query) * LATENT + column);
    let pair = |part: usize| a.partial_max_sum.ld8((part * queries + query) * 2).map(f32::from_bits);
    let mut values = [[0u32; COLUMNS]; BATCH];
    unroll!(i in 0 1 2 3 4 5 6 7; {
        if i < parts {
            values[i] = load(i);
        }
    });
    let mut base = f32::NEG_INFINITY;
    let mut part = 0;
    while part < parts {
        unroll!(i in 0 1 2 3 4 5 6 7; {
            if part + i < parts {
                base = base.max(pair(part + i)[0]);
            }
        });
        part += BATCH;
    }
    let base = softmax_base(base);
    let mut total = 0.0;
    let mut acc = [0f32; COLUMNS];
    part = 0;
    while part < parts {
        // The next are on their way while these are added.
        let mut next = [[0u32; COLUMNS]; BATCH];
        unroll!(i in 0 1 2 3 4 5 6 7; {
            if part + BATCH + i < parts {
                next[i] = load(part + BATCH + i);
            }
        });
        unroll!(i in 0 1 2 3 4 5 6 7; {
            if part + i < parts {
                let [base_of, sum] = pair(part + i);
                let share = math::exp2(base_of - base);
                total = math::fma(share, sum, total);
                unroll!(j in 0 1 2 3; {
                    acc[j] = math::fma(share, f32::from_bits(values[i][j]), acc[j]);
                });
            }
        });
        values = next;
        part += BATCH;
    }
    unroll!(j in 0 1 2 3; {
        acc[j] *= 1.0 / total;
    });
    store(a.out_f32, a.out_bf16, query * LATENT + column, acc);
}

#[kernel]
pub fn mla_merge(a: MlaMergeArgs) {
    let (shares, warps, sums) = (mla_merge_shares(), mla_merge_warps(), mla_merge_sums());
    let (query, queries) = (thread::block_idx_x() as usize, a.queries as usize);
    let t = thread::thread_idx_x() as usize % THREADS as usize;
    let warp = t / warp::WARP as usize;
    let (group, lane) = (t / LANES, t % LANES);
    let column = (thread::block_idx_y() as usize * LANES + lane) * COLUMNS;
    let load = |part: usize| a.partial.ld16((part * queries + query) * LATENT + column);

    let committed = a.state.get(state::COMMITTED);
    thread::wait_for_previous();
    thread::start_next();
    // All loads at once: what lies behind the last part in use is not used.
    let last = a.parts as usize - 1;
    let pair = a.partial_max_sum.ld8((t.min(last) * queries + query) * 2).map(f32::from_bits);
    let mut values = [[0u32; COLUMNS]; AHEAD];
    unroll!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; {
        if group + i * GROUPS <= last {
            values[i] = load(group + i * GROUPS);
        }
    });

    let parts = parts_used(committed + a.rows, a.parts) as usize;
    if parts == 1 {
        return;
    }
    let [base, sum] = if t < parts { pair } else { [f32::NEG_INFINITY, 0.0] };
    let largest = warp::reduce_max(base);
    if lane == 0 {
        warps.set(warp, largest);
    }
    thread::sync_threads();
    let mut largest = f32::NEG_INFINITY;
    for w in 0..WARPS {
        largest = largest.max(warps.get(w));
    }
    let share = math::exp2(base - softmax_base(largest));
    let total = warp::reduce_sum(share * sum);
    shares.set(t, share);
    if lane == 0 {
        warps.set(WARPS + warp, total);
    }
    thread::sync_threads();
    let mut total = 0.0;
    for w in 0..WARPS {
        total += warps.get(WARPS + w);
    }

    let mut acc = [0f32; COLUMNS];
    let mut part = group;
    while part < parts {
        unroll!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; {
            if part + i * GROUPS < parts {
                let share = shares.get(part + i * GROUPS);
                unroll!(j in 0 1 2 3; {
                    acc[j] = math::fma(share, f32::from_bits(values[i][j]), acc[j]);
                });
            }
        });
        part += AHEAD * GROUPS;
        if part < parts {
            unroll!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; {
                if part + i * GROUPS < parts {
                    values[i] = load(part + i * GROUPS);
                }
            });
        }
    }
    sums.st16(t * COLUMNS, acc.map(f32::to_bits));
    thread::sync_threads();
    if group == 0 {
        let mut g = 1;
        while g < GROUPS {
            let other = sums.ld16((g * LANES + t) * COLUMNS).map(f32::from_bits);
            unroll!(j in 0 1 2 3; {
                acc[j] += other[j];
            });
            g += 1;
        }
        unroll!(j in 0 1 2 3; {
            acc[j] *= 1.0 / total;
        });
        store(a.out_f32, a.out_bf16, query * LATENT + column, acc);
    }
}
