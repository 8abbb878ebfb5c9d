//! `ids[r, :k]` = the `k` largest of `logits[r, :]`, descending, ties to the lower id;
//! `logp[r, i] = logit - max - ln(sum over the whole row of e^(logit - max))`.
//!
//! Two kernels. `top_k_chunks`, grid x = chunks of a row, y = rows: a block keeps its chunk's keys in shared memory,
//! sums its exponentials and writes its own `k` largest. `top_k_merge`, grid x = rows: the same selection over the
//! chunks' candidates, the sums merged in a fixed order, the survivors ranked. Chunks depend on the vocabulary alone.
//!
//! Selection: the k-th largest key is found digit by digit (four histograms of 256 bins, integer atomics), then the
//! keys above it and the first of those equal to it are kept in index order, so that ties are exact at every step.
//! A row with NaN, +inf or no finite logit has a sum that is NaN: its `logp` are NaN and it is reported in the state.

use cuda_std::{Global, Shared, dynamic_shared, kernel, math, static_shared, thread, warp};

use super::{errors, order};
use crate::args::state::ERROR_DRAFT;
use crate::args::tokens::TopKArgs;

/// Threads a block: one a bin.
pub const THREADS: u32 = BINS as u32;
/// Candidates a row at most.
pub const MAX_K: usize = 64;
/// Logits a row at most: `MAX_CHUNKS` chunks whose keys take 32 KiB each.
pub const MAX_VOCAB: usize = MAX_CHUNKS * 8192;

/// Chunks a row at most: two a lane in the merge of sums, and `MAX_CHUNKS * MAX_K` keys fit in 16 KiB.
const MAX_CHUNKS: usize = 64;
/// Smallest chunk.
const MIN_CHUNK: usize = 2048;
const WARPS: usize = THREADS as usize / LANES;
const LANES: usize = warp::WARP as usize;
const DIGIT_BITS: u32 = 8;
const BINS: usize = 1 << DIGIT_BITS;

static_shared!(fn top_k_histogram() -> [u32; BINS]);
static_shared!(fn top_k_bins_above() -> [u32; WARPS]);
// The digit found, and the keys above it.
static_shared!(fn top_k_found() -> [u32; 2]);
static_shared!(fn top_k_over() -> [u32; WARPS]);
static_shared!(fn top_k_equal() -> [u32; WARPS]);
static_shared!(fn top_k_partial() -> [f32; WARPS]);
static_shared!(fn top_k_partial_sum() -> [f32; WARPS]);
static_shared!(fn top_k_chosen_keys() -> [u32; MAX_K]);
static_shared!(fn top_k_chosen_ids() -> [u32; MAX_K]);

/// Logits a chunk.
pub const fn chunk_of(vocab: usize) -> usize {
    let chunk = vocab.div_ceil(MAX_CHUNKS);
    if chunk > MIN_CHUNK { chunk } else { MIN_CHUNK }
}

/// Dynamic shared memory for `keys` keys.
pub const fn shared_bytes(keys: usize) -> usize {
    keys * size_of::<u32>()
}

/// More than the static arrays above take.
const STATIC_BYTES: usize = 4096;
const _: () = assert!(shared_bytes(chunk_of(MAX_VOCAB)) + STATIC_BYTES <= crate::SHARED_LIMIT as usize);
const _: () = assert!(shared_bytes(MAX_CHUNKS * MAX_K) + STATIC_BYTES <= crate::SHARED_LIMIT as usize);

