//! Export and import of instances: writes an archive, reads one, and removes an instance after its export. By hand, or as
//! the streams of a move ([`transfer`](super::transfer)) that show its ticket.
//!
//! An export holds the instance's lease until the last byte was read, so that the archive is one consistent state. An import
//! holds the lease of an instance that has no record yet. See [`crate::instance::archive`] for the format.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_planner::{Observation, check_arrival};
use mvm_proto::text::chain;
use mvm_proto::{Digest, Phase};
use mvm_vmm::{AnyDriver, Driver, Lacking, Part, SnapshotRef};
use tokio::io::AsyncRead;
use tokio::sync::mpsc;

use crate::instance::PoolSpec;
use crate::instance::archive::{self, ArchiveError, Header, Member, Reader, Source, stored_bytes};
use crate::instance::record::Record;
use crate::instance::records::Lease;
use crate::instance::transfer::Transfer;
use crate::node::actor::{Actor, Place};
use crate::node::error::{ActionError, MoveError};
use crate::node::handle::NodeHandle;
use crate::node::transfer::Expected;

/// Pieces that wait for a reader.
const PIECES_KEPT: usize = 4;

/// A reader that takes nothing for this long has gone away, and others want the instance.
const READER_PATIENCE: Duration = Duration::from_secs(60);

/// Which instance, and who asks.
#[derive(Debug, Clone)]
pub struct Asked {
    pub place: Place,
    pub by: String,
    /// Of a move that the coordinator ordered; absent: by hand.
    pub transfer: Option<Transfer>,
}

/// An archive as it is written. One that ends without an error is whole.
pub type Outgoing = mpsc::Receiver<io::Result<Bytes>>;

/// An archive as it comes.
pub type Incoming = Box<dyn AsyncRead + Send + Unpin>;

/// How an import is to be done.
#[derive(Debug, Clone)]
pub struct Import {
    pub by: String,
    /// How long reconcile keeps its hands off the instance.
    pub override_for: Duration,
    /// What a move brings; absent: by hand, whatever is in the archive.
    pub expected: Option<Expected>,
}

impl Actor {
    fn driver(&self) -> &AnyDriver {
        &self.executor.driver
    }

    /// The lease of an instance that sleeps with a snapshot and `fits`, and its record.
    pub(super) async fn sleeper(
        &self,
        asked: &Asked,
        fits: fn(&Record) -> bool,
    ) -> Result<(Lease, Record), MoveError> {
        let id = &asked.place.instance;
        if let Err(Lacking { reason, .. }) = self.driver().migration() {
            return Err(MoveError::Immovable { instance: id.clone(), reason });
        }
        self.find(&asked.place)?;
        let lease = self.lease(id, Phase::Sleeping).await?;
        let record = self.find(&asked.place)?;
        match (&asked.transfer, &record.transfer) {
            (None, Some(transfer)) => {
                return Err(ActionError::Moving { instance: id.clone(), transfer: transfer.clone() }.into());
            }
            (Some(asked), found) if found.as_deref() != Some(asked) => {
                return Err(MoveError::NotMoving(id.clone()));
            }
            _ => {}
        }
        if record.is_asleep() && fits(&record) {
            Ok((lease, record))
        } else {
            Err(MoveError::NotSleeping(id.clone(), record.phase))
        }
    }

    async fn write_archive(&self, asked: Asked) -> Result<Outgoing, MoveError> {
        let (lease, record) = self.sleeper(&asked, |record| record.intent.is_none()).await?;
        let executor = &self.executor;
        let instance = || record.id.clone();
        let begun = async {
            let parts = executor.outgoing(&record).await;
            let parts = parts.map_err(|cause| MoveError::Step { instance: instance(), cause })?;
            let header = self.header(&record, parts).await;
            header.map_err(|cause| MoveError::Unread { instance: instance(), cause })
        };
        let (header, sources) = match begun.await {
            Ok(begun) => begun,
            Err(error) => {
                executor.audit_move(&record, &asked.by, "export", Some(chain(&error)));
                executor.compress_later(&record);
                return Err(error);
            }
        };
        let (pieces, archive) = mpsc::channel(PIECES_KEPT);
        let (executor, runtime) = (Arc::clone(executor), tokio::runtime::Handle::current());
        tokio::task::spawn_blocking(move || {
            let put = |piece: Vec<u8>| {
                let send = pieces.send(Ok(piece.into()));
                match runtime.block_on(async { tokio::time::timeout(READER_PATIENCE, send).await }) {
                    Ok(Ok(())) => Ok(()),
                    _ => {
                        Err(io::Error::new(io::ErrorKind::BrokenPipe, "the reader of the archive went away"))
                    }
                }
            };
            // What moves is marked already.
            let last = || match asked.transfer {
                Some(_) => Ok(()),
                None => runtime.block_on(executor.mark_exported(&lease, &asked.by)).map_err(io::Error::other),
            };
            let written = archive::write(&header, &sources, put, last);
            let outcome = written.as_ref().err().map(|error| chain(error));
            executor.audit_move(&header.record, &asked.by, "export", outcome);
            drop(lease);
            // The export stopped what is done to a snapshot in the background.
            runtime.block_on(async { executor.compress_later(&header.record) });
            if let Err(error) = written {
                tracing::warn!(id = %header.record.id, %error, "could not finish an archive");
                // The reader must not take the part for the whole archive.
                let _ = pieces.try_send(Err(error));
            }
        });
        Ok(archive)
    }

