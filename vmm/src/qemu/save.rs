//! Writes a paused guest's memory and device state. The VM stays, paused.
//!
//! QEMU writes into a file that it is given, or into a pipe whose content is encrypted here. Run state `postmigrate` means
//! that the guest was saved and has not run since: asking again, even after a crash, answers with that snapshot.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::{Access, Host, Operation, ProcessIdentity};
use mvm_proto::InstanceId;
use mvm_proto::document::SnapshotCompression;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::QemuDriver;
use super::args::{self, TEMPLATE_MEMORY};
use super::live::{Live, Record, Short, vm_state};
use super::qmp::{Qmp, QmpError};
use super::snapshot::{
    ENCODING, FORMAT, FileStamp, Found, MANIFEST, MEMORY, MadeOn, Manifest, OWNER, SNAPSHOT, STATE,
    UNFINISHED,
};
use super::start::SLOWEST_MIB_PER_SECOND;
use crate::encoding::{self, Encoding, StreamKey};
use crate::{DriverError, Purpose, SnapshotOptions, SnapshotRef, VmState, run_files};

const ACTION: &str = "snapshot";
const SAVE_BASE: Duration = Duration::from_secs(30);

/// Memory goes to a file in the page cache: QEMU's default of 128 MiB/s is for networks.
const BYTES_PER_SECOND: u64 = 10 << 30;

impl<H: Host> QemuDriver<H> {
    pub(super) async fn save(
        &self,
        instance: &InstanceId,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        self.stop_compression(instance).await;
        let live = self.living(instance, ACTION).await?;
        let Some(record) = live.record.as_ref() else {
            let reason = "nothing is written of what it was booted from; it can't be saved".to_owned();
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        };
        let locked = options.key_to_save(instance, record.spec.revision);
        let key_error = |cause| DriverError::Key { instance: instance.clone(), action: ACTION, cause };
        // A template belongs to no instance, and is mapped as it is.
        let key = locked.map_err(key_error)?.filter(|_| record.spec.purpose == Purpose::Instance);
        let Found { manifest, digest } = match self.written_already(&live, key.as_ref()).await? {
            Some(found) => found,
            None => self.write_anew(&live, record, key).await?,
        };
        Ok(SnapshotRef { instance: instance.clone(), revision: manifest.revision, digest })
    }

    /// The snapshot of exactly this state, if it was written before; fails when the guest is not paused.
    async fn written_already(
        &self,
        live: &Arc<Live>,
        key: Option<&StreamKey>,
    ) -> Result<Option<Found>, DriverError> {
        let instance = live.instance();
        let run = match self.settle(live).await {
            Ok(run) => run,
            Err(cause) => return Err(live.explain(ACTION, cause).await),
        };
        if vm_state(&run) == VmState::Running {
            let (instance, found) = (instance.clone(), VmState::Running);
            return Err(DriverError::WrongState { instance, action: "be snapshotted", found });
        }
        if run != "postmigrate" {
            return Ok(None);
        }
        let host = &*self.inner.host;
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let wanted = key.map(|key| key.tenant_key.id());
        let finished = Found::read(host, instance).await.map_err(io)?.and_then(Result::ok);
        let same = |found: &Found| {
            found.manifest.process == live.vmm.process && found.manifest.encoding.key == wanted
        };
        if let Some(found) = finished.filter(same) {
            return Ok(Some(found));
        }
        if let Some(record) = &live.record
            && owner(host, instance).await.as_ref() == Some(&live.vmm.process)
            && let Some(encoding) = unfinished_form(host, instance).await
            && encoding.key == wanted
        {
            return self.finish(live, record, encoding).await.map(Some);
        }
        // What was written is gone. QEMU saves a state once only, so the guest runs for an instant.
        for command in ["cont", "stop"] {
            self.command(instance, ACTION, command).await?;
        }
        Ok(None)
    }

