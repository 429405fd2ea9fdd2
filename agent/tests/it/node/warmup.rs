//! A pool's warm-up: run in its template before that is saved, and never in the way of an instance.

use std::path::Path;

use mvm_proto::DesiredState;
use mvm_proto::status::Event;
use mvm_vmm::{Driver as _, FakeDriver};
use serde_json::{Value, json};

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::test_node::{TestNode, settings};

async fn node(dir: &Path) -> TestNode {
    let driver = FakeDriver::open(&dir.join("fake-vms")).unwrap().with_forks();
    TestNode::start_on(dir, settings(dir), driver).await
}

fn warmed(running: u32, warmup: Value) -> DesiredState {
    let mut workers = pool("workers", running, 0, 0);
    workers["warmup"] = warmup;
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

async fn consoles(node: &TestNode) -> Vec<String> {
    let mut found = Vec::new();
    for id in node.ids("running") {
        found.push(String::from_utf8(node.driver.console(&id, 4096).await.unwrap()).unwrap());
    }
    found
}

/// What there is to say of templates, from the first document on.
async fn told(node: &TestNode, desired: DesiredState) -> Vec<Event> {
    let mut events = node.handle.events().subscribe();
    let running = desired.tenants[0].pools[0].desired_counts.running;
    node.want(desired);
    node.until_counts(running, 0, 0).await;
    let mut told: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).collect();
    told.retain(|event| event.kind.starts_with("Template"));
    told
}

#[tokio::test(start_paused = true)]
async fn instances_are_forks_of_what_the_warm_up_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path()).await;
    let told = told(&node, warmed(2, json!({ "command": ["true"] }))).await;
    assert_eq!(told.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>(), ["TemplateMade"]);
    assert_eq!(consoles(&node).await, ["forked\n", "forked\n"]);
}

#[tokio::test(start_paused = true)]
async fn where_the_warm_up_fails_instances_boot_and_an_event_says_how_it_ended() {
    let cases = [
        (json!({ "command": ["false"] }), "the pool's warm-up ended with exit code 1"),
        (json!({ "command": ["/app/warm"] }), "the pool's warm-up could not be run: "),
        (json!({ "command": ["sleep"], "timeout_seconds": 5 }), "the pool's warm-up was not done within 5 s"),
    ];
    for (warmup, why) in cases {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path()).await;
        let told = told(&node, warmed(2, warmup)).await;
        assert_eq!(told.len(), 1, "one try is enough for both: {told:?}");
        assert_eq!(told[0].kind, "TemplateFailed");
        assert!(
            told[0].message.starts_with(&format!("the pool's instances boot without a template: {why}")),
            "{told:?}"
        );
        assert_eq!(consoles(&node).await, ["booted\n"; 2]);
        // What is left of the template's guest is gone.
        assert_eq!(node.vms().await, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_warm_up_replaces_the_instances_and_their_template() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path()).await;
    let first = told(&node, warmed(1, json!({ "command": ["true"] }))).await;
    let revision = |node: &TestNode| node.handle.instances(None)[0].revision.clone();
    let before = revision(&node);
    let mut events = node.handle.events().subscribe();
    node.want(warmed(1, json!({ "command": ["true", "more"] })));
    node.until(|status| {
        let named = status.pools.first().map(|pool| pool.revision.clone());
        named.is_some_and(|named| named != before && revision(&node) == named)
            && crate::node::test_node::condition(status, "Converged") == "True"
    })
    .await;
    let again = std::iter::from_fn(|| events.try_recv().ok()).filter(|event| event.kind == "TemplateMade");
    assert_eq!((first.len(), again.count()), (1, 1));
}
