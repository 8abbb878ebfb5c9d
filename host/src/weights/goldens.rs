//! Goldens: prompts with the tokens that the numpy reference continued them with.

use safetensors::tensor::Dtype;

use super::Mismatch;
use super::error::rule;
use super::manifest::raw;
use super::store::Store;
use super::tensor::{f32_values, i32_values, typed};

pub(super) const PREFIX: &str = "golden.";

/// A prompt and its greedy continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Golden {
    pub prompt: Vec<i32>,
    pub tokens: Vec<i32>,
    /// Best minus second logit at each token.
    pub gap: Vec<f32>,
    pub draft: Option<Marginals>,
}

/// What a drafter gave when the bonus token was golden token p, for each p.
#[derive(Clone, Debug, PartialEq)]
pub struct Marginals {
    /// `[positions, depth, width]`.
    pub ids: Vec<i32>,
    /// Natural logarithms of probabilities, `[positions, depth, width]`, descending along the width.
    pub logp: Vec<f32>,
    pub positions: usize,
    /// L: drafted positions.
    pub depth: usize,
    /// K: candidates a position.
    pub width: usize,
}

impl Marginals {
    /// Ids and log-probabilities `[depth, width]` for the round whose bonus token is golden token `position`.
    pub fn at(&self, position: usize) -> Option<(&[i32], &[f32])> {
        let size = self.depth * self.width;
        let range = position * size..(position + 1) * size;
        Some((self.ids.get(range.clone())?, self.logp.get(range)?))
    }
}

/// All goldens of a file, numbered from 0 without gaps.
pub(super) fn read(file: &Store, vocab: usize) -> Result<Vec<Golden>, Mismatch> {
    let mut goldens = Vec::new();
    while file.get(&format!("{PREFIX}{}.prompt", goldens.len())).is_some() {
        goldens.push(golden(file, goldens.len(), vocab)?);
    }
    Ok(goldens)
}

/// The tensors of golden `i` by name.
pub(super) fn names(i: usize, golden: &Golden) -> Vec<String> {
    let parts = ["prompt", "tokens", "gap", "draft.ids", "draft.logp"];
    let count = if golden.draft.is_some() { parts.len() } else { 3 };
    parts[..count].iter().map(|part| format!("{PREFIX}{i}.{part}")).collect()
}

fn golden(file: &Store, i: usize, vocab: usize) -> Result<Golden, Mismatch> {
    let name = |part: &str| format!("{PREFIX}{i}.{part}");
    let prompt = ids(file, &name("prompt"), vocab, None)?;
    let tokens = ids(file, &name("tokens"), vocab, None)?;
    let gap = floats(file, &name("gap"), &[tokens.len()])?;
    if let Some(at) = gap.iter().position(|g| !(g.is_finite() && *g >= 0.0)) {
        return Err(Mismatch::tensor(&name("gap"), "finite gaps from 0 up", format_args!("{} at {at}", gap[at])));
    }
    let stored = [name("draft.ids"), name("draft.logp")].map(|n| file.get(&n).is_some());
    let draft = match stored {
        [false, false] => None,
        _ => Some(marginals(file, &name("draft.ids"), &name("draft.logp"), tokens.len(), vocab)?),
    };
    Ok(Golden { prompt, tokens, gap, draft })
}

fn marginals(file: &Store, ids_name: &str, logp_name: &str, count: usize, vocab: usize) -> Result<Marginals, Mismatch> {
    let shape = raw(file, ids_name)?.shape;
    let &[positions, depth, width] = shape else {
        return Err(Mismatch::tensor(ids_name, "three dimensions", format_args!("{shape:?}")));
    };
    rule(positions == count && depth > 0 && width > 0, || {
        Mismatch::tensor(ids_name, format_args!("[{count}, L, K], one entry a golden token"), format_args!("{shape:?}"))
    })?;
    let ids = ids(file, ids_name, vocab, Some(shape))?;
    let logp = floats(file, logp_name, shape)?;
    for (row, values) in logp.chunks(width).enumerate() {
        // A NaN compares as not descending; the last value of a row of one is looked at as well.
        let fine = values.windows(2).all(|w| w[0] >= w[1]) && values.iter().all(|&v| v <= 0.0);
        rule(fine, || {
            let place = format_args!("entry {}, depth {}: {values:?}", row / depth, row % depth);
            Mismatch::tensor(logp_name, "log-probabilities in descending order", place)
        })?;
    }
    Ok(Marginals { ids, logp, positions, depth, width })
}

/// i32 token ids; without a shape a list that is not empty.
fn ids(file: &Store, name: &str, vocab: usize, shape: Option<&[usize]>) -> Result<Vec<i32>, Mismatch> {
    let stored = raw(file, name)?;
    let length = stored.shape.first().copied().unwrap_or(0).max(1);
    typed(name, stored, &[Dtype::I32], shape.unwrap_or(&[length]))?;
    let ids = i32_values(stored.bytes);
    match ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
        None => Ok(ids),
        Some(at) => Err(Mismatch::tensor(name, format_args!("ids in 0..{vocab}"), format_args!("{} at {at}", ids[at]))),
    }
}

fn floats(file: &Store, name: &str, shape: &[usize]) -> Result<Vec<f32>, Mismatch> {
    let stored = raw(file, name)?;
    typed(name, stored, &[Dtype::F32], shape)?;
    Ok(f32_values(stored.bytes).collect())
}
