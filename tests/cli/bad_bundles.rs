use std::path::Path;
use std::time::Duration;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::bundle::{Parts, Tensor, join, split};
use super::program::{self, Run, run};

/// A damaged file is refused before anything else happens.
const LIMIT: Duration = Duration::from_secs(1);

const BASE: &str = "k26-tiny-int4";
const PLAIN: &str = "model.layers.0.self_attn.q_a_proj.weight";
const EXPERT: &str = "model.layers.1.mlp.experts.0.gate_proj.weight";
const EXPERT_CODES: &str = "model.layers.1.mlp.experts.0.gate_proj.weight.qw";
const EXPERT_SCALES: &str = "model.layers.1.mlp.experts.0.gate_proj.weight.sc";

/// One run, or the quickest of a few on a machine that is busy with other things.
fn quickest(args: &[&str]) -> Run {
    let mut best = run(args);
    for _ in 0..4 {
        if best.time < LIMIT {
            break;
        }
        let again = run(args);
        best = if again.time < best.time { again } else { best };
    }
    best
}

/// Every command that opens a bundle refuses `file` with code 3 and all of `words`, in time, without a result.
fn refused(name: &str, file: &[u8], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("{name}.kdtr"));
    std::fs::write(&path, file).unwrap();
    let path_text = path.to_str().unwrap();
    for args in [
        &["inspect", path_text][..],
        &["inspect", path_text, "--json"],
        &["decode", path_text, "--golden", "0", "--json"],
        &["verify", path_text],
    ] {
        let done = quickest(args);
        let mut all = vec!["error: ", path_text, "expected ", "found "];
        all.extend_from_slice(words);
        let hash = args[0] == "verify" && words.contains(&"blake3");
        done.expect(if hash { 7 } else { 3 }, &all);
        assert_eq!(done.stdout, "", "{name} {args:?}");
        assert!(done.time < LIMIT, "{name} {args:?}: {:?}", done.time);
        assert_eq!(done.stderr.matches("error: ").count(), 1, "{name}: {}", done.stderr);
    }
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "{name}: something was written beside the bundle");
}

/// Damages the bundle with hashes that agree, so that the damage itself must be seen.
fn damaged(name: &str, words: &[&str], damage: impl FnOnce(&mut Parts)) {
    let mut parts = Parts::of(BASE);
    damage(&mut parts);
    parts.rehash();
    refused(name, &parts.bytes(), words);
}

fn other_type(tensor: &mut Tensor, dtype: Dtype) {
    let elements: usize = tensor.shape.iter().product();
    tensor.dtype = dtype;
    tensor.bytes = vec![0; elements * dtype.bitsize() / 8];
}

fn reshape(tensor: &mut Tensor, shape: &[usize]) {
    let size = tensor.dtype.bitsize() / 8;
    tensor.shape = shape.to_vec();
    tensor.bytes = vec![0; shape.iter().product::<usize>() * size];
}

#[test]
fn the_undamaged_bundle_is_fine() {
    let folder = tempfile::tempdir().unwrap();
    let mut parts = Parts::of(BASE);
    parts.rehash();
    run(["verify", parts.write(folder.path(), "fine.kdtr").to_str().unwrap()]).expect(0, &[]);
    // Readers assume no alignment: an odd header length moves every tensor by one byte.
    let (header, data) = split(&parts.bytes());
    let path = folder.path().join("odd.kdtr");
    let odd = if header.len() % 2 == 0 { format!("{header} ") } else { header };
    std::fs::write(&path, join(&odd, &data)).unwrap();
    run(["verify", path.to_str().unwrap()]).expect(0, &[]);
}

