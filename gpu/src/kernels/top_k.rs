//! `ids[r, :k]` = the `k` largest of `logits[r, :]`, descending, ties to the lower id;
//! `logp[r, i] = logit - max - ln(sum over the whole row of e^(logit - max))`.
//!
//! Two kernels, both with grid x = chunks of 4,096 logits, y = rows. `top_k_chunks` leaves each chunk's maximum, its
//! sum of exponentials and the largest logit of each group of its threads. The k-th largest of a row's group maxima is
//! at most the k-th largest logit, and with four times more groups than k little above it is not among the k: so
//! `top_k_select` finds that bound (each block for itself, digit by digit in a histogram), reads its chunk again, which
//! is in L2, and adds what reaches the bound to the row's candidates. The last block of a row to do so sorts them by
//! (logit, id): some k of them in any order, so that the order of arrival does not matter. A small vocabulary needs no
//! bound: all of it is sorted. Where more logits tie with the bound than there is room for, the last block selects from
//! the whole row instead: slow, and the same result.
//!
//! Chunks depend on nothing but the vocabulary, so a row's sums have one order.
//! A row with NaN, +inf or no finite logit has a sum that is NaN: its `logp` are NaN and it is reported in the state.

use cuda_std::{Global, Shared, dynamic_shared, kernel, math, static_shared, thread, warp};

use super::{bitonic, errors, order};
use crate::args::state::ERROR_DRAFT;
use crate::args::tokens::TopKArgs;
use crate::unroll::unroll;

/// Threads a block: one a bin.
pub const THREADS: u32 = BINS as u32;
/// Candidates a row at most.
pub const MAX_K: usize = 1024;
/// Logits a chunk.
pub const CHUNK: usize = LOADS * WIDE * THREADS as usize;
/// Logits a row at most.
pub const MAX_VOCAB: usize = MAX_CHUNKS * CHUNK;

/// Chunks a row at most: four a lane in the merge of sums.
const MAX_CHUNKS: usize = 4 * LANES;
/// Logits of a 16-byte load.
const WIDE: usize = 4;
/// Loads of a thread.
const LOADS: usize = 4;
const WARPS: usize = THREADS as usize / LANES;
const LANES: usize = warp::WARP as usize;
const DIGIT_BITS: u32 = 8;
const BINS: usize = 1 << DIGIT_BITS;
/// Group maxima that are wanted for each of the k.
const SPREAD: usize = 4;
/// One more in so many group maxima may reach the bound: the last digits are seldom looked at.
const SLACK: u32 = 8;
/// Vocabularies that are sorted whole.
const SMALL: usize = 1024;
/// Candidates that are sorted at most.
const MAX_ROOM: usize = 8192;

static_shared!(fn top_k_histogram() -> [u32; BINS]);
static_shared!(fn top_k_bins_above() -> [u32; WARPS]);
// The digit found, the keys above it, and those above and with it.
static_shared!(fn top_k_found() -> [u32; 3]);
static_shared!(fn top_k_over() -> [u32; WARPS]);
static_shared!(fn top_k_equal() -> [u32; WARPS]);
static_shared!(fn top_k_partial() -> [f32; WARPS]);
static_shared!(fn top_k_partial_sum() -> [f32; WARPS]);
// Blocks of the row that have ended before.
static_shared!(fn top_k_before() -> [u32; 1]);

/// Groups a chunk for the `k` largest of `vocab`; 0 where there is no bound and all are candidates.
pub const fn groups_of(vocab: usize, k: usize) -> usize {
    let chunks = vocab.div_ceil(CHUNK);
    let mut groups = WARPS;
    while groups < THREADS as usize && groups * chunks < SPREAD * k {
        groups *= 2;
    }
    if vocab <= SMALL || groups * chunks < k { 0 } else { groups }
}

/// Candidates of a row that are sorted.
pub const fn room_of(vocab: usize, k: usize) -> usize {
    let room = if groups_of(vocab, k) == 0 { vocab } else { SPREAD * k };
    let least = SMALL;
    if room < least {
        least
    } else if room > MAX_ROOM {
        MAX_ROOM
    } else {
        room
    }
}

/// Dynamic shared memory of `top_k_select`: the group maxima, then the candidates.
pub const fn shared_bytes(vocab: usize, k: usize) -> usize {
    let bounds = vocab.div_ceil(CHUNK) * groups_of(vocab, k) * size_of::<u32>();
    let list = bitonic::padded(room_of(vocab, k) as u32) as usize * size_of::<u64>();
    if bounds > list { bounds } else { list }
}

/// More than the static arrays above take.
const STATIC_BYTES: usize = 4096;
const _: () = assert!(MAX_ROOM * size_of::<u64>() + STATIC_BYTES <= crate::SHARED_LIMIT as usize);

