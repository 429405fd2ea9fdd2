//! Pauses, resumes and snapshots.
//!
//! In 1.16.0 and 1.16.1 a resume leaves new vsock connections unanswered for good unless a snapshot was taken since
//! the pause. So each pause there ends with a snapshot that is thrown away: of the differences only, since its content
//! does not matter (11 to 31 ms and under 1 MB, where a full one of 128 MiB takes 296 to 505 ms). It comes with the
//! pause and not with the resume, because a request waits for the resume.

use std::sync::Arc;

use mvm_host::{Host, JailFile, Operation};
use mvm_proto::InstanceId;

use super::http::ApiClient;
use super::paths::VSOCK_SOCKET;
use super::request::{SnapshotCreate, SnapshotType, TargetState};
use super::snapshot_file::{
    MANIFEST, MEMORY, MadeOn, Manifest, NEW_DIR, STATE, THROWAWAY_DIR, is_snapshot_name, measure,
    whole_digest,
};
use super::version::Version;
use super::vmm::{Live, Vmms, api_error, bad_request, host_error, io_error, stuck};
use super::vsock::{self, VsockError};
use crate::{DriverError, SnapshotRef, VmState, run_files};

/// No guest of ours listens here: one that can be reached refuses, one that can't does not answer. Connecting to the
/// guest's own port would take it from the connection in use.
const PROBE_PORT: u32 = 5250;

/// How long a guest that runs may take to refuse, before a pause; one that is still booting never does.
const BEFORE_PAUSE: std::time::Duration = std::time::Duration::from_millis(500);

