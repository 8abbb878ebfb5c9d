//! Memory, atomics and copies against values worked out by hand.

use super::{Args, gives, global, me, run_in};
use crate::cpu::Mode;
use crate::{Element, Global, GlobalMut, Shared, async_copy, bf16, dynamic_shared, static_shared, thread};

static_shared!(fn tests_table() -> [u32; 64]);
static_shared!(fn tests_other() -> [bf16; 3]);

#[test]
fn wide_loads_and_stores_move_words_in_order() {
    gives(
        |a| {
            if me() < 16 && thread::block_idx_x() == 0 {
                let i = me() * 4;
                let [p, q, r, s] = a.x.ld16(i);
                let [t, u] = a.x.ld8(i + 2);
                let [v, w, _, z] = a.x.ld16_stream(i);
                a.y.st16(i, [s, r, q, p]);
                a.y.st8(64 + i, [u, t]);
                a.y.st4(66 + i, v + w + z);
                a.y.set(67 + i, a.x.ld4(i + 1) + a.x.slice(i, 4).get(3) + a.y.as_ref().get(i));
            }
        },
        |i| {
            let i = i as u32;
            match (i / 64, i % 4) {
                (0, k) => i / 4 * 4 + 3 - k,
                (1, 0) => i - 64 + 3,
                (1, 1) => i - 65 + 2,
                (1, 2) => 3 * (i - 66) + 4,
                (1, _) => 3 * (i - 67) + 7,
                _ => 0,
            }
        },
    );
}

/// A view of the same bytes with other elements.
fn as_elements<T: Element>(x: Global<u32>) -> Global<T> {
    Global::from_raw(x.addr(), x.len() * 4 / size_of::<T>())
}

fn as_elements_mut<T: Element>(y: GlobalMut<u32>) -> GlobalMut<T> {
    GlobalMut::from_raw(y.addr(), y.len() * 4 / size_of::<T>())
}

/// Copies elements one by one through shared memory, in reverse.
fn through<T: Element>(a: Args) {
    let (x, y) = (as_elements::<T>(a.x), as_elements_mut::<T>(a.y));
    let n = 256 / size_of::<T>();
    let tile: Shared<T> = dynamic_shared(256, n as u32);
    assert_eq!((tile.len(), tile.is_empty()), (n, false));
    let mut i = me();
    while i < n {
        tile.set(n - 1 - i, x.get(i));
        i += 64;
    }
    thread::sync_threads();
    let mut i = me();
    while i < n {
        let v = tile.slice(n - 1 - i, i + 1).get(0);
        if thread::block_idx_x() == 0 {
            y.set(i, v);
        }
        i += 64;
    }
}

#[test]
fn elements_of_every_size() {
    let copy = |i: usize| if i < 64 { i as u32 } else { 0 };
    gives(through::<u8>, copy);
    gives(through::<u16>, copy);
    gives(through::<bf16>, copy);
    gives(through::<u32>, copy);
    gives(through::<i32>, copy);
    gives(through::<f32>, copy);
    gives(through::<u64>, copy);
}

#[test]
fn shared_memory_in_wide_pieces() {
    gives(
        |a| {
            let (tile, half): (Shared<u32>, Shared<bf16>) = (dynamic_shared(0, 256), dynamic_shared(1024, 512));
            let i = me() as u32;
            tile.st16(me() * 4, [i, i + 100, i + 200, i + 300]);
            half.st8(me() * 8, [i, !i]);
            half.st4(me() * 8 + 4, i + 7);
            half.set(me() * 8 + 6, bf16::from_bits(i as u16));
            half.set(me() * 8 + 7, bf16::from_bits(1));
            thread::sync_threads();
            let j = 63 - me();
            let [p, q, r, s] = tile.ld16(j * 4);
            let [t, u] = tile.ld8(j * 4 + 2);
            let [v, w] = half.ld8(j * 8);
            let (z, last) = (half.ld4(j * 8 + 4), half.ld4(j * 8 + 6));
            let mix =
                [p, q, r, s, t, u, v, w, z, last].into_iter().fold(0u32, |m, v| m.wrapping_mul(31).wrapping_add(v));
            a.y.set(global(), mix);
        },
        |i| {
            let j = 63 - i as u32 % 64;
            let all = [j, j + 100, j + 200, j + 300, j + 200, j + 300, j, !j, j + 7, 1 << 16 | j];
            if i < 128 { all.into_iter().fold(0u32, |m, v| m.wrapping_mul(31).wrapping_add(v)) } else { 0 }
        },
    );
}

#[test]
fn static_and_dynamic_shared_arrays_lie_apart() {
    gives(
        |a| {
            let (table, other, free) = (tests_table(), tests_other(), dynamic_shared::<u32>(0, 1024));
            (0..16).for_each(|k| free.set(k * 64 + me(), 7));
            table.set(me(), me() as u32);
            if me() < 3 {
                other.set(me(), bf16::from_f32(me() as f32));
            }
            thread::sync_threads();
            let sum = (0..16).map(|k| free.get(k * 64 + 63 - me())).sum::<u32>();
            a.y.set(global(), sum + table.get(63 - me()) * 1000 + other.get(2).to_f32() as u32 * 100_000);
        },
        |i| if i < 128 { 112 + (63 - i as u32 % 64) * 1000 + 200_000 } else { 0 },
    );
}

