//! API keys and operators' certificates while requests are under way: what ends them, and how much one key may take.

use std::time::Duration;

use mvm_client::{connect, problem_of};
use mvm_coordinator::create_operator;
use mvm_pki::{Credential, LiveCredential};
use mvm_proto::Timestamp;
use mvm_proto::wire::control::v1::{RemoveNodeRequest, RemoveOperatorRequest, StreamEventsRequest};
use mvm_proto::wire::objects::v1::WatchRequest;
use mvm_proto::wire::objects::v1::objects_client::ObjectsClient;
use serde_json::{Value, json};

use crate::objects::{POOL, acme, pool, tenant};
use crate::rest::{Events, Rest};
use crate::support::{
    PATIENCE, Running, cluster_id, document, new_cluster, now, push_request, soon, wait_until,
};

pub(crate) async fn key(rest: &mut Rest, name: &str, spec: &Value) -> String {
    let made = rest.put(&format!("/v1/api-keys/{name}"), &json!({ "spec": spec })).await;
    assert_eq!(made.status, 201, "{}", made.body);
    made.body["status"]["secret"].as_str().unwrap().to_owned()
}

async fn audited(rest: &mut Rest) -> Vec<(String, String, String)> {
    let audit = rest.get("/v1/audit").await.body;
    let text = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let entries = audit["items"].as_array().unwrap().iter();
    entries.map(|entry| (text(entry, "by"), text(entry, "object"), text(entry, "outcome"))).collect()
}

#[tokio::test]
async fn with_a_tenant_go_its_keys_so_that_none_reaches_the_next_tenant_of_that_name() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let unknown = json!({ "spec": { "role": "viewer", "tenant": "acme" } });
    assert_eq!(rest.put("/v1/api-keys/early", &unknown).await.code(), "tenant_unknown");
    for (round, end) in ["?wait=20s", "?force=true"].into_iter().enumerate() {
        acme(&mut rest).await;
        rest.put("/v1/tenants/zeta", &tenant()).await;
        let text = key(&mut rest, "ci", &json!({ "role": "tenant-admin", "tenant": "acme" })).await;
        let name = format!("other{round}");
        let other = key(&mut rest, &name, &json!({ "role": "tenant-admin", "tenant": "zeta" })).await;
        let mut keyed = Rest::with_key(&running, Some(&text)).await;
        assert_eq!(keyed.get("/v1/tenants/acme").await.status, 200);
        let gone = rest.call("DELETE", &format!("/v1/tenants/acme{end}"), &[], None).await;
        assert_eq!(gone.status, 200, "{}", gone.body);
        assert_eq!(keyed.get("/v1/tenants/acme").await.code(), "key_refused", "{end}");
        acme(&mut rest).await;
        assert_eq!(keyed.get("/v1/tenants/acme").await.code(), "key_refused", "{end}");
        assert_eq!(rest.get("/v1/api-keys/ci").await.status, 404);
        let mut other = Rest::with_key(&running, Some(&other)).await;
        assert_eq!(other.get("/v1/tenants/zeta").await.status, 200, "another tenant's key");
        rest.call("DELETE", "/v1/tenants/acme?wait=20s", &[], None).await;
    }
    let told = ["coordinator", "apikey/ci", "deleted"].map(str::to_owned);
    let told = (told[0].clone(), told[1].clone(), told[2].clone());
    assert_eq!(audited(&mut rest).await.into_iter().filter(|entry| *entry == told).count(), 2);
}

#[tokio::test]
async fn what_a_key_has_under_way_ends_when_it_is_deleted() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let spec = json!({ "role": "tenant-admin", "tenant": "acme" });
    let (text, stays) = (key(&mut rest, "ci", &spec).await, key(&mut rest, "ci-2", &spec).await);
    let mut watching = Rest::with_key(&running, Some(&text)).await;
    let mut events = Events::of(&mut watching, "/v1/pools?watch=true").await;
    assert_eq!(events.next().await.what, "bookmark");
    let mut other = Rest::with_key(&running, Some(&stays)).await;
    let mut others = Events::of(&mut other, "/v1/pools?watch=true").await;
    assert_eq!(others.next().await.what, "bookmark");
    // No node is there: it would wait for an hour.
    let waiting = tokio::spawn({
        let mut rest = Rest::with_key(&running, Some(&text)).await;
        async move { rest.put(&format!("{POOL}?wait=1h"), &pool(1)).await }
    });
    assert_eq!(events.next().await.what, "added");

    rest.call("DELETE", "/v1/api-keys/ci", &[], None).await;
    loop {
        let told = events.next().await;
        if told.what == "error" {
            assert_eq!(told.object["code"], "key_refused");
            break;
        }
    }
    let refused = soon("the answer", waiting).await.unwrap();
    assert_eq!((refused.status, refused.code()), (401, "key_refused"), "{}", refused.body);
    // The key of a similar name goes on.
    rest.put("/v1/tenants/acme/pools/late", &pool(0)).await;
    while others.next().await.name() != "late" {}
}

