//! What a pool has a guest run in place of what its image says.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use crate::host::{Host, Machine, code, done, reborn, shell, wait_until};
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::workload::State as Fares;
use mvm_guest::protocol::workload_override::User;
use mvm_guest::protocol::{
    MAX_VERSION, Readiness, Reborn, RestartWorkload, Secrets, SetWorkload, State, Words, WorkloadOverride,
};

/// An image whose workload says that it is the image's, and goes on.
const IMAGE: &str = r#"{"workload": ["sh", "-c", "echo \"image $0 $FROM $ONLY\" >> RUN/said; while [ -d RUN ]; do sleep 0.05; done", "one"],
                        "env": {"FROM": "image", "ONLY": "image"}}"#;

fn words(words: &[&str]) -> Option<Words> {
    Some(Words { words: words.iter().map(|word| (*word).to_owned()).collect() })
}

/// A shell's words that say this, and go on while there is the machine.
fn said_by(machine: &Machine, what: &str) -> String {
    let run = machine.text("run");
    format!("echo {what} >> {run}/said; while [ -d {run} ]; do sleep 0.05; done")
}

fn of(generation: u64, workload: WorkloadOverride) -> Reborn {
    Reborn { workload: Some(SetWorkload { workload: Some(workload) }), ..reborn(generation) }
}

fn begin(machine: &Machine) -> Host {
    let mut host = machine.connect();
    host.hello(1, MAX_VERSION);
    host
}

fn said(machine: &Machine, lines: usize) -> String {
    let read = || fs::read_to_string(machine.path("run/said")).unwrap_or_default();
    wait_until("it to say so", || read().lines().count() >= lines);
    read()
}

/// Why its workload failed, as a new connection hears it: news that came beside an answer may be lost to another one.
fn failure(machine: &Machine) -> State {
    let mut host = begin(machine);
    loop {
        if let (0, Body::State(state)) = host.receive()
            && state.readiness() == Readiness::Failed
        {
            return state;
        }
    }
}

/// Who this process is, or someone else where it may become anyone.
fn someone() -> (u32, u32) {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if uid == 0 { (12_345, 12_346) } else { (uid, gid) }
}

#[test]
fn arguments_and_variables_of_the_pool_take_the_place_of_the_images() {
    let machine = Machine::with(Some(IMAGE), MAX_VERSION);
    let mut host = begin(&machine);
    let script = said_by(&machine, "\"pool $FROM $ONLY\"");
    let workload = WorkloadOverride {
        args: words(&["-c", &script]),
        env: [("FROM".to_owned(), "pool\nline".to_owned())].into(),
        ..WorkloadOverride::default()
    };
    assert_eq!(host.ask(Ask::Reborn(of(1, workload))), done());
    assert_eq!(said(&machine, 2), "pool pool\nline image\n");
    // What runs beside it has the same variables.
    assert_eq!(host.run(shell("echo $FROM $ONLY")).stdout, b"pool line image\n");
}

