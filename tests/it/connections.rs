//! What a command leaves open at the agent that it asked: nothing, however it ended.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use mvm_tests::{Cluster, PATIENCE, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// An agent has 16 connections for one identity, and keeps one that just stops for 30 seconds.
const CALLS: usize = 60;
const INTERRUPTED: usize = 20;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");

/// A cluster whose agent may be asked as often as anyone likes, and where that agent is.
fn start() -> (Cluster, String) {
    let mut cluster = Cluster::start();
    cluster.enrol("node-a");
    cluster.start_agent("node-a", &["--rate-per-second", "1000", "--rate-burst", "1000"]);
    cluster.wait_connected("node-a");
    let agent = format!("agent:https://127.0.0.1:{}", cluster.agents["node-a"].port);
    (cluster, agent)
}

#[test]
fn sixty_calls_in_a_row_are_all_answered() {
    let (cluster, agent) = start();
    let refused: Vec<_> = (0..CALLS)
        .map(|_| cluster.mvm(&["node", "stats", "--endpoint", &agent]))
        .filter(|output| !output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
        .collect();
    assert_eq!(refused.len(), 0, "of {CALLS}: {}", refused[0]);
}

#[test]
fn calls_that_fail_or_are_interrupted_leave_no_connection_behind() {
    let (cluster, agent) = start();
    for _ in 0..INTERRUPTED {
        cluster.mvm_fails(&["instance", "get", "i-00000001", "--endpoint", &agent], 1);
    }
    cluster.mvm_ok(&["push", "--node", "node-a", "-f", DOCUMENT]);
    for round in 0..INTERRUPTED {
        let mut command = cluster.command(&["events", "--follow", "-o", "json", "--endpoint", &agent]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mvm runs");
        // What happened before comes first: from then on the connection stands.
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        assert!(first.starts_with('{'), "round {round}: {first:?} {:?}", child.wait_with_output());
        let signal = if round % 2 == 0 { Signal::SIGINT } else { Signal::SIGTERM };
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
        let mut ended = None;
        wait_until("the interrupted command to end", PATIENCE, || {
            ended = child.try_wait().unwrap();
            ended.is_some()
        });
        assert_eq!(ended.and_then(|status| status.code()), Some(128 + signal as i32), "round {round}");
    }
    cluster.mvm_ok(&["node", "stats", "--endpoint", &agent]);
}
