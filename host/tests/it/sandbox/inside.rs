//! Everything that a VMM could try once a guest has taken it over, tried from inside by this very test program.

use std::collections::BTreeMap;
use std::fs;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use mvm_host::sandbox::{Confinement, Demand, Filter};
use mvm_host::{EndSignal, Host as _, HostError};
use mvm_needs::{Need, can_run};
use nix::libc;

use super::attempts::{ALLOWED, BY_FILTER, FORBIDDEN, HOLE, OPEN_KVM, PRETENDED, World};
use super::{Machine, assert_confined, wait_until};

const WORLD: &str = "world.json";
const PATIENT: &str = "be patient";

/// Started by the other tests with a world in its working directory; prints how each attempt went.
#[test]
#[ignore = "a child of the other tests runs it, inside"]
#[allow(clippy::print_stdout, reason = "what it prints is its answer")]
fn probe() {
    let world: World = serde_json::from_slice(&fs::read(WORLD).unwrap()).unwrap();
    if world.only.iter().any(|name| name == PATIENT) {
        println!("\ndone");
        // Nobody connects: it waits until it is ended.
        let _ = UnixListener::bind("patient.sock").unwrap().accept();
        return;
    }
    for attempt in ALLOWED.iter().chain(FORBIDDEN) {
        let asked = world.only.is_empty() || world.only.iter().any(|name| name == attempt.name);
        if asked && (attempt.harmless || !world.harmless) {
            println!("\ntry: {}", attempt.name);
            let errno = (attempt.run)(&world).err().map_or(0, |cause| cause.raw_os_error().unwrap_or(-1));
            println!("\nanswer: {} = {errno}", attempt.name);
        }
    }
    println!("\ndone");
}

/// What came of each attempt: 0 for success, else an error number.
type Answers = BTreeMap<String, i32>;

/// Runs the probe to its end: its answers, and the signal that ended it.
async fn run(
    machine: &Machine,
    number: u32,
    confine: Option<Confinement>,
    only: &[&str],
) -> (Answers, Option<i32>) {
    run_told(machine, number, confine, only, arguments()).await
}

async fn run_told(
    machine: &Machine,
    number: u32,
    confine: Option<Confinement>,
    only: &[&str],
    told: Vec<String>,
) -> (Answers, Option<i32>) {
    let (dir, neighbour) = (machine.run_dir(number).await, machine.run_dir(number + 1).await);
    fs::write(neighbour.join("secret"), "secret").unwrap();
    let name = format!("mvm-sandbox-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let world = World {
        only: only.iter().map(|name| (*name).to_owned()).collect(),
        harmless: confine.is_none(),
        neighbour,
        image: machine.image(),
        host_pid: i32::try_from(std::process::id()).unwrap(),
        abstract_socket: name,
        launch: confine.as_ref().map_or(1024, |confine| confine.limits.open_files),
    };
    fs::write(dir.join(WORLD), serde_json::to_vec(&world).unwrap()).unwrap();
    let confine = confine.map(|confine| Confinement { images: vec![world.image.clone()], ..confine });
    let vmm = machine.start(number, &program(), &told, confine).await.unwrap();
    let end = machine.ended(&vmm).await;
    let log = machine.log(number);
    let answers = log.lines().filter_map(|line| line.strip_prefix("answer: ")?.rsplit_once(" = "));
    let answers: Answers = answers.map(|(name, errno)| (name.to_owned(), errno.parse().unwrap())).collect();
    assert!(end.signal.is_some() || log.contains("\ndone\n"), "{end:?}: {log}");
    (answers, end.signal)
}

fn program() -> std::path::PathBuf {
    std::env::current_exe().unwrap()
}

fn arguments() -> Vec<String> {
    ["--ignored", "--exact", "sandbox::inside::probe", "--nocapture", "--test-threads=1"]
        .map(str::to_owned)
        .to_vec()
}

fn confined(number: u32, filter: Filter) -> Confinement {
    Confinement { filter, ..Confinement::qemu(Machine::uid(number), super::GID) }
}

