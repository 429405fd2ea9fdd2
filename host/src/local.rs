//! The operations, carried out by this process itself.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mvm_proto::InstanceId;
use rustix::process::{WaitOptions, waitpid};
use tokio::sync::watch;

use super::access::{self, Access};
use super::born::Born;
use super::cgroup::CgroupSettings;
use super::files::{self, Dir, FILE_MODE, failed};
use super::groups::Groups;
use super::spawn::{self, Launch};
use super::{Host, HostError, Operation, Outcome, ProcessEnd, ProcessIdentity, SpawnVmm, TAP_FD, VmmProcess};
use super::{jail, memory, process};

/// Run directories of instances, below the data directory.
pub(super) const VMS_DIR: &str = "vms";

/// Acts with the rights that this process has.
#[derive(Debug)]
pub struct LocalHost {
    vms_dir: PathBuf,
    /// What this process started: their exit codes come to their parent only.
    own: Mutex<HashMap<InstanceId, Own>>,
    groups: Arc<Groups>,
    #[cfg(feature = "network")]
    fabric: super::fabric::Fabric,
}

/// A child of this process, and how it ended once it did.
#[derive(Debug)]
struct Own {
    process: ProcessIdentity,
    ended: watch::Receiver<Option<ExitStatus>>,
}

impl LocalHost {
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self {
            vms_dir: data_dir.join(VMS_DIR),
            own: Mutex::default(),
            groups: Arc::default(),
            #[cfg(feature = "network")]
            fabric: super::fabric::Fabric::default(),
        }
    }

    /// The same with control groups.
    #[must_use]
    pub fn with_groups(self, settings: CgroupSettings) -> Self {
        let groups = Groups::new(settings, self.vms_dir.clone());
        Self { groups: Arc::new(groups), ..self }
    }

    fn own(&self) -> MutexGuard<'_, HashMap<InstanceId, Own>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scan(&self) -> Result<Vec<VmmProcess>, HostError> {
        process::scan(&self.vms_dir).map_err(failed("look for processes in", &self.vms_dir))
    }

    fn living(&self, instance: &InstanceId) -> Result<Option<VmmProcess>, HostError> {
        Ok(self.scan()?.into_iter().find(|vmm| vmm.instance == *instance))
    }

    /// Whether this process started it: then its end comes here first.
    pub(super) fn is_child(&self, vmm: &VmmProcess) -> bool {
        self.own().get(&vmm.instance).is_some_and(|own| own.process == vmm.process)
    }

    /// Whether this very process lives. One that ended and that nobody has waited for yet does not.
    pub(super) fn is_there(&self, process: &ProcessIdentity) -> Result<bool, HostError> {
        process::lives(process).map_err(|cause| {
            let attempt = format!("look at process {}", process.pid);
            HostError::Io { attempt, cause }
        })
    }

    /// Whether looking for VMMs of this data directory finds it.
    pub(super) fn is_vmm(&self, process: &ProcessIdentity) -> Result<bool, HostError> {
        Ok(self.scan()?.iter().any(|vmm| vmm.process == *process))
    }

    /// The TAP that a VMM is about to be given. One that lives has its own already.
    async fn tap_for(&self, vmm: &SpawnVmm) -> Result<Option<OwnedFd>, HostError> {
        let Some(name) = &vmm.tap else { return Ok(None) };
        if self.living(&vmm.instance)?.is_some() {
            return Ok(None);
        }
        #[cfg(feature = "network")]
        return self.fabric.attach(name).await.map(Some);
        #[cfg(not(feature = "network"))]
        Err(HostError::Refused(format!("this program was built without networks, and can't open {name}")))
    }

    /// Never awaits: whoever asked may go away, and then must find either no process or one that is all there.
    fn spawn(&self, vmm: &SpawnVmm, tap: Option<OwnedFd>) -> Result<Outcome, HostError> {
        // Held over looking and starting, so that two that ask at once start one.
        let mut own = self.own();
        if let Some(living) = self.living(&vmm.instance)? {
            return Ok(Outcome::Process(living.process));
        }
        let dir = match self.open_run_dir(&vmm.instance) {
            Err(error) if error.is_not_found() => {
                return Err(HostError::Refused(format!("{} has no run directory", vmm.instance)));
            }
            dir => dir?,
        };
        let (log_dir, log) = dir.place(&vmm.log)?;
        let log = log_dir.open_log(log, FILE_MODE)?;
        let group = vmm.group.as_ref().map(|group| self.groups.birthplace(group)).transpose()?.flatten();
        let launched = spawn::launch(&Launch {
            program: &vmm.program,
            args: &vmm.args,
            dir: &self.run_dir(&vmm.instance),
            log,
            confine: vmm.confine.as_ref(),
            inherit: tap.map(|tap| (tap, TAP_FD)).into_iter().collect(),
            cgroup: group.as_ref().map(std::os::fd::AsFd::as_fd),
        })?;
        for weaker in &launched.weaker {
            tracing::warn!(instance = %vmm.instance, %weaker, "a VMM is confined less than it could be");
        }
        let child = launched.child;
        // A child keeps its pid until it is waited for, so this is sure to be it.
        let pid = child.pid.as_raw_nonzero().get().unsigned_abs();
        let identity = process::identify(pid).map_err(failed("identify", &vmm.program))?;
        let process = identity.ok_or_else(|| HostError::Refused("the VMM has no process".to_owned()))?;
        let ended = reap(child);
        own.insert(vmm.instance.clone(), Own { process: process.clone(), ended });
        Ok(Outcome::Process(process))
    }

    fn remove_run_dir(&self, instance: &InstanceId) -> Result<(), HostError> {
        self.unless_living(instance)?;
        self.own().remove(instance);
        files::run::remove(&self.vms_dir, instance)
    }

    fn open_run_dir(&self, instance: &InstanceId) -> Result<Dir, HostError> {
        files::run::open(&self.vms_dir, instance)
    }

    /// File work in the run directory of an instance.
    async fn in_run_dir(
        &self,
        instance: &InstanceId,
        work: impl FnOnce(&Dir) -> Result<(), HostError> + Send + 'static,
    ) -> Result<(), HostError> {
        let (vms_dir, instance) = (self.vms_dir.clone(), instance.clone());
        blocking(move || work(&files::run::open(&vms_dir, &instance)?)).await
    }

    fn unless_living(&self, instance: &InstanceId) -> Result<(), HostError> {
        let Some(living) = self.living(instance)? else { return Ok(()) };
        let pid = living.process.pid;
        Err(HostError::Refused(format!("process {pid} of {instance} still runs in its directory")))
    }
}

