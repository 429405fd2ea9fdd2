//! A network of its own for each test: nothing in it is seen by, or sees, the machine's own.
//!
//! The thread that runs the test moves into a new network namespace, which is gone with it. Programs and threads that it
//! starts are in there with it.

use std::future::Future;
use std::process::Command;
use std::time::{Duration, Instant};

use mvm_needs::{Need, can_run};
use nix::sched::{CloneFlags, unshare};

/// Far more than anything here takes, even on a busy machine: while the kernel takes down another test's namespace with a
/// thousand links in it, all others wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a test in its own network, where this machine can.
pub(crate) fn in_own_network<F>(test: impl FnOnce() -> F + Send + 'static)
where
    F: Future<Output = ()>,
{
    if !can_run(&[Need::NetworkNamespaces, Need::Tun, Need::Program("ip")]) {
        return;
    }
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    if let Err(panic) = std::thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a program in the test's network: `run("ip link set x up")`. What it printed.
pub(crate) fn run(command: &str) -> String {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What `ip -d -j ...` or `bridge -d -j ...` says, as JSON; null when it says nothing.
pub(crate) fn json(command: &str) -> serde_json::Value {
    let said = run(command);
    if said.trim().is_empty() { serde_json::Value::Null } else { serde_json::from_str(&said).unwrap() }
}

/// The names of all links in the test's network, in order.
pub(crate) fn link_names() -> Vec<String> {
    let links = json("ip -j link show");
    let mut names: Vec<_> =
        links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Looks again and again until the condition holds.
pub(crate) async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
