//! Twins of `gpu::kernels::{embed, argmax, top_k, sample_limits}`.

use super::experts::descending;
use crate::kernels::Sampling;

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

/// Share of 2^31 that a logit weighs in top-p.
const UNIT: f64 = (1u64 << 31) as f64;

/// Weight of `logit` in a row with the largest logit `max`.
pub fn sample_weight(logit: f32, max: f32, temperature: f32) -> u64 {
    ((-(f64::from(max) - f64::from(logit)) / f64::from(temperature)).exp() * UNIT + 0.5) as u64
}

/// What top-p wants of the weights `all`.
pub fn sample_share(all: u64, top_p: f32) -> u64 {
    ((all as f32 * top_p) as u64).clamp(1, all)
}

/// The ids that the filters keep, likeliest first. `logits` are numbers, at least one of them finite.
pub fn sample_kept(logits: &[f32], sampling: &Sampling) -> Vec<usize> {
    let mut kept = descending(logits);
    let max = logits[kept[0]];
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let weights: Vec<u64> = kept.iter().map(|&i| sample_weight(logits[i], max, sampling.temperature)).collect();
        let wanted = sample_share(weights.iter().sum(), sampling.top_p);
        let mut sum = 0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        kept.truncate(reached.map_or(kept.len(), |at| at + 1));
    }
    if sampling.min_p > 0.0 {
        let least = f64::from(max) + f64::from(sampling.min_p).ln() * f64::from(sampling.temperature);
        kept.retain(|&i| f64::from(logits[i]) >= least);
    }
    kept
}

/// `-ln(-ln(1 - u))` for the u of 32 random bits.
pub fn gumbel(word: u32) -> f64 {
    let u = (f64::from(word) + 0.5) / (1u64 << 32) as f64;
    -(-(-u).ln_1p()).ln()
}

/// The draw at `position` from the ids `kept` of a row: the largest of logit / T + noise.
pub fn draw(logits: &[f32], kept: &[usize], sampling: &Sampling, position: u32) -> Pick {
    let key = [sampling.seed as u32, (sampling.seed >> 32) as u32];
    let mut values = vec![f32::NEG_INFINITY; logits.len()];
    for &id in kept {
        let words = gpu::philox::philox([id as u32 / 4, position, 0, 0], key);
        values[id] = (f64::from(logits[id]) / f64::from(sampling.temperature) + gumbel(words[id % 4])) as f32;
    }
    argmax(&values, values.len())[0]
}

/// The probabilities of the ids `kept` of a row.
pub fn probabilities(logits: &[f32], kept: &[usize], temperature: f32) -> Vec<f64> {
    let weight = |id: usize| ((f64::from(logits[id]) - f64::from(logits[kept[0]])) / f64::from(temperature)).exp();
    let all: f64 = kept.iter().map(|&id| weight(id)).sum();
    let mut p = vec![0.0; logits.len()];
    kept.iter().for_each(|&id| p[id] = weight(id) / all);
    p
}
