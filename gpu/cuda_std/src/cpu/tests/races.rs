//! Planted races: missing barriers and waits are caught and named, sound kernels are not.

use super::{Args, faults, me, run, sound};
use crate::cpu::FaultKind;
use crate::{Shared, async_copy, dynamic_shared, thread, warp};

fn rotate(a: Args, barrier: bool) {
    let tile: Shared<u32> = dynamic_shared(0, 64);
    tile.set(me(), a.x.get(me()));
    if barrier {
        thread::sync_threads();
    }
    a.y.set(thread::block_idx_x() as usize * 64 + me(), tile.get((me() + 33) % 64));
}

#[test]
fn shared_memory_with_a_barrier() {
    for seed in 0..20 {
        let y = run(|a| rotate(a, true), seed).unwrap();
        assert!((0..128).all(|i| y[i] as usize == (i % 64 + 33) % 64));
    }
}

#[test]
fn missing_barrier_is_named() {
    for seed in 0..20 {
        let fault = run(|a| rotate(a, false), seed).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
        let text = fault.to_string();
        assert!(text.starts_with("kernel `planted`, block (") && text.contains("), thread ("), "{text}");
    }
}

fn copy(a: Args, wait: bool) {
    let tile: Shared<u32> = dynamic_shared(0, 256);
    async_copy::cp_async_16(tile, me() * 4, a.x, me() * 4);
    async_copy::cp_async_commit();
    if wait {
        async_copy::cp_async_wait::<0>();
    }
    thread::sync_threads();
    a.y.set(me(), tile.get(255 - me()));
}

#[test]
fn missing_async_wait_is_named() {
    assert_eq!(run(|a| copy(a, true), 1).unwrap()[5], 250);
    let fault = run(|a| copy(a, false), 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::AsyncPending, "{fault}");
    assert!(fault.thread.is_some());
}

#[test]
fn another_threads_copy_is_not_waited_for() {
    // Thread 63 forgets its wait: whoever reads its bytes is told, whatever else is waited for.
    let forgets = |a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 256);
        async_copy::cp_async_16(tile, me() * 4, a.x, me() * 4);
        async_copy::cp_async_commit();
        if me() != 63 {
            async_copy::cp_async_wait::<0>();
        }
        thread::sync_threads();
        a.y.set(me(), tile.get(255 - me()));
    };
    let fault = faults(forgets, &[FaultKind::AsyncPending]);
    assert!(fault.what.contains("thread 63's asynchronous copy"), "{fault}");
}

#[test]
fn a_wait_without_a_barrier_is_not_enough_for_others() {
    let hurries = |a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 256);
        async_copy::cp_async_16(tile, me() * 4, a.x, me() * 4);
        async_copy::cp_async_commit();
        async_copy::cp_async_wait::<0>();
        a.y.set(me(), tile.get((me() * 4 + 4) % 256));
    };
    faults(hurries, &[FaultKind::AsyncPending, FaultKind::Race, FaultKind::Uninitialised]);
    // Its own bytes a thread may read at once.
    sound(|a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 256);
        async_copy::cp_async_16(tile, me() * 4, a.x, me() * 4);
        async_copy::cp_async_commit();
        async_copy::cp_async_wait::<0>();
        a.y.set(me(), tile.get(me() * 4 + 3));
    });
}

/// Two rounds through one stage; `barrier` before it is filled again.
fn refill(a: Args, barrier: bool) {
    let tile: Shared<u32> = dynamic_shared(0, 256);
    for round in 0..2 {
        if round > 0 && barrier {
            thread::sync_threads();
        }
        async_copy::cp_async_16(tile, me() * 4, a.x, me() * 4);
        async_copy::cp_async_commit();
        async_copy::cp_async_wait::<0>();
        thread::sync_threads();
        a.y.set(me(), tile.get((me() * 4 + 40) % 256));
    }
}

