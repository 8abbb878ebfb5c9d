//! Barriers in shared memory and bulk copies: sound kernels, and planted faults that are caught and named.

use super::{Args, faults, gives, me, run, sound};
use crate::bulk::{Barriers, copy_once, fence_init};
use crate::cpu::FaultKind;
use crate::{Shared, dynamic_shared, thread, warp};

/// Words of a copy, and copies that follow each other.
const PART: usize = 32;
const PARTS: usize = 8;

fn tile() -> Shared<u32> {
    dynamic_shared(64, 2 * PART as u32)
}

/// Two barriers of one arrival each.
fn ring() -> Barriers {
    let barriers = Barriers::new(dynamic_shared(0, 2));
    if me() == 0 {
        barriers.init(0, 1);
        barriers.init(1, 1);
        fence_init();
    }
    thread::sync_threads();
    barriers
}

fn fetch(a: Args, barriers: Barriers, part: usize) {
    if me() == 0 {
        barriers.arrive_expecting(part % 2, 4 * PART as u32);
        copy_once(tile(), part % 2 * PART, a.x, part * PART, PART, barriers, part % 2);
    }
}

/// Parts of x through a ring of two stages; every thread reads all of each.
fn stream(a: Args, waits: bool, meets: bool) {
    let barriers = ring();
    fetch(a, barriers, 0);
    let mut sum = 0;
    for part in 0..PARTS {
        if part + 1 < PARTS {
            fetch(a, barriers, part + 1);
        }
        if waits {
            barriers.wait(part % 2, part as u32 / 2 % 2);
        }
        for i in 0..PART {
            sum += tile().get(part % 2 * PART + i);
        }
        if meets {
            thread::sync_threads();
        }
    }
    a.y.set(thread::block_idx_x() as usize * 64 + me(), sum);
}

#[test]
fn a_ring_of_two_stages() {
    gives(|a| stream(a, true, true), |i| if i < 128 { 255 * 256 / 2 } else { 0 });
}

#[test]
fn a_missing_wait_is_named() {
    // Who runs before thread 0 has started the copy reads what nothing has written.
    faults(|a| stream(a, false, true), &[FaultKind::AsyncPending, FaultKind::Uninitialised]);
}

#[test]
fn a_stage_filled_while_it_is_read_is_named() {
    // Who falls two phases behind waits for a parity that does not come back.
    faults(|a| stream(a, true, false), &[FaultKind::Race, FaultKind::AsyncPending, FaultKind::Divergence]);
}

#[test]
fn a_barrier_must_be_made_first() {
    let fault = faults(
        |_| {
            let barriers = Barriers::new(dynamic_shared(0, 1));
            barriers.wait(0, 0);
        },
        &[FaultKind::Uninitialised],
    );
    assert!(fault.what.contains("shared byte 0 as a barrier"), "{fault}");
}

#[test]
fn too_few_bytes_never_end_a_phase() {
    let short = |a: Args| {
        let barriers = ring();
        if me() == 0 {
            barriers.arrive_expecting(0, 256);
            copy_once(tile(), 0, a.x, 0, PART, barriers, 0);
        }
        barriers.wait(0, 0);
    };
    let fault = faults(short, &[FaultKind::Divergence]);
    assert!(fault.what.contains("at a barrier in shared memory"), "{fault}");
}

#[test]
fn one_arrival_too_many_is_named() {
    let twice = |_: Args| {
        let barriers = ring();
        barriers.arrive(0);
    };
    let fault = faults(twice, &[FaultKind::Divergence]);
    assert!(fault.what.contains("once more than its phase has arrivals"), "{fault}");
}

#[test]
fn a_block_that_ends_before_its_copies_is_named() {
    let hurries = |a: Args| {
        let barriers = ring();
        fetch(a, barriers, 0);
    };
    let fault = faults(hurries, &[FaultKind::AsyncPending]);
    assert!(fault.what.contains("ends while a bulk copy of 128 bytes"), "{fault}");
}

#[test]
fn copies_stay_inside_their_views() {
    let beyond = |a: Args| {
        let barriers = ring();
        if me() == 0 {
            copy_once(tile(), 0, a.x, 240, PART, barriers, 0);
        }
    };
    faults(beyond, &[FaultKind::OutOfBounds]);
    let crooked = |a: Args| {
        let barriers = ring();
        if me() == 0 {
            copy_once(tile(), 0, a.x, 1, PART, barriers, 0);
        }
    };
    faults(crooked, &[FaultKind::OutOfBounds]);
    let odd = |a: Args| {
        let barriers = ring();
        if me() == 0 {
            copy_once(tile(), 0, a.x, 0, PART + 1, barriers, 0);
        }
    };
    faults(odd, &[FaultKind::OutOfBounds]);
}

/// What goes wrong between a warp that fills a stage and one that reads it.
#[derive(Clone, Copy, PartialEq)]
enum Planted {
    Nothing,
    /// The stage is filled again at once.
    NoWaitForEmpty,
    /// A lane of the reading warp arrives for all, who have not met.
    NoWarpBarrier,
    /// The reading warp arrives before it has read.
    ArrivesEarly,
    /// One lane waits for the stage, and the others do not meet it.
    OneWaits,
}

