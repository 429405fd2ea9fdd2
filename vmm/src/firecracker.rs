//! The driver for Firecracker: one process per VM, spoken to over its API socket.
//!
//! [`launch`] starts the process (through a jailer, where there is one), configures it over the API and boots it, or has
//! it load a snapshot and stay paused. [`vmm`] finds, follows and ends processes. Their state is asked over the API each
//! time, so that an agent that has just started knows as much as the one before it; only what makes calls idempotent
//! within a pause is kept in memory. [`snapshot`] pauses, resumes and saves, [`vsock`] connects to guests, [`logs`] trims
//! and reads what was logged.

mod balloon;
mod http;
mod launch;
mod logs;
mod metrics;
mod paths;
mod request;
pub mod settings;
mod snapshot;
mod snapshot_file;
mod version;
mod vmm;
mod vmm_file;
mod vsock;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use mvm_proto::{InstanceId, Timestamp};
use tokio::sync::broadcast;

use self::launch::Origin;
use self::paths::{CONSOLE, VSOCK_SOCKET};
use self::request::Action;
pub use self::settings::{FirecrackerSettings, FirecrackerUnavailable, JailerSettings, Limits};
use self::snapshot_file::Manifest;
use self::vmm::{Live, Vmms, host_error, io_error};
use self::vsock::GuestConnection;
use crate::encoding::Encoding;
use crate::error::same_revision;
use crate::{
    Balloon, Capability, Compression, ConsolePiece, Driver, DriverError, DriverKind, Forks, GuestStream,
    Lacking, Migration, SnapshotOptions, SnapshotRef, Vm, VmExit, VmSpec, VmState, run_files,
};
use mvm_host::{Host, JAIL, LocalHost, Operation};

/// A follower that is further behind looks at the whole list anyway.
const EXITS_KEPT: usize = 1024;

/// Runs microVMs with Firecracker.
#[derive(Debug)]
pub struct FirecrackerDriver<H: Host = LocalHost> {
    vmms: Arc<Vmms<H>>,
}

impl FirecrackerDriver<LocalHost> {
    /// The driver of this data directory, with the program that the settings name or `PATH` has.
    pub fn open(data_dir: &Path, settings: FirecrackerSettings) -> Result<Self, FirecrackerUnavailable> {
        Self::with_host(LocalHost::new(data_dir), settings)
    }
}

impl<H: Host> FirecrackerDriver<H> {
    pub fn with_host(host: H, settings: FirecrackerSettings) -> Result<Self, FirecrackerUnavailable> {
        let (program, _) = settings::find(&settings, std::env::var_os("PATH").as_deref())?;
        let vmms = Arc::new(Vmms::new(host, settings, program, broadcast::Sender::new(EXITS_KEPT)));
        Ok(Self { vmms })
    }

    /// Behind a jailer that leaves a daemon the console is in the jail.
    fn console_name(&self) -> String {
        let daemon = self.vmms.settings.jailer.as_ref().is_some_and(|jailer| jailer.daemonize);
        if daemon { format!("{JAIL}/{CONSOLE}") } else { CONSOLE.to_owned() }
    }

    /// What a live VMM runs; nothing when it was never told to run anything.
    async fn vm(&self, live: &Live, action: &'static str) -> Result<Option<Vm>, DriverError> {
        let instance = &live.vmm.instance;
        if self.vmms.recall(&live.vmm).writing {
            return Ok(Some(running(live, VmState::Paused)));
        }
        let mut client = self.vmms.connect(live, action).await?;
        let described = self.vmms.describe(&mut client, instance, action).await?;
        if described.state.is_some() {
            self.vmms.note(&live.vmm, |known| known.state = described.state);
        }
        Ok(described.state.map(|state| running(live, state)))
    }