#[tokio::test]
async fn from_inside_everything_is_refused_but_a_vmms_own_work() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    let (answers, signal) = run(&machine, 1, Some(confined(1, Filter::Baseline)), &[]).await;
    assert_eq!(signal, None, "{}", machine.log(1));
    let failed: Vec<_> = ALLOWED.iter().filter(|attempt| answers[attempt.name] != 0).collect();
    let failed: Vec<_> = failed.iter().map(|attempt| (attempt.name, answers[attempt.name])).collect();
    assert!(failed.is_empty(), "a VMM needs these: {failed:?}");
    let open: Vec<_> =
        FORBIDDEN.iter().map(|attempt| attempt.name).filter(|name| answers[*name] == 0).collect();
    assert!(open.is_empty(), "a VMM that was taken over can do: {open:?}");
    let other: Vec<_> = BY_FILTER.iter().filter(|name| answers[**name] != libc::EPERM).collect();
    assert!(other.is_empty(), "the filter let these through, something else refused: {other:?}");
    eprintln!("{} attempts refused, {} allowed", FORBIDDEN.len(), ALLOWED.len());
}

/// Shows that the attempts are real ones: without confinement those that do no harm succeed.
#[tokio::test]
async fn without_confinement_the_same_attempts_succeed() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    let (answers, signal) = run(&machine, 3, None, &[]).await;
    assert_eq!(signal, None);
    let refused: Vec<_> = answers.iter().filter(|(_, errno)| **errno != 0).collect();
    assert!(refused.is_empty(), "{refused:?}");
    assert!(answers.len() > 30);
}

#[tokio::test]
async fn the_strict_filter_kills_a_process_that_makes_a_forbidden_system_call() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    for (index, name) in
        ["mount", "be traced", "a user namespace", "bpf", "be root", "a device"].iter().enumerate()
    {
        let number = 10 + 2 * u32::try_from(index).unwrap();
        let (answers, signal) = run(&machine, number, Some(confined(number, Filter::Strict)), &[name]).await;
        assert_eq!((signal, answers.get(*name)), (Some(libc::SIGSYS), None), "{name}");
    }
    // What is only refused, so that trying it is no death.
    let tolerated = ["io_uring", "read /etc/passwd", "TCP", "another working directory"];
    let (answers, signal) = run(&machine, 30, Some(confined(30, Filter::Strict)), &tolerated).await;
    assert_eq!(signal, None, "{}", machine.log(30));
    assert!(tolerated.iter().all(|name| answers[*name] != 0), "{answers:?}");
}

/// Beside a balloon disks offer no holes; others' disks do, and what is told to be empty there must be.
#[tokio::test]
async fn holes_are_holes_but_for_a_vmm_with_a_balloon() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    for (number, filter) in [(70, Filter::Baseline), (74, Filter::Strict)] {
        let (answers, _) = run(&machine, number, Some(confined(number, filter)), &[HOLE]).await;
        assert_eq!(answers.get(HOLE), Some(&0), "{filter:?}");
        let mut told = arguments();
        told.push("virtio-balloon-device,id=balloon".to_owned());
        let number = number + 2;
        let (answers, _) = run_told(&machine, number, Some(confined(number, filter)), &[HOLE], told).await;
        assert_eq!(answers.get(HOLE), Some(&PRETENDED), "{filter:?}");
    }
}

#[tokio::test]
async fn kvm_is_available_only_to_vmms_that_are_given_it() {
    let device =
        Path::new("/dev/kvm").exists().then_some(()).ok_or_else(|| "there is no /dev/kvm".to_owned());
    if !can_run(&[Need::Root, Need::Kvm(device)]) {
        return;
    }
    let machine = Machine::new();
    for (number, kvm) in [(60, true), (62, false)] {
        let confine = Confinement { kvm, ..confined(number, Filter::Strict) };
        let (answers, _) = run(&machine, number, Some(confine), &[OPEN_KVM]).await;
        assert_eq!(answers[OPEN_KVM] == 0, kvm);
    }
}

#[tokio::test]
async fn a_confined_process_is_found_by_its_directory_whatever_its_command_line_says() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    let dir = machine.run_dir(40).await;
    let world = World {
        only: vec![PATIENT.to_owned()],
        harmless: false,
        neighbour: "/".into(),
        image: "/".into(),
        host_pid: 1,
        abstract_socket: String::new(),
        launch: 0,
    };
    fs::write(dir.join(WORLD), serde_json::to_vec(&world).unwrap()).unwrap();
    let vmm = machine
        .start_unnamed(40, &program(), arguments(), Some(confined(40, Filter::Baseline)))
        .await
        .unwrap();
    wait_until("the probe", || machine.log(40).contains("done")).await;
    assert_confined(&vmm, Machine::uid(40));
    // The kernel names its directory as it is named outside, so that the scan finds it.
    let cwd = fs::read_link(format!("/proc/{}/cwd", vmm.process.pid)).unwrap();
    assert_eq!(cwd, dir.canonicalize().unwrap());
    assert_eq!(machine.host.vmms().await.unwrap(), std::slice::from_ref(&vmm));
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", vmm.process.pid)).unwrap();
    let writable: Vec<_> = mounts.lines().filter(|line| !line.contains(" ro,")).collect();
    assert_eq!(writable.len(), 1, "only the run directory is to be written: {mounts}");
    assert!(writable[0].contains("nosuid,nodev,noexec"), "{mounts}");
    // The first process of a pid namespace has no default for this signal; it ends by one that can't be ignored.
    let end = machine.end(&vmm, EndSignal::Kill).await;
    assert_eq!((end.exit_code, end.signal), (None, Some(libc::SIGKILL)));
    assert!(!Path::new(&format!("/proc/{}", vmm.process.pid)).exists(), "reaped");
}

