use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kdtree::weights::Bundle;
use serde_json::json;

use super::bundle::{Parts, shipped};
use super::checkpoint::Checkpoint;
use super::program::{Run, binary, command, run};

const TINY: &str = "k26-tiny-int4";
const SMALL: &str = "k26-small-int4";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn convert(from: &Path, to: &Path, args: &[&str]) -> Run {
    run([&["convert", text(from), text(to)], args].concat())
}

/// Ids and text of a short run.
fn decoded(model: &Path, args: &[&str]) -> serde_json::Value {
    let done = run([&["decode", text(model), "--device", "cpu", "--json"], args].concat());
    let document = done.expect(0, &[]).json();
    json!([document["ids"], document["text"], document["rounds"], document["accepted_by_depth"]])
}

/// Every weight of `other` is stored in `file` with the same bytes.
fn same_weights(file: &Path, other: &Path) {
    let [a, b] = [file, other].map(|path| Bundle::open(path).unwrap());
    assert_eq!(a.manifest().keys().collect::<Vec<_>>(), b.manifest().keys().collect::<Vec<_>>());
    let parts = |path: &Path| std::fs::read(path).unwrap();
    let [a, b] = [parts(file), parts(other)];
    let [a, b] = [&a, &b].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
    for (name, view) in b.iter().filter(|(name, _)| !name.starts_with("golden.")) {
        let own = a.tensor(name).unwrap();
        assert!(own.data() == view.data() && own.shape() == view.shape() && own.dtype() == view.dtype(), "{name}");
    }
}

/// A folder in the published form, and an empty place beside it.
fn model(name: &str) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let folder = Checkpoint::of(name, true).write(&root.path().join("model"));
    let out = root.path().join("model.kdtr");
    (root, folder, out)
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_folder_and_its_drafter_in_one_file() {
    let (root, folder, out) = model(SMALL);
    let drafter = Checkpoint::drafter_of(SMALL).write_single(&root.path().join("drafter"));
    let planned = convert(&folder, &out, &["--dry-run", "--json", "--drafter", text(&drafter)]).expect(0, &[]).json();
    assert!(!out.exists());
    let document = convert(&folder, &out, &["--json", "--drafter", text(&drafter)]).expect(0, &[]).json();
    assert_eq!((&document["bytes"], &document["resumed_bytes"]), (&planned["bytes"], &json!(0)));
    assert_eq!(files(root.path()), ["drafter", "model", "model.kdtr"]);
    same_weights(&out, &shipped(SMALL));
    run(["verify", text(&out)]).expect(0, &["structure as declared"]);
    let args = ["--prompt", "impl Iterator for", "--max-new", "8"];
    let want = decoded(&folder, &[&args[..], &["--drafter", text(&drafter)]].concat());
    assert_eq!(decoded(&out, &args), want);
    assert_eq!(decoded(&shipped(SMALL), &args), want);
    // Nothing is overwritten.
    let before = std::fs::metadata(&out).unwrap().modified().unwrap();
    convert(&folder, &out, &[]).expect(2, &["model.kdtr: exists; nothing is overwritten"]);
    assert_eq!(std::fs::metadata(&out).unwrap().modified().unwrap(), before);
}

#[test]
fn the_first_layers_of_a_folder() {
    let (_root, folder, out) = model(TINY);
    convert(&folder, &out, &["--layers", "0..2"]).expect(0, &[]);
    let args = ["--prompt-ids", "3,4,5", "--max-new", "3"];
    assert_eq!(decoded(&out, &args), decoded(&folder, &[&args[..], &["--layers", "2"]].concat()));
}

/// The numpy reference quantized the same float weights to the experts of the int4 bundle.
#[test]
fn experts_quantized_as_the_reference_does() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("quantized.kdtr");
    convert(&shipped("k26-tiny-f32"), &out, &["--quantize", "w4a16"]).expect(0, &["goldens are not taken over"]);
    let [own, want] = [&out, &shipped(TINY)].map(|path| std::fs::read(path).unwrap());
    let [own, want] = [&own, &want].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
    let experts: Vec<String> =
        want.names().iter().filter(|n| n.contains(".mlp.experts.")).map(|n| n.to_string()).collect();
    assert_eq!(experts.len(), 2 * 48);
    for name in experts {
        assert!(own.tensor(&name).unwrap().data() == want.tensor(&name).unwrap().data(), "{name}");
    }
    run(["verify", text(&out)]).expect(0, &[]);
    let tokens = decoded(&out, &["--prompt-ids", "3,4,5", "--max-new", "3"]);
    assert_eq!(tokens[0].as_array().map(Vec::len), Some(3));
    // A search for the scales finds others, and the rest stays.
    let searched = root.path().join("searched.kdtr");
    convert(&shipped("k26-tiny-f32"), &searched, &["--quantize", "w4a16", "--scales", "least-squares"]).expect(0, &[]);
    run(["verify", text(&searched)]).expect(0, &[]);
    let [own, other] = [&out, &searched].map(|path| Parts::read(path));
    for (name, tensor) in &own.tensors {
        let expert = name.contains(".mlp.experts.");
        assert_eq!(tensor.bytes == other.tensors[name].bytes, !expert, "{name}");
    }
    assert_eq!(decoded(&searched, &["--prompt-ids", "3,4,5", "--max-new", "3"])[0].as_array().map(Vec::len), Some(3));
    let again = root.path().join("again.kdtr");
    convert(&out, &again, &["--scales", "extreme"]).expect(2, &["--quantize"]);
    convert(&out, &again, &["--quantize", "w4a16"]).expect(2, &["no routed expert is stored as f32 or bf16"]);
    convert(&shipped(TINY), &again, &["--quantize", "int8"]).expect(2, &["invalid value 'int8'"]);
    // A value that is not finite has no code.
    let mut parts = Parts::of("k26-tiny-f32");
    let name = "model.layers.1.mlp.experts.0.gate_proj.weight";
    parts.tensor(name).bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    parts.rehash();
    let bad = parts.write(root.path(), "nan.kdtr");
    convert(&bad, &again, &["--quantize", "w4a16"]).expect(3, &[name, "finite values", "row 0, column 0"]);
    assert!(!again.exists());
}

