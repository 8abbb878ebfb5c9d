//! Scalar arithmetic: bits where PTX defines them, bounds where it states bounds.

use crate::math::*;

/// |got - want| / |want|.
fn relative(got: f32, want: f64) -> f64 {
    ((f64::from(got) - want) / want).abs()
}

#[test]
fn bf16_rounds_to_nearest_ties_to_even() {
    for (x, want) in [
        (0x3F80_0000, 0x3F80), // 1
        (0x3F80_8000, 0x3F80), // a tie: down to even
        (0x3F81_8000, 0x3F82), // a tie: up to even
        (0x3F80_8001, 0x3F81), // just above a tie
        (0x3F80_7FFF, 0x3F80), // just below
        (0xBF81_8000, 0xBF82), // of either sign
        (0x3FFF_FFFF, 0x4000), // a carry into the exponent
        (0x7F7F_FFFF, 0x7F80), // the largest f32 becomes infinity
        (0x7F7F_7FFF, 0x7F7F), // the largest that does not
        (0x7F80_0000, 0x7F80), // infinities
        (0xFF80_0000, 0xFF80),
        (0x0000_0000, 0x0000), // zeros
        (0x8000_0000, 0x8000),
        (0x0000_0001, 0x0000), // subnormal numbers
        (0x0000_8000, 0x0000),
        (0x0000_8001, 0x0001),
        (0x0001_8000, 0x0002),
        (0x007F_FFFF, 0x0080),
        (0x8040_0000, 0x8040),
        (0x7F80_0001, 0x7FFF), // every NaN is the one NaN, with its low bits kept from rounding to infinity
        (0xFFC0_0000, 0x7FFF),
        (0x7FFF_FFFF, 0x7FFF),
    ] {
        assert_eq!(to_bf16(f32::from_bits(x)).to_bits(), want, "{x:#010x}");
        assert_eq!(pack_bf16(f32::from_bits(x), 1.0), u32::from(want) | 0x3F80_0000, "{x:#010x}");
        assert_eq!(pack_bf16(-2.0, f32::from_bits(x)), u32::from(want) << 16 | 0xC000, "{x:#010x}");
    }
}

#[test]
fn halves_of_a_pair() {
    let pair = pack_bf16(1.5, -3.0);
    assert_eq!((bf16_lo(pair), bf16_hi(pair), from_bf16(to_bf16(0.15625))), (1.5, -3.0, 0.15625));
    assert!(bf16_lo(0x7FFF).is_nan() && bf16_hi(0x7FFF_0000).is_nan());
}

#[test]
fn codes_become_pairs() {
    // Nibble i is i, then the reverse.
    for (word, code) in [(0x7654_3210u32, 0u32), (0x89AB_CDEF, 15)] {
        let pairs = dequant_pairs(word);
        for (i, pair) in pairs.into_iter().enumerate() {
            let value = |nibble: usize| (nibble as u32 ^ code) as f32 - 8.0;
            assert_eq!((bf16_lo(pair), bf16_hi(pair)), (value(i), value(i + 4)), "{word:#x}, pair {i}");
            let quarters = dequant_quarters(word)[i];
            let found = (bf16_lo(quarters) * QUARTERS, bf16_hi(quarters) * QUARTERS);
            assert_eq!(found, (value(i), value(i + 4)), "{word:#x}, quarters {i}");
        }
    }
    assert_eq!(dequant_pairs(0x8888_8888), [0; 4]);
}

#[test]
fn fma_rounds_once() {
    let x = 1.0 + f32::EPSILON;
    assert_eq!(fma(x, x, -1.0 - 2.0 * f32::EPSILON), f32::EPSILON * f32::EPSILON);
    assert!(fma(f32::INFINITY, 0.0, 1.0).is_nan());
}

#[test]
fn powers_and_logarithms() {
    for i in -2000..2000 {
        let x = i as f32 * 0.063;
        assert!(relative(exp2(x), f64::from(x).exp2()) <= 2f64.powi(-22), "2^{x}");
        let y = (i + 2001) as f32 * 0.0371;
        let error = (f64::from(log2(y)) - f64::from(y).log2()).abs();
        assert!(error <= 2f64.powf(-21.6) || error / f64::from(y).log2().abs() <= 2f64.powi(-21), "log2 {y}");
        assert!(relative(rsqrt(y), f64::from(y).sqrt().recip()) <= 2f64.powf(-22.9), "rsqrt {y}");
        assert_eq!(sqrt(y), f64::from(y).sqrt() as f32);
    }
    assert_eq!((exp2(0.0), exp2(10.0), exp2(-3.0), exp2(-126.0)), (1.0, 1024.0, 0.125, f32::MIN_POSITIVE));
    assert_eq!((exp2(-127.0), exp2(-200.0), exp2(f32::NEG_INFINITY)), (0.0, 0.0, 0.0));
    assert_eq!((exp2(128.0), exp2(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
    assert_eq!((log2(1.0), log2(8.0), log2(0.0)), (0.0, 3.0, f32::NEG_INFINITY));
    assert_eq!((rsqrt(4.0), rsqrt(0.0), rsqrt(f32::INFINITY)), (0.5, f32::INFINITY, 0.0));
    assert!([exp2(f32::NAN), log2(-1.0), log2(f32::NAN), rsqrt(-1.0), sqrt(-1.0)].iter().all(|v| v.is_nan()));
}

#[test]
fn exponentials_to_base_e() {
    for i in -800..800 {
        let x = i as f32 * 0.1;
        let e = f64::from(x).exp();
        // The rounding of x log2 e weighs with the size of the exponent.
        assert!(relative(exp(x), e) <= 2f64.powi(-21) * (1.0 + f64::from(x.abs())), "e^{x}");
        assert!(relative(sigmoid(x), e / (1.0 + e)) <= 2f64.powi(-20) * (1.0 + f64::from(x.abs())), "sigmoid {x}");
        let want = f64::from(x) * e / (1.0 + e);
        assert!((f64::from(silu(x)) - want).abs() <= want.abs() * 2f64.powi(-20) * (1.0 + f64::from(x.abs())));
    }
    assert!((f64::from(ln(10.0)) - 10f64.ln()).abs() < 1e-6);
    assert_eq!((sigmoid(-200.0), sigmoid(0.0), sigmoid(200.0), silu(0.0)), (0.0, 0.5, 1.0, 0.0));
    assert!([exp(f32::NAN), sigmoid(f32::NAN), silu(f32::NAN)].iter().all(|v| v.is_nan()));
}

#[test]
fn division_of_whole_numbers() {
    assert_eq!((div(17, 5), rem(17, 5), div(u32::MAX, 1), rem(4, 9)), (3, 2, u32::MAX, 4));
    assert_eq!((div_usize(1 << 40, 1 << 20), rem_usize((1 << 40) + 3, 1 << 20)), (1 << 20, 3));
}
