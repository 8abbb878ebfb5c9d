//! The text model's configuration, in the checkpoint's own field names.
//!
//! Fields that change nothing in inference are not read. A field whose value this engine does not implement is refused
//! by name: an ignored setting would give wrong tokens.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Mismatch;
use super::error::rule;
use super::json::{self, read_fields};

/// Latent width of the cache; the attention kernel's tile.
pub const KV_LORA_RANK: usize = 512;
/// Rotated part of a key; the attention kernel's tile.
pub const QK_ROPE_HEAD_DIM: usize = 64;
/// Experts that the sort kernel can order.
pub const MAX_EXPERTS: usize = 1024;
const ARCHITECTURES: [&str; 2] = ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"];
const MODEL_TYPES: [&str; 2] = ["kimi_k2", "kimi_k25"];
/// Sizes are refused above this, so that products of two fit in 64 bits and one fits in an i32.
const MAX_SIZE: usize = i32::MAX as usize;

#[derive(Clone, Debug, Serialize)]
pub struct ModelConfig {
    pub architectures: Vec<String>,
    pub model_type: String,
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    /// Layers before this one are dense.
    pub first_k_dense_replace: usize,
    pub moe_layer_freq: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    /// Width of the dense layers' feed-forward.
    pub intermediate_size: usize,
    /// Width of one expert.
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub n_shared_experts: usize,
    pub num_experts_per_tok: usize,
    pub n_group: usize,
    pub topk_group: usize,
    pub topk_method: String,
    pub scoring_func: String,
    pub norm_topk_prob: bool,
    #[serde(serialize_with = "json::short")]
    pub routed_scaling_factor: f32,
    pub hidden_act: String,
    #[serde(serialize_with = "json::short")]
    pub rms_norm_eps: f32,
    pub attention_bias: bool,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub num_nextn_predict_layers: Option<usize>,
    pub bos_token_id: Option<i32>,
    pub pad_token_id: Option<i32>,
}

/// YaRN. `None` in a configuration means plain rotary embeddings.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RopeScaling {
    /// Old and new name of the same field; where both are given they agree.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_type: Option<String>,
    pub factor: f64,
    pub original_max_position_embeddings: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub mscale: f64,
    pub mscale_all_dim: f64,
}

impl ModelConfig {
    /// Parses and checks the metadata entry `config`. The outer configuration of the multi-modal model is accepted and
    /// its `text_config` taken.
    pub fn parse(text: &str) -> Result<Self, Mismatch> {
        let value = text_config(json::parse(KEY, text)?);
        let config = read_fields!(
            KEY,
            &value,
            architectures,
            model_type,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            first_k_dense_replace,
            moe_layer_freq,
            num_attention_heads,
            num_key_value_heads,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            intermediate_size,
            moe_intermediate_size,
            n_routed_experts,
            n_shared_experts,
            num_experts_per_tok,
            n_group,
            topk_group,
            topk_method,
            scoring_func,
            norm_topk_prob,
            routed_scaling_factor,
            hidden_act,
            rms_norm_eps,
            attention_bias,
            tie_word_embeddings,
            max_position_embeddings,
            rope_theta,
            rope_scaling,
            num_nextn_predict_layers,
            bos_token_id,
            pad_token_id
        );
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Mismatch> {
        let known = self.architectures.iter().any(|a| ARCHITECTURES.contains(&a.as_str()));
        must(
            KEY,
            "architectures",
            known,
            format_args!("one of {ARCHITECTURES:?}"),
            format_args!("{:?}", self.architectures),
        )?;
        let known = MODEL_TYPES.contains(&self.model_type.as_str());
        must(KEY, "model_type", known, format_args!("one of {MODEL_TYPES:?}"), &self.model_type)?;
        self.check_sizes()?;
        self.check_features()?;
        must(KEY, "rms_norm_eps", positive(self.rms_norm_eps.into()), "a positive number", self.rms_norm_eps)?;
        let factor = self.routed_scaling_factor;
        must(KEY, "routed_scaling_factor", positive(factor.into()), "a positive number", factor)?;
        must(
            KEY,
            "rope_theta",
            self.rope_theta.is_finite() && self.rope_theta > 1.0,
            "a number above 1",
            self.rope_theta,
        )?;
        for (field, id) in [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)] {
            let Some(id) = id else { continue };
            let range = format_args!("an id below vocab_size {}", self.vocab_size);
            must(KEY, field, usize::try_from(id).is_ok_and(|id| id < self.vocab_size), range, id)?;
        }
        self.rope_scaling.as_ref().map_or(Ok(()), |r| r.check(KEY))
    }

    fn check_sizes(&self) -> Result<(), Mismatch> {
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("intermediate_size", self.intermediate_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            must(KEY, field, (1..=MAX_SIZE).contains(&size), format_args!("1 to {MAX_SIZE}"), size)?;
        }
        let layers = self.num_hidden_layers;
        let dense = self.first_k_dense_replace;
        must(KEY, "first_k_dense_replace", dense <= layers, format_args!("at most {layers} layers"), dense)?;
        let experts = self.n_routed_experts;
        must(
            KEY,
            "n_routed_experts",
            (1..=MAX_EXPERTS).contains(&experts),
            format_args!("1 to {MAX_EXPERTS}"),
            experts,
        )?;
        let top = self.num_experts_per_tok;
        must(KEY, "num_experts_per_tok", (1..=experts).contains(&top), format_args!("1 to {experts}"), top)?;
        must(KEY, "n_shared_experts", self.n_shared_experts <= MAX_EXPERTS, "at most 1024", self.n_shared_experts)
    }

