//! What instances may do to the disk: from the document to the file that the kernel would read, also of those that run.
//!
//! The hierarchy is of plain files, in which a task makes what a kernel would have made, a little later than a kernel would:
//! so instances start with best effort, and their limits are put right. That one starts with its limits, and that such a file
//! limits anything, is shown elsewhere: by the isolation's own tests, and inside a microVM by the host crate's.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_agent::isolation::{Effort, IsolationSettings};
use mvm_agent::node::assemble::NodeSettings;
use mvm_host::AnyHost;
use mvm_host::cgroup::{CgroupSettings, Mode, fake};
use mvm_proto::DesiredState;
use mvm_proto::status::NodeStatus;
use serde_json::{Value, json};

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::test_node::{TestNode, reason, settings};

const UNLIMITED: &str = "8:16 rbps=max wbps=max riops=max wiops=max";

/// Makes the files of every group that has none yet.
fn like_a_kernel(group: &Path) {
    fake::group(group, "cpu memory pids io").unwrap();
    for below in fs::read_dir(group).unwrap().flatten().filter(|below| below.path().is_dir()) {
        like_a_kernel(&below.path());
    }
}

/// A node whose data is on a file system of this kind, on a partition of the disk 8:16.
fn on(dir: &Path, kind: &str) -> NodeSettings {
    let groups = dir.join("groups");
    fs::create_dir_all(groups.join("mvm/acme/workers")).unwrap();
    like_a_kernel(&groups);
    let machine = fake::machine(dir, kind).unwrap();
    let cgroups =
        CgroupSettings { mode: Mode::BestEffort, mount: Some(groups), machine, ..CgroupSettings::default() };
    NodeSettings {
        host: Some(AnyHost::local_with_groups(dir, cgroups)),
        isolation: IsolationSettings { cgroups: Effort::BestEffort, ..IsolationSettings::NONE },
        ..settings(dir)
    }
}

async fn start(dir: &Path, kind: &str) -> TestNode {
    let settings = on(dir, kind);
    let groups = dir.join("groups");
    tokio::spawn(async move {
        loop {
            like_a_kernel(&groups);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    TestNode::start_with(dir, settings).await
}

fn limited(running: u32, limits: Value) -> DesiredState {
    let mut workers = pool("workers", running, 0, 0);
    if !limits.is_null() {
        workers["io_limits"] = limits;
    }
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

fn writes(bytes: u64) -> Value {
    json!({ "write_bytes_per_second": bytes })
}

fn file(dir: &Path, node: &TestNode) -> PathBuf {
    let id = node.ids("running").remove(0);
    dir.join("groups/mvm/acme/workers").join(id.as_str()).join("io.max")
}

/// Waits until the only instance's file holds this.
async fn until(file: &Path, text: &str) {
    let wait = async {
        while fs::read_to_string(file).unwrap_or_default() != text {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let came = tokio::time::timeout(Duration::from_secs(600), wait).await;
    assert!(came.is_ok(), "{:?} instead of {text:?}", fs::read_to_string(file));
}

fn message<'a>(status: &'a NodeStatus, kind: &str) -> &'a str {
    status.conditions.iter().find(|c| c.r#type == kind).map_or("", |c| c.message.as_str())
}

#[tokio::test(start_paused = true)]
async fn an_instance_has_its_pools_limits_and_is_given_others_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), "ext4").await;
    let mut events = node.handle.events().subscribe();
    node.want(limited(1, writes(1 << 20)));
    node.until_counts(1, 0, 0).await;
    let (file, ids) = (file(dir.path(), &node), node.ids("running"));
    until(&file, "8:16 rbps=max wbps=1048576 riops=max wiops=max").await;
    node.want(limited(1, json!({ "write_bytes_per_second": 2 << 20, "read_ops_per_second": 500 })));
    until(&file, "8:16 rbps=max wbps=2097152 riops=500 wiops=max").await;
    node.want(limited(1, Value::Null));
    until(&file, UNLIMITED).await;
    node.until_counts(1, 0, 0).await;
    assert_eq!(node.ids("running"), ids, "none of it replaced the instance");
    let told: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).collect();
    let told = told.iter().filter(|event| event.kind == "DiskLimitsChanged");
    let told: Vec<_> = told.map(|event| (event.subject.as_str(), event.message.as_str())).collect();
    let group = format!("acme/workers/{}", ids[0]);
    assert_eq!(
        told,
        [
            (group.as_str(), "1048576 bytes written in a second"),
            (group.as_str(), "2097152 bytes written, 500 reads in a second"),
            (group.as_str(), "not limited"),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_comes_back_puts_right_what_changed_while_it_was_away() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), "ext4").await;
    node.want(limited(1, writes(1 << 20)));
    node.until_counts(1, 0, 0).await;
    let (file, ids) = (file(dir.path(), &node), node.ids("running"));
    until(&file, "8:16 rbps=max wbps=1048576 riops=max wiops=max").await;
    node.kill().await;
    fs::write(&file, "8:0 rbps=5 wbps=max riops=max wiops=max\n").unwrap();
    let node = start(dir.path(), "ext4").await;
    node.want(limited(1, writes(3 << 20)));
    until(&file, "8:16 rbps=max wbps=3145728 riops=max wiops=max").await;
    node.until_counts(1, 0, 0).await;
    assert_eq!(node.ids("running"), ids);
}

#[tokio::test(start_paused = true)]
async fn drift_is_put_right_at_the_next_look() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), "ext4").await;
    node.want(limited(1, writes(1 << 20)));
    node.until_counts(1, 0, 0).await;
    let file = file(dir.path(), &node);
    until(&file, "8:16 rbps=max wbps=1048576 riops=max wiops=max").await;
    fs::write(&file, "").unwrap();
    until(&file, "8:16 rbps=max wbps=1048576 riops=max wiops=max").await;
}

#[tokio::test(start_paused = true)]
async fn with_best_effort_what_can_not_be_limited_runs_and_is_told_for_as_long_as_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), "tmpfs").await;
    node.want(limited(1, Value::Null));
    node.until_counts(1, 0, 0).await;
    let told = |status: &NodeStatus| message(status, "LimitsHeld").contains("its file system is tmpfs");
    assert!(!told(&node.handle.status().borrow()));
    node.want(limited(1, writes(1 << 20)));
    let status = node.until(told).await;
    assert_eq!(reason(&status, "LimitsHeld"), "BestEffort");
    assert_eq!(node.vms().await, 1);
    node.want(limited(1, Value::Null));
    node.until(|status| !told(status)).await;
}