/// The `k`-th largest of `keys`, and how many keys equal to it belong to the `k` largest.
#[inline(always)]
fn threshold(keys: Shared<u32>, k: u32) -> (u32, u32) {
    let (histogram, above, found) = (top_k_histogram(), top_k_bins_above(), top_k_found());
    let t = thread::thread_idx_x() as usize;
    let (mut prefix, mut wanted) = (0, k);
    let mut shift = u32::BITS;
    while shift > 0 {
        shift -= DIGIT_BITS;
        histogram.set(t, 0);
        thread::sync_threads();
        let mut i = t;
        while i < keys.len() {
            let key = keys.get(i) >> shift;
            if key >> DIGIT_BITS == prefix {
                histogram.atomic_add(key as usize % BINS, 1);
            }
            i += THREADS as usize;
        }
        thread::sync_threads();
        // Thread t counts bin BINS - 1 - t, so that the sum over earlier threads is the keys above its bin.
        let bin = BINS - 1 - t;
        let count = histogram.get(bin);
        let upto = warp::inclusive_sum(count);
        if warp::lane_id() == warp::WARP - 1 {
            above.set(warp::warp_id() as usize, upto);
        }
        thread::sync_threads();
        let mut upto = upto;
        for w in 0..WARPS {
            upto += if w < warp::warp_id() as usize { above.get(w) } else { 0 };
        }
        if upto >= wanted && upto - count < wanted {
            found.set(0, bin as u32);
            found.set(1, upto - count);
        }
        thread::sync_threads();
        prefix = prefix << DIGIT_BITS | found.get(0);
        wanted -= found.get(1);
    }
    (prefix, wanted)
}

/// Calls `keep(slot, i)` for the indices of the `k` largest of `keys`, slots `0..k` in the order of the indices.
/// There are at least `k` keys, written before the block's last barrier.
#[inline(always)]
fn select(keys: Shared<u32>, k: u32, mut keep: impl FnMut(usize, usize)) {
    let (limit, ties) = threshold(keys, k);
    let (warp_over, warp_equal) = (top_k_over(), top_k_equal());
    let (w, lane) = (warp::warp_id() as usize, warp::lane_id());
    // A warp owns a range of indices and walks it twice: to count, then to place.
    let part = keys.len().div_ceil(WARPS).next_multiple_of(LANES);
    let (from, to) = (w * part, (w + 1) * part);
    let look = |i: usize| {
        let key = if i < keys.len() { keys.get(i) } else { 0 };
        let inside = i < keys.len();
        (warp::ballot(inside && key > limit), warp::ballot(inside && key == limit))
    };
    let (mut over, mut equal) = (0, 0);
    let mut base = from;
    while base < to {
        let (o, e) = look(base + lane as usize);
        over += o.count_ones();
        equal += e.count_ones();
        base += LANES;
    }
    if lane == 0 {
        warp_over.set(w, over);
        warp_equal.set(w, equal);
    }
    thread::sync_threads();
    let (mut over, mut equal) = (0, 0);
    for before in 0..w {
        over += warp_over.get(before);
        equal += warp_equal.get(before);
    }
    let (mine, lower) = (1 << lane, (1 << lane) - 1);
    let mut base = from;
    while base < to {
        let i = base + lane as usize;
        let (o, e) = look(i);
        let (before, ties_before) = (over + (o & lower).count_ones(), equal + (e & lower).count_ones());
        let slot = before + if ties_before < ties { ties_before } else { ties };
        if o & mine != 0 || (e & mine != 0 && ties_before < ties) {
            keep(slot as usize, i);
        }
        over += o.count_ones();
        equal += e.count_ones();
        base += LANES;
    }
}

/// `op` over the warps' values in ascending order, the same on all threads. `partial` must not be in use.
#[inline(always)]
fn over_warps(value: f32, partial: Shared<f32>, op: impl Fn(f32, f32) -> f32) -> f32 {
    if warp::lane_id() == 0 {
        partial.set(warp::warp_id() as usize, value);
    }
    thread::sync_threads();
    let mut all = partial.get(0);
    for w in 1..WARPS {
        all = op(all, partial.get(w));
    }
    all
}

/// `e^(v - max)`: 0 for -inf whatever `max` is, NaN for NaN and, through `max`, for +inf.
#[inline(always)]
fn term(v: f32, max: f32) -> f32 {
    if v == f32::NEG_INFINITY { 0.0 } else { math::exp(v - max) }
}

