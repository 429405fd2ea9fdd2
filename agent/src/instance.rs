//! The data of an instance: its record, the spec from its pool, the template it is forked from, its archive.
//!
//! Nothing here acts on the machine. [`Records`](records::Records) alone says which instances exist and which are leased.

pub mod archive;
pub mod record;
pub mod records;
mod session_mark;
mod spec;
pub mod template;
pub mod transfer;

pub use session_mark::SessionMark;
pub use spec::PoolSpec;

/// Where the data disk is mounted in a guest.
pub(crate) const DATA_DISK_PATH: &str = "/data";
