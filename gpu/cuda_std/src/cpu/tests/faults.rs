//! Planted faults other than races are caught and named.

use super::{Args, WORDS, faults, me, run, run_in};
use crate::cpu::{FaultKind, Mode};
use crate::{Global, Shared, async_copy, bf16, dynamic_shared, mma, thread, warp};

#[test]
fn out_of_bounds_is_named() {
    let fault = run(|a| a.y.set(me() + 193, 1), 1).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, Some([63, 0, 0])), "{fault}");
    let fault = run(|_| dynamic_shared::<u32>(0, 32).set(me(), 1), 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::OutOfBounds, "{fault}");
}

#[test]
fn divergent_barriers_and_shuffles_are_named() {
    let some = |_: Args| {
        if me() != 5 {
            thread::sync_threads();
        }
    };
    let fault = run(some, 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Divergence, "{fault}");
    assert!(fault.to_string().contains("thread (5, 0, 0) is at its end"), "{fault}");
    let some = |_: Args| {
        if me() != 40 {
            warp::reduce_sum(1.0);
        }
    };
    let fault = run(some, 1).unwrap_err();
    assert!(fault.to_string().contains("thread (40, 0, 0) is at its end"), "{fault}");
}

#[test]
fn an_endless_block_is_named() {
    let spin = |a: Args| while a.y.get(0) == 0 {};
    let fault = run(spin, 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless, "{fault}");
}

#[test]
fn a_panic_is_a_fault() {
    let fault = run(|_| assert!(me() < 60, "too far"), 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Trap, "{fault}");
    assert!(fault.what.contains("too far"));
}

#[test]
fn misaligned_accesses_are_named() {
    for entry in [
        (|a: Args| {
            a.x.ld16(me() + 1);
        }) as fn(Args),
        |a: Args| {
            a.x.ld8(me() * 2 + 1);
        },
        |a: Args| a.y.st16(me() * 2 + 2, [0; 4]),
        |_| dynamic_shared::<u32>(0, 256).st16(me() + 1, [0; 4]),
        |_| dynamic_shared::<bf16>(0, 512).st4(me() * 2 + 1, 0),
        |a: Args| async_copy::cp_async_16(dynamic_shared::<u32>(0, 256), me() + 1, a.x, 0),
        |a: Args| async_copy::cp_async_16(dynamic_shared::<u32>(0, 256), me() * 4, a.x, 2),
        |_| {
            dynamic_shared::<u32>(2, 16);
        },
        |_| {
            let tile: Shared<bf16> = dynamic_shared(0, 1024);
            (0..16).for_each(|i| tile.set(me() * 16 + i, bf16::ZERO));
            thread::sync_threads();
            mma::ldmatrix_x4(tile, me() % 32 * 8 + 4);
        },
    ] {
        let fault = faults(entry, &[FaultKind::OutOfBounds]);
        assert!(fault.what.contains("aligned") || fault.what.contains("dynamic shared array at 2"), "{fault}");
    }
}

#[test]
fn accesses_outside_a_view_are_named() {
    for entry in [
        (|a: Args| {
            a.x.slice(0, 200).ld16(200);
        }) as fn(Args),
        |a: Args| {
            a.x.slice(200, 57);
        },
        |a: Args| {
            a.x.get(usize::MAX);
        },
        |a: Args| {
            a.y.atomic_add(WORDS, 1);
        },
        |a: Args| async_copy::cp_async_16(dynamic_shared::<u32>(0, 256), 0, a.x, 256),
        |a: Args| async_copy::cp_async_16_or_zero(dynamic_shared::<u32>(0, 256), 256, a.x, 0, false),
        |_| {
            dynamic_shared::<u32>(4096, 1);
        },
        |_| {
            dynamic_shared::<u32>(0, 16).slice(8, 9);
        },
        |_| {
            dynamic_shared::<u32>(0, 16).ld16(16);
        },
        |_| {
            Global::<u32>::EMPTY.get(0);
        },
    ] {
        faults(entry, &[FaultKind::OutOfBounds]);
    }
}

#[test]
fn a_dangling_buffer_is_named() {
    // The view outlives what it was a view of: nothing is registered there.
    let fault = faults(
        |_| {
            let gone: Global<u32> = Global::from_raw(4096, 64);
            gone.get(me());
        },
        &[FaultKind::OutOfBounds],
    );
    assert!(fault.what.contains("lies in no live buffer"), "{fault}");
    // A view that reaches past its buffer's end.
    let past = |a: Args| {
        let wide: Global<u32> = Global::from_raw(a.x.addr(), 1 << 20);
        wide.get(1 << 18);
    };
    faults(past, &[FaultKind::OutOfBounds]);
}

#[test]
fn impossible_blocks_are_refused() {
    for (block, what) in [([33, 1, 1], "33 threads"), ([0, 1, 1], "0 threads"), ([1024, 2, 1], "2048 threads")] {
        let fault = run_in(Mode::Fast, [1, 1, 1], block, &[0; 4], |_| ()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Launch);
        assert!(fault.to_string().contains(what), "{fault}");
    }
    run_in(Mode::Fast, [0, 1, 1], [32, 1, 1], &[0; 4], |_| panic!("a grid of nothing runs")).unwrap();
}

#[test]
fn seeds_change_the_order() {
    let order = |a: Args| {
        let rank = a.y.atomic_add(255, 1);
        if thread::block_idx_x() == 0 {
            a.y.set(rank as usize, me() as u32);
        }
    };
    let run = |seed| run_in(Mode::Checked { seed }, [1, 1, 1], [64, 1, 1], &[0; 4], order).unwrap();
    let (one, again, other) = (run(1), run(1), run(2));
    assert_eq!(one, again);
    assert_ne!(one, other);
    let mut all = other[..64].to_vec();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..64));
}

#[test]
fn lanes_in_different_operations_are_named() {
    let mixed = |_: Args| {
        if me() % 32 < 16 {
            warp::ballot(true);
        } else {
            warp::shfl(1u32, 0);
        }
    };
    let fault = faults(mixed, &[FaultKind::Divergence]);
    assert!(fault.what.contains("Ballot") && fault.what.contains("Shuffle"), "{fault}");
    // One half of a warp at the block's barrier, the other in a warp operation.
    let split = |_: Args| {
        if me() % 32 < 16 {
            thread::sync_threads();
        } else {
            warp::sync_warp();
        }
    };
    faults(split, &[FaultKind::Divergence]);
}

#[test]
fn a_trap_carries_its_reason() {
    let fault = run(
        |_| {
            if me() == 3 && thread::block_idx_x() == 1 {
                thread::trap("no such token");
            }
        },
        1,
    )
    .unwrap_err();
    assert_eq!((fault.kind, fault.block, fault.thread), (FaultKind::Trap, [1, 0, 0], Some([3, 0, 0])));
    assert_eq!(fault.to_string(), "kernel `planted`, block (1, 0, 0), thread (3, 0, 0): no such token");
    let fault = run(
        |a| {
            crate::math::div(1, a.x.get(0));
        },
        1,
    )
    .unwrap_err();
    assert!(fault.what.contains("division by zero"), "{fault}");
}
