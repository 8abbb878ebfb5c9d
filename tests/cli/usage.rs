use super::program::{bundle, run, run_with_input};

/// Ends with code 2 and all of `words` on stderr, and says nothing on stdout.
fn wrong(args: &[&str], words: &[&str]) {
    let done = run(args);
    done.expect(2, words);
    assert_eq!(done.stdout, "", "{args:?}");
}

fn decode(file: &str, args: &[&str], words: &[&str]) {
    wrong(&[&["decode", file], args].concat(), words);
}

#[test]
fn commands_and_flags_that_are_not_there() {
    wrong(&[], &["Usage: kdtree <COMMAND>"]);
    wrong(&["encode"], &["unrecognized subcommand 'encode'"]);
    wrong(&["inspect"], &["<BUNDLE>"]);
    wrong(&["inspect", "x.kdtr", "--fast"], &["unexpected argument '--fast'"]);
    wrong(&["decode", "x.kdtr", "--prompt", "a", "--mirostat", "2"], &["unexpected argument '--mirostat'"]);
    wrong(&["completions", "cmd"], &["invalid value 'cmd'"]);
    wrong(&["tokenize", "x.kdtr"], &["<TEXT>"]);
    wrong(&["tokenize", "x.kdtr", "text", "--ids", "1"], &["cannot be used with"]);
}

#[test]
fn decode_wants_exactly_one_input() {
    let two = [&["--golden", "0"][..], &["--prompt", "a"], &["--prompt-file", "f"], &["--prompt-ids", "1"]];
    decode(
        "x.kdtr",
        &[],
        &["required", "--golden <N>", "--prompt <TEXT>", "--prompt-file <FILE>", "--prompt-ids <IDS>"],
    );
    for (i, a) in two.iter().enumerate() {
        for b in &two[i + 1..] {
            decode("x.kdtr", &[*a, *b].concat(), &["cannot be used with"]);
        }
    }
}

#[test]
fn values_out_of_range() {
    for (flag, value) in [
        ("--budget", "0"),
        ("--budget", "1025"),
        ("--budget", "auto"),
        ("--max-new", "-1"),
        ("--device", "gpu"),
        ("--device", "cuda:x"),
        ("--device", "cuda:-1"),
        ("--ptx", "sm_90a"),
        ("--draft", "ngram"),
        ("--context", "many"),
        ("--stop-id", "x"),
        ("--golden", "-1"),
        ("--prompt-ids", "1,,2"),
        ("--min-prob", "0"),
        ("--min-prob", "1"),
        ("--temp", "-1"),
        ("--temp", "1e-7"),
        ("--temp", "inf"),
        ("--temp", "warm"),
        ("--top-k", "0"),
        ("--top-k", "-3"),
        ("--top-p", "0"),
        ("--top-p", "1.01"),
        ("--top-p", "NaN"),
        ("--min-p", "2"),
        ("--seed", "-1"),
        ("--seed", "18446744073709551616"),
    ] {
        let input =
            if flag.starts_with("--golden") || flag.starts_with("--prompt") { &[][..] } else { &["--prompt", "a"] };
        decode("x.kdtr", &[input, &[&format!("{flag}={value}")]].concat(), &["error: "]);
        // A negative number is a value that is out of range, not a flag that is not there.
        if value.starts_with('-') {
            decode("x.kdtr", &[input, &[flag, value]].concat(), &[&format!("invalid value '{value}' for '{flag}")]);
        }
    }
}

#[test]
fn flags_that_contradict_each_other() {
    let tiny = bundle("k26-tiny-int4");
    let tiny = tiny.to_str().unwrap();
    decode(tiny, &["--golden", "0", "--checked"], &["--checked", "--device cpu"]);
    decode(tiny, &["--golden", "0", "--device", "cpu", "--ptx", "sm_90"], &["--ptx", "--device cpu"]);
    decode(tiny, &["--prompt-ids", "1", "--draft", "recorded"], &["--draft recorded", "--golden"]);
    decode(tiny, &["--golden", "0", "--draft", "none", "--budget", "4"], &["--budget", "--draft none"]);
    decode(tiny, &["--golden", "0", "--draft", "none", "--spine"], &["--spine", "--draft none"]);
    for flag in [["--top-k", "5"], ["--top-p", "0.5"], ["--min-p", "0.1"], ["--seed", "1"]] {
        decode(tiny, &[&["--prompt-ids", "1"], &flag[..]].concat(), &[flag[0], "--temp"]);
        decode(tiny, &[&["--prompt-ids", "1", "--temp", "0"], &flag[..]].concat(), &[flag[0], "--temp"]);
    }
    decode(tiny, &["--golden", "0", "--temp", "1"], &["--golden", "--temp"]);
    decode(tiny, &["--golden", "0", "--special"], &["--special", "cannot be used with"]);
    decode(tiny, &["--golden", "0", "--stop", ""], &["--stop"]);
}

