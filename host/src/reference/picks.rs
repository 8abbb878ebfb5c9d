//! Twins of `gpu::kernels::{embed, argmax, top_k}`.

use super::experts::descending;

/// `ids [rows]`, `table [vocab, width]` -> `[rows, width]`.
pub fn embed(ids: &[i32], table: &[f32], width: usize) -> Vec<f32> {
    ids.iter().flat_map(|&id| table[id as usize * width..][..width].iter().copied()).collect()
}

/// What [`argmax`] finds in a row: -1 as the pick of a row with NaN, +inf or no finite logit.
#[derive(Clone, Copy, Debug)]
pub struct Pick {
    pub pick: i32,
    pub best: f32,
    pub second: f32,
}

/// `logits [rows, vocab]` -> one pick a row.
pub fn argmax(logits: &[f32], vocab: usize) -> Vec<Pick> {
    logits
        .chunks(vocab)
        .map(|row| {
            if row.iter().any(|v| v.is_nan()) {
                return Pick { pick: -1, best: f32::NAN, second: f32::NAN };
            }
            let order = descending(row);
            let (best, second) = (row[order[0]], order.get(1).map_or(f32::NEG_INFINITY, |&i| row[i]));
            Pick { pick: if best.is_finite() { order[0] as i32 } else { -1 }, best, second }
        })
        .collect()
}

/// `logits [rows, vocab]` -> ids and log-probabilities `[rows, k]`; all NaN in a row with NaN, +inf or no finite logit,
/// where NaN counts as -inf in the order.
pub fn top_k(logits: &[f32], vocab: usize, k: usize) -> (Vec<i32>, Vec<f64>) {
    let (mut ids, mut logp) = (Vec::new(), Vec::new());
    for row in logits.chunks(vocab) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let broken = !max.is_finite() || row.iter().any(|v| v.is_nan());
        let sum: f64 = row.iter().map(|&v| (f64::from(v) - f64::from(max)).exp()).sum();
        let ordered: Vec<f32> = row.iter().map(|&v| if v.is_nan() { f32::NEG_INFINITY } else { v }).collect();
        for &i in &descending(&ordered)[..k] {
            ids.push(i as i32);
            logp.push(if broken { f64::NAN } else { f64::from(row[i]) - f64::from(max) - sum.ln() });
        }
    }
    (ids, logp)
}
