use serde_json::json;

use super::program::{bundle, run};

const BUNDLES: [&str; 5] = ["k26-tiny-f32", "k26-tiny-bf16", "k26-tiny-int4", "k26-tiny-mixed", "k26-small-int4"];

#[test]
fn shipped_bundles_are_whole() {
    for name in BUNDLES {
        let file = bundle(name);
        let text = run(["verify", file.to_str().unwrap()]).expect(0, &["structure as declared"]).stdout.clone();
        assert!(text.contains(": ok, "), "{text}");
        let document = run(["verify", file.to_str().unwrap(), "--json"]).expect(0, &[]).json();
        assert_eq!(document["verdict"], "ok");
    }
}

#[test]
fn inspect_counts_weights_and_bytes_by_format() {
    let inspect = |name: &str| run(["inspect", bundle(name).to_str().unwrap(), "--json"]).expect(0, &[]).json();
    let small = inspect("k26-small-int4");
    assert_eq!(small["formats"]["w4a16"], json!({ "weights": 288, "parameters": 9_437_184, "bytes": 5_308_416 }));
    assert_eq!(small["config"]["rms_norm_eps"], 1e-5);
    assert_eq!(small["settings"]["stop_token_ids"], json!([4081, 4082]));
    assert_eq!(small["drafter"]["config"]["block_size"], 8);
    assert_eq!(small["tokenizer"]["special_tokens"]["<|mask|>"], 4093);
    assert_eq!(small["goldens"].as_array().map(Vec::len), Some(8));
    assert_eq!(small["manifest"]["verdict"], "ok");
    assert_eq!(small["manifest"]["hashes"], "checked");
    // Each format has one bundle of its own, and all of them meet in the mixed one.
    for (name, formats) in [
        ("k26-tiny-f32", &["f32"][..]),
        ("k26-tiny-bf16", &["bf16", "f32"]),
        ("k26-tiny-int4", &["bf16", "f32", "w4a16"]),
        ("k26-tiny-mixed", &["bf16", "f32", "w4a16"]),
    ] {
        let document = inspect(name);
        let found: Vec<&String> = document["formats"].as_object().unwrap().keys().collect();
        assert_eq!(found, formats, "{name}");
        let sum: u64 =
            document["formats"].as_object().unwrap().values().map(|f| f["parameters"].as_u64().unwrap()).sum();
        assert_eq!(document["parameters"], sum);
        assert_eq!((&document["drafter"], &document["tokenizer"]), (&json!(null), &json!(null)));
    }
}

#[test]
fn inspect_says_the_same_in_words() {
    let text = run(["inspect", bundle("k26-small-int4").to_str().unwrap()]).expect(0, &[]).stdout.clone();
    for words in [
        "16.1 M parameters",
        "DFlash, 1.67 M",
        "tiktoken, 4096 tokens, 16 special",
        "w4a16           32",
        "ok: 370 weights",
    ] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
}

#[test]
fn doctor_says_where_decoding_runs() {
    let document = run(["doctor", "--json"]).json();
    assert!(document["cuda"].is_object() && document["version"].is_string());
    let checks = document["checks"].as_array().unwrap();
    assert!(checks.iter().any(|c| c["check"] == "decode runs on"));
    let text = run(["doctor"]).stdout;
    assert!(text.contains("decode runs on: "), "{text}");
}

#[test]
fn doctor_tries_every_kernel() {
    let done = run(["doctor", "--device", "cpu", "--json"]);
    let document = done.expect(0, &[]).json();
    let kernels = document["kernels"].as_array().unwrap();
    for report in kernels {
        let numbers = report["error"].is_number() && report["us"].is_number();
        assert!(report["kernel"].is_string() && report["ok"] == true && numbers, "{report}");
    }
    for name in ["rms_norm", "grouped_gemm_w4a16", "mla_attention_wide_64", "mla_merge_17", "tree_build", "advance"] {
        assert!(kernels.iter().any(|report| report["kernel"] == name), "{name} is not in {document}");
    }
    assert!(done.time.as_secs() < 5, "{:?}", done.time);
    let text = run(["doctor", "--device", "cpu"]).expect(0, &[]).stdout.clone();
    assert!(text.contains("decode runs on: cpu"), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("ok   ") && line.ends_with(" us")).collect();
    assert_eq!(lines.len(), kernels.len(), "{text}");
}

