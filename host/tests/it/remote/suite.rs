//! What is promised of a host, tried on this machine with processes of ours, never with a VMM. Every host passes it:
//! the one that is this process, and the one that asks a helper.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_host::{
    Access, DiskUse, EndSignal, Host, HostError, Jail, Operation, Outcome, ProcessEnd, ProcessIdentity,
    SpawnVmm, VmmProcess,
};
use mvm_proto::InstanceId;

pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A pipe that nobody writes to.
const NEVER: &str = "never";

/// Where a host works, and what it may start.
pub(crate) struct Site {
    pub(crate) dir: tempfile::TempDir,
    /// Does what its `-append` says: a VMM to whoever looks at its command line.
    pub(crate) program: PathBuf,
}

impl Drop for Site {
    fn drop(&mut self) {
        crate::support::ending::end_all_below(self.dir.path());
    }
}

impl Site {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        let script = "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" = -append ] && does=$2; shift; done\neval \"$does\"\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir(dir.path().join("images")).unwrap();
        Self { dir, program }
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn spawn(&self, instance: &InstanceId, does: &str) -> SpawnVmm {
        let args = ["-name", &format!("mvm-{instance}"), "-append", does].map(str::to_owned).to_vec();
        SpawnVmm {
            instance: instance.clone(),
            program: self.program.clone(),
            args,
            log: "vmm.log".to_owned(),
            tap: None,
            group: None,
            confine: None,
        }
    }
}

/// Who jailed VMMs may run as here.
pub(crate) const JAILED: u32 = 61_000;

pub(crate) fn id() -> InstanceId {
    InstanceId::from_bits(0x7e57)
}

pub(crate) async fn spawned(host: &impl Host, spawn: SpawnVmm) -> ProcessIdentity {
    let instance = spawn.instance.clone();
    host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
    // It is there already when this is asked for twice.
    let _ = nix::unistd::mkfifo(&host.run_dir(&instance).join(NEVER), nix::sys::stat::Mode::S_IRWXU);
    match host.perform(&Operation::SpawnVmm(spawn)).await.unwrap() {
        Outcome::Process(process) => process,
        other => panic!("no process: {other:?}"),
    }
}

/// A process that lives as long as it is let, and forks nothing that could outlive it for a moment.
pub(crate) async fn patient(site: &Site, host: &impl Host, instance: &InstanceId) -> ProcessIdentity {
    spawned(host, site.spawn(instance, &format!("read line < {NEVER}"))).await
}

pub(crate) async fn end(host: &impl Host, vmm: &VmmProcess) -> ProcessEnd {
    let signal = EndSignal::Kill;
    host.perform(&Operation::EndProcess { process: vmm.process.clone(), signal }).await.unwrap();
    tokio::time::timeout(PATIENCE, host.wait_end(vmm)).await.unwrap().unwrap()
}

async fn exists(path: &Path) {
    let there = async {
        while !path.exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, there).await.unwrap();
}

fn vmm(process: &ProcessIdentity) -> VmmProcess {
    VmmProcess { instance: id(), process: process.clone() }
}

/// `host` and `other` are two hosts of the site's data directory.
pub(crate) async fn run<H: Host>(host: H, other: H, site: &Site) {
    starting_twice_is_one_process_that_is_found_ended_once_and_no_zombie(&host, &other, site).await;
    what_a_vmm_forks_is_no_second_vmm_but_does_not_outlive_it_unseen(&host, site).await;
    processor_time_is_that_of_exactly_this_process(&host, site).await;
    memory_is_measured_of_what_lives_and_was_asked_for(&host, site).await;
    the_starter_of_a_vmm_is_told_how_it_ended(&host, site).await;
    a_stranger_with_a_used_pid_is_never_signalled(&host, site).await;
    no_jail_is_made_or_removed_while_a_process_of_its_instance_lives(&host, site).await;
    what_is_started_is_private_leads_its_own_session_and_inherits_nothing(&host, site).await;
    names_that_lead_out_of_a_run_directory_are_refused(&host).await;
    a_disk_is_made_once_and_a_log_is_cut_at_its_beginning(&host).await;
    files_and_sockets_are_opened_by_name(&host).await;
    a_failure_says_what_was_attempted_and_why(&host).await;
}

