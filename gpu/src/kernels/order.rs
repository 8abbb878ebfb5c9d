//! Floats as integers of the same order, so that a maximum is an integer maximum and a tie is an equality.

/// Less than the key of every float: a candidate that is not there.
pub const ABSENT: u32 = 0;

const SIGN: u32 = 1 << 31;

/// `key(a) < key(b)` exactly when `a < b`; -0 and +0 have one key. Not for NaN, whose keys lie outside the order.
#[inline(always)]
pub fn key(x: f32) -> u32 {
    // In round to nearest -0 + 0 is +0, and every other value stays.
    let bits = (x + 0.0).to_bits();
    if bits & SIGN != 0 { !bits } else { bits | SIGN }
}

/// The float of a key; +0 for both zeros.
#[inline(always)]
pub fn value(key: u32) -> f32 {
    f32::from_bits(if key & SIGN != 0 { key & !SIGN } else { !key })
}
