//! Rows of the f8 cache: codes and scales of a latent, and what they stand for.

use cuda_std::bf16;
use gpu::args::attention::{F8_GROUP, F8_LARGEST, F8_LARGEST_SCALE, F8_ROTARY, F8_ROW, F8_SCALES, KEY, LATENT};

/// Exponent of the least normal e4m3 value, and digits behind the point.
const LEAST_NORMAL: i32 = -6;
const DIGITS: i32 = 3;
/// Exponent of the least scale.
const LEAST_SCALE: i32 = -100;

fn power(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// The value of an e4m3 code.
pub fn e4m3(code: u8) -> f64 {
    let (exponent, digits) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let size = match exponent {
        0 => digits * power(LEAST_NORMAL - DIGITS),
        _ => (1.0 + digits / 8.0) * power(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The nearest code of a value up to 448, ties to even.
fn nearest(x: f64) -> u8 {
    let size = x.abs();
    let exponent = if size < power(LEAST_NORMAL) { LEAST_NORMAL } else { size.log2().floor() as i32 };
    // Eighths of 2^exponent; 8 and more are those of normal values.
    let digits = (size / power(exponent - DIGITS)).round_ties_even() as i32;
    let code = digits + (exponent - LEAST_NORMAL) * 8;
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The scale of a group: NaN where there is none.
fn scale(group: &[f64]) -> f64 {
    let largest = group.iter().fold(0f64, |a, b| if b.is_nan() { f64::INFINITY } else { a.max(b.abs()) });
    let scale = (LEAST_SCALE..).map(power).find(|s| largest <= f64::from(F8_LARGEST) * s).unwrap_or(f64::INFINITY);
    if scale <= f64::from(F8_LARGEST_SCALE) { scale } else { f64::NAN }
}

/// `[rows, KEY]` values -> `[rows, F8_ROW]` bytes.
pub fn f8_rows(values: &[f64]) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len() / KEY * F8_ROW);
    for row in values.chunks(KEY) {
        let groups = row[..LATENT].chunks(F8_GROUP);
        let scales: Vec<f64> = groups.clone().map(scale).collect();
        for (group, scale) in groups.zip(&scales) {
            out.extend(group.iter().map(|v| if scale.is_nan() { 0 } else { nearest(v / scale) }));
        }
        out.extend(scales.iter().flat_map(|&scale| (scale as f32).to_le_bytes()));
        out.extend(row[LATENT..].iter().flat_map(|&v| bf16::from_f64(v).to_le_bytes()));
    }
    out
}

/// `[rows, F8_ROW]` bytes -> `[rows, KEY]` values, exact.
pub fn f8_values(bytes: &[u8]) -> Vec<bf16> {
    let mut out = Vec::with_capacity(bytes.len() / F8_ROW * KEY);
    for row in bytes.chunks(F8_ROW) {
        for (i, &code) in row[..LATENT].iter().enumerate() {
            let at = F8_SCALES + i / F8_GROUP * size_of::<f32>();
            let scale = f32::from_le_bytes(std::array::from_fn(|b| row[at + b]));
            out.push(bf16::from_f64(e4m3(code) * f64::from(scale)));
        }
        out.extend(row[F8_ROTARY..].chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]])));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back() {
        for code in (0..=u8::MAX).filter(|code| code & 0x7F != 0x7F) {
            assert_eq!(nearest(e4m3(code)), code, "{}", e4m3(code));
            assert_eq!(bf16::from_f64(e4m3(code)).to_f64(), e4m3(code));
        }
        assert_eq!(e4m3(0x7E), f64::from(F8_LARGEST));
        let ties = [(0.5 * power(-9), 0), (1.5 * power(-9), 2), (17.0, 0x58), (19.0, 0x5A), (15.5, 0x58)];
        for (value, code) in ties {
            assert_eq!(nearest(value), code, "{value}");
        }
    }

    #[test]
    fn scales_are_the_least_that_do() {
        for (largest, want) in [(448.0, 1.0), (448.1, 2.0), (1.0, power(-8)), (1.76, power(-7)), (0.0, power(-100))] {
            assert_eq!(scale(&[0.0, -largest]), want, "{largest}");
        }
        for bad in [57_345.0, f64::INFINITY, f64::NAN] {
            assert!(scale(&[1.0, bad]).is_nan(), "{bad}");
        }
    }
}