async fn starting_twice_is_one_process_that_is_found_ended_once_and_no_zombie(
    host: &impl Host,
    other: &impl Host,
    site: &Site,
) {
    let process = patient(site, host, &id()).await;
    assert_eq!(patient(site, host, &id()).await, process);
    // Another agent on the same directory finds it as well, and starts none.
    assert_eq!(other.vmms().await.unwrap(), [vmm(&process)]);
    assert_eq!(patient(site, other, &id()).await, process);
    let refused = host.perform(&Operation::RemoveRunDir { instance: id() }).await.unwrap_err();
    assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    let own = end(host, &vmm(&process)).await;
    assert_eq!((own.exit_code, own.signal), (None, Some(9)));
    assert!(!Path::new(&format!("/proc/{}", process.pid)).exists(), "reaped");
    let adopted = end(other, &vmm(&process)).await;
    assert_eq!((adopted.exit_code, adopted.signal), (None, None));
    for _ in 0..2 {
        host.perform(&Operation::RemoveRunDir { instance: id() }).await.unwrap();
    }
    assert!(host.run_dirs().await.unwrap().is_empty());
}

async fn what_a_vmm_forks_is_no_second_vmm_but_does_not_outlive_it_unseen(host: &impl Host, site: &Site) {
    // The shell in brackets has the command line of the first.
    let process = spawned(host, site.spawn(&id(), "(: > forked; read line < never); :")).await;
    exists(&host.run_dir(&id()).join("forked")).await;
    assert_eq!(host.vmms().await.unwrap(), [vmm(&process)]);
    end(host, &vmm(&process)).await;
    let left = host.vmms().await.unwrap();
    assert_eq!(left.len(), 1);
    end(host, &left[0]).await;
    assert_eq!(host.vmms().await.unwrap(), []);
}

async fn processor_time_is_that_of_exactly_this_process(host: &impl Host, site: &Site) {
    let busy = spawned(host, site.spawn(&id(), "while :; do :; done")).await;
    let spent = async {
        while host.cpu_time(&busy).unwrap() < Duration::from_millis(50) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, spent).await.unwrap();
    let earlier = ProcessIdentity { start_time: busy.start_time - 1, ..busy.clone() };
    assert_eq!(host.cpu_time(&earlier), None);
    end(host, &vmm(&busy)).await;
    assert_eq!(host.cpu_time(&busy), None);
}

async fn the_starter_of_a_vmm_is_told_how_it_ended(host: &impl Host, site: &Site) {
    let process = spawned(host, site.spawn(&id(), "exit 7")).await;
    let ended = tokio::time::timeout(PATIENCE, host.wait_end(&vmm(&process))).await.unwrap().unwrap();
    assert_eq!((ended.exit_code, ended.signal), (Some(7), None));
    // Asked again, of a process that is gone.
    assert_eq!(host.wait_end(&vmm(&process)).await.unwrap(), ended);
}

async fn a_stranger_with_a_used_pid_is_never_signalled(host: &impl Host, site: &Site) {
    let stranger = patient(site, host, &id()).await;
    let earlier = ProcessIdentity { start_time: stranger.start_time - 1, ..stranger.clone() };
    let other_boot = ProcessIdentity { boot_id: "another boot".to_owned(), ..stranger.clone() };
    for gone in [earlier, other_boot] {
        // It is gone, whoever has its pid: there is nothing to end, and nothing to wait for.
        end(host, &vmm(&gone)).await;
    }
    assert_eq!(host.vmms().await.unwrap().len(), 1);
    end(host, &vmm(&stranger)).await;
}

async fn no_jail_is_made_or_removed_while_a_process_of_its_instance_lives(host: &impl Host, site: &Site) {
    let root = host.run_dir(&id()).join("firecracker").join(id().as_str()).join("root");
    let jail = Jail { instance: id(), root: root.clone(), uid: JAILED, gid: JAILED };
    let make = Operation::MakeJail { jail: jail.clone(), files: Vec::new() };
    let remove = Operation::RemoveJail { jail };
    host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
    host.perform(&make).await.unwrap();
    let lived_in = root.join("lived-in");
    std::fs::write(&lived_in, "").unwrap();
    let process = patient(site, host, &id()).await;
    for operation in [&make, &remove] {
        let refused = host.perform(operation).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
        assert!(lived_in.exists(), "{operation:?}");
    }
    end(host, &vmm(&process)).await;
    host.perform(&make).await.unwrap();
    assert!(!lived_in.exists());
    host.perform(&remove).await.unwrap();
    assert!(!root.exists());
}

