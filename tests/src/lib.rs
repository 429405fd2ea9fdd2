//! What tests that span processes share: a cluster of real `mvm` processes on loopback, and waiting for conditions.
//!
//! [`Cluster`] owns a temporary folder, one coordinator and any number of agents. Everything is killed and removed
//! when it goes out of scope. Nothing here sleeps for a fixed time: [`wait_until`] polls a condition. [`day`] needs no
//! process at all.

mod binary;
mod cluster;
pub mod day;
mod lone_agent;
mod loopback;
mod netns;
mod process;
pub mod stand_in;

pub use binary::mvm_binary;
pub use cluster::{AgentProcess, Cluster, ClusterSettings, copy_dir, free_port, path_text};
pub use lone_agent::{Census, LoneAgent, nothing, pss_mib, small_pool};
pub use loopback::{metric, metrics, ready};
pub use mvm_needs::test_images;
pub use netns::NetNs;
pub use process::Process;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often a condition is looked at, at first and later: often enough to be prompt, seldom enough to leave two cores
/// to the processes.
const POLL: Duration = Duration::from_millis(25);
const LATER_POLL: Duration = Duration::from_millis(100);

/// Long enough for a busy two-core machine; a healthy run needs a fraction of it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` gives a value. Panics with `what` when it does not within `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> T {
    wait_for_or(limit, condition, || what.to_owned())
}

/// The same with `what` put together when it is said, of what there is then.
pub fn wait_for_or<T>(
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
    what: impl FnOnce() -> String,
) -> T {
    let deadline = Instant::now() + limit;
    let mut poll = POLL;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        if Instant::now() >= deadline {
            panic!("gave up after {limit:?} waiting for: {}", what());
        }
        std::thread::park_timeout(poll);
        poll = (poll + POLL).min(LATER_POLL);
    }
}

/// Waits until `condition` holds.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, limit, || condition().then_some(()));
}

/// Waits until `condition` holds and looks all the time, for what is over before [`wait_until`] looks again.
pub fn wait_closely(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "gave up after {limit:?} waiting for: {what}");
        std::thread::yield_now();
    }
}

/// A key for a tenant's snapshots, in a secrets directory. There is none in the examples: others could read it.
pub fn put_snapshot_key(secrets: &Path, tenant: &str) {
    let path = secrets.join(format!("{tenant}.snapshot-key"));
    std::fs::write(&path, "5a".repeat(32)).expect("a key can be written");
    std::fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("a key can be made private");
}

/// Every file below a folder that has these bytes in it.
pub fn files_with(folder: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let kind = entry.file_type().expect("an entry has a type");
        if kind.is_dir() {
            found.extend(files_with(&path, bytes));
        } else if kind.is_file() {
            // What is being used may be gone by now.
            let content = match std::fs::read(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                read => read.expect("a file of the node's can be read"),
            };
            if content.windows(bytes.len()).any(|window| window == bytes) {
                found.push(path);
            }
        }
    }
    found
}
