//! Numbered barriers: warps that meet apart from the rest of the block, and planted faults.

use super::{Args, faults, gives, me, run_in, sound};
use crate::cpu::{FaultKind, Mode};
use crate::{Shared, dynamic_shared, thread, warp};

const ROUNDS: u32 = 5;
const FULL: u32 = 1;
const EMPTY: u32 = 2;

/// What a planted fault leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    Full,
    Empty,
}

/// Warp 0 leaves a word for each lane of warp 1, round after round through the same words: it goes on once it has come
/// to a full one's barrier, and waits at an empty one's.
fn hand_over(a: Args, without: Without) {
    let tile: Shared<u32> = dynamic_shared(0, 32);
    let lane = me() % 32;
    let mut sum = 0;
    for round in 0..ROUNDS {
        if me() < 32 {
            if round > 0 && without != Without::Empty {
                thread::sync_numbered(EMPTY, 64);
            }
            tile.set(lane, a.x.get(lane) + round);
            if without != Without::Full {
                thread::arrive_numbered(FULL, 64);
            }
        } else {
            if without != Without::Full {
                thread::sync_numbered(FULL, 64);
            }
            sum += tile.get(31 - lane);
            if round + 1 < ROUNDS && without != Without::Empty {
                thread::arrive_numbered(EMPTY, 64);
            }
        }
    }
    a.y.set(thread::block_idx_x() as usize * 64 + me(), sum);
}

#[test]
fn one_warp_hands_over_to_another() {
    let want = |i: usize| match i {
        32..64 | 96..128 => ROUNDS * (31 - i as u32 % 32) + ROUNDS * (ROUNDS - 1) / 2,
        _ => 0,
    };
    gives(|a| hand_over(a, Without::Nothing), want);
}

#[test]
fn a_hand_over_without_one_of_its_barriers_is_named() {
    faults(|a| hand_over(a, Without::Full), &[FaultKind::Race, FaultKind::Uninitialised, FaultKind::Divergence]);
    // Who runs ahead comes to the full one's barrier twice, or overwrites what is not read yet.
    faults(|a| hand_over(a, Without::Empty), &[FaultKind::Race, FaultKind::Divergence]);
}

/// All write, the warps of a half of the block meet, and each thread reads a word `apart` from its own.
fn halves(a: Args, apart: usize) {
    let tile: Shared<u32> = dynamic_shared(0, 128);
    tile.set(me(), a.x.get(me()));
    thread::sync_numbered(1 + me() as u32 / 64, 64);
    a.y.set(me(), tile.get((me() + apart) % 128));
}

#[test]
fn warps_that_meet_are_ordered_and_no_others() {
    let x: Vec<u32> = (0..256).collect();
    let launch = |seed, entry| run_in(Mode::Checked { seed }, [1, 1, 1], [128, 1, 1], &x, entry);
    for seed in 0..20 {
        let y = launch(seed, |a| {
            let other = me() / 64 * 64 + (me() + 32) % 64;
            halves(a, (other + 128 - me()) % 128)
        });
        assert!(y.unwrap()[..128].iter().enumerate().all(|(i, &v)| v as usize == i / 64 * 64 + (i + 32) % 64));
        let fault = launch(seed, |a| halves(a, 64)).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
    }
}

#[test]
fn what_a_warp_does_after_it_has_come_is_not_ordered() {
    let late = |a: Args| {
        let tile: Shared<u32> = dynamic_shared(0, 64);
        tile.set(me(), 1);
        if me() < 32 {
            thread::arrive_numbered(1, 64);
            tile.set(me(), 2);
        } else {
            thread::sync_numbered(1, 64);
            a.y.set(me(), tile.get(me() - 32));
        }
    };
    faults(late, &[FaultKind::Race]);
}

#[test]
fn a_numbered_barrier_is_used_again() {
    // With another number of threads, once the first meeting is over.
    sound(|a| {
        let tile: Shared<u32> = dynamic_shared(0, 64);
        for round in 0..3 {
            tile.set(me(), round);
            thread::sync_numbered(3, 64);
            a.y.set(me(), tile.get(63 - me()));
            thread::sync_threads();
        }
        if me() < 32 {
            tile.set(me(), 7);
            thread::sync_numbered(3, 32);
            a.y.set(me(), tile.get(31 - me()));
        }
    });
}

