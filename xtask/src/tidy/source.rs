//! Rust source seen without its comments and without the insides of its literals, so that rules see code only.

/// A view of a source file.
pub struct Source {
    /// As long as the text, byte for byte and line for line, with comments and the insides of literals as spaces.
    pub code: String,
}

/// What a stretch of text is.
#[derive(PartialEq)]
enum Kind {
    Code,
    Blank,
}

impl Source {
    /// Reads a file. Broken source gives a broken view, never a panic.
    pub fn read(text: &str) -> Source {
        let mut code = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            let (length, kind, edge) = next(rest, code.chars().next_back());
            let stretch = &rest[..length];
            for (at, c) in stretch.char_indices() {
                let inside = at >= edge && at + edge < length;
                match kind {
                    Kind::Blank if inside && c != '\n' => (0..c.len_utf8()).for_each(|_| code.push(' ')),
                    _ => code.push(c),
                }
            }
            rest = &rest[length..];
        }
        Source { code }
    }
}

/// Length and kind of the stretch at the start of `text`, and how many bytes at each of its ends stay visible.
fn next(text: &str, before: Option<char>) -> (usize, Kind, usize) {
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if text.starts_with("//") {
        return (text.find('\n').unwrap_or(text.len()), Kind::Blank, 0);
    }
    if text.starts_with("/*") {
        return (block_comment(text), Kind::Blank, 0);
    }
    if !in_word && let Some(length) = raw_string(text) {
        return (length, Kind::Blank, 1);
    }
    let first = text.chars().next().map_or(0, char::len_utf8);
    match text.as_bytes()[0] {
        b'"' => (quoted(text, b'"').unwrap_or(text.len()), Kind::Blank, 1),
        b'\'' => match character(text) {
            Some(length) => (length, Kind::Blank, 1),
            None => (1, Kind::Code, 0),
        },
        _ => (first, Kind::Code, 0),
    }
}

/// Block comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    let bytes = text.as_bytes();
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" if depth == 1 => return at + 2,
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    text.len()
}

/// `r"…"`, `r#"…"#`, `br"…"`, `cr"…"`.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or(text.strip_prefix("cr")).or(text.strip_prefix('r'))?;
    let body = after.trim_start_matches('#').strip_prefix('"')?;
    let hashes = after.len() - body.len() - 1;
    let close = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len();
    Some(body.find(&close).map_or(text.len(), |end| start + end + close.len()))
}

/// The length of a literal between `quote`s, escapes skipped.
fn quoted(text: &str, quote: u8) -> Option<usize> {
    let mut bytes = text.bytes().enumerate().skip(1);
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            _ if byte == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The length of a character literal; a lifetime is none.
fn character(text: &str) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    let (_, first) = chars.next()?;
    match first {
        '\\' => quoted(text, b'\''),
        _ => chars.next().filter(|&(_, c)| c == '\'').map(|(at, _)| at + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let source = Source::read(text);
        assert_eq!(source.code.len(), text.len(), "{text}");
        source.code
    }

    #[test]
    fn comments_are_blank() {
        assert_eq!(code("a // unsafe\nb"), "a          \nb");
        assert_eq!(code("a /* x /* y */ z\n */ b"), "a               \n    b");
    }

    #[test]
    fn literals_keep_only_their_quotes() {
        assert_eq!(code(r#"f("a\"b", x)"#), r#"f("    ", x)"#);
        assert_eq!(code("r#\"a\"b\"# + c"), "r      # + c");
        assert_eq!(code("'\"' + '\\'' + b"), "' ' + '  ' + b");
        assert_eq!(code("fn f<'a>(x: &'a str) -> char { 'é' }"), "fn f<'a>(x: &'a str) -> char { '  ' }");
    }

    #[test]
    fn a_name_that_ends_in_r_starts_no_raw_string() {
        assert_eq!(code(r#"expr"x""#), r#"expr" ""#);
    }

    #[test]
    fn an_open_end_is_no_panic() {
        for text in ["\"abc", "/* abc", "'", "r#\"abc", "'\\"] {
            code(text);
        }
    }
}