    async fn header(&self, record: &Record, parts: Vec<Part>) -> io::Result<(Header, Vec<Source>)> {
        let measured = tokio::task::spawn_blocking(move || {
            let measure = |part: Part| {
                let (bytes, stored_bytes) = (part.file.metadata()?.len(), stored_bytes(&part.file)?);
                Ok((Member { name: part.name, bytes, stored_bytes }, Source { file: part.file, bytes }))
            };
            parts.into_iter().map(measure).collect::<io::Result<Vec<_>>>()
        });
        let (members, sources) = measured.await.map_err(io::Error::other)??.into_iter().unzip();
        let header = Header {
            made_by: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.node_id.clone(),
            at: self.executor.clock.now(),
            driver: self.driver().kind(),
            record: record.clone(),
            members,
        };
        Ok((header, sources))
    }

    /// Runs on when the caller goes away: then the archive breaks off, and what came of it is cleared away.
    async fn import(&self, import: Import, archive: Incoming) -> Result<Record, MoveError> {
        let this = self.clone();
        tokio::spawn(async move { this.read_archive(&import, archive).await }).await?
    }

    async fn read_archive(&self, import: &Import, archive: Incoming) -> Result<Record, MoveError> {
        let (header, reader) = Reader::open(archive).await?;
        let executor = &self.executor;
        let result = async {
            let (mut arriving, spec) = self.welcome(&header)?;
            if let Some(expected) = &import.expected {
                expected.check(&header)?;
                arriving.transfer = Some(Box::new(expected.transfer.clone()));
            }
            let lease = self.records().admit(arriving).map_err(MoveError::Taken)?;
            let result = async {
                self.check_arrival(&lease)?;
                let reason = format!("imported from {}, asked by {}", header.node, import.by);
                let taken_in =
                    executor.take_in(&lease, &header, reader, &spec, import.override_for, &reason).await;
                taken_in.map_err(|cause| MoveError::Step { instance: lease.id().clone(), cause })
            };
            let result = result.await;
            match &result {
                Ok(record) => {
                    executor.measure(&record.id).await;
                    executor.compress_later(record);
                }
                Err(_) => executor.turn_away(&lease).await,
            }
            result
        };
        let result = result.await;
        let failure = result.as_ref().err().map(|error| chain(error));
        executor.audit_move(&header.record, &import.by, "import", failure);
        result
    }

    /// The instance as it would be here, if the document, the network and the images have a place for it.
    fn welcome(&self, header: &Header) -> Result<(Record, PoolSpec), MoveError> {
        let record = &header.record;
        let instance = record.id.clone();
        if let Err(Lacking { reason, .. }) = self.driver().migration() {
            return Err(MoveError::Immovable { instance, reason });
        }
        let (theirs, ours) = (header.driver, self.driver().kind());
        if theirs != ours {
            return Err(MoveError::OtherDriver { instance, theirs, ours });
        }
        let own =
            |snapshot: &SnapshotRef| snapshot.instance == record.id && snapshot.revision == record.revision;
        if record.phase != Phase::Sleeping || !record.snapshot.as_ref().is_some_and(own) {
            return Err(ArchiveError::Odd(format!("{instance} does not sleep in it")).into());
        }
        let spec = self.spec(&record.tenant, &record.pool).ok_or_else(|| ActionError::NoSpec {
            tenant: record.tenant.clone(),
            pool: record.pool.clone(),
        })?;
        let (net_id, subnet) = (spec.network.tenant_net_id, spec.network.ipv4_subnet);
        // Of whichever node's blocks: the address moves with the instance.
        let address = subnet.instance_address(record.offset);
        if record.net_id != net_id || address != Some(record.address) {
            return Err(MoveError::OtherNetwork {
                instance,
                tenant: record.tenant.clone(),
                address: record.address,
                theirs: record.net_id,
                ours: net_id,
                subnet,
            });
        }
        let executor = &self.executor;
        let no_image = |cause| MoveError::NoImage { instance, flake_ref: record.flake_ref.clone(), cause };
        executor.boot_image(record).map_err(no_image)?;
        let net = executor.isolation.net_of(&spec.network);
        let mut arriving = record.clone().arriving(header.node.clone(), net, executor.clock.now());
        // What is decided for a pool is decided here by this node's document.
        arriving.seccomp = spec.seccomp;
        arriving.at_rest = spec.at_rest;
        arriving.persist.clone_from(&spec.persist);
        arriving.io_limits.clone_from(&spec.io_limits);
        arriving.restart = spec.restart;
        arriving.health.clone_from(&spec.health);
        Ok((arriving, spec))
    }