/// Warp 0 fills one stage, all threads read it, a lane of each warp arrives at the barrier that says it is empty.
fn stages(a: Args, planted: Planted) {
    let barriers = Barriers::new(dynamic_shared(0, 2));
    if me() == 0 {
        barriers.init(0, 1);
        barriers.init(1, 2);
        fence_init();
    }
    thread::sync_threads();
    let leave = || {
        if planted != Planted::NoWarpBarrier {
            warp::sync_warp();
        }
        if me().is_multiple_of(32) {
            barriers.arrive(1);
        }
    };
    let mut sum = 0;
    for part in 0..PARTS {
        if me() == 0 {
            if part > 0 && planted != Planted::NoWaitForEmpty {
                barriers.wait(1, (part as u32 - 1) % 2);
            }
            barriers.arrive_expecting(0, 4 * PART as u32);
            copy_once(tile(), 0, a.x, part * PART, PART, barriers, 0);
        }
        if planted != Planted::OneWaits || me().is_multiple_of(32) {
            barriers.wait(0, part as u32 % 2);
        }
        if planted == Planted::ArrivesEarly {
            leave();
        }
        for i in 0..PART {
            sum += tile().get(i);
        }
        if planted != Planted::ArrivesEarly {
            leave();
        }
    }
    a.y.set(thread::block_idx_x() as usize * 64 + me(), sum);
}

#[test]
fn a_stage_that_warps_leave_one_by_one() {
    gives(|a| stages(a, Planted::Nothing), |i| if i < 128 { 255 * 256 / 2 } else { 0 });
}

#[test]
fn stages_that_are_filled_or_read_too_early_are_named() {
    const KINDS: &[FaultKind] = &[FaultKind::Race, FaultKind::AsyncPending, FaultKind::Divergence];
    faults(|a| stages(a, Planted::NoWaitForEmpty), KINDS);
    faults(|a| stages(a, Planted::NoWarpBarrier), KINDS);
    faults(|a| stages(a, Planted::ArrivesEarly), KINDS);
    let kinds = [KINDS, &[FaultKind::Uninitialised]].concat();
    faults(|a| stages(a, Planted::OneWaits), &kinds);
}

/// All threads write, `arrives` says who arrives at a barrier of that many, thread 63 waits there and then reads what
/// thread 5 wrote.
fn gather(a: Args, arrivals: u32, arrives: fn(usize) -> bool) {
    let barriers = Barriers::new(dynamic_shared(0, 1));
    if me() == 0 {
        barriers.init(0, arrivals);
        fence_init();
    }
    thread::sync_threads();
    tile().set(me(), 1 + me() as u32);
    if arrives(me()) {
        barriers.arrive(0);
    }
    if me() == 63 {
        barriers.wait(0, 0);
        a.y.set(0, tile().get(5));
    }
}

#[test]
fn only_those_who_arrived_have_been_waited_for() {
    for seed in 0..20 {
        assert_eq!(run(|a| gather(a, 64, |_| true), seed).unwrap()[0], 6);
        assert_eq!(run(|a| gather(a, 2, |t| t == 5 || t == 40), seed).unwrap()[0], 6);
    }
    faults(|a| gather(a, 63, |t| t != 5), &[FaultKind::Race, FaultKind::Uninitialised]);
    faults(|a| gather(a, 1, |t| t == 40), &[FaultKind::Race, FaultKind::Uninitialised]);
    // Its warp has not met.
    faults(|a| gather(a, 2, |t| t == 4 || t == 40), &[FaultKind::Race, FaultKind::Uninitialised]);
}

/// Thread 63 alone has waited, and all meet; then neighbours exchange words, with a barrier of the block or without.
fn later_rounds(a: Args, meets: bool) {
    gather(a, 2, |t| t == 5 || t == 40);
    thread::sync_threads();
    let next: Shared<u32> = dynamic_shared(1024, 64);
    for round in 0..3 {
        next.set(me(), round);
        if meets {
            thread::sync_threads();
        }
        a.y.set(1 + me(), next.get((me() + 1) % 64));
        thread::sync_threads();
    }
}

#[test]
fn some_threads_waits_hide_no_later_race_and_make_none() {
    sound(|a| later_rounds(a, true));
    faults(|a| later_rounds(a, false), &[FaultKind::Race, FaultKind::Uninitialised]);
}

#[test]
fn a_copy_is_seen_by_who_has_waited_alone() {
    // Thread 40 has not waited, and met nobody who has.
    let peeks = |a: Args| {
        let barriers = ring();
        fetch(a, barriers, 0);
        if me() != 40 {
            barriers.wait(0, 0);
        }
        a.y.set(me(), tile().get(me() % PART));
    };
    faults(peeks, &[FaultKind::Race, FaultKind::AsyncPending, FaultKind::Uninitialised]);
    // It meets its warp, or the block.
    sound(|a| {
        let barriers = ring();
        fetch(a, barriers, 0);
        if me().is_multiple_of(32) {
            barriers.wait(0, 0);
        }
        warp::sync_warp();
        a.y.set(me(), tile().get(me() % PART));
    });
    sound(|a| {
        let barriers = ring();
        fetch(a, barriers, 0);
        if me() == 63 {
            barriers.wait(0, 0);
        }
        thread::sync_threads();
        a.y.set(me(), tile().get(me() % PART));
    });
}

#[test]
fn a_barrier_is_made_before_others_use_it() {
    let hurries = |_: Args| {
        let barriers = Barriers::new(dynamic_shared(0, 1));
        if me() == 0 {
            barriers.init(0, 64);
            fence_init();
        }
        barriers.arrive(0);
    };
    faults(hurries, &[FaultKind::Race, FaultKind::Uninitialised]);
}