async fn what_is_started_is_private_leads_its_own_session_and_inherits_nothing(
    host: &impl Host,
    site: &Site,
) {
    let process = spawned(host, site.spawn(&id(), &format!(": > began; read line < {NEVER}"))).await;
    // Until it runs its script, its loader has libraries open.
    exists(&host.run_dir(&id()).join("began")).await;
    let proc = PathBuf::from(format!("/proc/{}", process.pid));
    let stat = std::fs::read_to_string(proc.join("stat")).unwrap();
    let session: u32 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert_eq!(session, process.pid);
    let fds = std::fs::read_dir(proc.join("fd")).unwrap();
    let targets: Vec<_> = fds.map(|fd| std::fs::read_link(fd.unwrap().path()).unwrap_or_default()).collect();
    let run_dir = host.run_dir(&id()).canonicalize().unwrap();
    let program = site.program.canonicalize().unwrap();
    let known = |target: &PathBuf| {
        target.starts_with("/dev/null") || target.starts_with(&run_dir) || *target == program
    };
    assert!(targets.iter().all(known), "{targets:?}");
    assert_eq!(std::fs::metadata(&run_dir).unwrap().permissions().mode() & 0o777, 0o700);
    end(host, &vmm(&process)).await;
}

async fn names_that_lead_out_of_a_run_directory_are_refused(host: &impl Host) {
    for name in ["", ".", "..", "../x", "/etc/passwd", "a/../b", "a/b/c"] {
        let operation = Operation::RemoveFile { instance: id(), name: name.to_owned() };
        let refusals = [
            host.perform(&operation).await.err(),
            host.open_file(&id(), name, Access::Read).await.err(),
            host.open_file(&id(), name, Access::Create).await.err(),
            host.connect(&id(), name).await.err(),
        ];
        for refusal in refusals {
            assert!(matches!(refusal, Some(HostError::Refused(_))), "{name}: {refusal:?}");
        }
    }
}

async fn memory_is_measured_of_what_lives_and_was_asked_for(host: &impl Host, site: &Site) {
    let (asked, other) = (id(), InstanceId::from_bits(0x07e4));
    let (one, two) = (patient(site, host, &asked).await, patient(site, host, &other).await);
    let measure = async |instances: &[InstanceId]| {
        let measure = Operation::MeasureMemory { instances: instances.to_vec() };
        match host.perform(&measure).await.unwrap() {
            Outcome::Memory(found) => found,
            other => panic!("no measurement: {other:?}"),
        }
    };
    let gone = InstanceId::from_bits(0x90e);
    let found = measure(&[gone.clone(), asked.clone()]).await;
    assert_eq!(found.iter().map(|used| &used.instance).collect::<Vec<_>>(), [&asked]);
    assert!((4096..64 << 20).contains(&found[0].bytes), "{found:?}");
    end(host, &vmm(&one)).await;
    end(host, &VmmProcess { instance: other.clone(), process: two }).await;
    assert_eq!(measure(&[asked, other.clone(), gone]).await, []);
    host.perform(&Operation::RemoveRunDir { instance: other }).await.unwrap();
}

/// What an instance has on disk; absent: nothing.
async fn measured(host: &impl Host) -> Option<DiskUse> {
    match host.perform(&Operation::MeasureDisk { instance: id() }).await.unwrap() {
        Outcome::Disk(found) => found,
        other => panic!("no measurement: {other:?}"),
    }
}