    /// The run state, after a save that a dead agent began was given up.
    async fn settle(&self, live: &Live) -> Result<String, QmpError> {
        let within = self.answer_within();
        let qmp = live.qmp(within).await?;
        let status = qmp.command("query-migrate", Value::Null, within).await?;
        if matches!(status["status"].as_str(), Some("setup" | "active" | "device" | "cancelling")) {
            qmp.command("migrate_cancel", Value::Null, within).await?;
        }
        steady(&qmp, within).await
    }

    /// Writes a new snapshot; one that fails leaves nothing of itself.
    async fn write_anew(
        &self,
        live: &Arc<Live>,
        record: &Record,
        key: Option<StreamKey>,
    ) -> Result<Found, DriverError> {
        let written = self.write_state(live, record, key).await;
        if written.is_err()
            && let Err(cause) = self.remove_file(live.instance(), ACTION, UNFINISHED).await
        {
            tracing::warn!(error = %mvm_proto::text::chain(&cause), "an unfinished snapshot is left until the next one");
        }
        written
    }

    async fn write_state(
        &self,
        live: &Arc<Live>,
        record: &Record,
        key: Option<StreamKey>,
    ) -> Result<Found, DriverError> {
        let instance = live.instance();
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let (name, owner) = (UNFINISHED.to_owned(), serde_json::to_string(&live.vmm.process));
        self.perform(instance, ACTION, Operation::MakeDir { instance: instance.clone(), name }).await?;
        let owner = owner.map_err(|cause| io(cause.into()))?;
        self.write_file(instance, &format!("{UNFINISHED}/{OWNER}"), owner).await?;
        let name = format!("{UNFINISHED}/{STATE}");
        let file = self.inner.host.open_file(instance, &name, Access::Create).await;
        let file = file.map_err(run_files::io_cause).map_err(io)?;
        let file = file.ok_or_else(|| io(io::ErrorKind::NotFound.into()))?;
        let mib = record.spec.resources.mem_mib;
        let within = SAVE_BASE + Duration::from_secs(mib / SLOWEST_MIB_PER_SECOND);
        let memory_apart = record.spec.purpose == Purpose::Template;
        let flushing = file.try_clone().and_then(Flushing::begin).map_err(io)?;
        let encoding = Encoding { key: key.as_ref().map(|key| key.tenant_key.id()), ..Encoding::default() };
        let noted = serde_json::to_string(&encoding).map_err(|cause| io(cause.into()))?;
        let name = format!("{UNFINISHED}/{ENCODING}");
        let (into, work) = match key {
            None => {
                // Known before it is written: what QEMU says that it saved is in the file.
                self.write_file(instance, &name, noted.clone()).await?;
                (file.into(), None)
            }
            Some(key) => {
                let (from, into) = encoding::pipe().map_err(io)?;
                (into, Some(tokio::task::spawn_blocking(move || encrypt(from, file, &key))))
            }
        };
        let migrated = async {
            let qmp = live.qmp(self.answer_within()).await?;
            // Closes our end, so that the reader of the pipe comes to its end.
            migrate(&qmp, into, memory_apart, self.answer_within(), within).await
        };
        let migrated = migrated.await;
        // One that failed or was stopped is removed, and need not reach the disk.
        let flushed = if migrated.is_ok() { flushing.end().await } else { Ok(()) };
        if let Some(work) = work {
            // One that is stuck holds its end of the pipe open.
            let patience = if migrated.is_ok() { within } else { self.answer_within() };
            match tokio::time::timeout(patience, work).await {
                // What kept it from being written is why QEMU could not go on.
                Ok(ended) => {
                    ended.map_err(io::Error::other).and_then(|encrypted| encrypted).map_err(io)?;
                }
                Err(_) if migrated.is_ok() => {
                    let instance = instance.clone();
                    return Err(DriverError::Stuck { instance, action: ACTION, waited: patience });
                }
                Err(_) => {}
            }
            if migrated.is_ok() {
                self.write_file(instance, &name, noted).await?;
            }
        }
        // The kernel reports a write error of the disk once.
        flushed.map_err(io)?;
        match migrated {
            Ok(()) => self.finish(live, record, encoding).await,
            Err(cause) => Err(live.explain(ACTION, cause).await),
        }
    }