/// The `k`-th largest of `len` keys, and how many keys equal to it belong to the `k` largest. Or, as soon as no more
/// than `enough` keys reach it, a lower bound of it.
#[inline(always)]
fn threshold(len: usize, key: impl Fn(usize) -> u32, k: u32, enough: u32) -> (u32, u32) {
    let (histogram, above, found) = (top_k_histogram(), top_k_bins_above(), top_k_found());
    let t = thread::thread_idx_x() as usize;
    let (mut prefix, mut wanted) = (0, k);
    let mut shift = u32::BITS;
    while shift > 0 {
        shift -= DIGIT_BITS;
        histogram.set(t, 0);
        thread::sync_threads();
        let mut i = t;
        while i < len {
            let key = key(i) >> shift;
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
            found.set(2, upto);
        }
        thread::sync_threads();
        prefix = prefix << DIGIT_BITS | found.get(0);
        let reach = k - wanted + found.get(2);
        wanted -= found.get(1);
        if reach <= enough {
            prefix <<= shift;
            break;
        }
    }
    (prefix, wanted)
}

/// Calls `keep(slot, i)` for the indices of the `k` largest of `len` keys, slots `0..k` in the order of the indices.
/// There are at least `k` keys.
#[inline(always)]
fn select(len: usize, key: impl Fn(usize) -> u32, k: u32, mut keep: impl FnMut(usize, usize)) {
    let (limit, ties) = threshold(len, &key, k, 0);
    let (warp_over, warp_equal) = (top_k_over(), top_k_equal());
    let (w, lane) = (warp::warp_id() as usize, warp::lane_id());
    // A warp owns a range of indices and walks it twice: to count, then to place.
    let part = len.div_ceil(WARPS).next_multiple_of(LANES);
    let (from, to) = (w * part, (w + 1) * part);
    let look = |i: usize| {
        let inside = i < len;
        let key = if inside { key(i) } else { 0 };
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

/// Key of a logit: NaN is last in the order; the sum shows it.
#[inline(always)]
fn key_of(v: f32) -> u32 {
    order::key(if v.is_nan() { f32::NEG_INFINITY } else { v })
}

/// Index of value `j` of this thread's load `u` in the chunk.
#[inline(always)]
fn place(u: usize, j: usize) -> usize {
    (u * THREADS as usize + thread::thread_idx_x() as usize) * WIDE + j
}

/// This thread's part of a chunk: -inf behind the row's end.
#[inline(always)]
fn load(chunk: Global<f32>) -> [[f32; WIDE]; LOADS] {
    let mut values = [[f32::NEG_INFINITY; WIDE]; LOADS];
    if chunk.len() == CHUNK && chunk.addr().is_multiple_of(size_of::<[f32; WIDE]>() as u64) {
        unroll!(u in 0 1 2 3; {
            let [x, y, z, w] = chunk.ld16(place(u, 0));
            values[u] = [f32::from_bits(x), f32::from_bits(y), f32::from_bits(z), f32::from_bits(w)];
        });
    } else {
        unroll!(u in 0 1 2 3; {
            unroll!(j in 0 1 2 3; {
                if place(u, j) < chunk.len() {
                    values[u][j] = chunk.get(place(u, j));
                }
            });
        });
    }
    values
}

/// This block's chunk, and its first id.
#[inline(always)]
fn chunk_of(a: &TopKArgs) -> (Global<f32>, usize) {
    let (vocab, start) = (a.vocab as usize, thread::block_idx_x() as usize * CHUNK);
    let len = if vocab - start < CHUNK { vocab - start } else { CHUNK };
    (a.logits.slice(thread::block_idx_y() as usize * vocab + start, len), start)
}

#[kernel]
pub fn top_k_chunks(a: TopKArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (number, row) = (thread::block_idx_x() as usize, thread::block_idx_y() as usize);
    let (t, chunks, groups) = (thread::thread_idx_x(), thread::grid_dim_x() as usize, a.groups as usize);
    let (chunk, _) = chunk_of(&a);
    let values = load(chunk);

    let (mut max, mut largest) = (f32::NEG_INFINITY, order::ABSENT);
    unroll!(u in 0 1 2 3; {
        unroll!(j in 0 1 2 3; {
            let v = values[u][j];
            max = max.max(v);
            let key = key_of(v);
            if key > largest && place(u, j) < chunk.len() {
                largest = key;
            }
        });
    });
    if groups > 0 {
        let lanes = math::div(THREADS, a.groups);
        let mut step = 1;
        while step < lanes {
            let other = warp::shfl_xor(largest, step);
            largest = if other > largest { other } else { largest };
            step *= 2;
        }
        if t & (lanes - 1) == 0 {
            let group = math::div(t, lanes) as usize;
            a.groups_max.set((row * chunks + number) * groups + group, largest);
        }
    }
    let max = over_warps(warp::reduce_max(max), top_k_partial(), f32::max);
    let mut sum = 0.0;
    unroll!(u in 0 1 2 3; {
        unroll!(j in 0 1 2 3; {
            sum += term(values[u][j], max);
        });
    });
    let sum = over_warps(warp::reduce_sum(sum), top_k_partial_sum(), |x, y| x + y);
    if t == 0 {
        a.sums.set(2 * (row * chunks + number), max);
        a.sums.set(2 * (row * chunks + number) + 1, sum);
        if number == 0 {
            a.counts.set(2 * row, 0);
            a.counts.set(2 * row + 1, 0);
        }
    }
}

/// Maximum of the row's logits and the sum of exponentials relative to it; every warp computes the same.
#[inline(always)]
fn row_sums(sums: Global<f32>, chunks: usize) -> (f32, f32) {
    let mut max = f32::NEG_INFINITY;
    let mut c = warp::lane_id() as usize;
    while c < chunks {
        max = max.max(sums.get(2 * c));
        c += LANES;
    }
    let max = warp::reduce_max(max);
    let mut sum = 0.0;
    let mut c = warp::lane_id() as usize;
    while c < chunks {
        // A chunk of -inf alone has the sum 0; a row of them has max = -inf, and the sum becomes NaN.
        sum += sums.get(2 * c + 1) * math::exp(sums.get(2 * c) - max);
        c += LANES;
    }
    (max, warp::reduce_sum(sum))
}

/// Adds what reaches `bound` of this thread's part of a chunk to the row's candidates.
#[inline(always)]
fn gather(a: &TopKArgs, values: [[f32; WIDE]; LOADS], chunk: Global<f32>, start: usize, bound: u32) {
    let row = thread::block_idx_y() as usize;
    let mut hits = 0;
    unroll!(u in 0 1 2 3; {
        unroll!(j in 0 1 2 3; {
            hits += (place(u, j) < chunk.len() && key_of(values[u][j]) >= bound) as u32;
        });
    });
    if !warp::any(hits > 0) {
        return;
    }
    let upto = warp::inclusive_sum(hits);
    let mut first = 0;
    if warp::lane_id() == warp::WARP - 1 {
        first = a.counts.atomic_add(2 * row, upto);
    }
    // One before the first.
    let mut slot = (warp::shfl(first, warp::WARP - 1) + upto - hits).wrapping_sub(1);
    unroll!(u in 0 1 2 3; {
        unroll!(j in 0 1 2 3; {
            let key = key_of(values[u][j]);
            if place(u, j) < chunk.len() && key >= bound {
                slot = slot.wrapping_add(1);
                if slot < a.room {
                    let at = 2 * (row * a.room as usize + slot as usize);
                    a.candidates.st8(at, [!((start + place(u, j)) as u32), key]);
                }
            }
        });
    });
}

#[kernel]
pub fn top_k_select(a: TopKArgs) {
    thread::wait_for_previous();
    thread::start_next();
    let (row, vocab, k) = (thread::block_idx_y() as usize, a.vocab as usize, a.k as usize);
    let (t, chunks) = (thread::thread_idx_x(), thread::grid_dim_x() as usize);
    let (chunk, start) = chunk_of(&a);
    let values = load(chunk);
    let mut bound = order::ABSENT;
    if a.groups > 0 {
        let count = chunks * a.groups as usize;
        let keys = dynamic_shared::<u32>(0, count as u32);
        let mut i = t as usize;
        while i < count {
            keys.set(i, a.groups_max.get(row * count + i));
            i += THREADS as usize;
        }
        // Each thread reads what it has written, then the barriers of the threshold follow.
        (bound, _) = threshold(count, |i| keys.get(i), a.k, a.k + a.k / SLACK);
    }
    gather(&a, values, chunk, start, bound);
    thread::sync_threads();
    if t == 0 {
        thread::fence_device();
        top_k_before().set(0, a.counts.atomic_add(2 * row + 1, 1));
        thread::fence_device();
    }
    thread::sync_threads();
    if top_k_before().get(0) as usize != chunks - 1 {
        return;
    }

    let count = a.counts.get(2 * row);
    let chosen = if count > a.room { a.k } else { count };
    let size = bitonic::padded(chosen);
    let list = dynamic_shared::<u64>(0, size);
    let mut i = t;
    while i < size {
        let mut entry = 0;
        if i < chosen && count <= a.room {
            let [low, high] = a.candidates.ld8(2 * (row * a.room as usize + i as usize));
            entry = (high as u64) << u32::BITS | low as u64;
        }
        list.set(i as usize, entry);
        i += THREADS;
    }
    thread::sync_threads();
    if count > a.room {
        let logits = a.logits.slice(row * vocab, vocab);
        select(
            vocab,
            |i| key_of(logits.get(i)),
            a.k,
            |slot, i| {
                list.set(slot, (key_of(logits.get(i)) as u64) << u32::BITS | !(i as u32) as u64);
            },
        );
        thread::sync_threads();
    }
    bitonic::sort_descending(list, size);

    let (max, sum) = row_sums(a.sums.as_ref().slice(2 * row * chunks, 2 * chunks), chunks);
    if t == 0 && sum.is_nan() {
        errors::report(a.state, ERROR_DRAFT, row as u32);
    }
    let mut i = t as usize;
    while i < k {
        let entry = list.get(i);
        a.ids.set(row * k + i, !(entry as u32) as i32);
        // The difference is taken first: it is small where it matters. NaN sums stay NaN.
        a.logp.set(row * k + i, order::value((entry >> u32::BITS) as u32) - max - math::ln(sum));
        i += THREADS as usize;
    }
}
