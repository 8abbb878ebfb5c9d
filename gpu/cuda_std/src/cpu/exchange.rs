//! Warp operations: each lane leaves its operands, and once all 32 have, each takes its result.

use std::cell::{Cell, UnsafeCell};

use super::FaultKind;
use super::block::{State, Thread};

/// Words a lane can leave: the fragments of two `mma` (c, then a and b of each).
pub(super) const WORDS: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Op {
    None,
    Barrier,
    Shuffle,
    Ballot,
    Max,
    Min,
    Sum,
    LdMatrix,
    /// With the number of steps.
    Mma(usize),
    /// A numbered barrier of so many threads, at which the warp waits or not.
    Numbered {
        id: u32,
        threads: u32,
        waits: bool,
    },
}

type Lanes = [[u32; WORDS]; 32];

/// A warp's exchange. Two buffers: a lane can be one operation ahead of another, never two.
pub(super) struct Warp {
    op: Cell<Op>,
    arrived: Cell<u32>,
    parity: Cell<usize>,
    slots: UnsafeCell<[Lanes; 2]>,
}

impl Default for Warp {
    fn default() -> Self {
        Self {
            op: Cell::new(Op::None),
            arrived: Cell::new(0),
            parity: Cell::new(0),
            slots: UnsafeCell::new([[[0; WORDS]; 32]; 2]),
        }
    }
}

impl Warp {
    pub fn reset(&mut self) {
        self.op.set(Op::None);
        self.arrived.set(0);
    }
}

/// Leaves `words` for the warp, waits for all lanes, and returns what `take` finds in the lanes' slots.
///
/// The last lane to come runs `last` on all slots first (it computes an `mma` once for the warp).
pub(super) fn exchange<R>(
    me: &Thread,
    op: Op,
    words: &[u32],
    last: impl FnOnce(&mut Lanes),
    take: impl FnOnce(&Lanes) -> R,
) -> R {
    let block = me.block();
    let number = me.linear as usize / 32;
    let warp = &block.warps[number];
    let lane = me.linear as usize % 32;
    if block.checked {
        me.step();
    }
    let arrived = warp.arrived.get();
    if arrived == 0 {
        warp.op.set(op);
    } else if warp.op.get() != op {
        me.fault(
            FaultKind::Divergence,
            format!("reaches {op:?} while other lanes of its warp wait in {:?}", warp.op.get()),
        );
    }
    let parity = warp.parity.get();
    // SAFETY: the block runs on one OS thread and no reference is kept across a suspension.
    unsafe { (&mut *warp.slots.get())[parity][lane][..words.len()].copy_from_slice(words) };
    if arrived + 1 == 32 {
        warp.arrived.set(0);
        warp.parity.set(parity ^ 1);
        // SAFETY: as above.
        last(unsafe { &mut (&mut *warp.slots.get())[parity] });
        block.release_warp(number);
    } else {
        warp.arrived.set(arrived + 1);
        me.suspend(State::AtWarp);
    }
    // SAFETY: as above; the buffer of this parity is not written again before every lane has passed here.
    take(unsafe { &(&*warp.slots.get())[parity] })
}

/// Computes the warp's `m16n8k16` of each step from the lanes' fragments and leaves each lane's `d` in its words 0..4.
///
/// Operands are bf16, or f16 with `HALF`: a product of two is exact in f32, so fused and unfused sums agree; the order
/// is ascending k.
pub(super) fn mma_m16n8k16<const STEPS: usize, const HALF: bool>(lanes: &mut Lanes) {
    let half = |bits: u32| half::f16::from_bits(bits as u16).to_f32();
    let lo = |w: u32| if HALF { half(w) } else { f32::from_bits(w << 16) };
    let hi = |w: u32| if HALF { half(w >> 16) } else { f32::from_bits(w & 0xFFFF_0000) };
    let mut d = [[0f32; 8]; 16];
    for (lane, w) in lanes.iter().enumerate() {
        let (g, c) = (lane / 4, lane % 4 * 2);
        for (i, (row, col)) in [(g, c), (g, c + 1), (g + 8, c), (g + 8, c + 1)].into_iter().enumerate() {
            d[row][col] = f32::from_bits(w[i]);
        }
    }
    for step in 0..STEPS {
        let first = 4 + 6 * step;
        let (mut a, mut b) = ([[0f32; 16]; 16], [[0f32; 8]; 16]);
        for (lane, w) in lanes.iter().enumerate() {
            let (g, c) = (lane / 4, lane % 4 * 2);
            for (i, (row, k)) in [(g, c), (g + 8, c), (g, c + 8), (g + 8, c + 8)].into_iter().enumerate() {
                (a[row][k], a[row][k + 1]) = (lo(w[first + i]), hi(w[first + i]));
            }
            for (i, k) in [c, c + 8].into_iter().enumerate() {
                (b[k][g], b[k + 1][g]) = (lo(w[first + 4 + i]), hi(w[first + 4 + i]));
            }
        }
        for (row, acc) in a.iter().zip(&mut d) {
            for (x, col) in row.iter().zip(&b) {
                for n in 0..8 {
                    acc[n] += x * col[n];
                }
            }
        }
    }
    for (lane, w) in lanes.iter_mut().enumerate() {
        let (g, c) = (lane / 4, lane % 4 * 2);
        for (i, (row, col)) in [(g, c), (g, c + 1), (g + 8, c), (g + 8, c + 1)].into_iter().enumerate() {
            w[i] = d[row][col].to_bits();
        }
    }
}