    /// Makes an unfinished snapshot, whose state is all written, the instance's snapshot.
    async fn finish(&self, live: &Live, record: &Record, encoding: Encoding) -> Result<Found, DriverError> {
        let instance = live.instance();
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let host = &*self.inner.host;
        let (memory, disk) = match record.spec.purpose {
            Purpose::Instance => (None, FileStamp::of_disk(host, instance).await.map_err(io)?),
            Purpose::Template => (Some(self.take_memory(instance).await?), None),
        };
        let manifest = Manifest {
            format: FORMAT,
            revision: record.spec.revision,
            image: record.spec.image.digest,
            qemu: record.qemu.clone(),
            accelerator: record.accelerator.clone(),
            balloon: record.balloon,
            short: record.balloon && live.short() != Short::No,
            hardware: args::hardware_digest(&record.spec, &record.accelerator, record.balloon),
            made_on: MadeOn::here().await,
            state: self.stamp(instance, &format!("{UNFINISHED}/{STATE}")).await?,
            encoding,
            memory,
            disk,
            process: live.vmm.process.clone(),
        };
        let text = serde_json::to_string_pretty(&manifest).map_err(|cause| io(cause.into()))?;
        self.write_file(instance, &format!("{UNFINISHED}/{MANIFEST}"), text.clone()).await?;
        let (from, to) = (UNFINISHED.to_owned(), SNAPSHOT.to_owned());
        self.perform(instance, ACTION, Operation::Rename { instance: instance.clone(), from, to }).await?;
        Ok(Found::of(manifest, text.as_bytes()))
    }

    /// Puts a template's memory beside its state.
    async fn take_memory(&self, instance: &InstanceId) -> Result<FileStamp, DriverError> {
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let (from, to) = (TEMPLATE_MEMORY.to_owned(), format!("{UNFINISHED}/{MEMORY}"));
        // It may have been moved already, by an agent that ended then.
        if run_files::open(&*self.inner.host, instance, &from).await.map_err(io)?.is_some() {
            let (instance, name) = (instance.clone(), from.clone());
            self.perform(&instance.clone(), ACTION, Operation::DigHoles { instance, name }).await?;
        }
        let rename = Operation::Rename { instance: instance.clone(), from, to: to.clone() };
        self.perform(instance, ACTION, rename).await?;
        self.stamp(instance, &to).await
    }

    async fn stamp(&self, instance: &InstanceId, name: &str) -> Result<FileStamp, DriverError> {
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let file = run_files::open(&*self.inner.host, instance, name).await.map_err(io)?;
        let file = file.ok_or_else(|| io(io::ErrorKind::NotFound.into()))?;
        FileStamp::of(&file).map_err(io)
    }

    async fn write_file(&self, instance: &InstanceId, name: &str, text: String) -> Result<(), DriverError> {
        let write = Operation::WriteFile { instance: instance.clone(), name: name.to_owned(), text };
        self.perform(instance, ACTION, write).await.map(|_| ())
    }
}

/// Has the disk take a file while it is still being written: then little is left to wait for at its end. Ends when it is
/// dropped, after the flush that is under way.
struct Flushing {
    wanted: Arc<()>,
    flushed: oneshot::Receiver<io::Result<()>>,
}

/// Between one flush and the next: what is written meanwhile goes to the disk in one piece.
const FLUSH_EVERY: Duration = Duration::from_millis(5);

