use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

use kdtree::weights::Bundle;
use serde_json::{Value, json};

use super::program::{bundle, command, run};

/// Arguments of a short run on the CPU.
fn decode(name: &str, args: &[&str]) -> Vec<String> {
    let file = bundle(name).to_str().unwrap().to_string();
    let all = [&["decode", &file, "--device", "cpu"], args].concat();
    all.into_iter().map(String::from).collect()
}

fn document(name: &str, args: &[&str]) -> Value {
    run(decode(name, &[args, &["--json"]].concat())).expect(0, &[]).json()
}

fn golden_tokens(name: &str, golden: usize) -> Vec<i32> {
    Bundle::open(&bundle(name)).unwrap().goldens()[golden].tokens.clone()
}

fn ids(document: &Value) -> Vec<i32> {
    serde_json::from_value(document["ids"].clone()).unwrap()
}

#[test]
fn a_limit_of_zero_gives_nothing() {
    let done = run(decode("k26-tiny-f32", &["--golden", "0", "--max-new", "0"]));
    assert_eq!(done.expect(0, &[]).stdout, "");
    let empty = document("k26-small-int4", &["--prompt", "fn", "--max-new", "0"]);
    assert_eq!((&empty["ids"], &empty["tokens"], &empty["rounds"]), (&json!([]), &json!(0), &json!(0)));
    assert_eq!((&empty["text"], &empty["stop"]), (&json!(""), &json!("max_new")));
}

#[test]
fn the_document_agrees_with_itself() {
    for (name, draft) in [("k26-tiny-f32", "none"), ("k26-tiny-mixed", "recorded")] {
        let found = document(name, &["--golden", "1", "--max-new", "9", "--draft", draft, "--trace-tree", "--explain"]);
        assert_eq!(ids(&found), golden_tokens(name, 1)[..9]);
        assert_eq!((&found["match"], &found["tokens"], &found["stop"]), (&json!(true), &json!(9), &json!("max_new")));
        assert_eq!((&found["device"], &found["ptx"], &found["draft"]), (&json!("cpu"), &json!(null), &json!(draft)));
        let rounds = found["rounds"].as_u64().unwrap() as usize;
        let trace = found["trace"].as_array().unwrap();
        assert_eq!(trace.len(), rounds);
        let accepted: u64 = trace.iter().map(|r| r["accepted"].as_u64().unwrap()).sum();
        let by_depth: u64 = found["accepted_by_depth"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
        assert_eq!(accepted, by_depth);
        // The prefill gives one token; the last round may have gone over the limit.
        assert!(accepted as usize + rounds + 1 >= 9);
        assert!(found["formats"]["f32"]["weights"].as_u64() > Some(0));
        let stages = found["stages_us"].as_object().unwrap();
        assert_eq!(stages.keys().collect::<Vec<_>>(), ["accept", "commit", "draft", "tree", "verify"]);
        assert!(found["explain"].as_array().is_some_and(|lines| !lines.is_empty()));
        assert!(found.get("text").is_none());
    }
}

#[test]
fn ids_and_text_stream_to_stdout_alone() {
    let done = run(decode("k26-tiny-f32", &["--golden", "0", "--max-new", "3"]));
    let expected: Vec<String> = golden_tokens("k26-tiny-f32", 0)[..3].iter().map(i32::to_string).collect();
    assert_eq!(done.expect(0, &["golden 0: all 3 tokens match", "formats: "]).stdout, expected.join(" ") + "\n");
    let done = run(decode("k26-small-int4", &["--golden", "0", "--max-new", "6"]));
    let whole = Bundle::open(&bundle("k26-small-int4")).unwrap().golden_texts()[0].text.clone();
    assert!(whole.starts_with(done.expect(0, &["dflash, budget 16"]).stdout.trim_end()));
}

#[test]
fn a_stop_token_ends_the_output_and_is_its_last() {
    let tokens = golden_tokens("k26-tiny-f32", 0);
    // The third token, or where it first stands.
    let first = tokens.iter().position(|t| *t == tokens[2]).unwrap();
    let stop = tokens[2].to_string();
    for draft in ["none", "recorded"] {
        let found =
            document("k26-tiny-f32", &["--golden", "0", "--stop-id", &stop, "--max-new", "8", "--draft", draft]);
        assert_eq!(ids(&found), tokens[..=first], "{draft}");
        assert_eq!((&found["stop"], &found["match"]), (&json!({ "token": tokens[2] }), &json!(true)));
    }
}

#[test]
fn a_stop_text_is_found_across_tokens_and_is_no_part_of_the_text() {
    let file = Bundle::open(&bundle("k26-small-int4")).unwrap();
    let text = &file.golden_texts()[0].text;
    // Some characters from the middle of the first tokens.
    let stop: String = text.chars().skip(9).take(4).collect();
    let before = &text[..text.find(&stop).unwrap()];
    let found = document("k26-small-int4", &["--golden", "0", "--max-new", "12", "--stop", &stop]);
    assert_eq!((&found["text"], &found["stop"], &found["match"]), (&json!(before), &json!("text"), &json!(true)));
    let kept = ids(&found);
    assert_eq!(kept, file.goldens()[0].tokens[..kept.len()]);
    assert!(found["tokens"].as_u64() < Some(12));
}

#[test]
fn a_wrong_golden_is_a_failed_verification() {
    let mut parts = super::bundle::Parts::of("k26-tiny-f32");
    parts.tensor("golden.0.tokens").bytes[4..8].copy_from_slice(&0i32.to_le_bytes());
    parts.rehash();
    let folder = tempfile::tempdir().unwrap();
    let file = parts.write(folder.path(), "wrong.kdtr");
    let file = file.to_str().unwrap();
    let done = run(["decode", file, "--golden", "0", "--device", "cpu", "--max-new", "3", "--json"]);
    done.expect(7, &["golden 0: token 1: expected 0, found "]);
    let found = done.json();
    assert_eq!((&found["match"], &found["difference"]["at"]), (&json!(false), &json!(1)));
}

#[test]
fn a_near_tie_is_no_failure_where_both_gaps_say_that_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut parts = super::bundle::Parts::of("k26-tiny-f32");
    // Token 1 is another, and the golden calls it close.
    parts.tensor("golden.0.tokens").bytes[4..8].copy_from_slice(&0i32.to_le_bytes());
    parts.tensor("golden.0.gap").bytes[4..8].copy_from_slice(&0.01f32.to_le_bytes());
    parts.rehash();
    let decode = |parts: &super::bundle::Parts, name: &str| {
        let file = parts.write(folder.path(), name);
        run(["decode", file.to_str().unwrap(), "--golden", "0", "--device", "cpu", "--max-new", "3", "--json"])
    };
    // This run is sure of its own token: no tie.
    let sure = decode(&parts, "sure.kdtr");
    let found = sure.expect(7, &["golden 0: token 1: expected 0, found ", "(gap 0.0100, here "]).json();
    assert_eq!((&found["match"], &found["difference"]["near_tie"]), (&json!(false), &json!(false)));
    let gap = found["difference"]["gap_found"].as_f64().unwrap();
    // A bundle whose gaps move by more than both together.
    parts.set("settings", "gap_tolerance", json!(gap + 0.02));
    let tie = decode(&parts, "tie.kdtr");
    let found = tie.expect(0, &["golden 0: equal up to a near-tie at token 1 (gap 0.0100, here "]).json();
    assert_eq!((&found["match"], &found["difference"]["near_tie"]), (&json!(true), &json!(true)));
    assert_eq!((&found["equal_tokens"], &found["tokens"]), (&json!(1), &json!(3)));
    // A little less, and it is a failure again.
    parts.set("settings", "gap_tolerance", json!(gap + 0.005));
    decode(&parts, "less.kdtr").expect(7, &["golden 0: token 1: expected 0, found "]);
}