    /// Whether quotas and capacity have room for the leased newcomer.
    fn check_arrival(&self, lease: &Lease) -> Result<(), MoveError> {
        let Some(current_document) = self.current_document.borrow().clone() else { return Ok(()) };
        let gate = self.gate.close();
        let instances = self.records().observed();
        let no_room = |reason: String| ActionError::NoRoom {
            instance: lease.id().clone(),
            to: Phase::Sleeping,
            reason,
        };
        let newcomer = instances.iter().find(|instance| instance.id == *lease.id()).cloned();
        let newcomer = newcomer.ok_or_else(|| no_room("it is not there any more".to_owned()))?;
        let observation = Observation { capacity: self.capacity, instances, ..Observation::default() };
        check_arrival(&current_document.desired, &observation, &newcomer, Phase::Sleeping)
            .map_err(no_room)?;
        gate.admit();
        Ok(())
    }

    /// Runs on when the caller goes away.
    pub(super) async fn release(&self, asked: Asked, snapshot: Digest) -> Result<(), MoveError> {
        let this = self.clone();
        tokio::spawn(async move { this.remove_moved(&asked, snapshot).await }).await?
    }

    async fn remove_moved(&self, asked: &Asked, snapshot: Digest) -> Result<(), MoveError> {
        // A release that did not come to its end is gone on with.
        let fits = |record: &Record| record.intent.is_none() || record.is_leaving();
        let (lease, record) = self.sleeper(asked, fits).await?;
        let same = record.snapshot.as_ref().is_some_and(|saved| saved.digest == snapshot);
        if !same || record.exported_at.is_none() {
            return Err(MoveError::NotExported(record.id));
        }
        self.let_go(asked, &lease, &record).await
    }

    /// Removes the leased instance, which goes on elsewhere.
    pub(super) async fn let_go(
        &self,
        asked: &Asked,
        lease: &Lease,
        record: &Record,
    ) -> Result<(), MoveError> {
        let removed = self.executor.remove_exported(lease).await;
        let failure = removed.as_ref().err().map(|error| chain(error));
        self.executor.audit_move(record, &asked.by, "release", failure);
        removed.map_err(|cause| MoveError::Step { instance: record.id.clone(), cause })
    }
}

impl NodeHandle {
    /// Writes a sleeping instance to an archive, which is read as it is made.
    pub async fn export_instance(&self, asked: Asked) -> Result<Outgoing, MoveError> {
        let (subject, message) = (asked.place.to_string(), format!("asked by {}", asked.by));
        let begun = self.shared.actor.write_archive(asked).await;
        match &begun {
            Ok(_) => self.events().publish("InstanceExported", &subject, message),
            Err(error) => self.events().publish("ExportFailed", &subject, chain(error)),
        }
        begun
    }

    /// Takes in the instance that an archive holds.
    pub async fn import_instance(&self, import: Import, archive: Incoming) -> Result<Record, MoveError> {
        let imported = self.shared.actor.import(import, archive).await;
        match &imported {
            Ok(record) => self.events().publish("InstanceImported", record.full_name(), &record.reason),
            Err(error) => self.events().publish("ImportFailed", self.node_id(), chain(error)),
        }
        self.trigger();
        imported
    }

    /// Removes an instance that was exported and has not changed since.
    pub async fn release_instance(&self, asked: Asked, snapshot: Digest) -> Result<(), MoveError> {
        let subject = asked.place.to_string();
        let message = format!("it is in an archive; asked by {}", asked.by);
        let released = self.shared.actor.release(asked, snapshot).await;
        match &released {
            Ok(()) => self.events().publish("InstanceReleased", &subject, message),
            Err(error) => self.events().publish("ManualActionFailed", &subject, chain(error)),
        }
        self.trigger();
        released
    }
}
