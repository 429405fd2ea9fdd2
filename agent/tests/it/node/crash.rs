//! The agent's end at any point: nothing is lost, doubled or leaked, and what was half-done is resolved.

use mvm_proto::DesiredState;
use mvm_vmm::FakeDriver;
use mvm_vmm::fake::Fault;
use serde_json::json;

use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::test_node::{TestNode, condition, settings};

#[tokio::test(start_paused = true)]
async fn an_instance_that_can_not_be_looked_at_at_the_start_stops_no_other_and_is_looked_at_again() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(3, 0, 0));
    node.until_counts(3, 0, 0).await;
    let ids = node.ids("running");
    node.kill().await;

    let driver = FakeDriver::open(&dir.path().join("fake-vms")).unwrap();
    driver.faults.plan("adopt", Some(&ids[1]), 2, Fault::Fail);
    let next = TestNode::start_on(dir.path(), settings(dir.path()), driver).await;
    next.want(simple(4, 0, 0));
    next.until_counts(4, 0, 0).await;
    assert_eq!(next.driver.faults.hits(), 2, "it was looked at again");
    assert!(ids.iter().all(|id| next.ids("running").contains(id)));
    assert_eq!(next.vms().await, 4);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_finds_its_instances_and_neither_doubles_nor_loses_one() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(3, 2, 2));
    node.until_counts(3, 2, 2).await;
    let before = (node.ids("running"), node.ids("warm"), node.ids("sleeping"));
    node.kill().await;

    for _ in 0..3 {
        let node = TestNode::start(dir.path()).await;
        node.want(simple(3, 2, 2));
        node.until_counts(3, 2, 2).await;
        assert_eq!((node.ids("running"), node.ids("warm"), node.ids("sleeping")), before);
        assert_eq!((node.vms().await, node.driver.boots()), (5, 0), "nothing was booted again");
        node.kill().await;
    }
}

/// Destroyed at once, so that an end is an end.
fn none() -> DesiredState {
    let mut workers = pool("workers", 0, 0, 0);
    workers["stopped_retention_seconds"] = json!(0);
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

/// Goes from `from` to `to`, dies in the first `action`, and must come to `to` all the same.
async fn dies_in(action: &'static str, fault: Fault, from: (u32, u32, u32), to: (u32, u32, u32)) {
    let what = format!("{action} {fault:?}");
    let want = |(running, warm, sleeping)| {
        if (running, warm, sleeping) == (0, 0, 0) { none() } else { simple(running, warm, sleeping) }
    };
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(want(from));
    node.until_counts(from.0, from.1, from.2).await;
    node.driver.faults.plan(action, None, 1, fault);
    node.want(want(to));
    while node.driver.faults.hits() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    node.kill().await;

    let node = TestNode::start(dir.path()).await;
    node.want(want(to));
    let status = node.until_counts(to.0, to.1, to.2).await;
    assert_eq!(condition(&status, "VmsAccountedFor"), "True", "{what}");
    assert_eq!(node.vms().await, usize::try_from(to.0 + to.1).unwrap(), "{what}");
    let instances = node.handle.instances(None);
    let most = usize::try_from((from.0 + from.1 + from.2).max(to.0 + to.1 + to.2)).unwrap();
    assert!(instances.len() <= most, "{what}: {instances:?}");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_dies_before_or_after_any_effect_comes_to_the_desired_state() {
    let (nothing, some, asleep, up) = ((0, 0, 0), (1, 1, 1), (0, 0, 2), (2, 0, 0));
    for fault in [Fault::HangBefore, Fault::HangAfter] {
        for action in ["boot", "pause", "snapshot", "kill"] {
            dies_in(action, fault, nothing, some).await;
        }
        for action in ["restore", "resume", "discard the snapshot of"] {
            dies_in(action, fault, asleep, up).await;
        }
        for action in ["stop", "remove"] {
            dies_in(action, fault, some, nothing).await;
        }
        dies_in("resume", fault, (0, 2, 0), up).await;
    }
}

#[tokio::test(start_paused = true)]
async fn every_step_that_fails_once_is_made_good() {
    for action in ["boot", "pause", "snapshot", "kill", "stop", "remove", "restore", "resume"] {
        let dir = tempfile::tempdir().unwrap();
        let node = TestNode::start(dir.path()).await;
        node.driver.faults.plan(action, None, 2, Fault::Fail);
        for (running, warm, sleeping) in [(1, 1, 1), (3, 0, 0), (0, 0, 3)] {
            node.want(simple(running, warm, sleeping));
            node.until_counts(running, warm, sleeping).await;
        }
        node.want(none());
        node.until_counts(0, 0, 0).await;
        node.until(|status| status.usage.is_some_and(|usage| usage.instances == 0)).await;
        assert_eq!(node.vms().await, 0, "{action}");
        node.kill().await;
    }
}
