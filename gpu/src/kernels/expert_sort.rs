//! Pairs (token, slot) sorted by expert, and the tiles of the grouped products.
//!
//! `order[i]`: pair indices, by `ids[pair]`, then ascending. `tiles`: their number, then for each tile
//! (expert, first index into `order`, count), at most 8 pairs of one expert a tile, or 16, ascending.
//!
//! Grid: one block: 520 pairs of a full tree are too few for more. There are three ways, all stable:
//!
//! * up to 32 pairs, a thread owns one and counts those before it against all ids in shared memory: one pass, and no
//!   table of experts to clear;
//! * up to 512 pairs of up to 512 experts, a pair sets its bit in its expert's mask; the sizes of the masks, scanned,
//!   are each expert's place, and a pair's is the number of bits before it;
//! * more are counted by expert with integer atomics (their order cannot show), a scan gives each expert its place, and
//!   pairs are placed 256 at a time by masks as above.

use cuda_std::{Shared, kernel, math, static_shared, thread, warp};

use crate::args::tokens::ExpertSortArgs;
use crate::unroll::unroll;

/// Threads a block.
pub const THREADS: u32 = 256;
/// Experts at most: what the shared arrays hold.
pub const MAX_EXPERTS: usize = THREADS as usize * OWNED;
/// Pairs at most: keeps every index into `tiles` in 32 bits.
pub const MAX_PAIRS: usize = 1 << 24;
/// Pairs of a tile at most: the columns of one `mma`, or of as many as [`MAX_TILE`] says.
pub const TILE: u32 = 8;
/// The largest tile that a kernel takes.
pub const MAX_TILE: u32 = 16;
/// Words a tile takes in `tiles`.
pub const TILE_WORDS: usize = 3;

/// Consecutive experts that a thread counts and scans: one 16-byte load.
const OWNED: usize = 4;
const WARPS: usize = (THREADS / warp::WARP) as usize;

static_shared!(fn expert_sort_counts() -> [u32; MAX_EXPERTS]);
static_shared!(fn expert_sort_starts() -> [u32; MAX_EXPERTS]);
static_shared!(fn expert_sort_masks() -> [u32; MAX_EXPERTS * WARPS]);
static_shared!(fn expert_sort_pair_sums() -> [u32; WARPS]);
static_shared!(fn expert_sort_tile_sums() -> [u32; WARPS]);

/// Sum of `value` over the threads before this one, and over all. `sums` must not be in use.
#[inline(always)]
fn scan(value: u32, sums: Shared<u32>) -> (u32, u32) {
    let upto = warp::inclusive_sum(value);
    if warp::lane_id() == warp::WARP - 1 {
        sums.set(warp::warp_id() as usize, upto);
    }
    thread::sync_threads();
    let (mut before, mut all) = (0, 0);
    for w in 0..WARPS {
        before += if w < warp::warp_id() as usize { sums.get(w) } else { 0 };
        all += sums.get(w);
    }
    (before + upto - value, all)
}

/// Tiles of so many pairs of an expert.
#[inline(always)]
fn tiles_of(a: ExpertSortArgs, count: u32) -> u32 {
    math::div(count + a.tile - 1, a.tile)
}

/// What the padding of the ids holds: no expert.
const NONE: u32 = u32::MAX;
/// Ids read at once.
const WIDE: usize = 4;

static_shared!(fn expert_sort_ids() -> [u32; THREADS as usize]);
static_shared!(fn expert_sort_places() -> [u32; THREADS as usize]);
static_shared!(fn expert_sort_tile_counts() -> [u32; THREADS as usize]);

