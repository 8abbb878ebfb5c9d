//! W4A16 by rounding to the nearest code: groups of 32 consecutive k, one bf16 scale each. The scale is the one with
//! which the largest value fits, as `bundles/kdtr/numerics.py` has it, or the best of a search.

use half::bf16;

use crate::weights::{bf16_values, f32_values};

/// Consecutive k of a scale.
pub const GROUP: usize = 32;
const LEAST: f32 = -8.0;
const MOST: f32 = 7.0;
/// The search looks at this many scales, each smaller by this share of the first, and refits each so often.
const SHRUNK: u32 = 24;
const SHRINK: f64 = 0.025;
const REFITS: u32 = 3;

/// How the scale of a group is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// So that the largest value fits.
    Extreme,
    /// That and smaller ones, each refitted to its codes: the one with the least squared error.
    LeastSquares,
}

/// Values as a file stores them.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    F32(&'a [u8]),
    Bf16(&'a [u8]),
}

/// Codes, two in a byte with the even k low, and bf16 scales, of values that come in whole groups.
pub fn quantize(values: Values, scales: Scales) -> (Vec<u8>, Vec<u8>) {
    let how = scales;
    let values: Vec<f32> = match values {
        Values::F32(bytes) => f32_values(bytes).collect(),
        Values::Bf16(bytes) => bf16_values(bytes).collect(),
    };
    let (mut codes, mut scales) = (Vec::with_capacity(values.len() / 2), Vec::with_capacity(values.len() / GROUP * 2));
    for group in values.chunks_exact(GROUP) {
        let scale = match how {
            Scales::Extreme => extreme(group),
            Scales::LeastSquares => least_squares(group),
        };
        scales.extend_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        let code = |value: f32| (code(value, scale) - LEAST) as u8;
        codes.extend(group.as_chunks::<2>().0.iter().map(|&[even, odd]| code(even) | code(odd) << 4));
    }
    (codes, scales)
}

/// The nearest code.
fn code(value: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { (value / scale).round_ties_even().clamp(LEAST, MOST) }
}

/// Sum of the squared differences.
fn error(group: &[f32], scale: bf16) -> f64 {
    let scale = scale.to_f32();
    let off = |&value: &f32| f64::from(value) - f64::from(code(value, scale)) * f64::from(scale);
    group.iter().map(|value| off(value).powi(2)).sum()
}

/// The best scale for the codes that `scale` gives.
fn refitted(group: &[f32], scale: bf16) -> bf16 {
    let (mut product, mut square) = (0.0, 0.0);
    for &value in group {
        let code = f64::from(code(value, scale.to_f32()));
        product += code * f64::from(value);
        square += code * code;
    }
    if square == 0.0 { scale } else { bf16::from_f64(product / square) }
}

/// The extreme's scale, or a better one of [`SHRUNK`]: ties go to the extreme's, then to the larger.
fn least_squares(group: &[f32]) -> bf16 {
    let first = extreme(group);
    let mut best = (error(group, first), first);
    for step in 0..SHRUNK {
        let mut scale = bf16::from_f64(f64::from(first.to_f32()) * (1.0 - f64::from(step) * SHRINK));
        for _ in 0..REFITS {
            let found = error(group, scale);
            if found < best.0 {
                best = (found, scale);
            }
            scale = refitted(group, scale);
        }
    }
    best.1
}

/// The extreme of the group over 7, or over 8 where the extreme is negative, so that all sixteen codes occur.
fn extreme(group: &[f32]) -> bf16 {
    let (low, high) = group.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
    bf16::from_f32(if -low > high { low / LEAST } else { high / MOST })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The worked example of the checkpoint's layout: codes -8 -3 0 1 7 -1 2 5 at scale 0.5 are bytes 50 98 7f da.
    #[test]
    fn nibbles_and_scales() {
        let eight = [-4.0f32, -1.5, 0.0, 0.5, 3.5, -0.5, 1.0, 2.5];
        let bytes: Vec<u8> = (0..4).flat_map(|_| eight).flat_map(f32::to_le_bytes).collect();
        let (codes, scales) = quantize(Values::F32(&bytes), Scales::Extreme);
        assert_eq!(codes, [0x50, 0x98, 0x7f, 0xda].repeat(4));
        assert_eq!(scales, bf16::from_f32(0.5).to_le_bytes());
    }

    #[test]
    fn zeros_ties_and_a_positive_extreme() {
        let (codes, scales) = quantize(Values::Bf16(&[0; 64]), Scales::Extreme);
        assert_eq!((codes, scales), (vec![0x88; 16], vec![0; 2]));
        // 2.5 and 3.5 go to the even code, 2 and 4.
        let mut values = [0.0f32; GROUP];
        values[..3].copy_from_slice(&[7.0, 2.5, 3.5]);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (codes, scales) = quantize(Values::F32(&bytes), Scales::Extreme);
        assert_eq!((codes[0], codes[1], scales), (0xaf, 0x8c, bf16::ONE.to_le_bytes().to_vec()));
    }
    /// splitmix64, as a number from -1 to 1.
    fn random(state: &mut u64) -> f32 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Of every group, whatever lies in it; and smaller by a tenth on values as weights have them.
    #[test]
    fn the_search_is_never_worse() {
        let (mut state, mut sums) = (7, [0.0f64; 2]);
        for kind in 0..6 {
            for _ in 0..200 {
                let mut group: Vec<f32> = (0..GROUP).map(|_| random(&mut state)).collect();
                match kind {
                    // About normal, as weights are.
                    0 => group.iter_mut().for_each(|v| *v = (0..12).map(|_| random(&mut state)).sum::<f32>() * 0.01),
                    1 => group[3] *= 50.0,
                    2 => group.iter_mut().for_each(|v| *v = v.abs()),
                    3 => group.iter_mut().for_each(|v| *v = v.powi(9) * 1e-30),
                    4 => group.iter_mut().skip(1).for_each(|v| *v = 0.0),
                    _ => {}
                }
                let [plain, searched] = [extreme(&group), least_squares(&group)].map(|scale| error(&group, scale));
                assert!(searched <= plain, "kind {kind}: {searched} above {plain}");
                if kind == 0 {
                    sums = [sums[0] + plain, sums[1] + searched];
                }
            }
        }
        assert!(sums[1] < 0.9 * sums[0], "{sums:?}");
        assert_eq!(least_squares(&[0.0; GROUP]), bf16::ZERO);
        // What fits without a rest stays as it is.
        let exact: Vec<f32> = (0..GROUP).map(|i| (i % 16) as f32 - 8.0).collect();
        assert_eq!((least_squares(&exact), error(&exact, bf16::ONE)), (bf16::ONE, 0.0));
    }
}
