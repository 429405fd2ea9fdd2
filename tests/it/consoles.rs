//! The console of a real microVM, followed through its sleep and its agent's end.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::io::Read as _;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, nothing, small_pool, wait_until};

const LONG: Duration = Duration::from_secs(180);

#[test]
fn a_console_is_followed_through_sleep_wake_and_the_agents_end_until_the_instance_is_gone() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let images = mvm_tests::test_images();
    let mut agent = LoneAgent::new("qemu", &["--images-dir", mvm_tests::path_text(&images)]);
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    let id = agent.wait_counts(1, 0, 0, LONG)["running"].first().expect("one runs").clone();
    let writes = |agent: &LoneAgent, word: &str| {
        let script = format!("echo {word} > /dev/console");
        agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", &script]);
    };
    writes(&agent, "first-line");
    let logs = |agent: &LoneAgent, args: &[&str]| agent.mvm_ok(&[&["instance", "logs", &id], args].concat());
    wait_until("the line to be in the log", LONG, || logs(&agent, &["--tail", "3"]).contains("first-line"));
    assert_eq!(logs(&agent, &["--tail", "0"]), "");
    let whole = logs(&agent, &["--bytes", "1048576"]);
    assert!(logs(&agent, &["--since", "1h"]).starts_with(&whole), "all of it is younger than that");

    let follower = agent.mvm_command(&["instance", "logs", "-f", "--tail", "2", &id]);
    let mut follower = { follower }.stdout(Stdio::piped()).spawn().expect("mvm runs");
    let mut said = follower.stdout.take().expect("its output is a pipe");
    let (tell, pieces) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = said.read(&mut buffer) {
            if tell.send(String::from_utf8_lossy(&buffer[..length]).into_owned()).is_err() {
                return;
            }
        }
    });
    let mut shown = String::new();
    let mut until = |word: &str| {
        let begun = Instant::now();
        while !shown.contains(word) {
            let left = LONG.saturating_sub(begun.elapsed());
            shown.push_str(&pieces.recv_timeout(left).unwrap_or_else(|_| panic!("no {word} in {shown:?}")));
        }
        shown.clone()
    };
    until("first-line");
    agent.declare(&small_pool(0, 0, 1));
    agent.wait_counts(0, 0, 1, LONG);
    agent.declare(&small_pool(1, 0, 0));
    agent.wait_counts(1, 0, 0, LONG);
    writes(&agent, "after-sleep");
    until("after-sleep");
    agent.kill();
    agent.start();
    agent.wait_counts(1, 0, 0, LONG);
    writes(&agent, "after-agent");
    let shown = until("after-agent");
    for word in ["first-line", "after-sleep", "after-agent"] {
        assert_eq!(shown.matches(word).count(), 1, "each once: {shown:?}");
    }
    agent.declare(&nothing());
    let mut status = None;
    wait_until("the follower to end with its instance", LONG, || {
        status = follower.try_wait().expect("a child can be waited for");
        status.is_some()
    });
    assert_eq!(status.and_then(|status| status.code()), Some(0));
}
