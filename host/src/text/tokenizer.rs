//! Text to tokens and back: byte-level BPE over the checkpoint's own tiktoken.model, or tokenizer.json.
//!
//! Text from a user is encoded without special tokens, whatever it spells. Every id below `vocab_size` has bytes: ids
//! that neither the vocabulary nor the special tokens name are reserved and have a name of their own.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use tiktoken_rs::CoreBPE;

use super::bpe::{self, Bpe};
use super::split::pieces;
use super::{Rendered, TextError};
use crate::weights::{Bundle, Mismatch, TokenizerKind, TokenizerSpec, WeightsError};

/// Who merges.
enum Merges {
    /// Tokens by rank.
    Ranks(CoreBPE),
    /// Pairs by their place in a list.
    Pairs(Box<Bpe>),
}

pub struct Tokenizer {
    merges: Merges,
    /// The bytes of each id.
    tokens: Vec<Vec<u8>>,
    specials: BTreeMap<String, u32>,
    /// The same, longest names first, and the characters that they begin with.
    names: Vec<(String, u32)>,
    firsts: Vec<char>,
    template_tokens: BTreeMap<String, String>,
}

impl Tokenizer {
    /// The tokenizer of a bundle, if it has one.
    pub fn of(bundle: &Bundle) -> Result<Option<Self>, WeightsError> {
        let Some((spec, model)) = bundle.tokenizer() else { return Ok(None) };
        Self::new(spec, model, bundle.config().vocab_size).map(Some).map_err(|m| m.in_file(bundle.path()))
    }

    /// `model` is the content of tiktoken.model, a line a token, its bytes in base64 and its id, or of tokenizer.json.
    pub fn new(spec: &TokenizerSpec, model: &[u8], vocab_size: usize) -> Result<Self, Mismatch> {
        const KEY: &str = "tokenizer";
        let (merges, mut tokens) = match spec.kind {
            TokenizerKind::Tiktoken => {
                let tokens = vocabulary(model, vocab_size)?;
                let single: HashSet<u8> = tokens.iter().flatten().filter(|t| t.len() == 1).map(|t| t[0]).collect();
                if let Some(byte) = (0..=u8::MAX).find(|byte| !single.contains(byte)) {
                    return Err(Mismatch::tensor(VOCABULARY, format_args!("a token for byte {byte:#04x}"), "none"));
                }
                let ranks = tokens.iter().enumerate().filter_map(|(id, t)| Some((t.clone()?, id as u32))).collect();
                // Special tokens are looked for here, not there.
                let bpe = CoreBPE::new(ranks, Default::default(), &spec.pattern)
                    .map_err(|e| Mismatch::metadata(KEY, "a pattern that compiles", e))?;
                (Merges::Ranks(bpe), tokens)
            }
            TokenizerKind::Json => {
                let parsed = bpe::parse(model)?;
                let mut tokens = vec![None; vocab_size];
                for (id, token) in parsed.tokens {
                    let special = spec.special_tokens.values().any(|&own| own == id);
                    let free = tokens.get_mut(id as usize).filter(|slot| slot.is_none());
                    let slot = free.ok_or_else(|| {
                        let expected = format!("ids below {vocab_size}, each once");
                        Mismatch::new("tokenizer.json, model.vocab", expected, id)
                    })?;
                    *slot = Some(token).filter(|_| !special);
                }
                (Merges::Pairs(Box::new(parsed.bpe)), tokens)
            }
        };
        for (name, &id) in &spec.special_tokens {
            let free = tokens.get_mut(id as usize).filter(|t| t.is_none());
            let Some(token) = free.filter(|_| !name.is_empty()) else {
                let expected = format!("special tokens with ids below {vocab_size} of their own");
                return Err(Mismatch::metadata(KEY, expected, format_args!("`{name}` {id}")));
            };
            *token = Some(name.clone().into_bytes());
        }
        let specials = spec.special_tokens.clone();
        let mut names: Vec<(String, u32)> = specials.clone().into_iter().collect();
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let firsts: BTreeSet<char> = names.iter().filter_map(|(name, _)| name.chars().next()).collect();
        let reserved = |(id, token): (usize, Option<Vec<u8>>)| {
            token.unwrap_or_else(|| format!("<|reserved_token_{id}|>").into_bytes())
        };
        Ok(Self {
            merges,
            tokens: tokens.into_iter().enumerate().map(reserved).collect(),
            specials,
            names,
            firsts: firsts.into_iter().collect(),
            template_tokens: spec.template_tokens.clone(),
        })
    }

