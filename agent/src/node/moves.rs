//! Instances moved between nodes by hand: written to an archive, read from one, and removed once they are elsewhere.
//!
//! An export holds the instance's lease until the last byte was taken, so that what is in the archive is one state of
//! it. An import holds the lease of an instance that has no record yet. See [`crate::instance::archive`] for what is in between.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use mvm_image::ImageError;
use mvm_planner::{Observation, check_arrival};
use mvm_proto::status::InstanceStatus;
use mvm_proto::text::chain;
use mvm_proto::{Digest, InstanceId, Phase, PoolId, Problem, TenantId};
use mvm_vmm::{Driver, DriverError, Lacking, Part};
use tokio::io::AsyncRead;
use tokio::sync::mpsc;

use crate::execute::StepError;
use crate::instance::PoolSpec;
use crate::instance::archive::{self, ArchiveError, Header, Member, Reader, Source, stored_bytes};
use crate::instance::record::Record;
use crate::instance::records::{Lease, StateError};
use crate::node::actions::{Actor, no_spec, not_recorded};
use crate::node::reconcile_task::NodeHandle;
use crate::node::wake::{LEASE_PATIENCE, busy, shown};

/// Pieces that wait for a reader.
const PIECES_KEPT: usize = 4;

/// A reader that takes nothing for this long has gone away, and others want the instance.
const READER_PATIENCE: Duration = Duration::from_secs(60);

/// Which instance, and who asks.
#[derive(Debug, Clone)]
pub struct Asked {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub instance: InstanceId,
    pub by: String,
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
}

/// Moves instances, whatever the driver.
pub(crate) trait Moves: Send + Sync {
    fn export(&self, asked: Asked) -> BoxFuture<'static, Result<Outgoing, Problem>>;
    fn import(&self, import: Import, archive: Incoming) -> BoxFuture<'static, Result<Record, Problem>>;
    fn release(&self, asked: Asked, snapshot: Digest) -> BoxFuture<'static, Result<(), Problem>>;
}

impl<D: Driver> Moves for Actor<D> {
    fn export(&self, asked: Asked) -> BoxFuture<'static, Result<Outgoing, Problem>> {
        let this = self.clone();
        Box::pin(async move { this.write_archive(asked).await })
    }

    fn import(&self, import: Import, archive: Incoming) -> BoxFuture<'static, Result<Record, Problem>> {
        let this = self.clone();
        Box::pin(async move {
            // Runs on when the caller goes away: then the archive breaks off, and what came of it is cleared away.
            let task = tokio::spawn(async move { this.read_archive(&import, archive).await });
            task.await.unwrap_or_else(|error| Err(failed(&error.to_string())))
        })
    }

    fn release(&self, asked: Asked, snapshot: Digest) -> BoxFuture<'static, Result<(), Problem>> {
        let this = self.clone();
        Box::pin(async move {
            let task = tokio::spawn(async move { this.remove_moved(&asked, snapshot).await });
            task.await.unwrap_or_else(|error| Err(failed(&error.to_string())))
        })
    }
}

impl<D: Driver> Actor<D> {
    /// The lease of an instance that sleeps with a snapshot and `fits`, and its record.
    async fn sleeper(&self, asked: &Asked, fits: fn(&Record) -> bool) -> Result<(Lease, Record), Problem> {
        let Asked { tenant, pool, instance: id, .. } = asked;
        if let Err(Lacking { reason, .. }) = self.driver.migration() {
            return Err(Problem::new(409, "immovable", format!("{id} can't be moved"), format!("{reason}.")));
        }
        self.waker.find(tenant, pool, id)?;
        let lease = self.waker.records.wait_lease(id, Phase::Sleeping);
        let lease = tokio::time::timeout(LEASE_PATIENCE, lease).await.map_err(|_| busy(id))?;
        let phase = self.waker.find(tenant, pool, id)?;
        let record = self.waker.records.get(id);
        let sleeps = |record: &Record| phase == Phase::Sleeping && record.snapshot.is_some() && fits(record);
        match record.filter(sleeps) {
            Some(record) => Ok((lease, record)),
            None => Err(not_sleeping(id, phase)),
        }
    }

