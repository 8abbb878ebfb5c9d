//! Byte-level BPE as a `tokenizer.json` describes it: splits, bytes spelled as characters, and a list of merges.
//!
//! Where it differs from `tiktoken.model`: two tokens are merged if the list has that pair, in the order of the list,
//! and not because what they spell is a token. What a file asks for beyond that is refused, never left out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use fancy_regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use super::TextError;
use crate::weights::{Mismatch, unique_keys};

/// How GPT-2 splits a text, which is what `ByteLevel` means by `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The first character for a byte that has none of its own.
const SPELLED_FROM: u32 = 256;

/// Splits and merges.
pub(super) struct Bpe {
    splits: Vec<Regex>,
    /// The token of each byte.
    bytes: [u32; 256],
    /// For two neighbours their place in the list and what they become.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// With `ignore_merges`: tokens that a piece may be as a whole.
    whole: Option<HashMap<Vec<u8>, u32>>,
}

/// What a `tokenizer.json` holds.
pub(super) struct Parsed {
    pub bpe: Bpe,
    /// The bytes of the vocabulary's tokens.
    pub tokens: Vec<(u32, Vec<u8>)>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: BTreeMap<String, u32>,
    merges: Vec<Merge>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

type Result<T> = std::result::Result<T, Mismatch>;

fn wrong(place: &str, expected: &str, found: impl std::fmt::Display) -> Mismatch {
    Mismatch::new(format_args!("tokenizer.json, {place}"), expected, found)
}

/// Reads the content of a `tokenizer.json`.
pub(super) fn parse(content: &[u8]) -> Result<Parsed> {
    let text = std::str::from_utf8(content).map_err(|e| wrong("text", "UTF-8", e))?;
    let parsed = unique_keys(text).and_then(|()| serde_json::from_str::<File>(text));
    let file = parsed.map_err(|e| wrong("text", "JSON with a `model` of vocab and merges, every key once", e))?;
    let m = &file.model;
    let kind = m.kind.as_deref().unwrap_or("BPE");
    let plain = m.dropout.is_none_or(|p| p == 0.0)
        && m.continuing_subword_prefix.as_deref().unwrap_or_default().is_empty()
        && m.end_of_word_suffix.as_deref().unwrap_or_default().is_empty()
        && !m.byte_fallback;
    if kind != "BPE" || !plain {
        let expected = "type BPE over bytes, without dropout, prefix, suffix and byte_fallback";
        return Err(wrong("model", expected, format_args!("type {kind}{}", if plain { "" } else { " with one" })));
    }
    if !is_nothing(&file.normalizer, "normalizers") {
        return Err(wrong("normalizer", "none: there is no other", &file.normalizer));
    }
    let splits = splits(&file.pre_tokenizer)?;
    let spelled = spelled();
    let token = |text: &str| text.chars().map(|c| spelled.get(&c).copied()).collect::<Option<Vec<u8>>>();
    let mut tokens = Vec::with_capacity(m.vocab.len());
    for (text, &id) in &m.vocab {
        // A token that is no text of bytes may still be a special one: it enters no merge.
        if let Some(bytes) = token(text) {
            tokens.push((id, bytes));
        }
    }
    let known: HashMap<&[u8], u32> = tokens.iter().map(|(id, bytes)| (bytes.as_slice(), *id)).collect();
    let mut bytes = [0; 256];
    for (byte, slot) in (0..=u8::MAX).zip(&mut bytes) {
        let id = known.get(&[byte][..]);
        *slot = *id.ok_or_else(|| wrong("model.vocab", &format!("a token for byte {byte:#04x}"), "none"))?;
    }
    let mut merges = HashMap::with_capacity(m.merges.len());
    for (place, merge) in m.merges.iter().enumerate() {
        let pair = match merge {
            Merge::Line(line) => line.split_once(' '),
            Merge::Pair(a, b) => Some((a.as_str(), b.as_str())),
        };
        let at = format!("model.merges[{place}]");
        let (left, right) = pair.ok_or_else(|| wrong(&at, "two tokens", "one"))?;
        let id = |text: &str| {
            let id = token(text).and_then(|bytes| known.get(bytes.as_slice()).copied());
            id.ok_or_else(|| wrong(&at, "tokens of the vocabulary", format_args!("`{text}`")))
        };
        let whole = id(&format!("{left}{right}"))?;
        // Of a pair that comes twice the first counts.
        merges.entry((id(left)?, id(right)?)).or_insert((place as u32, whole));
    }
    let whole = m.ignore_merges.then(|| tokens.iter().map(|(id, bytes)| (bytes.clone(), *id)).collect());
    Ok(Parsed { bpe: Bpe { splits, bytes, merges, whole }, tokens })
}

/// Whether a part does nothing: absent, or a list of such parts.
fn is_nothing(part: &Value, list: &str) -> bool {
    match (part.get("type").and_then(Value::as_str), part.get(list).and_then(Value::as_array)) {
        _ if part.is_null() => true,
        (Some("Sequence"), Some(parts)) => parts.iter().all(|part| is_nothing(part, list)),
        _ => false,
    }
}

/// The patterns that split a text, each what the one before left.
fn splits(pre: &Value) -> Result<Vec<Regex>> {
    const PLACE: &str = "pre_tokenizer";
    let parts = match pre.get("type").and_then(Value::as_str) {
        Some("Sequence") => pre.get("pretokenizers").and_then(Value::as_array).cloned().unwrap_or_default(),
        _ => vec![pre.clone()],
    };
    let mut patterns = Vec::new();
    let mut bytes = false;
    for part in &parts {
        let flag = |name: &str, otherwise| part.get(name).and_then(Value::as_bool).unwrap_or(otherwise);
        match part.get("type").and_then(Value::as_str) {
            Some("ByteLevel") if !bytes && !flag("add_prefix_space", true) => {
                bytes = true;
                if flag("use_regex", true) {
                    patterns.push(GPT2.to_string());
                }
            }
            Some("Split") if !bytes => {
                let behavior = part.get("behavior").and_then(Value::as_str).unwrap_or_default();
                let kept = behavior == "Isolated" || (behavior == "Removed" && flag("invert", false));
                let pattern = part.get("pattern").and_then(|p| p.get("Regex")).and_then(Value::as_str);
                let pattern = pattern.filter(|_| kept);
                let expected = "a split at a Regex that keeps what it finds";
                patterns.push(pattern.ok_or_else(|| wrong(PLACE, expected, part))?.to_string());
            }
            _ => return Err(wrong(PLACE, "splits, and ByteLevel without add_prefix_space as the last", part)),
        }
    }
    if !bytes {
        return Err(wrong(PLACE, "ByteLevel", pre));
    }
    let compile = |pattern: &String| Regex::new(pattern).map_err(|e| wrong(PLACE, "patterns that compile", e));
    patterns.iter().map(compile).collect()
}

/// The byte that a character of a token stands for: printable ones for themselves, the others from 256 on.
fn spelled() -> HashMap<char, u8> {
    let mut next = SPELLED_FROM;
    let character = |byte: u8| {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(byte) } else { next };
        next += u32::from(!printable);
        char::from_u32(code).map(|c| (c, byte))
    };
    (0..=u8::MAX).filter_map(character).collect()
}

