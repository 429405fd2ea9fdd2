//! The console of a real microVM, followed through its sleep and the end of its agent and of the coordinator.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mvm_needs::{Need, can_run};
use mvm_tests::{Cluster, LoneAgent, nothing, path_text, small_pool, wait_for, wait_until};

const LONG: Duration = Duration::from_secs(180);

#[test]
fn a_console_is_followed_through_sleep_wake_and_the_agents_end_until_the_instance_is_gone() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let images = mvm_tests::test_images();
    let mut agent = LoneAgent::new("qemu", &["--images-dir", path_text(&images)]);
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

    let mut follower = Follower::start(agent.mvm_command(&["instance", "logs", "-f", "--tail", "2", &id]));
    follower.until("first-line");
    agent.declare(&small_pool(0, 0, 1));
    agent.wait_counts(0, 0, 1, LONG);
    agent.declare(&small_pool(1, 0, 0));
    agent.wait_counts(1, 0, 0, LONG);
    writes(&agent, "after-sleep");
    follower.until("after-sleep");
    agent.kill();
    agent.start();
    agent.wait_counts(1, 0, 0, LONG);
    writes(&agent, "after-agent");
    let shown = follower.until("after-agent");
    for word in ["first-line", "after-sleep", "after-agent"] {
        assert_eq!(shown.matches(word).count(), 1, "each once: {shown:?}");
    }
    agent.declare(&nothing());
    assert_eq!(follower.ends(), Some(0), "with its instance");
}

/// `mvm logs -f`, and what it shows.
struct Follower {
    child: Child,
    pieces: mpsc::Receiver<String>,
    shown: String,
}

impl Follower {
    fn start(mut mvm: Command) -> Self {
        let mut child = mvm.stdout(Stdio::piped()).spawn().expect("mvm runs");
        let mut said = child.stdout.take().expect("its output is a pipe");
        let (tell, pieces) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = said.read(&mut buffer) {
                if tell.send(String::from_utf8_lossy(&buffer[..length]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { child, pieces, shown: String::new() }
    }

    /// Waits until this was shown; all that was.
    fn until(&mut self, word: &str) -> String {
        let begun = Instant::now();
        while !self.shown.contains(word) {
            let left = LONG.saturating_sub(begun.elapsed());
            let piece = self.pieces.recv_timeout(left);
            self.shown.push_str(&piece.unwrap_or_else(|_| panic!("no {word} in {:?}", self.shown)));
        }
        self.shown.clone()
    }

    fn ends(&mut self) -> Option<i32> {
        let mut status = None;
        wait_until("the follower to end", LONG, || {
            status = self.child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_console_is_followed_through_the_coordinator_which_goes_and_comes_as_its_agent_does() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut cluster = Cluster::start();
    cluster.join_with_microvms("node-a");
    let pool = cluster.file("pool.json", &small_pool(1, 0, 0).to_string());
    cluster.mvm_ok(&["push", "-f", path_text(&pool), "--node", "node-a", "--timeout", "2m"]);
    let id = wait_for("a guest to run", LONG, || {
        let listed = cluster.mvm_json(&["instance", "list"]);
        let is_running = listed[0]["phase"] == "running";
        listed[0]["instance_id"].as_str().filter(|_| is_running).map(str::to_owned)
    });
    let writes = |cluster: &Cluster, word: &str| {
        let script = format!("echo {word} > /dev/console");
        // A coordinator may still think of the session of an agent that is gone.
        wait_until("it to be written", LONG, || {
            cluster.mvm(&["exec", &id, "--", "sh", "-c", &script]).status.success()
        });
    };
    let logs = |cluster: &Cluster, args: &[&str]| cluster.mvm_ok(&[&["logs", &id], args].concat());
    writes(&cluster, "first-line");
    wait_until("the line to be in the log", LONG, || logs(&cluster, &["--tail", "3"]).contains("first-line"));
    assert_eq!(logs(&cluster, &["--tail", "0"]), "");
    let whole = logs(&cluster, &["--bytes", "1048576"]);
    assert!(logs(&cluster, &["--since", "1h"]).starts_with(&whole), "{whole}");

    let mut follower = Follower::start(cluster.command(&["logs", "-f", "--tail", "2", &id]));
    follower.until("first-line");
    cluster.mvm_ok(&["instance", "sleep", &id]);
    assert!(logs(&cluster, &[]).contains("first-line"), "of one that sleeps, which is not woken by it");
    assert_eq!(cluster.mvm_json(&["instance", "get", &id])["phase"], "sleeping");
    writes(&cluster, "after-sleep");
    follower.until("after-sleep");
    cluster.kill_coordinator();
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
    writes(&cluster, "after-coordinator");
    follower.until("after-coordinator");
    cluster.kill_agent("node-a");
    cluster.start_with_microvms("node-a");
    writes(&cluster, "after-agent");
    let shown = follower.until("after-agent");
    for word in ["first-line", "after-sleep", "after-coordinator", "after-agent"] {
        assert_eq!(shown.matches(word).count(), 1, "each once: {shown:?}");
    }
    for end in ["stop", "destroy"] {
        cluster.mvm_ok(&["instance", end, &id]);
    }
    assert_eq!(follower.ends(), Some(0), "with its instance");
    let audit = std::fs::read_to_string(cluster.agent_dir("node-a").join("tenants/acme/audit.log"));
    let audit = audit.expect("an audit log");
    assert!(audit.contains("\"logs\"") && audit.contains("followed"), "{audit}");
}
