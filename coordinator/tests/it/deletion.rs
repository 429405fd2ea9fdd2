//! Deleting tenants and pools while nodes are away, removed, too old, or the coordinator is.

use std::time::Duration;

use mvm_proto::status::{Capacity, Counts, Feature, Mark, NodeInfo, NodeStatus, PoolStatus, TenantRemoval};
use mvm_proto::wire::control::v1::RemoveNodeRequest;
use mvm_proto::wire::session::v1::{Stage, agent_frame};
use mvm_proto::{DesiredState, document::RemovedTenant};
use serde_json::{Value, json};

use crate::rest::Rest;
use crate::support::{Node, Running, Session, mark_of, new_cluster, now, wait_until};

const TENANT: &str = "/v1/tenants/acme";
const POOL: &str = "/v1/tenants/acme/pools/web";
const STORE: &str = "s3://acme-sessions/prod";

async fn declare(rest: &mut Rest, on_delete: &str, running: u32) {
    let made = rest.put(TENANT, &json!({ "spec": { "on_delete": on_delete } })).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let made = rest
        .put(
            POOL,
            &json!({ "spec": {
                "image": { "ref": "builtin:busybox" },
                "resources": { "vcpus": 1, "mem_mib": 64 },
                "counts": { "running": running },
                "persist": { "path": "/session", "store": STORE, "every_seconds": 60 },
            } }),
        )
        .await;
    assert_eq!(made.status, 201, "{}", made.body);
}

/// A session of a node with room for four, whose agent has these features.
async fn connect(node: &Node, features: &[Feature], mark: Option<Mark>) -> Session {
    let mut session = node.dial().await.unwrap();
    let capacity = Capacity { vcpus: 4, mem_mib: 65_536, disk_mib: 65_536, max_instances: 100 };
    let mut hello = node.hello(mark);
    hello.info = Some(NodeInfo {
        node_id: node.id.clone(),
        version: "9.9.9".to_owned(),
        capacity: Some(capacity),
        features: features.iter().map(ToString::to_string).collect(),
        ..NodeInfo::default()
    });
    session.send(agent_frame::Body::Hello(hello)).await;
    session.welcome().await;
    session
}

/// Says what the node has of `acme/web`, and how far it is with tenants that were removed.
async fn report(session: &mut Session, node: &Node, running: Option<u32>, removals: &[TenantRemoval]) {
    let pool = running.map(|running| PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: "web".to_owned(),
        actual: Some(Counts { running, ..Counts::default() }),
        ..PoolStatus::default()
    });
    let status = NodeStatus {
        node_id: node.id.clone(),
        observed_at: now().to_string(),
        pools: pool.into_iter().collect(),
        removals: removals.to_vec(),
        ..NodeStatus::default()
    };
    session.send(agent_frame::Body::Status(status)).await;
}

/// Accepts what comes and makes it true, until it is as wanted.
async fn follow(session: &mut Session, wanted: impl Fn(&DesiredState) -> bool) -> (Mark, DesiredState) {
    loop {
        let document = session.document().await;
        let mark = mark_of(&document);
        session.ack(mark.clone(), Stage::Accepted).await;
        session.ack(mark.clone(), Stage::Converged).await;
        if wanted(&document.get().desired) {
            return (mark, document.get().desired.clone());
        }
    }
}

fn has_pool(desired: &DesiredState) -> bool {
    desired.pools().next().is_some()
}

fn removes_acme(desired: &DesiredState) -> bool {
    !has_pool(desired) && desired.removed_tenants.iter().any(|it| it.tenant_id.as_str() == "acme")
}

fn told(removed: &RemovedTenant, waits_for: &str) -> TenantRemoval {
    TenantRemoval {
        tenant_id: removed.tenant_id.to_string(),
        uid: removed.uid.clone(),
        done: waits_for.is_empty(),
        waits_for: waits_for.to_owned(),
    }
}