    /// The tokens of `text`; a special token's name in it is ordinary text.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, TextError> {
        let ids: Vec<u32> = match &self.merges {
            Merges::Ranks(bpe) => pieces(text).into_iter().flat_map(|piece| bpe.encode_ordinary(piece)).collect(),
            Merges::Pairs(bpe) => bpe.encode(text)?,
        };
        self.covering(text, ids.into_iter().map(|id| id as i32).collect())
    }

    /// `ids`, if they spell `text`: a pattern that matches only parts of it would drop the rest.
    fn covering(&self, text: &str, ids: Vec<i32>) -> Result<Vec<i32>, TextError> {
        let mut rest = text.as_bytes();
        for &id in &ids {
            match rest.strip_prefix(self.bytes(id)?) {
                Some(after) => rest = after,
                None => break,
            }
        }
        if rest.is_empty() {
            return Ok(ids);
        }
        let at = text.len() - rest.len();
        Err(TextError::Encode(format!("the tokenizer's pattern leaves out what stands at byte {at} of {}", text.len())))
    }

    /// The tokens of `text` with the names of special tokens taken as such: for templates, never for a user's words.
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<i32>, TextError> {
        self.encode_names(text, None)
    }

    /// The tokens of a conversation.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<i32>, TextError> {
        match &rendered.marked {
            Some((text, mark)) => self.encode_names(text, Some(*mark)),
            None => self.encode_names(&rendered.text, None),
        }
    }

    /// The tokens of `text`: names of special tokens, the longest where several fit, and what lies between them
    /// without `mark`.
    fn encode_names(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>, TextError> {
        let mut ids = Vec::new();
        let ordinary = |text: &str, ids: &mut Vec<i32>| {
            let clean = mark.map(|mark| text.replace(mark, ""));
            ids.extend(self.encode(clean.as_deref().unwrap_or(text))?);
            Ok(())
        };
        let (mut start, mut at) = (0, 0);
        while let Some(next) = text[at..].find(&self.firsts[..]) {
            at += next;
            match self.names.iter().find(|(name, _)| text[at..].starts_with(name.as_str())) {
                Some((name, id)) => {
                    ordinary(&text[start..at], &mut ids)?;
                    ids.push(*id as i32);
                    at += name.len();
                    start = at;
                }
                None => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
        ordinary(&text[start..], &mut ids)?;
        Ok(ids)
    }

    /// The bytes of one token; a character may be spread over several.
    pub fn bytes(&self, id: i32) -> Result<&[u8], TextError> {
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        token.map(Vec::as_slice).ok_or(TextError::UnknownToken { id, vocabulary: self.tokens.len() })
    }

    /// The text of `ids`, with the replacement character for bytes that form no character.
    pub fn decode(&self, ids: &[i32]) -> Result<String, TextError> {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.bytes(id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Names and ids of the special tokens.
    pub fn specials(&self) -> &BTreeMap<String, u32> {
        &self.specials
    }

    /// What chat templates call some of them.
    pub fn template_tokens(&self) -> &BTreeMap<String, String> {
        &self.template_tokens
    }

    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }
}

const VOCABULARY: &str = "tokenizer.tiktoken";

/// The bytes of every id that `model` names; `None` for the others below `vocab_size`.
fn vocabulary(model: &[u8], vocab_size: usize) -> Result<Vec<Option<Vec<u8>>>, Mismatch> {
    let mut tokens = vec![None; vocab_size];
    let mut seen = HashSet::new();
    for (number, line) in model.split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
        let bad = |expected: String| {
            let found = format!("`{}` in line {}", String::from_utf8_lossy(line), number + 1);
            Mismatch::tensor(VOCABULARY, expected, found)
        };
        let mut words = line.trim_ascii_end().split(|&b| b == b' ');
        let (Some(token), Some(id), None) = (words.next(), words.next(), words.next()) else {
            return Err(bad("base64, a space and an id".into()));
        };
        let token = BASE64_STANDARD.decode(token).ok().filter(|t| !t.is_empty());
        let token = token.ok_or_else(|| bad("base64, a space and an id".into()))?;
        let id = std::str::from_utf8(id).ok().and_then(|id| id.parse::<usize>().ok());
        let slot = id.and_then(|id| tokens.get_mut(id)).filter(|slot| slot.is_none());
        let slot = slot.ok_or_else(|| bad(format!("an id below {vocab_size}, given once")))?;
        if !seen.insert(token.clone()) {
            return Err(bad("every token once".into()));
        }
        *slot = Some(token);
    }
    Ok(tokens)
}
