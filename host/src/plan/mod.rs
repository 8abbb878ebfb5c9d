//! What a model takes before it is loaded: memory by purpose, and the bytes that a token and a round must read at
//! least. All of it follows from names and shapes; nothing is read or allocated.
//!
//! With several GPUs the plan assumes what tensor parallelism gives: matrices are divided evenly (experts, heads, rows
//! of the head and the embedding), while norms, the router and the two narrow projections `q_a_proj` and
//! `kv_a_proj_with_mqa` are whole on each, and so is the cache, which all heads share.

mod gpus;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::engine::round_bytes;
use crate::kernels::KvFormat;
use crate::model::{pass_rows, scratch_bytes};
use crate::weights::{Bundle, DrafterConfig, ModelConfig, Role};
pub use gpus::{GPUS, Gpu, GpuList};

/// Bytes a device that nothing here counts: the driver's context, kernels, captured graphs, the allocator's rounding.
const RESERVE: u64 = 1 << 30;
const BF16: u64 = 2;
const F32: u64 = 4;

/// What the plan is for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens that the cache holds.
    pub context: usize,
    pub kv: KvFormat,
    /// Nodes of a tree, the root not counted; 0 without drafts.
    pub budget: usize,
    pub gpus: Vec<Gpu>,
}

/// Weights of one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    pub weights: u64,
    pub parameters: u64,
    pub bytes: u64,
    /// Of these, bytes that every one of several GPUs holds.
    pub whole_bytes: u64,
}

/// Bytes of which some are divided among GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    pub divided: f64,
    pub whole: f64,
}

impl Load {
    pub fn total(self) -> f64 {
        self.divided + self.whole
    }

    /// What one of `n` GPUs has of it.
    fn on_each(self, n: usize) -> f64 {
        self.divided / n as f64 + self.whole
    }

    fn add(&mut self, part: Part, share: f64) {
        self.divided += (part.bytes - part.whole_bytes) as f64 * share;
        self.whole += part.whole_bytes as f64 * share;
    }
}

/// What must be read at least.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Floor {
    /// Rows of the pass: 1, or a tree with its root.
    pub rows: usize,
    /// Experts of a layer that the rows wake, if routing is uniform.
    pub experts_a_layer: f64,
    pub weights: Load,
    /// Of a cache filled up to the context.
    pub cache: Load,
}

/// One GPU of the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OnDevice {
    #[serde(flatten)]
    pub gpu: Gpu,
    pub weights: u64,
    pub cache: u64,
    pub scratch: u64,
    pub reserve: u64,
    pub total: u64,
    /// What is left, or missing where negative.
    pub free: i64,
    pub fits: bool,
    /// Milliseconds at the nominal rate, the cache empty and full.
    pub token_ms: [f64; 2],
    pub round_ms: [f64; 2],
}

#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// All tensors of the files, used or not.
    pub tensors: usize,
    pub payload_bytes: u64,
    /// Of the target.
    pub parameters: u64,
    /// Those that one token touches, embedding and head included.
    pub active_parameters: u64,
    pub parts: BTreeMap<Role, Part>,
    pub weight_bytes: u64,
    pub context: usize,
    pub kv: KvFormat,
    pub cache_bytes_a_token: u64,
    pub cache_bytes: u64,
    /// The drafter's keys and values.
    pub drafter_cache_bytes: u64,
    /// Buffers of a pass and of a round, rotation tables included.
    pub scratch_bytes: u64,
    pub reserve_bytes: u64,
    pub budget: usize,
    pub token: Floor,
    /// A round with its drafts.
    pub round: Option<Floor>,
    pub devices: Vec<OnDevice>,
}

/// Whether every GPU holds all of a weight.
fn is_whole(name: &str, role: Role) -> bool {
    let narrow = name.ends_with(".q_a_proj.weight") || name.ends_with(".kv_a_proj_with_mqa.weight");
    narrow || name.contains("norm") || matches!(role, Role::Norms | Role::Router)
}

impl Plan {
    pub fn new(bundle: &Bundle, request: &Request) -> Self {
        let c = bundle.config();
        let drafter = bundle.drafter().filter(|_| request.budget > 0);
        let mut parts = parts(bundle);
        if drafter.is_none() {
            parts.remove(&Role::Drafter);
        }
        let sum = |of: fn(&Part) -> u64, drafter: bool| -> u64 {
            parts.iter().filter(|(role, _)| drafter || **role != Role::Drafter).map(|(_, part)| of(part)).sum()
        };
        let parameters = sum(|p| p.parameters, false);
        let routed = parts.get(&Role::RoutedExperts).map_or(0, |p| p.parameters);
        let (top, experts) = (c.num_experts_per_tok as u64, c.n_routed_experts as u64);
        let slots = request.context + pass_rows(request.budget + 1, request.context);
        let kv = request.kv;
        let cache_bytes_a_token = (c.num_hidden_layers * kv.row_bytes()) as u64;
        let drafter_slots = drafter.map_or(0, |d| (slots + d.block_size) as u64);
        let drafter_row = drafter.map_or(0, drafter_row);
        let (tensors, payload_bytes) = match bundle.folder() {
            Some(folder) => (folder.tensors, folder.payload_bytes),
            None => (bundle.tensor_count(), bundle.payload_bytes()),
        };
        let mut plan = Self {
            tensors,
            payload_bytes,
            parameters,
            active_parameters: parameters - routed + routed / experts * top,
            weight_bytes: sum(|p| p.bytes, true),
            context: request.context,
            kv,
            cache_bytes_a_token,
            cache_bytes: cache_bytes_a_token * slots as u64,
            drafter_cache_bytes: drafter_row * drafter_slots,
            scratch_bytes: scratch(c, drafter, request, slots),
            reserve_bytes: RESERVE,
            budget: request.budget,
            token: floor(c, None, &parts, 1, request),
            round: drafter.map(|d| floor(c, Some(d), &parts, request.budget + 1, request)),
            devices: Vec::new(),
            parts,
        };
        plan.devices = request.gpus.iter().map(|&gpu| plan.on_device(gpu, request.gpus.len())).collect();
        plan
    }

