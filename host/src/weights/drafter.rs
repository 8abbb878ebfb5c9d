//! The block drafter's configuration (DFlash), in the published field names.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::{must, positive, rope_names};
use super::json::{self, read_fields};
use super::{Mismatch, ModelConfig, RopeScaling};

const KEY: &str = "drafter_config";
const ARCHITECTURE: &str = "DFlashDraftModel";
/// Drafted positions that the tree kernel can hold.
pub const MAX_DEPTH: usize = 31;
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
const LAYER_TYPES: [&str; 2] = [FULL, SLIDING];
/// More layers than any drafter has, and few enough to list.
const MAX_LAYERS: usize = 1 << 16;
/// Head widths of the block attention kernel.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// Embedding and head are the target's.
#[derive(Clone, Debug, Serialize)]
pub struct DrafterConfig {
    pub architectures: Vec<String>,
    /// Rows of a block: the bonus token and `block_size - 1` masks.
    pub block_size: usize,
    pub num_target_layers: usize,
    pub dflash_config: DFlash,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub hidden_act: String,
    #[serde(serialize_with = "json::short")]
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub max_position_embeddings: usize,
    /// `full_attention` or `sliding_attention`.
    pub layer_types: Vec<String>,
    /// Positions that a row of a sliding layer sees, its own the last.
    pub sliding_window: Option<usize>,
    pub attention_bias: bool,
    pub vocab_size: usize,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct DFlash {
    /// Layers of the target whose outputs feed the drafter.
    pub target_layer_ids: Vec<usize>,
    pub mask_token_id: i32,
    /// A window in both directions, of some drafters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_swa: Option<bool>,
}

/// Completes what Qwen3's configuration leaves to its readers: without `layer_types`, layers from `max_window_layers`
/// on slide where `use_sliding_window` says so. A switch that says no beside layers that slide is a contradiction.
fn layer_types(value: &mut Value) -> Result<(), Mismatch> {
    let slides: Option<bool> = json::field(KEY, value, "use_sliding_window")?;
    let types: Option<Vec<String>> = json::field(KEY, value, "layer_types")?;
    if let Some(types) = types {
        let contradiction = slides == Some(false) && types.iter().any(|t| t == SLIDING);
        return must(KEY, "use_sliding_window", !contradiction, "true, as layers of `layer_types` slide", false);
    }
    let layers: usize = json::field(KEY, value, "num_hidden_layers")?;
    let first: Option<usize> = json::field(KEY, value, "max_window_layers")?;
    let first = first.filter(|_| slides == Some(true)).unwrap_or(layers);
    must(KEY, "num_hidden_layers", layers <= MAX_LAYERS, format_args!("at most {MAX_LAYERS}"), layers)?;
    let types: Vec<&str> = (0..layers).map(|i| if i < first { FULL } else { SLIDING }).collect();
    value["layer_types"] = types.into();
    Ok(())
}

impl DrafterConfig {
    /// Parses the metadata entry `drafter_config` and checks it against the target's configuration.
    pub fn parse(text: &str, target: &ModelConfig) -> Result<Self, Mismatch> {
        let mut value = rope_names(json::parse(KEY, text)?);
        layer_types(&mut value)?;
        let config = read_fields!(
            KEY,
            &value,
            architectures,
            block_size,
            num_target_layers,
            dflash_config,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            hidden_act,
            rms_norm_eps,
            rope_theta,
            rope_scaling,
            max_position_embeddings,
            layer_types,
            sliding_window,
            attention_bias,
            vocab_size
        );
        config.check(target)?;
        Ok(config)
    }

    fn check(&self, target: &ModelConfig) -> Result<(), Mismatch> {
        let known = self.architectures.iter().any(|a| a == ARCHITECTURE);
        must(KEY, "architectures", known, ARCHITECTURE, format_args!("{:?}", self.architectures))?;
        for (field, found, targets) in [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
        ] {
            must(KEY, field, found == targets, format_args!("{targets}, the target's"), found)?;
        }
        let depth = self.depth();
        must(
            KEY,
            "block_size",
            (1..=MAX_DEPTH).contains(&depth),
            format_args!("2 to {}", MAX_DEPTH + 1),
            self.block_size,
        )?;
        for (field, size) in [
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            let range = format_args!("1 to {}", i32::MAX);
            must(KEY, field, size >= 1 && i32::try_from(size).is_ok(), range, size)?;
        }
        let (heads, shared) = (self.num_attention_heads, self.num_key_value_heads);
        let range = format_args!("a divisor of {heads} heads");
        must(KEY, "num_key_value_heads", heads.is_multiple_of(shared), range, shared)?;
        must(KEY, "head_dim", HEAD_DIMS.contains(&self.head_dim), format_args!("one of {HEAD_DIMS:?}"), self.head_dim)?;
        must(KEY, "hidden_act", self.hidden_act == "silu", "silu, the only value that is supported", &self.hidden_act)?;
        must(KEY, "attention_bias", !self.attention_bias, "false, the only value that is supported", true)?;
        must(KEY, "rms_norm_eps", positive(self.rms_norm_eps.into()), "a positive number", self.rms_norm_eps)?;
        must(
            KEY,
            "rope_theta",
            self.rope_theta.is_finite() && self.rope_theta > 1.0,
            "a number above 1",
            self.rope_theta,
        )?;
        self.check_layers(target)?;
        self.rope_scaling.as_ref().map_or(Ok(()), |r| r.check(KEY))
    }

