//! Shares of a tenant's quotas and blocks of its addresses: who is given what, and when it is another's.

use mvm_proto::document::Tenant;
use mvm_proto::status::{Counts, Mark, NodeStatus, PoolStatus, TenantAddresses};
use mvm_proto::wire::control::v1::RemoveNodeRequest;
use mvm_proto::wire::session::v1::{Stage, agent_frame};
use serde_json::{Value, json};

use crate::objects::{connect, field, join, until};
use crate::rest::Rest;
use crate::support::{Running, Session, mark_of, new_cluster, now, soon, wait_until};

/// A tenant that may run two instances of one vCPU.
async fn small(rest: &mut Rest) {
    let quotas = json!({ "max_vcpus": 2, "max_mem_mib": 128, "max_running": 2 });
    let made = rest.put("/v1/tenants/acme", &json!({ "spec": { "quotas": quotas } })).await;
    assert_eq!(made.status, 201, "{}", made.body);
}

async fn pool(rest: &mut Rest, name: &str, running: u32) {
    let spec = json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": running },
    } });
    let answer = rest.put(&format!("/v1/tenants/acme/pools/{name}"), &spec).await;
    assert!(answer.status < 300, "{}", answer.body);
}

async fn cordon(rest: &mut Rest, node: &str) {
    let patch = json!({ "spec": { "cordoned": true } });
    let headers = [("content-type", "application/merge-patch+json")];
    let answer = rest.call("PATCH", &format!("/v1/nodes/{node}"), &headers, Some(&patch)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

/// The next document: its mark, and what it says of the tenant.
async fn offered(session: &mut Session) -> (Mark, Option<Tenant>) {
    let document = session.document().await;
    (mark_of(&document), document.get().desired.tenants.first().cloned())
}

/// The vCPUs and the running instances that a document allows, and how many it asks for.
fn share(tenant: Option<&Tenant>) -> (u32, u32, u32) {
    let Some(tenant) = tenant else { return (0, 0, 0) };
    let wanted = tenant.pools.iter().map(|pool| pool.desired_counts.running).sum();
    (tenant.quotas.max_vcpus, tenant.quotas.max_running, wanted)
}

fn blocks(tenant: Option<&Tenant>) -> Vec<u16> {
    tenant.and_then(|tenant| tenant.network.address_blocks.clone()).unwrap_or_default()
}

/// The node's status: the document that it follows, and the addresses of its instances of `acme/web`.
async fn report(session: &mut Session, node: &str, accepted: &Mark, running: u32, in_blocks: &[u32]) {
    let pool = PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: "web".to_owned(),
        actual: Some(Counts { running, ..Counts::default() }),
        ..PoolStatus::default()
    };
    let addresses = TenantAddresses {
        tenant_id: "acme".to_owned(),
        blocks: in_blocks.to_vec(),
        ..TenantAddresses::default()
    };
    let status = NodeStatus {
        node_id: node.to_owned(),
        observed_at: now().to_string(),
        accepted: Some(accepted.clone()),
        pools: (running > 0).then_some(pool).into_iter().collect(),
        addresses: (running > 0).then_some(addresses).into_iter().collect(),
        ..NodeStatus::default()
    };
    session.send(agent_frame::Body::Status(status)).await;
}

async fn unplaced(rest: &mut Rest, name: &str) -> String {
    let path = format!("/v1/tenants/acme/pools/{name}");
    let shared = tokio::sync::Mutex::new(rest);
    wait_until("something to have no place", async || {
        field(*shared.lock().await, &path, "/status/unplaced/reason").await.is_string()
    })
    .await;
    let reason = field(*shared.lock().await, &path, "/status/unplaced/reason").await;
    reason.as_str().unwrap().to_owned()
}

/// Until a condition has a reason.
async fn until_condition(running: &Running, path: &str, kind: &str, reason: &str) {
    wait_until("a condition", async || {
        let status = Rest::operator(running).await.get(path).await.body["status"].clone();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| one["type"] == kind && one["reason"] == reason)
    })
    .await;
}

