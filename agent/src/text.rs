//! Errors as one line of text.

use std::error::Error;

/// An error with its causes: `could not write state: no space left on device`.
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
    text
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
}
