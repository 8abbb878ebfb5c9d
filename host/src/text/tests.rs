//! Tokenizer and stream over a vocabulary of the 256 bytes and a few merges. `tests/cli/tokens.rs` has the trained one.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::{TextStream, Tokenizer};
use crate::weights::{Mismatch, TokenizerKind, TokenizerSpec};

/// The large model's pattern, from the description of its branches.
pub(super) const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const MERGES: [&str; 6] = ["ab", "abc", "  ", "中文", "é", "12"];
const END: i32 = 270;
const VOCAB: usize = 280;

fn spec() -> TokenizerSpec {
    let special_tokens = BTreeMap::from([("<end>".to_string(), END as u32), ("[BOS]".to_string(), 271)]);
    TokenizerSpec {
        kind: TokenizerKind::Tiktoken,
        pattern: PATTERN.into(),
        special_tokens,
        template_tokens: BTreeMap::new(),
    }
}

pub(super) fn model() -> Vec<u8> {
    let bytes = (0..=255u8).map(|b| vec![b]);
    let all = bytes.chain(MERGES.iter().map(|m| m.as_bytes().to_vec())).enumerate();
    all.flat_map(|(id, token)| format!("{} {id}\n", BASE64_STANDARD.encode(token)).into_bytes()).collect()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::new(&spec(), &model(), VOCAB).unwrap()
}

#[test]
fn merges_follow_ranks_inside_the_pattern() {
    let t = tokenizer();
    assert!(t.encode("").unwrap().is_empty());
    assert_eq!(t.encode("abcab").unwrap(), [257, 256]);
    // `1234` is cut after three digits, and a run of blanks leaves its last one to the word.
    assert_eq!(t.encode("1234").unwrap(), [261, 51, 52]);
    assert_eq!(t.encode("   ab").unwrap(), [258, 32, 256]);
    // A Han run is a piece of its own, also where a letter touches it.
    assert_eq!(t.encode("é中文é").unwrap(), [260, 259, 260]);
}

/// A pattern that matches only words would drop the rest of a text without a word.
#[test]
fn a_pattern_that_leaves_text_out_is_an_error() {
    let words = TokenizerSpec { pattern: r"\w+".into(), ..spec() };
    let t = Tokenizer::new(&words, &model(), VOCAB).unwrap();
    assert_eq!(t.encode("ab").unwrap(), [256]);
    for (text, at) in [("ab cd", "byte 2 of 5"), ("(ab", "byte 0 of 3")] {
        let error = t.encode(text).unwrap_err().to_string();
        assert!(error.contains(at), "{error}");
    }
}

#[test]
fn special_tokens_come_only_from_those_who_ask() {
    let t = tokenizer();
    let text = "a<end>[BOS]";
    assert_eq!(t.encode_with_specials(text).unwrap(), [97, END, 271]);
    let plain = t.encode(text).unwrap();
    assert!(plain.iter().all(|&id| id < 256) && t.decode(&plain).unwrap() == text);
}

#[test]
fn every_id_decodes() {
    let t = tokenizer();
    let ids: Vec<i32> = (0..VOCAB as i32).collect();
    assert!(t.decode(&ids).unwrap().contains("<|reserved_token_279|>"));
    assert_eq!(t.bytes(END).unwrap(), b"<end>");
    for id in [-1, VOCAB as i32, i32::MIN] {
        assert!(t.bytes(id).is_err() && t.decode(&[id]).is_err());
    }
}

#[test]
fn very_long_texts_are_quick_and_come_back_whole() {
    let t = tokenizer();
    let start = std::time::Instant::now();
    for unit in [" ", "A", "中", "\n", "a b", "\t ", "!", "'", "é", "1", "a\u{301}"] {
        let text = unit.repeat(450_000 / unit.chars().count());
        assert_eq!(t.decode(&t.encode(&text).unwrap()).unwrap(), text, "{unit:?}");
    }
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn damaged_vocabularies_are_refused() {
    let new = |spec: &TokenizerSpec, model: &[u8]| Tokenizer::new(spec, model, VOCAB).err().unwrap();
    let line = |line: &str| new(&spec(), &[&model()[..], line.as_bytes()].concat()).to_string();
    assert!(line("!! 262\n").contains("`!! 262` in line 263"));
    assert!(line("eHg= 3\n").contains("given once"));
    assert!(line("eHg= 280\n").contains("an id below 280"));
    assert!(line("YWI= 262\n").contains("every token once"));
    assert!(line("eHg=\n").contains("base64, a space and an id"));
    assert!(line(" 262\n").contains("base64, a space and an id"));
    let short = model()[10..].to_vec();
    assert!(new(&spec(), &short[short.iter().position(|&b| b == b'\n').unwrap() + 1..]).found == "none");

    let with = |change: &dyn Fn(&mut TokenizerSpec)| -> Mismatch {
        let mut changed = spec();
        change(&mut changed);
        new(&changed, &model())
    };
    assert!(with(&|s| s.pattern = "(".into()).expected.contains("compiles"));
    for id in [5, 280] {
        let taken = with(&|s| s.special_tokens.extend([("<x>".into(), id)]));
        assert!(taken.found.contains("`<x>`"), "{taken}");
    }
    // Two names of one id: either may be the one that comes second.
    assert!(with(&|s| s.special_tokens.extend([("<x>".into(), END as u32)])).found.contains("270"));
}

fn stream(ids: &[i32], stops: &[&str]) -> (Vec<String>, bool, String) {
    let t = tokenizer();
    let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
    let mut stream = TextStream::new(&t, &stops);
    let parts = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    let stopped = stream.stopped();
    (parts, stopped, stream.finish())
}

fn bytes(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

#[test]
fn a_cut_character_waits_for_its_rest() {
    let (parts, _, rest) = stream(&bytes("a🦀é"), &[]);
    assert_eq!(parts, ["a", "", "", "", "🦀", "", "é"]);
    assert_eq!(rest, "");
    assert_eq!(stream(&bytes("a🦀")[..3], &[]), (vec!["a".into(), "".into(), "".into()], false, "\u{fffd}".into()));
    // A byte that starts nothing does not hold up what follows.
    assert_eq!(stream(&[0xff, 97, 0xe4, 98], &[]).0.concat(), "\u{fffd}a\u{fffd}b");
}

#[test]
fn stop_strings_are_found_across_tokens() {
    let (parts, stopped, rest) = stream(&[97, 256, 98, 99, 97], &["bab", "bb"]);
    assert_eq!((parts.concat().as_str(), stopped, rest.as_str()), ("aa", true, ""));
    // Held while undecided, released when it was none.
    let (parts, stopped, rest) = stream(&bytes("xSTOxST"), &["STOP"]);
    assert_eq!(parts, ["x", "", "", "", "STOx", "", ""]);
    assert_eq!((stopped, rest.as_str()), (false, "ST"));
    // The first one in the text ends it, wherever its token ends.
    assert_eq!(stream(&[257, 100], &["c", "b", ""]).0, ["a", ""]);
    // Inside a character nothing matches; a stop of several bytes does.
    assert_eq!(stream(&bytes("aéb"), &["é"]), (vec!["a".into(), "".into(), "".into(), "".into()], true, "".into()));
}