#[kernel]
pub fn top_k_chunks(a: TopKArgs) {
    let (vocab, chunk, k) = (a.vocab as usize, a.chunk as usize, a.k as usize);
    let (number, row) = (thread::block_idx_x() as usize, thread::block_idx_y() as usize);
    let t = thread::thread_idx_x() as usize;
    let start = number * chunk;
    let len = if vocab - start < chunk { vocab - start } else { chunk };
    let logits = a.logits.slice(row * vocab + start, len);
    // A last chunk shorter than k is filled up with keys below all others.
    let keys = dynamic_shared::<u32>(0, if len < k { k } else { len } as u32);

    let mut max = f32::NEG_INFINITY;
    let mut i = t;
    while i < keys.len() {
        let mut key = order::ABSENT;
        if i < len {
            let v = logits.get(i);
            // NaN takes no part in the maximum and is last in the order; the sum below shows it.
            key = order::key(if v.is_nan() { f32::NEG_INFINITY } else { v });
            max = max.max(v);
        }
        keys.set(i, key);
        i += THREADS as usize;
    }
    let max = over_warps(warp::reduce_max(max), top_k_partial(), f32::max);
    let mut sum = 0.0;
    let mut i = t;
    while i < len {
        sum += term(logits.get(i), max);
        i += THREADS as usize;
    }
    let sum = over_warps(warp::reduce_sum(sum), top_k_partial_sum(), |x, y| x + y);
    let place = row * a.chunks as usize + number;
    if t == 0 {
        a.sums.set(2 * place, max);
        a.sums.set(2 * place + 1, sum);
    }
    select(keys, a.k, |slot, i| {
        a.keys.set(place * k + slot, keys.get(i));
        a.candidates.set(place * k + slot, (start + i) as u32);
    });
}

/// Maximum of the row's logits and the sum of exponentials relative to it; every warp computes the same.
#[inline(always)]
fn row_sums(sums: Global<f32>, chunks: usize) -> (f32, f32) {
    let lane = warp::lane_id() as usize;
    let mut max = f32::NEG_INFINITY;
    for c in [lane, lane + LANES] {
        if c < chunks {
            max = max.max(sums.get(2 * c));
        }
    }
    let max = warp::reduce_max(max);
    let mut sum = 0.0;
    for c in [lane, lane + LANES] {
        if c < chunks {
            // A chunk of -inf alone has the sum 0; a row of them has max = -inf, and the sum becomes NaN.
            sum += sums.get(2 * c + 1) * math::exp(sums.get(2 * c) - max);
        }
    }
    (max, warp::reduce_sum(sum))
}

#[kernel]
pub fn top_k_merge(a: TopKArgs) {
    let (k, chunks) = (a.k as usize, a.chunks as usize);
    let row = thread::block_idx_x() as usize;
    let t = thread::thread_idx_x() as usize;
    let (chosen_keys, chosen_ids) = (top_k_chosen_keys(), top_k_chosen_ids());
    let count = chunks * k;
    let keys = dynamic_shared::<u32>(0, count as u32);
    let mut i = t;
    while i < count {
        keys.set(i, a.keys.get(row * count + i));
        i += THREADS as usize;
    }
    let (max, sum) = row_sums(a.sums.as_ref().slice(2 * row * chunks, 2 * chunks), chunks);
    thread::sync_threads();
    // Candidates lie in the order of their ids, so the first of equal keys are the lowest ids.
    select(keys, a.k, |slot, i| {
        chosen_keys.set(slot, keys.get(i));
        chosen_ids.set(slot, a.candidates.get(row * count + i));
    });
    thread::sync_threads();
    if t == 0 && sum.is_nan() {
        errors::report(a.state, ERROR_DRAFT, row as u32);
    }
    if t < k {
        let mine = chosen_keys.get(t);
        let mut place = 0;
        for j in 0..k {
            let other = chosen_keys.get(j);
            place += (other > mine || (other == mine && j < t)) as usize;
        }
        a.ids.set(row * k + place, chosen_ids.get(t) as i32);
        // The difference is taken first: it is small where it matters. NaN sums stay NaN.
        a.logp.set(row * k + place, order::value(mine) - max - math::ln(sum));
    }
}