impl Bpe {
    /// The tokens of `text`.
    pub fn encode(&self, text: &str) -> std::result::Result<Vec<u32>, TextError> {
        let mut pieces = vec![text];
        for split in &self.splits {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let mut start = 0;
                for found in split.find_iter(piece) {
                    let found = found.map_err(|e| TextError::Encode(e.to_string()))?;
                    finer.extend([&piece[start..found.start()], found.as_str()]);
                    start = found.end();
                }
                finer.push(&piece[start..]);
            }
            finer.retain(|piece| !piece.is_empty());
            pieces = finer;
        }
        let mut ids = Vec::new();
        for piece in pieces {
            match self.whole.as_ref().and_then(|whole| whole.get(piece.as_bytes())) {
                Some(&id) => ids.push(id),
                None => self.merge(piece.as_bytes(), &mut ids),
            }
        }
        Ok(ids)
    }

    /// Merges until no pair of neighbours is in the list: always the first in it, of equal ones the leftmost.
    fn merge(&self, piece: &[u8], ids: &mut Vec<u32>) {
        let mut symbols: Vec<u32> = piece.iter().map(|&byte| self.bytes[usize::from(byte)]).collect();
        let count = symbols.len();
        // Neighbours of each symbol that is left; one that was merged into its left neighbour is gone.
        let mut next: Vec<usize> = (1..=count).collect();
        let mut before: Vec<usize> = (0..count).map(|i| i.wrapping_sub(1)).collect();
        let mut gone = vec![false; count];
        let mut queue = BinaryHeap::new();
        let pair = |symbols: &[u32], left: usize, right: usize| {
            let (place, id) = *self.merges.get(&(symbols[left], symbols[right]))?;
            Some(Reverse((place, left, right, symbols[left], symbols[right], id)))
        };
        queue.extend((1..count).filter_map(|right| pair(&symbols, right - 1, right)));
        while let Some(Reverse((_, left, right, a, b, id))) = queue.pop() {
            let stale = gone[left] || gone[right] || next[left] != right || (symbols[left], symbols[right]) != (a, b);
            if stale {
                continue;
            }
            symbols[left] = id;
            gone[right] = true;
            next[left] = next[right];
            if next[left] < count {
                before[next[left]] = left;
                queue.extend(pair(&symbols, left, next[left]));
            }
            if before[left] < count {
                queue.extend(pair(&symbols, before[left], left));
            }
        }
        ids.extend((0..count).filter(|&i| !gone[i]).map(|i| symbols[i]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The 256 bytes and what the merges give.
    fn file(merges: Value, pre: Value) -> Value {
        let mut characters: Vec<(u8, char)> = spelled().into_iter().map(|(c, byte)| (byte, c)).collect();
        characters.sort();
        let mut vocab = serde_json::Map::new();
        for (id, (_, c)) in characters.iter().enumerate() {
            vocab.insert(c.to_string(), json!(id));
        }
        for (id, token) in ["ab", "bc", "abc", "Ġa", "aa"].into_iter().enumerate() {
            vocab.insert(token.into(), json!(256 + id));
        }
        json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": pre,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "vocab": vocab, "merges": merges }
        })
    }

    fn level() -> Value {
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
    }

    fn ids(file: &Value, text: &str) -> Vec<u32> {
        parse(file.to_string().as_bytes()).unwrap_or_else(|e| panic!("{e}")).bpe.encode(text).unwrap()
    }

    #[test]
    fn the_list_decides_and_not_what_is_spelled() {
        // `bc` comes first; `a` and `bc` are no pair of the list, although `abc` is a token.
        let merges = json!([["b", "c"], ["a", "b"], ["ab", "c"], ["Ġ", "a"], ["a", "a"]]);
        let whole = file(merges, level());
        assert_eq!(ids(&whole, "abc"), [97, 257]);
        assert_eq!(ids(&whole, "ab c ab a"), [256, 32, 99, 32, 256, 259]);
        assert_eq!(ids(&whole, "aaaaa"), [260, 260, 97]);
        assert!(ids(&whole, "").is_empty());
        assert_eq!(ids(&whole, "é"), [195, 169]);
        let mut ignoring = whole.clone();
        ignoring["model"]["ignore_merges"] = json!(true);
        assert_eq!(ids(&ignoring, "abc"), [258]);
        // Lines, as older files have them.
        let lines = file(json!(["a b", "ab c"]), level());
        assert_eq!(ids(&lines, "abcab"), [258, 256]);
    }

    #[test]
    fn splits_one_after_the_other() {
        let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated" });
        let sequence = |parts: Vec<Value>| json!({ "type": "Sequence", "pretokenizers": parts });
        let merges = json!(["a a", "a b"]);
        let cut = file(merges.clone(), sequence(vec![split("a{1,2}"), split("b"), level()]));
        assert_eq!(ids(&cut, "aaab"), [260, 97, 98]);
        let mut gpt = level();
        gpt["use_regex"] = json!(true);
        assert_eq!(ids(&file(merges, gpt), "ab12 a"), [256, 49, 50, 32, 97]);
    }

    #[test]
    fn what_is_not_implemented_is_refused() {
        let good = file(json!(["a b"]), level());
        let refused = |change: &dyn Fn(&mut Value), words: &str| {
            let mut bad = good.clone();
            change(&mut bad);
            let error = parse(bad.to_string().as_bytes()).err().unwrap_or_else(|| panic!("{words}: accepted"));
            assert!(error.to_string().contains(words), "{error}");
        };
        refused(&|f| f["normalizer"] = json!({ "type": "NFC" }), "normalizer: expected none");
        refused(&|f| f["pre_tokenizer"] = Value::Null, "pre_tokenizer");
        refused(&|f| f["pre_tokenizer"] = json!({ "type": "Metaspace" }), "Metaspace");
        refused(&|f| f["pre_tokenizer"]["add_prefix_space"] = json!(true), "add_prefix_space");
        refused(&|f| f["model"]["type"] = json!("Unigram"), "type Unigram");
        refused(&|f| f["model"]["byte_fallback"] = json!(true), "byte_fallback");
        refused(&|f| drop(f["model"]["vocab"].as_object_mut().unwrap().remove("a")), "byte 0x61");
        refused(&|f| f["model"]["merges"] = json!(["a x y"]), "merges[0]");
        refused(&|f| f["model"]["merges"] = json!(["b a"]), "`ba`");
        refused(&|f| f["model"]["merges"] = json!(["ab"]), "two tokens");
        assert!(parse(b"\xff").is_err() && parse(b"{}").is_err());
        let twice = good.to_string().replacen("\"a\":97", "\"a\":97,\"a\":98", 1);
        assert!(parse(twice.as_bytes()).err().unwrap().to_string().contains("twice"));
        // A sequence of no normalizers is none.
        let mut empty = good.clone();
        empty["normalizer"] = json!({ "type": "Sequence", "normalizers": [] });
        assert_eq!(ids(&empty, "ab"), [256]);
    }
}
