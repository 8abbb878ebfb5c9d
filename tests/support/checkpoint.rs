#![allow(dead_code, reason = "shared by the test programs; none uses all of it")]
//! Checkpoint folders in exactly the published form, made from the weights of a bundle that ships: names, prefix,
//! packed experts, one shard a layer, index, settings, tokenizer files, an image tower that text skips. The bundle's
//! goldens are those of the numpy reference, so a folder's tokens are known.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::bundle::{Parts, Tensor};

pub const PREFIX: &str = "language_model.";
pub const INDEX: &str = "model.safetensors.index.json";

/// A checkpoint folder in memory. Shards are written in order and numbered from 1.
#[derive(Clone)]
pub struct Checkpoint {
    /// Text files by name, JSON among them.
    pub texts: BTreeMap<String, String>,
    pub shards: Vec<BTreeMap<String, Tensor>>,
    /// In place of the index that follows from the shards.
    pub index: Option<Value>,
}

fn plain(dtype: Dtype, shape: &[usize]) -> Tensor {
    let bits: usize = shape.iter().product::<usize>() * dtype.bitsize();
    Tensor { dtype, shape: shape.to_vec(), bytes: vec![0; bits / 8] }
}

fn ints(values: &[i32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { dtype: Dtype::I32, shape: vec![values.len()], bytes }
}

/// What the published quantization settings say.
pub fn quantization_config() -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "kv_cache_scheme": null, "global_compression_ratio": null,
        "config_groups": { "group_0": {
            "targets": ["Linear"], "input_activations": null, "output_activations": null,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
                "dynamic": false, "actorder": null, "block_structure": null, "observer": "minmax",
                "observer_kwargs": {}
            }
        } },
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"
        ]
    })
}

/// Shard of a tensor by its name without prefix: a layer each, then embedding and head.
fn shard_of(name: &str, layers: usize) -> usize {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
    layer.unwrap_or(layers)
}

impl Checkpoint {
    /// The target of bundle `name`; with the prefix of the multi-modal model or, as the text models have it, without.
    pub fn of(name: &str, multi_modal: bool) -> Self {
        let parts = Parts::of(name);
        let mut text = parts.get("config");
        let layers = text["num_hidden_layers"].as_u64().unwrap() as usize;
        text["quantization_config"] = quantization_config();
        let manifest = parts.get("manifest");
        let mut shards = vec![BTreeMap::new(); layers + 1];
        for (weight, line) in manifest.as_object().unwrap().iter().filter(|(name, _)| !name.starts_with("drafter.")) {
            let stored = if multi_modal { format!("{PREFIX}{weight}") } else { weight.clone() };
            let shard = &mut shards[shard_of(weight, layers)];
            if line["format"] != "w4a16" {
                shard.insert(stored, parts.tensors[weight].clone());
                continue;
            }
            let codes = &parts.tensors[&format!("{weight}.qw")];
            let (n, k) = (codes.shape[0], 2 * codes.shape[1]);
            let packed = Tensor { dtype: Dtype::I32, shape: vec![n, k / 8], bytes: codes.bytes.clone() };
            shard.insert(format!("{stored}_packed"), packed);
            shard.insert(format!("{stored}_scale"), parts.tensors[&format!("{weight}.sc")].clone());
            shard.insert(format!("{stored}_shape"), ints(&[n as i32, k as i32]));
        }
        let ends = [text["eos_token_id"].clone()];
        let config = if multi_modal {
            shards.push(BTreeMap::from([
                ("mm_projector.pre_norm.weight".into(), plain(Dtype::BF16, &[32])),
                ("mm_projector.proj.0.weight".into(), plain(Dtype::BF16, &[64, 128])),
            ]));
            shards.push(BTreeMap::from([
                ("vision_tower.patch_embed.proj.weight".into(), plain(Dtype::BF16, &[32, 3, 14, 14])),
                ("vision_tower.encoder.blocks.0.wqkv.weight".into(), plain(Dtype::BF16, &[96, 32])),
            ]));
            json!({
                "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
                "media_placeholder_token_id": 163605, "text_config": text, "vision_config": { "vt_hidden_size": 32 }
            })
        } else {
            text
        };
        let mut texts = BTreeMap::from([
            ("config.json".to_string(), config.to_string()),
            ("generation_config.json".into(), json!({ "eos_token_id": ends, "max_length": 4096 }).to_string()),
        ]);
        if let Some(vocabulary) = parts.tensors.get("tokenizer.tiktoken") {
            let spec = parts.get("tokenizer");
            let tokens =
                spec["special_tokens"].as_object().unwrap().iter().map(|(text, id)| {
                    (id.to_string(), json!({ "content": text, "special": true, "normalized": false }))
                });
            let decoder: serde_json::Map<String, Value> = tokens.collect();
            let pre = json!({ "type": "Split", "pattern": { "Regex": spec["pattern"] } });
            texts.extend([
                ("tiktoken.model".to_string(), String::from_utf8(vocabulary.bytes.clone()).unwrap()),
                ("tokenizer_config.json".into(), json!({ "added_tokens_decoder": decoder }).to_string()),
                ("tokenizer.json".into(), json!({ "pre_tokenizer": pre }).to_string()),
                ("chat_template.jinja".into(), "{{ messages[0]['content'] }}".into()),
            ]);
        }
        Self { texts, shards, index: None }
    }

