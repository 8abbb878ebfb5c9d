//! Twin of `gpu::kernels::rms_norm`.

/// `x [rows, stride]`, `weight [width]` -> `[rows, width]`.
pub fn rms_norm(x: &[f32], weight: &[f32], width: usize, stride: usize, eps: f32) -> Vec<f64> {
    x.chunks(stride)
        .flat_map(|row| {
            let mean = row[..width].iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row[..width].iter().zip(weight).map(move |(&v, &w)| f64::from(v) * scale * f64::from(w))
        })
        .collect()
}
