//! Adds the splits of a context that [`super::mla_attention`] left undivided.
//!
//! ```text
//! out[q] = sum_s 2^(max[s, q] - M) partial[s, q] / sum_s 2^(max[s, q] - M) sum[s, q]        M = max over s
//! ```
//!
//! Grid: x = packed queries. A block owns one query, a thread 4 columns; splits are added in ascending order.

use cuda_std::{kernel, math, thread};

use super::fragments::{softmax_base, store};
use crate::args::attention::{LATENT, MlaMergeArgs};
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 128;

/// Columns of a thread.
const COLUMNS: usize = LATENT / THREADS as usize;

#[kernel]
pub fn mla_merge(a: MlaMergeArgs) {
    let (query, queries) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    let column = thread::thread_idx_x() as usize * COLUMNS;
    let splits = a.splits as usize;
    let mut max = f32::NEG_INFINITY;
    for split in 0..splits {
        max = max.max(a.partial_max_sum.get((split * queries + query) * 2));
    }
    let base = softmax_base(max);
    let mut total = 0.0;
    let mut acc = [0f32; COLUMNS];
    for split in 0..splits {
        let row = split * queries + query;
        let sum = a.partial_max_sum.get(row * 2 + 1);
        // 0 (and no NaN): no key was seen, and the columns may never have been written.
        if sum != 0.0 {
            let share = math::exp2(a.partial_max_sum.get(row * 2) - base);
            total = math::fma(share, sum, total);
            let values = a.partial.ld16(row * LATENT + column);
            unroll!(i in 0 1 2 3; {
                acc[i] = math::fma(share, f32::from_bits(values[i]), acc[i]);
            });
        }
    }
    unroll!(i in 0 1 2 3; {
        acc[i] *= 1.0 / total;
    });
    store(a.out_f32, a.out_bf16, query * LATENT + column, acc);
}
