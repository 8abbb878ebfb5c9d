//! A conversation: a JSON list of messages, checked before a template sees it.

use minijinja::Value;
use serde_json::{Map, Value as Json};

use crate::weights::{Mismatch, unique_keys};

const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];
const FIELDS: [&str; 7] = ["role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"];

/// Messages in the form that chat templates read.
#[derive(Clone, Debug)]
pub struct Messages(pub(super) Vec<Value>);

impl Messages {
    /// One question, after a system prompt if there is one.
    pub fn ask(system: Option<&str>, prompt: &str) -> Self {
        let mut messages = Self::start(system);
        messages.user(prompt);
        messages
    }

    /// The beginning of a conversation: nothing, or a system prompt.
    pub fn start(system: Option<&str>) -> Self {
        Self(system.map(|text| message("system", text)).into_iter().collect())
    }

    /// Adds what a user says.
    pub fn user(&mut self, text: &str) {
        self.0.push(message("user", text));
    }

    /// Adds an answer. Templates call the reasoning before it one of two names.
    pub fn assistant(&mut self, reasoning: Option<&str>, text: &str) {
        let mut fields = vec![("role", "assistant"), ("content", text)];
        fields.extend(reasoning.into_iter().flat_map(|r| ["reasoning", "reasoning_content"].map(|name| (name, r))));
        self.0.push(Value::from_pairs(fields));
    }

    /// `[{"role": "user", "content": "…"}, …]`.
    pub fn parse(text: &str) -> Result<Self, Mismatch> {
        let invalid = |e: serde_json::Error| Mismatch::new("messages", "a JSON list with every key once", e);
        unique_keys(text).map_err(invalid)?;
        match serde_json::from_str(text).map_err(invalid)? {
            Json::Array(list) if !list.is_empty() => {
                list.iter().enumerate().try_for_each(|(i, message)| check(&format!("messages[{i}]"), message))?;
            }
            other => return Err(Mismatch::new("messages", "a list with at least one message", short(&other))),
        }
        // Read again: these values keep the order of keys, which templates may write out.
        serde_json::from_str(text).map(Self).map_err(invalid)
    }
}

fn message(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", role), ("content", content)])
}

/// A value as a message shows it, cut where it is long.
fn short(value: &Json) -> String {
    const SHOWN: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn wrong(place: &str, expected: &str, found: Option<&Json>) -> Mismatch {
    Mismatch::new(place, expected, found.map_or("nothing".into(), short))
}

fn check(place: &str, message: &Json) -> Result<(), Mismatch> {
    let fields = message.as_object().ok_or_else(|| wrong(place, "an object", Some(message)))?;
    if let Some(field) = fields.keys().find(|field| !FIELDS.contains(&field.as_str())) {
        return Err(Mismatch::new(place, format_args!("the fields {}", FIELDS.join(", ")), format_args!("`{field}`")));
    }
    let role = fields.get("role").and_then(Json::as_str).filter(|role| ROLES.contains(role));
    let expected = "system, user, assistant or tool";
    let role = role.ok_or_else(|| wrong(&format!("{place}.role"), expected, fields.get("role")))?;
    for field in ["name", "reasoning", "reasoning_content", "tool_call_id"] {
        match fields.get(field) {
            Some(Json::String(_) | Json::Null) => {}
            None if (role, field) != ("tool", "tool_call_id") => {}
            found => return Err(wrong(&format!("{place}.{field}"), "a text", found)),
        }
    }
    let calls = fields.get("tool_calls").filter(|calls| !calls.is_null());
    if let Some(calls) = calls {
        let place = format!("{place}.tool_calls");
        let list = calls.as_array().filter(|_| role == "assistant");
        let list = list.ok_or_else(|| wrong(&place, "a list, of an assistant's message", Some(calls)))?;
        list.iter().enumerate().try_for_each(|(i, call)| check_call(&format!("{place}[{i}]"), call))?;
    }
    check_content(&format!("{place}.content"), fields, calls.is_some())
}

/// A call of a function: `{"id": "…", "function": {"name": "…", "arguments": …}}`.
fn check_call(place: &str, call: &Json) -> Result<(), Mismatch> {
    let function = call.get("function");
    let named = function.and_then(|f| f.get("name")).is_some_and(Json::is_string);
    let arguments = function.and_then(|f| f.get("arguments")).is_some_and(|a| a.is_string() || a.is_object());
    if named && arguments && call.get("id").is_none_or(Json::is_string) {
        return Ok(());
    }
    Err(wrong(place, "a text `id` and a `function` with its `name` and its `arguments`", Some(call)))
}

/// A text, text in parts, or nothing beside calls.
fn check_content(place: &str, fields: &Map<String, Json>, calls: bool) -> Result<(), Mismatch> {
    match fields.get("content") {
        Some(Json::String(_)) => Ok(()),
        Some(Json::Null) | None if calls => Ok(()),
        Some(Json::Array(parts)) => parts.iter().enumerate().try_for_each(|(i, part)| {
            let text = part.get("type").and_then(Json::as_str) == Some("text");
            if text && part.get("text").is_some_and(Json::is_string) {
                return Ok(());
            }
            Err(wrong(&format!("{place}[{i}]"), "a part of type `text`: there is no other input", Some(part)))
        }),
        found => Err(wrong(place, "a text, or a list of parts", found)),
    }
}