/// Until a pool is not told to lack something. A lack that is made good before it is stored leaves no trace.
async fn until_enough(running: &Running, path: &str) {
    wait_until("the lack to be made good", async || {
        let status = Rest::operator(running).await.get(path).await.body["status"].clone();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        !conditions.iter().any(|one| one["type"] == "SharesReady" && one["status"] == "False")
    })
    .await;
}

#[tokio::test]
async fn a_share_shrinks_on_one_node_before_it_grows_on_another() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    small(&mut rest).await;
    let (_a, mut session_a) = join(&running, "a", 8).await;
    pool(&mut rest, "web", 2).await;
    let (first, tenant) = offered(&mut session_a).await;
    assert_eq!((share(tenant.as_ref()), blocks(tenant.as_ref())), ((2, 2, 2), vec![0]));
    session_a.ack(first, Stage::Accepted).await;

    let (_b, mut session_b) = join(&running, "b", 8).await;
    until(&mut rest, "/v1/nodes/b", "/status/state", &json!("Ready")).await;
    cordon(&mut rest, "a").await;
    pool(&mut rest, "web", 1).await;
    let (second, tenant) = offered(&mut session_a).await;
    assert_eq!(share(tenant.as_ref()), (2, 2, 1));
    pool(&mut rest, "other", 1).await;
    // It may still run two.
    let reason = unplaced(&mut rest, "other").await;
    assert!(reason.contains("not yet confirmed to be gone"), "{reason}");
    session_b.expect_quiet().await;

    session_a.ack(second, Stage::Accepted).await;
    let (third, tenant) = offered(&mut session_a).await;
    assert_eq!(share(tenant.as_ref()), (1, 1, 1));
    let (_, tenant) = offered(&mut session_b).await;
    assert_eq!((share(tenant.as_ref()), blocks(tenant.as_ref())), ((0, 0, 1), vec![1]));
    let other = "/v1/tenants/acme/pools/other";
    until_condition(&running, other, "SharesReady", "ShareShort").await;
    until(&mut rest, "/v1/tenants/acme", "/status/conditions/0/reason", &json!("ShareShort")).await;
    let explained = rest.get("/v1/explain/pool/acme/other").await.body;
    let told = explained["deferred"][0].as_str().unwrap_or_default().to_owned();
    assert!(told.starts_with("b: quota of tenant acme: max_vcpus is 2"), "{explained}");
    session_b.expect_quiet().await;

    session_a.ack(third, Stage::Accepted).await;
    let (fourth, tenant) = offered(&mut session_b).await;
    assert_eq!(share(tenant.as_ref()), (1, 1, 1));
    session_b.ack(fourth, Stage::Accepted).await;
    until_enough(&running, other).await;
    // What is at rest is left alone.
    session_a.expect_quiet().await;
    session_b.expect_quiet().await;
}

#[tokio::test]
async fn a_lost_node_keeps_its_share_until_it_is_removed_also_through_a_restart() {
    let (_dir, start) = new_cluster();
    let grace = |settings: &mut mvm_coordinator::CoordinatorSettings| {
        settings.node_grace = std::time::Duration::from_millis(500);
    };
    let running = Running::start_with(&start.data_dir, grace).await;
    let mut rest = Rest::operator(&running).await;
    small(&mut rest).await;
    let (_a, mut session_a) = join(&running, "a", 8).await;
    pool(&mut rest, "web", 2).await;
    let (mark, _) = offered(&mut session_a).await;
    session_a.ack(mark.clone(), Stage::Accepted).await;
    report(&mut session_a, "a", &mark, 2, &[0]).await;
    until(&mut rest, "/v1/tenants/acme/pools/web", "/status/ready", &json!("2/2")).await;
    let (mut b, session_b) = join(&running, "b", 8).await;
    drop(session_a);
    let reason = unplaced(&mut rest, "web").await;
    assert!(reason.contains("not yet confirmed to be gone"), "{reason}");
    drop(session_b);
    running.stop().await;

    let running = Running::start_with(&start.data_dir, grace).await;
    let mut rest = Rest::operator(&running).await;
    b.address = running.addresses.quic;
    let mut session_b = connect(&b, 8, None).await;
    until(&mut rest, "/v1/nodes/a", "/status/conditions/0/reason", &json!("Lost")).await;
    session_b.expect_quiet().await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "a".into() }).await.unwrap();
    let (_, tenant) = offered(&mut session_b).await;
    assert_eq!(share(tenant.as_ref()), (2, 2, 2));
}

