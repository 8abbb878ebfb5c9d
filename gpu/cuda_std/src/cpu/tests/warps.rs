//! Indices, shuffles, votes and reductions against values worked out by hand.

use super::{WORDS, gives, global, me, run_in};
use crate::cpu::Mode;
use crate::cpu::tests::Args;
use crate::{thread, warp};

#[test]
fn indices_of_a_grid_of_three_axes() {
    // y[block] collects, over the block's threads, what each index function says, in one number a thread.
    let entry = |a: Args| {
        let t = [thread::thread_idx_x(), thread::thread_idx_y(), thread::thread_idx_z()];
        let b = [thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z()];
        assert_eq!([thread::block_dim_x(), thread::block_dim_y(), thread::block_dim_z()], [4, 2, 8]);
        assert_eq!([thread::grid_dim_x(), thread::grid_dim_y(), thread::grid_dim_z()], [2, 3, 2]);
        let linear = t[0] + 4 * (t[1] + 2 * t[2]);
        assert_eq!((warp::lane_id(), warp::warp_id()), (linear % 32, linear / 32));
        a.y.atomic_add((b[0] + 2 * (b[1] + 3 * b[2])) as usize, linear);
    };
    for mode in [Mode::Checked { seed: 3 }, Mode::Fast] {
        let y = run_in(mode, [2, 3, 2], [4, 2, 8], &[0; 4], entry).unwrap();
        assert!((0..WORDS).all(|i| y[i] == if i < 12 { 64 * 63 / 2 } else { 0 }), "{y:?}");
    }
}

#[test]
fn shuffles_take_the_lane_named() {
    // `x[i] = i`, so that a value names the thread it came from.
    let base = |i: usize| (i / 32 * 32) as u32;
    let lane = |i: usize| (i % 32) as u32;
    gives(
        |a| a.y.set(global(), warp::shfl(a.x.get(global()), me() as u32 * 3 + 70)),
        |i| match i {
            0..128 => base(i) + ((i as u32 % 64) * 3 + 70) % 32,
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::shfl_xor(a.x.get(global()), 21)),
        |i| match i {
            0..128 => base(i) + (lane(i) ^ 21),
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::shfl_down(a.x.get(global()), 5)),
        |i| match i {
            0..128 => base(i) + if lane(i) + 5 < 32 { lane(i) + 5 } else { lane(i) },
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::shfl_up(a.x.get(global()), 5)),
        |i| match i {
            0..128 => base(i) + lane(i).checked_sub(5).unwrap_or(lane(i)),
            _ => 0,
        },
    );
    // Distances count modulo 32, as the hardware takes five bits.
    gives(
        |a| a.y.set(global(), warp::shfl_down(warp::shfl_up(a.x.get(global()), 32), 64)),
        |i| match i {
            0..128 => i as u32,
            _ => 0,
        },
    );
    gives(
        |a| {
            let v = -(a.x.get(global()) as i32);
            let f = warp::shfl_xor(v as f32 * 0.5, 1);
            a.y.set(global(), (warp::shfl_xor(v, 1) as f32 - 2.0 * f) as u32 + (f < 0.0) as u32);
        },
        |i| u32::from(i < 128 && i != 1),
    );
}

#[test]
fn votes_and_reductions() {
    gives(
        |a| a.y.set(global(), warp::ballot(me().is_multiple_of(3))),
        |i| {
            let bit = |l: usize| u32::from((i % 64 / 32 * 32 + l).is_multiple_of(3)) << l;
            if i < 128 { (0..32).map(bit).sum() } else { 0 }
        },
    );
    gives(
        |a| {
            let (any, none) = (warp::any(me() == 40), warp::any(me() == 64));
            let (all, not) = (warp::all(me() < 32), warp::all(me() != 31));
            a.y.set(global(), any as u32 | (none as u32) << 1 | (all as u32) << 2 | (not as u32) << 3);
        },
        |i| match (i < 128, i % 64 / 32) {
            (true, 0) => 0b0100,
            (true, _) => 0b1001,
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::reduce_sum(me() as f32) as u32),
        |i| match (i < 128, i % 64 / 32) {
            (true, w) => 31 * 16 + 32 * 32 * w as u32,
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::reduce_max(-(me() as f32)).to_bits()),
        |i| match (i < 128, i % 64 / 32) {
            (true, w) => (-(32.0 * w as f32)).to_bits(),
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::reduce(a.x.get(global()), |a, b| a ^ b.rotate_left(0))),
        |i| match i {
            0..128 => (0..32).fold(0, |v, l| v ^ (i / 32 * 32 + l) as u32),
            _ => 0,
        },
    );
    gives(
        |a| a.y.set(global(), warp::inclusive_sum(u32::MAX - a.x.get(me()))),
        |i| match i {
            0..128 => (i % 64 / 32 * 32..=i % 64).fold(0, |v, l| v.wrapping_add(u32::MAX - l as u32)),
            _ => 0,
        },
    );
}

#[test]
fn a_maximum_passes_over_nan() {
    let bits = |v: f32| v.to_bits();
    gives(
        |a| {
            let some = if me().is_multiple_of(4) { f32::NAN } else { me() as f32 };
            let all_but = warp::reduce_max(some).to_bits();
            let none = warp::reduce_max(f32::NAN).is_nan() as u32;
            a.y.set(global(), all_but + none);
        },
        |i| match (i < 128, i % 64 / 32) {
            (true, 0) => bits(31.0) + 1,
            (true, _) => bits(63.0) + 1,
            _ => 0,
        },
    );
}
