use kdtree::text::Tokenizer;
use kdtree::weights::Bundle;

use super::bundle::{Parts, join, split};
use super::checkpoint::Checkpoint;
use super::program;

/// Rounds of each kind of damage; `KDTREE_FUZZ_ROUNDS` sets another number.
const ROUNDS: u64 = 60;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as usize % n
    }

    /// Changes a few bytes, or a piece: one byte, a digit, a copy of another piece, a hole.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            let length = self.below(40).min(bytes.len() - at);
            match self.below(5) {
                0 => bytes[at] = self.below(256) as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.drain(at..at + length)),
                3 => {
                    let from = self.below(bytes.len() - length + 1);
                    bytes.copy_within(from..from + length, at);
                }
                _ => {
                    // Another number, where there is one.
                    let digit = bytes[at..].iter().position(u8::is_ascii_digit).unwrap_or(0);
                    bytes[at + digit] = b'0' + self.below(10) as u8;
                }
            }
        }
    }
}

fn rounds() -> u64 {
    std::env::var("KDTREE_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(ROUNDS)
}

/// Opening `bytes` gives a bundle or an error that names the file, and never a crash.
fn open(bytes: &[u8]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.kdtr");
    std::fs::write(&path, bytes).unwrap();
    let opened = Bundle::open(&path).and_then(|bundle| Tokenizer::of(&bundle).map(|_| ()));
    opened.map_err(|error| {
        let text = error.to_string();
        assert!(text.contains("damaged.kdtr") && text.contains("expected ") && text.contains("found "), "{text}");
        text
    })
}

#[test]
fn damaged_content_is_always_seen() {
    let (header, data) = split(&std::fs::read(program::bundle("k26-tiny-int4")).unwrap());
    let mut random = Random(1);
    for round in 0..rounds() {
        let mut changed = data.clone();
        random.damage(&mut changed);
        if changed != data {
            assert!(open(&join(&header, &changed)).is_err(), "round {round}");
        }
    }
}

#[test]
fn damaged_headers_never_crash() {
    for name in ["k26-tiny-mixed", "k26-small-int4"] {
        let (header, data) = split(&std::fs::read(program::bundle(name)).unwrap());
        let mut random = Random(2);
        for _ in 0..rounds() {
            let mut changed = header.clone().into_bytes();
            random.damage(&mut changed);
            let file = [&(changed.len() as u64).to_le_bytes()[..], &changed, &data].concat();
            // Many a change of a name or a number in the settings is legal; only a crash is a fault.
            let _ = open(&file);
        }
    }
}

#[test]
fn damaged_metadata_never_crashes() {
    let whole = Parts::of("k26-small-int4");
    let keys: Vec<String> = whole.metadata.keys().filter(|key| *key != "blake3").cloned().collect();
    let mut random = Random(3);
    for round in 0..rounds() {
        let mut parts = whole.clone();
        let key = &keys[round as usize % keys.len()];
        let mut text = parts.metadata[key].clone().into_bytes();
        random.damage(&mut text);
        parts.metadata.insert(key.clone(), String::from_utf8_lossy(&text).into_owned());
        let _ = open(&parts.bytes());
    }
}

#[test]
fn damaged_folders_never_crash() {
    let whole = Checkpoint::of("k26-small-int4", true);
    let mut random = Random(5);
    let folder = tempfile::tempdir().unwrap();
    let model = whole.write(&folder.path().join("damaged.kdtr"));
    let mut files: Vec<_> = std::fs::read_dir(&model).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for round in 0..rounds() {
        // One file in turn; of a shard its header and a little more.
        let file = &files[round as usize % files.len()];
        let bytes = std::fs::read(file).unwrap();
        let headed = file.extension().is_some_and(|e| e == "safetensors");
        let front = if headed { 16 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize } else { bytes.len() };
        let mut changed = bytes[..front].to_vec();
        random.damage(&mut changed);
        changed.extend_from_slice(&bytes[front..]);
        std::fs::write(file, changed).unwrap();
        // Many a change of a setting or of a tokenizer's file is legal; only a crash is a fault.
        let opened = Bundle::open(&model).and_then(|bundle| Tokenizer::of(&bundle).map(|_| ()));
        if let Err(error) = opened {
            assert!(error.to_string().contains("damaged.kdtr"), "{error}");
        }
        std::fs::write(file, bytes).unwrap();
    }
    Bundle::open(&model).unwrap();
}

#[test]
fn damaged_vocabularies_never_crash() {
    let whole = Parts::of("k26-small-int4");
    let mut random = Random(4);
    for _ in 0..rounds() {
        let mut parts = whole.clone();
        let vocabulary = parts.tensor("tokenizer.tiktoken");
        random.damage(&mut vocabulary.bytes);
        vocabulary.shape = vec![vocabulary.bytes.len()];
        parts.rehash();
        let _ = open(&parts.bytes());
    }
}