impl Flushing {
    /// In a thread of its own: a save may take long, and those for short work are few.
    fn begin(file: File) -> io::Result<Self> {
        let wanted = Arc::new(());
        let still = Arc::downgrade(&wanted);
        let (tell, flushed) = oneshot::channel();
        std::thread::Builder::new().name("flush".to_owned()).spawn(move || {
            let mut flushed = Ok(());
            while flushed.is_ok() && still.strong_count() > 0 {
                std::thread::sleep(FLUSH_EVERY);
                flushed = file.sync_data();
            }
            // The caller may have given up.
            let _ = tell.send(flushed);
        })?;
        Ok(Self { wanted, flushed })
    }

    /// What the disk said, once it has all that was written so far.
    async fn end(self) -> io::Result<()> {
        drop(self.wanted);
        self.flushed.await.map_err(io::Error::other)?
    }
}

/// What both ends of a save must agree on.
pub(super) fn capabilities(memory_apart: bool) -> Value {
    json!({ "capabilities": [
        { "capability": "events", "state": true },
        { "capability": "x-ignore-shared", "state": memory_apart },
    ] })
}

async fn owner(host: &impl Host, instance: &InstanceId) -> Option<ProcessIdentity> {
    let text = run_files::read(host, instance, &format!("{UNFINISHED}/{OWNER}")).await.ok()??;
    serde_json::from_slice(&text).ok()
}

/// How an unfinished snapshot is written; none while not all of it is.
async fn unfinished_form(host: &impl Host, instance: &InstanceId) -> Option<Encoding> {
    let text = run_files::read(host, instance, &format!("{UNFINISHED}/{ENCODING}")).await.ok()??;
    serde_json::from_slice(&text).ok()
}

/// Encrypts what a VMM saves: nothing of it is ever in a file in clear.
fn encrypt(from: OwnedFd, into: File, key: &StreamKey) -> io::Result<()> {
    encoding::encode(File::from(from), into, SnapshotCompression::None, Some(key), || true).map(|_| ())
}

/// Has the paused VMM write its state into a file or pipe, and its memory too unless that is in a file that others see.
async fn migrate(
    qmp: &Qmp,
    into: OwnedFd,
    memory_apart: bool,
    answer_within: Duration,
    within: Duration,
) -> Result<(), QmpError> {
    qmp.command("migrate-set-capabilities", capabilities(memory_apart), answer_within).await?;
    qmp.command("migrate-set-parameters", json!({ "max-bandwidth": BYTES_PER_SECOND }), answer_within)
        .await?;
    qmp.give("state", into.as_fd(), answer_within).await?;
    drop(into);
    let mut migration = qmp.migration();
    qmp.command("migrate", json!({ "uri": "fd:state" }), answer_within).await?;
    let over = migration
        .wait_for(|status| matches!(status.as_str(), "completed" | "failed" | "cancelled" | "closed"));
    let silent = |_| QmpError::Silent { command: "migrate", waited: within };
    let status =
        tokio::time::timeout(within, over).await.map_err(silent)?.map_err(|_| QmpError::Closed)?.clone();
    match status.as_str() {
        "completed" => steady(qmp, answer_within).await.map(|_| ()),
        "failed" => {
            steady(qmp, answer_within).await?;
            let status = qmp.command("query-migrate", Value::Null, answer_within).await?;
            let reason = status["error-desc"].as_str().unwrap_or("QEMU does not say why").to_owned();
            Err(QmpError::Refused { command: "migrate", reason })
        }
        "cancelled" => {
            steady(qmp, answer_within).await?;
            Err(QmpError::Refused { command: "migrate", reason: "it was called off".to_owned() })
        }
        _ => Err(QmpError::Closed),
    }
}

/// Waits until the run state is not on its way to another: the end of a save is told a moment before it is one.
async fn steady(qmp: &Qmp, within: Duration) -> Result<String, QmpError> {
    let settled = async {
        loop {
            let run = qmp.query_run(within).await?;
            if run != "finish-migrate" {
                return Ok(run);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let silent = |_| QmpError::Silent { command: "query-status", waited: within };
    tokio::time::timeout(within, settled).await.map_err(silent)?
}
