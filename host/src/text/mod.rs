//! Text and tokens: the tokenizer, chat templates, and text from a stream of tokens.

mod bpe;
mod messages;
mod split;
mod stream;
mod template;
#[cfg(test)]
mod template_tests;
#[cfg(test)]
mod tests;
mod to_json;
mod tokenizer;

pub use messages::Messages;
pub use stream::TextStream;
pub use template::{ChatTemplate, Rendered};
pub use tokenizer::Tokenizer;

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("token {id} is not in the vocabulary of {vocabulary}")]
    UnknownToken { id: i32, vocabulary: usize },
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}
