//! What one caller may cost the others: broken requests, large objects, and what nodes say of pools that are not theirs.

use mvm_client::{Objects, Query};
use mvm_proto::object::kind_named;
use mvm_proto::status::{Counts, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::agent_frame;
use serde_json::{Value, json};

use crate::faults::channel;
use crate::objects::{POOL, acme, field, join, pool, until};
use crate::rest::{Events, Rest};
use crate::support::{Running, new_cluster, now};

#[tokio::test]
async fn a_patch_that_makes_something_else_of_the_metadata_is_refused_and_the_connection_goes_on() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let headers = [("content-type", "application/merge-patch+json")];
    for odd in [json!("x"), json!([]), json!(1), json!(true)] {
        let patch = json!({ "metadata": odd });
        let refused = rest.call("PATCH", "/v1/tenants/acme", &headers, Some(&patch)).await;
        assert_eq!((refused.status, refused.code()), (422, "invalid"), "{patch}");
        assert_eq!(refused.body["errors"][0]["path"], "metadata");
    }
    let cleared = rest.call("PATCH", "/v1/tenants/acme", &headers, Some(&json!({ "metadata": null }))).await;
    assert_eq!(
        (cleared.status, &cleared.body["metadata"]["name"]),
        (200, &json!("acme")),
        "{}",
        cleared.body
    );
}

/// As large as a tenant may make it.
fn large() -> Value {
    let notes: serde_json::Map<String, Value> =
        (0..14).map(|n| (format!("note{n}"), json!("x".repeat(16 * 1024)))).collect();
    json!({ "metadata": { "annotations": notes }, "spec": pool(0)["spec"] })
}

#[tokio::test]
async fn a_list_of_the_largest_objects_comes_in_pages_that_can_be_sent_and_a_watch_tells_all_of_them() {
    const POOLS: usize = 45;
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    rest.put("/v1/tenants/acme", &json!({ "spec": {} })).await;
    let large = large();
    for n in 0..POOLS {
        let made = rest.put(&format!("/v1/tenants/acme/pools/p{n:02}"), &large).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }
    let kind = kind_named("pools").unwrap();
    let listed = Objects::new(channel(&running).await).list(&Query::all(kind)).await.unwrap();
    assert_eq!(listed.objects.len(), POOLS);
    let page = rest.get("/v1/pools").await.body;
    assert!((1..POOLS).contains(&page["items"].as_array().unwrap().len()));
    assert_ne!(page["metadata"]["continue"], "");

    let version: u64 = page["metadata"]["resource_version"].as_str().unwrap().parse().unwrap();
    let mut events = Events::of(&mut rest, "/v1/pools?watch=true").await;
    // It is told although it changes when the first page is read and before the last is.
    let mut other = Rest::operator(&running).await;
    let first = events.next().await;
    let label = json!({ "metadata": { "labels": { "seen": "yes" } } });
    let headers = [("content-type", "application/merge-patch+json")];
    let patched = other.call("PATCH", "/v1/tenants/acme/pools/p00", &headers, Some(&label)).await;
    assert_eq!((first.what.as_str(), first.name(), patched.status), ("added", "p00", 200));
    for n in 1..POOLS {
        let told = events.next().await;
        assert_eq!((told.what.as_str(), told.name()), ("added", format!("p{n:02}").as_str()));
    }
    let bookmark = events.next().await;
    assert_eq!((bookmark.what.as_str(), bookmark.version >= version), ("bookmark", true));
    let told = events.next().await;
    assert_eq!((told.what.as_str(), told.name()), ("modified", "p00"));
    assert_eq!(told.object["metadata"]["labels"]["seen"], "yes");
}

#[tokio::test]
async fn a_node_that_was_given_nothing_of_a_pool_has_no_say_in_its_explanation() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (_a, mut a) = join(&running, "a", 4).await;
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Ready")).await;
    rest.put(POOL, &pool(1)).await;
    let told = |node: &str| PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: "web".to_owned(),
        actual: Some(Counts { running: 1, ..Counts::default() }),
        deferred: vec![format!("said by {node}")],
        ..PoolStatus::default()
    };
    a.obey().await;
    let (_b, mut b) = join(&running, "b", 4).await;
    for (node, session) in [("b", &mut b), ("a", &mut a)] {
        let status = NodeStatus {
            node_id: node.to_owned(),
            observed_at: now().to_string(),
            pools: vec![told(node)],
            ..NodeStatus::default()
        };
        session.send(agent_frame::Body::Status(status)).await;
    }
    until(&mut rest, POOL, "/status/ready", &json!("1/1")).await;
    // What was heard of the other node is heard, too.
    b.expect_quiet().await;
    until(&mut rest, "/v1/nodes/b", "/status/state", &json!("Ready")).await;
    let deferred = field(&mut rest, "/v1/explain/pool/acme/web", "/deferred").await;
    assert_eq!(deferred, json!(["a: said by a"]));
}
