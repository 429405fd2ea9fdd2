//! A workload that ends or is not healthy: what the agent is told of it, and how it is started again.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use crate::host::{self, Host, Machine, code, done, reborn, wait_until};
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::workload::State as Fares;
use mvm_guest::protocol::{
    ExecCheck, FEATURE_HEALTH, FEATURE_RESTART, FEATURE_WORKLOAD, Health, HttpCheck, MAX_VERSION,
    PrepareSleep, Readiness, RestartWorkload, SetHealth, TcpCheck, health::Check,
};

/// Says that it is up by a file of its run's number, and ends as the file `end` says.
const WORKLOAD: &str = r#"{"workload": ["sh", "-c",
    "n=$(cat RUN/runs 2>/dev/null || echo 0); echo $((n+1)) > RUN/runs.new; mv RUN/runs.new RUN/runs; trap 'exit 0' TERM; until [ -e RUN/end ] || [ ! -d RUN ]; do sleep 0.01; done; code=$(cat RUN/end || echo 0); rm RUN/end; exit $code"]}"#;

fn end(machine: &Machine, code: &str) {
    let new = machine.path("run/end.new");
    std::fs::write(&new, code).unwrap();
    std::fs::rename(new, machine.path("run/end")).unwrap();
}

fn runs(machine: &Machine) -> String {
    std::fs::read_to_string(machine.path("run/runs")).unwrap_or_default().trim().to_owned()
}

/// Waits, on a connection of its own, until the guest tells this of its workload: news that came beside an answer may be
/// lost to another one.
fn wait_for(machine: &Machine, fares: Fares, run: u32) -> (Host, Readiness, String) {
    let (mut host, found) = reconnect(machine);
    // What works has no more to say; what does not tells why.
    if fares == Fares::Running && (found.1, found.2) == (fares, run) {
        return (host, found.0, String::new());
    }
    loop {
        if let (0, Body::State(state)) = host.receive()
            && let Some(workload) = &state.workload
            && (workload.state(), workload.run) == (fares, run)
        {
            return (host, state.readiness(), state.message);
        }
    }
}

/// The same until it is ready.
fn wait_ready(machine: &Machine) -> Host {
    let (mut host, found) = reconnect(machine);
    if found.0 != Readiness::Ready {
        host.wait_for(Readiness::Ready);
    }
    host
}

/// What a new connection hears at once.
fn reconnect(machine: &Machine) -> (Host, (Readiness, Fares, u32)) {
    let mut host = machine.connect();
    let hello = host.hello(1, MAX_VERSION);
    let workload = hello.workload.unwrap();
    (host, (hello.readiness(), workload.state(), workload.run))
}

fn restart(run: u32) -> Ask {
    Ask::RestartWorkload(RestartWorkload { run, grace_seconds: 5 })
}

fn check(check: Check) -> Health {
    Health {
        check: Some(check),
        start_period_seconds: 0,
        interval_seconds: 1,
        timeout_seconds: 30,
        failure_threshold: 2,
    }
}

fn checks_file(machine: &Machine) -> Health {
    let command = ["test", "-e", &machine.text("healthy")].map(str::to_owned).to_vec();
    check(Check::Exec(ExecCheck { command }))
}

/// A machine whose guest checks like this from the beginning.
fn begin(machine: &Machine, health: Health) -> Host {
    let mut host = machine.connect();
    let hello = host.hello(1, MAX_VERSION);
    for feature in [FEATURE_RESTART, FEATURE_HEALTH, FEATURE_WORKLOAD] {
        assert!(hello.features.iter().any(|named| named == feature), "{feature}");
    }
    let set = SetHealth { health: Some(health) };
    let request = mvm_guest::protocol::Reborn { health: Some(set), ..reborn(1) };
    assert_eq!(host.ask(Ask::Reborn(request)), done());
    host
}

#[test]
fn a_workload_that_ended_is_started_again_once_for_each_time_it_is_asked() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    machine.ready();
    wait_until("it runs", || runs(&machine) == "1");
    end(&machine, "3");
    let (mut host, readiness, message) = wait_for(&machine, Fares::Failed, 1);
    assert_eq!((readiness, message.as_str()), (Readiness::Failed, "the workload ended: exit code 3"));
    assert_eq!(host.ask(restart(1)), done());
    wait_until("it runs again", || runs(&machine) == "2");
    // Asked for again by an agent that did not hear the answer.
    assert_eq!(host.ask(restart(1)), done());
    assert_eq!(reconnect(&machine).1, (Readiness::Ready, Fares::Running, 2));
    end(&machine, "0");
    assert_eq!(wait_for(&machine, Fares::Completed, 2).1, Readiness::Failed);
    assert_eq!(runs(&machine), "2");
}

