//! Chat templates: the Jinja source that comes with a model, rendered as its makers' own code does.
//!
//! Whatever a message says is text: a special token's name in it must not become the token. Templates write tokens and
//! messages into one text, so a message's characters that could begin a name are followed by a mark, one character that
//! occurs nowhere else. Names are then looked for in the marked text, and marks taken out of what lies between them, so
//! that text of template and message is still encoded as a whole. The template must not notice: without marks it must
//! give the same text.

use std::collections::BTreeSet;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};

use super::to_json::to_json;
use super::{Messages, Tokenizer};
use crate::weights::{Mismatch, TemplateSource, WeightsError};

const NAME: &str = "chat";
/// What templates call the switch for thinking.
const THINKING: [&str; 2] = ["thinking", "enable_thinking"];
/// Steps of a rendering, and 64 bytes count as one: an end for templates that have none.
const FUEL: u64 = 50_000_000;
/// Characters that are none; one of them is the mark.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

pub struct ChatTemplate<'a> {
    source: &'a TemplateSource,
    environment: Environment<'a>,
}

/// A conversation as the template writes it.
#[derive(Debug)]
pub struct Rendered {
    pub text: String,
    /// The same with the mark, where names in messages are text.
    pub(super) marked: Option<(String, char)>,
}

impl<'a> ChatTemplate<'a> {
    pub fn new(source: &'a TemplateSource) -> Result<Self, WeightsError> {
        let mut environment = Environment::new();
        let fault = |e: Error| fault(source, "a Jinja template", &e);
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(fault)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_template(NAME, &source.text).map_err(fault)?;
        Ok(Self { source, environment })
    }

    /// Whether the template has a switch for thinking.
    pub fn has_thinking(&self) -> bool {
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|t| t.undeclared_variables(false).iter().any(|name| THINKING.contains(&name.as_str())))
    }

    /// The conversation up to where the model's answer begins. With `special`, names of special tokens in messages are
    /// those tokens; otherwise they are text.
    pub fn render(
        &self,
        messages: &Messages,
        thinking: Option<bool>,
        tokenizer: &Tokenizer,
        special: bool,
    ) -> Result<Rendered, WeightsError> {
        let text = self.text(&messages.0, thinking, tokenizer)?;
        let firsts: BTreeSet<char> = tokenizer.specials().keys().filter_map(|name| name.chars().next()).collect();
        if special || firsts.is_empty() {
            return Ok(Rendered { text, marked: None });
        }
        let no = |expected: &str, found: &str| Mismatch::new("messages", expected, found).in_file(&self.source.file);
        let mark = MARKS.into_iter().find(|&mark| !text.contains(mark) && !self.source.text.contains(mark));
        let mark = mark.ok_or_else(|| no("text of characters", "every code that Unicode keeps for none"))?;
        let marked: Vec<Value> = messages.0.iter().map(|message| marked(message, &firsts, mark)).collect();
        let marked = self.text(&marked, thinking, tokenizer)?;
        if marked.replace(mark, "") != text {
            let found = "a template whose output depends on them: with --special they are those tokens";
            return Err(no("names of special tokens in messages, and what begins like one, to be text", found));
        }
        Ok(Rendered { text, marked: Some((marked, mark)) })
    }

    fn text(&self, messages: &[Value], thinking: Option<bool>, tokenizer: &Tokenizer) -> Result<String, WeightsError> {
        let none = || Value::from(());
        let mut context = vec![
            ("messages", Value::from_iter(messages.iter().cloned())),
            ("add_generation_prompt", true.into()),
            ("tools", none()),
            ("documents", none()),
        ];
        context.extend(tokenizer.template_tokens().iter().map(|(name, text)| (name.as_str(), text.as_str().into())));
        context.extend(thinking.into_iter().flat_map(|on| THINKING.map(|name| (name, on.into()))));
        let template = self.environment.get_template(NAME);
        template
            .and_then(|template| template.render(Value::from_pairs(context)))
            .map_err(|e| fault(self.source, "a template that renders these messages", &e))
    }
}

/// A message with marks. Fields and what templates compare stay as they are.
fn marked(value: &Value, firsts: &BTreeSet<char>, mark: char) -> Value {
    let mark_text = |text: &str| {
        text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
            out.push(c);
            if firsts.contains(&c) {
                out.push(mark);
            }
            out
        })
    };
    match (value.kind(), value.try_iter()) {
        (ValueKind::String, _) => value.as_str().map_or_else(|| value.clone(), |text| mark_text(text).into()),
        (ValueKind::Seq, Ok(items)) => items.map(|item| marked(&item, firsts, mark)).collect(),
        (ValueKind::Map, Ok(keys)) => Value::from_pairs(keys.map(|key| {
            let field = value.get_item(&key).unwrap_or_default();
            let name = key.as_str().unwrap_or_default();
            let word = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let field = if matches!(name, "role" | "type") { field } else { marked(&field, firsts, mark) };
            (if word { name.to_string() } else { mark_text(name) }, field)
        })),
        _ => value.clone(),
    }
}

fn fault(source: &TemplateSource, expected: &str, e: &Error) -> WeightsError {
    let line = e.line().map_or_else(|| "template".to_string(), |line| format!("template line {line}"));
    let at = if source.place.is_empty() { line } else { format!("{}, {line}", source.place) };
    let found = match e.detail() {
        Some(detail) => format!("{}: {detail}", e.kind()),
        None => e.kind().to_string(),
    };
    Mismatch::new(at, expected, found).in_file(&source.file)
}
