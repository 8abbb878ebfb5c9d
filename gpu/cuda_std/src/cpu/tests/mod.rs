//! The CPU device against values worked out by hand, and against planted faults.

mod barriers;
mod faults;
mod math;
mod memory;
mod named;
mod races;
mod tiles;
mod warps;

use super::{Dims, Fault, FaultKind, Mode, launch, register, unregister};
use crate::{Global, GlobalMut, Kernel, thread};

/// Words of each buffer.
const WORDS: usize = 256;
/// Dynamic shared memory, bytes.
const SHARED: u32 = 4096;

#[derive(Clone, Copy)]
struct Args {
    x: Global<u32>,
    y: GlobalMut<u32>,
}

/// Runs `entry` on two blocks of 64 threads over two buffers of 256 words, `x[i] = i` and `y[i] = 0`.
fn run(entry: fn(Args), seed: u64) -> Result<Vec<u32>, Fault> {
    run_in(Mode::Checked { seed }, [2, 1, 1], [64, 1, 1], &(0..WORDS as u32).collect::<Vec<_>>(), entry)
}

/// As [`run`], with the mode, the shape and `x` given.
fn run_in(mode: Mode, grid: [u32; 3], block: [u32; 3], x: &[u32], entry: fn(Args)) -> Result<Vec<u32>, Fault> {
    // Buffers of a device are aligned, those of a `Vec<u32>` need not be.
    let mut memory = vec![0u128; (x.len() + WORDS).div_ceil(4) + 1];
    let base = memory.as_mut_ptr() as u64;
    let from = x.len().next_multiple_of(4);
    // SAFETY: both parts lie inside `memory`, which outlives them.
    let (into_x, y) = unsafe {
        let words = memory.as_mut_ptr().cast::<u32>();
        (std::slice::from_raw_parts_mut(words, x.len()), words.add(from))
    };
    into_x.copy_from_slice(x);
    register(base, x.len() * 4);
    register(y as u64, WORDS * 4);
    let args = Args { x: Global::from_raw(base, x.len()), y: GlobalMut::from_raw(y as u64, WORDS) };
    let result = launch(&Kernel::new("planted", entry), Dims { grid, block, shared: SHARED }, args, mode);
    unregister(base);
    unregister(y as u64);
    // SAFETY: as above; the launch has ended.
    result.map(|()| unsafe { std::slice::from_raw_parts(y, WORDS) }.to_vec())
}

/// Both modes and some schedules give `want(i)` in word `i` of `y`.
fn gives(entry: fn(Args), want: impl Fn(usize) -> u32) {
    let x: Vec<u32> = (0..WORDS as u32).collect();
    let modes = (0..4).map(|seed| Mode::Checked { seed }).chain([Mode::Fast]);
    for mode in modes {
        let y = run_in(mode, [2, 1, 1], [64, 1, 1], &x, entry).unwrap();
        for (i, &found) in y.iter().enumerate() {
            assert_eq!(found, want(i), "word {i}, {mode:?}");
        }
    }
}

fn me() -> usize {
    thread::thread_idx_x() as usize
}

/// This thread's number in the grid of [`run`].
fn global() -> usize {
    thread::block_idx_x() as usize * 64 + me()
}

/// Every one of some schedules finds a fault of one of these kinds.
fn faults(entry: fn(Args), kinds: &[FaultKind]) -> Fault {
    let mut last = None;
    for seed in 0..20 {
        let fault = run(entry, seed).expect_err("a planted fault is found");
        assert!(kinds.contains(&fault.kind), "{fault}");
        assert!(fault.to_string().starts_with("kernel `planted`, block ("), "{fault}");
        last = Some(fault);
    }
    last.unwrap()
}

/// No schedule finds a fault.
fn sound(entry: fn(Args)) {
    for seed in 0..20 {
        if let Err(fault) = run(entry, seed) {
            panic!("seed {seed}: {fault}");
        }
    }
}