async fn a_disk_is_made_once_and_a_log_is_cut_at_its_beginning(host: &impl Host) {
    host.perform(&Operation::RemoveRunDir { instance: id() }).await.unwrap();
    assert_eq!(measured(host).await, None);
    host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
    let run_dir = host.run_dir(&id());
    let make = Operation::MakeDisk { instance: id(), name: "data.img".to_owned(), size_mib: 16 };
    host.perform(&make).await.unwrap();
    let disk = run_dir.join("data.img");
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 16 << 20);
    let sparse = measured(host).await.unwrap();
    assert!(sparse.used_bytes < 8 << 20 && sparse.free_bytes > 0, "{sparse:?}");
    std::fs::write(run_dir.join("memory"), vec![1; 4 << 20]).unwrap();
    let more = measured(host).await.unwrap().used_bytes - sparse.used_bytes;
    assert!((4 << 20..5 << 20).contains(&more), "{more}");
    std::fs::write(&disk, "in use").unwrap();
    host.perform(&make).await.unwrap();
    assert_eq!(std::fs::read(&disk).unwrap(), b"in use");

    let log = run_dir.join("console.log");
    std::fs::write(&log, vec![b'x'; 1000]).unwrap();
    let trim = |max_bytes| Operation::TrimLog { instance: id(), name: "console.log".to_owned(), max_bytes };
    host.perform(&trim(1000)).await.unwrap();
    assert_eq!(std::fs::metadata(&log).unwrap().len(), 1000);
    host.perform(&trim(999)).await.unwrap();
    assert_eq!(std::fs::metadata(&log).unwrap().len(), 0);
    assert_eq!(std::fs::metadata(run_dir.join("console.log.old")).unwrap().len(), 1000);
}

async fn files_and_sockets_are_opened_by_name(host: &impl Host) {
    let instance = InstanceId::from_bits(0xf11e);
    host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
    assert!(host.open_file(&instance, "memory", Access::Read).await.unwrap().is_none());
    let mut file = host.open_file(&instance, "memory", Access::Create).await.unwrap().unwrap();
    file.write_all(b"of a guest").unwrap();
    file.read_to_end(&mut Vec::new()).unwrap_err();
    host.open_file(&instance, "memory", Access::Create).await.unwrap_err();
    let mut file = host.open_file(&instance, "memory", Access::Read).await.unwrap().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "of a guest");
    file.write_all(b"more").unwrap_err();

    let socket = host.run_dir(&instance).join("qmp.sock");
    let kind = async |name| match host.connect(&instance, name).await.unwrap_err() {
        HostError::Io { cause, .. } => cause.kind(),
        other => panic!("{other:?}"),
    };
    assert_eq!(kind("qmp.sock").await, std::io::ErrorKind::NotFound);
    let listener = UnixListener::bind(&socket).unwrap();
    let mut stream = host.connect(&instance, "qmp.sock").await.unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.write_all(b"greeting").unwrap();
    stream.set_nonblocking(false).unwrap();
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"greeting");
    drop(listener);
    assert_eq!(kind("qmp.sock").await, std::io::ErrorKind::ConnectionRefused);

    assert_eq!(host.names(&instance).await.unwrap(), ["memory", "qmp.sock"]);
    assert_eq!(host.jail_root(&instance).await.unwrap(), None);
    let jail = host.run_dir(&instance).join("firecracker").join(instance.as_str()).join("root");
    let made = Jail { instance: instance.clone(), root: jail.clone(), uid: JAILED, gid: JAILED };
    host.perform(&Operation::MakeJail { jail: made.clone(), files: Vec::new() }).await.unwrap();
    std::fs::write(jail.join("firecracker.pid"), "42").unwrap();
    assert_eq!(host.jail_root(&instance).await.unwrap(), Some(jail));
    let file = host.open_file(&instance, "jail/firecracker.pid", Access::Read).await.unwrap().unwrap();
    assert_eq!(std::io::read_to_string(file).unwrap(), "42");
    host.perform(&Operation::RemoveJail { jail: made }).await.unwrap();
    assert_eq!(host.jail_root(&instance).await.unwrap(), None);
    host.perform(&Operation::RemoveRunDir { instance: instance.clone() }).await.unwrap();
    assert_eq!(host.names(&instance).await.unwrap(), Vec::<String>::new());
}

async fn a_failure_says_what_was_attempted_and_why(host: &impl Host) {
    let instance = InstanceId::from_bits(0xdead);
    let write =
        Operation::WriteFile { instance: instance.clone(), name: "a".to_owned(), text: String::new() };
    match host.perform(&write).await.unwrap_err() {
        HostError::Io { attempt, cause } => {
            assert!(attempt.contains(instance.as_str()), "{attempt}");
            assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
        }
        other => panic!("{other:?}"),
    }
}
