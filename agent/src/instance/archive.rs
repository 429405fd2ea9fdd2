//! A sleeping instance as one file, on its way from one node to another.
//!
//! ```text
//! "mvmsleep"  version: u32  length of the header: u32  header: JSON
//! each member, in the header's order:
//!     offset: u64  length: u32  bytes      as often as there is something but a hole
//!     u64::MAX     0                       its end
//!     SHA-256 of all that, from its first offset to its end
//! SHA-256 of everything up to the header's end, then of each member's digest
//! ```
//!
//! Numbers have their highest byte first. [`write()`] reads each file once and from its beginning, so the digests come
//! behind what they are of; [`Reader`] believes nothing before it has seen them. Neither keeps more than a piece of a
//! file in memory. Nothing here is encrypted: what is encrypted on disk stays so, and what is not is not.

mod read;
mod write;

use mvm_proto::{NodeId, Timestamp};
use mvm_vmm::DriverKind;
use serde::{Deserialize, Serialize};

use crate::instance::record::Record;

pub use read::{ArchiveError, Reader};
pub use write::{Source, stored_bytes, write};

const MAGIC: &[u8; 8] = b"mvmsleep";

/// Of all that is written in this file.
pub const VERSION: u32 = 1;

/// A record and some names are a few KiB.
const MAX_HEADER_BYTES: u32 = 1024 * 1024;

/// What is read, hashed and sent at once.
const PIECE_BYTES: usize = 1024 * 1024;

/// What is left out where it is nothing but zeros.
const HOLE_BYTES: usize = 64 * 1024;

/// Instead of an offset: the member ends here.
const END: u64 = u64::MAX;

const DIGEST_BYTES: usize = 32;

/// A snapshot is a handful of files.
const MAX_MEMBERS: usize = 64;

/// Who sleeps in it, and in which files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version of the agent that wrote it: for people.
    pub made_by: String,
    pub node: NodeId,
    pub at: Timestamp,
    pub driver: DriverKind,
    pub record: Record,
    pub members: Vec<Member>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub name: String,
    /// How long it is, holes included.
    pub bytes: u64,
    /// The most of it that is no hole.
    pub stored_bytes: u64,
}

impl Header {
    /// The most that all of it takes on a disk.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.members.iter().fold(0, |sum, member| sum.saturating_add(member.stored_bytes))
    }
}
