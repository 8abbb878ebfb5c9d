use super::bundle::Parts;
use super::program::run;

/// Close to the largest bf16; finite in the file, and infinite once multiplied by a hidden state.
const HUGE: f32 = 3.0e38;

#[test]
fn a_logit_that_overflows_ends_the_run_and_is_no_token() {
    let mut parts = Parts::of("k26-tiny-bf16");
    parts.change_rows("lm_head.weight", |row, values| match row {
        0 => values.fill(HUGE),
        1 => values.fill(-HUGE),
        _ => {}
    });
    parts.rehash();
    let folder = tempfile::tempdir().unwrap();
    let file = parts.write(folder.path(), "huge.kdtr");
    let file = file.to_str().unwrap();
    run(["verify", file]).expect(0, &[]);
    for input in [["--golden", "0"], ["--prompt-ids", "5,6,7"]] {
        for more in [&[][..], &["--json"]] {
            let done = run([&["decode", file, "--device", "cpu", "--max-new", "4"], &input[..], more].concat());
            done.expect(6, &["error: a logit is NaN or infinite, in the prefill at position 0, row "]);
            assert_eq!(done.stdout, "");
        }
    }
}

#[test]
fn drafts_without_a_probability_are_no_fault() {
    let mut parts = Parts::of("k26-tiny-bf16");
    for golden in 0..4 {
        // From the third candidate on nothing is possible.
        let logp = parts.tensor(&format!("golden.{golden}.draft.logp"));
        let width = *logp.shape.last().unwrap();
        for (i, value) in logp.bytes.chunks_exact_mut(4).enumerate() {
            if i % width >= 2 {
                value.copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
            }
        }
    }
    parts.rehash();
    let folder = tempfile::tempdir().unwrap();
    let file = parts.write(folder.path(), "impossible.kdtr");
    let args = ["--golden", "0", "--draft", "recorded", "--max-new", "6", "--device", "cpu"];
    run([&["decode", file.to_str().unwrap()], &args[..]].concat()).expect(0, &["all 6 tokens match"]);
}