#[test]
fn a_reader_that_goes_away_is_no_fault() {
    let file = bundle("k26-tiny-f32");
    let inspect = ["inspect", file.to_str().unwrap(), "--json"].map(String::from).to_vec();
    for args in [inspect, decode("k26-tiny-f32", &["--golden", "0", "--max-new", "3"]), vec!["--help".into()]] {
        let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}: {errors}");
        assert!(!errors.contains("error") && !errors.contains("panicked"), "{errors}");
    }
}

/// Sends SIGINT once `ready` holds, and returns the exit code.
fn interrupted(args: &[String], input: Stdio, ready: impl Fn(&mut std::process::Child)) -> Option<i32> {
    let mut child = command(args).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    ready(&mut child);
    let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    panic!("{args:?} goes on after Ctrl-C");
}

#[test]
fn ctrl_c_ends_a_run_in_every_phase() {
    // Waiting for the prompt.
    let small = decode("k26-small-int4", &["--prompt-file", "-"]);
    let code = interrupted(&small, Stdio::piped(), |_| std::thread::sleep(Duration::from_millis(300)));
    assert_eq!(code, Some(130));
    // After the first tokens.
    let long = decode("k26-tiny-f32", &["--prompt-ids", "1,2,3", "--max-new", "4000", "--ignore-stop"]);
    let code = interrupted(&long, Stdio::null(), |child| {
        let mut first = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    });
    assert_eq!(code, Some(130));
}

#[test]
fn a_seed_draws_the_same_tokens_again() {
    let run = |seed: &str, more: &[&str]| {
        let args = ["--prompt-ids", "5,6,7", "--max-new", "12", "--temp", "3", "--top-k", "50", "--seed", seed];
        document("k26-tiny-int4", &[&args[..], more].concat())
    };
    let (first, again, other) = (run("3", &[]), run("3", &[]), run("4", &[]));
    assert_eq!(ids(&first), ids(&again));
    assert_ne!(ids(&first), ids(&other));
    assert_eq!(first["sampling"], json!({ "temp": 3.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "seed": 3 }));
    // A share of 1 keeps ties with the likeliest alone: greedy.
    let greedy = document("k26-tiny-int4", &["--prompt-ids", "5,6,7", "--max-new", "12"]);
    assert_eq!(ids(&run("3", &["--min-p", "1"])), ids(&greedy));
    assert!(greedy.get("sampling").is_none());
}