async fn deleting(rest: &mut Rest, path: &str) -> (String, String) {
    let body = rest.get(path).await.body;
    let conditions = body["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found =
        conditions.into_iter().find(|condition| condition["type"] == "Deleting").unwrap_or(Value::Null);
    let text = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
    (text("reason"), text("message"))
}

/// Waits until the condition of a deletion says this.
async fn until_told(running: &Running, path: &str, reason: &str, parts: &[&str]) {
    let rest = tokio::sync::Mutex::new(Rest::operator(running).await);
    wait_until(&format!("{path} to wait for {parts:?}"), async || {
        let (found, message) = deleting(&mut *rest.lock().await, path).await;
        found == reason && parts.iter().all(|part| message.contains(part))
    })
    .await;
}

async fn until_gone(running: &Running, path: &str) {
    let rest = tokio::sync::Mutex::new(Rest::operator(running).await);
    wait_until(&format!("{path} to be gone"), async || rest.lock().await.get(path).await.status == 404).await;
}

/// A cluster with one node that runs `acme/web`.
async fn one_node(running: &Running, on_delete: &str) -> (Rest, Node, Session) {
    let mut rest = Rest::operator(running).await;
    declare(&mut rest, on_delete, 1).await;
    let node = running.enrol("a").await;
    let mut session = connect(&node, &Feature::ALL, None).await;
    follow(&mut session, has_pool).await;
    report(&mut session, &node, Some(1), &[]).await;
    (rest, node, session)
}

async fn delete(rest: &mut Rest, path: &str) {
    let gone = rest.call("DELETE", path, &[], None).await;
    assert_eq!(gone.status, 200, "{}", gone.body);
}

#[tokio::test]
async fn a_tenant_goes_with_its_data_once_its_nodes_said_that_nothing_is_left() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, node, mut session) = one_node(&running, "delete").await;
    let uid = rest.get(TENANT).await.body["metadata"]["uid"].as_str().unwrap().to_owned();
    delete(&mut rest, TENANT).await;
    let (_, document) = follow(&mut session, removes_acme).await;
    let removed = &document.removed_tenants[0];
    assert_eq!((removed.uid.as_str(), &removed.session_stores[..]), (uid.as_str(), &[STORE.to_owned()][..]));
    until_told(&running, TENANT, "WaitsForPools", &["pool acme/web"]).await;
    until_told(&running, POOL, "WaitsForNodes", &["node a: it last had 1 instance of it"]).await;

    let store_is_down = format!("the session store {STORE}: connection refused");
    report(&mut session, &node, None, &[told(removed, &store_is_down)]).await;
    until_told(&running, TENANT, "WaitsForNodes", &["node a", &store_is_down]).await;
    // What another tenant of the name was is no answer.
    let other = RemovedTenant { uid: "another".to_owned(), ..removed.clone() };
    report(&mut session, &node, None, &[told(&other, "")]).await;
    until_told(&running, TENANT, "WaitsForNodes", &["it has not said yet"]).await;
    let again = rest.put(TENANT, &json!({ "spec": {} })).await;
    assert_eq!((again.status, again.code()), (409, "being_deleted"), "{}", again.body);
    assert!(again.body["remediation"].as_str().unwrap().contains("--for=delete"), "{}", again.body);

    report(&mut session, &node, None, &[told(removed, "")]).await;
    until_gone(&running, TENANT).await;
    // And the node is told no more of it.
    let (_, document) = follow(&mut session, |desired| desired.removed_tenants.is_empty()).await;
    assert!(document.tenants.is_empty());
    assert_eq!(rest.put(TENANT, &json!({ "spec": {} })).await.status, 201);
}

#[tokio::test]
async fn a_tenant_whose_data_is_kept_goes_once_its_instances_are_gone() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let (mut rest, node, mut session) = one_node(&running, "keep").await;
    delete(&mut rest, TENANT).await;
    let (_, document) = follow(&mut session, |desired| !has_pool(desired)).await;
    assert!(document.removed_tenants.is_empty(), "{:?}", document.removed_tenants);
    report(&mut session, &node, None, &[]).await;
    until_gone(&running, TENANT).await;

    // Where its data is stays known: a tenant of the same name that goes with its data takes it along.
    let made = rest.put(TENANT, &json!({ "spec": { "on_delete": "delete" } })).await;
    assert_eq!(made.status, 201, "{}", made.body);
    delete(&mut rest, TENANT).await;
    let (_, document) = follow(&mut session, removes_acme).await;
    assert_eq!(document.removed_tenants[0].session_stores, [STORE]);
    report(&mut session, &node, None, &[told(&document.removed_tenants[0], "")]).await;
    until_gone(&running, TENANT).await;
}

#[tokio::test]
async fn a_tenant_waits_for_its_node_that_is_away_and_goes_when_that_returns() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, node, session) = one_node(&running, "delete").await;
    until_counts(&running, 1).await;
    drop(session);
    until_told_away(&running).await;
    delete(&mut rest, TENANT).await;
    until_told(
        &running,
        POOL,
        "WaitsForNodes",
        &["node a: it is not connected since", "last had 1 instance"],
    )
    .await;

    let mut session = connect(&node, &Feature::ALL, None).await;
    let (_, document) = follow(&mut session, removes_acme).await;
    report(&mut session, &node, None, &[]).await;
    // Its instances are gone, and it goes away again before its data is.
    until_gone(&running, POOL).await;
    drop(session);
    until_told(
        &running,
        TENANT,
        "WaitsForNodes",
        &["node a: it is not connected since", "data of the tenant"],
    )
    .await;
    let mut session = connect(&node, &Feature::ALL, None).await;
    report(&mut session, &node, None, &[told(&document.removed_tenants[0], "")]).await;
    until_gone(&running, TENANT).await;
}

async fn until_counts(running: &Running, count: u32) {
    let rest = tokio::sync::Mutex::new(Rest::operator(running).await);
    wait_until("the node's report to be heard", async || {
        rest.lock().await.get(POOL).await.body["status"]["counts"]["running"] == count
    })
    .await;
}

