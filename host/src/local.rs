//! The operations, carried out by this process itself.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;

use mvm_proto::InstanceId;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::process::{WaitOptions, waitpid};
use tokio::sync::watch;

use super::access::{self, Access};
use super::cgroup::CgroupSettings;
use super::data_dir::DataDir;
use super::files::{self, Dir, FILE_MODE, failed};
use super::groups::Groups;
use super::images::Images;
use super::remote::Policy;
use super::spawn::{self, Launch};
use super::spawn_into::Child;
use super::{Host, HostError, Operation, Outcome, ProcessEnd, ProcessIdentity, SpawnVmm, TAP_FD, VmmProcess};
use super::{jail, memory, process};

/// Acts with the rights that this process has.
#[derive(Debug)]
pub struct LocalHost {
    inner: Arc<Inner>,
    #[cfg(feature = "network")]
    fabric: super::fabric::Fabric,
}

/// What work in other threads needs, too.
#[derive(Debug)]
struct Inner {
    data: DataDir,
    images: Images,
    /// Whose memory may be a template's, from first to last: users that VMMs run as. Absent: anyone's, where VMMs run as
    /// this process does.
    vmm_users: Option<Vec<(u32, u32)>>,
    /// What this process started: their exit codes come to their parent only.
    own: Mutex<HashMap<InstanceId, Own>>,
    starting: Starting,
    groups: Groups,
}

/// A child of this process, and how it ended once it did.
#[derive(Debug)]
struct Own {
    process: ProcessIdentity,
    ended: watch::Receiver<Option<ExitStatus>>,
}

/// Instances whose VMM is being started: each by one thread at a time.
#[derive(Debug, Default)]
struct Starting {
    instances: Mutex<BTreeSet<InstanceId>>,
    done: Condvar,
}

struct Turn<'a> {
    starting: &'a Starting,
    instance: &'a InstanceId,
}

impl Starting {
    /// Waits until no other thread starts this one.
    fn turn<'a>(&'a self, instance: &'a InstanceId) -> Turn<'a> {
        let mut instances = self.instances.lock();
        self.done.wait_while(&mut instances, |instances| instances.contains(instance));
        instances.insert(instance.clone());
        Turn { starting: self, instance }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.starting.instances.lock().remove(self.instance);
        self.starting.done.notify_all();
    }
}

impl LocalHost {
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self::with(DataDir::named(data_dir), Images::Named, None, Groups::default())
    }

    /// The same with control groups.
    #[must_use]
    pub fn with_groups(data_dir: &Path, settings: CgroupSettings) -> Self {
        let data = DataDir::named(data_dir);
        let groups = Groups::new(settings, data.vms_path());
        Self::with(data, Images::Named, None, groups)
    }

    /// A helper's: it holds its directories open from here on, and gives VMMs no images but its agent's.
    pub(super) fn of_helper(policy: &Policy) -> Result<Self, HostError> {
        let data = DataDir::hold(&policy.data_dir)?;
        let images = Images::hold(&policy.images_dir, policy.agent_uid)?;
        let vmm_users = policy.demand.map(|_| policy.vmm_ids.clone());
        let groups = match &policy.groups {
            Some(settings) => Groups::new(settings.clone(), data.vms_path()),
            None => Groups::default(),
        };
        Ok(Self::with(data, images, vmm_users, groups))
    }

    fn with(data: DataDir, images: Images, vmm_users: Option<Vec<(u32, u32)>>, groups: Groups) -> Self {
        let (own, starting) = (Mutex::default(), Starting::default());
        Self {
            inner: Arc::new(Inner { data, images, vmm_users, own, starting, groups }),
            #[cfg(feature = "network")]
            fabric: super::fabric::Fabric::default(),
        }
    }

    /// Work that may wait for a disk or a program, in a thread for it. It goes on to its end even when the caller
    /// does not wait any more.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, HostError> + Send + 'static,
    ) -> Result<T, HostError> {
        let inner = Arc::clone(&self.inner);
        match tokio::task::spawn_blocking(move || work(&inner)).await {
            Ok(done) => done,
            Err(cause) => Err(HostError::Refused(format!("the task panicked: {cause}"))),
        }
    }

    /// File work in the run directory of an instance.
    async fn in_run_dir(
        &self,
        instance: &InstanceId,
        work: impl FnOnce(&Dir) -> Result<(), HostError> + Send + 'static,
    ) -> Result<(), HostError> {
        let instance = instance.clone();
        self.blocking(move |inner| work(&inner.data.run(&instance)?)).await
    }

    /// Whether this process started it: then its end comes here first.
    pub(super) fn is_child(&self, vmm: &VmmProcess) -> bool {
        self.inner.own().get(&vmm.instance).is_some_and(|own| own.process == vmm.process)
    }

    /// Whether this is a VMM of this data directory, as found by looking, or a process that is gone.
    pub(super) async fn is_vmm_or_gone(&self, process: &ProcessIdentity) -> Result<bool, HostError> {
        let process = process.clone();
        self.blocking(move |inner| inner.is_vmm_or_gone(&process)).await
    }

    /// The TAP that a VMM is about to be given. One that lives has its own already.
    async fn tap_for(&self, vmm: &SpawnVmm) -> Result<Option<OwnedFd>, HostError> {
        let Some(name) = &vmm.tap else { return Ok(None) };
        let instance = vmm.instance.clone();
        if self.blocking(move |inner| inner.living(&instance)).await?.is_some() {
            return Ok(None);
        }
        #[cfg(feature = "network")]
        return self.fabric.attach(name).await.map(Some);
        #[cfg(not(feature = "network"))]
        Err(HostError::Refused(format!("this program was built without networks, and can't open {name}")))
    }
}