/// Up to [`FEW`] pairs.
#[inline(always)]
fn few(a: ExpertSortArgs) {
    let (ids, pairs) = (expert_sort_ids(), a.pairs as usize);
    let t = thread::thread_idx_x() as usize;
    let mine = if t < pairs { a.ids.get(t) } else { NONE };
    if t < pairs && mine >= a.experts {
        thread::trap("an expert id outside the experts");
    }
    ids.set(t, mine);
    thread::sync_threads();

    // Pairs of earlier experts, earlier pairs of this one, and all of this one.
    let (mut before, mut rank, mut all) = (0u32, 0u32, 0u32);
    let mut at = 0;
    while at < pairs {
        let four = ids.ld16(at);
        unroll!(i in 0 1 2 3; {
            let same = four[i] == mine;
            before += (four[i] < mine) as u32;
            rank += (same && at + i < t) as u32;
            all += same as u32;
        });
        at += WIDE;
    }
    let place = before + rank;
    if t < pairs {
        a.order.set(place as usize, t as u32);
    }

    // In sorted order, a tile begins at every eighth pair of an expert; its number is that of the beginnings before it.
    let (experts, counts) = (expert_sort_places(), expert_sort_tile_counts());
    if t < pairs {
        let left = all - rank;
        let count = left.min(a.tile);
        experts.set(place as usize, mine);
        counts.set(place as usize, if math::rem(rank, a.tile) == 0 { count } else { 0 });
    }
    thread::sync_threads();
    let count = if t < pairs { counts.get(t) } else { 0 };
    let heads = warp::ballot(count > 0);
    if warp::lane_id() == 0 {
        expert_sort_tile_sums().set(warp::warp_id() as usize, heads.count_ones());
    }
    thread::sync_threads();
    let (mut tile, mut tiles) = ((heads & ((1 << warp::lane_id()) - 1)).count_ones(), 0);
    for w in 0..WARPS {
        let of_warp = expert_sort_tile_sums().get(w);
        tile += if w < warp::warp_id() as usize { of_warp } else { 0 };
        tiles += of_warp;
    }
    if t == 0 {
        a.tiles.set(0, tiles);
    }
    if count > 0 {
        let at = 1 + TILE_WORDS * tile as usize;
        a.tiles.set(at, experts.get(t));
        a.tiles.set(at + 1, t as u32);
        a.tiles.set(at + 2, count);
    }
}

/// Pairs up to which each is counted against all.
const FEW: usize = 32;
/// Pairs and experts that are sorted at once: two a thread.
const SOME: usize = 2 * THREADS as usize;
const _: () = assert!(SOME * SOME / warp::WARP as usize <= MAX_EXPERTS * WARPS && FEW <= THREADS as usize);

/// Up to [`SOME`] pairs and experts, two of each a thread. Masks lie in rows of 32 pairs, a word an expert, so that
/// neighbouring threads read neighbouring words.
#[inline(always)]
fn some(a: ExpertSortArgs) {
    let (bits, starts) = (expert_sort_masks(), expert_sort_starts());
    let (pairs, t) = (a.pairs as usize, thread::thread_idx_x() as usize);
    let rows = pairs.div_ceil(warp::WARP as usize);
    let mut mine = [NONE; 2];
    unroll!(i in 0 1; {
        let pair = t + i * THREADS as usize;
        if pair < pairs {
            mine[i] = a.ids.get(pair);
            if mine[i] >= a.experts {
                thread::trap("an expert id outside the experts");
            }
        }
    });
    for row in 0..rows {
        bits.st8(row * SOME + 2 * t, [0; 2]);
    }
    thread::sync_threads();
    let (row, bit) = (t / warp::WARP as usize, 1 << (t % warp::WARP as usize));
    unroll!(i in 0 1; {
        if mine[i] != NONE {
            bits.atomic_or((row + i * WARPS) * SOME + mine[i] as usize, bit);
        }
    });
    thread::sync_threads();
    // A thread has two experts. Pairs in the low half of a sum, tiles in the high half.
    let mut counts = [0; 2];
    for row in 0..rows {
        let of_row = bits.ld8(row * SOME + 2 * t);
        unroll!(i in 0 1; { counts[i] += of_row[i].count_ones() });
    }
    let both = counts.map(|count| count | tiles_of(a, count) << 16);
    let (before, all) = scan(both[0] + both[1], expert_sort_pair_sums());
    if t == 0 {
        a.tiles.set(0, all >> 16);
    }
    let before = [before, before + both[0]];
    unroll!(i in 0 1; {
        let (first, tile) = (before[i] & 0xFFFF, before[i] >> 16);
        starts.set(2 * t + i, first);
        let mut done = 0;
        while done < counts[i] {
            let at = 1 + TILE_WORDS * (tile + math::div(done, a.tile)) as usize;
            a.tiles.set(at, (2 * t + i) as u32);
            a.tiles.set(at + 1, first + done);
            a.tiles.set(at + 2, a.tile.min(counts[i] - done));
            done += a.tile;
        }
    });
    thread::sync_threads();
    unroll!(i in 0 1; {
        if mine[i] != NONE {
            let (row, expert) = (row + i * WARPS, mine[i] as usize);
            let mut place = starts.get(expert) + (bits.get(row * SOME + expert) & (bit - 1)).count_ones();
            for earlier in 0..row {
                place += bits.get(earlier * SOME + expert).count_ones();
            }
            a.order.set(place as usize, (t + i * THREADS as usize) as u32);
        }
    });
}