/// Only where no GPU can be there: a machine with one may well have `cuda:0`.
#[test]
fn doctor_without_its_device_tries_none() {
    let done = run(["doctor", "--device", "cuda:999", "--json"]);
    let document = done.expect(4, &["error: "]).json();
    assert_eq!(document["kernels"], json!([]));
    run(["doctor", "--device", "gpu"]).expect(2, &["expected auto, cpu or cuda:N"]);
}

#[test]
fn bench_on_the_cpu_checks_the_arithmetic() {
    let done = run(["bench", "kernel", "--device", "cpu", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&done.expect(0, &["copies"]).stdout).expect("one document");
    let cases = found["cases"].as_array().expect("cases");
    for operator in ["experts", "w4a16", "bf16"] {
        let of: Vec<_> = cases.iter().filter(|c| c["operator"] == operator).collect();
        assert!(!of.is_empty() && of.iter().all(|c| c["error"].as_f64().is_some_and(|e| e < 2.2e-3)), "{of:?}");
    }
}

#[test]
fn bench_sends_tokens_as_a_trained_model_did() {
    let done = run(["bench", "kernel", "experts", "--device", "cpu", "--json", "--routing", "recorded", "--m", "8"]);
    let found = done.expect(0, &["copies"]).json();
    let case = &found["cases"][0];
    assert_eq!((&case["shape"], &case["rows"]), (&json!("32 of 64 x 64, top 4"), &json!(8)));
    assert!(case["error"].as_f64().is_some_and(|error| error < 2.2e-3), "{case}");
}

#[test]
fn bench_refuses_what_there_is_not() {
    run(["bench", "kernel", "x"]).expect(2, &["no bench `x`", "experts"]);
    run(["bench", "kernel", "w4a16", "--shape", "7168", "--device", "cpu"]).expect(2, &["shape `7168`: expected NxK"]);
    let bench = |args: &[&str]| run([&["bench", "kernel", "--device", "cpu"], args].concat());
    bench(&["mla", "--shape", "7x0"]).expect(2, &["shape `7x0`: expected HEADSxCONTEXT"]);
    bench(&["tree", "--m", "1025"]).expect(2, &["a budget of 1025; at most 1024 are possible"]);
    for (family, shape) in [("mla", "64x1000000000000000"), ("w4a16", "99999999999x99999999999"), ("topk", "1e18")] {
        let code = if shape.contains('e') { 2 } else { 5 };
        let word = if code == 2 { "shape `1e18`: expected N" } else { "out of device memory" };
        bench(&[family, "--shape", shape]).expect(code, &[word]);
    }
    bench(&["mla", "--shared", "beside"]).expect(2, &["--shared is for experts alone"]);
    bench(&["bf16", "--routing", "same"]).expect(2, &["--routing is for experts, sort alone"]);
    bench(&["bf16", "mla", "--kv", "f8"]).expect(2, &["--kv is for mla, rope, commit alone"]);
    bench(&["sort", "--format", "bf16"]).expect(2, &["--format is for experts alone"]);
    bench(&["mla", "--variant", "m8"]).expect(2, &["--variant is for w4a16, w4a16-f32, bf16 alone"]);
    bench(&["w4a16", "--variant", "m9"]).expect(2, &["variant `m9`: expected one of m8, ", "split16"]);
    bench(&["bf16", "--variant", "wide8"])
        .expect(2, &["bf16 on this device: expected a variant of m8, ", "found `wide8`"]);
    bench(&["pick", "--m", "99999999999999"]).expect(5, &["out of device memory"]);
    run(["bench"]).expect(2, &["Usage: kdtree bench <COMMAND>"]);
    for family in ["experts", "w4a16", "mla", "accept", "topk"] {
        run(["bench", "kernel", family, "--m", "1,0", "--device", "cpu"]).expect(2, &["'--m <ROWS>'", "at least 1"]);
    }
}
