//! From text or a conversation to tokens.

use super::read_text;
use crate::cli::args::{Conversation, Switch};
use crate::cli::failure::{Failure, Result};
use crate::text::{ChatTemplate, Messages, Tokenizer};
use crate::weights::{Bundle, TemplateSource};

pub const EMPTY: &str = "the prompt is empty: there is no token to continue";

/// What the model is to continue.
pub struct Prompt {
    pub ids: Vec<i32>,
    /// As typed, or as the chat template wrote it.
    pub text: String,
}

/// The tokens of `text`, or of the conversation that `args` names. With `special`, names of special tokens count.
pub fn read(
    text: Option<String>,
    special: bool,
    args: &Conversation,
    bundle: &Bundle,
    tokenizer: &Tokenizer,
) -> Result<Prompt> {
    let text = text.unwrap_or_default();
    let messages = match &args.messages {
        Some(file) => Messages::parse(&read_text(file)?).map_err(|m| m.in_file(file))?,
        None if args.chat && text.is_empty() => return Err(Failure::usage(EMPTY)),
        None if args.chat => Messages::ask(args.system.as_deref(), &text),
        None => {
            let ids = if special { tokenizer.encode_with_specials(&text)? } else { tokenizer.encode(&text)? };
            return Ok(Prompt { ids, text });
        }
    };
    let own = args.template.as_ref().map(|file| -> Result<TemplateSource> {
        Ok(TemplateSource { text: read_text(file)?, file: file.clone(), place: String::new() })
    });
    let own = own.transpose()?;
    let source = own.as_ref().or(bundle.chat_template()).ok_or_else(|| {
        Failure::usage(format!("{} holds no chat template: give one with --template", bundle.path().display()))
    })?;
    let template = ChatTemplate::new(source)?;
    if args.thinking.is_some() && !template.has_thinking() {
        return Err(Failure::usage(format!(
            "--thinking: the chat template of {} has no switch for it",
            source.file.display()
        )));
    }
    let thinking = args.thinking.map(|switch| switch == Switch::On);
    let rendered = template.render(&messages, thinking, tokenizer, special)?;
    Ok(Prompt { ids: tokenizer.encode_rendered(&rendered)?, text: rendered.text })
}
