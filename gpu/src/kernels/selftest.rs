//! Every operation of `cuda_std`, one kernel a family: what the CPU device emulates is compared with a GPU's own result
//! and with values worked out by hand. Not used in decoding.
//!
//! Grid and block are fixed by each kernel (constants below): the operations are those of one warp or one block, so one
//! block is enough, except for indices (a grid of three axes) and atomics (several blocks that meet in global words).
//! Thread `t` owns word `t` of each row of the output, row = operation.

use cuda_std::{
    Element, Global, GlobalMut, Shared, async_copy, bf16, dynamic_shared, kernel, math, mma, static_shared, thread,
    warp,
};

use crate::args::selftest::{SelftestElementsArgs, SelftestMathArgs, SelftestMatrixArgs, SelftestWordsArgs};

/// Threads a block of every kernel but `selftest_matrix`.
pub const THREADS: u32 = 64;
/// Threads of `selftest_matrix`: one warp.
pub const LANES: u32 = warp::WARP;
const BLOCK: usize = THREADS as usize;

/// Rows that `selftest_warp` writes.
pub const WARP_ROWS: usize = 23;

/// One block. Lanes exchange; what only some lanes use is still computed by all.
#[kernel]
pub fn selftest_warp(a: SelftestWordsArgs) {
    let t = thread::thread_idx_x() as usize;
    let x = a.x.get(t);
    let put = |row: usize, v: u32| a.y.set(row * BLOCK + t, v);
    put(0, warp::lane_id());
    put(1, warp::warp_id());
    put(2, warp::shfl(x, t as u32 * 3 + 70));
    put(3, warp::shfl_xor(x, 21));
    put(4, warp::shfl_down(x, 5));
    put(5, warp::shfl_up(x, 5));
    put(6, warp::shfl_down(x, 33));
    put(7, warp::shfl_up(x, 33));
    put(8, warp::ballot(x & 1 == 1));
    put(9, warp::any(x == a.x.get(40)) as u32);
    put(10, warp::all(t < BLOCK / 2) as u32);
    put(11, warp::reduce(x, |p, q| p ^ q));
    put(12, warp::reduce_sum((x & 0xFF) as f32).to_bits());
    put(13, warp::reduce_max(if t.is_multiple_of(4) { f32::NAN } else { -((x & 0xFF) as f32) }).to_bits());
    put(14, warp::inclusive_sum(x));
    put(15, warp::shfl_xor(x as i32, 1) as u32);
    put(16, warp::shfl_xor(x as f32, 1).to_bits());
    // Between lanes through shared memory, with the warp's barrier alone.
    let tile: Shared<u32> = dynamic_shared(0, THREADS);
    tile.set(t, x);
    warp::sync_warp();
    put(17, tile.get(t / 32 * 32 + (t + 1) % 32));
    // Used in a branch that not all lanes take.
    let (swapped, votes) = (warp::shfl_xor(x, 3), warp::ballot(x & 2 == 2));
    if warp::lane_id() < 7 {
        put(18, swapped);
        put(19, votes);
    }
    put(20, warp::max(x));
    put(21, warp::sum(x));
    put(22, warp::min(x));
}

/// Grid, block and dynamic shared memory of `selftest_indices`.
pub const INDICES_GRID: [u32; 3] = [2, 3, 2];
pub const INDICES_BLOCK: [u32; 3] = [4, 2, 8];
/// Words a thread of `selftest_indices` writes.
pub const INDICES_WORDS: usize = 15;

static_shared!(fn selftest_table() -> [u32; THREADS as usize]);
static_shared!(fn selftest_odd() -> [bf16; 3]);