impl Inner {
    fn own(&self) -> MutexGuard<'_, HashMap<InstanceId, Own>> {
        self.own.lock()
    }

    fn scan(&self) -> Result<Vec<VmmProcess>, HostError> {
        process::scan(&self.data).map_err(failed("look for processes in", &self.data.vms_path()))
    }

    fn living(&self, instance: &InstanceId) -> Result<Option<VmmProcess>, HostError> {
        Ok(self.scan()?.into_iter().find(|vmm| vmm.instance == *instance))
    }

    fn unless_living(&self, instance: &InstanceId) -> Result<(), HostError> {
        let Some(living) = self.living(instance)? else { return Ok(()) };
        let pid = living.process.pid;
        Err(HostError::Refused(format!("process {pid} of {instance} still runs in its directory")))
    }

    fn is_vmm_or_gone(&self, process: &ProcessIdentity) -> Result<bool, HostError> {
        // While it ends it has no command line to be known by any more.
        if self.own().values().any(|own| own.process == *process) {
            return Ok(true);
        }
        let is_there = || {
            process::lives(process).map_err(|cause| {
                let attempt = format!("look at process {}", process.pid);
                HostError::Io { attempt, cause }
            })
        };
        if !is_there()? || self.scan()?.iter().any(|vmm| vmm.process == *process) {
            return Ok(true);
        }
        // It may have ended between the two looks.
        Ok(!is_there()?)
    }

    /// The caller may go away, and must then find either no process or a complete one.
    fn spawn(&self, vmm: &SpawnVmm, tap: Option<OwnedFd>) -> Result<Outcome, HostError> {
        // Held over looking and starting, so that two that ask at once start one.
        let _turn = self.starting.turn(&vmm.instance);
        if let Some(living) = self.living(&vmm.instance)? {
            return Ok(Outcome::Process(living.process));
        }
        let dir = match self.data.run(&vmm.instance) {
            Err(error) if error.is_not_found() => {
                return Err(HostError::Refused(format!("{} has no run directory", vmm.instance)));
            }
            dir => dir?,
        };
        jail::clear_for_jailer(&self.data, &vmm.instance, &vmm.args)?;
        let images = vmm.confine.iter().flat_map(|confine| &confine.images);
        let images = images.map(|image| self.images.pin(image)).collect::<Result<_, _>>()?;
        let (log_dir, log) = dir.place(&vmm.log)?;
        let log = log_dir.open_log(log, FILE_MODE)?;
        let group = vmm.group.as_ref().map(|group| self.groups.birthplace(group)).transpose()?.flatten();
        let launched = spawn::launch(&Launch {
            program: &vmm.program,
            args: &vmm.args,
            dir: &self.data.run_path(&vmm.instance),
            log,
            confine: vmm.confine.as_ref(),
            images,
            inherit: tap.map(|tap| (tap, TAP_FD)).into_iter().collect(),
            cgroup: group.as_ref().map(std::os::fd::AsFd::as_fd),
        })?;
        for weaker in &launched.weaker {
            tracing::warn!(instance = %vmm.instance, %weaker, "a VMM is confined less than requested");
        }
        let child = launched.child;
        // A child keeps its pid until it is waited for, so this is sure to be it.
        let pid = child.pid.as_raw_nonzero().get().unsigned_abs();
        let identity = process::identify(pid).map_err(failed("identify", &vmm.program))?;
        let process = identity.ok_or_else(|| HostError::Refused("the VMM has no process".to_owned()))?;
        let ended = reap(child);
        self.own().insert(vmm.instance.clone(), Own { process: process.clone(), ended });
        Ok(Outcome::Process(process))
    }

    fn remove_run_dir(&self, instance: &InstanceId) -> Result<(), HostError> {
        self.unless_living(instance)?;
        self.own().remove(instance);
        files::run::remove(&self.data, instance)
    }

    fn is_vmm_user(&self, user: u32) -> bool {
        let within =
            |users: &Vec<(u32, u32)>| users.iter().any(|(first, last)| (*first..=*last).contains(&user));
        self.vmm_users.as_ref().is_none_or(within)
    }
}