#[tokio::test]
async fn what_cannot_be_confined_is_not_started_and_the_reason_is_told() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    machine.run_dir(50).await;
    let unreadable = machine.image();
    std::os::unix::fs::chown(&unreadable, Some(0), Some(0)).unwrap();
    fs::set_permissions(&unreadable, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let base = confined(50, Filter::Baseline);
    let cases = [
        (Confinement { uid: 0, ..base.clone() }, "never runs as root"),
        (Confinement { images: vec!["relative".into()], ..base.clone() }, "not an absolute path"),
        (
            Confinement { images: vec!["/absent/image".into()], ..base.clone() },
            "could not open /absent/image",
        ),
        (Confinement { images: vec![unreadable], ..base.clone() }, "can't be read by user"),
        (Confinement { oom_score: 2000, ..base.clone() }, "confine the VMM: its place when memory is short"),
        // Without its libraries the loader is missing, and so is the program for the kernel.
        (Confinement { needs: Vec::new(), demand: Demand::BestEffort, ..base }, ""),
    ];
    for (confine, reason) in cases {
        match machine.start(50, &program(), &arguments(), Some(confine)).await {
            Err(refused) => {
                assert!(refused.to_string().contains(reason), "{refused}");
                assert!(!matches!(refused, HostError::ProgramMissing { .. }), "{refused}");
            }
            // The loader itself is shown; it ends for want of libraries.
            Ok(vmm) => assert_ne!(machine.ended(&vmm).await.exit_code, Some(0), "{reason}"),
        }
        assert_eq!(machine.host.vmms().await.unwrap(), []);
    }
}

/// Without rights there is no other user, no namespace and no root; Landlock and the filter bind all the same.
#[test]
#[ignore = "a child of another test runs it, as a user without rights"]
fn unprivileged() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let machine = Machine::new();
        let base = confined(1, Filter::Baseline);
        let refused = machine.start(1, &program(), &arguments(), Some(base.clone())).await.unwrap_err();
        assert!(refused.to_string().contains("run directory"), "{refused}");
        for number in [1, 2] {
            let instance = Machine::instance(number);
            machine.host.perform(&mvm_host::Operation::MakeRunDir { instance }).await.unwrap();
        }
        let refused = machine.start(1, &program(), &arguments(), Some(base.clone())).await.unwrap_err();
        assert!(refused.to_string().contains("CAP_SYS_ADMIN"), "{refused}");
        let best_effort = Confinement { demand: Demand::BestEffort, ..base };
        let (answers, signal) = run(&machine, 1, Some(best_effort), &[]).await;
        assert_eq!(signal, None);
        let failed: Vec<_> =
            ALLOWED.iter().map(|attempt| attempt.name).filter(|name| answers[*name] != 0).collect();
        assert!(failed.is_empty(), "{failed:?}");
        let open: Vec<_> =
            FORBIDDEN.iter().map(|attempt| attempt.name).filter(|name| answers[*name] == 0).collect();
        assert!(open.is_empty(), "{open:?}");
    });
}

#[test]
fn without_rights_it_is_refused_or_done_as_well_as_can_be() {
    if !can_run(&[Need::Root]) {
        return;
    }
    use std::os::unix::process::CommandExt as _;
    // Where it was built others may not look.
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let copy = dir.path().join("sandbox");
    fs::copy(program(), &copy).unwrap();
    let args = ["--ignored", "--exact", "sandbox::inside::unprivileged", "--nocapture"];
    let mut command = std::process::Command::new(&copy);
    let done = command
        .args(args)
        .uid(super::FIRST_UID)
        .gid(super::GID)
        .current_dir(dir.path())
        .env("TMPDIR", dir.path());
    // What another thread forks at this moment still holds the copy open for writing, until it is another program.
    let output = loop {
        match done.output() {
            Err(cause) if cause.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            output => break output.unwrap(),
        }
    };
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}
