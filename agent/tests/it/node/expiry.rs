//! A document past its expiry, on the fake driver and paused time.

use std::sync::Arc;
use std::time::Duration;

use mvm_agent::node::CurrentDocument;
use mvm_proto::status::Mark;
use mvm_proto::{DesiredState, Digest};
use serde_json::json;

use crate::node::cluster::at;
use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::test_node::{TestNode, condition, reason};

fn give(node: &TestNode, generation: u64, desired: DesiredState, expires_at: i64) {
    let mark = Some(Mark::new(1, generation, Digest::of(&generation.to_be_bytes())));
    node.desired.send_replace(Some(Arc::new(CurrentDocument {
        desired,
        mark,
        expires_at: Some(at(expires_at)),
        trace: None,
    })));
}

async fn until_expired(node: &TestNode) {
    node.until(|status| reason(status, "DesiredStateCurrent") == "Expired").await;
}

/// What was asked for and not done yet when the document expired is not done afterwards, and the status says so.
#[tokio::test(start_paused = true)]
async fn past_its_expiry_a_document_makes_no_instance_and_restarts_what_crashed() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    give(&node, 1, simple(2, 0, 1), 300);
    node.until_counts(2, 0, 1).await;
    let ids = node.ids("running");
    // It asks for four more; the agent was away until it had expired.
    give(&node, 2, simple(6, 0, 1), -1);
    until_expired(&node).await;
    node.driver.crash(&ids[0]);
    node.handle.trigger();
    node.until(|status| status.pools[0].failed == 1).await;
    node.until(|status| status.pools[0].failed == 0).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.ids("running"), ids, "the same ones, and no sleeper in their place");
    assert_eq!(node.handle.instances(None).len(), 3);
    let status = node.handle.status().borrow().clone();
    assert_eq!(status.pools[0].deferred, ["create x4: the document has expired; running 2 of 6"]);
}

#[tokio::test(start_paused = true)]
async fn past_its_expiry_a_document_stops_replaces_and_prunes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    give(&node, 1, simple(3, 1, 1), 3600);
    node.until_counts(3, 1, 1).await;
    let before = node.handle.instances(None);
    // It asks for no instance of a pool that changed, for others, and to prune; the agent was away until it had expired.
    let mut grown = pool("workers", 0, 0, 0);
    grown["instance_resources"]["mem_mib"] = json!(512);
    let mut pruning = document(&[tenant("acme", 3, &[grown]), tenant("beta", 4, &[pool("jobs", 2, 0, 0)])]);
    pruning["prune_unknown_pools"] = json!(true);
    give(&node, 2, parse(&pruning), -1);
    until_expired(&node).await;
    tokio::time::sleep(Duration::from_secs(7200)).await;
    let phases = |of: &[mvm_proto::status::InstanceStatus]| -> Vec<_> {
        of.iter().map(|i| (i.instance_id.clone(), i.phase.clone(), i.revision.clone())).collect()
    };
    assert_eq!(phases(&node.handle.instances(None)), phases(&before));
    let status = node.handle.status().borrow().clone();
    assert_eq!((condition(&status, "Converged"), reason(&status, "Converged")), ("False", "Deferred"));
    let workers = status.pools.iter().find(|pool| pool.pool_id == "workers").unwrap();
    assert!(workers.deferred.iter().all(|why| why.contains("the document has expired")), "{workers:?}");
    // The next document in time is made true as ever.
    give(&node, 3, simple(1, 0, 0), 86_400);
    node.until_counts(1, 0, 0).await;
}

#[tokio::test(start_paused = true)]
async fn past_its_expiry_a_request_still_wakes_a_sleeper_and_policy_puts_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    give(&node, 1, simple(0, 0, 2), 300);
    node.until_counts(0, 0, 2).await;
    until_expired(&node).await;
    let id = node.ids("sleeping")[0].clone();
    node.handle.wake(&"acme".parse().unwrap(), &"workers".parse().unwrap(), &id).await.unwrap();
    node.until_counts(1, 0, 1).await;
    node.until_counts(0, 0, 2).await;
    assert_eq!(node.handle.instances(None).len(), 2);
}