#[kernel]
pub fn expert_sort(a: ExpertSortArgs) {
    let (counts, starts, masks) = (expert_sort_counts(), expert_sort_starts(), expert_sort_masks());
    let (pairs, experts) = (a.pairs as usize, a.experts as usize);
    let t = thread::thread_idx_x() as usize;
    let owned = t * OWNED;

    thread::wait_for_previous();
    thread::start_next();
    if pairs <= FEW {
        return few(a);
    }
    if pairs <= SOME && experts <= SOME {
        return some(a);
    }
    counts.st16(owned, [0; OWNED]);
    for e in owned..owned + OWNED {
        masks.st16(e * WARPS, [0; 4]);
        masks.st16(e * WARPS + WARPS / 2, [0; 4]);
    }
    thread::sync_threads();
    let mut i = t;
    while i < pairs {
        let expert = a.ids.get(i) as usize;
        if expert >= experts {
            thread::trap("an expert id outside the experts");
        }
        counts.atomic_add(expert, 1);
        i += THREADS as usize;
    }
    thread::sync_threads();

    let (mut pair_sum, mut tile_sum) = (0, 0);
    for count in counts.ld16(owned) {
        pair_sum += count;
        tile_sum += tiles_of(a, count);
    }
    let (mut first, _) = scan(pair_sum, expert_sort_pair_sums());
    let (mut tile, tiles) = scan(tile_sum, expert_sort_tile_sums());
    if t == 0 {
        a.tiles.set(0, tiles);
    }
    for expert in owned..owned + OWNED {
        let count = counts.get(expert);
        starts.set(expert, first);
        let mut done = 0;
        while done < count {
            let left = count - done;
            let at = 1 + TILE_WORDS * tile as usize;
            a.tiles.set(at, expert as u32);
            a.tiles.set(at + 1, first + done);
            a.tiles.set(at + 2, left.min(a.tile));
            tile += 1;
            done += a.tile;
        }
        first += count;
    }

    let (word, bit) = (t / warp::WARP as usize, 1 << (t % warp::WARP as usize));
    let mut base = 0;
    while base < pairs {
        let pair = base + t;
        let expert = if pair < pairs { a.ids.get(pair) as usize } else { 0 };
        if pair < pairs {
            masks.atomic_or(expert * WARPS + word, bit);
        }
        thread::sync_threads();
        if pair < pairs {
            let mut before = (masks.get(expert * WARPS + word) & (bit - 1)).count_ones();
            for w in 0..word {
                before += masks.get(expert * WARPS + w).count_ones();
            }
            a.order.set((starts.get(expert) + before) as usize, pair as u32);
        }
        thread::sync_threads();
        for e in owned..owned + OWNED {
            let (low, high) = (masks.ld16(e * WARPS), masks.ld16(e * WARPS + WARPS / 2));
            let mut placed = 0;
            unroll!(i in 0 1 2 3; {
                placed += low[i].count_ones() + high[i].count_ones();
            });
            starts.set(e, starts.get(e) + placed);
            masks.st16(e * WARPS, [0; 4]);
            masks.st16(e * WARPS + WARPS / 2, [0; 4]);
        }
        thread::sync_threads();
        base += THREADS as usize;
    }
}
