//! What not every driver can do, each as a trait that [`Driver`](crate::Driver) gives access to.
//!
//! A driver that lacks one answers with [`Lacking`] in its place and implements nothing for it; `mvm node get` shows that
//! answer.

use std::fs::File;
use std::time::Duration;

use futures::future::BoxFuture;
use mvm_proto::InstanceId;

use crate::{DriverError, DriverKind, Part, SnapshotOptions, SnapshotRef, VmSpec};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// [`Forks`].
    Forks,
    /// [`Balloon`].
    Balloon,
    /// [`Compression`].
    Compression,
    /// Snapshots are encrypted where a document asks for it.
    Encryption,
    /// [`Migration`].
    Migration,
}

impl Capability {
    pub const ALL: [Self; 5] =
        [Self::Forks, Self::Balloon, Self::Compression, Self::Encryption, Self::Migration];

    /// As `mvm node get` has it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forks => "forks",
            Self::Balloon => "balloon",
            Self::Compression => "compression",
            Self::Encryption => "encryption",
            Self::Migration => "moves",
        }
    }
}

/// A capability that a driver does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {driver} driver lacks {}: {reason}", capability.as_str())]
pub struct Lacking {
    pub driver: DriverKind,
    pub capability: Capability,
    /// For people.
    pub reason: &'static str,
}

/// Instances share the memory of a template until they write to it.
pub trait Forks: Send + Sync {
    /// A paused VM of `spec` made from another's snapshot, the template's. The template's snapshot stays; once this is
    /// there it may go.
    fn fork<'a>(
        &'a self,
        spec: &'a VmSpec,
        template: &'a SnapshotRef,
    ) -> BoxFuture<'a, Result<(), DriverError>>;
}

/// A guest that is about to be paused gives back the memory that it does not use.
pub trait Balloon: Send + Sync {
    /// Asks a running guest to give back memory until it has `keep_mib` left, and waits for as long as it goes on doing so, at
    /// most `within`. Says what it has left then; absent: this guest can't give any back.
    fn reclaim<'a>(
        &'a self,
        instance: &'a InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> BoxFuture<'a, Result<Option<u64>, DriverError>>;
}

/// Snapshots are compressed where a document asks for it.
pub trait Compression: Send + Sync {
    /// Compresses an instance's snapshot if that is asked for, else records its checksums, unless it was done before.
    /// Ends early, and does no harm, when the snapshot is used or discarded meanwhile.
    fn compress_snapshot<'a>(
        &'a self,
        instance: &'a InstanceId,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<(), DriverError>>;
}

/// An instance that sleeps can be migrated to another node.
pub trait Migration: Send + Sync {
    /// All files that a sleeping instance is made of, its data disk included: what another node needs to restore it.
    /// A snapshot that could not be restored here is not handed out.
    fn export<'a>(&'a self, snapshot: &'a SnapshotRef) -> BoxFuture<'a, Result<Vec<Part>, DriverError>>;

    /// Makes a directory for an instance that comes from another node, and removes what is left of one of its name.
    fn begin_import<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<(), DriverError>>;

    /// A new file for a part of it, to be written. A name that no part can have is refused.
    fn import_part<'a>(
        &'a self,
        instance: &'a InstanceId,
        name: &'a str,
    ) -> BoxFuture<'a, Result<File, DriverError>>;

    /// Makes the parts, written whole, the snapshot of an instance that sleeps here, if it fits what is here. `exported`
    /// names the snapshot where it was made; the answer names it here. Until then nothing of it can be restored, and
    /// [`Driver::remove`](crate::Driver::remove) removes all of it. Without its key it fails with [`DriverError::Key`], and
    /// in clear it is refused where `options` ask for encryption.
    fn import<'a>(
        &'a self,
        spec: &'a VmSpec,
        exported: &'a SnapshotRef,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<SnapshotRef, DriverError>>;
}
