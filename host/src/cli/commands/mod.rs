//! One file a command.

mod answer;
pub mod bench;
pub mod chat;
pub mod completions;
pub mod convert;
pub mod decode;
pub mod doctor;
pub mod inspect;
mod load;
mod progress;
mod prompt;
pub mod states;
pub mod tokenize;
pub mod verify;
mod watch;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::Serialize;

use super::failure::{Failure, Result};
use super::output;
use crate::weights::{Bundle, Share, Verify};

/// Bytes of a text at most: more than any context holds, and an end for devices that have none.
const MAX_TEXT: u64 = 64 << 20;

/// Text from a file, or from stdin for `-`.
fn read_text(file: &Path) -> Result<String> {
    let read = |from: &mut dyn Read| {
        let mut text = String::new();
        from.take(MAX_TEXT + 1).read_to_string(&mut text).map(|_| text)
    };
    let text = match file == Path::new("-") {
        true => read(&mut std::io::stdin().lock()),
        false => std::fs::File::open(file).and_then(|mut open| read(&mut open)),
    };
    let text = text.map_err(|source| Failure::File { file: file.to_path_buf(), source })?;
    if text.len() as u64 > MAX_TEXT {
        return Err(Failure::usage(format!("{}: a text of more than {MAX_TEXT} bytes", file.display())));
    }
    Ok(text)
}

/// Opens a bundle or a folder, and says on stderr what is odd about it.
fn open(path: &Path, verify: Verify, layers: Option<usize>) -> Result<Bundle> {
    let bundle = Bundle::open_layers(path, verify, layers)?;
    if let Some(folder) = bundle.folder() {
        folder.notes.iter().for_each(|note| output::note(format_args!("{}: {note}", path.display())));
    }
    Ok(bundle)
}

/// Weights and bytes by the name of their format, groups taken together.
fn formats(bundle: &Bundle, drafter: bool) -> BTreeMap<String, Share> {
    let mut named: BTreeMap<String, Share> = BTreeMap::new();
    for (format, share) in bundle.formats(drafter) {
        let sum = named.entry(format.to_string()).or_default();
        sum.weights += share.weights;
        sum.parameters += share.parameters;
        sum.bytes += share.bytes;
    }
    named
}

/// A value that is left out of a document when there is none.
fn some<T: Serialize>(value: Option<T>) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}
