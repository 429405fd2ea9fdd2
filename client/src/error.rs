//! What a call can come to instead of an answer.

use mvm_proto::Problem;
use mvm_proto::problem::PROBLEM_METADATA;

/// The code of the problem that a watch gets which asks for changes that the server no longer has.
pub const GONE: &str = "gone";

/// Why a call to `Objects` has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The server refused, or was not reached; see [`problem_of`].
    #[error("{}", told(.0))]
    Refused(#[source] Box<tonic::Status>),
    /// What the server said is not what it should be.
    #[error("could not read {what} in the server's answer")]
    Answer {
        what: &'static str,
        #[source]
        cause: serde_json::Error,
    },
    /// The server's answer has a hole.
    #[error("the server's answer lacks {0}")]
    Lacks(&'static str),
    /// What was to be sent is no JSON.
    #[error("could not write the object as JSON")]
    Request(#[source] serde_json::Error),
}

impl CallError {
    /// The server's status, where it is one.
    #[must_use]
    pub fn status(&self) -> Option<&tonic::Status> {
        match self {
            Self::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// What the server says against the call.
    #[must_use]
    pub fn problem(&self) -> Option<Problem> {
        self.status().and_then(problem_of)
    }

    /// Whether there is no such object.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status().is_some_and(|status| status.code() == tonic::Code::NotFound)
    }

    /// Whether the changes that were asked for are no longer kept.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.problem().is_some_and(|problem| problem.code == GONE)
    }

    /// Whether the connection was lost, so that the same call may succeed later.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        use tonic::Code::{Cancelled, Unavailable, Unknown};
        self.status().is_some_and(|status| match status.code() {
            // A server that stops says so with a problem.
            Unavailable => true,
            // tonic tells a connection that broke inside an answer so, with what broke it as the source.
            Cancelled | Unknown => problem_of(status).is_none(),
            _ => false,
        })
    }
}

impl From<tonic::Status> for CallError {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

fn told(status: &tonic::Status) -> String {
    problem_of(status).map_or_else(|| status.message().to_owned(), |problem| problem.to_string())
}

/// The problem that a coordinator attached to an error answer.
#[must_use]
pub fn problem_of(status: &tonic::Status) -> Option<Problem> {
    let bytes = status.metadata().get_bin(PROBLEM_METADATA)?.to_bytes().ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;
    use tonic::{Code, Status};

    use super::*;

    fn with_problem(code: Code, status: u16, name: &str) -> CallError {
        let mut answer = Status::new(code, "told");
        let problem = serde_json::to_vec(&Problem::new(status, name, "told", "do this")).unwrap();
        answer.metadata_mut().insert_bin(PROBLEM_METADATA, MetadataValue::from_bytes(&problem));
        answer.into()
    }

    #[test]
    fn a_server_that_stops_is_a_lost_connection_and_a_refusal_is_none() {
        assert!(CallError::from(Status::unavailable("connection refused")).is_lost());
        assert!(CallError::from(Status::unknown("h2 protocol error")).is_lost());
        assert!(with_problem(Code::Unavailable, 503, "stopping").is_lost());
        for refusal in [
            with_problem(Code::NotFound, 404, "not_found"),
            with_problem(Code::PermissionDenied, 403, "forbidden"),
            with_problem(Code::Unknown, 500, "internal"),
            CallError::Lacks("the object"),
        ] {
            assert!(!refusal.is_lost(), "{refusal}");
        }
        let gone = with_problem(Code::FailedPrecondition, 410, GONE);
        assert!(gone.is_gone() && !gone.is_lost() && gone.to_string().contains("do this"));
    }
}
