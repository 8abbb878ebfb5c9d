//! Twins of `gpu::kernels::{route, expert_sort, swiglu, combine}`.

/// A stable descending order of `keys`, none NaN: larger first, ties by index. -0 and +0 tie.
pub(super) fn descending(keys: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|&a, &b| keys[b].partial_cmp(&keys[a]).unwrap_or(std::cmp::Ordering::Equal));
    order
}

/// `logits [rows, experts]`, `bias [experts]` -> ids and weights `[rows, top_k]`.
///
/// Scores and keys are rounded to f32, where two experts can tie (sigmoid reaches 1). A row with NaN has the ids
/// `0..top_k` and NaN weights.
pub fn route(logits: &[f32], bias: &[f32], top_k: usize, scaling: f32, norm: bool) -> (Vec<u32>, Vec<f64>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks(bias.len()) {
        let scores: Vec<f32> = row.iter().map(|&z| (1.0 / (1.0 + (-f64::from(z)).exp())) as f32).collect();
        let keys: Vec<f32> = scores.iter().zip(bias).map(|(p, b)| p + b).collect();
        if keys.iter().any(|k| k.is_nan()) {
            ids.extend(0..top_k as u32);
            weights.extend(vec![f64::NAN; top_k]);
            continue;
        }
        let chosen = &descending(&keys)[..top_k];
        let sum: f64 = chosen.iter().map(|&e| f64::from(scores[e])).sum();
        let divisor = if norm { sum + 1e-20 } else { 1.0 };
        ids.extend(chosen.iter().map(|&e| e as u32));
        weights.extend(chosen.iter().map(|&e| f64::from(scores[e]) / divisor * f64::from(scaling)));
    }
    (ids, weights)
}

/// `ids [pairs]` -> the order `[pairs]`, and the tiles: their number, then (expert, first, count) of each.
pub fn expert_sort(ids: &[u32], experts: usize, tile: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut order, mut tiles) = (Vec::new(), vec![0]);
    for expert in 0..experts as u32 {
        let pairs: Vec<u32> = (0..ids.len() as u32).filter(|&pair| ids[pair as usize] == expert).collect();
        for tile in pairs.chunks(tile) {
            tiles.extend([expert, order.len() as u32, tile.len() as u32]);
            tiles[0] += 1;
            order.extend(tile);
        }
    }
    (order, tiles)
}

/// `gate` and `up [rows, stride]` -> `[rows, width]`.
pub fn swiglu(gate: &[f32], up: &[f32], width: usize, stride: usize) -> Vec<f64> {
    let silu = |z: f64| z / (1.0 + (-z).exp());
    let row = |(g, u): (&[f32], &[f32])| -> Vec<f64> {
        (0..width).map(|i| silu(f64::from(g[i])) * f64::from(u[i])).collect()
    };
    gate.chunks(stride).zip(up.chunks(stride)).flat_map(row).collect()
}

/// `y [rows * top_k, width]`, `weights [rows, top_k]`, `shared` and `x [rows, width]` -> the new `x`.
pub fn combine(y: &[f32], weights: &[f32], shared: Option<&[f32]>, x: &[f32], width: usize, top_k: usize) -> Vec<f64> {
    (0..x.len())
        .map(|at| {
            let (row, i) = (at / width, at % width);
            let pairs = row * top_k..(row + 1) * top_k;
            let routed: f64 = pairs.map(|p| f64::from(weights[p]) * f64::from(y[p * width + i])).sum();
            f64::from(x[at]) + routed + shared.map_or(0.0, |s| f64::from(s[at]))
        })
        .collect()
}