#[tokio::test]
async fn a_watch_ends_when_its_key_expires() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let soon_over = Timestamp::from_unix_ms(now().unix_ms() + 2000).to_string();
    let text = key(&mut rest, "ci", &json!({ "role": "viewer", "expires_at": soon_over })).await;
    let mut watching = Rest::with_key(&running, Some(&text)).await;
    let mut events = Events::of(&mut watching, "/v1/pools?watch=true").await;
    assert_eq!(events.next().await.what, "bookmark");
    let told = events.next().await;
    assert_eq!((told.what.as_str(), &told.object["code"]), ("error", &json!("key_refused")));
}

#[tokio::test]
async fn the_streams_of_an_operator_end_when_it_is_removed_and_when_its_certificate_expires() {
    let (dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let made = |name: &str, life: Duration| {
        let made = create_operator(&report.data_dir, name, &dir.path().join(name), life, now()).unwrap();
        LiveCredential::new(Credential::load(&made.credential).unwrap())
    };
    let (bob, brief) = (made("bob", Duration::from_secs(600)), made("brief", Duration::from_secs(4)));
    let open = async |operator: &LiveCredential| {
        mvm_client::open(&running.target(), operator, &running.anchors(), &cluster_id(), PATIENCE).await
    };
    let watch = WatchRequest { kind: "pools".to_owned(), ..WatchRequest::default() };
    let brief = ObjectsClient::new(open(&brief).await.unwrap()).watch(watch.clone()).await;
    let watched = ObjectsClient::new(open(&bob).await.unwrap()).watch(watch).await;
    let mut ending = vec![
        (watched.unwrap().into_inner(), "operator_removed"),
        (brief.unwrap().into_inner(), "certificate_expired"),
    ];
    let mut bob =
        connect(&running.target(), &bob, &running.anchors(), &cluster_id(), PATIENCE).await.unwrap();
    let events = StreamEventsRequest { follow: true, ..StreamEventsRequest::default() };
    let mut events = bob.stream_events(events).await.unwrap().into_inner();

    let removal = RemoveOperatorRequest { name: "bob".to_owned(), force: false };
    running.operator().await.remove_operator(removal).await.unwrap();
    let told = soon("the end of the events", events.message()).await.unwrap_err();
    assert_eq!(problem_of(&told).unwrap().code, "operator_removed");
    for (stream, expected) in &mut ending {
        let told = loop {
            match soon("the end of a watch", stream.message()).await {
                Ok(event) => assert_eq!(event.unwrap().r#type, "bookmark"),
                Err(status) => break problem_of(&status).unwrap().code,
            }
        };
        assert_eq!(told, *expected);
    }
}

#[tokio::test]
async fn keys_that_hold_all_connections_keep_no_other_site_out() {
    /// As many as there are for connections without a certificate, by as many as one site may have.
    const SITES: u8 = 4;
    const OF_A_SITE: usize = 64;
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let (mut held, mut last) = (Vec::new(), String::new());
    for site in 0..SITES {
        let text = key(&mut rest, &format!("k{site}"), &json!({ "role": "viewer" })).await;
        last.clone_from(&text);
        for _ in 0..OF_A_SITE {
            let mut watching = Rest::from_site(&running, [127, 0, 1, site], &text).await;
            let events = Events::of(&mut watching, "/v1/pools?watch=true").await;
            held.push((watching, events));
        }
    }
    let text = key(&mut rest, "other", &json!({ "role": "viewer" })).await;
    let mut other = Rest::from_site(&running, [127, 0, 2, 1], &text).await;
    assert_eq!(other.get("/v1/pools").await.status, 200);
    // One key has as many requests under way as it may, from wherever they come.
    let mut same = Rest::from_site(&running, [127, 0, 2, 1], &last).await;
    assert_eq!(same.get("/v1/pools").await.code(), "too_many_requests");
    drop(held.pop());
    wait_until("a request of the key to be over", async || {
        Rest::from_site(&running, [127, 0, 2, 1], &last).await.get("/v1/pools").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn many_that_make_pools_at_once_make_no_more_than_the_quota() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let mut makers = tokio::task::JoinSet::new();
    for n in 0..24 {
        let mut rest = Rest::operator(&running).await;
        makers.spawn(async move {
            let path = format!("/v1/tenants/acme/pools/p{n}");
            rest.put(&path, &pool(0)).await.status
        });
    }
    let made: Vec<u16> = makers.join_all().await;
    assert_eq!(made.iter().filter(|status| **status == 201).count(), 2, "{made:?}");
    assert_eq!(rest.get("/v1/pools").await.body["items"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_changes_a_node_beside_its_object_is_in_the_audit_log() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let mut stages = operator.push(push_request(&document("n1", 1), 0)).await.unwrap().into_inner();
    while soon("a stage", stages.message()).await.unwrap().is_some() {}
    operator.remove_node(RemoveNodeRequest { node_id: "n1".to_owned() }).await.unwrap();
    let told = audited(&mut rest).await;
    let expected = ["configured", "deleted"]
        .map(|outcome| ("operator/admin".to_owned(), "node/n1".to_owned(), outcome.to_owned()));
    assert_eq!(told, expected);
    wait_until("the node to be gone", async || {
        Rest::operator(&running).await.get("/v1/nodes/n1").await.status == 404
    })
    .await;
}
