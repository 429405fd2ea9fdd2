//! Other people's text in our messages: short, on one line, in ASCII.
//!
//! What is not printable ASCII is written as `\u{..}`, so that a message can't move a cursor, forge a log line, or
//! show a Cyrillic letter that looks like a Latin one.

/// The most characters of someone else's text that a message repeats.
pub const MAX_SHOWN: usize = 64;

/// The text between quotes, escaped, and cut after [`MAX_SHOWN`] characters with a note of its length.
#[must_use]
pub fn quote(text: &str) -> String {
    let (shown, whole) = escaped(text, true);
    if whole { format!("\"{shown}\"") } else { format!("\"{shown}...\" ({} bytes)", text.len()) }
}

/// The text without quotes, escaped and cut.
#[must_use]
pub fn shorten(text: &str) -> String {
    let (mut shown, whole) = escaped(text, false);
    if !whole {
        shown.push_str("...");
    }
    shown
}

/// As much of the escaped text as may be shown, and whether that is all of it.
fn escaped(text: &str, in_quotes: bool) -> (String, bool) {
    let mut out = String::new();
    for c in text.chars() {
        let plain = matches!(c, ' '..='~') && !(in_quotes && matches!(c, '"' | '\\'));
        let before = out.len();
        if plain {
            out.push(c);
        } else {
            out.extend(c.escape_default());
        }
        if out.len() > MAX_SHOWN {
            out.truncate(before);
            return (out, false);
        }
    }
    (out, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_would_act_on_a_terminal_is_shown_as_text() {
        assert_eq!(quote("\u{1b}[31mred\u{7}\n\0"), r#""\u{1b}[31mred\u{7}\n\u{0}""#);
        assert_eq!(quote("\u{430}cme\u{202e}"), r#""\u{430}cme\u{202e}""#);
        assert_eq!(quote(r#"a"b\c'd"#), r#""a\"b\\c'd""#);
        assert_eq!(shorten("line 1\nline 2"), r"line 1\nline 2");
    }

    #[test]
    fn ten_megabytes_are_shown_in_one_short_line() {
        let shown = quote(&"x".repeat(10_000_000));
        assert!(shown.len() <= 90 && shown.ends_with("...\" (10000000 bytes)"), "{shown}");
        assert!(shorten(&"\u{1b}".repeat(10_000_000)).len() <= MAX_SHOWN + 3);
    }
}
