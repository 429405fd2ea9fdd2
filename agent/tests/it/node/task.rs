//! The reconcile task on the fake driver and paused time.

use std::sync::Arc;
use std::time::Duration;

use mvm_agent::node::CurrentDocument;
use mvm_proto::status::Mark;
use mvm_proto::{Digest, Phase};
use mvm_vmm::fake::Fault;
use serde_json::json;

use crate::node::cluster::at;
use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::test_node::{TestNode, condition, reason};

#[tokio::test(start_paused = true)]
async fn counts_are_reached_from_nothing_and_changed_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    for (running, warm, sleeping) in [(3, 1, 2), (1, 2, 3), (0, 0, 5), (4, 0, 0), (0, 0, 0), (2, 2, 2)] {
        node.want(simple(running, warm, sleeping));
        node.until_counts(running, warm, sleeping).await;
        assert_eq!(node.vms().await, usize::try_from(running + warm).unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn every_pool_is_reported_and_events_tell_what_was_done() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let mut events = node.handle.events().subscribe();
    let mut gateway = pool("edge", 1, 0, 0);
    gateway["role"] = json!("gateway");
    node.want(parse(&document(&[
        tenant("acme", 3, &[pool("workers", 2, 0, 1), gateway]),
        tenant("beta", 4, &[pool("jobs", 0, 1, 0)]),
    ])));
    let status = node.until(|status| condition(status, "Converged") == "True").await;
    let names: Vec<_> = status.pools.iter().map(|p| (p.tenant_id.as_str(), p.pool_id.as_str())).collect();
    assert_eq!(names.len(), 3);
    assert!(status.pools.iter().all(|pool| pool.managed && pool.actual == pool.desired));
    assert_eq!(status.usage.unwrap().vcpus, 3);
    assert_eq!(reason(&status, "DesiredStateCurrent"), "LocalFile");
    let mut created = 0;
    while let Ok(event) = events.try_recv() {
        created += u32::from(event.kind == "InstanceCreated");
    }
    assert_eq!(created, 5);
    let mut addresses: Vec<_> = node.handle.instances(None).into_iter().map(|i| i.address).collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 5, "no address is given twice");
}

#[tokio::test(start_paused = true)]
async fn at_rest_the_planner_is_not_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(2, 1, 1));
    node.until_counts(2, 1, 1).await;
    let passes = node.handle.passes();
    let before = *passes.borrow();
    tokio::time::sleep(Duration::from_secs(600)).await;
    let after = *passes.borrow();
    assert!(after.count >= before.count + 15, "{before:?} {after:?}");
    assert_eq!(after.plans, before.plans);
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_dies_is_started_again_under_its_own_id() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(2, 0, 0));
    node.until_counts(2, 0, 0).await;
    let ids = node.ids("running");
    node.driver.crash(&ids[0]);
    node.handle.trigger();
    node.until(|status| status.pools[0].failed == 1).await;
    node.until_counts(2, 0, 0).await;
    assert_eq!(node.ids("running"), ids);
}

#[tokio::test(start_paused = true)]
async fn why_a_vm_ended_is_told_by_a_pass_that_something_else_began() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(1, 0, 0));
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running").remove(0);
    // The pass is under way before anyone waits for the end again.
    node.handle.trigger();
    node.driver.crash(&id);
    node.until(|status| status.pools[0].failed == 1).await;
    let reasons: Vec<_> = node.handle.instances(None).into_iter().map(|instance| instance.reason).collect();
    assert_eq!(reasons, ["its VM ended by itself: crashed"]);
}

