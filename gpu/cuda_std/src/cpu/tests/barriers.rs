//! Barriers in shared memory and bulk copies: sound kernels, and planted faults that are caught and named.

use super::{Args, faults, gives, me};
use crate::bulk::{Barriers, copy_once, fence_init};
use crate::cpu::FaultKind;
use crate::{Shared, dynamic_shared, thread};

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