impl<H: Host> Vmms<H> {
    /// The live VM, a connection to it, its state and its version.
    pub(super) async fn running(
        self: &Arc<Self>,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<(Live, ApiClient, VmState, Version), DriverError> {
        let none = || DriverError::NoVm { instance: instance.clone(), action };
        let live = self.find(instance, action).await?.ok_or_else(none)?;
        let mut client = self.connect(&live, action).await?;
        let described = self.describe(&mut client, instance, action).await?;
        Ok((live, client, described.state.ok_or_else(none)?, described.version))
    }

    pub(super) async fn pause(self: &Arc<Self>, instance: &InstanceId) -> Result<(), DriverError> {
        let (live, mut client, state, version) = self.running(instance, "pause").await?;
        if state == VmState::Paused {
            return Ok(());
        }
        let wedges = version.loses_vsock_after_a_bare_resume();
        let answered = wedges && self.reaches_guest(&live, BEFORE_PAUSE).await;
        self.set_state(&mut client, instance, TargetState::Paused, "pause").await?;
        self.remember(&live.vmm, |known| {
            (known.snapshot, known.resumes_safely, known.answered) = (None, !wedges, answered);
            known.state = Some(VmState::Paused);
        });
        if wedges {
            self.make_resumable(&live, &mut client, "pause").await?;
        }
        Ok(())
    }

    pub(super) async fn resume(self: &Arc<Self>, instance: &InstanceId) -> Result<(), DriverError> {
        let (live, mut client, state, version) = self.running(instance, "resume").await?;
        if state == VmState::Running {
            return Ok(());
        }
        let wedges = version.loses_vsock_after_a_bare_resume();
        let known = self.recall(&live.vmm);
        if wedges && !known.resumes_safely {
            // Paused by an agent that did not get further, or whose memory is gone.
            self.make_resumable(&live, &mut client, "resume").await?;
        }
        // From here on memory changes: what was frozen is no longer what a snapshot would be.
        self.remember(&live.vmm, |known| (known.snapshot, known.resumes_safely) = (None, false));
        self.set_state(&mut client, instance, TargetState::Resumed, "resume").await?;
        self.note(&live.vmm, |known| known.state = Some(VmState::Running));
        self.deflate(&mut client, instance).await;
        let limit = self.settings.limits.vsock;
        if wedges && known.answered && !self.reaches_guest(&live, limit).await {
            return Err(stuck(instance, "a vsock connection after its resume", limit));
        }
        Ok(())
    }

    /// Whether the guest's kernel answers a connection, if only by refusing it.
    async fn reaches_guest(&self, live: &Live, limit: std::time::Duration) -> bool {
        let answer = vsock::connect(&self.dial(live, VSOCK_SOCKET), PROBE_PORT, limit).await;
        matches!(answer, Ok(_) | Err(VsockError::Closed(_)))
    }

    async fn set_state(
        &self,
        client: &mut ApiClient,
        instance: &InstanceId,
        state: TargetState,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let call = state.request().map_err(|error| bad_request(instance, &error))?;
        let sent = client.send(&call, self.settings.limits.call).await;
        sent.map(|_| ()).map_err(|error| api_error(instance, action, error))
    }

    /// The snapshot that is thrown away.
    async fn make_resumable(
        &self,
        live: &Live,
        client: &mut ApiClient,
        action: &'static str,
    ) -> Result<(), DriverError> {
        self.write_snapshot(live, client, THROWAWAY_DIR, SnapshotType::Diff, action).await?;
        self.remember(&live.vmm, |known| known.resumes_safely = true);
        self.remove_name(&live.vmm.instance, THROWAWAY_DIR, action).await
    }

    /// Has the VMM write a snapshot into a new directory of the run directory.
    async fn write_snapshot(
        &self,
        live: &Live,
        client: &mut ApiClient,
        dir: &str,
        snapshot_type: SnapshotType,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let instance = &live.vmm.instance;
        let make = Operation::MakeDir { instance: instance.clone(), name: dir.to_owned() };
        self.perform(instance, action, make).await?;
        let name = |file: &str| match &live.paths.jail {
            Some(_) => format!("{dir}.{file}"),
            None => format!("{dir}/{file}"),
        };
        if let Some(jail) = &live.paths.jail {
            // The jail has its own name for the very same file, so that what is written there is here.
            let files = [MEMORY, STATE].map(|file| JailFile {
                source: live.paths.run_dir.join(dir).join(file),
                name: name(file),
                writable: true,
            });
            let share = Operation::ShareWithJail { jail: jail.clone(), files: files.to_vec() };
            self.perform(instance, action, share).await?;
        }
        let create =
            SnapshotCreate { snapshot_type, snapshot_path: name(STATE), mem_file_path: name(MEMORY) };
        let call = create.request().map_err(|error| bad_request(instance, &error))?;
        let limit = self.settings.limits.snapshot_of(live.file.resources.mem_mib);
        let writing = self.writing(&live.vmm);
        let sent = client.send(&call, limit).await.map_err(|error| api_error(instance, action, error));
        drop(writing);
        if let Some(jail) = &live.paths.jail {
            // As long as the jail has a name for it, a snapshot that is discarded keeps its place on the disk.
            let unshare =
                Operation::UnshareFromJail { jail: jail.clone(), names: [MEMORY, STATE].map(name).to_vec() };
            if let Err(error) = self.perform(instance, action, unshare).await {
                tracing::warn!(%instance, error = %mvm_proto::text::chain(&error), "a snapshot stays in its jail");
            }
        }
        sent.map(|_| ())
    }

    pub(super) async fn snapshot(
        self: &Arc<Self>,
        instance: &InstanceId,
    ) -> Result<SnapshotRef, DriverError> {
        const ACTION: &str = "snapshot";
        let (live, mut client, state, version) = self.running(instance, ACTION).await?;
        if state != VmState::Paused {
            let instance = instance.clone();
            return Err(DriverError::WrongState { instance, action: "be snapshotted", found: state });
        }
        if let Some(snapshot) = self.recall(&live.vmm).snapshot {
            return Ok(snapshot);
        }
        let written = self.write_snapshot(&live, &mut client, NEW_DIR, SnapshotType::Full, ACTION).await;
        let sealed = match written {
            Ok(()) => self.seal(&live, version).await,
            Err(error) => Err(error),
        };
        let manifest = match sealed {
            Ok(manifest) => manifest,
            Err(error) => {
                // Half a snapshot may be what fills the disk. The first error is the one to report.
                let _ = self.remove_name(instance, NEW_DIR, ACTION).await;
                return Err(error);
            }
        };
        let reference = manifest.reference();
        self.remember(&live.vmm, |known| {
            (known.snapshot, known.resumes_safely) = (Some(reference.clone()), true);
        });
        self.remove_snapshots(instance, Some(&manifest.directory), ACTION).await?;
        Ok(reference)
    }

    /// Makes what was just written the instance's snapshot: on the disk, under its own name, then in the manifest.
    async fn seal(&self, live: &Live, version: Version) -> Result<Manifest, DriverError> {
        const ACTION: &str = "keep the snapshot of";
        let instance = &live.vmm.instance;
        let fault = |cause| io_error(instance, ACTION, cause);
        let measured = async |name: &str| {
            // Its VMM writes to it no more, nor does another that runs as the same user one day: the forks of a template have
            // their memory from this very file.
            let name = format!("{NEW_DIR}/{name}");
            let take = Operation::MakeReadOnly { instance: instance.clone(), name: name.clone() };
            self.host.perform(&take).await.map_err(run_files::io_cause)?;
            let file = run_files::open(&*self.host, instance, &name).await?;
            measure(file.ok_or(std::io::ErrorKind::NotFound)?, true).await
        };
        let memory = measured(MEMORY).await.map_err(fault)?;
        let state = measured(STATE).await.map_err(fault)?;
        let hex = whole_digest(&memory, &state).hex();
        let directory = format!("snapshot-{}", &hex[..16]);
        let made_on = MadeOn::here(version).map_err(fault)?;
        let revision = live.file.revision;
        let manifest = Manifest { instance: instance.clone(), revision, directory, made_on, memory, state };
        let text = serde_json::to_string(&manifest).map_err(std::io::Error::other).map_err(fault)?;
        let (from, to) = (NEW_DIR.to_owned(), manifest.directory.clone());
        self.perform(instance, ACTION, Operation::Rename { instance: instance.clone(), from, to }).await?;
        let name = MANIFEST.to_owned();
        self.perform(instance, ACTION, Operation::WriteFile { instance: instance.clone(), name, text })
            .await?;
        Ok(manifest)
    }

    /// A VM loaded from the snapshot has its memory mapped privately; removing the file's name leaves it that memory,
    /// where changing the file would not. So this is safe while a VM lives, and nothing here ever writes to one.
    pub(super) async fn discard(&self, instance: &InstanceId) -> Result<(), DriverError> {
        const ACTION: &str = "discard the snapshot of";
        self.remove_name(instance, MANIFEST, ACTION).await?;
        self.remove_snapshots(instance, None, ACTION).await?;
        self.forget_snapshot(instance);
        Ok(())
    }

    async fn remove_snapshots(
        &self,
        instance: &InstanceId,
        but: Option<&str>,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let names = self.host.names(instance).await.map_err(|cause| host_error(instance, action, cause))?;
        for name in names.iter().filter(|name| is_snapshot_name(name) && Some(name.as_str()) != but) {
            self.remove_name(instance, name, action).await?;
        }
        Ok(())
    }

    async fn remove_name(
        &self,
        instance: &InstanceId,
        name: &str,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let operation = Operation::RemoveFile { instance: instance.clone(), name: name.to_owned() };
        self.perform(instance, action, operation).await.map(|_| ())
    }
}