/// Waits for a child in the background, so that none stays behind as a zombie.
fn reap(child: Child) -> watch::Receiver<Option<ExitStatus>> {
    let (tell, ended) = watch::channel(None);
    tokio::spawn(async move {
        let Child { pid, pidfd } = child;
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

impl Host for LocalHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        match operation {
            Operation::SpawnVmm(vmm) => {
                let tap = self.tap_for(vmm).await?;
                let vmm = vmm.clone();
                return self.blocking(move |inner| inner.spawn(&vmm, tap)).await;
            }
            Operation::EndProcess { process, signal } => {
                let attempt = format!("end process {}", process.pid);
                let there =
                    process::signal(process, *signal).map_err(|cause| HostError::Io { attempt, cause })?;
                tracing::debug!(pid = process.pid, ?signal, there, "signalled");
            }
            Operation::RemoveRunDir { instance } => {
                let instance = instance.clone();
                self.blocking(move |inner| inner.remove_run_dir(&instance)).await?;
            }
            Operation::MakeRunDir { instance } => {
                let instance = instance.clone();
                self.blocking(move |inner| files::run::make(&inner.data, &instance)).await?;
            }
            Operation::RemoveFile { instance, name } => {
                let (instance, name) = (instance.clone(), name.clone());
                self.blocking(move |inner| files::run::remove_file(&inner.data, &instance, &name)).await?;
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
            Operation::PunchLog { instance, name, max_bytes } => {
                let (instance, name, max_bytes) = (instance.clone(), name.clone(), *max_bytes);
                let punch = move |inner: &Inner| access::punch_log(&inner.data, &instance, &name, max_bytes);
                self.blocking(punch).await?;
            }
            Operation::MakeReadOnly { instance, name } => {
                let (instance, name) = (instance.clone(), name.clone());
                let take = move |inner: &Inner| {
                    let dir = inner.data.run(&instance)?;
                    files::run::make_read_only(&dir, &name, |user| inner.is_vmm_user(user))
                };
                self.blocking(take).await?;
            }
            Operation::LinkFile { instance, source, name } => {
                let (instance, source, name) = (instance.clone(), source.clone(), name.clone());
                let link = move |inner: &Inner| {
                    // Whether it is an image is looked at where it is used, too: this name of it is a path to others.
                    if let Images::Held { .. } = &inner.images {
                        inner.images.pin(&source)?;
                    }
                    files::run::link(&inner.data.run(&instance)?, &source, &name)
                };
                self.blocking(link).await?;
            }
            Operation::MakeJail { jail, files } => {
                let (jail, files) = (jail.clone(), files.clone());
                let make = move |inner: &Inner| {
                    inner.unless_living(&jail.instance)?;
                    jail::make(&jail, &inner.data, &inner.images, &files)
                };
                self.blocking(make).await?;
            }
            Operation::ShareWithJail { jail, files } => {
                let (jail, files) = (jail.clone(), files.clone());
                self.blocking(move |inner| jail::share(&jail, &inner.data, &inner.images, &files)).await?;
            }
            Operation::UnshareFromJail { jail, names } => {
                let (jail, names) = (jail.clone(), names.clone());
                self.blocking(move |inner| jail::unshare(&jail, &inner.data, &names)).await?;
            }
            Operation::RemoveJail { jail } => {
                let jail = jail.clone();
                let remove = move |inner: &Inner| {
                    inner.unless_living(&jail.instance)?;
                    jail::remove(&jail, &inner.data)
                };
                self.blocking(remove).await?;
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
                let (instance, template) = (instance.clone(), template.clone());
                let (memory, name) = (memory.clone(), name.clone());
                let share = move |inner: &Inner| {
                    let (dir, template) = (inner.data.run(&instance)?, inner.data.run(&template)?);
                    files::run::share_memory(&dir, &template, &memory, &name, |user| inner.is_vmm_user(user))
                };
                self.blocking(share).await?;
            }
            Operation::MeasureDisk { instance } => {
                let instance = instance.clone();
                let measure = move |inner: &Inner| files::run::measure(&inner.data, &instance);
                return self.blocking(measure).await.map(Outcome::Disk);
            }
            Operation::MeasureMemory { instances } => {
                let instances = instances.clone();
                let measure = move |inner: &Inner| memory::measure(&inner.data, &instances);
                return self.blocking(measure).await.map(Outcome::Memory);
            }
            Operation::AdmitVmm { instance, user, files } => {
                let (user, files) = (*user, files.clone());
                self.in_run_dir(instance, move |dir| files::run::admit(dir, user, &files)).await?;
            }
            Operation::EnsureTenantGroup { .. }
            | Operation::RemoveTenantGroup { .. }
            | Operation::EnsureGroup { .. }
            | Operation::LimitIo { .. }
            | Operation::ConfirmGroup { .. }
            | Operation::RemoveGroup { .. }
            | Operation::LookAtGroups => {
                let operation = operation.clone();
                return self.blocking(move |inner| inner.groups.perform(&operation)).await;
            }
            #[cfg(feature = "network")]
            Operation::TryNetwork => self.blocking(|_| crate::try_network()).await?,
            #[cfg(feature = "network")]
            network => return self.fabric.perform(network).await,
            #[cfg(not(feature = "network"))]
            _ => return Err(HostError::Refused("this program was built without networks".to_owned())),
        }
        Ok(Outcome::Done)
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        self.blocking(Inner::scan).await
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        let list = |inner: &Inner| {
            let names = match inner.data.vms() {
                Err(error) if error.is_not_found() => return Ok(Vec::new()),
                vms => vms?.list()?,
            };
            let mut found: Vec<_> =
                names.iter().filter_map(|name| name.to_str().and_then(|name| name.parse().ok())).collect();
            found.sort();
            Ok(found)
        };
        self.blocking(list).await
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.inner.data.run_path(instance)
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        let (instance, process) = (vmm.instance.clone(), vmm.process.clone());
        let is_it = |own: &&Own| own.process == process;
        let own = self.inner.own().get(&instance).filter(is_it).map(|own| own.ended.clone());
        let mut end = ProcessEnd { instance, process, exit_code: None, signal: None };
        if let Some(mut ended) = own {
            // An error means that the waiting task is gone with its runtime, and so is the caller.
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
        let (instance, name) = (instance.clone(), name.to_owned());
        self.blocking(move |inner| access::open(&inner.data, &instance, &name, access)).await
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
        let (instance, name) = (instance.clone(), name.to_owned());
        self.blocking(move |inner| access::dial(&inner.data, &instance, &name)).await
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        let instance = instance.clone();
        self.blocking(move |inner| access::names(&inner.data, &instance)).await
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        let instance = instance.clone();
        self.blocking(move |inner| Ok(jail::recorded_jail(&inner.data, &instance))).await
    }
}