#[tokio::test(start_paused = true)]
async fn a_failing_boot_is_tried_again_later_and_later_without_making_more_instances() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.driver.faults.set_bad_image("builtin:busybox", Fault::Fail);
    node.want(simple(2, 1, 0));
    tokio::time::sleep(Duration::from_secs(1200)).await;
    let hits = node.driver.faults.hits();
    assert!((10..80).contains(&hits), "{hits} boots in 20 minutes");
    let instances = node.handle.instances(None);
    assert_eq!(instances.len(), 3, "{instances:?}");
    assert!(instances.iter().all(|i| i.phase == Phase::Failed.as_str() && i.reason.contains("told to fail")));
    node.driver.faults.clear();
    node.until_counts(2, 1, 0).await;
    assert_eq!(node.handle.instances(None).len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_hanging_boots_never_stops_another() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.driver.faults.set_bad_image("github:org/hangs", Fault::HangBefore);
    let mut bad = pool("bad", 20, 0, 0);
    bad["flake_ref"] = json!("github:org/hangs");
    bad["role"] = json!("gateway");
    let begun = tokio::time::Instant::now();
    node.want(parse(&document(&[tenant("acme", 3, &[bad, pool("good", 3, 1, 1)])])));
    node.until(|status| {
        let good = status.pools.iter().find(|pool| pool.pool_id == "good");
        good.is_some_and(|pool| pool.actual == pool.desired)
    })
    .await;
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn past_its_expiry_a_document_stays_in_force_and_a_condition_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let mark = Mark::new(1, 7, Digest::of(b"document"));
    let current_document = CurrentDocument {
        desired: simple(1, 0, 0),
        mark: Some(mark.clone()),
        expires_at: Some(at(300)),
        trace: None,
    };
    node.desired.send_replace(Some(Arc::new(current_document)));
    let status = node.until_counts(1, 0, 0).await;
    assert_eq!((status.accepted.as_ref(), status.converged.as_ref()), (Some(&mark), Some(&mark)));
    assert_eq!(reason(&status, "DesiredStateCurrent"), "Accepted");
    let status = node.until(|status| reason(status, "DesiredStateCurrent") == "Expired").await;
    assert_eq!(status.observed_at, at(300).to_string(), "the timer is the expiry itself");
    let ids = node.ids("running");
    node.driver.crash(&ids[0]);
    node.handle.trigger();
    node.until(|status| condition(status, "Converged") == "False").await;
    node.until_counts(1, 0, 0).await;
}

#[tokio::test(start_paused = true)]
async fn what_the_document_no_longer_names_keeps_running_until_it_asks_to_prune() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(2, 0, 1));
    node.until_counts(2, 0, 1).await;
    let mut empty = document(&[]);
    node.want(parse(&empty));
    let status = node.until(|status| status.pools.iter().all(|pool| !pool.managed)).await;
    assert_eq!((status.pools.len(), condition(&status, "Converged")), (1, "True"));
    assert_eq!(node.vms().await, 2);
    empty["prune_unknown_tenants"] = json!(true);
    node.want(parse(&empty));
    node.until(|status| status.pools.is_empty()).await;
    assert_eq!((node.vms().await, node.handle.instances(None).len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_new_revision_replaces_everything_and_never_goes_below_the_running_count() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(3, 1, 1));
    node.until_counts(3, 1, 1).await;
    let before: Vec<_> = node.handle.instances(None).into_iter().map(|i| i.instance_id).collect();
    let mut renewed = pool("workers", 3, 1, 1);
    renewed["flake_ref"] = json!("github:org/renewed");
    renewed["stopped_retention_seconds"] = json!(0);
    node.driver.faults.set_latency(Duration::from_secs(2));
    let mut least = u32::MAX;
    node.want(parse(&document(&[tenant("acme", 3, &[renewed])])));
    let mut status = node.handle.status();
    loop {
        status.changed().await.unwrap();
        let seen = status.borrow_and_update().clone();
        let pool = &seen.pools[0];
        // One that is being replaced is up in the eyes of the count until it is stopped; a stand-in covers for it.
        least = least.min(pool.actual.unwrap().running);
        let renewed = node.handle.instances(None).iter().all(|i| i.revision == pool.revision);
        if renewed && condition(&seen, "Converged") == "True" {
            break;
        }
    }
    assert!(least >= 3, "{least} were running at one time");
    let after: Vec<_> = node.handle.instances(None).into_iter().map(|i| i.instance_id).collect();
    assert_eq!(after, before, "ids are kept and the stand-in is gone");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_agent_finishes_what_is_under_way_and_leaves_instances_alone() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.driver.faults.set_latency(Duration::from_secs(1));
    node.want(simple(2, 0, 0));
    node.until(|status| !status.pools.is_empty()).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    node.stop.cancel();
    tokio::time::timeout(Duration::from_secs(10), node.task).await.unwrap().unwrap();
    let vms = mvm_vmm::Driver::list(&node.driver).await.unwrap();
    assert_eq!(vms.len(), 2);
}
