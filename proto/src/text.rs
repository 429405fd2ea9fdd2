//! Text from a guest, a node or any other peer, made safe to print: it moves no cursor and starts no line.
//!
//! Control characters (C0, C1), bidi and zero-width characters, separators, combining and unassigned characters become
//! visible escapes such as `\x1b` and `\u{202e}`. All else stays as it is, letters of any script included. The agent
//! calls [`one_line`] where it takes text from a guest, the command line wherever it prints anything.

use std::error::Error;

/// Ends a text that was cut.
const CUT: &str = "...";

/// The longest that a line about one error gets; a build's last words are half of it.
const MAX_ERROR_BYTES: usize = 8 * 1024;

/// Whether a terminal shows this character and does nothing else.
#[must_use]
pub fn is_printable(c: char) -> bool {
    // The standard library knows which characters of Unicode are shown; it escapes quotes for its own reasons.
    matches!(c, ' '..='~') || (!c.is_ascii() && c.escape_debug().len() == 1)
}

/// The text on one line, cut before it is longer than `max_bytes`.
#[must_use]
pub fn one_line(text: &str, max_bytes: usize) -> String {
    escaped(text, max_bytes, |_| false)
}

/// The same for text of several lines: line ends and tabs stay, `\r\n` is a line end.
#[must_use]
pub fn lines(text: &str, max_bytes: usize) -> String {
    escaped(&text.replace("\r\n", "\n"), max_bytes, |c| matches!(c, '\n' | '\t'))
}

/// An error with its causes: `could not write state: no space left on device`. Names and words of a guest in it are
/// escaped, so that it is safe in a status, an event or a log.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    for error in std::iter::successors(error.source(), |&error| error.source()) {
        let cause = error.to_string();
        // A transparent wrapper repeats its cause's words.
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    one_line(&text, MAX_ERROR_BYTES)
}

/// Whether the error, or a cause of it, is a `T` of which `is_it` holds.
pub fn is_caused_by<T: Error + 'static>(error: &(dyn Error + 'static), is_it: impl Fn(&T) -> bool) -> bool {
    std::iter::successors(Some(error), |&error| error.source())
        .any(|error| error.downcast_ref::<T>().is_some_and(&is_it))
}

fn escaped(text: &str, max_bytes: usize, stays: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len().min(max_bytes));
    for c in text.chars() {
        let before = out.len();
        match c {
            c if is_printable(c) || stays(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if u32::from(c) < 0x100 => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.extend(c.escape_unicode()),
        }
        if out.len() > max_bytes {
            let mut end = before.min(max_bytes.saturating_sub(CUT.len()));
            while !out.is_char_boundary(end) {
                end -= 1;
            }
            out.truncate(end);
            out.push_str(CUT);
            break;
        }
    }
    out
}

/// JSON that means the same and that a terminal only shows. JSON has such characters in strings alone, and its writers
/// leave all above ASCII as it is.
#[must_use]
pub fn json(text: &str) -> String {
    let pairs = |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect();
    in_strings(text, pairs)
}

/// The same for JSON that is read as YAML, which has no pairs of escapes for characters beyond the first 65,536.
#[must_use]
pub fn json_as_yaml(text: &str) -> String {
    in_strings(text, |c| format!("\\U{:08x}", u32::from(c)))
}

fn in_strings(text: &str, escape: impl Fn(char) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_printable(c) || c == '\n' {
            out.push(c);
        } else {
            out.push_str(&escape(c));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: usize = 1024;

    #[test]
    fn what_acts_on_a_terminal_is_shown_and_does_nothing() {
        for (raw, shown) in [
            ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
            ("\u{9b}31m\u{9d}0;x\u{9c}\u{85}", r"\x9b31m\x9d0;x\x9c\x85"),
            ("ok\r\nnode-b  yes", r"ok\r\nnode-b  yes"),
            ("\0\x08\x7f\t\x0b\x0c", r"\x00\x08\x7f\t\x0b\x0c"),
            ("\u{202e}gnp.exe\u{2066}\u{2069}\u{61c}", r"\u{202e}gnp.exe\u{2066}\u{2069}\u{61c}"),
            ("a\u{200b}\u{200d}\u{2060}\u{feff}\u{ad}b", r"a\u{200b}\u{200d}\u{2060}\u{feff}\xadb"),
            ("\u{2028}\u{2029}\u{e0041}\u{fe0f}\u{301}", r"\u{2028}\u{2029}\u{e0041}\u{fe0f}\u{301}"),
        ] {
            assert_eq!(one_line(raw, LONG), shown);
        }
    }

    #[test]
    fn letters_of_any_script_quotes_and_backslashes_stay() {
        for text in ["it's \"C:\\x\"", "zażółć", "東京", "Москва", "→ é ✓ \u{fffd}"] {
            assert_eq!(one_line(text, LONG), text);
        }
    }

    #[test]
    fn text_is_cut_at_whole_characters_and_says_so() {
        assert_eq!(one_line("abcdef", 6), "abcdef");
        assert_eq!(one_line("abcdefg", 6), "abc...");
        assert_eq!(one_line("éééé", 6), "é...");
        for length in 0..40 {
            let cut = one_line(&"é\x1b\u{202e}".repeat(1000), length);
            assert!(cut.len() <= length.max(CUT.len()), "{length}: {cut}");
        }
    }

    #[test]
    fn lines_keep_their_ends_and_nothing_else() {
        assert_eq!(lines("a\r\nb\tc\n\rd\x1b[1A", LONG), "a\nb\tc\n\\rd\\x1b[1A");
    }

    #[test]
    fn json_means_the_same_and_only_shows() {
        let hostile = "\u{9b}1m\u{202e}\u{e0041}\x7f\x1b\n";
        let written = serde_json::to_string_pretty(&[hostile]).unwrap();
        let safe = json(&written);
        assert!(safe.chars().all(|c| is_printable(c) || c == '\n'), "{safe}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&safe).unwrap(), [hostile]);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("could not write state")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_their_effects() {
        let error = Outer(std::io::Error::other("disk gone"));
        assert_eq!(chain(&error), "could not write state: disk gone");
    }

    #[test]
    fn a_name_that_a_guest_chose_stays_in_the_line_of_its_error() {
        let error = Outer(std::io::Error::other("no file\x1b[2J\n\u{202e}"));
        assert_eq!(chain(&error), r"could not write state: no file\x1b[2J\n\u{202e}");
    }
}