#[test]
fn files_that_are_no_bundles() {
    refused("empty", b"", &["header", "8 bytes", "0 bytes"]);
    refused("short", b"1234567", &["header", "7 bytes"]);
    refused("text", b"This is a text, and not a bundle at all.", &["header", "at most the 32 bytes"]);
    refused("huge-header", &join("{}", b"")[..9], &["header", "at most the 1 bytes", "2 bytes"]);
    refused("longest-header", &[0xff; 40], &["header", "18446744073709551615 bytes"]);
    refused("not-utf8", &[&3u64.to_le_bytes()[..], b"{\xff}"].concat(), &["header", "UTF-8"]);
    refused("not-json", &join("{\"a\": ", b""), &["header", "JSON"]);
    refused("not-an-object", &join("[1, 2]", b""), &["header"]);
    refused("nesting", &join(&"[".repeat(100_000), b""), &["header"]);
    refused("no-metadata", &join("{}", b""), &["metadata `format`", "`kdtr`", "`nothing`"]);
    for (key, value) in [("format", "pt"), ("format", ""), ("version", "2"), ("version", "01")] {
        damaged("other", &[&format!("metadata `{key}`"), &format!("`{value}`")], |p| {
            p.metadata.insert(key.into(), value.into());
        });
    }
    let folder = tempfile::tempdir().unwrap();
    run(["inspect", folder.path().to_str().unwrap()]).expect(3, &["folder", "`config.json` in it", "none"]);
    run([Path::new("inspect"), &folder.path().join("absent.kdtr")]).expect(3, &["absent.kdtr", "No such file"]);
}

#[test]
fn a_link_to_a_bundle_is_a_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let target = std::fs::canonicalize(program::bundle(BASE)).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(target, &link).unwrap();
    run([Path::new("verify"), &link]).expect(0, &[]);
}

#[test]
fn truncated_files() {
    let file = Parts::of(BASE).bytes();
    for cut in [1, 1000, file.len() / 2] {
        refused("cut", &file[..file.len() - cut], &["tensor `", "bytes of data"]);
    }
    refused("cut-in-header", &file[..1000], &["header", "at most the 992 bytes"]);
    refused("longer", &[&file[..], b"x"].concat(), &["end of file", "bytes of data"]);
}

#[test]
fn headers_that_lie() {
    let (header, data) = split(&Parts::of(BASE).bytes());
    let change = |name: &str, change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut value: Value = serde_json::from_str(&header).unwrap();
        change(&mut value[PLAIN]);
        refused(name, &join(&value.to_string(), &data), words);
    };
    let tensor = format!("tensor `{PLAIN}`");
    change("shape", &|t| t["shape"] = json!([64, 65]), &[&tensor, "8320 bytes"]);
    change("overflow", &|t| t["shape"] = json!([1u64 << 40, 1u64 << 40]), &[&tensor, "a size below 2^64"]);
    change("negative", &|t| t["shape"] = json!([-64, -64]), &[&tensor, "`shape`"]);
    change("dtype", &|t| t["dtype"] = json!("F99"), &[&tensor, "`dtype`", "F99"]);
    change("no-offsets", &|t| drop(t.as_object_mut().unwrap().remove("data_offsets")), &[&tensor, "`data_offsets`"]);
    change("no-object", &|t| *t = json!(3), &[&tensor]);
    // Overlapping another tensor, and pointing far behind the end of the file.
    change("overlap", &|t| t["data_offsets"] = json!([0, 8192]), &["tensor `", "bytes from"]);
    let far = json!([1u64 << 50, (1u64 << 50) + 8192]);
    change("far", &|t| t["data_offsets"] = far.clone(), &["tensor `", "bytes from"]);
    let twice = header.replacen("{", &format!("{{\"{PLAIN}\":{{}},"), 1);
    refused("tensor-twice", &join(&twice, &data), &["header", &format!("`{PLAIN}` twice")]);
    let twice = header.replacen("\"format\":", "\"version\":\"1\",\"format\":", 1);
    refused("metadata-twice", &join(&twice, &data), &["header", "`version` twice"]);
}

