//! Twins of the attention side: `query`, `kv_append`, `head_norm_rope`, `mla_attention`, `block_attention`.

use std::f64::consts::LOG2_E;

use cuda_std::bf16;
use gpu::args::attention::{KEY, LATENT, ROPE};
use rayon::prelude::*;

use super::rms_norm;

/// Row `position` of a rotation table `[positions, pairs]`.
fn angles(table: &[f32], position: usize, pairs: usize) -> &[f32] {
    &table[position * pairs..(position + 1) * pairs]
}

/// Turns neighbouring pairs of `x` by the angles of `position`.
fn rotate_neighbours(x: &[f32], cos: &[f32], sin: &[f32], position: usize) -> Vec<f64> {
    let pairs = x.len() / 2;
    let (cos, sin) = (angles(cos, position, pairs), angles(sin, position, pairs));
    (0..pairs)
        .flat_map(|i| {
            let (even, odd) = (f64::from(x[2 * i]), f64::from(x[2 * i + 1]));
            let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
            [even * c - odd * s, odd * c + even * s]
        })
        .collect()
}

/// `q [rows, heads, nope + ROPE]`, `q_lat [rows, heads, LATENT]`, `positions [rows]` -> `[rows, heads, KEY]`, not
/// rounded.
pub fn query(q: &[f32], q_lat: &[f32], cos: &[f32], sin: &[f32], positions: &[usize], heads: usize) -> Vec<f64> {
    let width = q.len().checked_div(positions.len() * heads).unwrap_or(0);
    let mut out = Vec::new();
    for (i, latent) in q_lat.chunks(LATENT).enumerate() {
        let rope = &q[(i + 1) * width - ROPE..(i + 1) * width];
        out.extend(latent.iter().map(|&v| f64::from(v)));
        out.extend(rotate_neighbours(rope, cos, sin, positions[i / heads]));
    }
    out
}

/// `t [rows, KEY]`, `weight [LATENT]`, `positions [rows]` -> cache rows `[rows, KEY]`, unrounded.
pub fn kv_append(t: &[f32], weight: &[f32], eps: f32, cos: &[f32], sin: &[f32], positions: &[usize]) -> Vec<f64> {
    let row = |(t, &position): (&[f32], &usize)| {
        let mut row = rms_norm(t, weight, LATENT, KEY, eps);
        row.extend(rotate_neighbours(&t[LATENT..], cos, sin, position));
        row
    };
    t.chunks(KEY).zip(positions).flat_map(row).collect()
}

/// `x [heads, head_dim]` of one row at `position`; no norm without `weight`, no rotation without `tables`.
pub fn head_norm_rope(
    x: &[f32],
    head_dim: usize,
    weight: Option<&[f32]>,
    eps: f32,
    tables: Option<(&[f32], &[f32])>,
    position: usize,
) -> Vec<f64> {
    let half = head_dim / 2;
    let head = |x: &[f32]| {
        let y = match weight {
            Some(weight) => rms_norm(x, weight, head_dim, head_dim, eps),
            None => x.iter().map(|&v| f64::from(v)).collect(),
        };
        let Some((cos, sin)) = tables else { return y };
        let (cos, sin) = (angles(cos, position, half), angles(sin, position, half));
        let turned = |i: usize| {
            let (c, s) = (f64::from(cos[i % half]), f64::from(sin[i % half]));
            if i < half { y[i] * c - y[i + half] * s } else { y[i] * c + y[i - half] * s }
        };
        (0..head_dim).map(turned).collect()
    };
    x.chunks(head_dim).flat_map(head).collect()
}

/// What a twin makes of its softmax weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Exact,
    /// As the kernels: once to bf16, relative to a whole power of two, also for the sum that divides.
    Rounded,
}