#[test]
fn a_blocks_barrier_orders_shared_memory() {
    gives(
        |a| {
            let tile: Shared<u32> = dynamic_shared(0, 64);
            tile.set(me(), a.x.get(me()));
            // Three rotations by 33, a barrier on either side of each.
            for _ in 0..3 {
                thread::sync_threads();
                let v = tile.get((me() + 33) % 64);
                thread::sync_threads();
                tile.set(me(), v);
            }
            a.y.set(global(), tile.get(me()));
        },
        |i| if i < 128 { (i as u32 + 99) % 64 } else { 0 },
    );
}

#[test]
fn global_atomics_give_what_was_there() {
    for mode in [Mode::Checked { seed: 5 }, Mode::Fast] {
        let entry = |a: Args| {
            let i = global() as u32;
            // Each old value of a counter is seen once.
            a.y.atomic_add(10 + a.y.atomic_add(0, 1) as usize, 1);
            a.y.atomic_max(1, i);
            a.y.atomic_min(2, u32::MAX - i);
            a.y.atomic_or(3, 1 << (i % 32));
            // What is exchanged in comes out again, but for the last.
            a.y.atomic_add(5, a.y.atomic_exch(4, i + 1));
            // One of all wins.
            if a.y.atomic_cas(6, 0, i + 1) == 0 {
                a.y.atomic_add(7, 1);
            }
            thread::fence_device();
        };
        let y = run_in(mode, [2, 1, 1], [64, 1, 1], &[0; 4], entry).unwrap();
        assert_eq!((y[0], y[1], y[2], y[3]), (128, 127, 0, u32::MAX));
        assert_eq!(y[4] + y[5], 128 * 129 / 2);
        assert!((1..=128).contains(&y[6]) && y[7] == 1);
        assert!(y[10..138].iter().all(|&n| n == 1) && y[138..].iter().all(|&n| n == 0));
    }
}

#[test]
fn shared_atomics_give_what_was_there() {
    gives(
        |a| {
            let tile: Shared<u32> = dynamic_shared(0, 68);
            tile.set(me(), 0);
            if me() < 4 {
                tile.set(64 + me(), 0);
            }
            thread::sync_threads();
            tile.atomic_add(tile.atomic_add(64, 1) as usize, 1);
            tile.atomic_max(65, me() as u32 * 3);
            tile.atomic_or(66, 1 << (me() % 20));
            thread::sync_threads();
            let sums = tile.get(64) + 1000 * tile.get(65) + (tile.get(66) << 20 >> 20);
            a.y.set(global(), sums * tile.get(me()));
        },
        |i| if i < 128 { 64 + 1000 * 189 + 0xFFF } else { 0 },
    );
}

#[test]
fn copies_land_group_by_group() {
    gives(
        |a| {
            let tile: Shared<u32> = dynamic_shared(0, 768);
            for stage in 0..3 {
                async_copy::cp_async_16(tile, stage * 256 + me() * 4, a.x, (me() * 4 + stage * 4) % 256);
                async_copy::cp_async_commit();
            }
            let mut sum = 0;
            async_copy::cp_async_wait::<2>();
            thread::sync_threads();
            sum += tile.get((me() + 64) % 256);
            async_copy::cp_async_wait::<1>();
            thread::sync_threads();
            sum += 1000 * tile.get(256 + (me() + 64) % 256);
            async_copy::cp_async_wait::<0>();
            thread::sync_threads();
            sum += 1_000_000 * tile.get(512 + (me() + 64) % 256);
            a.y.set(global(), sum);
        },
        |i| {
            let at = i as u32 % 64 + 64;
            if i < 128 { at + 1000 * (at + 4) + 1_000_000 * (at + 8) } else { 0 }
        },
    );
}

#[test]
fn copies_that_are_not_valid_store_zeros() {
    gives(
        |a| {
            let tile: Shared<u32> = dynamic_shared(0, 256);
            (0..4).for_each(|k| tile.set(me() * 4 + k, 9));
            // An index far outside may be named as long as nothing is read there.
            let valid = !me().is_multiple_of(3);
            async_copy::cp_async_16_or_zero(tile, me() * 4, a.x, if valid { me() * 4 } else { 1 << 40 }, valid);
            async_copy::cp_async_commit();
            async_copy::cp_async_wait::<0>();
            a.y.set(global(), tile.get(me() * 4) + tile.get(me() * 4 + 3));
        },
        |i| {
            let i = (i < 128).then_some(i as u32 % 64);
            i.map_or(0, |i| if i % 3 == 0 { 0 } else { 8 * i + 3 })
        },
    );
}
