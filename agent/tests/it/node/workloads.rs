//! A guest's program that ends: told, started again as its pool says, and told when that goes on and on.

use std::time::Duration;

use mvm_proto::guest::Readiness;
use mvm_proto::status::Event;
use mvm_proto::{DesiredState, InstanceId};
use mvm_vmm::fake::Manner;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::test_node::{TestNode, condition, reason};

fn want(running: u32, sleeping: u32, more: &[(&str, Value)]) -> DesiredState {
    let mut workers = pool("workers", running, 0, sleeping);
    for (name, value) in more {
        workers[*name] = value.clone();
    }
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

async fn started(
    more: &[(&str, Value)],
) -> (tempfile::TempDir, TestNode, InstanceId, broadcast::Receiver<Event>) {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let events = node.handle.events().subscribe();
    node.want(want(1, 0, more));
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running").remove(0);
    (dir, node, id, events)
}

/// The next event of this kind.
async fn told(events: &mut broadcast::Receiver<Event>, kind: &str) -> Event {
    let next = async {
        loop {
            let event = events.recv().await.unwrap();
            if event.kind == kind {
                return event;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(3600), next).await.unwrap_or_else(|_| panic!("no {kind}"))
}

fn workload(node: &TestNode) -> (String, String, u32) {
    let instance = node.handle.instances(None).remove(0);
    (instance.phase, instance.workload, instance.restarts)
}

#[tokio::test(start_paused = true)]
async fn a_program_that_ends_is_told_and_started_again_in_its_guest() {
    let (_dir, node, id, mut events) = started(&[]).await;
    let boots = node.driver.boots();
    node.driver.guest_says(&id, Readiness::Failed);
    let ended = told(&mut events, "WorkloadEnded").await;
    assert_eq!(
        (ended.subject, ended.message),
        (format!("acme/workers/{id}"), "the workload exited with 1".to_owned())
    );
    assert_eq!(told(&mut events, "WorkloadRestarted").await.message, "its program failed");
    let status = node
        .until(|status| {
            condition(status, "WorkloadsRunning") == "True" && condition(status, "Converged") == "True"
        })
        .await;
    assert_eq!(status.pools[0].actual.unwrap().down, 0);
    assert_eq!(workload(&node), ("running".to_owned(), "running".to_owned(), 1));
    assert_eq!((node.driver.workload(&id).0, node.driver.boots()), (1, boots), "the guest is the same");
}

#[tokio::test(start_paused = true)]
async fn a_crash_loop_is_told_waits_longer_each_time_and_gets_a_new_guest() {
    let (_dir, node, id, mut events) = started(&[]).await;
    let boots = node.driver.boots();
    for restarts in 1..=3 {
        node.driver.guest_says(&id, Readiness::Failed);
        told(&mut events, "WorkloadRestarted").await;
        assert_eq!(node.driver.workload(&id).0, restarts);
    }
    node.driver.guest_says(&id, Readiness::Failed);
    let looping = told(&mut events, "WorkloadCrashLoop").await;
    assert_eq!(looping.message, "started 3 times in a row; the next start is in 4 s");
    let status = node.until(|status| condition(status, "WorkloadsRunning") == "False").await;
    assert_eq!(reason(&status, "WorkloadsRunning"), "CrashLoop");
    assert_eq!(status.pools[0].actual.unwrap().down, 1);
    assert!(
        status.pools[0].deferred[0].contains("restarted 3 times in a row"),
        "{:?}",
        status.pools[0].deferred
    );
    told(&mut events, "InstanceReplaced").await;
    assert!(node.driver.boots() > boots, "by a new guest");
    assert_eq!(
        (node.ids("running"), workload(&node).2),
        (vec![id], 4),
        "of the same name, which goes on counting"
    );
    // Nothing is forgotten before it was stable.
    let status = node.until(|status| condition(status, "Converged") == "True").await;
    assert_eq!(reason(&status, "WorkloadsRunning"), "CrashLoop");
    tokio::time::sleep(Duration::from_secs(601)).await;
    node.until(|status| condition(status, "WorkloadsRunning") == "True").await;
}

#[tokio::test(start_paused = true)]
async fn what_its_pool_does_not_start_again_stays_ended_and_is_told() {
    let (_dir, node, id, mut events) = started(&[("restart", json!("never"))]).await;
    node.driver.guest_says(&id, Readiness::Failed);
    let ended = told(&mut events, "WorkloadEnded").await;
    assert!(ended.message.ends_with("; it is not started again"), "{}", ended.message);
    let status = node.until(|status| condition(status, "WorkloadsRunning") == "False").await;
    assert_eq!((reason(&status, "WorkloadsRunning"), condition(&status, "Converged")), ("Failed", "True"));
    assert_eq!((workload(&node).1.as_str(), node.driver.workload(&id).0), ("failed", 0));
    // The pool's mind changes.
    node.want(want(1, 0, &[]));
    told(&mut events, "WorkloadRestarted").await;
    node.until(|status| condition(status, "WorkloadsRunning") == "True").await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_says_this_and_that_does_not_drive_out_the_events_of_others() {
    let (_dir, node, id, mut events) = started(&[("restart", json!("never"))]).await;
    for _ in 0..40 {
        node.driver.guest_says(&id, Readiness::Failed);
        node.until(|status| condition(status, "WorkloadsRunning") == "False").await;
        node.driver.guest_says(&id, Readiness::Ready);
        node.until(|status| condition(status, "WorkloadsRunning") == "True").await;
    }
    let told = std::iter::from_fn(|| events.try_recv().ok());
    let workloads = told.filter(|event| event.kind.starts_with("Workload")).count();
    assert_eq!(workloads, 20, "while what it says is followed");
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_can_not_start_its_program_again_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let driver = mvm_vmm::FakeDriver::open(&dir.path().join("fake-vms")).unwrap();
    driver.faults.set_manner(None, Manner::WithoutSecrets);
    let node = TestNode::start_on(dir.path(), crate::node::test_node::settings(dir.path()), driver).await;
    let mut events = node.handle.events().subscribe();
    node.want(want(1, 0, &[]));
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running").remove(0);
    node.driver.guest_says(&id, Readiness::Failed);
    told(&mut events, "WorkloadEnded").await;
    assert!(told(&mut events, "GuestOutdated").await.message.contains("too old to know `restart`"));
    told(&mut events, "InstanceReplaced").await;
    node.until_counts(1, 0, 0).await;
    assert_eq!(node.ids("running"), [id]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_that_the_guest_does_not_answer_counts_and_is_tried_again() {
    let (_dir, node, id, mut events) = started(&[]).await;
    node.driver.guest_says(&id, Readiness::Failed);
    // That it says, and hears nothing any more.
    node.driver.faults.set_manner(None, Manner::Silent);
    let failed = told(&mut events, "InstanceFailed").await;
    assert!(failed.message.contains("could not restart: the guest did not answer"), "{}", failed.message);
    assert_eq!(workload(&node), ("running".to_owned(), "failed".to_owned(), 1));
    node.driver.faults.set_manner(None, Manner::Good);
    told(&mut events, "WorkloadRestarted").await;
    node.until(|status| condition(status, "WorkloadsRunning") == "True").await;
}

#[tokio::test(start_paused = true)]
async fn a_program_that_ended_while_no_agent_looked_is_told_and_started_again() {
    let (dir, node, id, mut events) = started(&[]).await;
    node.driver.guest_says(&id, Readiness::Failed);
    told(&mut events, "WorkloadRestarted").await;
    node.kill().await;
    let driver = mvm_vmm::FakeDriver::open(&dir.path().join("fake-vms")).unwrap();
    driver.guest_says(&id, Readiness::Failed);
    let node = TestNode::start_on(dir.path(), crate::node::test_node::settings(dir.path()), driver).await;
    let mut events = node.handle.events().subscribe();
    node.want(want(1, 0, &[]));
    told(&mut events, "WorkloadEnded").await;
    told(&mut events, "WorkloadRestarted").await;
    node.until_counts(1, 0, 0).await;
    assert_eq!((node.ids("running"), workload(&node).2), (vec![id], 2), "and what was counted still counts");
}

#[tokio::test(start_paused = true)]
async fn a_program_that_ended_before_its_guest_slept_is_started_again_after_the_wake() {
    let (_dir, node, id, mut events) = started(&[("restart", json!("never"))]).await;
    node.driver.guest_says(&id, Readiness::Failed);
    told(&mut events, "WorkloadEnded").await;
    node.want(want(0, 1, &[("restart", json!("never"))]));
    node.until_counts(0, 0, 1).await;
    // What the guest remembers is in its memory; this one is told to.
    node.driver.faults.set_manner(None, Manner::Fails);
    node.want(want(1, 0, &[]));
    told(&mut events, "InstanceWoken").await;
    told(&mut events, "WorkloadRestarted").await;
    node.driver.faults.set_manner(None, Manner::Good);
    node.driver.guest_says(&id, Readiness::Ready);
    node.until(|status| condition(status, "WorkloadsRunning") == "True").await;
    assert_eq!(node.ids("running"), [id]);
}

#[tokio::test(start_paused = true)]
async fn a_health_check_reaches_guests_when_they_start_and_when_it_changes() {
    let check = |port: u16| json!({ "tcp": { "port": port }, "interval_seconds": 7 });
    let (_dir, node, id, _events) = started(&[("health", check(80))]).await;
    let port = |node: &TestNode| {
        use mvm_proto::guest::health::Check;
        match node.driver.workload(&id).1.and_then(|health| health.check) {
            Some(Check::Tcp(tcp)) => tcp.port,
            _ => 0,
        }
    };
    assert_eq!(port(&node), 80);
    node.want(want(1, 0, &[("health", check(81))]));
    let came = async {
        while port(&node) != 81 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), came).await.unwrap();
    node.until_counts(1, 0, 0).await;
    assert_eq!(node.ids("running"), std::slice::from_ref(&id), "it replaced nothing");
    // A wake brings it, whatever was said while it slept.
    node.want(want(0, 1, &[("health", check(82))]));
    node.until_counts(0, 0, 1).await;
    node.want(want(1, 0, &[("health", check(83))]));
    node.until_counts(1, 0, 0).await;
    assert_eq!(port(&node), 83);
}
