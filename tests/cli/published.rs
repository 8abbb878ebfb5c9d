//! The plan of the published Kimi K2.6: its whole tensor table as headers over sparse files of true length.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::checkpoint::{INDEX, PREFIX, quantization_config};
use super::program::run;

/// A plan reads headers and nothing else.
const LIMIT: Duration = Duration::from_secs(10);
const LAYERS: usize = 61;
const HIDDEN: usize = 7168;
const VOCABULARY: usize = 163_840;
const EXPERTS: usize = 384;

/// Names, types and shapes of one file.
#[derive(Default)]
struct Shard(Vec<(String, &'static str, Vec<usize>)>);

impl Shard {
    fn bf16(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push((name.into(), "BF16", shape.to_vec()));
    }

    /// A weight and a bias.
    fn both(&mut self, name: &str, shape: &[usize]) {
        self.bf16(format!("{name}.weight"), shape);
        self.bf16(format!("{name}.bias"), &shape[..1]);
    }

    fn packed(&mut self, name: &str, n: usize, k: usize) {
        self.0.push((format!("{name}.weight_packed"), "I32", vec![n, k / 8]));
        self.bf16(format!("{name}.weight_scale"), &[n, k / 32]);
        self.0.push((format!("{name}.weight_shape"), "I32", vec![2]));
    }

    fn feed_forward(&mut self, name: &str, width: usize) {
        self.bf16(format!("{name}.gate_proj.weight"), &[width, HIDDEN]);
        self.bf16(format!("{name}.up_proj.weight"), &[width, HIDDEN]);
        self.bf16(format!("{name}.down_proj.weight"), &[HIDDEN, width]);
    }

    fn layer(index: usize) -> Self {
        let mut shard = Self::default();
        let layer = format!("{PREFIX}model.layers.{index}");
        shard.bf16(format!("{layer}.input_layernorm.weight"), &[HIDDEN]);
        shard.bf16(format!("{layer}.post_attention_layernorm.weight"), &[HIDDEN]);
        for (name, shape) in [
            ("q_a_proj", &[1536, HIDDEN][..]),
            ("q_a_layernorm", &[1536]),
            ("q_b_proj", &[12_288, 1536]),
            ("kv_a_proj_with_mqa", &[576, HIDDEN]),
            ("kv_a_layernorm", &[512]),
            ("kv_b_proj", &[16_384, 512]),
            ("o_proj", &[HIDDEN, 8192]),
        ] {
            shard.bf16(format!("{layer}.self_attn.{name}.weight"), shape);
        }
        if index == 0 {
            shard.feed_forward(&format!("{layer}.mlp"), 18_432);
            return shard;
        }
        shard.bf16(format!("{layer}.mlp.gate.weight"), &[EXPERTS, HIDDEN]);
        shard.0.push((format!("{layer}.mlp.gate.e_score_correction_bias"), "F32", vec![EXPERTS]));
        shard.feed_forward(&format!("{layer}.mlp.shared_experts"), 2048);
        for expert in 0..EXPERTS {
            let name = format!("{layer}.mlp.experts.{expert}");
            shard.packed(&format!("{name}.gate_proj"), 2048, HIDDEN);
            shard.packed(&format!("{name}.up_proj"), 2048, HIDDEN);
            shard.packed(&format!("{name}.down_proj"), HIDDEN, 2048);
        }
        shard
    }

    /// Everything that is no layer of the text model.
    fn rest() -> [Self; 3] {
        let [mut ends, mut projector, mut tower] = [Self::default(), Self::default(), Self::default()];
        ends.bf16(format!("{PREFIX}model.embed_tokens.weight"), &[VOCABULARY, HIDDEN]);
        ends.bf16(format!("{PREFIX}model.norm.weight"), &[HIDDEN]);
        ends.bf16(format!("{PREFIX}lm_head.weight"), &[VOCABULARY, HIDDEN]);
        projector.both("mm_projector.pre_norm", &[1152]);
        projector.both("mm_projector.proj.0", &[4608, 4608]);
        projector.both("mm_projector.proj.2", &[HIDDEN, 4608]);
        for block in 0..27 {
            let name = |part: &str| format!("vision_tower.encoder.blocks.{block}.{part}");
            tower.both(&name("norm0"), &[1152]);
            tower.both(&name("norm1"), &[1152]);
            tower.both(&name("wqkv"), &[3456, 1152]);
            tower.both(&name("wo"), &[1152, 1152]);
            tower.both(&name("mlp.fc0"), &[4304, 1152]);
            tower.both(&name("mlp.fc1"), &[1152, 4304]);
        }
        tower.both("vision_tower.encoder.final_layernorm", &[1152]);
        tower.both("vision_tower.patch_embed.proj", &[1152, 3, 14, 14]);
        tower.bf16("vision_tower.patch_embed.pos_emb.weight", &[64, 64, 1152]);
        [ends, projector, tower]
    }

    /// Writes the header and makes the file as long as its data would.
    fn write(&self, path: &Path) {
        let (mut header, mut at) = (Map::new(), 0);
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        for (name, dtype, shape) in &self.0 {
            let size = if *dtype == "BF16" { 2 } else { 4 };
            let end = at + shape.iter().product::<usize>() * size;
            header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let text = Value::Object(header).to_string();
        let mut file = std::fs::File::create(path).unwrap();
        file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.set_len((8 + text.len() + at) as u64).unwrap();
    }
}

fn yarn() -> Value {
    json!({
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0
    })
}

fn config() -> Value {
    json!({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "media_placeholder_token_id": 163605,
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.827, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "attention_bias": false, "tie_word_embeddings": false,
            "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": yarn(),
            "num_nextn_predict_layers": 0, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
            "quantization_config": quantization_config()
        }
    })
}

/// The drafter in the published shape.
fn write_drafter(folder: &Path) {
    let mut all = Shard::default();
    all.bf16("fc.weight", &[HIDDEN, 6 * HIDDEN]);
    all.bf16("hidden_norm.weight", &[HIDDEN]);
    all.bf16("norm.weight", &[HIDDEN]);
    for layer in 0..6 {
        let name = |part: &str| format!("layers.{layer}.{part}.weight");
        for (part, shape) in [
            ("input_layernorm", &[HIDDEN][..]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[8192, HIDDEN]),
            ("self_attn.k_proj", &[1024, HIDDEN]),
            ("self_attn.v_proj", &[1024, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, 8192]),
            ("self_attn.q_norm", &[128]),
            ("self_attn.k_norm", &[128]),
        ] {
            all.bf16(name(part), shape);
        }
        all.feed_forward(&format!("layers.{layer}.mlp"), 18_432);
    }
    let config = json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "num_target_layers": LAYERS,
        "dflash_config": { "target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838 },
        "hidden_size": HIDDEN, "intermediate_size": 18432, "num_hidden_layers": 6, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144, "layer_types": vec!["full_attention"; 6], "attention_bias": false,
        "rope_parameters": { "rope_theta": 50000.0, "rope_type": "yarn", "factor": 64.0, "beta_fast": 32.0,
            "original_max_position_embeddings": 4096, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0 },
        "vocab_size": VOCABULARY, "tie_word_embeddings": false, "sliding_window": null
    });
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    all.write(&folder.join("model.safetensors"));
}

fn write_model(folder: &Path) {
    let shards: Vec<Shard> = (0..LAYERS).map(Shard::layer).chain(Shard::rest()).collect();
    let mut map = Map::new();
    std::fs::create_dir(folder).unwrap();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:06}.safetensors", i + 1, shards.len());
        shard.write(&folder.join(&name));
        map.extend(shard.0.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
    }
    let index = json!({ "metadata": { "total_size": 595_148_192_736u64 }, "weight_map": map });
    std::fs::write(folder.join(INDEX), index.to_string()).unwrap();
    std::fs::write(folder.join("config.json"), config().to_string()).unwrap();
    std::fs::write(folder.join("generation_config.json"), "{\"eos_token_id\": 163586}").unwrap();
}