#[test]
fn it_is_run_as_its_user_in_its_folder_and_again_so_after_a_restart() {
    let (uid, gid) = someone();
    let machine = Machine::with(Some(IMAGE), MAX_VERSION);
    fs::set_permissions(machine.folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(machine.path("etc")).unwrap();
    let home = machine.text("etc");
    let passwd = format!("root:x:0:0::/root:/bin/sh\napp:x:{uid}:{gid}:App:{home}:/bin/sh\n");
    fs::write(machine.path("etc/passwd"), passwd).unwrap();
    let bundle = Secrets { data: "TOKEN=1".into(), last: true, offset: 0, padding: Vec::new() };
    let mut host = begin(&machine);
    assert_eq!(host.ask(Ask::Secrets(bundle)), done());
    let script = "cat secrets/bundle >/dev/null && echo \"$(id -u) $(id -g) $PWD $HOME\" >> said && \
                  while [ -d $PWD ]; do sleep 0.05; done";
    let workload = WorkloadOverride {
        command: words(&["sh", "-c"]),
        args: words(&[script]),
        directory: machine.text("run"),
        user: Some(User::Name("app".to_owned())),
        ..WorkloadOverride::default()
    };
    // As a template is told it, and then every fork of that.
    let set = SetWorkload { workload: Some(workload) };
    assert_eq!(host.ask(Ask::SetWorkload(set)), done());
    assert_eq!(host.ask(Ask::Reborn(reborn(1))), done());
    let line = format!("{uid} {gid} {} {home}\n", machine.text("run"));
    assert_eq!(said(&machine, 1), line);
    assert_eq!(host.ask(Ask::RestartWorkload(RestartWorkload { run: 1, grace_seconds: 5 })), done());
    assert_eq!(said(&machine, 2), line.repeat(2));
    // It may read its secrets, and put nothing in their place.
    let bundle = fs::metadata(machine.path("run/secrets/bundle")).unwrap();
    let folder = fs::metadata(machine.path("run/secrets")).unwrap();
    assert_eq!((bundle.gid(), bundle.mode() & 0o7777, folder.mode() & 0o7777), (gid, 0o440, 0o750));
    assert_eq!(fs::metadata(machine.path("run")).unwrap().mode() & 0o7777, 0o1775);
    // Another bundle is its to read as well.
    let bundle = Secrets { data: "TOKEN=2".into(), last: true, offset: 0, padding: Vec::new() };
    assert_eq!(host.ask(Ask::Secrets(bundle)), done());
    let bundle = fs::metadata(machine.path("run/secrets/bundle")).unwrap();
    assert_eq!((bundle.gid(), bundle.mode() & 0o7777), (gid, 0o440));
}

#[test]
fn what_can_not_be_run_as_the_pool_says_fails_and_says_why() {
    let cases = [
        (
            WorkloadOverride { command: words(&["/no/such"]), ..WorkloadOverride::default() },
            "could not start /no/such: ",
        ),
        (
            WorkloadOverride { user: Some(User::Name("nobody".to_owned())), ..WorkloadOverride::default() },
            "could not start sh: user nobody is not in the guest's /etc/passwd",
        ),
        (
            WorkloadOverride { directory: "/no/such".to_owned(), ..WorkloadOverride::default() },
            "could not start sh: working directory /no/such: ",
        ),
    ];
    for (workload, why) in cases {
        let machine = Machine::with(Some(IMAGE), MAX_VERSION);
        let mut host = begin(&machine);
        assert_eq!(host.ask(Ask::Reborn(of(1, workload))), done());
        let state = failure(&machine);
        assert!(state.message.starts_with(why), "{}", state.message);
        assert_eq!(state.workload.unwrap().state(), Fares::Failed);
    }
}

#[test]
fn arguments_without_a_program_are_refused_when_it_is_to_be_started_again() {
    let machine = Machine::with(None, MAX_VERSION);
    let mut host = begin(&machine);
    let workload = WorkloadOverride { args: words(&["x"]), ..WorkloadOverride::default() };
    assert_eq!(host.ask(Ask::Reborn(of(1, workload))), done());
    failure(&machine);
    let mut host = begin(&machine);
    assert_eq!(
        code(&host.ask(Ask::RestartWorkload(RestartWorkload { run: 0, grace_seconds: 1 }))),
        "invalid"
    );
    // The next one is told otherwise: an image without a workload runs what the pool says.
    let machine = Machine::with(None, MAX_VERSION);
    let mut host = begin(&machine);
    let script = said_by(&machine, "here");
    let workload = WorkloadOverride { command: words(&["sh", "-c", &script]), ..WorkloadOverride::default() };
    assert_eq!(host.ask(Ask::Reborn(of(1, workload))), done());
    assert_eq!(said(&machine, 1), "here\n");
}
