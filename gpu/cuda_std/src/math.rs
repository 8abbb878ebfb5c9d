//! Scalar arithmetic with stated rounding. Rust never fuses `a * b + c`: write [`fma`].

use half::bf16;

use crate::arch;

/// `a * b + c` rounded once (`fma.rn.f32`).
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    arch::fma(a, b, c)
}

/// 2^x (`ex2.approx.ftz.f32`: relative error at most 2^-22, subnormal results flushed to zero).
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    arch::exp2(x)
}

/// log2 x (`lg2.approx.f32`: absolute error at most 2^-21.6 near 1, relative elsewhere).
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    arch::log2(x)
}

/// 1 / sqrt(x) (`rsqrt.approx.f32`: relative error at most 2^-22.9).
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    arch::rsqrt(x)
}

/// sqrt(x), correctly rounded (`sqrt.rn.f32`).
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    arch::sqrt(x)
}

/// Least whole number not below x (`cvt.rpi.f32.f32`); NaN and infinities stay.
#[inline(always)]
pub fn ceil(x: f32) -> f32 {
    arch::ceil(x)
}

/// e^x through [`exp2`].
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// ln x through [`log2`].
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    log2(x) * core::f32::consts::LN_2
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Nearest bf16, ties to even (`cvt.rn.bf16.f32`).
#[inline(always)]
pub fn to_bf16(x: f32) -> bf16 {
    bf16::from_bits(arch::cvt_bf16x2(x, 0.0) as u16)
}

/// Two values as a bf16 pair: `lo` in the low half (`cvt.rn.bf16x2.f32`).
#[inline(always)]
pub fn pack_bf16(lo: f32, hi: f32) -> u32 {
    arch::cvt_bf16x2(lo, hi)
}

/// The low half of a bf16 pair.
#[inline(always)]
pub fn bf16_lo(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

/// The high half of a bf16 pair.
#[inline(always)]
pub fn bf16_hi(pair: u32) -> f32 {
    f32::from_bits(pair & 0xFFFF_0000)
}

/// The value of a bf16, exact.
#[inline(always)]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// Eight 4-bit codes of a word, stored as q + 8, to bf16 pairs of q: pair `i` holds nibbles `i` (low) and `i + 4`.
///
/// OR-ing a code into the mantissa of 128.0 gives 128 + code exactly; subtracting 136 gives q (facts: Marlin's trick).
#[inline(always)]
pub fn dequant_pairs(word: u32) -> [u32; 4] {
    [
        arch::dequant_pair(word),
        arch::dequant_pair(word >> 4),
        arch::dequant_pair(word >> 8),
        arch::dequant_pair(word >> 12),
    ]
}

/// The same, but each value is a quarter of q: two shifts less. What adds up such products multiplies by
/// [`QUARTERS`].
///
/// The low nibble of each half goes as above. The next one is read where it stands: bf16 bits `16 code` are the
/// subnormal `16 code * 2^-133`. One fma makes a quarter of q of either; the upper two follow after one shift.
#[inline(always)]
pub fn dequant_quarters(word: u32) -> [u32; 4] {
    let upper = word >> 8;
    [arch::dequant_low(word), arch::dequant_high(word), arch::dequant_low(upper), arch::dequant_high(upper)]
}

/// Two values as an f16 pair: `lo` in the low half (`cvt.rn.f16x2.f32`).
#[inline(always)]
pub fn pack_half(lo: f32, hi: f32) -> u32 {
    arch::cvt_f16x2(lo, hi)
}

/// Eight 4-bit codes of a word to f16 pairs of q * s in the order of [`dequant_pairs`], the first and third by
/// `scales[0]`, the others by `scales[1]`, f16 pairs. Exact where s has 8 significant bits, as a bf16 has: the odd part
/// of q has three, and f16 holds eleven.
#[inline(always)]
pub fn dequant_scaled(word: u32, [even, odd]: [u32; 2]) -> [u32; 4] {
    let upper = word >> 8;
    [
        arch::dequant_half_low(word, even),
        arch::dequant_half_high(word, odd),
        arch::dequant_half_low(upper, even),
        arch::dequant_half_high(upper, odd),
    ]
}

/// Quarters of q in q.
pub const QUARTERS: f32 = 4.0;

/// 2^120: what the bits of an e4m3 code, taken as those of a bf16, are too small by.
const E4M3_STEP: f32 = f32::from_bits((127 + 120) << 23);

/// What [`e4m3_pairs`] multiplies by, for codes of `scale`: a power of two up to 2^7, or NaN.
#[inline(always)]
pub fn e4m3_factor(scale: f32) -> u32 {
    let factor = scale * E4M3_STEP;
    pack_bf16(factor, factor)
}

/// Four e4m3 codes, in the order of their bytes, times a scale: bf16 pairs, exact. See [`e4m3_factor`]. There is no
/// code for NaN: 0x7F is 480.
#[inline(always)]
pub fn e4m3_pairs(codes: u32, factor: u32) -> [u32; 2] {
    [arch::e4m3_pair::<false>(codes, factor), arch::e4m3_pair::<true>(codes, factor)]
}

/// The nearest e4m3 code, ties to even. `x` is at most 448 in size.
#[inline(always)]
pub fn to_e4m3(x: f32) -> u32 {
    /// Of an f32's fraction, beyond the three that e4m3 has.
    const REST: u32 = 20;
    /// Below, codes are multiples of 2^-9, the last digit of an f32 from 2^14 on.
    const LEAST_NORMAL: f32 = 1.0 / 64.0;
    const SHIFTER: f32 = 16384.0;
    let (sign, size) = (x.to_bits() >> 24 & 0x80, x.abs());
    let bits = size.to_bits();
    let rounded = bits + ((1 << (REST - 1)) - 1) + (bits >> REST & 1);
    let normal = (rounded >> REST).wrapping_sub(120 << 3);
    let code = if size < LEAST_NORMAL { (size + SHIFTER).to_bits() & 0xF } else { normal };
    sign | code
}

macro_rules! division {
    ($($div:ident $rem:ident $t:ty;)*) => { $(
        /// `a / b` without a branch for zero. `b` must not be zero (a fault on the CPU device).
        #[inline(always)]
        pub fn $div(a: $t, b: $t) -> $t {
            #[cfg(not(target_arch = "nvptx64"))]
            assert!(b != 0, "division by zero in a kernel");
            // SAFETY: b is not zero by contract.
            unsafe { a.checked_div(b).unwrap_unchecked() }
        }

        /// `a % b` without a branch for zero. `b` must not be zero (a fault on the CPU device).
        #[inline(always)]
        pub fn $rem(a: $t, b: $t) -> $t {
            #[cfg(not(target_arch = "nvptx64"))]
            assert!(b != 0, "division by zero in a kernel");
            // SAFETY: b is not zero by contract.
            unsafe { a.checked_rem(b).unwrap_unchecked() }
        }
    )* };
}
division! { div rem u32; div_usize rem_usize usize; }
