//! Where the workspace is and which files belong to it.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Folders that hold nothing of ours, wherever they lie.
const SKIPPED: [&str; 4] = ["target", "dist", "node_modules", "__pycache__"];

/// Hidden folders that do.
const HIDDEN: [&str; 2] = [".ci", ".cargo"];

/// The workspace's folder: above this crate when cargo runs it, else the first one upwards with a `[workspace]`.
pub fn root() -> Result<PathBuf> {
    let start = match env::var_os("CARGO_MANIFEST_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => env::current_dir().context("the current folder")?,
    };
    let is_root = |dir: &&Path| {
        fs::read_to_string(dir.join("Cargo.toml")).is_ok_and(|text| text.lines().any(|line| line == "[workspace]"))
    };
    let found = start.ancestors().find(is_root).map(Path::to_path_buf);
    found.with_context(|| format!("no Cargo.toml with [workspace] in {} or above", start.display()))
}

/// Every file of ours below `dir`, relative to `root`, sorted.
pub fn files(root: &Path, dir: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(&root.join(dir), &mut found)?;
    let mut found: Vec<PathBuf> =
        found.into_iter().filter_map(|path| path.strip_prefix(root).ok().map(Path::to_path_buf)).collect();
    found.sort();
    Ok(found)
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("read the folder {}", dir.display()))? {
        let entry = entry.with_context(|| format!("read the folder {}", dir.display()))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let kind = entry.file_type().with_context(|| format!("look at {}", entry.path().display()))?;
        let skipped = SKIPPED.contains(&&*name) || (name.starts_with('.') && !HIDDEN.contains(&&*name));
        match kind.is_dir() {
            true if skipped => {}
            true => walk(&entry.path(), found)?,
            // In a second work tree of the repository, `.git` is a file.
            false if kind.is_file() && name != ".git" => found.push(entry.path()),
            false => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_finds_this_file_and_no_build_outputs() {
        let root = root().unwrap();
        let files = files(&root, ".").unwrap();
        assert!(files.iter().any(|path| path.ends_with("xtask/src/workspace.rs")), "{files:?}");
        assert!(!files.iter().any(|path| path.components().any(|part| part.as_os_str() == "target")));
    }
}
