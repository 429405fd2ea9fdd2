//! Everything that lies below the data directory: made, opened, written, renamed and removed by descriptors of
//! directories, never by path.
//!
//! What a VMM or its guest may write to is not to be trusted from one instant to the next, so [`Dir`] is the only way
//! in: it looks names up below an open directory, follows no link, opens nothing but regular files and sockets, and
//! changes only what has no name elsewhere. [`run`] has the operations on run directories, in terms of it; [`space`]
//! and [`clone`] what disks cost.
//!
//! That a file has no name elsewhere is sure on kernels whose inode times tell any two changes apart (6.13 and later);
//! before that, `fs.protected_hardlinks` (on everywhere by default) keeps a tenant from making such names at all.

mod change;
mod clone;
mod dir;
mod disk;
mod holes;
mod list;
mod log_marks;
mod name;
pub(super) mod run;
mod space;

use std::io;
use std::path::Path;

use rustix::io::Errno;

pub(super) use clone::copy;
pub use dir::{Dir, OpenHow, Owner};
pub(super) use dir::{give, reopen};
pub use log_marks::{LogMarks, MARKS_SUFFIX};
pub(super) use name::temporary;
pub use space::{QuotaExceeded, fits, free_space};

use super::HostError;

/// Private to the agent's user: it holds guest memory.
pub(super) const RUN_DIR_MODE: u32 = 0o700;
pub(super) const FILE_MODE: u32 = 0o600;

/// Says what was attempted on what.
pub(super) fn failed(attempt: &str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let attempt = format!("{attempt} {}", path.display());
    move |cause| HostError::Io { attempt, cause }
}

/// Says what is refused and why.
pub(super) fn refused(path: &Path, why: &str) -> HostError {
    HostError::Refused(format!("{} {why}", path.display()))
}

impl HostError {
    /// Whether there is nothing under the name that was asked for.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }

    fn is_one_of(&self, errnos: &[Errno]) -> bool {
        let Self::Io { cause, .. } = self else { return false };
        Errno::from_io_error(cause).is_some_and(|errno| errnos.contains(&errno))
    }
}

/// For callers whose errors have a cause of the operating system: its kind is kept, so that they can tell what is
/// missing from what is broken.
impl From<HostError> for io::Error {
    fn from(error: HostError) -> Self {
        let kind = match &error {
            HostError::Io { cause, .. } => cause.kind(),
            HostError::ProgramMissing { .. } => io::ErrorKind::NotFound,
            HostError::Refused(_) => io::ErrorKind::PermissionDenied,
            HostError::Network { .. } | HostError::Groups { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