#[test]
fn the_manifest_is_law() {
    let [plain, expert] = [PLAIN, EXPERT].map(|name| format!("tensor `{name}`"));
    damaged("declared-not-stored", &[&plain, "bf16 as declared", "nothing stored"], |p| {
        p.tensors.remove(PLAIN);
    });
    damaged("stored-not-declared", &["tensor `extra.weight`", "undeclared"], |p| {
        let copy = p.tensors[PLAIN].clone();
        p.tensors.insert("extra.weight".into(), copy);
    });
    damaged("missing-in-manifest", &[&plain, "[64, 64] in the manifest", "no entry"], |p| {
        p.set("manifest", PLAIN, Value::Null)
    });
    damaged("more-in-manifest", &["tensor `model.layers.9.x.weight`", "configured model"], |p| {
        p.set("manifest", "model.layers.9.x.weight", json!({"shape": [1], "format": "f32"}));
    });
    damaged("w4a16-without-codes", &[&expert, EXPERT_CODES, &format!("`{EXPERT_SCALES}` stored")], |p| {
        p.tensors.remove(EXPERT_CODES);
    });
    damaged("w4a16-without-scales", &[&expert, EXPERT_SCALES], |p| {
        p.tensors.remove(EXPERT_SCALES);
    });
    damaged("w4a16-with-plain-tensor", &[&expert, "w4a16 as declared", &format!("`{EXPERT}` stored")], |p| {
        let plain = p.tensors.remove(EXPERT_CODES).unwrap();
        p.tensors.remove(EXPERT_SCALES);
        p.tensors.insert(EXPERT.into(), plain);
    });
    damaged("both", &[&expert, EXPERT_CODES], |p| {
        let copy = p.tensors[PLAIN].clone();
        p.tensors.insert(EXPERT.into(), copy);
    });
    damaged("codes-of-another-format", &[&expert, "bf16 as declared", EXPERT_CODES], |p| {
        p.set("manifest", EXPERT, json!({"shape": [32, 64], "format": "bf16"}));
    });
    for line in [
        json!({"shape": [32, 64], "format": "w4a16"}),
        json!({"shape": [32, 64], "format": "w4a16", "group": 16}),
        json!({"shape": [32, 64], "format": "w4a16", "group": 0}),
        json!({"shape": [32, 64], "format": "w4a16", "group": 128}),
        json!({"shape": [32, 64], "format": "f32", "group": 32}),
        json!({"shape": [32, 64], "format": "int4"}),
        json!({"shape": [32, 48], "format": "w4a16", "group": 32}),
        json!({"shape": [2048], "format": "w4a16", "group": 32}),
        json!({"shape": [32, 64]}),
        json!({"shape": "32x64", "format": "bf16"}),
        json!({"shape": [32, 64], "format": "w4a16", "group": 32, "zero": 8}),
        json!(null),
        json!([32, 64]),
    ] {
        damaged("line", &[&expert], |p| p.edit("manifest", |m| m[EXPERT] = line));
    }
    damaged("table-in-4-bits", &["tensor `model.embed_tokens.weight`", "f32 or bf16"], |p| {
        p.set("manifest", "model.embed_tokens.weight", json!({"shape": [1003, 64], "format": "w4a16", "group": 32}));
    });
}

#[test]
fn tensors_that_differ_from_the_manifest() {
    let [plain, codes, scales] = [PLAIN, EXPERT_CODES, EXPERT_SCALES].map(|name| format!("tensor `{name}`"));
    damaged("dtype", &[&plain, "BF16 [64, 64]", "F32 [64, 64]"], |p| other_type(p.tensor(PLAIN), Dtype::F32));
    damaged("half", &[&plain, "BF16", "F16"], |p| other_type(p.tensor(PLAIN), Dtype::F16));
    damaged("shape", &[&plain, "BF16 [64, 64]", "BF16 [64, 32]"], |p| reshape(p.tensor(PLAIN), &[64, 32]));
    damaged("transposed", &[&codes, "U8 [32, 32]", "U8 [16, 64]"], |p| reshape(p.tensor(EXPERT_CODES), &[16, 64]));
    damaged("code-type", &[&codes, "U8", "I8"], |p| other_type(p.tensor(EXPERT_CODES), Dtype::I8));
    damaged("scale-shape", &[&scales, "[32, 2]", "[32, 1]"], |p| reshape(p.tensor(EXPERT_SCALES), &[32, 1]));
    damaged("scale-type", &[&scales, "BF16 or F32", "F16"], |p| other_type(p.tensor(EXPERT_SCALES), Dtype::F16));
    damaged("group", &[&scales, "[32, 1]", "[32, 2]"], |p| p.edit("manifest", |m| m[EXPERT]["group"] = json!(64)));
    for (name, value) in [("nan", f32::NAN), ("inf", f32::INFINITY), ("minus-inf", f32::NEG_INFINITY)] {
        let bf16 = ((value.to_bits() >> 16) as u16).to_le_bytes();
        damaged(name, &[&scales, "finite", "row 1, column 0"], |p| {
            p.tensor(EXPERT_SCALES).bytes[4..6].copy_from_slice(&bf16);
        });
        damaged(name, &[&plain, "finite", "row 0, column 3"], |p| {
            p.tensor(PLAIN).bytes[6..8].copy_from_slice(&bf16);
        });
    }
}

