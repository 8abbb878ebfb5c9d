//! The text side of a checkpoint folder: tiktoken.model or tokenizer.json, tokenizer_config.json,
//! generation_config.json, chat template.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::super::config::text_config;
use super::super::error::rule;
use super::super::{Mismatch, TemplateSource, TokenizerKind, TokenizerSpec, WeightsError, json};
use super::index::read_text;

const VOCABULARY: &str = "tiktoken.model";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TOKENIZER: &str = "tokenizer.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Special tokens at which a turn or a text ends, whatever the settings name.
const ENDS: [&str; 2] = ["[EOS]", "<|im_end|>"];
/// Names that a chat template has for special tokens.
const TEMPLATE_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// How Kimi's tokenizer splits a text, which its checkpoints hold only as code: Han text; words of letters that are no
/// Han, with what stands before and an English contraction behind; up to three digits; the rest.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

type Result<T> = std::result::Result<T, WeightsError>;

#[derive(Default)]
pub(super) struct Text {
    pub tokenizer: Option<TokenizerSpec>,
    pub vocabulary: Option<Vec<u8>>,
    pub chat_template: Option<TemplateSource>,
    pub stop_token_ids: Vec<i32>,
}

/// Reads what is there; a folder without a vocabulary decodes token ids only.
pub(super) fn read(folder: &Path, config: &Value, vocab_size: usize) -> Result<Text> {
    let settings = document(folder, TOKENIZER_CONFIG)?;
    let mut text = Text::default();
    let (model, whole) = (folder.join(VOCABULARY), folder.join(TOKENIZER));
    let kind = match (model.exists(), whole.exists()) {
        (true, _) => Some((TokenizerKind::Tiktoken, &model)),
        (false, true) => Some((TokenizerKind::Json, &whole)),
        (false, false) => None,
    };
    if let Some((kind, file)) = kind {
        let mut special_tokens = special_tokens(&settings).map_err(|m| m.in_file(&folder.join(TOKENIZER_CONFIG)))?;
        let described = document(folder, TOKENIZER)?;
        let mut pattern = String::new();
        match kind {
            TokenizerKind::Tiktoken => pattern = split_pattern(&described).unwrap_or_else(|| PATTERN.into()),
            TokenizerKind::Json => special_tokens.extend(added_tokens(&described).map_err(|m| m.in_file(&whole))?),
        }
        text.vocabulary = Some(read_text(file)?.into_bytes());
        let template_tokens = template_tokens(&settings);
        text.tokenizer = Some(TokenizerSpec { kind, pattern, special_tokens, template_tokens });
    }
    text.chat_template = chat_template(folder, &settings)?;
    let mut stops = BTreeSet::new();
    let generation = document(folder, GENERATION_CONFIG)?;
    for (file, object) in
        [("config.json", config), ("config.json", &text_config(config.clone())), (GENERATION_CONFIG, &generation)]
    {
        stops.extend(stop_ids(object, vocab_size).map_err(|m| m.in_file(&folder.join(file)))?);
    }
    let names = text.tokenizer.iter().flat_map(|t| ENDS.iter().filter_map(|end| t.special_tokens.get(*end)));
    stops.extend(names.filter_map(|&id| i32::try_from(id).ok()));
    text.stop_token_ids = stops.into_iter().collect();
    Ok(text)
}

/// A JSON file of the folder; an empty object where there is none.
fn document(folder: &Path, name: &str) -> Result<Value> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(Value::Object(Default::default()));
    }
    let text = read_text(&path)?;
    json::unique_keys(&text)
        .and_then(|()| serde_json::from_str(&text))
        .map_err(|e| Mismatch::new("text", "JSON with every key once", e).in_file(&path))
}

/// `eos_token_id`, one or a list.
fn stop_ids(object: &Value, vocab_size: usize) -> std::result::Result<Vec<i32>, Mismatch> {
    let ids: Vec<Value> = match object.get("eos_token_id") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(ids)) => ids.clone(),
        Some(id) => vec![id.clone()],
    };
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| (id as usize) < vocab_size).and_then(|id| i32::try_from(id).ok());
        id.ok_or_else(|| Mismatch::new("field `eos_token_id`", format_args!("ids below {vocab_size}"), value))
    };
    ids.iter().map(id).collect()
}

