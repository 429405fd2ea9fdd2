//! Events of objects: what happened is told once with a count, to those who may see the object, and after a restart too.

use serde_json::{Value, json};

use crate::crashes::FakeNode;
use crate::objects::acme;
use crate::rest::Rest;
use crate::support::{Running, new_cluster, wait_until};

const POOL: &str = "/v1/tenants/acme/pools/web";
const OF_POOL: &str = "/v1/events?object=pool/acme/web";

fn pool(running: u32, vcpus: u32) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": vcpus, "mem_mib": 64 },
        "counts": { "running": running },
    } })
}

/// The reasons of the events at a path, each with its type and count.
async fn told(rest: &mut Rest, path: &str) -> Vec<(String, String, u64)> {
    let answer = rest.get(path).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let one = |event: &Value| {
        let text = |name: &str| event[name].as_str().unwrap().to_owned();
        (text("type"), text("reason"), event["count"].as_u64().unwrap())
    };
    answer.body["items"].as_array().unwrap().iter().map(one).collect()
}

fn event(r#type: &str, reason: &str, count: u64) -> (String, String, u64) {
    (r#type.to_owned(), reason.to_owned(), count)
}

async fn wait_for(running: &Running, path: &str, wanted: &(String, String, u64)) {
    wait_until(&format!("{wanted:?} in {path}"), async || {
        told(&mut Rest::operator(running).await, path).await.contains(wanted)
    })
    .await;
}

#[tokio::test]
async fn what_happens_to_a_pool_and_to_a_node_is_told_and_outlives_the_coordinator() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(2, 1)).await.status, 201);
    wait_for(&running, OF_POOL, &event("Warning", "Unplaced", 1)).await;
    let node = FakeNode::start(running.enrol("n1").await);
    wait_for(&running, OF_POOL, &event("Normal", "Scheduled", 1)).await;
    wait_for(&running, OF_POOL, &event("Normal", "Ready", 1)).await;
    wait_for(&running, "/v1/events?object=node/n1", &event("Normal", "Connected", 1)).await;
    // What has no place a second time is the same event.
    assert_eq!(rest.put(POOL, &pool(1000, 1)).await.status, 200);
    wait_for(&running, OF_POOL, &event("Warning", "Unplaced", 2)).await;
    wait_for(&running, OF_POOL, &event("Normal", "Scheduled", 2)).await;
    let before = rest.get(OF_POOL).await.body;
    let written = running.metric("mvm_coordinator_store_writes_total{of=\"events\"}").await;
    assert!((5..50).contains(&written), "{written} events were written");
    node.follow(None);
    running.stop().await;
    let running = Running::start(&report.data_dir).await;
    let after = Rest::operator(&running).await.get(OF_POOL).await.body;
    let first = |body: &Value| body["items"].as_array().unwrap()[0].clone();
    assert_eq!(first(&after), first(&before));
    running.stop().await;
}

#[tokio::test]
async fn a_tenants_key_sees_the_events_of_its_own_objects_alone() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let tenant = json!({ "spec": { "quotas": { "max_pools": 9, "max_vcpus": 9, "max_mem_mib": 9000, "max_running": 9 } } });
    assert_eq!(rest.put("/v1/tenants/other", &tenant).await.status, 201);
    for path in [POOL, "/v1/tenants/other/pools/web"] {
        assert_eq!(rest.put(path, &pool(1, 1)).await.status, 201);
    }
    wait_for(&running, OF_POOL, &event("Warning", "Unplaced", 1)).await;
    let of_other = "/v1/events?object=pool/other/web";
    wait_for(&running, of_other, &event("Warning", "Unplaced", 1)).await;
    assert_eq!(told(&mut rest, "/v1/events?tenant=other").await, [event("Warning", "Unplaced", 1)]);
    let key = json!({ "spec": { "role": "tenant-user", "tenant": "acme" } });
    let made = rest.put("/v1/api-keys/acme", &key).await;
    let secret = made.body["status"]["secret"].as_str().unwrap().to_owned();
    let mut keyed = Rest::with_key(&running, Some(&secret)).await;
    let all = keyed.get("/v1/events").await.body;
    let tenants: Vec<_> = all["items"].as_array().unwrap().iter().map(|event| &event["tenant"]).collect();
    assert!(!tenants.is_empty() && tenants.iter().all(|tenant| *tenant == "acme"), "{all:#}");
    assert_eq!(keyed.get(of_other).await.status, 404, "what it may not see is not there");
    assert_eq!(keyed.get("/v1/events?object=node/n1").await.status, 404);
    assert_eq!(keyed.get("/v1/events?objekt=x").await.status, 400);
    running.stop().await;
}

/// A name may be another customer's by then.
#[tokio::test]
async fn what_happened_to_a_deleted_tenant_is_not_told_to_the_next_one_of_its_name() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let node = FakeNode::start(running.enrol("n1").await);
    for round in 0..2 {
        acme(&mut rest).await;
        let key = json!({ "spec": { "role": "tenant-user", "tenant": "acme" } });
        let made = rest.put(&format!("/v1/api-keys/acme-{round}"), &key).await;
        let secret = made.body["status"]["secret"].as_str().unwrap().to_owned();
        let mut keyed = Rest::with_key(&running, Some(&secret)).await;
        assert_eq!(told(&mut keyed, "/v1/events").await, [], "before anything happened");
        assert_eq!(rest.put(POOL, &pool(1000, 1)).await.status, 201);
        wait_for(&running, OF_POOL, &event("Warning", "Unplaced", 1)).await;
        let of_mine = told(&mut keyed, OF_POOL).await;
        assert!(of_mine.contains(&event("Warning", "Unplaced", 1)), "{of_mine:?}");
        // Of a pool that is gone its own tenant is told, and nothing of it is said of the next one of its name.
        assert_eq!(rest.call("DELETE", POOL, &[], None).await.status, 200);
        wait_until("the pool to go", async || Rest::operator(&running).await.get(POOL).await.status == 404)
            .await;
        assert!(told(&mut keyed, "/v1/events").await.contains(&event("Warning", "Unplaced", 1)));
        assert_eq!(rest.put(POOL, &pool(0, 1)).await.status, 201);
        assert!(!told(&mut keyed, OF_POOL).await.contains(&event("Warning", "Unplaced", 1)));
        assert_eq!(rest.call("DELETE", "/v1/tenants/acme", &[], None).await.status, 200);
        wait_until("the tenant to go", async || {
            Rest::operator(&running).await.get("/v1/tenants/acme").await.status == 404
        })
        .await;
        assert_eq!(told(&mut rest, "/v1/events?tenant=acme").await, [], "there is no such tenant");
    }
    node.follow(None);
    running.stop().await;
}