/// Softmax of `scale * q . key(j)` over the visible keys, times their values.
fn attend<'a>(
    q: &[bf16],
    visible: &[usize],
    rounding: Weights,
    scale: f32,
    key: impl Fn(usize) -> &'a [bf16],
    value: impl Fn(usize) -> &'a [bf16],
    width: usize,
) -> Vec<f64> {
    let wide = |v: &bf16| f64::from(v.to_f32());
    let dot = |k: &[bf16]| q.iter().zip(k).map(|(a, b)| wide(a) * wide(b)).sum::<f64>();
    let scores: Vec<f64> = visible.iter().map(|&j| f64::from(scale) * dot(key(j))).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let base = (max * LOG2_E).ceil();
    let weight = |s: &f64| match rounding {
        Weights::Exact => (s - max).exp(),
        Weights::Rounded => bf16::from_f64((s * LOG2_E - base).exp2()).to_f64(),
    };
    let weights: Vec<f64> = scores.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut sums = vec![0.0; width];
    for (&j, w) in visible.iter().zip(&weights) {
        sums.iter_mut().zip(value(j)).for_each(|(sum, v)| *sum += w * wide(v));
    }
    sums.iter().map(|sum| sum / total).collect()
}

/// The slots that row `row` of a tree sees: `0..committed`, then its ancestors.
pub fn visible_slots(ancestors: &[u32], rows: usize, row: usize, committed: usize) -> Vec<usize> {
    let words = rows.div_ceil(32);
    let sees = |i: &usize| ancestors[row * words + i / 32] >> (i % 32) & 1 != 0;
    (0..committed).chain((0..rows).filter(sees).map(|i| committed + i)).collect()
}

/// `q [rows, heads, KEY]`, `cache [slots, KEY]`, `ancestors [rows, ceil(rows / 32)]` -> `[rows, heads, LATENT]`.
pub fn mla_attention(
    q: &[bf16],
    cache: &[bf16],
    ancestors: &[u32],
    committed: usize,
    rows: usize,
    heads: usize,
    scale: f32,
) -> Vec<f64> {
    mla_attention_with(Weights::Exact, q, cache, ancestors, committed, rows, heads, scale)
}

/// As [`mla_attention`], with weights as said.
pub fn mla_attention_with(
    weights: Weights,
    q: &[bf16],
    cache: &[bf16],
    ancestors: &[u32],
    committed: usize,
    rows: usize,
    heads: usize,
    scale: f32,
) -> Vec<f64> {
    let key = |j: usize| &cache[j * KEY..(j + 1) * KEY];
    let of_query = |i: usize| {
        let visible = visible_slots(ancestors, rows, i / heads, committed);
        attend(&q[i * KEY..(i + 1) * KEY], &visible, weights, scale, key, key, LATENT)
    };
    let each: Vec<Vec<f64>> = (0..rows * heads).into_par_iter().map(of_query).collect();
    each.concat()
}

/// `q [rows, heads, head_dim]`, `k` and `v [slots, kv_heads, head_dim]`; all see slots `0..committed + rows`, or, with
/// a window, so many of them up to their own.
pub fn block_attention(
    q: &[bf16],
    k: &[bf16],
    v: &[bf16],
    committed: usize,
    window: Option<usize>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
) -> Vec<f64> {
    let rows = q.len() / (heads * head_dim);
    let mut out = Vec::new();
    for (i, q) in q.chunks(head_dim).enumerate() {
        let (row, head) = (i / heads, i % heads / (heads / kv_heads));
        let sees = |&slot: &usize| window.is_none_or(|w| slot <= committed + row && committed + row < slot + w);
        let visible: Vec<usize> = (0..committed + rows).filter(sees).collect();
        let at = |j: usize| (j * kv_heads + head) * head_dim..(j * kv_heads + head + 1) * head_dim;
        let (key, value) = (|j: usize| &k[at(j)], |j: usize| &v[at(j)]);
        out.extend(attend(q, &visible, Weights::Exact, scale, key, value, head_dim));
    }
    out
}