#[test]
fn content_and_hashes() {
    let mut parts = Parts::of(BASE);
    parts.tensor(EXPERT_CODES).bytes[17] ^= 1;
    refused("flipped", &parts.bytes(), &[&format!("tensor `{EXPERT_CODES}`"), "blake3"]);
    let mut parts = Parts::of(BASE);
    parts.set("blake3", PLAIN, Value::Null);
    refused("no-hash", &parts.bytes(), &[&format!("tensor `{PLAIN}`"), "`blake3`"]);
    let mut parts = Parts::of(BASE);
    parts.set("blake3", "ghost", json!("0".repeat(64)));
    refused("hash-of-nothing", &parts.bytes(), &["tensor `ghost`", "none stored"]);
    for bad in ["", "0", "Z", "é"] {
        let mut parts = Parts::of(BASE);
        parts.set("blake3", PLAIN, json!(bad));
        refused("no-hex", &parts.bytes(), &["metadata `blake3`", "64 hex digits"]);
    }
}

#[test]
fn metadata_that_is_missing_or_broken() {
    for key in ["config", "settings", "manifest", "blake3"] {
        let place = format!("metadata `{key}`");
        let mut parts = Parts::of(BASE);
        parts.metadata.remove(key);
        refused("missing", &parts.bytes(), &[&place, "nothing"]);
        for text in ["", "{", "[]", "3", "{\"a\": 1, \"a\": 2}", "null"] {
            parts.metadata.insert(key.into(), text.into());
            refused("broken", &parts.bytes(), &[&place]);
        }
    }
    for (field, value) in [
        ("name", Value::Null),
        ("lora_norm_eps", Value::Null),
        ("lora_norm_eps", json!(0)),
        ("lora_norm_eps", json!(-1e-6)),
        ("gap_tolerance", json!("0.5")),
        ("gap_tolerance", json!(-0.1)),
        ("stop_token_ids", json!([1003])),
        ("stop_token_ids", json!([-1])),
        ("stop_token_ids", json!(1001)),
    ] {
        damaged("settings", &["metadata `settings`"], |p| p.set("settings", field, value));
    }
}

#[test]
fn configurations_that_this_engine_does_not_run() {
    let expect = |field: &str, value: Value, words: &[&str]| {
        let place = format!("metadata `config`, field `{field}`");
        let mut all = vec![place.as_str()];
        all.extend_from_slice(words);
        damaged("config", &all, |p| p.set("config", field, value));
    };
    for field in ["architectures", "vocab_size", "n_group", "rope_theta", "kv_lora_rank", "norm_topk_prob"] {
        expect(field, Value::Null, &["nothing"]);
    }
    expect("architectures", json!(["LlamaForCausalLM"]), &["DeepseekV3ForCausalLM", "LlamaForCausalLM"]);
    expect("architectures", json!([]), &["DeepseekV3ForCausalLM"]);
    expect("model_type", json!("llama"), &["kimi_k2"]);
    expect("n_group", json!(8), &["1, the only value that is supported", "8"]);
    expect("topk_group", json!(4), &["1, the only value that is supported", "4"]);
    expect("moe_layer_freq", json!(2), &["2"]);
    expect("topk_method", json!("greedy"), &["noaux_tc"]);
    expect("scoring_func", json!("softmax"), &["sigmoid"]);
    expect("hidden_act", json!("gelu"), &["silu"]);
    expect("attention_bias", json!(true), &["false"]);
    expect("tie_word_embeddings", json!(true), &["false"]);
    expect("num_nextn_predict_layers", json!(1), &["0"]);
    expect("num_key_value_heads", json!(1), &["2"]);
    expect("kv_lora_rank", json!(256), &["512"]);
    expect("q_lora_rank", json!("64"), &["usize", "\"64\""]);
    expect("vocab_size", json!(0), &["1 to"]);
    expect("vocab_size", json!(-1003), &["-1003"]);
    expect("vocab_size", json!(1e30), &["usize"]);
    expect("num_hidden_layers", json!(1u64 << 40), &["1 to"]);
    expect("num_experts_per_tok", json!(9), &["1 to 8"]);
    expect("n_routed_experts", json!(2000), &["1 to 1024"]);
    expect("first_k_dense_replace", json!(4), &["at most 3 layers"]);
    expect("rms_norm_eps", json!(0.0), &["positive"]);
    expect("routed_scaling_factor", json!(-1.0), &["positive"]);
    expect("bos_token_id", json!(1003), &["below vocab_size 1003"]);
    expect("rope_scaling", json!({"type": "yarn"}), &["factor"]);
    let yarn = |field: &str, value: Value| {
        damaged("yarn", &[&format!("field `rope_scaling.{field}`")], |p| {
            p.edit("config", |c| c["rope_scaling"][field] = value)
        });
    };
    yarn("type", json!("linear"));
    yarn("rope_type", json!("llama3"));
    yarn("factor", json!(0.5));
    yarn("original_max_position_embeddings", json!(0));
}