/// A grid of three axes. Each thread writes all that it knows of its place, and what its mirror left in two static
/// arrays and in the dynamic one, which must lie apart.
#[kernel]
pub fn selftest_indices(a: SelftestWordsArgs) {
    let (tx, ty, tz) = (thread::thread_idx_x(), thread::thread_idx_y(), thread::thread_idx_z());
    let (bx, by, bz) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (dx, dy, dz) = (thread::block_dim_x(), thread::block_dim_y(), thread::block_dim_z());
    let (gx, gy, gz) = (thread::grid_dim_x(), thread::grid_dim_y(), thread::grid_dim_z());
    let t = tx + dx * (ty + dy * tz);
    let block = bx + gx * (by + gy * bz);

    let (table, odd, free) = (selftest_table(), selftest_odd(), dynamic_shared::<u32>(0, THREADS));
    table.set(t as usize, t + 1000);
    free.set(t as usize, t + block);
    if t < 3 {
        odd.set(t as usize, math::to_bf16(t as f32));
    }
    thread::sync_threads();
    let mirror = (THREADS - 1 - t) as usize;
    let left = table.get(mirror) + free.get(mirror) * 10_000 + math::from_bf16(odd.get(2)) as u32 * 10_000_000;

    let at = (block * THREADS + t) as usize * INDICES_WORDS;
    let put = |k: usize, v: u32| a.y.set(at + k, v);
    put(0, tx);
    put(1, ty);
    put(2, tz);
    put(3, bx);
    put(4, by);
    put(5, bz);
    put(6, dx);
    put(7, dy);
    put(8, dz);
    put(9, gx);
    put(10, gy);
    put(11, gz);
    put(12, warp::lane_id());
    put(13, warp::warp_id());
    put(14, left);
}

/// Elements of each type in `selftest_elements`.
pub const ELEMENTS: usize = 256;

/// One block. Elements of each size go through shared memory one by one and come back in reverse.
#[kernel]
pub fn selftest_elements(a: SelftestElementsArgs) {
    reverse(a.x_u8, a.y_u8);
    reverse(a.x_u16, a.y_u16);
    reverse(a.x_u32, a.y_u32);
    reverse(a.x_i32, a.y_i32);
    reverse(a.x_u64, a.y_u64);
    reverse(a.x_f32, a.y_f32);
    reverse(a.x_bf16, a.y_bf16);
}

#[inline(always)]
fn reverse<T: Element>(x: Global<T>, y: GlobalMut<T>) {
    let tile: Shared<T> = dynamic_shared(0, ELEMENTS as u32);
    let t = thread::thread_idx_x() as usize;
    for k in 0..ELEMENTS / BLOCK {
        let i = k * BLOCK + t;
        tile.set(i, x.slice(i, 1).get(0));
    }
    thread::sync_threads();
    for k in 0..ELEMENTS / BLOCK {
        let i = k * BLOCK + t;
        y.slice(i, 1).set(0, tile.slice(ELEMENTS - 1 - i, 1).get(0));
    }
    thread::sync_threads();
}

/// Words of `x` in `selftest_wide` and `selftest_async`.
pub const WORDS: usize = 4 * THREADS as usize;
/// Rows that `selftest_wide` writes.
pub const WIDE_ROWS: usize = 24;

/// One block. Loads and stores of 4, 8 and 16 bytes, global and shared, with and without the streaming hint. Thread `t`
/// reads words `4t..4t + 4` and writes rows of the same width.
#[kernel]
pub fn selftest_wide(a: SelftestWordsArgs) {
    let t = thread::thread_idx_x() as usize;
    let at = |row: usize| row * BLOCK + 4 * t;
    a.y.st16(at(0), a.x.ld16(4 * t));
    a.y.st16(at(4), a.x.ld16_stream(4 * t));
    a.y.st8(at(8), a.x.ld8(4 * t + 2));
    a.y.st8(at(8) + 2, a.x.ld8(4 * t));
    a.y.st4(at(12), a.x.ld4(4 * t + 3));
    a.y.set(at(12) + 1, a.y.as_ref().get(at(0)));
    a.y.slice(at(12), 4).st8(2, a.x.slice(4 * t, 4).ld8(0));

    let (words, halves): (Shared<u32>, Shared<bf16>) = (dynamic_shared(0, 256), dynamic_shared(1024, 512));
    words.st16(4 * t, a.x.ld16(4 * t));
    halves.st8(8 * t, a.x.ld8(4 * t));
    halves.st4(8 * t + 4, a.x.ld4(4 * t + 2));
    halves.set(8 * t + 6, bf16::from_bits(t as u16));
    halves.set(8 * t + 7, bf16::from_bits(0x1234));
    thread::sync_threads();
    let m = BLOCK - 1 - t;
    a.y.st16(at(16), words.ld16(4 * m));
    let ([p, q], [r, s]) = (halves.ld8(8 * m), words.ld8(4 * m + 2));
    a.y.st16(at(20), [p, q, halves.ld4(8 * m + 4), halves.ld4(8 * m + 6).wrapping_add(r).wrapping_add(s)]);
}