    /// Settings with one implemented value.
    fn check_features(&self) -> Result<(), Mismatch> {
        let heads = self.num_attention_heads;
        for (field, found, only) in [
            ("num_key_value_heads", self.num_key_value_heads, heads),
            ("kv_lora_rank", self.kv_lora_rank, KV_LORA_RANK),
            ("qk_rope_head_dim", self.qk_rope_head_dim, QK_ROPE_HEAD_DIM),
            ("moe_layer_freq", self.moe_layer_freq, 1),
            ("n_group", self.n_group, 1),
            ("topk_group", self.topk_group, 1),
            ("num_nextn_predict_layers", self.num_nextn_predict_layers.unwrap_or(0), 0),
        ] {
            must(KEY, field, found == only, format_args!("{only}, the only value that is supported"), found)?;
        }
        for (field, found, only) in [
            ("topk_method", &self.topk_method, "noaux_tc"),
            ("scoring_func", &self.scoring_func, "sigmoid"),
            ("hidden_act", &self.hidden_act, "silu"),
        ] {
            must(KEY, field, found == only, format_args!("{only}, the only value that is supported"), found)?;
        }
        for (field, found) in
            [("attention_bias", self.attention_bias), ("tie_word_embeddings", self.tie_word_embeddings)]
        {
            must(KEY, field, !found, "false, the only value that is supported", found)?;
        }
        Ok(())
    }

    /// Makes it the configuration of the model's first layers.
    pub(super) fn keep_layers(&mut self, layers: usize) -> Result<(), Mismatch> {
        let all = self.num_hidden_layers;
        rule((1..=all).contains(&layers), || Mismatch::new("layers", format_args!("1 to {all}"), layers))?;
        self.num_hidden_layers = layers;
        self.first_k_dense_replace = self.first_k_dense_replace.min(layers);
        Ok(())
    }

    /// Width of one query head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    pub fn is_dense(&self, layer: usize) -> bool {
        layer < self.first_k_dense_replace
    }
}

const KEY: &str = "config";

/// The text part of a configuration in the names that this engine reads. A multi-modal model keeps it in `text_config`
/// and may leave `architectures` outside; transformers 5 has `rope_parameters` for `rope_scaling` and `rope_theta`.
pub(super) fn text_config(mut outer: Value) -> Value {
    if let Some(mut inner) = outer.get_mut("text_config").map(Value::take) {
        if let (Some(fields), Some(names)) = (inner.as_object_mut(), outer.get("architectures")) {
            fields.entry("architectures").or_insert_with(|| names.clone());
        }
        outer = inner;
    }
    rope_names(outer)
}

/// Gives `rope_parameters` the older names.
pub(super) fn rope_names(mut value: Value) -> Value {
    let Some(fields) = value.as_object_mut() else { return value };
    let Some(Value::Object(mut rope)) = fields.get("rope_parameters").cloned() else { return value };
    if let Some(theta) = rope.remove("rope_theta") {
        fields.entry("rope_theta").or_insert(theta);
    }
    let plain = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str) == Some("default");
    if !plain && fields.get("rope_scaling").is_none_or(Value::is_null) {
        fields.insert("rope_scaling".into(), Value::Object(rope));
    }
    value
}

impl RopeScaling {
    pub(super) fn check(&self, key: &str) -> Result<(), Mismatch> {
        for (field, kind) in [("rope_scaling.type", &self.kind), ("rope_scaling.rope_type", &self.rope_type)] {
            let yarn = kind.as_deref().is_none_or(|k| k == "yarn");
            must(key, field, yarn, "yarn, the only value that is supported", kind.as_deref().unwrap_or_default())?;
        }
        let named = self.kind.is_some() || self.rope_type.is_some();
        must(key, "rope_scaling.type", named, "yarn", "nothing")?;
        for (field, value) in [
            ("rope_scaling.factor", self.factor),
            ("rope_scaling.beta_fast", self.beta_fast),
            ("rope_scaling.beta_slow", self.beta_slow),
            ("rope_scaling.mscale", self.mscale),
            ("rope_scaling.mscale_all_dim", self.mscale_all_dim),
        ] {
            must(key, field, positive(value), "a positive number", value)?;
        }
        must(key, "rope_scaling.factor", self.factor >= 1.0, "at least 1", self.factor)?;
        let original = self.original_max_position_embeddings;
        let range = format_args!("1 to {MAX_SIZE}");
        must(key, "rope_scaling.original_max_position_embeddings", (1..=MAX_SIZE).contains(&original), range, original)
    }
}

pub(super) fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// A rule on one field of a configuration.
pub(super) fn must(
    key: &str,
    field: &str,
    holds: bool,
    expected: impl std::fmt::Display,
    found: impl std::fmt::Display,
) -> Result<(), Mismatch> {
    rule(holds, || Mismatch::new(format_args!("metadata `{key}`, field `{field}`"), expected, found))
}
