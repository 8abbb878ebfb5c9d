//! Which kernels the source has, read without compiling it.

use crate::{tidy::Source, workspace};
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The names of all functions under `#[kernel]` in `gpu/src`, and of those that a `KERNELS` list there names. A kernel
/// whose name a macro makes up is only known by such a list.
pub fn in_source(root: &Path) -> Result<BTreeSet<String>> {
    names(root, |text, code| marked(code, "#[kernel").into_iter().chain(listed(text, code)).collect())
}

/// The names of those among them that have launch bounds.
pub fn bounded_in_source(root: &Path) -> Result<BTreeSet<String>> {
    names(root, |_, code| marked(code, "#[kernel(threads"))
}

/// What `of` finds in the files of `gpu/src`: their text, and the same with comments and strings blank.
fn names(root: &Path, of: impl Fn(&str, &str) -> Vec<String>) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for path in workspace::files(root, "gpu/src")? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(root.join(&path)).with_context(|| format!("read {}", path.display()))?;
            let source = Source::read(&text);
            names.extend(of(&text, &source.code));
        }
    }
    Ok(names)
}

/// The functions that follow an attribute which begins with `mark`.
fn marked(code: &str, mark: &str) -> Vec<String> {
    let after = code.split(mark).skip(1).filter(|rest| rest.starts_with([']', '(', ' ', '=']));
    after.filter_map(|rest| name(rest.split_once("fn ")?.1)).collect()
}

/// The strings of `const KERNELS: … = &[…];`. Strings are blank in `code`, which only says where the list is.
fn listed(text: &str, code: &str) -> Vec<String> {
    let Some(start) = code.find("const KERNELS:") else { return Vec::new() };
    let end = code[start..].find(';').map_or(code.len(), |length| start + length);
    text[start..end].split('"').skip(1).step_by(2).map(String::from).collect()
}

/// The name at the start; nothing for a macro's `$name`.
fn name(text: &str) -> Option<String> {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
    (end > 0).then(|| text[..end].to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_mark() {
        let text = "#[kernel]\n#[allow(x)]\npub fn one(a: A) {}\n// #[kernel] fn no()\nfn other() {}\n\
                    macro_rules! m { ($n:ident) => { #[kernel]\npub fn $n(a: A) {} } }\n#[kernels]\nfn three() {}";
        assert_eq!(marked(&Source::read(text).code, "#[kernel"), ["one"]);
        let bounded = "#[kernel]\nfn free(a: A) {}\n#[kernel(threads = T, blocks = 2)]\npub fn held(a: A) {}";
        assert_eq!(marked(bounded, "#[kernel(threads"), ["held"]);
    }

    #[test]
    fn kernels_are_found_in_the_list() {
        let text = "pub const KERNELS: &[&str] = &[\"one\", /* \"no\" */ \"two\"];\nconst OTHER: &str = \"three\";";
        let source = Source::read(text);
        assert!(listed(text, &source.code).contains(&"two".to_string()));
        assert!(!listed(text, &source.code).contains(&"three".to_string()));
    }
}
