use std::path::{Path, PathBuf};

use kdtree::weights::Bundle;
use serde_json::{Value, json};

use super::bundle::shipped;
use super::checkpoint::{Checkpoint, INDEX};
use super::program::{Run, run};

const TINY: &str = "k26-tiny-int4";
const SMALL: &str = "k26-small-int4";

fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

/// A short run on the CPU with more arguments.
fn decode(model: &Path, args: &[&str]) -> Run {
    run([&["decode", path(model), "--device", "cpu"], args].concat())
}

fn ids(document: &Value) -> Vec<i32> {
    serde_json::from_value(document["ids"].clone()).unwrap()
}

/// The prompt of golden 0 as an argument, and its first tokens.
fn golden(name: &str, count: usize) -> (String, Vec<i32>) {
    let golden = Bundle::open(&shipped(name)).unwrap().goldens()[0].clone();
    let prompt: Vec<String> = golden.prompt.iter().map(i32::to_string).collect();
    (prompt.join(","), golden.tokens[..count].to_vec())
}

fn decodes(model: &Path) -> Run {
    let (prompt, tokens) = golden(TINY, 6);
    let done = decode(model, &["--prompt-ids", &prompt, "--max-new", "6", "--ignore-stop", "--json"]);
    assert_eq!(ids(&done.expect(0, &[]).json()), tokens);
    done
}

#[test]
fn a_folder_decodes_to_the_tokens_of_its_bundle() {
    let folder = tempfile::tempdir().unwrap();
    for (multi_modal, name) in [(true, "Kimi-tiny"), (false, "text-only")] {
        let model = Checkpoint::of(TINY, multi_modal).write(&folder.path().join(name));
        let document = decodes(&model).json();
        assert_eq!(document["name"], name);
        assert_eq!(document["formats"]["w4a16"]["weights"], 48);
    }
}

#[test]
fn one_file_without_an_index_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Checkpoint::of(TINY, false);
    let all = std::mem::take(&mut model.shards).into_iter().flatten().collect();
    model.shards = vec![all];
    decodes(&model.write_single(folder.path()));
}

#[test]
fn inspect_and_verify_tell_what_a_folder_holds() {
    let folder = tempfile::tempdir().unwrap();
    let model = Checkpoint::of(TINY, true).write(&folder.path().join("tiny"));
    let document = run(["inspect", path(&model), "--json"]).expect(0, &[]).json();
    let facts = &document["folder"];
    let bundle = Bundle::open(&shipped(TINY)).unwrap();
    assert_eq!(document["manifest"]["weights"], bundle.manifest().len());
    assert_eq!(document["manifest"]["hashes"], "none");
    assert_eq!((&facts["skipped_tensors"], &facts["shards"], &facts["notes"]), (&json!(4), &json!(6), &json!([])));
    assert_eq!(document["settings"]["stop_token_ids"], json!([1001]));
    let text = run(["inspect", path(&model)]).expect(0, &[]).stdout.clone();
    assert!(text.contains("6 shards") && text.contains("4 for images not used"), "{text}");
    let text = run(["verify", path(&model)]).expect(0, &["structure as declared"]).stdout.clone();
    assert!(text.contains("routed experts  w4a16") && text.contains("hashes known of 0 of 6 shards"), "{text}");
}

#[test]
fn what_text_does_not_need_may_be_absent_or_odd() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::of(TINY, true);
    let model = checkpoint.write(folder.path());
    let count = checkpoint.shards.len();
    std::fs::remove_file(model.join(checkpoint.shard_name(count - 1))).unwrap();
    std::fs::write(model.join("consolidated.safetensors"), b"whatever").unwrap();
    std::fs::write(model.join("x.incomplete"), b"").unwrap();
    decodes(&model).expect(
        0,
        &[
            &format!("{} is absent and holds nothing that is used", checkpoint.shard_name(count - 1)),
            "consolidated.safetensors is not in the index",
            "x.incomplete is not in the index",
            "the index states a total size of ",
        ],
    );
}

/// Files of a hub's cache: links from a snapshot to blobs named by their SHA-256.
fn cache(root: &Path, checkpoint: &Checkpoint) -> (PathBuf, Vec<PathBuf>) {
    use sha2::Digest;
    let plain = checkpoint.write(&root.join("plain"));
    let cache = root.join("models--moonshotai--Kimi-mini");
    let snapshot = cache.join("snapshots/0123abcd");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(cache.join("blobs")).unwrap();
    std::fs::create_dir_all(cache.join("refs")).unwrap();
    std::fs::write(cache.join("refs/main"), "0123abcd").unwrap();
    let mut blobs = Vec::new();
    for entry in std::fs::read_dir(&plain).unwrap() {
        let entry = entry.unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        let digest: String = sha2::Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        let blob = cache.join("blobs").join(&digest);
        std::fs::write(&blob, &bytes).unwrap();
        let target = Path::new("../../blobs").join(&digest);
        std::os::unix::fs::symlink(target, snapshot.join(entry.file_name())).unwrap();
        if entry.file_name().to_str().unwrap().ends_with(".safetensors") {
            blobs.push(blob);
        }
    }
    (cache, blobs)
}