    async fn write_archive(&self, asked: Asked) -> Result<Outgoing, Problem> {
        let (lease, record) = self.sleeper(&asked, |record| record.intent.is_none()).await?;
        let executor = &self.waker.executor;
        let begun = async {
            let parts = executor.outgoing(&record).await.map_err(|error| unfit(&record.id, &error))?;
            self.header(&record, parts).await.map_err(|cause| failed(&cause.to_string()))
        };
        let (header, sources) = match begun.await {
            Ok(begun) => begun,
            Err(problem) => {
                executor.audit_move(&record, &asked.by, "export", Some(problem.detail.clone()));
                executor.compress_later(&record);
                return Err(problem);
            }
        };
        let (pieces, archive) = mpsc::channel(PIECES_KEPT);
        let (this, runtime) = (self.clone(), tokio::runtime::Handle::current());
        tokio::task::spawn_blocking(move || {
            let executor = &this.waker.executor;
            let put = |piece: Vec<u8>| {
                let send = pieces.send(Ok(piece.into()));
                match runtime.block_on(async { tokio::time::timeout(READER_PATIENCE, send).await }) {
                    Ok(Ok(())) => Ok(()),
                    _ => {
                        Err(io::Error::new(io::ErrorKind::BrokenPipe, "the reader of the archive went away"))
                    }
                }
            };
            let last =
                || runtime.block_on(executor.mark_exported(&lease, &asked.by)).map_err(io::Error::other);
            let written = archive::write(&header, &sources, put, last);
            let outcome = written.as_ref().err().map(chain_of);
            executor.audit_move(&header.record, &asked.by, "export", outcome);
            drop(lease);
            // The export stopped what is done to a snapshot when nobody waits for it.
            runtime.block_on(async { executor.compress_later(&header.record) });
            if let Err(error) = written {
                tracing::warn!(id = %header.record.id, %error, "could not finish an archive");
                // Whoever still reads must not take what came for all of it.
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
            at: self.clock.now(),
            driver: self.driver.kind(),
            record: record.clone(),
            members,
        };
        Ok((header, sources))
    }

    async fn read_archive(&self, import: &Import, archive: Incoming) -> Result<Record, Problem> {
        let (header, reader) = Reader::open(archive).await.map_err(|error| bad_archive(&error))?;
        let (executor, records) = (&self.waker.executor, &self.waker.records);
        let result = async {
            let (arriving, spec) = self.welcome(&header)?;
            let lease = records.admit(arriving).map_err(|error| taken(&error))?;
            let result = async {
                self.check_arrival(&lease)?;
                let reason = format!("imported from {}, asked by {}", header.node, import.by);
                let taken_in =
                    executor.take_in(&lease, &header, reader, &spec, import.override_for, &reason).await;
                taken_in.map_err(|error| unfit(lease.id(), &error))
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
        let failure = result.as_ref().err().map(|problem| problem.detail.clone());
        executor.audit_move(&header.record, &import.by, "import", failure);
        result
    }

    /// The instance as it would be here, if the document, the network and the images have a place for it.
    fn welcome(&self, header: &Header) -> Result<(Record, PoolSpec), Problem> {
        let record = &header.record;
        let id = &record.id;
        if let Err(Lacking { reason, .. }) = self.driver.migration() {
            return Err(Problem::new(
                409,
                "immovable",
                format!("{id} can't be imported here"),
                format!("{reason}."),
            ));
        }
        if header.driver != self.driver.kind() {
            let detail =
                format!("{id} slept under {}, and this node runs {}", header.driver, self.driver.kind());
            return Err(Problem::new(
                409,
                "other_driver",
                detail,
                "Import it on a node with the same driver.",
            ));
        }
        let own = |snapshot: &mvm_vmm::SnapshotRef| {
            snapshot.instance == record.id && snapshot.revision == record.revision
        };
        if record.phase != Phase::Sleeping || !record.snapshot.as_ref().is_some_and(own) {
            return Err(bad_archive(&ArchiveError::Odd(format!("{id} does not sleep in it"))));
        }
        let spec = self.spec(&record.tenant, &record.pool);
        let spec = spec.ok_or_else(|| no_spec(&record.tenant, &record.pool))?;
        let address = spec.subnet.instance_address(record.offset);
        if record.net_id != spec.net_id || address != Some(record.address) {
            let detail = format!(
                "{id} has the address {} in network {}, and here {} has network {} with {}",
                record.address, record.net_id, record.tenant, spec.net_id, spec.subnet
            );
            let remediation = "Give the tenant the same tenant_net_id and ipv4_subnet on both nodes.";
            return Err(Problem::new(409, "other_network", detail, remediation));
        }
        let executor = &self.waker.executor;
        executor.boot_image(record).map_err(|error| no_image(record, &error))?;
        let net = executor.isolation.net_of(spec.net_id, spec.subnet);
        let mut arriving = record.clone().arriving(header.node.clone(), net, self.clock.now());
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
    fn check_arrival(&self, lease: &Lease) -> Result<(), Problem> {
        let Some(in_force) = shown(&self.waker.in_force) else { return Ok(()) };
        let gate = self.waker.gate.close();
        let instances = self.waker.records.observed();
        let newcomer = instances.iter().find(|instance| instance.id == *lease.id()).cloned();
        let observation = Observation { capacity: self.waker.capacity, instances, ..Observation::default() };
        let newcomer = newcomer.ok_or_else(|| failed(&format!("{} is not there any more", lease.id())))?;
        let room = check_arrival(&in_force.desired, &observation, &newcomer, Phase::Sleeping);
        room.map_err(|reason| no_room(lease.id(), &reason))?;
        gate.admit();
        Ok(())
    }

    async fn remove_moved(&self, asked: &Asked, snapshot: Digest) -> Result<(), Problem> {
        // A release that did not come to its end is gone on with.
        let fits = |record: &Record| record.intent.is_none() || record.is_leaving();
        let (lease, record) = self.sleeper(asked, fits).await?;
        let id = &record.id;
        let same = record.snapshot.as_ref().is_some_and(|saved| saved.digest == snapshot);
        if !same || record.exported_at.is_none() {
            let detail = format!("{id} is not what that archive holds: it was not exported as it is now");
            let remediation = "Export it again, or remove it with `mvm instance stop` and `destroy`.";
            return Err(Problem::new(409, "not_exported", detail, remediation));
        }
        let removed = self.waker.executor.let_move(&lease).await;
        let failure = removed.as_ref().err().map(|error| chain(error));
        self.waker.executor.audit_move(&record, &asked.by, "release", failure);
        removed.map_err(|error| failed(&format!("{id}: {}", chain(&error))))
    }
}

impl NodeHandle {
    /// Writes a sleeping instance to an archive, which is read as it is made.
    pub async fn export_instance(&self, asked: Asked) -> Result<Outgoing, Problem> {
        let subject = format!("{}/{}/{}", asked.tenant, asked.pool, asked.instance);
        let message = format!("by hand, asked by {}", asked.by);
        let begun = self.shared.mover.export(asked).await;
        match &begun {
            Ok(_) => self.publish("InstanceExported", &subject, &message),
            Err(problem) => self.publish("ExportFailed", &subject, &problem.detail),
        }
        begun
    }

    /// Takes in the instance that an archive holds.
    pub async fn import_instance(&self, import: Import, archive: Incoming) -> Result<Record, Problem> {
        let imported = self.shared.mover.import(import, archive).await;
        match &imported {
            Ok(record) => {
                let subject = format!("{}/{}/{}", record.tenant, record.pool, record.id);
                self.publish("InstanceImported", &subject, &record.reason);
            }
            Err(problem) => self.publish("ImportFailed", self.node_id().as_str(), &problem.detail),
        }
        self.trigger();
        imported
    }

    /// How an instance is shown to whoever asks.
    #[must_use]
    pub fn shown(&self, record: &Record) -> InstanceStatus {
        self.shared.status_of(record)
    }

    /// Removes an instance that was exported and has not changed since.
    pub async fn release_instance(&self, asked: Asked, snapshot: Digest) -> Result<(), Problem> {
        let subject = format!("{}/{}/{}", asked.tenant, asked.pool, asked.instance);
        let message = format!("it is in an archive; asked by {}", asked.by);
        let released = self.shared.mover.release(asked, snapshot).await;
        match &released {
            Ok(()) => self.publish("InstanceReleased", &subject, &message),
            Err(problem) => self.publish("ManualActionFailed", &subject, &problem.detail),
        }
        self.trigger();
        released
    }
}

fn chain_of(error: &io::Error) -> String {
    chain(error)
}

fn not_sleeping(id: &InstanceId, phase: Phase) -> Problem {
    let detail = format!("{id} is {phase}, and only sleeping instances with a snapshot can be exported");
    Problem::new(409, "not_sleeping", detail, format!("Put it to sleep first: mvm instance sleep {id}."))
}

fn no_room(id: &InstanceId, reason: &str) -> Problem {
    Problem::new(
        409,
        "no_room",
        format!("this node has no room for {id}: {reason}"),
        "Free some of it first.",
    )
}

fn no_image(record: &Record, error: &StepError) -> Problem {
    let detail = format!("{} needs its image on this node: {}", record.id, chain(error));
    let remediation = format!(
        "Get the same image first: mvm image build {}, or `mvm image import` of a folder that the other node exported.",
        record.flake_ref
    );
    let code = match error {
        StepError::Image(ImageError::Missing(_)) => "image_missing",
        _ => "image_unusable",
    };
    Problem::new(409, code, detail, remediation)
}

fn bad_archive(error: &ArchiveError) -> Problem {
    let detail = format!("could not use the archive: {}", chain(error));
    Problem::new(422, "bad_archive", detail, "Export the instance again, and copy the file whole.")
}

fn taken(error: &StateError) -> Problem {
    let detail = chain(error);
    match error {
        StateError::Closing => {
            Problem::new(503, "closing", detail, "Try again once the agent is back; nothing was imported.")
        }
        StateError::Exists(_) => Problem::new(
            409,
            "instance_exists",
            detail,
            "It may have been imported before: mvm instance list.",
        ),
        StateError::AddressTaken { .. } => Problem::new(
            409,
            "address_taken",
            detail,
            "Move or destroy the instance that has it, or import elsewhere.",
        ),
        _ => not_recorded(error),
    }
}

/// Why a step between archive and driver did not succeed.
fn unfit(id: &InstanceId, error: &StepError) -> Problem {
    let detail = format!("{id}: {}", chain(error));
    match error {
        StepError::Archive(error) => bad_archive(error),
        StepError::NoRoom(_) => Problem::new(409, "no_room", detail, "Free some of it first."),
        StepError::State(error) => not_recorded(error),
        StepError::Driver(
            DriverError::Unusable { .. } | DriverError::NoSnapshot { .. } | DriverError::OtherRevision { .. },
        ) => {
            let remediation =
                "Use a node with the same QEMU, processor, kernel and image, or start the instance anew.";
            Problem::new(409, "snapshot_unusable", detail, remediation)
        }
        StepError::Driver(DriverError::Key { .. }) => {
            let remediation =
                "Put the tenant's key from the other node into this one's secrets directory first.";
            Problem::new(409, "key_missing", detail, remediation)
        }
        _ => failed(&detail),
    }
}

fn failed(reason: &str) -> Problem {
    let detail = format!("could not export or import the instance: {reason}");
    Problem::new(503, "move_failed", detail, "Look at the agent's log, then try again.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_shuts_down_takes_nothing_in_and_says_so() {
        let problem = taken(&StateError::Closing);
        assert_eq!((problem.status, problem.code.as_str()), (503, "closing"));
        assert_eq!(problem.detail, "this agent is shutting down");
    }
}
