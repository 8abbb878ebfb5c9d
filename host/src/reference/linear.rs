//! Twins of the matrix products: the values of a stored weight, then plain sums.

use cuda_std::bf16;
use half::f16;

/// Little-endian f32, at any address.
pub fn f32_values(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
}

/// Little-endian bf16, at any address.
pub fn bf16_values(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
}

/// `packed [rows, k / 2]` and `scales [rows, k / group]` to `[rows, k]`: each byte holds an even k in its low half and
/// the next in its high half, both stored as q + 8.
pub fn w4a16_values(packed: &[u8], scales: &[f64], k: usize, group: usize) -> Vec<f64> {
    let rows = packed.len() * 2 / k;
    let mut values = Vec::with_capacity(rows * k);
    for row in 0..rows {
        for column in 0..k {
            let byte = packed[(row * k + column) / 2];
            let stored = if column % 2 == 0 { byte % 16 } else { byte / 16 };
            values.push((f64::from(stored) - 8.0) * scales[row * (k / group) + column / group]);
        }
    }
    values
}

/// `y[r, b, n] = sum_k x[r, b, k] w[b, n, k]`, packed; row r of entry b begins at `r * x_stride + b * x_batch` of x.
pub fn linear(
    x: &[f32],
    [x_stride, x_batch]: [usize; 2],
    w: &[f64],
    [batch, n, k]: [usize; 3],
    rows: usize,
) -> Vec<f64> {
    let mut y = Vec::with_capacity(rows * batch * n);
    for r in 0..rows {
        for b in 0..batch {
            let x = &x[r * x_stride + b * x_batch..][..k];
            y.extend(w[b * n * k..][..n * k].chunks(k).map(|w| dot(x, w)));
        }
    }
    y
}

/// `y[pair, :] = w[experts[pair]] x[pair / pairs_per_row, :]`.
pub fn grouped(x: &[f32], pairs_per_row: usize, experts: &[usize], w: &[Vec<f64>], k: usize) -> Vec<f64> {
    let of_pair = |(pair, &expert): (usize, &usize)| {
        let x = &x[pair / pairs_per_row * k..][..k];
        w[expert].chunks(k).map(|w| dot(x, w)).collect::<Vec<_>>()
    };
    experts.iter().enumerate().flat_map(of_pair).collect()
}

fn dot(x: &[f32], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * w).sum()
}

/// Rows of a panel, and k of its chunks, which come in pairs.
const PANEL_ROWS: usize = 128;
const PANEL_K: usize = 64;

/// Where `x[row, k]` of rows of `width` values lies in panels, in values of 16 bits: within 32 k, the pairs
/// `8 c + 2 q` of four lanes c stand side by side, and pieces of 8 values are exchanged within a row.
pub fn panel_index(row: usize, k: usize, width: usize) -> usize {
    let chunks = width.div_ceil(2 * PANEL_K) * 2;
    let (chunk, step, lane, pair) = (k / PANEL_K, k % PANEL_K / 32, k % 32 / 8, k % 8 / 2);
    let piece = (step * 4 + pair) ^ (row % 8);
    let panel = row / PANEL_ROWS * chunks + chunk;
    (panel * PANEL_ROWS + row % PANEL_ROWS) * PANEL_K + piece * 8 + lane * 2 + k % 2
}

/// A row as f16 bits times a power of two that brings its largest value to 2^15 or more but below 2^16, and the inverse
/// of that power. A row with a NaN or an infinity is not scaled; nor is any by 2^127 or more.
pub fn half_row(x: &[bf16]) -> (Vec<u16>, f32) {
    let most = x.iter().fold(0f64, |most, v| if v.is_nan() { f64::INFINITY } else { most.max(v.to_f64().abs()) });
    let power = if !most.is_finite() {
        0
    } else if most == 0.0 {
        126
    } else {
        (15 - most.log2().floor() as i32).min(126)
    };
    let scaled = x.iter().map(|v| f16::from_f64(v.to_f64() * 2f64.powi(power)).to_bits());
    (scaled.collect(), 2f64.powi(-power) as f32)
}
