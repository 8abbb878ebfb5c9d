//! W4A16 by rounding to the nearest code: groups of 32 consecutive k, one bf16 scale each, as
//! `bundles/kdtr/numerics.py` does it.

use half::bf16;

use crate::weights::{bf16_values, f32_values};

/// Consecutive k of a scale.
pub const GROUP: usize = 32;
const LEAST: f32 = -8.0;
const MOST: f32 = 7.0;

/// Values as a file stores them.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    F32(&'a [u8]),
    Bf16(&'a [u8]),
}

/// Codes, two in a byte with the even k low, and bf16 scales, of values that come in whole groups.
pub fn quantize(values: Values) -> (Vec<u8>, Vec<u8>) {
    let values: Vec<f32> = match values {
        Values::F32(bytes) => f32_values(bytes).collect(),
        Values::Bf16(bytes) => bf16_values(bytes).collect(),
    };
    let (mut codes, mut scales) = (Vec::with_capacity(values.len() / 2), Vec::with_capacity(values.len() / GROUP * 2));
    for group in values.chunks_exact(GROUP) {
        let scale = scale(group);
        scales.extend_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        let code = |value: f32| match scale {
            0.0 => 8,
            _ => ((value / scale).round_ties_even().clamp(LEAST, MOST) - LEAST) as u8,
        };
        codes.extend(group.as_chunks::<2>().0.iter().map(|&[even, odd]| code(even) | code(odd) << 4));
    }
    (codes, scales)
}

/// The extreme of the group over 7, or over 8 where the extreme is negative, so that all sixteen codes occur.
fn scale(group: &[f32]) -> bf16 {
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
        let (codes, scales) = quantize(Values::F32(&bytes));
        assert_eq!(codes, [0x50, 0x98, 0x7f, 0xda].repeat(4));
        assert_eq!(scales, bf16::from_f32(0.5).to_le_bytes());
    }

    #[test]
    fn zeros_ties_and_a_positive_extreme() {
        let (codes, scales) = quantize(Values::Bf16(&[0; 64]));
        assert_eq!((codes, scales), (vec![0x88; 16], vec![0; 2]));
        // 2.5 and 3.5 go to the even code, 2 and 4.
        let mut values = [0.0f32; GROUP];
        values[..3].copy_from_slice(&[7.0, 2.5, 3.5]);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (codes, scales) = quantize(Values::F32(&bytes));
        assert_eq!((codes[0], codes[1], scales), (0xaf, 0x8c, bf16::ONE.to_le_bytes().to_vec()));
    }
}