#[test]
fn a_stage_refilled_without_a_barrier_is_named() {
    sound(|a| refill(a, true));
    faults(|a| refill(a, false), &[FaultKind::Race, FaultKind::AsyncPending]);
}

#[test]
fn a_wait_that_leaves_too_many_groups_is_named() {
    let leaves = |a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 512);
        for stage in 0..2 {
            async_copy::cp_async_16(tile, stage * 256 + me() * 4, a.x, me() * 4);
            async_copy::cp_async_commit();
        }
        async_copy::cp_async_wait::<1>();
        thread::sync_threads();
        // Stage 0 has landed, stage 1 has not.
        a.y.set(me(), tile.get(me()) + tile.get(256 + me()));
    };
    assert_eq!(faults(leaves, &[FaultKind::AsyncPending]).kind, FaultKind::AsyncPending);
}

/// Each lane leaves a word for its neighbour, twice through one buffer.
fn neighbours(a: Args, barriers: bool) {
    let tile: Shared<u32> = dynamic_shared(0, 64);
    let next = me() / 32 * 32 + (me() + 1) % 32;
    for round in 0..2 {
        tile.set(me(), a.x.get(me()) + round);
        if barriers {
            warp::sync_warp();
        }
        a.y.set(me(), tile.get(next));
        if barriers {
            warp::sync_warp();
        }
        // Its own word a lane may read, and write again, after its neighbour has read it.
        tile.set(me(), tile.get(me()) + 1);
    }
}

#[test]
fn a_warps_own_exchange_needs_its_barriers_and_no_more() {
    sound(|a| neighbours(a, true));
    faults(|a| neighbours(a, false), &[FaultKind::Race, FaultKind::Uninitialised]);
    // A warp's barrier orders nothing for another warp.
    let across = |a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 64);
        tile.set(me(), 1);
        warp::sync_warp();
        a.y.set(me(), tile.get((me() + 32) % 64));
    };
    faults(across, &[FaultKind::Race, FaultKind::Uninitialised]);
}

#[test]
fn two_writers_of_one_word_are_named() {
    faults(|_| dynamic_shared::<u32>(0, 64).set(me() / 2, 1), &[FaultKind::Race]);
    faults(|_| dynamic_shared::<u32>(0, 64).set(0, 1), &[FaultKind::Race]);
}

#[test]
fn shared_bytes_that_nothing_wrote_are_named() {
    let fault = faults(
        |a| {
            let tile: Shared<u32> = dynamic_shared(0, 65);
            tile.set(me(), 1);
            thread::sync_threads();
            a.y.set(me(), tile.get(me() + 1));
        },
        &[FaultKind::Uninitialised],
    );
    assert_eq!(fault.thread, Some([63, 0, 0]), "{fault}");
    faults(
        |_| {
            dynamic_shared::<u32>(0, 1).atomic_add(0, 1);
        },
        &[FaultKind::Uninitialised],
    );
}

/// All add to one word; `when` is where thread 7 reads it plainly: 0 never, 1 among them, 2 after a barrier.
fn count(a: Args, when: u32) {
    let tile: Shared<u32> = dynamic_shared(0, 1);
    if me() == 0 {
        tile.set(0, 0);
    }
    thread::sync_threads();
    tile.atomic_add(0, 1);
    if when == 1 && me() == 7 {
        a.y.set(1, tile.get(0));
    }
    thread::sync_threads();
    if when == 2 && me() == 7 {
        a.y.set(1, tile.get(0));
    }
}

#[test]
fn atomics_race_with_plain_accesses_alone() {
    sound(|a| count(a, 0));
    sound(|a| count(a, 2));
    faults(|a| count(a, 1), &[FaultKind::Race]);
    faults(
        |_| {
            let tile: Shared<u32> = dynamic_shared(0, 1);
            if me() == 5 {
                tile.set(0, 0);
            }
            warp::sync_warp();
            tile.atomic_max(0, 1);
        },
        &[FaultKind::Race, FaultKind::Uninitialised],
    );
}
