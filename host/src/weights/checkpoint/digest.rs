//! SHA-256 of files, where a hub's cache keeps them: in the names of what its links point at, or in a file beside.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::super::WeightsError;
use super::super::container::Container;

/// What `file` should hash to, if that is known here.
fn known(file: &Path) -> Option<String> {
    let is_digest = |text: &str| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let linked = std::fs::read_link(file).ok().and_then(|to| Some(to.file_name()?.to_string_lossy().into_owned()));
    let beside = || {
        let name = format!("{}.metadata", file.file_name()?.to_string_lossy());
        let text = std::fs::read_to_string(file.parent()?.join(".cache/huggingface/download").join(name)).ok()?;
        text.lines().nth(1).map(|line| line.trim().to_string())
    };
    linked.filter(|name| is_digest(name)).or_else(|| beside().filter(|name| is_digest(name)))
}

/// Bytes between two looks at how far it is.
const STEP: usize = 16 << 20;

/// Hashes every file of which the digest is known, and returns their number. `done` grows by what has been hashed.
pub(in super::super) fn verify_files(files: &[Container], done: &AtomicU64) -> Result<usize, WeightsError> {
    let checked: Result<Vec<bool>, WeightsError> = files
        .par_iter()
        .map(|file| {
            let Some(expected) = known(file.path()) else { return Ok(false) };
            let mut hasher = Sha256::new();
            for part in file.content().chunks(STEP) {
                hasher.update(part);
                done.fetch_add(part.len() as u64, Ordering::Relaxed);
            }
            let digest = hasher.finalize();
            let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            if found == expected {
                return Ok(true);
            }
            Err(WeightsError::FileHash { file: file.path().to_path_buf(), expected, found })
        })
        .collect();
    Ok(checked?.into_iter().filter(|&known| known).count())
}