/// A coordinator that soon tells of a node that it is away: two heartbeats after its session ended.
async fn quick(data_dir: &std::path::Path) -> Running {
    Running::start_with(data_dir, |settings| settings.heartbeat = Duration::from_secs(5)).await
}

async fn until_told_away(running: &Running) {
    let rest = tokio::sync::Mutex::new(Rest::operator(running).await);
    wait_until("the node to be away", async || {
        rest.lock().await.get("/v1/nodes/a").await.body["status"]["state"] == "Unknown"
    })
    .await;
}

#[tokio::test]
async fn what_a_removed_node_had_is_not_waited_for() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, _node, session) = one_node(&running, "delete").await;
    until_counts(&running, 1).await;
    drop(session);
    until_told_away(&running).await;
    delete(&mut rest, TENANT).await;
    until_told(&running, POOL, "WaitsForNodes", &["node a"]).await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "a".to_owned() }).await.unwrap();
    until_gone(&running, POOL).await;
    until_gone(&running, TENANT).await;
}

#[tokio::test]
async fn a_bucket_that_only_a_removed_node_used_is_left_to_another_node() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, _node, session) = one_node(&running, "delete").await;
    until_counts(&running, 1).await;
    drop(session);
    until_told_away(&running).await;
    let other = running.enrol("b").await;
    let mut session = connect(&other, &Feature::ALL, None).await;
    delete(&mut rest, TENANT).await;
    until_told(&running, POOL, "WaitsForNodes", &["node a"]).await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "a".to_owned() }).await.unwrap();
    until_gone(&running, POOL).await;
    let (_, document) = follow(&mut session, removes_acme).await;
    assert_eq!(document.removed_tenants[0].session_stores, [STORE]);
    until_told(&running, TENANT, "WaitsForNodes", &["node b"]).await;
    report(&mut session, &other, None, &[told(&document.removed_tenants[0], "")]).await;
    until_gone(&running, TENANT).await;
}

#[tokio::test]
async fn an_agent_that_is_too_old_is_named_gets_no_document_that_it_would_refuse_and_is_upgraded() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    declare(&mut rest, "delete", 1).await;
    let node = running.enrol("a").await;
    let mut session = connect(&node, &[], None).await;
    follow(&mut session, has_pool).await;
    report(&mut session, &node, Some(1), &[]).await;
    delete(&mut rest, TENANT).await;
    let (mark, document) = follow(&mut session, |desired| !has_pool(desired)).await;
    assert!(document.removed_tenants.is_empty(), "{:?}", document.removed_tenants);
    report(&mut session, &node, None, &[]).await;
    until_told(&running, TENANT, "AgentTooOld", &["node a: its agent (9.9.9) is too old"]).await;
    session.expect_quiet().await;
    drop(session);
    let mut session = connect(&node, &Feature::ALL, Some(mark)).await;
    let (_, document) = follow(&mut session, removes_acme).await;
    report(&mut session, &node, None, &[told(&document.removed_tenants[0], "")]).await;
    until_gone(&running, TENANT).await;
}

#[tokio::test]
async fn force_waits_for_no_data_and_not_before_its_pools_are_gone() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, node, mut session) = one_node(&running, "delete").await;
    let force = |path: &str| format!("{path}?force=true");
    let refused = rest.call("DELETE", &force(TENANT), &[], None).await;
    assert_eq!((refused.status, refused.code()), (409, "has_pools"), "{}", refused.body);
    delete(&mut rest, TENANT).await;
    follow(&mut session, removes_acme).await;
    report(&mut session, &node, None, &[]).await;
    until_told(&running, TENANT, "WaitsForNodes", &["node a"]).await;
    delete(&mut rest, &force(TENANT)).await;
    assert_eq!(rest.get(TENANT).await.status, 404);
    follow(&mut session, |desired| desired.removed_tenants.is_empty()).await;
    assert_eq!(rest.put(TENANT, &json!({ "spec": {} })).await.status, 201);
}

#[tokio::test]
async fn a_deletion_goes_on_after_a_restart_of_the_coordinator() {
    let (_dir, start) = new_cluster();
    let running = quick(&start.data_dir).await;
    let (mut rest, mut node, mut session) = one_node(&running, "delete").await;
    delete(&mut rest, TENANT).await;
    let (mark, document) = follow(&mut session, removes_acme).await;
    report(&mut session, &node, None, &[]).await;
    until_gone(&running, POOL).await;
    running.stop().await;

    let running = quick(&start.data_dir).await;
    node.address = running.addresses.quic;
    until_told(&running, TENANT, "WaitsForNodes", &["node a: it is not connected"]).await;
    let mut session = connect(&node, &Feature::ALL, Some(mark)).await;
    // What it has to do it knows: no document comes anew.
    session.expect_quiet().await;
    report(&mut session, &node, None, &[told(&document.removed_tenants[0], "")]).await;
    until_gone(&running, TENANT).await;
}
