//! Text from tokens as they come: a character that is spread over tokens is held back until it is whole, and text that
//! may turn out to be a stop string until it is decided.

use super::{TextError, Tokenizer};

/// Decodes a stream of tokens.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    stops: Vec<String>,
    /// Bytes of a character that is not whole yet.
    bytes: Vec<u8>,
    /// Text that a stop string may start in.
    held: String,
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// `stops`: strings that end the text; empty ones are ignored.
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { tokenizer, stops, bytes: Vec::new(), held: String::new(), stopped: false }
    }

    /// Takes one token and returns the text that is certain now. After a stop string there is none.
    pub fn push(&mut self, id: i32) -> Result<String, TextError> {
        let bytes = self.tokenizer.bytes(id)?;
        if self.stopped {
            return Ok(String::new());
        }
        self.bytes.extend_from_slice(bytes);
        let text = take_text(&mut self.bytes);
        Ok(self.release(&text))
    }

    /// Whether a stop string has come; the text before it is all there is.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// The text held back at the end; a character that was cut becomes the replacement character.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.bytes);
        let mut text = self.release(&String::from_utf8_lossy(&rest));
        text.push_str(&std::mem::take(&mut self.held));
        text
    }

    /// Adds `text` to what is held and takes out what no stop string can start in.
    fn release(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.bytes.clear();
            let rest = std::mem::take(&mut self.held);
            return rest[..at].to_string();
        }
        let undecided = self.held.char_indices().map(|(at, _)| at).find(|&at| {
            let tail = &self.held[at..];
            self.stops.iter().any(|stop| stop.starts_with(tail))
        });
        let rest = self.held.split_off(undecided.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }
}

/// Takes the whole characters out of `bytes`; bytes that can belong to none become replacement characters.
fn take_text(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut start = 0;
    while start < bytes.len() {
        match std::str::from_utf8(&bytes[start..]) {
            Ok(rest) => {
                text.push_str(rest);
                start = bytes.len();
            }
            Err(e) => {
                let valid = start + e.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&bytes[start..valid]));
                start = valid;
                let Some(broken) = e.error_len() else { break };
                text.push(char::REPLACEMENT_CHARACTER);
                start += broken;
            }
        }
    }
    bytes.drain(..start);
    text
}