/// Within a thousandth.
fn about(found: &Value, expected: f64) {
    let found = found.as_f64().unwrap();
    assert!((found / expected - 1.0).abs() < 1e-3, "{found}, expected {expected}");
}

#[test]
fn the_plan_of_the_published_model() {
    let root = tempfile::tempdir().unwrap();
    let [model, drafter] = ["Kimi-K2.6", "Kimi-K2.6-DFlash"].map(|name| root.path().join(name));
    write_model(&model);
    write_drafter(&drafter);
    let [model, drafter] = [&model, &drafter].map(|path| path.to_str().unwrap());
    let args = ["decode", model, "--plan", "--json", "--plan-gpus", "8xrtx-pro-6000", "--context", "131072"];
    let args = [&args[..], &["--drafter", drafter, "--budget", "63"]].concat();
    // One run, or the quicker of two on a machine that is busy with other things.
    let mut done = run(&args);
    if done.time >= LIMIT {
        done = run(&args);
    }
    let plan = done.expect(0, &[]).json();
    assert!(done.time < LIMIT, "{:?}", done.time);
    assert_eq!(done.stderr, "");
    assert_eq!(plan["payload_bytes"], 595_148_192_736u64);
    assert_eq!(plan["tensors"], 208_550);
    assert_eq!(plan["active_parameters"], 32_861_500_928u64);
    assert_eq!(plan["parameters"], 1_026_408_232_448u64);
    assert_eq!(plan["formats"]["w4a16"]["bytes"], 507_343_011_840u64 + 63_417_876_480);
    assert_eq!(plan["formats"]["w4a16"]["weights"], 60 * EXPERTS * 3);
    assert_eq!(plan["drafter_formats"]["bf16"]["parameters"], 3_479_277_056u64);
    assert_eq!(plan["cache_bytes_a_token"], 70_272);
    // 32.99 GB a token; whole q_a, kv_a and router on each of eight cards give 3.37 ms.
    about(&plan["token"]["bytes"], 32.99e9);
    let device = &plan["devices"][7];
    about(&device["token_ms"][0], 3.366);
    assert_eq!(device["fits"], true);
    assert!((284.1..284.3).contains(&plan["round"]["experts_a_layer"].as_f64().unwrap()), "{plan}");
    // Half the cards do not hold it.
    let text = run(["decode", model, "--plan", "--plan-gpus", "4xrtx-pro-6000"]).expect(0, &[]).stdout.clone();
    assert!(text.contains("does NOT fit") && text.contains("208550 tensors"), "{text}");
    // The first layers alone.
    let part = run(["decode", model, "--plan", "--layers", "0..2", "--json"]).expect(0, &[]).json();
    assert_eq!(part["parts"]["routed_experts"]["weights"], 3 * EXPERTS);
    // Far too large for this machine: said at once, and nothing is read.
    let done = run(["decode", model, "--prompt-ids", "1", "--max-new", "1", "--device", "cpu"]);
    done.expect(5, &["expected 594 GB for weights", "for a cache of 2 tokens to fit", "free on cpu"]);
    assert!(done.time < LIMIT * 2, "{:?}", done.time);
    let wrong = ["decode", model, "--plan", "--plan-gpus", "8xgtx-1080"];
    run(wrong).expect(2, &["expected a GPU like 8xrtx-pro-6000"]);
    run(["decode", model, "--plan", "--prompt", "a"]).expect(2, &["cannot be used with"]);
    run(["decode", model, "--plan-gpus", "h100", "--prompt", "a"]).expect(2, &["--plan"]);
}
