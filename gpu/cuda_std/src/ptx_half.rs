//! Conversions to f16.

use core::arch::asm;

#[inline(always)]
pub fn cvt_f16x2(lo: f32, hi: f32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) r, in(reg32) hi, in(reg32) lo,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// `((word & 0x000F000F | 0x64006400) - 1032) * scale` per half, in f16.
#[inline(always)]
pub fn dequant_half_low(word: u32, scale: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 t; lop3.b32 t, {1}, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 t, t, {2}; \
              mul.f16x2 {0}, t, {3}; }}",
            out(reg32) r, in(reg32) word, in(reg32) 0x6408_6408u32, in(reg32) scale,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}

/// `((word & 0x00F000F0 | 0x64006400) / 16 - 72) * scale` per half, in f16.
#[inline(always)]
pub fn dequant_half_high(word: u32, scale: u32) -> u32 {
    let r: u32;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b32 t; lop3.b32 t, {1}, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 t, t, {2}, {3}; \
              mul.f16x2 {0}, t, {4}; }}",
            out(reg32) r, in(reg32) word, in(reg32) 0x2C00_2C00u32, in(reg32) 0xD480_D480u32, in(reg32) scale,
            options(pure, nomem, nostack, preserves_flags));
    }
    r
}
