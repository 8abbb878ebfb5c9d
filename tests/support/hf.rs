#![allow(dead_code, reason = "shared by the test programs; none uses all of it")]
//! The same vocabulary as a `tokenizer.json`: tokens in characters for bytes, and every split of a token into two
//! others as a merge, in the order of ranks.

use std::collections::HashMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

/// What stands for a byte.
fn character(byte: u8) -> char {
    let plain = |b: u8| (b'!'..=b'~').contains(&b) || (0xa1..=0xac).contains(&b) || b >= 0xae;
    match plain(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|&b| !plain(b)).count() as u32).unwrap(),
    }
}

fn spelled(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| character(byte)).collect()
}

/// `model` is the content of a tiktoken.model; `specials` are special tokens with their ids.
pub fn tokenizer_json(model: &str, pattern: &str, specials: &[(&str, u64)]) -> Value {
    let tokens: Vec<(Vec<u8>, u32)> = model
        .lines()
        .map(|line| {
            let (token, rank) = line.split_once(' ').unwrap();
            (BASE64_STANDARD.decode(token).unwrap(), rank.parse().unwrap())
        })
        .collect();
    let ranks: HashMap<&[u8], u32> = tokens.iter().map(|(token, rank)| (token.as_slice(), *rank)).collect();
    let mut merges: Vec<[u32; 3]> = Vec::new();
    for (token, rank) in &tokens {
        for at in 1..token.len() {
            if let (Some(&left), Some(&right)) = (ranks.get(&token[..at]), ranks.get(&token[at..])) {
                merges.push([*rank, left, right]);
            }
        }
    }
    merges.sort();
    let by_rank: HashMap<u32, String> = tokens.iter().map(|(token, rank)| (*rank, spelled(token))).collect();
    let merges: Vec<Value> = merges.iter().map(|[_, a, b]| json!([by_rank[a], by_rank[b]])).collect();
    let vocab: Map<String, Value> = by_rank.iter().map(|(rank, text)| (text.clone(), json!(rank))).collect();
    let added: Vec<Value> = specials
        .iter()
        .map(|(content, id)| json!({ "id": id, "content": content, "special": true, "normalized": false }))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        ] },
        "post_processor": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocab, "merges": merges
        }
    })
}