#[test]
fn a_cache_of_links_opens_and_its_hashes_are_known() {
    let root = tempfile::tempdir().unwrap();
    let (cache, blobs) = cache(root.path(), &Checkpoint::of(TINY, true));
    for folder in [cache.clone(), cache.join("snapshots/0123abcd")] {
        assert_eq!(decodes(&folder).json()["name"], "Kimi-mini");
    }
    let text = run(["verify", path(&cache)]).expect(0, &[]).stdout.clone();
    assert!(text.contains("hashes known of 6 of 6 shards"), "{text}");
    // Without a name in `refs` the only snapshot counts.
    std::fs::remove_file(cache.join("refs/main")).unwrap();
    run(["inspect", path(&cache)]).expect(0, &[]);
    std::fs::create_dir(cache.join("snapshots/other")).unwrap();
    run(["inspect", path(&cache)]).expect(3, &["`refs/main` or one snapshot", "2 snapshots"]);
    // A bit of a code changes no structure and no value: only the hash sees it.
    let mut bytes = std::fs::read(&blobs[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 0x10;
    std::fs::write(&blobs[0], bytes).unwrap();
    run(["verify", path(&cache.join("snapshots/0123abcd"))]).expect(7, &["sha256", "expected", "found"]);
}

#[test]
fn the_first_layers_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::of(TINY, true);
    let model = checkpoint.write(folder.path());
    let two = |model: &Path| {
        let done = decode(model, &["--layers", "0..2", "--prompt-ids", "3,4,5", "--max-new", "3", "--json"]);
        ids(&done.expect(0, &[]).json())
    };
    let whole = two(&model);
    assert_eq!(two(&shipped(TINY)), whole);
    std::fs::remove_file(model.join(checkpoint.shard_name(2))).unwrap();
    assert_eq!(two(&model), whole);
    decode(&model, &["--prompt-ids", "3"]).expect(3, &[&checkpoint.shard_name(2), "No such file"]);
    decode(&model, &["--layers", "4", "--prompt-ids", "3"]).expect(3, &["layers", "1 to 3"]);
    for text in ["0", "0..0", "1..2", "x"] {
        decode(&model, &["--layers", text, "--prompt-ids", "3"]).expect(2, &["expected `0..K` or `K`"]);
    }
}

#[test]
fn from_text_to_text_with_the_drafter_of_another_folder() {
    let root = tempfile::tempdir().unwrap();
    let model = Checkpoint::of(SMALL, true).write(&root.path().join("small"));
    let drafter = Checkpoint::drafter_of(SMALL).write_single(&root.path().join("drafter"));
    let text = ["--prompt", "impl Iterator for", "--max-new", "10", "--json"];
    let want = decode(&shipped(SMALL), &text).expect(0, &[]).json();
    let found = decode(&model, &[&text[..], &["--drafter", path(&drafter)]].concat()).expect(0, &[]).json();
    for key in ["text", "ids", "rounds", "accepted_by_depth", "draft", "drafter_formats"] {
        assert_eq!(found[key], want[key], "{key}");
    }
    assert_eq!(found["draft"], "dflash");
    let alone = decode(&model, &[&text[..], &["--draft", "none"]].concat()).expect(0, &[]).json();
    assert_eq!((&alone["text"], &alone["draft"]), (&want["text"], &json!("none")));
    let document = run(["inspect", path(&model), "--json"]).expect(0, &[]).json();
    assert_eq!(document["settings"]["stop_token_ids"], json!([4081, 4082]));
    assert_eq!(document["tokenizer"]["special_tokens"]["<|mask|>"], 4093);
    // A drafter of another model is refused before anything runs.
    let mut other = Checkpoint::drafter_of(SMALL);
    other.edit("config.json", |config| config["num_target_layers"] = json!(61));
    let other = other.write_single(&root.path().join("other"));
    decode(&model, &[&text[..], &["--drafter", path(&other)]].concat()).expect(3, &["num_target_layers", "4, the t"]);
    let mut short = Checkpoint::drafter_of(SMALL);
    short.remove("hidden_norm.weight");
    let short = short.write_single(&root.path().join("short"));
    decode(&model, &[&text[..], &["--drafter", path(&short)]].concat()).expect(3, &["`hidden_norm.weight`", "no such"]);
    for draft in ["none", "recorded"] {
        decode(&model, &["--prompt", "a", "--draft", draft, "--drafter", path(&drafter)]).expect(2, &["--draft"]);
    }
}

/// A drafter that knows nothing: every token is as probable as every other.
#[test]
fn a_drafter_that_does_not_fit_is_warned_about() {
    let root = tempfile::tempdir().unwrap();
    let mut drafter = Checkpoint::drafter_of(SMALL);
    drafter.tensor("norm.weight").bytes.fill(0);
    let drafter = drafter.write_single(&root.path().join("drafter"));
    let args = ["--golden", "0", "--max-new", "72", "--budget", "1", "--drafter", path(&drafter)];
    let done = decode(&shipped(SMALL), &args);
    // The tokens are right all the same.
    let said = "WARNING: the first 64 rounds accepted ";
    done.expect(0, &[said, "--draft none is faster", "golden 0"]);
    assert_eq!(done.stderr.matches(said).count(), 1);
}

#[test]
fn an_index_may_name_shards_in_folders_below() {
    let root = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::of(TINY, false);
    let mut index = checkpoint.index_of_shards();
    for shard in index["weight_map"].as_object_mut().unwrap().values_mut() {
        *shard = json!(format!("shards/{}", shard.as_str().unwrap()));
    }
    checkpoint.index = Some(index);
    let model = checkpoint.write(root.path());
    std::fs::create_dir(model.join("shards")).unwrap();
    for i in 0..checkpoint.shards.len() {
        let name = checkpoint.shard_name(i);
        std::fs::rename(model.join(&name), model.join("shards").join(&name)).unwrap();
    }
    decodes(&model);
    assert!(model.join(INDEX).is_file());
}
