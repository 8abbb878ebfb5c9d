//! Rotation tables: YaRN in f64, rounded once to f32.
//!
//! Source: Peng et al., YaRN (arXiv 2309.00071), in the form that DeepSeek-V3's configuration names its constants.

use std::f64::consts::PI;

use crate::weights::RopeScaling;

/// cos and sin of each position and pair, `[positions, dim / 2]`.
pub struct RopeTable {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// `0.1 * mscale * ln(factor) + 1`, the attention temperature of YaRN; 1 without scaling.
fn temperature(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Angle of one position step for each of the `dim / 2` pairs.
pub fn frequencies(dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> Vec<f64> {
    let plain = |i: usize| theta.powf(-2.0 * i as f64 / dim as f64);
    let Some(s) = scaling else { return (0..dim / 2).map(plain).collect() };
    // The pair that turns `rotations` times over the original length.
    let correction = |rotations: f64| {
        dim as f64 * (s.original_max_position_embeddings as f64 / (2.0 * PI * rotations)).ln() / (2.0 * theta.ln())
    };
    let last = dim as f64 / 2.0 - 1.0;
    let low = correction(s.beta_fast).floor().clamp(0.0, last);
    let high = correction(s.beta_slow).ceil().clamp(0.0, dim as f64 - 1.0);
    let width = if high > low { high - low } else { 0.001 };
    (0..dim / 2)
        .map(|i| {
            let ramp = ((i as f64 - low) / width).clamp(0.0, 1.0);
            plain(i) * ((1.0 - ramp) + ramp / s.factor)
        })
        .collect()
}

/// Tables for positions `0..positions`.
pub fn rope_table(dim: usize, theta: f64, scaling: Option<&RopeScaling>, positions: usize) -> RopeTable {
    let frequencies = frequencies(dim, theta, scaling);
    let amplitude = scaling.map_or(1.0, |s| temperature(s.factor, s.mscale) / temperature(s.factor, s.mscale_all_dim));
    let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |w| p as f64 * w));
    let (cos, sin) = angles.map(|a| ((a.cos() * amplitude) as f32, (a.sin() * amplitude) as f32)).unzip();
    RopeTable { cos, sin }
}

/// Scale of the scores: `temperature(mscale_all_dim)^2 / sqrt(head)`.
pub fn softmax_scale(head: usize, scaling: Option<&RopeScaling>) -> f32 {
    let t =
        scaling.map_or(1.0, |s| if s.mscale_all_dim == 0.0 { 1.0 } else { temperature(s.factor, s.mscale_all_dim) });
    (t * t / (head as f64).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn k26() -> RopeScaling {
        RopeScaling {
            kind: Some("yarn".into()),
            rope_type: None,
            factor: 64.0,
            original_max_position_embeddings: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
        }
    }

    /// Frequencies and scale published for Kimi K2.6's configuration.
    #[test]
    fn k26_constants() {
        let w = frequencies(64, 50000.0, Some(&k26()));
        for (i, want) in
            [(0, 1.0), (1, 0.713111085), (8, 0.0668740305), (9, 0.0437766560), (19, 1.58374991e-4), (31, 4.38220646e-7)]
        {
            assert!((w[i] / want - 1.0).abs() < 1e-8, "w({i}) = {}, expected {want}", w[i]);
        }
        assert!((f64::from(softmax_scale(192, Some(&k26()))) / 0.144679625802689 - 1.0).abs() < 1e-7);
    }

    /// With mscale = mscale_all_dim the tables are not scaled.
    #[test]
    fn tables_are_rotations() {
        let t = rope_table(64, 50000.0, Some(&k26()), 3);
        assert_eq!((t.cos[0], t.sin[0], t.cos.len()), (1.0, 0.0, 96));
        assert!((t.cos[32] - 1f32.cos()).abs() < 1e-7);
        assert!(t.cos.iter().zip(&t.sin).all(|(c, s)| (c * c + s * s - 1.0).abs() < 1e-6));
    }
}