    /// What is in the way of starting a VM: one that runs the same is what was asked for, and one that was left behind
    /// half started goes.
    async fn already_there(&self, spec: &VmSpec, action: &'static str) -> Result<bool, DriverError> {
        let Some(live) = self.vmms.find(&spec.instance, action).await? else { return Ok(false) };
        let silent = match self.vm(&live, action).await {
            Ok(Some(vm)) => return same_revision(&spec.instance, vm.revision, spec.revision).map(|()| true),
            Ok(None) => true,
            // Started, and ended or killed before its socket was there.
            Err(DriverError::Io { cause, .. }) => cause.kind() == std::io::ErrorKind::NotFound,
            Err(error) => return Err(error),
        };
        if silent {
            self.vmms.end(&live, action).await?;
        }
        Ok(false)
    }
    /// A paused VM from a snapshot: its own, or a template's. Firecracker maps memory privately either way.
    async fn load(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let (instance, saved) = (&spec.instance, &snapshot.instance);
        same_revision(instance, snapshot.revision, spec.revision)?;
        if self.already_there(spec, action).await? {
            return Ok(());
        }
        let fault = |cause| io_error(saved, action, cause);
        let host = &*self.vmms.host;
        let manifest = Manifest::read(host, saved).await.map_err(fault)?;
        let Some(manifest) = manifest.filter(|manifest| manifest.reference() == *snapshot) else {
            return Err(DriverError::NoSnapshot { instance: saved.clone(), digest: snapshot.digest });
        };
        let damage = manifest.damage(host, self.vmms.settings.verify_memory).await;
        if let Some(reason) = damage.map_err(fault)? {
            return Err(DriverError::Unusable { instance: saved.clone(), reason });
        }
        self.vmms.launch(spec, &Origin::Snapshot(&manifest), action).await
    }
}

const fn lacking(capability: Capability, reason: &'static str) -> Lacking {
    Lacking { driver: DriverKind::Firecracker, capability, reason }
}

const NO_COMPRESSION: Lacking = lacking(
    Capability::Compression,
    "Firecracker maps a guest's memory from its file, which has to lie there as it is",
);

const NO_ENCRYPTION: Lacking = lacking(
    Capability::Encryption,
    "Firecracker writes memory to a file by itself, in clear: there is no stream to encrypt",
);

const NO_MIGRATION: Lacking = lacking(
    Capability::Migration,
    "what Firecracker saved can be restored on its own node only; stop the instance, and start it elsewhere",
);

fn running(live: &Live, state: VmState) -> Vm {
    Vm { instance: live.vmm.instance.clone(), revision: live.file.revision, state }
}

impl<H: Host> Driver for FirecrackerDriver<H> {
    fn kind(&self) -> DriverKind {
        DriverKind::Firecracker
    }

    async fn list(&self) -> Result<Vec<Vm>, DriverError> {
        let all = self.vmms.all().await.map_err(|cause| DriverError::List { cause })?;
        let asked = all.iter().map(async |live| (live, self.vm(live, "list").await));
        let (mut found, mut silent) = (Vec::new(), Vec::new());
        for (live, answer) in join_all(asked).await {
            match answer {
                Ok(vm) => found.extend(vm),
                Err(error) => silent.push((live, error)),
            }
        }
        if silent.is_empty() {
            return Ok(found);
        }
        // A VM that can't be asked is a VM still, whatever is in the way; only one that ended meanwhile is none. Where
        // even that can't be found out, it did not.
        let there = self.vmms.host.vmms().await.ok();
        for (live, error) in silent {
            let gone = there.as_ref().is_some_and(|there| !there.contains(&live.vmm));
            match self.vmms.assumed(&live.vmm, &error).filter(|_| !gone) {
                Some(state) => {
                    tracing::warn!(error = %mvm_proto::text::chain(&error), "a VMM does not answer");
                    found.push(running(live, state));
                }
                None => tracing::debug!(error = %mvm_proto::text::chain(&error), "a VMM is passed over"),
            }
        }
        found.sort_by(|a, b| a.instance.cmp(&b.instance));
        Ok(found)
    }

    async fn instances(&self) -> Result<Vec<InstanceId>, DriverError> {
        self.vmms.host.run_dirs().await.map_err(|cause| DriverError::List { cause })
    }

    async fn adopt(&self, instance: &InstanceId) -> Result<Option<Vm>, DriverError> {
        let Some(live) = self.vmms.find(instance, "adopt").await? else { return Ok(None) };
        self.vm(&live, "adopt").await
    }

    async fn boot(&self, spec: &VmSpec) -> Result<(), DriverError> {
        if self.already_there(spec, "boot").await? {
            return Ok(());
        }
        self.vmms.launch(spec, &Origin::Image, "boot").await
    }

    async fn pause(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.vmms.pause(instance).await
    }

    async fn resume(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.vmms.resume(instance).await
    }

