//! The rules, one function each: file and text in, findings out.

use super::Source;
use std::collections::BTreeSet;

/// Lines a file may have.
const LINES: usize = 600;
/// Columns a line may have.
const COLUMNS: usize = 120;
/// Files that may be longer, each with the reason.
const LONG: &[(&str, &str)] = &[];
/// Folders that hold what is one machine's, not the project's.
const MACHINE: [&str; 3] = ["home", "root", "work"];
/// Where inline assembly lives.
const ASSEMBLY: &str = "gpu/cuda_std/";
/// Lines above an `unsafe` in which its reason is looked for.
const NEAR: usize = 6;

/// All findings in one file. `gemms` are the kernels that only `linear` may launch.
pub fn check(path: &str, text: &str, gemms: &BTreeSet<String>) -> Vec<String> {
    let mut found = machine_paths(text);
    if path.ends_with(".rs") || path.ends_with(".py") {
        found.extend(size(path, text));
        found.extend(columns(text));
    }
    if path.ends_with(".rs") {
        let source = Source::read(text);
        found.extend(assembly(path, &source));
        found.extend(gemm_launches(path, text, &source, gemms));
        found.extend(unsafe_reasons(text, &source));
    }
    found.sort();
    found.into_iter().map(|(line, what)| format!("{path}:{line}: {what}")).collect()
}

type Found = Vec<(usize, String)>;

/// Long files want splitting.
fn size(path: &str, text: &str) -> Found {
    let lines = text.lines().count();
    let excused = LONG.iter().any(|(file, _)| *file == path);
    match (lines > LINES, excused) {
        (true, false) => vec![(LINES + 1, format!("file size: at most {LINES} lines, found {lines}: split it"))],
        (false, true) => vec![(1, format!("file size: {lines} lines need no exception any more"))],
        _ => Vec::new(),
    }
}

/// Long lines that rustfmt leaves, as in strings and comments.
fn columns(text: &str) -> Found {
    let wide = |line: &str| Some(line.chars().count()).filter(|&width| width > COLUMNS);
    let found = text.lines().enumerate().filter_map(|(i, line)| Some((i + 1, wide(line)?)));
    found.map(|(line, width)| (line, format!("line length: at most {COLUMNS} columns, found {width}"))).collect()
}

/// Paths that exist on one machine only.
fn machine_paths(text: &str) -> Found {
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for folder in MACHINE {
            let path = format!("/{folder}/");
            let starts = |(at, _): &(usize, &str)| {
                !line[..*at].ends_with(|c: char| c.is_alphanumeric() || "_-.}])*~>$".contains(c))
            };
            if line.match_indices(&path).any(|hit| starts(&hit)) {
                found.push((i + 1, format!("absolute path: `{path}` is one machine's")));
            }
        }
    }
    found
}

/// Inline assembly has one room, with a twin for the CPU.
fn assembly(path: &str, source: &Source) -> Found {
    if path.starts_with(ASSEMBLY) {
        return Vec::new();
    }
    let uses = |line: &str| ["asm", "global_asm"].into_iter().find(|name| words(line).any(|word| word == (*name, '!')));
    let found = source.code.lines().enumerate().filter_map(|(i, line)| Some((i + 1, uses(line)?)));
    found.map(|(line, name)| (line, format!("inline assembly: `{name}!` belongs in {ASSEMBLY}"))).collect()
}

/// The model asks `linear()`, which alone knows which kernel multiplies.
fn gemm_launches(path: &str, text: &str, source: &Source, gemms: &BTreeSet<String>) -> Found {
    let measures = path.split('/').any(|part| part.starts_with("doctor") || part.starts_with("bench"));
    if !path.starts_with("host/") || path.starts_with("host/src/linear") || measures {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (i, (line, code)) in text.lines().zip(source.code.lines()).enumerate() {
        // Kernels are named in strings too; comments may name what they like.
        let visible = if code.contains('"') { line } else { code };
        let named = |word: &str| gemms.contains(word) || gemms.contains(&word.to_lowercase());
        for (word, _) in words(visible).filter(|(word, _)| named(word)) {
            found.push((i + 1, format!("product kernel: `{word}` is launched by host/src/linear only")));
        }
    }
    found
}

/// Every `unsafe` block, impl, trait and function says why it is sound, or what its caller owes.
fn unsafe_reasons(text: &str, source: &Source) -> Found {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, _) in source.code.match_indices("unsafe") {
        let (before, after) = (&source.code[..at], &source.code[at + "unsafe".len()..]);
        let Some(what) = unsafe_item(before, after) else { continue };
        let line = before.matches('\n').count();
        let last = (line + 2).min(lines.len());
        let near = &lines[line.saturating_sub(NEAR)..last];
        let attached = lines[..line].iter().rev().take_while(|line| {
            let line = line.trim_start();
            line.starts_with("//") || line.starts_with('#')
        });
        let says = |line: &&str| line.contains("SAFETY") || line.contains("# Safety");
        if !near.iter().any(says) && !attached.copied().any(|line| says(&line)) {
            found.push((line + 1, format!("unsafe {what}: no SAFETY line near it")));
        }
    }
    found
}

/// What the word `unsafe` opens here; nothing where it needs no reason (an attribute, a function type, part of a word).
fn unsafe_item(before: &str, after: &str) -> Option<&'static str> {
    if before.ends_with(is_word) || after.starts_with(is_word) {
        return None;
    }
    let mut after = after.trim_start();
    if let Some(rest) = after.strip_prefix("extern") {
        after = rest.trim_start().trim_start_matches(['"', ' ']);
    }
    match after {
        _ if after.starts_with('{') => Some("block"),
        _ if after.starts_with("impl") => Some("impl"),
        _ if after.starts_with("trait ") => Some("trait"),
        _ => after.strip_prefix("fn ").filter(|rest| rest.trim_start().starts_with(is_word)).map(|_| "fn"),
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The words of a line, each with the character after it.
fn words(line: &str) -> impl Iterator<Item = (&str, char)> {
    let starts = line.char_indices().filter(|&(at, c)| is_word(c) && !line[..at].ends_with(is_word));
    starts.map(|(at, _)| {
        let end = line[at..].find(|c| !is_word(c)).map_or(line.len(), |length| at + length);
        (&line[at..end], line[end..].chars().next().unwrap_or('\n'))
    })
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
