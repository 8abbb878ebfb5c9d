//! Tensor-core products and the loads of their fragments. Warp-wide: all 32 lanes call together.
//!
//! Fragments of `m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16"), with `g = lane / 4`, `c = lane % 4`:
//!
//! ```text
//! A (16 x 16, row)  a0: row g,   k 2c..2c+1    a1: row g+8, k 2c..2c+1
//!                   a2: row g,   k 2c+8..+9    a3: row g+8, k 2c+8..+9
//! B (16 x 8, col)   b0: k 2c..2c+1, col g      b1: k 2c+8..+9, col g
//! C, D (16 x 8)     d0: row g, col 2c   d1: row g, col 2c+1   d2: row g+8, col 2c   d3: row g+8, col 2c+1
//! ```

use half::bf16;

use crate::{Shared, arch};

/// `d += a * b`: bf16 operands, f32 sums (`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`).
///
/// Each product is exact in f32; the order of the sixteen additions is the hardware's (on the CPU: ascending k).
#[inline(always)]
pub fn mma_m16n8k16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    arch::mma_m16n8k16(d, a, b);
}

/// Two [`mma_m16n8k16`] one after the other, `d += a[0] * b[0..2]` then `d += a[1] * b[2..4]`: 32 k in a row. The same
/// two instructions on a GPU; on the CPU the lanes meet once instead of twice, which is most of the cost there.
#[inline(always)]
pub fn mma_m16n8k16_x2(d: &mut [f32; 4], a: [[u32; 4]; 2], b: [u32; 4]) {
    arch::mma_m16n8k16_x2(d, a, b);
}

/// [`mma_m16n8k16_x2`] on zeros.
#[inline(always)]
pub fn product_m16n8k32(a: [[u32; 4]; 2], b: [u32; 4]) -> [f32; 4] {
    arch::product_m16n8k32(a, b)
}

/// Four 8x8 matrices of 16-bit values. Lane `l` names, by its first element's index, row `l % 8` of matrix `l / 8`
/// (16 bytes, 16-byte aligned); word `i` of the result is this lane's pair of matrix `i`: row `lane / 4`, columns
/// `2 * (lane % 4)` and the next.
#[inline(always)]
pub fn ldmatrix_x4(tile: Shared<bf16>, row_start: usize) -> [u32; 4] {
    arch::ldmatrix_x4(tile.addr_of(row_start, 8))
}

/// As [`ldmatrix_x4`] with each matrix transposed: rows `2 * (lane % 4)` and the next, column `lane / 4`.
#[inline(always)]
pub fn ldmatrix_x4_trans(tile: Shared<bf16>, row_start: usize) -> [u32; 4] {
    arch::ldmatrix_x4_trans(tile.addr_of(row_start, 8))
}

/// Two 8x8 matrices: lanes 0..15 name the rows (the others repeat valid ones).
#[inline(always)]
pub fn ldmatrix_x2(tile: Shared<bf16>, row_start: usize) -> [u32; 2] {
    arch::ldmatrix_x2(tile.addr_of(row_start, 8))
}

/// As [`ldmatrix_x2`], transposed.
#[inline(always)]
pub fn ldmatrix_x2_trans(tile: Shared<bf16>, row_start: usize) -> [u32; 2] {
    arch::ldmatrix_x2_trans(tile.addr_of(row_start, 8))
}
