//! What is known of an instance: its record, what its pool makes it of, the template it is forked from, its archive.
//!
//! Nothing here acts on a machine. [`Records`](records::Records) is the one place that says which instances there are
//! and who acts on each.

pub mod archive;
pub mod record;
pub mod records;
mod session_mark;
mod spec;
pub mod template;

pub use session_mark::SessionMark;
pub use spec::PoolSpec;

/// Where the data disk is mounted in a guest.
pub(crate) const DATA_DISK_PATH: &str = "/data";