#[test]
fn configurations_that_contradict_the_tensors() {
    for (field, value, tensor) in [
        ("vocab_size", json!(1004), "model.embed_tokens.weight"),
        ("hidden_size", json!(128), "model.embed_tokens.weight"),
        ("num_hidden_layers", json!(4), "model.layers.3.input_layernorm.weight"),
        ("num_hidden_layers", json!(2), "model.layers.2.input_layernorm.weight"),
        ("n_routed_experts", json!(9), "model.layers.1.mlp.gate.weight"),
        ("n_shared_experts", json!(2), "model.layers.1.mlp.shared_experts.gate_proj.weight"),
        ("first_k_dense_replace", json!(2), "model.layers.1.mlp.gate_proj.weight"),
        ("q_lora_rank", json!(96), "model.layers.0.self_attn.q_a_proj.weight"),
        ("v_head_dim", json!(64), "model.layers.0.self_attn.kv_b_proj.weight"),
    ] {
        damaged(field, &[&format!("tensor `{tensor}`")], |p| p.set("config", field, value));
    }
}

#[test]
fn goldens_that_make_no_sense() {
    let at = |part: &str| format!("golden.0.{part}");
    let place = |part: &str| format!("tensor `golden.0.{part}`");
    let golden = |part: &str, words: &[&str], damage: &dyn Fn(&mut Tensor)| {
        let place = place(part);
        let mut all = vec![place.as_str()];
        all.extend_from_slice(words);
        damaged("golden", &all, |p| damage(p.tensor(&at(part))));
    };
    golden("prompt", &["ids in 0..1003", "-1 at 2"], &|t| t.bytes[8..12].copy_from_slice(&(-1i32).to_le_bytes()));
    golden("tokens", &["1003 at 0"], &|t| t.bytes[..4].copy_from_slice(&1003i32.to_le_bytes()));
    golden("prompt", &["I32", "F32"], &|t| t.dtype = Dtype::F32);
    golden("prompt", &["I32 [1]", "I32 [0]"], &|t| reshape(t, &[0]));
    golden("gap", &["[64]", "[63]"], &|t| reshape(t, &[63]));
    golden("gap", &["finite", "NaN at 1"], &|t| t.bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes()));
    golden("draft.ids", &["[64, L, K]"], &|t| reshape(t, &[63, 7, 16]));
    golden("draft.ids", &["three dimensions"], &|t| reshape(t, &[64, 112]));
    golden("draft.ids", &["ids in 0..1003"], &|t| t.bytes[..4].copy_from_slice(&5000i32.to_le_bytes()));
    golden("draft.logp", &["[64, 7, 16]"], &|t| reshape(t, &[64, 7, 15]));
    for (name, value) in
        [("rising", 0.0), ("nan", f32::NAN), ("positive", 0.5f32), ("inf", f32::INFINITY), ("hole", f32::NEG_INFINITY)]
    {
        damaged(name, &[&place("draft.logp"), "descending"], |p| {
            p.tensor(&at("draft.logp")).bytes[4..8].copy_from_slice(&value.to_le_bytes());
        });
    }
    for value in [f32::NAN, f32::INFINITY] {
        damaged("first", &[&place("draft.logp"), "descending"], |p| {
            p.tensor(&at("draft.logp")).bytes[..4].copy_from_slice(&value.to_le_bytes());
        });
    }
    for part in ["tokens", "gap", "draft.logp", "draft.ids"] {
        damaged("part", &[&place(part), "none"], |p| {
            p.tensors.remove(&at(part));
        });
    }
    damaged("first", &["tensor `golden.1."], |p| {
        for part in ["prompt", "tokens", "gap", "draft.ids", "draft.logp"] {
            p.tensors.remove(&at(part));
        }
    });
}

