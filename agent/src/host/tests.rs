//! What is promised of operations, tried on this machine: with processes of ours, never with a VMM.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_proto::InstanceId;

use super::*;

fn id() -> InstanceId {
    InstanceId::from_bits(0x7e57)
}

/// A pipe that nobody writes to.
const NEVER: &str = "never";

/// A process that lives as long as it is let: a shell that waits for such a pipe. It forks nothing that could outlive
/// it for a moment.
fn patient(log: &str) -> SpawnVmm {
    scripted(&format!("read line < {NEVER}"), log)
}

fn scripted(script: &str, log: &str) -> SpawnVmm {
    let args = ["-c", script, &format!("mvm-{}", id())].map(str::to_owned).to_vec();
    SpawnVmm { instance: id(), program: PathBuf::from("/bin/sh"), args, log: log.to_owned() }
}

async fn started(host: &LocalHost) -> ProcessIdentity {
    spawned(host, patient("vmm.log")).await
}

async fn spawned(host: &LocalHost, spawn: SpawnVmm) -> ProcessIdentity {
    host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
    // It is there already when this is asked for twice.
    let _ = nix::unistd::mkfifo(&host.run_dir(&id()).join(NEVER), nix::sys::stat::Mode::S_IRWXU);
    match host.perform(&Operation::SpawnVmm(spawn)).await.unwrap() {
        Outcome::Process(process) => process,
        Outcome::Done => panic!("no process"),
    }
}

async fn end(host: &LocalHost, process: &ProcessIdentity) -> ProcessEnd {
    let signal = EndSignal::Kill;
    host.perform(&Operation::EndProcess { process: process.clone(), signal }).await.unwrap();
    let vmm = VmmProcess { instance: id(), process: process.clone() };
    tokio::time::timeout(Duration::from_secs(10), host.wait_end(&vmm)).await.unwrap().unwrap()
}

#[test]
fn operations_are_values_that_survive_the_wire() {
    let process = ProcessIdentity { pid: 7, start_time: 8, boot_id: "b".to_owned() };
    let (instance, name) = (id(), "data.img".to_owned());
    let jail = Jail { instance: id(), root: "/jails/root".into(), uid: 1, gid: 2 };
    let files = vec![JailFile { source: "/kernel".into(), name: "kernel".to_owned(), writable: false }];
    let operations = [
        Operation::MakeRunDir { instance: instance.clone() },
        Operation::RemoveRunDir { instance: instance.clone() },
        Operation::RemoveFile { instance: instance.clone(), name: name.clone() },
        Operation::WriteFile { instance: instance.clone(), name: name.clone(), text: "{}".to_owned() },
        Operation::MakeDir { instance: instance.clone(), name: name.clone() },
        Operation::Rename { instance: instance.clone(), from: name.clone(), to: "b".to_owned() },
        Operation::TrimLog { instance: instance.clone(), name: name.clone(), max_bytes: 1 },
        Operation::MakeJail { jail: jail.clone(), files: files.clone() },
        Operation::ShareWithJail { jail: jail.clone(), files },
        Operation::UnshareFromJail { jail: jail.clone(), names: vec![name.clone()] },
        Operation::RemoveJail { jail },
        Operation::MakeDisk { instance, name, size_mib: 16 },
        Operation::SpawnVmm(patient("vmm.log")),
        Operation::EndProcess { process, signal: EndSignal::Terminate },
    ];
    for operation in operations {
        let text = serde_json::to_string(&operation).unwrap();
        assert_eq!(serde_json::from_str::<Operation>(&text).unwrap(), operation, "{text}");
    }
}