/// Starts a conversion that makes every piece safe on disk by itself, and kills it once some are.
fn killed(folder: &Path, out: &Path) {
    let log = PathBuf::from(format!("{}.part.done", out.display()));
    let mut child = command(["convert", text(folder), text(out), "--sync-mb", "0"]).spawn().unwrap();
    let start = Instant::now();
    let lines = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
    while lines() < 20 {
        assert!(start.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none(), "{} lines", lines());
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!out.exists() && lines() >= 20);
}

#[test]
fn a_killed_run_goes_on_where_it_stopped() {
    let (root, folder, out) = model(SMALL);
    killed(&folder, &out);
    // Half a line, as a kill may leave it.
    let log = root.path().join("model.kdtr.part.done");
    let mut text_of_log = std::fs::read_to_string(&log).unwrap();
    text_of_log.push_str("700 0123");
    std::fs::write(&log, text_of_log).unwrap();
    let document = convert(&folder, &out, &["--json"]).expect(0, &[]).json();
    let resumed = document["resumed_bytes"].as_u64().unwrap();
    assert!(resumed > 0 && resumed < document["bytes"].as_u64().unwrap(), "{document}");
    assert_eq!(files(root.path()), ["model", "model.kdtr"]);
    let fresh = root.path().join("fresh.kdtr");
    convert(&folder, &fresh, &[]).expect(0, &[]);
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&fresh).unwrap());
}

#[test]
fn work_of_another_source_or_of_a_broken_disk_does_not_count() {
    let (root, folder, out) = model(SMALL);
    killed(&folder, &out);
    // Another source: all anew.
    let config = folder.join("config.json");
    let whole = std::fs::read_to_string(&config).unwrap();
    let changed = whole.replace("\"max_position_embeddings\":4096", "\"max_position_embeddings\":2048");
    assert_ne!(changed, whole);
    std::fs::write(&config, changed).unwrap();
    let document = convert(&folder, &out, &["--json"]).expect(0, &[]).json();
    assert_eq!(document["resumed_bytes"], 0);
    std::fs::remove_file(&out).unwrap();
    // Bytes that are not what was written are seen when the file is read back, and the run after that begins anew.
    killed(&folder, &out);
    let part = root.path().join("model.kdtr.part");
    let mut bytes = std::fs::read(&part).unwrap();
    // Every piece that is done lies in front: damage the first data behind a header of zeros.
    let header = bytes.len() - document["bytes"].as_u64().unwrap() as usize;
    bytes[header + 5] ^= 1;
    std::fs::write(&part, bytes).unwrap();
    convert(&folder, &out, &[]).expect(3, &["blake3", "expected", "found"]);
    assert!(!out.exists());
    let document = convert(&folder, &out, &["--json"]).expect(0, &[]).json();
    assert_eq!(document["resumed_bytes"], 0);
    assert_eq!(files(root.path()), ["model", "model.kdtr"]);
}

#[test]
fn a_full_disk_is_said_and_the_run_goes_on_later() {
    let (root, folder, out) = model(SMALL);
    let script = "trap '' XFSZ; ulimit -f 1000; exec \"$0\" convert \"$1\" \"$2\"";
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", script, text(&binary()), text(&folder), text(&out)]);
    let output = limited.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("model.kdtr.part: ") && said.contains("the same command goes on from there"), "{said}");
    assert!(!out.exists());
    convert(&folder, &out, &[]).expect(0, &[]);
    assert_eq!(files(root.path()), ["model", "model.kdtr"]);
    // A folder that is not there.
    for args in [&[][..], &["--shard-mb", "1"], &["--dry-run"]] {
        let none = root.path().join("none/model.kdtr");
        convert(&folder, &none, args).expect(2, &["none/model.kdtr: there is no folder ", "/none to write it in"]);
    }
}

