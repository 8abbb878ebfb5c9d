//! What the attention kernels share: `mma` operands from 16-byte loads, softmax bounds, stores of neighbouring values.
//!
//! The inner order of a product is free as long as both operands agree on it, so each lane takes 8 neighbouring values
//! (16 bytes) where the fragment layout names scattered pairs:
//!
//! ```text
//! query . key    lane (group, quad) loads d = 8 quad .. 8 quad + 8 of 32: words 0, 1 feed one mma, words 2, 3 the next
//! weight . value lane (group, quad) loads columns 8 group .. 8 group + 8 of 64, of the 4 keys that the step gives to
//!                its quad: mma tile j takes column j of each lane, so its column n is 8 n + j of the 64
//! ```
//!
//! In the second product's result a lane holds columns 8 (2 quad) + j and 8 (2 quad + 1) + j of all 8 tiles: 16
//! neighbouring columns.

use cuda_std::{GlobalMut, bf16, math, mma};

use crate::unroll::unroll;

/// Rows of an `mma` tile.
pub const TILE: usize = 16;
/// Values of a 16-byte load.
pub const PIECE: usize = 8;
/// Values of a key that a quad of lanes loads together: two `mma` steps.
pub const CHUNK: usize = 4 * PIECE;
/// Columns that the lanes of a warp load together.
pub const SPAN: usize = 8 * PIECE;
/// Neighbouring columns of a lane in the result.
pub const LANE_COLUMNS: usize = 2 * PIECE;

/// Sums of 16 rows and 64 columns, a lane's part of 8 `mma` tiles.
pub type Sums = [[f32; 4]; PIECE];

/// `s += q . k` over 32 values: `low` and `high` are pieces of query rows `group` and `group + 8`, `key` one of key
/// `group`.
#[inline(always)]
pub fn add_scores(s: &mut [f32; 4], low: [u32; 4], high: [u32; 4], key: [u32; 4]) {
    mma::mma_m16n8k16(s, [low[0], high[0], low[1], high[1]], [key[0], key[1]]);
    mma::mma_m16n8k16(s, [low[2], high[2], low[3], high[3]], [key[2], key[3]]);
}

/// `acc += w . v` over 16 keys: `w` is the weights' fragment, `v` the pieces of this lane's four keys, those of words
/// 0, 1 of `w` first.
#[inline(always)]
pub fn add_values(acc: &mut Sums, w: [u32; 4], v: [[u32; 4]; 4]) {
    unroll!(word in 0 1 2 3; {
        let even = [low_halves(v[0][word], v[1][word]), low_halves(v[2][word], v[3][word])];
        mma::mma_m16n8k16(&mut acc[2 * word], w, even);
        let odd = [high_halves(v[0][word], v[1][word]), high_halves(v[2][word], v[3][word])];
        mma::mma_m16n8k16(&mut acc[2 * word + 1], w, odd);
    });
}

#[inline(always)]
fn low_halves(first: u32, second: u32) -> u32 {
    first & 0xFFFF | second << 16
}

#[inline(always)]
fn high_halves(first: u32, second: u32) -> u32 {
    first >> 16 | second & 0xFFFF_0000
}

/// What is subtracted from scores of base `base`: 0 where no key was seen, so that weights become 2^-inf = 0 and not
/// 2^(inf - inf).
///
/// Bases are whole numbers, [`math::ceil`] of a score. To weigh against another base is then to multiply by a power of
/// two, which no rounding notices: which score the base comes from changes no bit of a weight, and a change of base, of
/// a part's or of a warp's, none of a sum.
#[inline(always)]
pub fn softmax_base(base: f32) -> f32 {
    if base == f32::NEG_INFINITY { 0.0 } else { base }
}

/// Multiplies the lower (0) or upper (1) 8 rows.
#[inline(always)]
pub fn scale_rows(acc: &mut Sums, half: usize, factor: f32) {
    unroll!(j in 0 1 2 3 4 5 6 7; {
        acc[j][2 * half] *= factor;
        acc[j][2 * half + 1] *= factor;
    });
}

/// A lane's 16 neighbouring columns, times `factor`, for row `group` (0) or `group + 8` (1).
#[inline(always)]
pub fn lane_columns(acc: &Sums, half: usize, factor: f32) -> [f32; LANE_COLUMNS] {
    let mut values = [0.0; LANE_COLUMNS];
    unroll!(j in 0 1 2 3 4 5 6 7; {
        values[j] = acc[j][2 * half] * factor;
        values[PIECE + j] = acc[j][2 * half + 1] * factor;
    });
    values
}

/// Stores neighbouring values from element `i` on (16-byte aligned) in those outputs that are there.
#[inline(always)]
pub fn store<const N: usize>(out_f32: GlobalMut<f32>, out_bf16: GlobalMut<bf16>, i: usize, values: [f32; N]) {
    if !out_f32.is_empty() {
        unroll!(j in 0 1 2 3 below N / 4; {
            let [a, b, c, d] = [values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]];
            out_f32.st16(i + 4 * j, [a.to_bits(), b.to_bits(), c.to_bits(), d.to_bits()]);
        });
    }
    if !out_bf16.is_empty() {
        unroll!(j in 0 1 2 3 below N / 4; {
            let [a, b, c, d] = [values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]];
            out_bf16.st8(i + 4 * j, [math::pack_bf16(a, b), math::pack_bf16(c, d)]);
        });
    }
}
