//! What passes compute on the way, layer by layer: against a reference in float32 that shares nothing with the engine.

use std::path::PathBuf;
use std::process::Command;

use kdtree::device::{Device, Mode};
use kdtree::engine::states;
use kdtree::weights::Bundle;

use super::support::bundle::{root, shipped};
use super::support::{Outcome, Suite, check, equal};

/// Of golden 0 so many tokens, the last of them one at a time.
const TOKENS: usize = 24;
const SINGLE: usize = 5;
/// What roundings to bf16 come to in these small models; `--rounded-limit` is the comparison that is strict.
const LIMIT: &str = "6e-3";

const FOLDER: &str = "as_folder.py";
const COMPARISON: &str = "compare_layers.py";

pub fn cases(suite: &mut Suite) {
    suite.model("states::last_row", last_row);
    let python = root().join(".venv/bin/python");
    let scripts = root().join("bundles");
    let absent = ![&python, &scripts.join(FOLDER), &scripts.join(COMPARISON)].iter().all(|file| file.is_file());
    for name in ["k26-tiny-bf16", "k26-tiny-int4", "k26-small-int4"] {
        let (python, scripts) = (python.clone(), scripts.clone());
        suite.host(format!("states::{name}"), absent, move || compared(name, python, scripts));
    }
}

fn ids(bundle: &Bundle) -> Vec<i32> {
    let golden = &bundle.goldens()[0];
    golden.prompt.iter().chain(&golden.tokens).copied().take(TOKENS).collect()
}

/// The logits of each row pick the golden's next token, however rows are taken together.
fn last_row(device: &Device) -> Outcome {
    let bundle = Bundle::open(&shipped("k26-tiny-int4"))?;
    let golden = &bundle.goldens()[0];
    let all: Vec<i32> = golden.prompt.iter().chain(&golden.tokens).copied().collect();
    let ids = &all[..golden.prompt.len() + SINGLE];
    let (vocab, layers) = (bundle.config().vocab_size, bundle.config().num_hidden_layers);
    for single in [0, SINGLE] {
        let found = states(&bundle, device, ids, single)?;
        let picks: Vec<i32> = found
            .logits
            .chunks_exact(vocab)
            .map(|row| (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0) as i32)
            .collect();
        equal("picks", &picks[golden.prompt.len() - 1..], &golden.tokens[..=SINGLE])?;
        check(
            found.hidden.len() == layers && found.experts.iter().filter(|e| !e.is_empty()).count() == layers - 1,
            || "layers".into(),
        )?;
    }
    let wrong = states(&bundle, device, &[vocab as i32], 0).err().map(|e| e.to_string());
    check(wrong.is_some_and(|text| text.contains("ids are 0 to")), || "an id out of range".into())
}

/// A bundle as a folder, which both read: the engine's states of it and the reference's agree.
fn compared(name: &str, python: PathBuf, scripts: PathBuf) -> Outcome {
    let bundle = Bundle::open(&shipped(name))?;
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("model");
    let made = Command::new(&python).arg(scripts.join(FOLDER)).arg(shipped(name)).arg(&model).output()?;
    check(made.status.success(), || String::from_utf8_lossy(&made.stderr).into_owned())?;
    let found = states(&Bundle::open(&model)?, &Device::cpu(Mode::Fast), &ids(&bundle), SINGLE)?;
    let file = folder.path().join("states.safetensors");
    std::fs::write(&file, found.file()?)?;
    let run = |states: &std::path::Path| {
        Command::new(&python)
            .arg(scripts.join(COMPARISON))
            .arg(&model)
            .arg(states)
            .args(["--numpy", "--limit", LIMIT])
            .output()
    };
    let text = |output: &std::process::Output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let good = run(&file)?;
    check(good.status.success(), || text(&good))?;
    // One value that is off by a hundredth of its row is seen.
    let mut spoiled = found;
    spoiled.hidden[0][0] += 0.02 * spoiled.hidden[0].iter().map(|v| v * v).sum::<f32>().sqrt();
    std::fs::write(&file, spoiled.file()?)?;
    let bad = run(&file)?;
    check(bad.status.code() == Some(1) && text(&bad).contains("FAILED: layer 0"), || text(&bad))
}
