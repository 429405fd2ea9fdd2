//! A helper and its agent, in one process: the same promises as without a helper, what is refused, and how much at once.

mod escape;
mod held_up;
mod hostile;
mod suite;

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use mvm_host::sandbox::Demand;
use mvm_host::{
    Access, EndSignal, HelperError, Host as _, HostError, LocalHost, Operation, Outcome, Policy,
    ProcessIdentity, RemoteHost, VmmProcess, VmmProgram, serve_helper,
};
use mvm_proto::InstanceId;
use suite::{PATIENCE, Site, end, id, patient};
use tokio::task::JoinHandle;

type Serving = JoinHandle<Result<(), HelperError>>;

fn policy(site: &Site) -> Policy {
    Policy {
        programs: vec![
            (site.program.clone(), VmmProgram::Qemu),
            (site.program.with_file_name("slow"), VmmProgram::Qemu),
        ],
        demand: None,
        ..confined_policy(site.data_dir())
    }
}

/// Of a helper whose operator wants VMMs confined; its programs are in this directory.
fn confined_policy(dir: &Path) -> Policy {
    let program = |name: &str, kind| (dir.join(name), kind);
    Policy {
        data_dir: dir.to_owned(),
        images_dir: dir.join("images"),
        programs: vec![
            program("qemu", VmmProgram::Qemu),
            program("firecracker", VmmProgram::Firecracker),
            program("jailer", VmmProgram::Jailer),
        ],
        jail_base: None,
        agent_uid: nix::unistd::geteuid().as_raw(),
        agent_gids: vec![nix::unistd::getegid().as_raw()],
        vmm_ids: vec![(suite::JAILED, suite::JAILED)],
        demand: Some(Demand::All),
        groups: None,
    }
}

fn serving(socket: UnixStream, policy: Policy) -> Serving {
    tokio::spawn(serve_helper(OwnedFd::from(socket), policy))
}

fn helper(site: &Site, socket: UnixStream) -> Serving {
    serving(socket, policy(site))
}

fn remote(site: &Site) -> (RemoteHost, Serving) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (RemoteHost::new(ours.into(), site.data_dir()).unwrap(), helper(site, theirs))
}

/// A process that lives.
fn identity(pid: u32) -> ProcessIdentity {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start_time = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    ProcessIdentity { pid, start_time, boot_id: mvm_host::boot_id().unwrap().to_owned() }
}

#[tokio::test]
async fn this_process_is_a_host_as_promised() {
    let site = Site::new();
    suite::run(LocalHost::new(site.data_dir()), LocalHost::new(site.data_dir()), &site).await;
}

#[tokio::test]
async fn a_helper_is_a_host_as_promised() {
    let site = Site::new();
    suite::run(remote(&site).0, remote(&site).0, &site).await;
}

#[tokio::test]
async fn a_process_that_is_no_vmm_of_the_data_directory_is_neither_ended_nor_awaited() {
    let (site, elsewhere) = (Site::new(), Site::new());
    let (host, _serving) = remote(&site);
    // A VMM of another data directory: an honest process of the same shape.
    let foreign_host = LocalHost::new(elsewhere.data_dir());
    let process = patient(&elsewhere, &foreign_host, &id()).await;
    let foreign = VmmProcess { instance: id(), process };
    for signal in [EndSignal::Terminate, EndSignal::Kill] {
        let end = Operation::EndProcess { process: foreign.process.clone(), signal };
        let refused = host.perform(&end).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    }
    let refused = host.wait_end(&foreign).await.unwrap_err();
    assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    // This very process, too.
    let process = identity(std::process::id());
    let end_us = Operation::EndProcess { process, signal: EndSignal::Kill };
    assert!(matches!(host.perform(&end_us).await.unwrap_err(), HostError::Refused(_)));
    assert_eq!(foreign_host.vmms().await.unwrap(), std::slice::from_ref(&foreign));
    end(&foreign_host, &foreign).await;
}

