//! `quantization_config`: what compressed-tensors says about the weights, which the tensors must agree with.

use fancy_regex::Regex;
use serde_json::Value;

use super::super::Mismatch;
use super::super::error::rule;
use super::index::PREFIX;
use crate::linear::{Format, GROUPS};

const KEY: &str = "quantization_config";
/// The router is no `Linear` of the published model: settings for those do not touch it.
const ROUTER: &str = ".mlp.gate";

/// Packed 4-bit weights with one scale a group.
pub(super) struct Quantization {
    pub group: usize,
    targets: Vec<Pattern>,
    ignore: Vec<Pattern>,
}

/// Which modules are meant.
enum Pattern {
    /// `Linear`: all of them.
    Class,
    Exact(String),
    /// `re:...`, matched from the beginning of the name.
    Regex(Box<Regex>),
}

impl Pattern {
    fn parse(field: &str, text: &str) -> Result<Self, Mismatch> {
        match (text, text.strip_prefix("re:")) {
            ("Linear", _) => Ok(Self::Class),
            (_, None) => Ok(Self::Exact(text.to_string())),
            (_, Some(pattern)) => match Regex::new(&format!("^(?:{pattern})")) {
                Ok(regex) => Ok(Self::Regex(Box::new(regex))),
                Err(e) => Err(at(field, "patterns that compile", format_args!("`{text}`: {e}"))),
            },
        }
    }

    /// Whether `module` is meant, with or without the prefix of a multi-modal checkpoint.
    fn matches(&self, module: &str) -> bool {
        let prefixed = format!("{PREFIX}{module}");
        [module, &prefixed].iter().any(|name| match self {
            Self::Class => true,
            Self::Exact(exact) => exact == name,
            Self::Regex(regex) => regex.is_match(name).unwrap_or(false),
        })
    }
}

fn at(field: &str, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Mismatch {
    Mismatch::new(format_args!("{KEY}, field `{field}`"), expected, found)
}

impl Quantization {
    /// Of a whole config.json: in `text_config`, or beside it. `None` where there is none.
    pub fn of(config: &Value) -> Result<Option<Self>, Mismatch> {
        let inner = config.get("text_config").and_then(|text| text.get(KEY)).filter(|q| !q.is_null());
        let Some(q) = inner.or(config.get(KEY).filter(|q| !q.is_null())) else { return Ok(None) };
        let only = |field: &str, found: &Value, allowed: &[Value]| {
            rule(allowed.contains(found), || {
                let names: Vec<String> = allowed.iter().map(Value::to_string).collect();
                at(field, format_args!("{}, which is supported", names.join(" or ")), found)
            })
        };
        let null = Value::Null;
        let get = |object: &Value, field: &str| object.get(field).cloned().unwrap_or_default();
        only("quant_method", &get(q, "quant_method"), &["compressed-tensors".into()])?;
        only("format", &get(q, "format"), &["pack-quantized".into()])?;
        only("quantization_status", &get(q, "quantization_status"), &["compressed".into(), null.clone()])?;
        only("kv_cache_scheme", &get(q, "kv_cache_scheme"), std::slice::from_ref(&null))?;
        let groups = q.get("config_groups").and_then(Value::as_object);
        let group = match groups.map(|groups| groups.iter().collect::<Vec<_>>()).as_deref() {
            Some([(_, one)]) => (*one).clone(),
            Some(many) => return Err(at("config_groups", "one group", many.len())),
            None => return Err(at("config_groups", "one group", "none")),
        };
        for field in ["input_activations", "output_activations"] {
            only(field, &get(&group, field), std::slice::from_ref(&null))?;
        }
        let weights = get(&group, "weights");
        for (field, allowed) in [
            ("num_bits", vec![Value::from(4)]),
            ("type", vec!["int".into()]),
            ("symmetric", vec![true.into()]),
            ("strategy", vec!["group".into()]),
            ("dynamic", vec![false.into(), null.clone()]),
            ("actorder", vec![null.clone()]),
        ] {
            only(&format!("weights.{field}"), &get(&weights, field), &allowed)?;
        }
        let size = get(&weights, "group_size");
        let found = size.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| GROUPS.contains(size));
        let Some(size) = found else {
            return Err(at("weights.group_size", format_args!("one of {GROUPS:?}"), size));
        };
        Ok(Some(Self {
            group: size,
            targets: patterns("targets", group.get("targets"))?,
            ignore: patterns("ignore", q.get("ignore"))?,
        }))
    }

    /// Weight `name`, stored as `stored` in `format`, is quantized exactly if the settings say so.
    pub fn check(&self, name: &str, stored: &str, format: Format) -> Result<(), Mismatch> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let target = self.targets.iter().any(|pattern| pattern.matches(module));
        let ignored = module.ends_with(ROUTER) || self.ignore.iter().any(|pattern| pattern.matches(module));
        let (wanted, found) = (target && !ignored, matches!(format, Format::W4a16 { .. }));
        rule(wanted == found, || match wanted {
            true => Mismatch::tensor(stored, format_args!("packed codes, as {KEY} says"), "a plain tensor"),
            false => Mismatch::tensor(stored, format_args!("a plain tensor, as {KEY} says"), "packed codes"),
        })
    }
}

fn patterns(field: &str, list: Option<&Value>) -> Result<Vec<Pattern>, Mismatch> {
    let Some(list) = list.filter(|list| !list.is_null()) else { return Ok(Vec::new()) };
    let texts: Option<Vec<&str>> = list.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
    texts.ok_or_else(|| at(field, "a list of texts", list))?.into_iter().map(|t| Pattern::parse(field, t)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published ignore list, with and without prefix.
    #[test]
    fn the_published_settings() {
        let config = serde_json::json!({ "text_config": { "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": { "group_0": { "targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
                "dynamic": false, "actorder": null } } },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"] } } });
        let q = Quantization::of(&config).unwrap().unwrap();
        assert_eq!(q.group, 32);
        let packed = Format::W4a16 { group: 32 };
        for (name, format) in [
            ("lm_head.weight", Format::Bf16),
            ("model.layers.3.self_attn.o_proj.weight", Format::Bf16),
            ("model.layers.0.mlp.up_proj.weight", Format::Bf16),
            ("model.layers.1.mlp.gate.weight", Format::Bf16),
            ("model.layers.1.mlp.shared_experts.up_proj.weight", Format::Bf16),
            ("model.layers.1.mlp.experts.7.up_proj.weight", packed),
        ] {
            let other = if format == packed { Format::Bf16 } else { packed };
            assert!(q.check(name, name, format).is_ok(), "{name}");
            assert!(q.check(name, name, other).unwrap_err().to_string().contains("as quantization_config says"));
        }
        assert!(Quantization::of(&serde_json::json!({})).unwrap().is_none());
    }
}
