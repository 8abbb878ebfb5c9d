#![allow(dead_code, reason = "shared by the test programs; none uses all of it")]
//! A checkpoint folder with Kimi's real vocabulary: tiktoken.model from a published crate, the special tokens by name,
//! and tiny weights with as many rows.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::checkpoint::{Checkpoint, PREFIX};

pub const VOCABULARY: usize = 163_840;
pub const CHAT_TEMPLATE: &str = include_str!("chat_template.jinja");
/// Special tokens with names of their own; the others from 163,584 on are reserved.
pub const SPECIALS: &[(i32, &str)] = &[
    (163_584, "[BOS]"),
    (163_585, "[EOS]"),
    (163_586, "<|im_end|>"),
    (163_587, "<|im_user|>"),
    (163_588, "<|im_assistant|>"),
    (163_590, "<|start_header_id|>"),
    (163_591, "<|end_header_id|>"),
    (163_593, "[EOT]"),
    (163_594, "<|im_system|>"),
    (163_595, "<|tool_calls_section_begin|>"),
    (163_596, "<|tool_calls_section_end|>"),
    (163_597, "<|tool_call_begin|>"),
    (163_598, "<|tool_call_argument_begin|>"),
    (163_599, "<|tool_call_end|>"),
    (163_601, "<|im_middle|>"),
    (163_602, "<|media_begin|>"),
    (163_603, "<|media_content|>"),
    (163_604, "<|media_end|>"),
    (163_605, "<|media_pad|>"),
    (163_606, "<think>"),
    (163_607, "</think>"),
    (163_838, "[UNK]"),
    (163_839, "[PAD]"),
];

/// The published file, line for line. The crate packs it: a mark, a count, then rank, length and bytes of each token,
/// numbers in groups of seven bits.
pub fn tiktoken_model() -> String {
    let packed = splintr_vocab_kimi::KIMI_VOCAB_PACKED;
    assert_eq!(&packed[..8], b"SPLNTRV1");
    let (mut lines, mut at) = (String::new(), 12);
    let number = |at: &mut usize| {
        let (mut value, mut shift) = (0usize, 0);
        loop {
            let byte = packed[*at];
            *at += 1;
            value |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    };
    while at < packed.len() {
        let (rank, length) = (number(&mut at), number(&mut at));
        lines.push_str(&format!("{} {rank}\n", BASE64_STANDARD.encode(&packed[at..at + length])));
        at += length;
    }
    lines
}

fn tokenizer_config() -> Value {
    let tokens = SPECIALS.iter().map(|(id, name)| {
        (id.to_string(), json!({ "content": name, "special": true, "normalized": false, "lstrip": false }))
    });
    json!({
        "added_tokens_decoder": tokens.collect::<Map<_, _>>(), "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "model_max_length": 1_000_000_000_000_000_000u64, "clean_up_tokenization_spaces": false
    })
}

/// A tiny model in the published form under `folder`.
pub fn write(folder: &Path) -> PathBuf {
    let mut model = Checkpoint::of("k26-tiny-int4", true);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let tensor = model.tensor(&format!("{PREFIX}{name}"));
        let width = tensor.bytes.len() / tensor.shape[0];
        tensor.shape[0] = VOCABULARY;
        tensor.bytes.resize(VOCABULARY * width, 0);
    }
    model.edit_text(|text| {
        for (field, value) in [
            ("vocab_size", VOCABULARY),
            ("bos_token_id", 163_584),
            ("eos_token_id", 163_585),
            ("pad_token_id", 163_839),
        ] {
            text[field] = json!(value);
        }
    });
    model.edit("generation_config.json", |generation| generation["eos_token_id"] = json!(163_586));
    model.texts.extend([
        ("tiktoken.model".to_string(), tiktoken_model()),
        ("tokenizer_config.json".into(), tokenizer_config().to_string()),
        ("chat_template.jinja".into(), CHAT_TEMPLATE.into()),
    ]);
    model.write(folder)
}