#[tokio::test]
async fn a_block_is_given_on_when_its_node_uses_none_of_its_addresses() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    // One block of 13 addresses.
    let spec = json!({ "spec": { "network": { "subnet": "10.9.0.0/28" } } });
    assert_eq!(rest.put("/v1/tenants/acme", &spec).await.status, 201);
    let (_a, mut session_a) = join(&running, "a", 8).await;
    pool(&mut rest, "web", 1).await;
    let (first, tenant) = offered(&mut session_a).await;
    assert_eq!(blocks(tenant.as_ref()), [0]);
    session_a.ack(first.clone(), Stage::Accepted).await;
    report(&mut session_a, "a", &first, 1, &[0]).await;

    let (_b, mut session_b) = join(&running, "b", 8).await;
    until(&mut rest, "/v1/nodes/b", "/status/state", &json!("Ready")).await;
    let taint = json!({ "spec": { "taints": [{ "key": "repair", "value": "disk", "effect": "drain" }] } });
    let headers = [("content-type", "application/merge-patch+json")];
    assert_eq!(rest.call("PATCH", "/v1/nodes/a", &headers, Some(&taint)).await.status, 200);
    // The place is there, and the addresses are not.
    let (second, tenant) = offered(&mut session_a).await;
    assert_eq!(tenant, None);
    let (_, tenant) = offered(&mut session_b).await;
    assert_eq!((blocks(tenant.as_ref()), share(tenant.as_ref()).2), (vec![], 0));
    let web = "/v1/tenants/acme/pools/web";
    until_condition(&running, web, "SharesReady", "AddressesExhausted").await;
    session_a.ack(second.clone(), Stage::Accepted).await;
    report(&mut session_a, "a", &second, 1, &[0]).await;
    session_b.expect_quiet().await;
    report(&mut session_a, "a", &second, 0, &[]).await;
    let (_, tenant) = offered(&mut session_b).await;
    assert_eq!((blocks(tenant.as_ref()), share(tenant.as_ref()).2), (vec![0], 1));
    until_enough(&running, web).await;
}

#[tokio::test]
async fn a_node_that_claims_the_addresses_of_others_takes_none_from_them() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    // Two blocks.
    let spec = json!({ "spec": { "network": { "subnet": "10.9.0.0/27" } } });
    assert_eq!(rest.put("/v1/tenants/acme", &spec).await.status, 201);
    let (_a, mut honest) = join(&running, "a", 8).await;
    let (_b, mut liar) = join(&running, "b", 8).await;
    for node in ["/v1/nodes/a", "/v1/nodes/b"] {
        until(&mut rest, node, "/status/state", &json!("Ready")).await;
    }
    let spec = json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": 2 },
        "placement": { "max_per_node": 1 },
    } });
    assert_eq!(rest.put("/v1/tenants/acme/pools/web", &spec).await.status, 201);
    let (of_honest, tenant) = offered(&mut honest).await;
    let [own] = blocks(tenant.as_ref())[..] else { panic!("{tenant:?}") };
    let (of_liar, tenant) = offered(&mut liar).await;
    let [other] = blocks(tenant.as_ref())[..] else { panic!("{tenant:?}") };
    honest.ack(of_honest.clone(), Stage::Accepted).await;
    report(&mut honest, "a", &of_honest, 1, &[own.into()]).await;
    liar.ack(of_liar.clone(), Stage::Accepted).await;
    let own = u32::from(own);
    let claims = TenantAddresses {
        tenant_id: "acme".to_owned(),
        blocks: vec![other.into(), own],
        offsets: (own * 16..own * 16 + 16).collect(),
    };
    let status = NodeStatus {
        node_id: "b".to_owned(),
        accepted: Some(of_liar),
        addresses: vec![claims],
        ..NodeStatus::default()
    };
    liar.send(agent_frame::Body::Status(status)).await;
    // What is told later is heard later.
    pool(&mut rest, "other", 0).await;
    until(&mut rest, "/v1/tenants/acme/pools/web", "/status/counts/running", &json!(1)).await;
    honest.expect_quiet().await;
}

