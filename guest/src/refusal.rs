//! Why a request was not carried out, as it is reported to the agent.

use std::io;

use crate::protocol::guest_frame::Body;
use crate::protocol::{Failure, FailureCode};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub(crate) struct Refusal {
    code: FailureCode,
    message: String,
}

impl Refusal {
    pub(crate) fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// For people, who need no code.
    pub(crate) fn into_message(self) -> String {
        self.message
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(FailureCode::Invalid, message)
    }

    /// Too much is under way. Not an answer for good: the same request may be sent again.
    pub(crate) fn busy(what: &str) -> Self {
        Self::new(FailureCode::Busy, format!("too many {what} at once"))
    }

    pub(crate) fn io(what: &str, error: &io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => FailureCode::NotFound,
            io::ErrorKind::AlreadyExists => FailureCode::Exists,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => FailureCode::Denied,
            io::ErrorKind::InvalidInput | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                FailureCode::Invalid
            }
            io::ErrorKind::TimedOut => FailureCode::TimedOut,
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => FailureCode::Busy,
            _ => FailureCode::Io,
        };
        Self::new(code, format!("{what}: {error}"))
    }

    pub(crate) fn into_body(self) -> Body {
        Body::Failure(Failure::new(self.code, self.message))
    }
}
