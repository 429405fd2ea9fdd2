//! A wake says where its time went, and how the instance came to run.

use std::time::Duration;

use mvm_agent::execute::Wake;
use mvm_proto::InstanceId;
use mvm_proto::WakeKind;
use mvm_proto::status::WakeTiming;
use mvm_vmm::Driver as _;

use crate::node::documents::simple;
use crate::node::test_node::TestNode;

/// How long every call of the driver takes in these tests.
const CALL: Duration = Duration::from_millis(50);
const CALL_MS: f64 = 50.0;

async fn wake(node: &TestNode, id: &InstanceId) -> WakeTiming {
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    node.handle.wake(&acme, &workers, id).await.unwrap()
}

fn sum(timing: &WakeTiming) -> f64 {
    let WakeTiming { queued_ms, prepared_ms, restored_ms, greeted_ms, .. } = timing;
    let WakeTiming { reborn_ms, opened_ms, ready_ms, recorded_ms, .. } = timing;
    queued_ms + prepared_ms + restored_ms + greeted_ms + reborn_ms + opened_ms + ready_ms + recorded_ms
}

async fn resting(dir: &std::path::Path, warm: u32, sleeping: u32) -> (TestNode, InstanceId) {
    let node = TestNode::start(dir).await;
    node.want(simple(0, warm, sleeping));
    node.until_counts(0, warm, sleeping).await;
    let phase = if warm > 0 { "warm" } else { "sleeping" };
    let id = node.ids(phase)[0].clone();
    node.driver.faults.set_latency(CALL);
    (node, id)
}

#[tokio::test(start_paused = true)]
async fn a_wake_from_a_snapshot_says_where_its_time_went() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = resting(dir.path(), 0, 1).await;
    let mut told = node.handle.wakes();
    let timing = wake(&node, &id).await;
    assert_eq!((timing.kind.as_str(), timing.joined), ("woken", false));
    assert!((sum(&timing) - timing.total_ms).abs() < 0.01, "{timing:?}");
    assert!(timing.restored_ms >= 2.0 * CALL_MS, "restored and let go: {timing:?}");
    assert!(timing.recorded_ms < CALL_MS, "nobody waits until its snapshot is discarded: {timing:?}");
    let Wake { kind, total } = told.recv().await.unwrap();
    assert_eq!(
        (kind, total.as_millis()),
        (WakeKind::Woken, Duration::from_secs_f64(timing.total_ms / 1000.0).as_millis())
    );
    // Until the step is over too.
    tokio::time::sleep(2 * CALL).await;
    assert!(told.try_recv().is_err(), "one wake is counted once");
    assert_eq!(wake(&node, &id).await.kind, "running");
    assert!(told.try_recv().is_err(), "one that runs is not woken");
}

#[tokio::test(start_paused = true)]
async fn a_wake_says_whether_it_resumed_or_had_to_start_over() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = resting(dir.path(), 1, 0).await;
    let timing = wake(&node, &id).await;
    assert_eq!(timing.kind, "resumed", "{timing:?}");
    assert!((CALL_MS..CALL_MS + 2.0).contains(&timing.restored_ms), "{timing:?}");

    let dir = tempfile::tempdir().unwrap();
    let (node, id) = resting(dir.path(), 0, 1).await;
    node.driver.discard_snapshot(&id).await.unwrap();
    let timing = wake(&node, &id).await;
    assert_eq!(timing.kind, "started", "{timing:?}");
    assert!((sum(&timing) - timing.total_ms).abs() < 0.01, "{timing:?}");
}

#[tokio::test(start_paused = true)]
async fn who_joins_a_wake_gets_its_answer_and_is_told_how_long_it_waited_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = resting(dir.path(), 0, 1).await;
    let late = async {
        tokio::time::sleep(Duration::from_millis(60)).await;
        wake(&node, &id).await
    };
    let (first, second) = tokio::join!(wake(&node, &id), late);
    assert!(second.joined && !first.joined);
    assert!((first.waited_ms - second.waited_ms - 60.0).abs() < 2.0, "{first:?} {second:?}");
    assert_eq!(second, WakeTiming { joined: true, waited_ms: second.waited_ms, ..first });
}