    /// Weights of all parts, as GPUs divide them.
    pub fn load(&self) -> Load {
        let mut load = Load::default();
        self.parts.values().for_each(|&part| load.add(part, 1.0));
        load
    }

    fn on_device(&self, gpu: Gpu, count: usize) -> OnDevice {
        let weights = self.load().on_each(count) as u64;
        let cache = self.cache_bytes + self.drafter_cache_bytes;
        let total = weights + cache + self.scratch_bytes + self.reserve_bytes;
        let free = gpu.memory as i64 - total as i64;
        let ms = |floor: Floor| {
            let [weights, cache] = [floor.weights, floor.cache].map(|load| load.on_each(count) / gpu.rate * 1e3);
            [weights, weights + cache]
        };
        OnDevice {
            gpu,
            weights,
            cache,
            scratch: self.scratch_bytes,
            reserve: self.reserve_bytes,
            total,
            free,
            fits: free >= 0,
            token_ms: ms(self.token),
            round_ms: ms(self.round.unwrap_or(self.token)),
        }
    }
}

fn parts(bundle: &Bundle) -> BTreeMap<Role, Part> {
    let mut parts: BTreeMap<Role, Part> = BTreeMap::new();
    for (name, line) in bundle.manifest() {
        let role = Role::of(name);
        let bytes = bundle.stored_bytes(name) as u64;
        let part = parts.entry(role).or_default();
        part.weights += 1;
        part.parameters += line.shape.iter().product::<usize>() as u64;
        part.bytes += bytes;
        part.whole_bytes += if is_whole(name, role) { bytes } else { 0 };
    }
    parts
}

/// Bytes of a drafter's keys and values for one token.
fn drafter_row(d: &DrafterConfig) -> u64 {
    2 * (d.num_hidden_layers * d.num_key_value_heads * d.head_dim) as u64 * BF16
}

/// Buffers of the target's pass, of a round and of the drafter.
fn scratch(c: &ModelConfig, drafter: Option<&DrafterConfig>, request: &Request, slots: usize) -> u64 {
    let tables = |dim: usize| (slots * dim) as u64 * F32;
    let rows = pass_rows(request.budget + 1, request.context);
    let target = scratch_bytes(c, slots, rows) as u64 + tables(c.qk_rope_head_dim);
    let own = drafter.map_or(0, |d| {
        let taps = d.dflash_config.target_layer_ids.len() * d.hidden_size;
        let attention = 2 * d.num_attention_heads * d.head_dim;
        let block = d.block_size * (d.vocab_size + attention + 3 * d.intermediate_size);
        // Features of a prefill chunk in both roundings, what the target taps, and the block's rows.
        (rows * (taps * 5 / 2 + 3 * d.hidden_size) + block) as u64 * F32 + tables(d.head_dim)
    });
    let depth = drafter.map_or(1, DrafterConfig::depth);
    target + own + round_bytes(c.vocab_size, request.budget, depth) as u64
}

fn floor(
    c: &ModelConfig,
    drafter: Option<&DrafterConfig>,
    parts: &BTreeMap<Role, Part>,
    rows: usize,
    request: &Request,
) -> Floor {
    // Each row takes `top` of `experts`: an expert is left alone by all with this probability, if routing is uniform.
    let (top, experts) = (c.num_experts_per_tok as f64, c.n_routed_experts as f64);
    let woken = 1.0 - (1.0 - top / experts).powi(rows as i32);
    let (mut weights, mut cache) = (Load::default(), Load::default());
    for (&role, &part) in parts {
        let share = match role {
            // A row a token.
            Role::Embedding => rows as f64 / c.vocab_size as f64,
            Role::RoutedExperts => woken,
            // The drafts' logits are a pass of their own.
            Role::Head if drafter.is_some() => 2.0,
            Role::Drafter if drafter.is_none() => 0.0,
            _ => 1.0,
        };
        weights.add(part, share);
    }
    let Request { context, kv, .. } = *request;
    cache.whole += (context * c.num_hidden_layers * kv.row_bytes()) as f64;
    cache.whole += drafter.map_or(0.0, |d| (context as u64 * drafter_row(d)) as f64);
    Floor { rows, experts_a_layer: woken * experts, weights, cache }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_weights_are_whole_on_every_gpu() {
        for (name, whole) in [
            ("model.layers.1.self_attn.q_a_proj.weight", true),
            ("model.layers.1.self_attn.q_b_proj.weight", false),
            ("model.layers.1.self_attn.q_a_layernorm.weight", true),
            ("model.layers.1.mlp.gate.weight", true),
            ("model.layers.0.mlp.gate_proj.weight", false),
            ("drafter.layers.0.self_attn.q_norm.weight", true),
            ("drafter.fc.weight", false),
        ] {
            assert_eq!(is_whole(name, Role::of(name)), whole, "{name}");
        }
    }
}
