//! Errors as one line of text, and text of others as part of it.

use std::error::Error;

use mvm_proto::text::one_line;

/// The longest that a line about one error gets; a build's last words are half of it.
const MAX_LINE_BYTES: usize = 8 * 1024;

/// An error with its causes: `could not write state: no space left on device`. Names and words of a guest in it are
/// escaped, so that it is safe in a status, an event or a log.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        next = error.source();
        let cause = error.to_string();
        // A transparent wrapper repeats its cause's words.
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    one_line(&text, MAX_LINE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

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