    async fn snapshot(
        &self,
        instance: &InstanceId,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        if options.policy.encryption {
            return Err(NO_ENCRYPTION.into());
        }
        self.vmms.snapshot(instance).await
    }

    /// Does nothing: Firecracker writes a snapshot in one request that nothing interrupts.
    async fn stop_snapshot(&self, _instance: &InstanceId) -> Result<(), DriverError> {
        Ok(())
    }

    async fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<(), DriverError> {
        // All that it saves is in clear.
        if let Some(reason) = options.refuses(&Encoding::default()) {
            return Err(DriverError::Unusable { instance: spec.instance.clone(), reason });
        }
        self.load(spec, snapshot, "restore").await
    }

    async fn discard_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.vmms.discard(instance).await
    }

    async fn stop(&self, instance: &InstanceId, grace: Duration) -> Result<(), DriverError> {
        if let Ok((live, mut client, VmState::Running, _)) = self.vmms.running(instance, "stop").await
            && let Ok(keys) = Action::SendCtrlAltDel.request()
            && client.send(&keys, self.vmms.settings.limits.call).await.is_ok()
        {
            // Whether it ended or not, what is left is ended next.
            let _ = tokio::time::timeout(grace, self.vmms.host.wait_end(&live.vmm)).await;
        }
        self.kill(instance).await
    }

    async fn kill(&self, instance: &InstanceId) -> Result<(), DriverError> {
        match self.vmms.find(instance, "kill").await? {
            Some(live) => self.vmms.end(&live, "kill").await,
            None => {
                let kept = self.vmms.host.run_dirs().await;
                let kept = kept.map_err(|cause| host_error(instance, "kill", cause))?;
                if kept.contains(instance) {
                    self.vmms.remove_leftovers(instance, "kill").await
                } else {
                    Ok(())
                }
            }
        }
    }

    async fn remove(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.kill(instance).await?;
        let remove = Operation::RemoveRunDir { instance: instance.clone() };
        self.vmms.perform(instance, "remove", remove).await.map(|_| ())
    }

    async fn guest(&self, instance: &InstanceId) -> Result<GuestStream, DriverError> {
        let none = || DriverError::NoVm { instance: instance.clone(), action: "reach" };
        let live = self.vmms.find(instance, "reach").await?.ok_or_else(none)?;
        let vsock = self.vmms.dial(&live, VSOCK_SOCKET);
        Ok(Box::new(GuestConnection::new(vsock, mvm_proto::guest::VSOCK_PORT)))
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        self.vmms.exits.subscribe()
    }

    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        self.vmms.cpu_time(instance)
    }

    async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, DriverError> {
        let read = run_files::log_tail(&*self.vmms.host, instance, &self.console_name(), max_bytes).await;
        read.map_err(|cause| io_error(instance, "read the console of", cause))
    }

    async fn console_from(
        &self,
        instance: &InstanceId,
        from: u64,
        max_bytes: usize,
    ) -> Result<ConsolePiece, DriverError> {
        let name = self.console_name();
        let read = run_files::log_from(&*self.vmms.host, instance, &name, from, max_bytes).await;
        read.map_err(|cause| io_error(instance, "read the console of", cause))
    }

    async fn console_since(&self, instance: &InstanceId, since: Timestamp) -> Result<u64, DriverError> {
        let found = run_files::log_since(&*self.vmms.host, instance, &self.console_name(), since).await;
        found.map_err(|cause| io_error(instance, "read the console of", cause))
    }

    fn forks(&self) -> Result<&dyn Forks, Lacking> {
        Ok(self)
    }

    fn balloon(&self) -> Result<&dyn Balloon, Lacking> {
        Ok(self)
    }

    fn compression(&self) -> Result<&dyn Compression, Lacking> {
        Err(NO_COMPRESSION)
    }

    fn encryption(&self) -> Result<(), Lacking> {
        Err(NO_ENCRYPTION)
    }

    fn migration(&self) -> Result<&dyn Migration, Lacking> {
        Err(NO_MIGRATION)
    }
}

impl<H: Host> Forks for FirecrackerDriver<H> {
    fn fork<'a>(
        &'a self,
        spec: &'a VmSpec,
        template: &'a SnapshotRef,
    ) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(self.load(spec, template, "fork"))
    }
}
