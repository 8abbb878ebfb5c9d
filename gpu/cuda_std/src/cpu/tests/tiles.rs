//! `ldmatrix` and `mma` against their definitions, fragment by fragment.

use super::{Args, gives, me, run_in};
use crate::cpu::Mode;
use crate::{Shared, bf16, dynamic_shared, math, mma, thread};

/// A 16 x 16 tile whose value names its place: bits `row * 16 + column`.
fn tile() -> Shared<bf16> {
    let tile: Shared<bf16> = dynamic_shared(0, 256);
    (0..4).for_each(|k| tile.set(me() * 4 + k, bf16::from_bits((me() * 4 + k) as u16)));
    thread::sync_threads();
    tile
}

/// The pair of 8x8 matrix `i` that `lane` gets, of the tile's quarters in the order a, b, c, d of the A operand.
fn pair(lane: usize, i: usize, transposed: bool) -> u32 {
    let (row, column) = (i % 2 * 8, i / 2 * 8);
    let at = |r: usize, c: usize| ((row + r) * 16 + column + c) as u32;
    let (g, c) = (lane / 4, lane % 4 * 2);
    if transposed { at(c, g) | at(c + 1, g) << 16 } else { at(g, c) | at(g, c + 1) << 16 }
}

/// Where lane `l` finds its row of the quarter `l / 8`.
fn row_start(lane: usize) -> usize {
    (lane % 16) * 16 + lane / 16 * 8
}

#[test]
fn ldmatrix_gives_pairs_of_the_quarters() {
    let word = |i: usize, n: usize, transposed| match i / 64 {
        k if k < n && i % 64 < 32 => pair(i % 64, k, transposed),
        _ => 0,
    };
    fn store(a: Args, words: &[u32]) {
        if me() < 32 && thread::block_idx_x() == 0 {
            words.iter().enumerate().for_each(|(k, &w)| a.y.set(k * 64 + me(), w));
        }
    }
    gives(|a| store(a, &mma::ldmatrix_x4(tile(), row_start(me() % 32))), |i| word(i, 4, false));
    gives(|a| store(a, &mma::ldmatrix_x4_trans(tile(), row_start(me() % 32))), |i| word(i, 4, true));
    gives(|a| store(a, &mma::ldmatrix_x2(tile(), row_start(me() % 16))), |i| word(i, 2, false));
    gives(|a| store(a, &mma::ldmatrix_x2_trans(tile(), row_start(me() % 16))), |i| word(i, 2, true));
}

/// Small whole numbers: every product and sum is exact.
fn a_value(row: usize, k: usize) -> f32 {
    ((row * 7 + k * 3) % 11) as f32 - 5.0
}

fn b_value(k: usize, n: usize) -> f32 {
    ((k * 5 + n * 2) % 13) as f32 - 6.0
}

#[test]
fn mma_multiplies_its_fragments() {
    let entry = |a: Args| {
        let (g, c) = (me() / 4, me() % 4 * 2);
        let a_pair = |row, k| math::pack_bf16(a_value(row, k), a_value(row, k + 1));
        let b_pair = |k, n| math::pack_bf16(b_value(k, n), b_value(k + 1, n));
        let x = [a_pair(g, c), a_pair(g + 8, c), a_pair(g, c + 8), a_pair(g + 8, c + 8)];
        let y = [b_pair(c, g), b_pair(c + 8, g)];
        let mut d = [0.5, 1.5, 2.5, 3.5];
        mma::mma_m16n8k16(&mut d, x, y);
        // Once more: sums go on from what was there.
        mma::mma_m16n8k16(&mut d, x, y);
        (0..4).for_each(|i| a.y.set(i * 32 + me(), d[i].to_bits()));
    };
    for mode in [Mode::Checked { seed: 9 }, Mode::Fast] {
        let y = run_in(mode, [1, 1, 1], [32, 1, 1], &[0; 4], entry).unwrap();
        for lane in 0..32 {
            for i in 0..4 {
                let (row, n) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let sum: f32 = (0..16).map(|k| a_value(row, k) * b_value(k, n)).sum();
                assert_eq!(f32::from_bits(y[i * 32 + lane]), 2.0 * sum + i as f32 + 0.5, "lane {lane}, d{i}");
            }
        }
    }
}