/// Waits for a child in the background, so that none stays behind as a zombie.
fn reap(child: Born) -> watch::Receiver<Option<ExitStatus>> {
    let (tell, ended) = watch::channel(None);
    tokio::spawn(async move {
        let Born { pid, pidfd } = child;
        if let Err(cause) = process::ended(pidfd).await {
            tracing::warn!(error = %cause, "could not wait for a VMM's end by its handle");
        }
        // Returns at once when the handle said so; else in a thread, which costs more and is as sure.
        let status = match waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => Some(status),
            _ => {
                let wait = move || waitpid(Some(pid), WaitOptions::empty()).ok().flatten();
                tokio::task::spawn_blocking(wait).await.ok().flatten().map(|(_, status)| status)
            }
        };
        tell.send_replace(status.map(|status| ExitStatus::from_raw(status.as_raw())));
    });
    ended
}

/// File work in a thread for it: some of it waits for the disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(cause) => Err(HostError::Refused(format!("the work was given up: {cause}"))),
    }
}

impl Host for LocalHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        match operation {
            Operation::SpawnVmm(vmm) => {
                let tap = self.tap_for(vmm).await?;
                return self.spawn(vmm, tap);
            }
            Operation::EndProcess { process, signal } => {
                let attempt = format!("end process {}", process.pid);
                let there =
                    process::signal(process, *signal).map_err(|cause| HostError::Io { attempt, cause })?;
                tracing::debug!(pid = process.pid, ?signal, there, "signalled");
            }
            Operation::RemoveRunDir { instance } => self.remove_run_dir(instance)?,
            Operation::MakeRunDir { instance } => {
                let (vms_dir, instance) = (self.vms_dir.clone(), instance.clone());
                blocking(move || files::run::make(&vms_dir, &instance)).await?;
            }
            Operation::RemoveFile { instance, name } => {
                let (vms_dir, instance, name) = (self.vms_dir.clone(), instance.clone(), name.clone());
                blocking(move || files::run::remove_file(&vms_dir, &instance, &name)).await?;
            }
            Operation::WriteFile { instance, name, text } => {
                let (name, text) = (name.clone(), text.clone());
                self.in_run_dir(instance, move |dir| files::run::write(dir, &name, &text)).await?;
            }
            Operation::MakeDir { instance, name } => {
                let name = name.clone();
                self.in_run_dir(instance, move |dir| files::run::make_dir(dir, &name)).await?;
            }
            Operation::Rename { instance, from, to } => {
                let (from, to) = (from.clone(), to.clone());
                self.in_run_dir(instance, move |dir| files::run::rename(dir, &from, &to)).await?;
            }
            Operation::TrimLog { instance, name, max_bytes } => {
                let (name, max_bytes) = (name.clone(), *max_bytes);
                self.in_run_dir(instance, move |dir| files::run::trim_log(dir, &name, max_bytes)).await?;
            }
            Operation::LinkFile { instance, source, name } => {
                let (source, name) = (source.clone(), name.clone());
                self.in_run_dir(instance, move |dir| files::run::link(dir, &source, &name)).await?;
            }
            Operation::MakeJail { jail, files } => {
                self.unless_living(&jail.instance)?;
                let (jail, dir, files) = (jail.clone(), self.run_dir(&jail.instance), files.clone());
                blocking(move || jail::make(&jail, &dir, &files)).await?;
            }
            Operation::ShareWithJail { jail, files } => {
                let (jail, dir, files) = (jail.clone(), self.run_dir(&jail.instance), files.clone());
                blocking(move || jail::share(&jail, &dir, &files)).await?;
            }
            Operation::UnshareFromJail { jail, names } => {
                let (jail, dir, names) = (jail.clone(), self.run_dir(&jail.instance), names.clone());
                blocking(move || jail::unshare(&jail, &dir, &names)).await?;
            }
            Operation::RemoveJail { jail } => {
                self.unless_living(&jail.instance)?;
                let (jail, dir) = (jail.clone(), self.run_dir(&jail.instance));
                blocking(move || jail::remove(&jail, &dir)).await?;
            }
            Operation::MakeDisk { instance, name, size_mib } => {
                let (name, size_mib) = (name.clone(), *size_mib);
                self.in_run_dir(instance, move |dir| files::run::make_disk(dir, &name, size_mib)).await?;
            }
            Operation::DigHoles { instance, name } => {
                let name = name.clone();
                self.in_run_dir(instance, move |dir| files::run::dig_holes(dir, &name)).await?;
            }
            Operation::ShareMemory { instance, template, memory, name } => {
                let template = self.open_run_dir(template)?;
                let (memory, name) = (memory.clone(), name.clone());
                let share = move |dir: &Dir| files::run::share_memory(dir, &template, &memory, &name);
                self.in_run_dir(instance, share).await?;
            }
            Operation::MeasureDisk { instance } => {
                let (vms_dir, instance) = (self.vms_dir.clone(), instance.clone());
                return blocking(move || files::run::measure(&vms_dir, &instance)).await.map(Outcome::Disk);
            }
            Operation::MeasureMemory { instances } => {
                let (vms_dir, instances) = (self.vms_dir.clone(), instances.clone());
                return blocking(move || memory::measure(&vms_dir, &instances)).await.map(Outcome::Memory);
            }
            Operation::AdmitVmm { instance, user, files } => {
                let (user, files) = (*user, files.clone());
                self.in_run_dir(instance, move |dir| files::run::admit(dir, user, &files)).await?;
            }
            Operation::EnsureTenantGroup { .. }
            | Operation::RemoveTenantGroup { .. }
            | Operation::EnsureGroup { .. }
            | Operation::LimitIo { .. }
            | Operation::RemoveGroup { .. }
            | Operation::LookAtGroups => {
                let (groups, operation) = (Arc::clone(&self.groups), operation.clone());
                return blocking(move || groups.perform(&operation)).await;
            }
            #[cfg(feature = "network")]
            network => return self.fabric.perform(network).await,
            #[cfg(not(feature = "network"))]
            _ => return Err(HostError::Refused("this program was built without networks".to_owned())),
        }
        Ok(Outcome::Done)
    }

    /// Beside everything else: how long a walk over `/proc` takes is up to everyone who has processes here.
    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        let vms_dir = self.vms_dir.clone();
        let scanned = tokio::task::spawn_blocking(move || process::scan(&vms_dir)).await;
        let scanned = scanned.unwrap_or_else(|cause| Err(std::io::Error::other(cause)));
        scanned.map_err(failed("look for processes in", &self.vms_dir))
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        let vms = match Dir::open_root(&self.vms_dir) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            vms => vms?,
        };
        let names = vms.list()?;
        let mut found: Vec<_> =
            names.iter().filter_map(|name| name.to_str().and_then(|name| name.parse().ok())).collect();
        found.sort();
        Ok(found)
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.vms_dir.join(instance.as_str())
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        let (instance, process) = (vmm.instance.clone(), vmm.process.clone());
        let own = self.own().get(&instance).filter(|own| own.process == process).map(|own| own.ended.clone());
        let mut end = ProcessEnd { instance, process, exit_code: None, signal: None };
        if let Some(mut ended) = own {
            // An error means that the waiting task is gone with its runtime, and so is whoever asked.
            if let Ok(status) = ended.wait_for(Option::is_some).await {
                end.exit_code = status.and_then(|status| status.code());
                end.signal = status.and_then(|status| status.signal());
            }
            return Ok(end);
        }
        let attempt = || format!("wait for process {}", vmm.process.pid);
        let handle =
            process::open(&vmm.process).map_err(|cause| HostError::Io { attempt: attempt(), cause })?;
        if let Some(handle) = handle {
            process::ended(handle).await.map_err(|cause| HostError::Io { attempt: attempt(), cause })?;
        }
        Ok(end)
    }

    async fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> Result<Option<File>, HostError> {
        access::open(&self.run_dir(instance), name, access)
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
        access::dial(&self.run_dir(instance), name)
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        access::names(&self.run_dir(instance))
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        Ok(jail::recorded_jail(&self.run_dir(instance)))
    }
}
