//! Why a request was not carried out, as it is reported to the agent.

use std::io;

use crate::protocol::Failure;
use crate::protocol::guest_frame::Body;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub(crate) struct Refusal {
    code: &'static str,
    message: String,
}

impl Refusal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid", message)
    }

    /// Too much is under way. Not an answer for good: the same request may be sent again.
    pub(crate) fn busy(what: &str) -> Self {
        Self::new("busy", format!("too many {what} at once"))
    }

    pub(crate) fn io(what: &str, error: &io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => "not_found",
            io::ErrorKind::AlreadyExists => "exists",
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "denied",
            io::ErrorKind::InvalidInput | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                "invalid"
            }
            io::ErrorKind::TimedOut => "timed_out",
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => "busy",
            _ => "io",
        };
        Self::new(code, format!("{what}: {error}"))
    }

    pub(crate) fn into_body(self) -> Body {
        Body::Failure(Failure { code: self.code.to_owned(), message: self.message })
    }
}
