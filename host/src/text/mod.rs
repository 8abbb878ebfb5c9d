//! Text and tokens.

mod split;
mod stream;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use stream::TextStream;
pub use tokenizer::Tokenizer;

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("token {id} is not in the vocabulary of {vocabulary}")]
    UnknownToken { id: i32, vocabulary: usize },
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}