#[test]
fn a_workload_that_still_runs_is_ended_first_and_its_end_is_no_news() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    let mut host = machine.ready();
    wait_until("it runs", || runs(&machine) == "1");
    let asked = host::number();
    host.send(asked, restart(1));
    loop {
        match host.receive() {
            (0, Body::State(state)) => assert_ne!(state.readiness(), Readiness::Failed, "{state:?}"),
            (number, Body::Done(_)) if number == asked => break,
            _ => {}
        }
    }
    assert_eq!(reconnect(&machine).1, (Readiness::Ready, Fares::Running, 2));
    wait_until("it runs again", || runs(&machine) == "2");
}

#[test]
fn what_a_failed_run_left_behind_is_gone_before_the_next_one() {
    let config = r#"{"workload": ["sh", "-c",
        "echo run >> RUN/runs; sleep 1000 & echo $! > RUN/left.new; mv RUN/left.new RUN/left; until [ -e RUN/end ] || [ ! -d RUN ]; do sleep 0.01; done; rm RUN/end; exit 3"]}"#;
    let machine = Machine::with(Some(config), MAX_VERSION);
    machine.ready();
    wait_until("it runs", || machine.path("run/left").exists());
    let left = std::fs::read_to_string(machine.path("run/left")).unwrap();
    end(&machine, "3");
    let (mut host, ..) = wait_for(&machine, Fares::Failed, 1);
    // Killed, it is nobody's child here and is reaped by whoever is.
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", left.trim())).unwrap_or_default();
    wait_until("what it left is gone", || state().is_empty() || state().contains(") Z "));
    assert_eq!(host.ask(restart(1)), done());
    wait_until("it runs again", || {
        std::fs::read_to_string(machine.path("run/runs")).unwrap_or_default().lines().count() == 2
    });
    end(&machine, "0");
    wait_for(&machine, Fares::Failed, 2);
}

#[test]
fn what_the_last_run_said_does_not_make_the_next_one_ready() {
    let config = r#"{"workload": ["sh", "-c", "until [ -e RUN/go ]; do sleep 0.01; done; rm RUN/go; echo > RUN/worker-ready; exec sleep 1000"], "ready": "file"}"#;
    let machine = Machine::with(Some(config), MAX_VERSION);
    machine.ready();
    let go = || std::fs::write(machine.path("run/go"), "").unwrap();
    go();
    let mut host = wait_ready(&machine);
    assert_eq!(host.ask(restart(1)), done());
    assert_eq!(reconnect(&machine).1, (Readiness::Starting, Fares::Running, 2));
    assert!(!machine.path("run/worker-ready").exists());
    go();
    wait_ready(&machine);
}

#[test]
fn there_is_nothing_to_start_again_in_an_image_without_a_workload() {
    let machine = Machine::new();
    let mut host = machine.ready();
    assert_eq!(code(&host.ask(restart(0))), "invalid");
}

#[test]
fn an_agent_of_an_older_version_hears_nothing_of_runs() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    let mut host = machine.connect();
    let hello = host.hello(1, 2);
    assert_eq!((hello.features.len(), hello.workload), (0, None));
    assert_eq!(host.ask(Ask::Reborn(reborn(1))), done());
    wait_until("it runs", || runs(&machine) == "1");
    end(&machine, "1");
    loop {
        if let (0, Body::State(state)) = host.receive() {
            assert_eq!(state.workload, None);
            if state.readiness() == Readiness::Failed {
                break;
            }
        }
    }
    assert_eq!(code(&host.ask(restart(1))), "unsupported");
}

#[test]
fn a_workload_is_ready_when_its_check_succeeds_and_unhealthy_when_it_fails_too_often() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    // For as long as the test may take: failures before the first success mean nothing.
    let health = Health { start_period_seconds: 3600, ..checks_file(&machine) };
    begin(&machine, health);
    assert_eq!(reconnect(&machine).1, (Readiness::Starting, Fares::Running, 1));
    std::fs::write(machine.path("healthy"), "").unwrap();
    wait_ready(&machine);
    std::fs::remove_file(machine.path("healthy")).unwrap();
    let (_, readiness, message) = wait_for(&machine, Fares::Unhealthy, 1);
    assert_eq!(readiness, Readiness::Failed);
    assert!(
        message.starts_with("the workload is unhealthy: 2 checks in a row failed: test: exit status: 1"),
        "{message}"
    );
    assert_eq!(reconnect(&machine).1, (Readiness::Failed, Fares::Unhealthy, 1));
    std::fs::write(machine.path("healthy"), "").unwrap();
    assert_eq!(wait_for(&machine, Fares::Running, 1).1, Readiness::Ready);
}