#[test]
fn flags_that_a_bundle_cannot_honour() {
    let (tiny, small) = (bundle("k26-tiny-int4"), bundle("k26-small-int4"));
    let (tiny, small) = (tiny.to_str().unwrap(), small.to_str().unwrap());
    decode(tiny, &["--golden", "4"], &["--golden 4", "goldens 0 to 3"]);
    decode(tiny, &["--golden", "0", "--max-new", "65"], &["--max-new 65", "64 tokens to compare"]);
    decode(tiny, &["--prompt", "a"], &["no tokenizer", "--prompt-ids"]);
    decode(tiny, &["--golden", "0", "--stop", "x"], &["--stop", "no tokenizer"]);
    decode(tiny, &["--golden", "0", "--draft", "dflash"], &["--draft dflash", "no drafter"]);
    decode(tiny, &["--golden", "0", "--budget", "8"], &["--budget", "no drafter"]);
    decode(tiny, &["--golden", "0", "--min-prob", "0.1"], &["--min-prob", "no drafter"]);
    decode(tiny, &["--prompt-ids", "0,1003"], &["--prompt-ids", "token 1003", "vocabulary of 1003"]);
    decode(tiny, &["--prompt-ids=-1"], &["--prompt-ids", "token -1"]);
    decode(tiny, &["--golden", "0", "--stop-id", "1003"], &["--stop-id", "token 1003"]);
    decode(tiny, &["--golden", "0", "--context", "0"], &["--context 0", "1 to 262144"]);
    decode(tiny, &["--golden", "0", "--context", "262145"], &["--context 262145"]);
    decode(tiny, &["--golden", "0", "--context", "15"], &["16 tokens", "holds 15"]);
    decode(tiny, &["--golden", "0", "--context", "16"], &["16 prompt tokens", "64 new ones", "16"]);
    decode(small, &["--prompt", "a", "--max-new", "4096"], &["4096 new ones", "context of 4096"]);
    decode(small, &["--prompt", "a", "--max-new", "18446744073709551615"], &["context of 4096"]);
    wrong(&["tokenize", tiny, "a"], &["no tokenizer"]);
    wrong(&["tokenize", small, "--ids", "4096"], &["token 4096", "vocabulary of 4096"]);
}

#[test]
fn a_prompt_without_tokens_is_refused() {
    let small = bundle("k26-small-int4");
    let small = small.to_str().unwrap();
    decode(small, &["--prompt", ""], &["the prompt is empty"]);
    decode(small, &["--prompt-file", "/dev/null"], &["the prompt is empty"]);
    decode(small, &["--prompt-ids", ""], &["--prompt-ids"]);
    run_with_input(["decode", small, "--prompt-file", "-"], b"").expect(2, &["the prompt is empty"]);
}

#[test]
fn prompt_files_that_cannot_be_read() {
    let small = bundle("k26-small-int4");
    let small = small.to_str().unwrap();
    run(["decode", small, "--prompt-file", "/no/such/file"]).expect(3, &["/no/such/file", "No such file"]);
    run(["decode", small, "--prompt-file", "/"]).expect(3, &["/: ", "directory"]);
    // A character cut by an editor or a pipe.
    run_with_input(["decode", small, "--prompt-file", "-"], b"let \xf0\x9f\xa6").expect(3, &["-: ", "UTF-8"]);
}

/// Only where no GPU can be there: a machine with one may well have `cuda:0`.
#[test]
fn a_gpu_that_is_not_there_is_a_device_error() {
    let tiny = bundle("k26-tiny-int4");
    let done = run(["decode", tiny.to_str().unwrap(), "--golden", "0", "--device", "cuda:999", "--max-new", "1"]);
    done.expect(4, &["error: "]);
    assert_eq!(done.stdout, "");
}