/// Rows that `selftest_async` writes.
pub const ASYNC_ROWS: usize = 4;
/// Stages of 1 KiB in flight.
const STAGES: usize = 3;

/// One block. Three groups of copies in flight, waited for one by one, then copies of which some store zeros.
#[kernel]
pub fn selftest_async(a: SelftestWordsArgs) {
    let t = thread::thread_idx_x() as usize;
    let tile: Shared<u32> = dynamic_shared(0, (STAGES * WORDS) as u32);
    for stage in 0..STAGES {
        async_copy::cp_async_16(tile, stage * WORDS + 4 * t, a.x, (4 * (t + stage)) % WORDS);
        async_copy::cp_async_commit();
    }
    let look = (t + BLOCK) % WORDS;
    async_copy::cp_async_wait::<2>();
    thread::sync_threads();
    a.y.set(t, tile.get(look));
    async_copy::cp_async_wait::<1>();
    thread::sync_threads();
    a.y.set(BLOCK + t, tile.get(WORDS + look));
    async_copy::cp_async_wait::<0>();
    thread::sync_threads();
    a.y.set(2 * BLOCK + t, tile.get(2 * WORDS + look));

    // Every reader of stage 0 has passed two barriers: it may be filled again.
    let valid = !t.is_multiple_of(3);
    let from = if valid { 4 * t } else { 1 << 40 };
    async_copy::cp_async_16_or_zero(tile, 4 * t, a.x, from, valid);
    async_copy::cp_async_commit();
    async_copy::cp_async_wait::<0>();
    thread::sync_threads();
    a.y.set(3 * BLOCK + t, tile.get(4 * (BLOCK - 1 - t) + 3));
}

/// Blocks of `selftest_atomics`.
pub const ATOMIC_BLOCKS: u32 = 6;
/// Words that `selftest_atomics` updates, all zero before but word 2, which is the largest: counters, then two words a
/// thread (how often its number was seen, what the shared atomics left), then one a block.
pub const ATOMIC_WORDS: usize = COUNTERS + 2 * (ATOMIC_BLOCKS * THREADS) as usize + ATOMIC_BLOCKS as usize;
const COUNTERS: usize = 16;
/// Shared words of `selftest_atomics` beside one a thread.
pub const ATOMIC_EXTRA: u32 = 4;

/// Several blocks that meet in global words; what `atomic_add` returned is counted, so each old value is seen once. The
/// last block to come sums what all left before.
#[kernel]
pub fn selftest_atomics(a: SelftestWordsArgs) {
    let t = thread::thread_idx_x() as usize;
    let (block, threads) = (thread::block_idx_x() as usize, (ATOMIC_BLOCKS * THREADS) as usize);
    let i = (block * BLOCK + t) as u32;
    let (y, seen) = (a.y, COUNTERS);
    y.atomic_add(seen + y.atomic_add(0, 1) as usize, 1);
    y.atomic_max(1, i);
    y.atomic_min(2, i + 5);
    y.atomic_or(3, 1 << (i % 32));
    y.atomic_add(5, y.atomic_exch(4, i + 1));
    if y.atomic_cas(6, 0, i + 1) == 0 {
        y.atomic_add(7, 1);
    }

    let tile: Shared<u32> = dynamic_shared(0, THREADS + ATOMIC_EXTRA);
    tile.set(t, 0);
    if t < ATOMIC_EXTRA as usize {
        tile.set(BLOCK + t, 0);
    }
    thread::sync_threads();
    tile.atomic_add(tile.atomic_add(BLOCK, 1) as usize, 1);
    tile.atomic_max(BLOCK + 1, t as u32 * 3);
    tile.atomic_or(BLOCK + 2, 1 << (t % 20));
    thread::sync_threads();
    let left = tile.get(t) * (tile.get(BLOCK) + 1000 * tile.get(BLOCK + 1) + (tile.get(BLOCK + 2) << 20 >> 20));
    y.set(seen + threads + block * BLOCK + t, left);

    // The last block: everyone's word is visible when all have been counted after a fence.
    thread::fence_device();
    thread::sync_threads();
    if t == 0 {
        tile.set(BLOCK + 3, y.atomic_add(8, 1));
    }
    thread::sync_threads();
    if tile.get(BLOCK + 3) == ATOMIC_BLOCKS - 1 {
        thread::fence_device();
        if t < ATOMIC_BLOCKS as usize {
            let mut sum = 0;
            for k in 0..BLOCK {
                sum += y.get(seen + threads + t * BLOCK + k);
            }
            y.set(seen + 2 * threads + t, sum);
        }
    }
}

