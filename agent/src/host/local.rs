//! The operations, carried out by this process itself.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mvm_proto::InstanceId;
use tokio::sync::watch;

use super::files::{self, failed};
use super::{Host, HostError, Operation, Outcome, ProcessEnd, ProcessIdentity, SpawnVmm, VmmProcess};
use super::{jail, process, spawn};

/// Run directories of instances, below the data directory.
const VMS_DIR: &str = "vms";

/// Acts with the rights that this process has.
#[derive(Debug)]
pub struct LocalHost {
    vms_dir: PathBuf,
    /// What this process started: their exit codes come to their parent only.
    own: Mutex<HashMap<InstanceId, Own>>,
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
        Self { vms_dir: data_dir.join(VMS_DIR), own: Mutex::default() }
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

    /// Never awaits: whoever asked may go away, and then must find either no process or one that is all there.
    fn spawn(&self, vmm: &SpawnVmm) -> Result<Outcome, HostError> {
        let dir = self.run_dir(&vmm.instance);
        files::inside(&dir, &vmm.log)?;
        // Held over looking and starting, so that two that ask at once start one.
        let mut own = self.own();
        if let Some(living) = self.living(&vmm.instance)? {
            return Ok(Outcome::Process(living.process));
        }
        if !dir.is_dir() {
            return Err(HostError::Refused(format!("{} has no run directory", vmm.instance)));
        }
        let child =
            spawn::detached(&vmm.program, &vmm.args, &dir, &vmm.log).map_err(|cause| match cause.kind() {
                io::ErrorKind::NotFound => HostError::ProgramMissing { program: vmm.program.clone() },
                _ => failed("start", &vmm.program)(cause),
            })?;
        // A child keeps its pid until it is waited for, so this is sure to be it.
        let identity = process::identify(child.id()).map_err(failed("identify", &vmm.program))?;
        let process = identity.ok_or_else(|| HostError::Refused("the VMM has no process".to_owned()))?;
        let ended = reap(child, &process);
        own.insert(vmm.instance.clone(), Own { process: process.clone(), ended });
        Ok(Outcome::Process(process))
    }

    fn remove_run_dir(&self, instance: &InstanceId) -> Result<(), HostError> {
        self.unless_living(instance)?;
        self.own().remove(instance);
        files::remove(&self.run_dir(instance))
    }

    fn unless_living(&self, instance: &InstanceId) -> Result<(), HostError> {
        let Some(living) = self.living(instance)? else { return Ok(()) };
        let pid = living.process.pid;
        Err(HostError::Refused(format!("process {pid} of {instance} still runs in its directory")))
    }
}

/// Waits for a child in the background, so that none stays behind as a zombie.
fn reap(mut child: Child, process: &ProcessIdentity) -> watch::Receiver<Option<ExitStatus>> {
    let (tell, ended) = watch::channel(None);
    let handle = process::open(process);
    tokio::spawn(async move {
        if let Ok(Some(handle)) = handle
            && let Err(cause) = process::ended(handle).await
        {
            tracing::warn!(error = %cause, "could not wait for a VMM's end by its handle");
        }
        // Returns at once when the handle said so; else in a thread, which costs more and is as sure.
        let status = match child.try_wait() {
            Ok(Some(status)) => Some(status),
            _ => tokio::task::spawn_blocking(move || child.wait().ok()).await.ok().flatten(),
        };
        tell.send_replace(status);
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
            Operation::SpawnVmm(vmm) => return self.spawn(vmm),
            Operation::EndProcess { process, signal } => {
                let attempt = format!("end process {}", process.pid);
                let there =
                    process::signal(process, *signal).map_err(|cause| HostError::Io { attempt, cause })?;
                tracing::debug!(pid = process.pid, ?signal, there, "signalled");
            }
            Operation::RemoveRunDir { instance } => self.remove_run_dir(instance)?,
            Operation::MakeRunDir { instance } => {
                let dir = self.run_dir(instance);
                blocking(move || files::make_run_dir(&dir)).await?;
            }
            Operation::RemoveFile { instance, name } => {
                let path = files::inside(&self.run_dir(instance), name)?;
                blocking(move || files::remove(&path)).await?;
            }
            Operation::WriteFile { instance, name, text } => {
                let (path, text) = (files::inside(&self.run_dir(instance), name)?, text.clone());
                blocking(move || files::write(&path, &text)).await?;
            }
            Operation::MakeDir { instance, name } => {
                let path = files::inside(&self.run_dir(instance), name)?;
                blocking(move || files::make_dir(&path)).await?;
            }
            Operation::Rename { instance, from, to } => {
                let dir = self.run_dir(instance);
                let (from, to) = (files::inside(&dir, from)?, files::inside(&dir, to)?);
                blocking(move || files::rename(&from, &to)).await?;
            }
            Operation::TrimLog { instance, name, max_bytes } => {
                let (path, max_bytes) = (files::inside(&self.run_dir(instance), name)?, *max_bytes);
                blocking(move || files::trim_log(&path, max_bytes)).await?;
            }
            Operation::LinkFile { instance, source, name } => {
                let (path, source) = (files::inside(&self.run_dir(instance), name)?, source.clone());
                blocking(move || files::link(&source, &path)).await?;
            }
            Operation::MakeJail { jail, files } => {
                self.unless_living(&jail.instance)?;
                let (jail, dir, files) = (jail.clone(), self.run_dir(&jail.instance), files.clone());
                blocking(move || jail::make(&jail, &dir, &files)).await?;
            }
            Operation::ShareWithJail { jail, files } => {
                let (jail, files) = (jail.clone(), files.clone());
                blocking(move || jail::share(&jail, &files)).await?;
            }
            Operation::UnshareFromJail { jail, names } => {
                let (jail, names) = (jail.clone(), names.clone());
                blocking(move || jail::unshare(&jail, &names)).await?;
            }
            Operation::RemoveJail { jail } => {
                self.unless_living(&jail.instance)?;
                let (jail, dir) = (jail.clone(), self.run_dir(&jail.instance));
                blocking(move || jail::remove(&jail, &dir)).await?;
            }
            Operation::MakeDisk { instance, name, size_mib } => {
                let (path, size_mib) = (files::inside(&self.run_dir(instance), name)?, *size_mib);
                blocking(move || files::make_disk(&path, size_mib)).await?;
            }
        }
        Ok(Outcome::Done)
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        self.scan()
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        let entries = match fs::read_dir(&self.vms_dir) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(cause) => return Err(failed("read", &self.vms_dir)(cause)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed("read", &self.vms_dir))?;
            found.extend(entry.file_name().to_str().and_then(|name| name.parse().ok()));
        }
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
}
