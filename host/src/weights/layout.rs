//! The weights that a configuration asks for: names as in the checkpoint, shapes `[out, in]`.

use super::{DrafterConfig, ModelConfig};

/// Prefix of the drafter's names in a bundle.
pub const DRAFTER: &str = "drafter.";

/// The layer that a weight of the target belongs to.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// The number of the routed expert that a weight of the target belongs to.
pub(super) fn expert_of(name: &str) -> Option<usize> {
    name.split_once(".mlp.experts.")?.1.split('.').next()?.parse().ok()
}

/// What a weight is used for; it bounds the formats it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A product: any format.
    Linear,
    /// Rows are looked up: f32 or bf16.
    Table,
    /// A norm's weight or a bias: f32 or bf16.
    Vector,
}

/// One expected weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub name: String,
    pub shape: Vec<usize>,
    pub usage: Use,
}

#[derive(Default)]
struct List {
    prefix: String,
    weights: Vec<Expected>,
}

impl List {
    fn add(&mut self, name: &str, shape: Vec<usize>, usage: Use) {
        self.weights.push(Expected { name: format!("{}{name}", self.prefix), shape, usage });
    }

    fn linear(&mut self, name: &str, n: usize, k: usize) {
        self.add(&format!("{name}.weight"), vec![n, k], Use::Linear);
    }

    fn norm(&mut self, name: &str, n: usize) {
        self.add(&format!("{name}.weight"), vec![n], Use::Vector);
    }

    fn feed_forward(&mut self, name: &str, hidden: usize, width: usize) {
        self.linear(&format!("{name}.gate_proj"), width, hidden);
        self.linear(&format!("{name}.up_proj"), width, hidden);
        self.linear(&format!("{name}.down_proj"), hidden, width);
    }
}

/// The target's weights.
pub fn target(c: &ModelConfig) -> Vec<Expected> {
    let mut list = List::default();
    let (hidden, heads) = (c.hidden_size, c.num_attention_heads);
    list.add("model.embed_tokens.weight", vec![c.vocab_size, hidden], Use::Table);
    for layer in 0..c.num_hidden_layers {
        list.prefix = format!("model.layers.{layer}.");
        list.norm("input_layernorm", hidden);
        list.linear("self_attn.q_a_proj", c.q_lora_rank, hidden);
        list.norm("self_attn.q_a_layernorm", c.q_lora_rank);
        list.linear("self_attn.q_b_proj", heads * c.qk_head_dim(), c.q_lora_rank);
        list.linear("self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, hidden);
        list.norm("self_attn.kv_a_layernorm", c.kv_lora_rank);
        list.linear("self_attn.kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank);
        list.linear("self_attn.o_proj", hidden, heads * c.v_head_dim);
        list.norm("post_attention_layernorm", hidden);
        if c.is_dense(layer) {
            list.feed_forward("mlp", hidden, c.intermediate_size);
            continue;
        }
        list.linear("mlp.gate", c.n_routed_experts, hidden);
        list.add("mlp.gate.e_score_correction_bias", vec![c.n_routed_experts], Use::Vector);
        for expert in 0..c.n_routed_experts {
            list.feed_forward(&format!("mlp.experts.{expert}"), hidden, c.moe_intermediate_size);
        }
        if c.n_shared_experts > 0 {
            list.feed_forward("mlp.shared_experts", hidden, c.n_shared_experts * c.moe_intermediate_size);
        }
    }
    list.prefix.clear();
    list.norm("model.norm", hidden);
    list.linear("lm_head", c.vocab_size, hidden);
    list.weights
}

/// The drafter's weights, with their prefix.
pub fn drafter(c: &DrafterConfig) -> Vec<Expected> {
    let mut list = List { prefix: DRAFTER.into(), ..List::default() };
    let hidden = c.hidden_size;
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    list.linear("fc", hidden, c.dflash_config.target_layer_ids.len() * hidden);
    list.norm("hidden_norm", hidden);
    for layer in 0..c.num_hidden_layers {
        list.prefix = format!("{DRAFTER}layers.{layer}.");
        list.norm("input_layernorm", hidden);
        list.linear("self_attn.q_proj", queries, hidden);
        list.linear("self_attn.k_proj", keys, hidden);
        list.linear("self_attn.v_proj", keys, hidden);
        list.norm("self_attn.q_norm", c.head_dim);
        list.norm("self_attn.k_norm", c.head_dim);
        list.linear("self_attn.o_proj", hidden, queries);
        list.norm("post_attention_layernorm", hidden);
        list.feed_forward("mlp", hidden, c.intermediate_size);
    }
    list.prefix = DRAFTER.into();
    list.norm("norm", hidden);
    list.weights
}