    /// The drafter of bundle `name` in its published form: one file, no prefix.
    pub fn drafter_of(name: &str) -> Self {
        let parts = Parts::of(name);
        let tensors = parts
            .tensors
            .iter()
            .filter_map(|(name, tensor)| Some((name.strip_prefix("drafter.")?.to_string(), tensor.clone())));
        let texts = BTreeMap::from([("config.json".to_string(), parts.metadata["drafter_config"].clone())]);
        Self { texts, shards: vec![tensors.collect()], index: None }
    }

    pub fn json(&self, file: &str) -> Value {
        serde_json::from_str(&self.texts[file]).unwrap()
    }

    /// Changes a JSON file.
    pub fn edit(&mut self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(file);
        change(&mut value);
        self.texts.insert(file.into(), value.to_string());
    }

    /// Changes the text part of config.json.
    pub fn edit_text(&mut self, change: impl FnOnce(&mut Value)) {
        self.edit("config.json", |value| match value.get_mut("text_config") {
            Some(text) => change(text),
            None => change(value),
        });
    }

    /// A tensor by its stored name.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        let shard = self.shards.iter_mut().find_map(|shard| shard.get_mut(name));
        shard.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn remove(&mut self, name: &str) -> Tensor {
        self.shards.iter_mut().find_map(|shard| shard.remove(name)).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn shard_name(&self, i: usize) -> String {
        format!("model-{:05}-of-{:06}.safetensors", i + 1, self.shards.len())
    }

    /// The index that follows from the shards.
    pub fn index_of_shards(&self) -> Value {
        let (mut map, mut total) = (serde_json::Map::new(), 0);
        for (i, shard) in self.shards.iter().enumerate() {
            for (name, tensor) in shard {
                map.insert(name.clone(), json!(self.shard_name(i)));
                total += tensor.bytes.len();
            }
        }
        json!({ "metadata": { "total_size": total }, "weight_map": map })
    }

    pub fn shard_bytes(&self, i: usize) -> Vec<u8> {
        let views = self.shards[i].iter();
        let views = views.map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        safetensors::serialize(views, Some([("format".to_string(), "pt".to_string())].into())).unwrap()
    }

    /// Writes the folder: shards with an index.
    pub fn write(&self, folder: &Path) -> PathBuf {
        let index = self.index.clone().unwrap_or_else(|| self.index_of_shards());
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(INDEX), index.to_string()).unwrap();
        for i in 0..self.shards.len() {
            std::fs::write(folder.join(self.shard_name(i)), self.shard_bytes(i)).unwrap();
        }
        self.texts.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).unwrap());
        folder.to_path_buf()
    }

    /// Writes the folder: one file without an index.
    pub fn write_single(&self, folder: &Path) -> PathBuf {
        assert_eq!(self.shards.len(), 1);
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("model.safetensors"), self.shard_bytes(0)).unwrap();
        self.texts.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).unwrap());
        folder.to_path_buf()
    }
}
