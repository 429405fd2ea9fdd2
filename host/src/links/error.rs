//! What can go wrong with a link, and what to do about it.

use std::io;

use super::Repair;

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("could not {attempt}")]
    Io {
        attempt: String,
        #[source]
        cause: io::Error,
    },
    #[error(
        "{name} is not ours ({why}), so it was left as it is; rename or remove it, or give the tenant another network"
    )]
    Foreign { name: String, why: String },
    #[error("{name} belongs to {owner}; remove it before {wanted} can use the name")]
    Taken { name: String, owner: String, wanted: String },
    #[error("{name} does not exist; create it first")]
    Missing { name: String },
    #[error("another program on this host keeps changing {name} ({})", list(.left))]
    Unsettled { name: String, left: Vec<Repair> },
    #[error("refused: {0}")]
    Refused(String),
}

impl LinkError {
    /// Whether this is what two writers of the same link do to each other, so that looking again helps.
    pub(super) fn is_contention(&self) -> bool {
        use rustix::io::Errno;
        let Self::Io { cause, .. } = self else { return false };
        let passing = [
            Errno::EXIST,
            Errno::NODEV,
            Errno::BUSY,
            Errno::NOENT,
            Errno::NXIO,
            Errno::ADDRNOTAVAIL,
            Errno::AGAIN,
        ];
        cause.raw_os_error().is_some_and(|code| passing.iter().any(|errno| errno.raw_os_error() == code))
    }

    pub(super) fn has_errno(&self, errno: rustix::io::Errno) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.raw_os_error() == Some(errno.raw_os_error()))
    }
}

fn list(repairs: &[Repair]) -> String {
    repairs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