#[test]
fn wrong_counts_are_named() {
    let fault = faults(|_| thread::sync_numbered(1, 32 + 32 * (me() as u32 / 32)), &[FaultKind::Divergence]);
    assert!(fault.what.contains("barrier 1"), "{fault}");
    // Two warps of three that are named: nobody goes on.
    let fault = faults(|_| thread::sync_numbered(4, 96), &[FaultKind::Divergence]);
    assert!(fault.what.contains("barrier 4 of 96 threads: whole warps of the block's 64"), "{fault}");
    let x: Vec<u32> = (0..256).collect();
    for seed in 0..20 {
        let unequal = |_: Args| thread::arrive_numbered(1, if me() < 32 { 96 } else { 128 });
        let fault = run_in(Mode::Checked { seed }, [1, 1, 1], [128, 1, 1], &x, unequal).unwrap_err();
        assert!(fault.what.contains("threads, which others say is of"), "{fault}");
    }
    for threads in [0, 33] {
        let entry: fn(Args) =
            if threads == 0 { |_| thread::sync_numbered(1, 0) } else { |_| thread::sync_numbered(1, 33) };
        assert!(faults(entry, &[FaultKind::Divergence]).what.contains("whole warps"));
    }
}

#[test]
fn numbers_out_of_range_are_named() {
    for entry in [(|_| thread::sync_numbered(16, 64)) as fn(Args), |_| thread::arrive_numbered(0, 64)] {
        assert!(faults(entry, &[FaultKind::Divergence]).what.contains("a block has 1 to 15 beside its own"));
    }
}

#[test]
fn a_warp_that_does_not_come_is_named() {
    let missing = |_: Args| {
        if me() < 32 {
            thread::sync_numbered(5, 64);
        }
    };
    let fault = faults(missing, &[FaultKind::Divergence]);
    assert!(fault.what.contains("at barrier 5, to which 32 of 64 threads have come"), "{fault}");
    assert!(fault.what.contains("thread (32, 0, 0) is at its end"), "{fault}");
    // It came, but nobody waited and others did not come.
    let left = |_: Args| {
        if me() < 32 {
            thread::arrive_numbered(5, 64);
        }
    };
    let fault = faults(left, &[FaultKind::Divergence]);
    assert!(fault.what.contains("ends when 32 threads have come to barrier 5 of 64"), "{fault}");
}

#[test]
fn a_lane_that_does_not_come_is_named() {
    let missing = |_: Args| {
        if me() != 40 {
            thread::sync_numbered(5, 64);
        }
    };
    let fault = faults(missing, &[FaultKind::Divergence]);
    assert!(fault.what.contains("thread (40, 0, 0) is at its end"), "{fault}");
    let mixed = |_: Args| {
        if me() % 32 < 16 {
            thread::sync_numbered(5, 64);
        } else {
            thread::sync_numbered(6, 64);
        }
    };
    faults(mixed, &[FaultKind::Divergence]);
    let other = |_: Args| {
        if me() % 32 < 16 {
            thread::sync_numbered(5, 64);
        } else {
            warp::sync_warp();
        }
    };
    faults(other, &[FaultKind::Divergence]);
}

#[test]
fn a_warp_that_comes_twice_is_named() {
    let twice = |_: Args| {
        if me() < 32 {
            thread::arrive_numbered(1, 64);
            thread::arrive_numbered(1, 64);
        }
    };
    let fault = faults(twice, &[FaultKind::Divergence]);
    assert!(fault.what.contains("comes to barrier 1 twice"), "{fault}");
}

#[test]
fn warps_at_different_barriers_are_named() {
    let crossed = |_: Args| {
        if me() < 32 {
            thread::sync_numbered(1, 64);
            thread::sync_numbered(2, 64);
        } else {
            thread::sync_numbered(2, 64);
            thread::sync_numbered(1, 64);
        }
    };
    faults(crossed, &[FaultKind::Divergence]);
    let block = |_: Args| {
        if me() < 32 {
            thread::sync_numbered(1, 64);
        } else {
            thread::sync_threads();
        }
    };
    faults(block, &[FaultKind::Divergence]);
}