/// Rows that `selftest_barriers` writes: one a hand-over, then one by each warp alone, one by all.
pub const BARRIER_ROWS: usize = HAND_OVERS as usize + 2;
const HAND_OVERS: u32 = 4;

/// One block. The first warp hands words to the second through one array, again and again: it comes to one numbered
/// barrier and waits at another. Then each warp meets alone, and both meet, at barriers of other numbers.
#[kernel]
pub fn selftest_barriers(a: SelftestWordsArgs) {
    const FULL: u32 = 1;
    const EMPTY: u32 = 2;
    const OWN: u32 = 14;
    let t = thread::thread_idx_x() as usize;
    let (lane, second) = (t % LANES as usize, t >= LANES as usize);
    let tile: Shared<u32> = dynamic_shared(0, THREADS);
    for round in 0..HAND_OVERS {
        if second {
            thread::sync_numbered(FULL, THREADS);
            let found = tile.get(LANES as usize - 1 - lane);
            a.y.set(round as usize * BLOCK + t, found);
            if round + 1 < HAND_OVERS {
                thread::arrive_numbered(EMPTY, THREADS);
            }
        } else {
            if round > 0 {
                thread::sync_numbered(EMPTY, THREADS);
            }
            tile.set(lane, a.x.get(lane).wrapping_mul(round + 1));
            thread::arrive_numbered(FULL, THREADS);
        }
    }
    thread::sync_threads();
    tile.set(t, a.x.get(t));
    thread::sync_numbered(OWN + second as u32, LANES);
    a.y.set(HAND_OVERS as usize * BLOCK + t, tile.get(t ^ 1));
    thread::sync_numbered(FULL, THREADS);
    a.y.set((HAND_OVERS as usize + 1) * BLOCK + t, tile.get(BLOCK - 1 - t));
}

/// Rows that stay unwritten in the third product of `selftest_matrix`: those from here on.
pub const STORED_ROWS: usize = 5;