#[tokio::test]
async fn what_the_policy_does_not_allow_is_refused_over_the_wire_and_nothing_is_done() {
    let site = Site::new();
    let (host, _serving) = remote(&site);
    host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
    let (instance, name) = (id(), "a".to_owned());
    let shell = {
        let mut spawn = site.spawn(&id(), "");
        spawn.program = "/bin/sh".into();
        spawn
    };
    let mut told = site.spawn(&id(), "");
    told.args.extend(["-monitor".to_owned(), "stdio".to_owned()]);
    for operation in [
        Operation::LinkFile { instance: instance.clone(), source: "/etc/shadow".into(), name: name.clone() },
        Operation::MakeDisk { instance: instance.clone(), name: name.clone(), size_mib: u64::MAX },
        Operation::WriteFile { instance, name, text: "x".repeat(512 * 1024) },
        Operation::SpawnVmm(shell),
        Operation::SpawnVmm(told),
    ] {
        let refused = host.perform(&operation).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    }
    assert_eq!(host.names(&id()).await.unwrap(), Vec::<String>::new());
    assert_eq!(host.vmms().await.unwrap(), []);
    // One that would not fit a frame is not even sent, and the conversation goes on.
    let text = "x".repeat(2 * 1024 * 1024);
    let long = Operation::WriteFile { instance: id(), name: "a".to_owned(), text };
    assert!(matches!(host.perform(&long).await.unwrap_err(), HostError::Refused(_)));
    assert_eq!(host.run_dirs().await.unwrap(), [id()]);
}

#[tokio::test]
async fn groups_that_are_there_are_told_over_the_wire() {
    use mvm_host::cgroup::{CgroupSettings, fake};
    let site = Site::new();
    let mount = site.data_dir().join("groups");
    for below in ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007"] {
        fake::group(&mount.join(below), "cpu memory pids").unwrap();
    }
    let settings = CgroupSettings { mount: Some(mount), ..CgroupSettings::default() };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let host = RemoteHost::new(ours.into(), site.data_dir()).unwrap();
    let _serving = serving(theirs, Policy { groups: Some(settings.clone()), ..policy(&site) });
    let Outcome::Groups(found) = host.perform(&Operation::LookAtGroups).await.unwrap() else { panic!() };
    let names: Vec<_> = found.observed.groups.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["acme", "acme/web", "acme/web/i-00000007"]);
    let here = LocalHost::with_groups(site.data_dir(), settings);
    assert_eq!(here.perform(&Operation::LookAtGroups).await.unwrap(), Outcome::Groups(found));
}

/// The bytes of a frame that may say anything.
fn frame(length: u32, rest: [u8; 4], body: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], &rest, body].concat()
}

fn said(body: &str) -> Vec<u8> {
    frame(body.len().try_into().unwrap(), [0; 4], body.as_bytes())
}

/// What a helper answers to these bytes, and how it ended.
async fn raw(site: &Site, bytes: Vec<u8>) -> (String, Result<(), HelperError>) {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let serving = helper(site, theirs);
    let answer = tokio::task::spawn_blocking(move || {
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        // A helper that has hung up does not take the rest.
        let _ = ours.write_all(&bytes);
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _ = ours.read_to_end(&mut answer);
        String::from_utf8_lossy(answer.get(8..).unwrap_or_default()).into_owned()
    });
    let answer = answer.await.unwrap();
    (answer, tokio::time::timeout(PATIENCE, serving).await.unwrap().unwrap())
}