/// `added_tokens_decoder`: special tokens by id.
fn special_tokens(settings: &Value) -> std::result::Result<BTreeMap<String, u32>, Mismatch> {
    let mut tokens = BTreeMap::new();
    for (id, token) in settings.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        let parsed = id.parse::<u32>().ok().zip(token.get("content").and_then(Value::as_str));
        let place = "field `added_tokens_decoder`";
        let (number, content) = parsed
            .ok_or_else(|| Mismatch::new(place, "ids with the `content` of a token", format_args!("{id}: {token}")))?;
        rule(tokens.insert(content.to_string(), number).is_none(), || {
            Mismatch::new(place, "every token once", format_args!("`{content}` twice"))
        })?;
    }
    Ok(tokens)
}

/// `added_tokens` of a tokenizer.json: texts with an id of their own.
fn added_tokens(tokenizer: &Value) -> std::result::Result<BTreeMap<String, u32>, Mismatch> {
    let token = |token: &Value| {
        let id = token.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
        let parsed = token.get("content").and_then(Value::as_str).zip(id);
        let (content, id) = parsed
            .ok_or_else(|| Mismatch::new("field `added_tokens`", "tokens with their `id` and `content`", token))?;
        Ok((content.to_string(), id))
    };
    tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten().map(token).collect()
}

/// What templates call special tokens: a text each, or an object with one.
fn template_tokens(settings: &Value) -> BTreeMap<String, String> {
    let token = |name: &&str| {
        let value = settings.get(*name)?;
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some((name.to_string(), text.to_string()))
    };
    TEMPLATE_TOKENS.iter().filter_map(token).collect()
}

/// The chat template: a file of its own, or a field of tokenizer_config.json, one or named ones.
fn chat_template(folder: &Path, settings: &Value) -> Result<Option<TemplateSource>> {
    let file = folder.join(CHAT_TEMPLATE);
    if file.exists() {
        return Ok(Some(TemplateSource { text: read_text(&file)?, file, place: String::new() }));
    }
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
        Some(default?.get("template")?.as_str()?.to_string())
    };
    let found = match settings.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(list)) => named(list),
        Some(_) => None,
    };
    let (file, place) = (folder.join(TOKENIZER_CONFIG), "field `chat_template`".to_string());
    match found {
        Some(text) => Ok(Some(TemplateSource { text, file, place })),
        None => {
            Err(Mismatch::new(place, "a text, or a list with a template named `default`", "neither").in_file(&file))
        }
    }
}

/// The splitting pattern of a tokenizer.json.
fn split_pattern(tokenizer: &Value) -> Option<String> {
    let pre = tokenizer.get("pre_tokenizer")?;
    let parts = match pre.get("pretokenizers").and_then(Value::as_array) {
        Some(parts) => parts.clone(),
        None => vec![pre.clone()],
    };
    parts.iter().find_map(|part| Some(part.get("pattern")?.get("Regex")?.as_str()?.to_string()))
}

#[cfg(test)]
mod tests {
    use super::PATTERN;

    /// Pieces that follow from the published rules, one of each branch.
    #[test]
    fn kimis_pattern() {
        let regex = fancy_regex::Regex::new(PATTERN).unwrap();
        let pieces = |text: &str| -> Vec<String> {
            regex.find_iter(text).map(|found| found.unwrap().as_str().to_string()).collect()
        };
        for (text, want) in [
            ("\u{6df7}\u{5408}Mixed\u{4e2d}\u{6587}English123", "\u{6df7}\u{5408}|Mixed|\u{4e2d}\u{6587}|English|123"),
            ("I'm sure they'll say DON'T", "I'm| sure| they'll| say| DON'T"),
            ("12345 x", "123|45| x"),
            ("a  b\n\n c ", "a| | b|\n\n| c| "),
            ("iPhoneX, (ok)!", "i|Phone|X|,| (|ok|)!"),
        ] {
            assert_eq!(pieces(text).join("|"), want);
        }
    }
}