#[test]
fn two_runs_do_not_write_one_file() {
    let (root, folder, out) = model(TINY);
    let log = std::fs::File::create(root.path().join("model.kdtr.part.done")).unwrap();
    log.lock().unwrap();
    convert(&folder, &out, &[]).expect(2, &["another process is writing it"]);
    drop(log);
    convert(&folder, &out, &[]).expect(0, &[]);
}

/// A folder of shards: opened as any model, from it decoded, verified, converted on.
#[test]
fn a_folder_of_shards() {
    let (root, folder, out) = model(SMALL);
    let drafter = Checkpoint::drafter_of(SMALL).write_single(&root.path().join("drafter"));
    let args = ["--json", "--drafter", text(&drafter), "--shard-mb", "4"];
    let document = convert(&folder, &out, &args).expect(0, &[]).json();
    let shards = document["shards"].as_u64().unwrap();
    assert!(shards > 3, "{document}");
    let names = files(&out);
    assert_eq!(names.len() as u64, shards + 2);
    assert!(names.contains(&"kdtr.json".into()) && names.contains(&"model.safetensors.index.json".into()), "{names:?}");
    assert_eq!(files(root.path()), ["drafter", "model", "model.kdtr"]);
    let shards: Vec<&String> = names.iter().filter(|name| name.ends_with(".safetensors")).collect();
    for name in &shards {
        // Whole numbers of pieces, none of which has four megabytes here.
        assert!(std::fs::metadata(out.join(name)).unwrap().len() < 4_500_000, "{name}");
    }
    let said = run(["verify", text(&out)]).expect(0, &["structure as declared"]).stdout.clone();
    assert!(said.contains("hashes of every tensor"), "{said}");
    run(["inspect", text(&out)]).expect(0, &[]);
    let args = ["--prompt", "impl Iterator for", "--max-new", "4"];
    assert_eq!(decoded(&out, &args), decoded(&shipped(SMALL), &args));
    // One file made of it is the one made of the source.
    let [one, other] = ["one.kdtr", "other.kdtr"].map(|name| root.path().join(name));
    convert(&out, &one, &[]).expect(0, &[]);
    convert(&folder, &other, &["--drafter", text(&drafter)]).expect(0, &[]);
    same_weights(&one, &other);
    convert(&folder, &out, &["--shard-mb", "4"]).expect(2, &["model.kdtr: exists; nothing is overwritten"]);
    // A bit of a code: only the hash sees it.
    let last = shards[shards.len() - 1];
    let shard = out.join(last);
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 0x10;
    std::fs::write(&shard, bytes).unwrap();
    run(["verify", text(&out)]).expect(7, &["blake3", "expected", "found"]);
    let metadata = std::fs::read(out.join("kdtr.json")).unwrap();
    for (damage, words) in [("{", "JSON"), ("{\"format\": \"other\"}", "`kdtr`")] {
        std::fs::write(out.join("kdtr.json"), damage).unwrap();
        run(["inspect", text(&out)]).expect(3, &["model.kdtr", words]);
    }
    std::fs::write(out.join("kdtr.json"), metadata).unwrap();
    std::fs::remove_file(&shard).unwrap();
    run(["inspect", text(&out)]).expect(3, &[last, "No such file"]);
}

#[test]
fn a_killed_run_of_shards_goes_on() {
    let (root, folder, out) = model(SMALL);
    let part = root.path().join("model.kdtr.part");
    let finished = || -> Vec<String> {
        let all = std::fs::read_dir(&part).into_iter().flatten();
        let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".safetensors")).collect()
    };
    let kill = |shard: &str| {
        let before = finished();
        let args = ["convert", text(&folder), text(&out), "--sync-mb", "0", "--shard-mb", shard];
        let mut child = command(args).spawn().unwrap();
        let start = Instant::now();
        while finished().iter().filter(|name| !before.contains(name)).count() < 2 {
            assert!(start.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!out.exists());
    };
    // Shards of another size do not count.
    kill("3");
    kill("2");
    let document = convert(&folder, &out, &["--shard-mb", "2", "--json"]).expect(0, &[]).json();
    let resumed = document["resumed_bytes"].as_u64().unwrap();
    assert!(resumed > 2_000_000 && resumed < document["bytes"].as_u64().unwrap(), "{document}");
    assert_eq!(files(root.path()), ["model", "model.kdtr"]);
    let fresh = root.path().join("fresh.kdtr");
    convert(&folder, &fresh, &["--shard-mb", "2"]).expect(0, &[]);
    assert_eq!(files(&out), files(&fresh));
    for name in files(&out) {
        assert!(std::fs::read(out.join(&name)).unwrap() == std::fs::read(fresh.join(&name)).unwrap(), "{name}");
    }
    // Another process writes.
    let third = root.path().join("third.kdtr");
    std::fs::create_dir(root.path().join("third.kdtr.part")).unwrap();
    let lock = std::fs::File::create(root.path().join("third.kdtr.part/lock")).unwrap();
    lock.lock().unwrap();
    convert(&folder, &third, &["--shard-mb", "2"]).expect(2, &["another process is writing it"]);
}
