//! Waking on demand: the request's instance is the request's until it is idle, and no count is filled twice.

use std::time::Duration;

use serde_json::json;

use crate::documents::{document, parse, pool, simple, tenant};
use crate::test_node::TestNode;

#[tokio::test(start_paused = true)]
async fn a_pool_scales_from_zero_and_back_without_a_sixth_sleeper() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(0, 0, 5));
    node.until_counts(0, 0, 5).await;
    let id = node.ids("sleeping")[2].clone();
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    node.handle.wake(&acme, &workers, &id).await.unwrap();
    node.handle.wake(&acme, &workers, &id).await.unwrap();
    node.until_counts(1, 0, 4).await;
    assert_eq!(node.ids("running"), vec![id]);
    tokio::time::sleep(Duration::from_secs(250)).await;
    node.until_counts(1, 0, 4).await;
    assert_eq!(node.handle.instances(None).len(), 5, "its place in the sleeping count is kept");
    node.until_counts(0, 1, 4).await;
    node.until_counts(0, 0, 5).await;
    assert_eq!(node.handle.instances(None).len(), 5);
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_woken_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let mut small = tenant("acme", 3, &[pool("workers", 1, 0, 1)]);
    small["quotas"]["max_running"] = json!(1);
    node.want(parse(&document(&[small])));
    node.until_counts(1, 0, 1).await;
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    let asleep = node.ids("sleeping")[0].clone();

    let problem = node.handle.wake(&acme, &workers, &asleep).await.unwrap_err();
    assert_eq!((problem.status, problem.code.as_str()), (409, "no_room"), "{problem}");
    assert!(problem.detail.contains("max_running"));
    let problem = node.handle.wake(&acme, &workers, &"i-00000000".parse().unwrap()).await.unwrap_err();
    assert_eq!((problem.status, problem.code.as_str()), (404, "unknown_instance"));
    let foreign = "beta".parse().unwrap();
    let problem = node.handle.wake(&foreign, &workers, &asleep).await.unwrap_err();
    assert_eq!(problem.status, 404, "another tenant's instance is not there");
}

#[tokio::test(start_paused = true)]
async fn a_hundred_wakes_at_once_are_one_restore() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(0, 0, 1));
    node.until_counts(0, 0, 1).await;
    let id = node.ids("sleeping")[0].clone();
    let boots = node.driver.boots();
    node.driver.faults.set_latency(Duration::from_millis(50));
    let wakes: Vec<_> = (0..100)
        .map(|_| {
            let (handle, id) = (node.handle.clone(), id.clone());
            let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
            tokio::spawn(async move { handle.wake(&acme, &workers, &id).await })
        })
        .collect();
    for wake in wakes {
        wake.await.unwrap().unwrap();
    }
    assert_eq!(node.driver.boots(), boots + 1);
}