    fn check_layers(&self, target: &ModelConfig) -> Result<(), Mismatch> {
        let found = self.layer_types.len();
        must(
            KEY,
            "layer_types",
            found == self.num_hidden_layers,
            format_args!("{} types", self.num_hidden_layers),
            found,
        )?;
        if let Some(other) = self.layer_types.iter().find(|t| !LAYER_TYPES.contains(&t.as_str())) {
            must(KEY, "layer_types", false, format_args!("{LAYER_TYPES:?}"), other)?;
        }
        if self.layer_types.iter().any(|t| t == SLIDING) {
            let found = self.sliding_window.map_or("nothing".into(), |w| w.to_string());
            let fine = self.sliding_window.is_some_and(|w| (1..=i32::MAX as usize).contains(&w));
            must(KEY, "sliding_window", fine, format_args!("1 to {} for the sliding layers", i32::MAX), found)?;
        }
        let swa = self.dflash_config.use_swa.unwrap_or(false);
        must(KEY, "dflash_config.use_swa", !swa, "false: windows that are not causal are not supported", swa)?;
        let taps = &self.dflash_config.target_layer_ids;
        let ascending = taps.windows(2).all(|w| w[0] < w[1]);
        let inside = taps.last().is_some_and(|&last| last < target.num_hidden_layers);
        let range = format_args!("ascending layers below {}", target.num_hidden_layers);
        must(KEY, "dflash_config.target_layer_ids", ascending && inside, range, format_args!("{taps:?}"))?;
        let mask = self.dflash_config.mask_token_id;
        let inside = usize::try_from(mask).is_ok_and(|id| id < self.vocab_size);
        must(KEY, "dflash_config.mask_token_id", inside, format_args!("an id below {}", self.vocab_size), mask)
    }

    /// Positions that a row sees in `layer`; all where there is none.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.layer_types.get(layer).is_some_and(|t| t == SLIDING))
    }

    /// Drafted positions of a round.
    pub fn depth(&self) -> usize {
        self.block_size.saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::weights::Bundle;

    /// The types of both layers of the drafter that ships, with some fields changed.
    fn types(change: impl FnOnce(&mut Value)) -> Result<Vec<String>, String> {
        let bundle = Bundle::open(Path::new("bundles/k26-small-int4.kdtr")).unwrap();
        let mut config = serde_json::to_value(bundle.drafter().unwrap()).unwrap();
        change(&mut config);
        let parsed = DrafterConfig::parse(&config.to_string(), bundle.config());
        parsed.map(|config| config.layer_types).map_err(|e| e.to_string())
    }

    #[test]
    fn which_layers_slide() {
        let derived = |slides: Value, first: Value, window: Value| {
            types(|c| {
                c["layer_types"] = json!(null);
                c["use_sliding_window"] = slides;
                c["max_window_layers"] = first;
                c["sliding_window"] = window;
            })
        };
        let full = Ok(vec![FULL.to_string(), FULL.into()]);
        assert_eq!(derived(json!(false), json!(0), json!(9)), full);
        assert_eq!(derived(json!(null), json!(0), json!(9)), full);
        assert_eq!(derived(json!(true), json!(28), json!(9)), full);
        assert_eq!(derived(json!(true), json!(1), json!(9)), Ok(vec![FULL.into(), SLIDING.into()]));
        assert!(derived(json!(true), json!(1), json!(null)).unwrap_err().contains("field `sliding_window`"));
        assert!(derived(json!(1), json!(1), json!(9)).unwrap_err().contains("field `use_sliding_window`"));
        let stated = |slides: bool| {
            types(|c| {
                c["layer_types"] = json!([SLIDING, FULL]);
                c["use_sliding_window"] = json!(slides);
                c["sliding_window"] = json!(9);
            })
        };
        assert_eq!(stated(true), Ok(vec![SLIDING.into(), FULL.into()]));
        assert!(stated(false).unwrap_err().contains("as layers of `layer_types` slide"));
        // A window in both directions is another mask.
        assert!(types(|c| c["dflash_config"]["use_swa"] = json!(true)).unwrap_err().contains("use_swa"));
    }
}
