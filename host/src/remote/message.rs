//! What agent and helper say to each other. The set is closed: what is not listed here can't be asked for.

use std::io;
use std::path::PathBuf;

use mvm_proto::InstanceId;
use serde::{Deserialize, Serialize};

use crate::{Access, HostError, Operation, Outcome, ProcessEnd, VmmProcess};

/// A request whose call is not looked at yet, so that one that is not understood can be answered by its number.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request<C> {
    pub(super) number: u64,
    pub(super) call: C,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Call {
    Perform(Box<Operation>),
    Vmms,
    RunDirs,
    WaitEnd(VmmProcess),
    Open {
        instance: InstanceId,
        name: String,
        access: Access,
    },
    Connect {
        instance: InstanceId,
        name: String,
    },
    Names {
        instance: InstanceId,
    },
    JailRoot {
        instance: InstanceId,
    },
    /// The caller does not wait any more. It has no answer.
    Forget {
        number: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Response {
    pub(super) number: u64,
    pub(super) answer: Answer,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Outcome(Outcome),
    Vmms(Vec<VmmProcess>),
    RunDirs(Vec<InstanceId>),
    End(ProcessEnd),
    /// A descriptor comes with it.
    Opened,
    NotThere,
    Names(Vec<String>),
    JailRoot(Option<PathBuf>),
    Failed(Failure),
}

/// A [`HostError`], whole.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Failure {
    /// The system's own number says kind and text.
    Os {
        attempt: String,
        number: i32,
    },
    Io {
        attempt: String,
        kind: String,
        text: String,
    },
    ProgramMissing {
        program: PathBuf,
    },
    Refused(String),
    Network {
        reason: String,
    },
    Groups {
        reason: String,
    },
}

/// Kinds of the protocol that have no error number of the system.
const KINDS: [io::ErrorKind; 9] = [
    io::ErrorKind::NotFound,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::AlreadyExists,
    io::ErrorKind::InvalidInput,
    io::ErrorKind::InvalidData,
    io::ErrorKind::TimedOut,
    io::ErrorKind::WouldBlock,
    io::ErrorKind::UnexpectedEof,
    io::ErrorKind::Unsupported,
];

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Io { attempt, cause } => match cause.raw_os_error() {
                Some(number) => Self::Os { attempt, number },
                None => Self::Io { attempt, kind: cause.kind().to_string(), text: cause.to_string() },
            },
            HostError::ProgramMissing { program } => Self::ProgramMissing { program },
            HostError::Refused(reason) => Self::Refused(reason),
            HostError::Network { reason } => Self::Network { reason },
            HostError::Groups { reason } => Self::Groups { reason },
        }
    }
}

impl From<Failure> for HostError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Os { attempt, number } => {
                Self::Io { attempt, cause: io::Error::from_raw_os_error(number) }
            }
            Failure::Io { attempt, kind, text } => {
                let known = KINDS.into_iter().find(|known| known.to_string() == kind);
                Self::Io { attempt, cause: io::Error::new(known.unwrap_or(io::ErrorKind::Other), text) }
            }
            Failure::ProgramMissing { program } => Self::ProgramMissing { program },
            Failure::Refused(reason) => Self::Refused(reason),
            Failure::Network { reason } => Self::Network { reason },
            Failure::Groups { reason } => Self::Groups { reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_the_same_on_both_sides() {
        let io = |cause| HostError::Io { attempt: "open it".to_owned(), cause };
        let mut errors = vec![
            io(io::Error::from_raw_os_error(28)),
            io(io::Error::other("mkfs said no")),
            HostError::ProgramMissing { program: "qemu".into() },
            HostError::Refused("no".to_owned()),
            HostError::Network { reason: "down".to_owned() },
            HostError::Groups { reason: "none".to_owned() },
        ];
        errors.extend(KINDS.map(|kind| io(io::Error::new(kind, "because"))));
        for error in errors {
            let before = format!("{error} {error:?}");
            let kind = |error: &HostError| match error {
                HostError::Io { cause, .. } => Some((cause.kind(), cause.raw_os_error(), cause.to_string())),
                _ => None,
            };
            let parts = kind(&error);
            let text = serde_json::to_string(&Failure::from(error)).unwrap();
            let back = HostError::from(serde_json::from_str::<Failure>(&text).unwrap());
            assert_eq!(kind(&back), parts, "{text}");
            assert_eq!(format!("{back} {back:?}"), before);
        }
    }
}
