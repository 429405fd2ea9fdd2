//! What can go wrong with control groups, and what to do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error(
        "control groups v2 are not mounted; boot with systemd.unified_cgroup_hierarchy=1 or mount cgroup2 on \
         /sys/fs/cgroup, or run with best-effort control groups"
    )]
    NotMounted,
    #[error(
        "the control group controllers {} are not available at {}; boot with systemd.unified_cgroup_hierarchy=1 (or \
         cgroup_no_v1=all) so that none is bound to v1, and with a kernel that has them, or run with best-effort \
         control groups",
        controllers.join(", "),
        group.display()
    )]
    Unavailable { controllers: Vec<String>, group: PathBuf },
    #[error(
        "could not hand the controllers {} down from {}; a group that holds processes can't: move them into a group \
         below it, or name a parent that holds none",
        controllers.join(", "),
        group.display()
    )]
    NotDelegated {
        controllers: Vec<String>,
        group: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "the group {} lies inside {}, which ends with the agent, and its microVMs with it; name a parent outside the \
         agent's own unit",
        wanted.display(),
        own.display()
    )]
    InsideOwnUnit { wanted: PathBuf, own: PathBuf },
    #[error("the parent group must be a path of plain names below the mount, found {}", .0.display())]
    BadParent(PathBuf),
    #[error("tenant {0} has no cgroup yet; create it before its instances' cgroups")]
    TenantMissing(String),
    #[error("wrote {wanted:?} to {file} of {group} and read {found:?} back")]
    NotTaken { group: String, file: String, wanted: String, found: String },
    #[error(
        "what is done to the disk of {} can't be limited: {reason}; keep the data directory on one disk with ext4, xfs, \
         f2fs or btrfs, take io_limits out of the document, or run with best-effort control groups",
        directory.display()
    )]
    NoDisk { directory: PathBuf, reason: String },
    #[error(
        "the VMM of {instance}, process {pid}, is in the control group {} and not in {}: no limit holds for it there",
        if found.as_os_str().is_empty() { "of no v2 hierarchy".into() } else { found.display().to_string() },
        wanted.display()
    )]
    Elsewhere { instance: String, pid: u32, wanted: PathBuf, found: PathBuf },
    #[error("{0} still holds groups or processes")]
    InUse(String),
    #[error("{group} was not {what} within {waited:?}")]
    TooLong { group: String, what: &'static str, waited: Duration },
    #[error("could not {attempt}")]
    Io {
        attempt: String,
        #[source]
        cause: io::Error,
    },
}

/// For `map_err`: names what was attempted.
pub(super) fn failed(attempt: impl Into<String>) -> impl FnOnce(io::Error) -> CgroupError {
    let attempt = attempt.into();
    move |cause| CgroupError::Io { attempt, cause }
}