#[tokio::test]
async fn a_request_that_does_not_exist_is_refused_by_its_number() {
    let site = Site::new();
    for call in [
        r#""reboot""#,
        r#"{"perform":{"operation":"run_command","command":"sh"}}"#,
        r#"{"perform":{"operation":"make_run_dir","instance":"../../etc"}}"#,
        r#"{"open":{"instance":"i-00007e57","name":"a","access":"write"}}"#,
        r#"{"perform":null}"#,
        "7",
    ] {
        let body = format!(r#"{{"number":42,"call":{call}}}"#);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let serving = helper(&site, theirs);
        ours.write_all(&said(&body)).unwrap();
        let answer = tokio::task::spawn_blocking(move || {
            ours.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut header = [0; 8];
            ours.read_exact(&mut header).unwrap();
            let mut body = vec![0; u32::from_le_bytes(header[..4].try_into().unwrap()) as usize];
            ours.read_exact(&mut body).unwrap();
            String::from_utf8(body).unwrap()
        });
        let answer = answer.await.unwrap();
        assert!(answer.starts_with(r#"{"number":42,"answer":{"failed":{"refused""#), "{call}: {answer}");
        // It goes on until the agent hangs up, which is no failure.
        tokio::time::timeout(PATIENCE, serving).await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn what_is_no_request_at_all_ends_the_conversation() {
    let site = Site::new();
    let mut spoken = vec![
        said("garbage"),
        said(r#"{"call":"vmms"}"#),
        said(r#"{"number":1,"call":"vmms","also":1}"#),
        said(r#"{"number":-1,"call":"vmms"}"#),
        frame(u32::MAX, [0; 4], b""),
        frame(1024 * 1024 + 1, [0; 4], b""),
        frame(4, [0, 1, 0, 0], b"null"),
        frame(4, [2, 0, 0, 0], b"null"),
        // A descriptor is announced, and none comes.
        frame(4, [1, 0, 0, 0], b"null"),
        // Cut off in the middle.
        frame(100, [0; 4], b"{"),
    ];
    let mut random = fastrand::Rng::with_seed(7);
    spoken.extend((0..200).map(|_| (0..random.usize(9..300)).map(|_| random.u8(..)).collect()));
    for bytes in spoken {
        let (answer, ended) = raw(&site, bytes.clone()).await;
        assert!(matches!(ended, Err(HelperError::Garbage(_))), "{bytes:?}: {ended:?}");
        assert_eq!(answer, "");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_operations_at_once_are_all_done_and_a_slow_one_blocks_no_other() {
    let site = Site::new();
    let (host, _serving) = remote(&site);
    let host = Arc::new(host);
    // Somebody waits for an end that does not come.
    let process = patient(&site, &*host, &id()).await;
    let waited = VmmProcess { instance: id(), process };
    let (waiting, waited_for) = (Arc::clone(&host), waited.clone());
    let waiting = tokio::spawn(async move { waiting.wait_end(&waited_for).await });
    let tasks: Vec<_> = (0..100_u32)
        .map(|number| {
            let host = Arc::clone(&host);
            tokio::spawn(async move {
                let instance = InstanceId::from_bits(number);
                host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
                let disk =
                    Operation::MakeDisk { instance: instance.clone(), name: "d".to_owned(), size_mib: 1 };
                let text = number.to_string();
                let write = Operation::WriteFile {
                    instance: instance.clone(),
                    name: "n".to_owned(),
                    text: text.clone(),
                };
                let (made, written) = tokio::join!(host.perform(&disk), host.perform(&write));
                made.unwrap();
                written.unwrap();
                // Each gets its own answer, and its own descriptor.
                let file = host.open_file(&instance, "n", Access::Read).await.unwrap().unwrap();
                assert_eq!(std::io::read_to_string(file).unwrap(), text);
                assert_eq!(host.names(&instance).await.unwrap(), ["d", "n"]);
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(PATIENCE * 6, task).await.unwrap().unwrap();
    }
    assert!(!waiting.is_finished());
    assert_eq!(host.run_dirs().await.unwrap().len(), 101);
    end(&*host, &waited).await;
    assert_eq!(waiting.await.unwrap().unwrap().signal, Some(9));
}

#[tokio::test]
async fn thousands_that_do_not_wait_any_more_leave_nothing_behind() {
    let site = Site::new();
    let (host, _serving) = remote(&site);
    let process = patient(&site, &host, &id()).await;
    let vmm = VmmProcess { instance: id(), process };
    // More than may be unanswered at once.
    for _ in 0..20_000 {
        let mut waiting = Box::pin(host.wait_end(&vmm));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(waiting);
    }
    assert_eq!(host.vmms().await.unwrap(), std::slice::from_ref(&vmm));
    end(&host, &vmm).await;
}

#[tokio::test]
async fn a_helper_that_is_gone_is_an_error_for_all_who_wait_and_ask() {
    let site = Site::new();
    let (host, serving) = remote(&site);
    let process = patient(&site, &host, &id()).await;
    let vmm = VmmProcess { instance: id(), process };
    let mut waiting = Box::pin(host.wait_end(&vmm));
    assert!(futures::poll!(&mut waiting).is_pending());
    assert_eq!(host.vmms().await.unwrap().len(), 1);
    serving.abort();
    tokio::time::timeout(PATIENCE, host.gone()).await.unwrap();
    for error in [waiting.await.unwrap_err(), host.vmms().await.unwrap_err()] {
        let HostError::Io { cause, .. } = &error else { panic!("{error:?}") };
        assert_eq!(cause.kind(), std::io::ErrorKind::BrokenPipe);
        assert!(cause.to_string().contains("restart the agent"), "{cause}");
    }
    // The VMM lives on, for whoever comes next.
    let next = LocalHost::new(site.data_dir());
    assert_eq!(next.vmms().await.unwrap(), std::slice::from_ref(&vmm));
    end(&next, &vmm).await;
}

#[tokio::test]
async fn an_agent_that_sends_descriptors_is_not_served_any_further() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::fd::AsFd as _;
    let site = Site::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let serving = helper(&site, theirs);
    let file = std::fs::File::open("/dev/null").unwrap();
    let bytes = said(r#"{"number":1,"call":"vmms"}"#);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&ours, &[std::io::IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    let ended = tokio::time::timeout(PATIENCE, serving).await.unwrap().unwrap();
    assert!(matches!(ended, Err(HelperError::Garbage(_))), "{ended:?}");
}
