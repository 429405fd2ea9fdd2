//! Why a guest did not do what it was asked.

use super::Failure;
use crate::named::named;

named! {
    /// What a [`Failure`] is about, for programs. A guest of another version may have others, which mean no more than
    /// that it refused.
    pub enum FailureCode {
        NotFound = "not_found",
        Exists = "exists",
        Denied = "denied",
        Invalid = "invalid",
        /// Not an answer for good: the same request may be sent again.
        Busy = "busy",
        TimedOut = "timed_out",
        /// The guest speaks an older version of the protocol.
        Unsupported = "unsupported",
        Io = "io",
    }
}

impl Failure {
    #[must_use]
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self { code: code.as_str().to_owned(), message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_those_that_guests_of_older_images_send() {
        let codes = ["not_found", "exists", "denied", "invalid", "busy", "timed_out", "unsupported", "io"];
        assert_eq!(FailureCode::ALL.map(FailureCode::as_str), codes);
        assert_eq!(codes.map(str::parse), FailureCode::ALL.map(Ok));
    }
}