/// One warp. The tiles go to shared memory by rows and by columns; fragments come back through each `ldmatrix`, and the
/// product is made of both kinds.
#[kernel]
pub fn selftest_matrix(a: SelftestMatrixArgs) {
    const SIZE: usize = 16;
    const COLUMNS: usize = 8;
    let lane = thread::thread_idx_x() as usize;
    let rows: Shared<bf16> = dynamic_shared(0, 256);
    let turned: Shared<bf16> = dynamic_shared(512, 256);
    let (b_columns, b_rows): (Shared<bf16>, Shared<bf16>) = (dynamic_shared(1024, 128), dynamic_shared(1280, 128));
    for k in 0..256 / LANES as usize {
        let i = k * LANES as usize + lane;
        rows.set(i, a.a.get(i));
        turned.set(i % SIZE * SIZE + i / SIZE, a.a.get(i));
    }
    for k in 0..128 / LANES as usize {
        let i = k * LANES as usize + lane;
        b_columns.set(i, a.b.get(i));
        b_rows.set(i % SIZE * COLUMNS + i / SIZE, a.b.get(i));
    }
    warp::sync_warp();

    // Quarters of A in the order of the operand: rows 0.. and 8.. of columns 0.., then of columns 8.. .
    let x4 = mma::ldmatrix_x4(rows, lane % SIZE * SIZE + lane / SIZE * COLUMNS);
    // Turned, those quarters lie at columns 0.. and 8.. of rows 0.., then of rows 8.. .
    let x4t = mma::ldmatrix_x4_trans(turned, (lane % 8 + lane / 16 * 8) * SIZE + lane / 8 % 2 * COLUMNS);
    let x2 = mma::ldmatrix_x2(b_columns, lane % 8 * SIZE + lane / 8 % 2 * COLUMNS);
    let x2t = mma::ldmatrix_x2_trans(b_rows, lane % SIZE * COLUMNS);
    let put = |row: usize, v: u32| a.fragments.set(row * LANES as usize + lane, v);
    put(0, x4[0]);
    put(1, x4[1]);
    put(2, x4[2]);
    put(3, x4[3]);
    put(4, x4t[0]);
    put(5, x4t[1]);
    put(6, x4t[2]);
    put(7, x4t[3]);
    put(8, x2[0]);
    put(9, x2[1]);
    put(10, x2t[0]);
    put(11, x2t[1]);

    let (g, c) = (lane / 4, lane % 4 * 2);
    let place = |i: usize| (g + i / 2 * 8) * COLUMNS + c + i % 2;
    let c4 = [a.c.get(place(0)), a.c.get(place(1)), a.c.get(place(2)), a.c.get(place(3))];
    let (mut first, mut second, mut third) = (c4, c4, c4);
    mma::mma_m16n8k16(&mut first, x4, x2);
    mma::mma_m16n8k16(&mut second, x4t, x2t);
    mma::mma_m16n8k16(&mut third, x4, x2t);
    let tile = SIZE * COLUMNS;
    a.d.set(place(0), first[0]);
    a.d.set(place(1), first[1]);
    a.d.set(place(2), first[2]);
    a.d.set(place(3), first[3]);
    a.d.set(tile + place(0), second[0]);
    a.d.set(tile + place(1), second[1]);
    a.d.set(tile + place(2), second[2]);
    a.d.set(tile + place(3), second[3]);
    // A product that only some lanes store is still the whole warp's.
    if g < STORED_ROWS {
        a.d.set(2 * tile + place(0), third[0]);
        a.d.set(2 * tile + place(1), third[1]);
    }
}

/// Rows that `selftest_math` writes.
pub const MATH_ROWS: usize = 27;

/// Blocks of `THREADS` over `n` numbers: each thread does every operation on one of them.
#[kernel]
pub fn selftest_math(a: SelftestMathArgs) {
    let i = (thread::block_idx_x() * THREADS + thread::thread_idx_x()) as usize;
    let n = a.n as usize;
    if i < n {
        let (x, y, w) = (a.x.get(i), a.y.get(i), a.words.get(i));
        let put = |row: usize, v: u32| a.out.set(row * n + i, v);
        put(0, math::exp2(x).to_bits());
        put(1, math::log2(x).to_bits());
        put(2, math::rsqrt(x).to_bits());
        put(3, math::sqrt(x).to_bits());
        put(4, math::exp(x).to_bits());
        put(5, math::ln(x).to_bits());
        put(6, math::sigmoid(x).to_bits());
        put(7, math::silu(x).to_bits());
        put(8, math::fma(x, y, -x).to_bits());
        put(9, math::to_bf16(x).to_bits() as u32);
        put(10, math::pack_bf16(x, y));
        put(11, math::bf16_lo(w).to_bits());
        put(12, math::bf16_hi(w).to_bits());
        put(13, math::from_bf16(bf16::from_bits(w as u16)).to_bits());
        let [p, q, r, s] = math::dequant_pairs(w);
        put(14, p);
        put(15, q);
        put(16, r);
        put(17, s);
        put(18, math::div(x.to_bits(), w));
        put(19, math::rem(x.to_bits(), w));
        let wide = (x.to_bits() as usize) << 20 | y.to_bits() as usize;
        put(20, math::div_usize(wide, w as usize) as u32);
        put(21, math::rem_usize(wide, w as usize) as u32);
        let [p, q, r, s] = math::dequant_quarters(w);
        put(22, p);
        put(23, q);
        put(24, r);
        put(25, s);
        put(26, math::ceil(x).to_bits());
    }
}
