//! What can be wrong with a file of weights. Every message names the file, the place in it, what was expected there and
//! what was found.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// An error of a bundle.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{}: {mismatch}", file.display())]
    Invalid { file: PathBuf, mismatch: Mismatch },
    /// The content is not what was written. `verify` answers it with an exit code of its own.
    #[error("{}: tensor `{tensor}`: expected blake3 {expected}, found {found}", file.display())]
    Hash { file: PathBuf, tensor: String, expected: String, found: String },
    /// The same of a whole file of a checkpoint.
    #[error("{}: expected sha256 {expected}, found {found}", file.display())]
    FileHash { file: PathBuf, expected: String, found: String },
}

/// One broken rule, before the file's name is added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: expected {expected}, found {found}")]
pub struct Mismatch {
    /// ``tensor `NAME` ``, ``metadata `KEY` `` or `header`.
    pub at: String,
    pub expected: String,
    pub found: String,
}

impl Mismatch {
    pub fn new(at: impl Display, expected: impl Display, found: impl Display) -> Self {
        Self { at: at.to_string(), expected: expected.to_string(), found: found.to_string() }
    }

    pub fn tensor(name: &str, expected: impl Display, found: impl Display) -> Self {
        Self::new(format_args!("tensor `{name}`"), expected, found)
    }

    pub fn metadata(key: &str, expected: impl Display, found: impl Display) -> Self {
        Self::new(format_args!("metadata `{key}`"), expected, found)
    }

    pub fn in_file(self, file: &Path) -> WeightsError {
        WeightsError::Invalid { file: file.to_path_buf(), mismatch: self }
    }
}

/// `Ok` when the rule holds.
pub(crate) fn rule(holds: bool, otherwise: impl FnOnce() -> Mismatch) -> Result<(), Mismatch> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
