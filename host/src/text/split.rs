//! Cuts very long texts before the split pattern sees them, as the checkpoint's own tokenizer does: at a fixed number
//! of characters, and inside at over-long runs of blanks or non-blanks, where the pattern would take quadratic time.

/// Characters of a piece.
const MAX_CHARS: usize = 400_000;
/// Consecutive blanks, or consecutive non-blanks, of a piece.
const MAX_RUN: usize = 25_000;

/// The pieces of `text`, in order; joined they are `text`.
pub(super) fn pieces(text: &str) -> Vec<&str> {
    pieces_of(text, MAX_CHARS, MAX_RUN)
}

fn pieces_of(text: &str, max_chars: usize, max_run: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let (mut start, mut chars, mut run, mut blank) = (0, 0, 0, false);
    for (at, c) in text.char_indices() {
        if chars == max_chars {
            // A new part: its runs are counted afresh.
            pieces.push(&text[start..at]);
            (start, chars, run) = (at, 0, 0);
        }
        run = if chars > 0 && is_blank(c) == blank { run + 1 } else { 1 };
        blank = is_blank(c);
        if run > max_run {
            pieces.push(&text[start..at]);
            (start, run) = (at, 1);
        }
        chars += 1;
    }
    if start < text.len() {
        pieces.push(&text[start..]);
    }
    pieces
}

/// White space as Python counts it, which adds the four separators of ASCII.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::pieces_of;

    #[test]
    fn cuts_fall_where_the_original_puts_them() {
        for (text, chars, run, expected) in [
            ("", 4, 2, vec![]),
            ("abc", 4, 9, vec!["abc"]),
            ("abcdefghij", 4, 9, vec!["abcd", "efgh", "ij"]),
            ("aaaaa", 9, 2, vec!["aa", "aa", "a"]),
            // A run that ends before the limit does not cut, and the count starts again after it.
            ("aa  aa  a", 99, 2, vec!["aa  aa  a"]),
            ("aa   aa", 99, 2, vec!["aa  ", " aa"]),
            ("éé\u{3000}\x1c x", 99, 2, vec!["éé\u{3000}\x1c", " x"]),
            ("aaaa", 3, 2, vec!["aa", "a", "a"]),
        ] {
            assert_eq!(pieces_of(text, chars, run), expected, "{text:?}");
        }
    }
}