#[test]
fn a_workload_that_never_becomes_healthy_is_unhealthy_and_a_restart_begins_anew() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    begin(&machine, checks_file(&machine));
    let (mut host, ..) = wait_for(&machine, Fares::Unhealthy, 1);
    assert_eq!(host.ask(restart(1)), done());
    let (mut host, ..) = wait_for(&machine, Fares::Unhealthy, 2);
    // Without a check nothing is wrong with it.
    assert_eq!(host.ask(Ask::SetHealth(SetHealth { health: None })), done());
    assert_eq!(reconnect(&machine).1, (Readiness::Ready, Fares::Running, 2));
}

#[test]
fn nothing_is_checked_while_the_guest_prepares_for_sleep() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    std::fs::write(machine.path("healthy"), "").unwrap();
    begin(&machine, checks_file(&machine));
    let mut host = wait_ready(&machine);
    assert_eq!(host.ask(Ask::PrepareSleep(PrepareSleep { timeout_seconds: 60 })), done());
    std::fs::remove_file(machine.path("healthy")).unwrap();
    // Two heartbeats later than two checks would have been.
    for _ in 0..2 {
        loop {
            match host.receive() {
                (0, Body::Heartbeat(beat)) => {
                    assert_eq!(beat.readiness(), Readiness::Ready);
                    break;
                }
                (0, Body::State(state)) => assert_ne!(state.readiness(), Readiness::Failed),
                _ => {}
            }
        }
    }
    // It wakes: checks go on.
    assert_eq!(host.ask(Ask::Reborn(reborn(2))), done());
    wait_for(&machine, Fares::Unhealthy, 1);
}

#[test]
fn a_port_that_takes_a_connection_is_healthy_and_one_that_is_closed_is_not() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port().into();
    begin(&machine, check(Check::Tcp(TcpCheck { port })));
    wait_ready(&machine);
    drop(listener);
    let (_, _, message) = wait_for(&machine, Fares::Unhealthy, 1);
    assert!(message.contains(&format!("port {port}: ")), "{message}");
}

#[test]
fn an_answer_decides_by_its_status() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port().into();
    let well = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let said = std::sync::Arc::clone(&well);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap();
            let asked = String::from_utf8_lossy(&request[..length]).into_owned();
            let well = said.load(std::sync::atomic::Ordering::SeqCst);
            let status =
                if well && asked.starts_with("GET /up?a=b HTTP/1.1\r\nHost: ") { "204" } else { "503" };
            // In two pieces, as a slow program would.
            stream.write_all(b"HTTP/1.1 ").unwrap();
            stream.write_all(format!("{status} x\r\n\r\n").as_bytes()).unwrap();
        }
    });
    begin(&machine, check(Check::Http(HttpCheck { port, path: "/up?a=b".to_owned() })));
    wait_ready(&machine);
    well.store(false, std::sync::atomic::Ordering::SeqCst);
    let (_, _, message) = wait_for(&machine, Fares::Unhealthy, 1);
    assert!(message.ends_with(&format!("GET /up?a=b on port {port}: status 503")), "{message}");
}

#[test]
fn a_check_that_takes_too_long_failed_and_leaves_nothing_behind() {
    let machine = Machine::with(Some(WORKLOAD), MAX_VERSION);
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; sleep 1000", machine.text("pid"));
    let command = ["sh", "-c", &script].map(str::to_owned).to_vec();
    let health =
        Health { timeout_seconds: 1, failure_threshold: 1, ..check(Check::Exec(ExecCheck { command })) };
    begin(&machine, health);
    let (mut host, _, message) = wait_for(&machine, Fares::Unhealthy, 1);
    assert!(message.ends_with("sh did not end within 1 s"), "{message}");
    assert_eq!(host.ask(Ask::SetHealth(SetHealth { health: None })), done());
    let pid = std::fs::read_to_string(machine.path("pid")).unwrap();
    let path = format!("/proc/{}", pid.trim());
    wait_until("it is gone", || !std::path::Path::new(&path).exists());
}