/// What a deleted tenant had is free 30 days after the last node confirmed that nothing of it is left.
#[tokio::test]
async fn the_subnet_of_a_deleted_tenant_waits_for_every_node() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let spec = json!({ "spec": { "network": { "subnet": "10.9.0.0/24" } } });
    assert_eq!(rest.put("/v1/tenants/acme", &spec).await.status, 201);
    let (_a, mut session) = join(&running, "a", 8).await;
    pool(&mut rest, "web", 1).await;
    let mark = session.obey().await;
    report(&mut session, "a", &mark, 1, &[0]).await;
    for path in ["/v1/tenants/acme/pools/web?force=true", "/v1/tenants/acme?force=true"] {
        let gone = rest.call("DELETE", path, &[], None).await;
        assert_eq!(gone.status, 200, "{}", gone.body);
    }
    let detail = async |rest: &mut Rest| -> String {
        let answer = rest.put("/v1/tenants/next", &spec).await;
        assert_eq!((answer.status, answer.code()), (422, "subnet_taken"), "{}", answer.body);
        answer.body["detail"].as_str().unwrap().to_owned()
    };
    let told = detail(&mut rest).await;
    assert!(told.contains("which a and 0 more nodes have not confirmed"), "{told}");
    let (mark, tenant) = offered(&mut session).await;
    assert_eq!(tenant, None);
    session.ack(mark.clone(), Stage::Accepted).await;
    report(&mut session, "a", &mark, 0, &[]).await;
    let rest = tokio::sync::Mutex::new(rest);
    let confirmed = wait_until("the node to have confirmed it", async || {
        detail(&mut *rest.lock().await).await.contains("which is free at")
    });
    soon("the confirmation", confirmed).await;
    let left: Value = rest.lock().await.get("/v1/tenants").await.body["items"].clone();
    assert_eq!(left, json!([]));
}

#[tokio::test]
async fn demand_names_what_machines_are_lacking_and_which_are_not_needed() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &json!({ "spec": {} })).await.status, 201);
    let (_a, mut session) = join(&running, "a", 1).await;
    until(&mut rest, "/v1/demand", "/empty_nodes/0/node", &json!("a")).await;
    pool(&mut rest, "web", 7).await;
    let mark = session.obey().await;
    report(&mut session, "a", &mark, 4, &[0]).await;
    // Four of them fit: a vCPU may be promised four times.
    until(&mut rest, "/v1/demand", "/unplaced/0/counts/running", &json!(3)).await;
    let demand = rest.get("/v1/demand").await.body;
    assert_eq!((&demand["unplaced"][0]["vcpus"], &demand["empty_nodes"]), (&json!(1), &json!([])));

    let key = json!({ "spec": { "role": "tenant-admin", "tenant": "acme" } });
    let made = rest.put("/v1/api-keys/ci", &key).await;
    let mut keyed = Rest::with_key(&running, made.body["status"]["secret"].as_str()).await;
    assert_eq!(keyed.get("/v1/demand").await.code(), "forbidden");
}