#[test]
fn drafters_and_tokenizers_that_do_not_fit() {
    let small = |name: &str, words: &[&str], damage: &dyn Fn(&mut Parts)| {
        let mut parts = Parts::of("k26-small-int4");
        damage(&mut parts);
        parts.rehash();
        refused(name, &parts.bytes(), words);
    };
    let drafter = |field: &str, value: Value, words: &[&str]| {
        let place = format!("metadata `drafter_config`, field `{field}`");
        small("drafter", &[&[place.as_str()], words].concat(), &|p| p.set("drafter_config", field, value.clone()));
    };
    drafter("architectures", json!(["Eagle3"]), &["DFlashDraftModel"]);
    drafter("hidden_size", json!(512), &["256, the target's"]);
    drafter("vocab_size", json!(4095), &["4096, the target's"]);
    drafter("num_target_layers", json!(61), &["4, the target's"]);
    drafter("block_size", json!(1), &["2 to 32"]);
    drafter("block_size", json!(33), &["2 to 32"]);
    drafter("head_dim", json!(96), &["64, 128"]);
    drafter("num_key_value_heads", json!(3), &["divisor of 4"]);
    drafter("num_key_value_heads", json!(0), &["1 to"]);
    drafter("layer_types", json!(["full_attention"]), &["2 types", "1"]);
    drafter("layer_types", json!(["full_attention", "linear_attention"]), &["linear_attention"]);
    for window in [Value::Null, json!(0)] {
        small("window", &["metadata `drafter_config`, field `sliding_window`", "for the sliding layers"], &|p| {
            p.set("drafter_config", "layer_types", json!(["full_attention", "sliding_attention"]));
            p.set("drafter_config", "sliding_window", window.clone());
        });
    }
    let swa = json!({ "target_layer_ids": [1, 2, 3], "mask_token_id": 4093, "use_swa": true });
    small("swa", &["`dflash_config.use_swa`", "not causal"], &|p| {
        p.set("drafter_config", "dflash_config", swa.clone())
    });
    let dflash = |taps: Value, mask: Value| json!({ "target_layer_ids": taps, "mask_token_id": mask });
    for (taps, mask, field) in [
        (json!([1, 2, 4]), json!(4093), "dflash_config.target_layer_ids"),
        (json!([2, 1]), json!(4093), "dflash_config.target_layer_ids"),
        (json!([]), json!(4093), "dflash_config.target_layer_ids"),
        (json!([1, 2, 3]), json!(4096), "dflash_config.mask_token_id"),
    ] {
        let place = format!("metadata `drafter_config`, field `{field}`");
        small("dflash", &[&place], &|p| p.set("drafter_config", "dflash_config", dflash(taps.clone(), mask.clone())));
    }
    small("no-config", &["tensor `drafter.", "configured model"], &|p| drop(p.metadata.remove("drafter_config")));
    small("no-drafter", &["tensor `drafter.fc.weight`"], &|p| {
        p.tensors.retain(|name, _| !name.starts_with("drafter."));
    });
    small("no-vocabulary", &["tensor `tokenizer.tiktoken`"], &|p| drop(p.tensors.remove("tokenizer.tiktoken")));
    small("no-tokenizer", &["metadata `tokenizer`"], &|p| drop(p.metadata.remove("tokenizer")));
    small("kind", &["metadata `tokenizer`", "tiktoken"], &|p| p.set("tokenizer", "kind", json!("wordpiece")));
    small("pattern", &["metadata `tokenizer`", "compiles"], &|p| p.set("tokenizer", "pattern", json!("(")));
    small("special", &["metadata `tokenizer`", "`<x>`"], &|p| {
        p.edit("tokenizer", |t| t["special_tokens"]["<x>"] = json!(4096));
    });
    small("line", &["tensor `tokenizer.tiktoken`", "line 1"], &|p| p.tensor("tokenizer.tiktoken").bytes[0] = b'!');
    small("texts", &["metadata `golden_texts`", "8 texts"], &|p| {
        p.metadata.insert("golden_texts".into(), r#"[{"prompt": "a", "text": "b"}]"#.into());
    });
}