#[tokio::test]
async fn starting_twice_is_one_process_that_is_found_ended_once_and_no_zombie() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    let process = started(&host).await;
    assert_eq!(started(&host).await, process);
    // Another agent on the same directory finds it as well, and starts none.
    let other = LocalHost::new(dir.path());
    assert_eq!(other.vmms().await.unwrap(), [VmmProcess { instance: id(), process: process.clone() }]);
    assert_eq!(started(&other).await, process);
    let refused = host.perform(&Operation::RemoveRunDir { instance: id() }).await.unwrap_err();
    assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    let own = end(&host, &process).await;
    assert_eq!((own.exit_code, own.signal), (None, Some(9)));
    assert!(!Path::new(&format!("/proc/{}", process.pid)).exists(), "reaped");
    let adopted = end(&other, &process).await;
    assert_eq!((adopted.exit_code, adopted.signal), (None, None));
    for _ in 0..2 {
        host.perform(&Operation::RemoveRunDir { instance: id() }).await.unwrap();
    }
    assert!(host.run_dirs().await.unwrap().is_empty());
}

#[tokio::test]
async fn what_a_vmm_forks_is_no_second_vmm_but_does_not_outlive_it_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    // The shell in brackets has the command line of the first.
    let script = "(: > forked; read line < never); :";
    let process = spawned(&host, scripted(script, "vmm.log")).await;
    let forked = host.run_dir(&id()).join("forked");
    while !forked.exists() {
        tokio::task::yield_now().await;
    }
    assert_eq!(host.vmms().await.unwrap(), [VmmProcess { instance: id(), process: process.clone() }]);
    end(&host, &process).await;
    let left = host.vmms().await.unwrap();
    assert_eq!(left.len(), 1);
    end(&host, &left[0].process).await;
    assert_eq!(host.vmms().await.unwrap(), []);
}

#[tokio::test]
async fn a_stranger_with_a_used_pid_is_never_signalled() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    let stranger = started(&host).await;
    let earlier = ProcessIdentity { start_time: stranger.start_time - 1, ..stranger.clone() };
    let other_boot = ProcessIdentity { boot_id: "another boot".to_owned(), ..stranger.clone() };
    for gone in [earlier, other_boot] {
        let signal = EndSignal::Kill;
        host.perform(&Operation::EndProcess { process: gone.clone(), signal }).await.unwrap();
        let vmm = VmmProcess { instance: id(), process: gone };
        // It is gone, whoever has its pid: there is nothing to wait for.
        tokio::time::timeout(Duration::from_secs(10), host.wait_end(&vmm)).await.unwrap().unwrap();
    }
    assert_eq!(host.vmms().await.unwrap().len(), 1);
    end(&host, &stranger).await;
}

#[tokio::test]
async fn what_is_started_is_private_leads_its_own_session_and_inherits_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    let process = started(&host).await;
    let proc = PathBuf::from(format!("/proc/{}", process.pid));
    let stat = std::fs::read_to_string(proc.join("stat")).unwrap();
    let session: u32 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert_eq!(session, process.pid);
    let fds = std::fs::read_dir(proc.join("fd")).unwrap();
    let targets: Vec<_> = fds.map(|fd| std::fs::read_link(fd.unwrap().path()).unwrap_or_default()).collect();
    let run_dir = host.run_dir(&id()).canonicalize().unwrap();
    let known = |target: &PathBuf| {
        target.starts_with("/dev/null") || target.starts_with(&run_dir) || target.ends_with("sh")
    };
    assert!(targets.iter().all(known), "{targets:?}");
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(std::fs::metadata(&run_dir).unwrap().permissions().mode() & 0o777, 0o700);
    end(&host, &process).await;
}

#[tokio::test]
async fn names_that_lead_out_of_a_run_directory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    for name in ["", ".", "..", "../x", "/etc/passwd", "a/../b", "a/b/c"] {
        let operation = Operation::RemoveFile { instance: id(), name: name.to_owned() };
        let refused = host.perform(&operation).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{name}: {refused:?}");
    }
}

#[tokio::test]
async fn a_disk_is_made_once_and_a_log_is_cut_at_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
    let run_dir = host.run_dir(&id());
    let make = Operation::MakeDisk { instance: id(), name: "data.img".to_owned(), size_mib: 16 };
    host.perform(&make).await.unwrap();
    let disk = run_dir.join("data.img");
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 16 << 20);
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
