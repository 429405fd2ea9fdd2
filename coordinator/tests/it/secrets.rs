//! Secrets: written and never read back, named by pools, delivered to the nodes that run them and to no other.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mvm_proto::wire::session::v1::{SecretsBundle, SecretsWanted, Stage, agent_frame, coordinator_frame};
use mvm_proto::{Digest, Problem};
use serde_json::{Value, json};

use crate::objects::{POOL, acme, connect, field, join, pool};
use crate::rest::{Events, Rest};
use crate::support::{Running, Session, mark_of, new_cluster, soon, wait_until};

const DB: &str = "/v1/tenants/acme/secrets/db";
/// Found nowhere but on the nodes that are given it.
const CANARY: &str = "canary-7f3a-hunter2";

fn secret(data: &Value) -> Value {
    json!({ "spec": { "data": data } })
}

fn naming(names: &[&str]) -> Value {
    let mut pool = pool(1);
    pool["spec"]["secrets"] = json!(names);
    pool
}

/// The bundles that the pools of a document name.
type Hashes = BTreeMap<String, Option<Digest>>;

/// The next document's, which is obeyed.
async fn hashes(session: &mut Session) -> Hashes {
    let document = session.document().await;
    let mark = mark_of(&document);
    session.ack(mark.clone(), Stage::Accepted).await;
    session.ack(mark, Stage::Converged).await;
    let pools = document.get().desired.pools();
    pools
        .map(|(tenant, pool)| (format!("{}/{}", tenant.tenant_id, pool.pool_id), pool.secrets_hash))
        .collect()
}

/// Documents are obeyed until one says this.
async fn hashes_until(session: &mut Session, what: &str, is_it: impl Fn(&Hashes) -> bool) -> Hashes {
    let found = async {
        loop {
            let hashes = hashes(session).await;
            if is_it(&hashes) {
                return hashes;
            }
        }
    };
    soon(what, found).await
}

/// Asks for a bundle: its bytes, or why there are none.
async fn ask(session: &mut Session, tenant: &str, digest: &Digest) -> Result<Vec<u8>, Problem> {
    let bundle = SecretsBundle { tenant_id: tenant.to_owned(), digest: digest.to_string() };
    session.send(agent_frame::Body::SecretsWanted(SecretsWanted { bundles: vec![bundle.clone()] })).await;
    let mut bytes = Vec::new();
    loop {
        match session.next().await.expect("the session goes on") {
            coordinator_frame::Body::SecretsPiece(piece) => {
                assert_eq!((piece.bundle.as_ref(), piece.offset), (Some(&bundle), bytes.len() as u64));
                bytes.extend_from_slice(&piece.data);
                if bytes.len() as u64 == piece.total {
                    return Ok(bytes);
                }
            }
            coordinator_frame::Body::SecretsRefused(refused) => {
                assert_eq!(refused.bundle, Some(bundle));
                return Err(serde_json::from_slice(&refused.problem).unwrap());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Waits until the condition `SecretsReady` of `acme/web` has this reason, and a message that begins like this.
async fn secrets_ready(rest: &mut Rest, reason: &str, message: &str) {
    let rest = tokio::sync::Mutex::new(rest);
    wait_until(&format!("SecretsReady to be {reason}"), async || {
        let conditions = field(*rest.lock().await, POOL, "/status/conditions").await;
        let mut all = conditions.as_array().into_iter().flatten();
        all.any(|one| {
            one["type"] == "SecretsReady"
                && one["reason"] == reason
                && one["message"].as_str().is_some_and(|said| said.starts_with(message))
        })
    })
    .await;
}

fn holds(dir: &Path, needle: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(holds(&path, needle));
        } else if fs::read(&path).unwrap().windows(needle.len()).any(|window| window == needle) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[tokio::test]
async fn a_value_is_written_and_never_read_back() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let from = rest.get("/v1/secrets").await.body["metadata"]["resource_version"].clone();
    let data = json!({ "PASSWORD": CANARY, "key.der": { "base64": "AAECAw==" } });
    let mut said = Vec::new();
    let tried = rest.call("PUT", &format!("{DB}?dry_run=true"), &[], Some(&secret(&data))).await;
    assert_eq!(tried.status, 200, "{}", tried.body);
    said.push(tried.body);
    let mut plan = secret(&data);
    plan["api_version"] = json!("mvm/v1");
    plan["kind"] = json!("Secret");
    plan["metadata"] = json!({ "tenant": "acme", "name": "db" });
    said.push(rest.call("POST", "/v1/plan", &[], Some(&json!({ "objects": [plan] }))).await.body);
    let made = rest.put(DB, &secret(&data)).await;
    assert_eq!(
        (made.status, &made.body["status"]["bytes"]),
        (201, &json!(CANARY.len() + 4)),
        "{}",
        made.body
    );
    assert_eq!(made.body["spec"]["data"]["PASSWORD"]["bytes"], CANARY.len());
    let shown = made.body.clone();

    // Given again it is the same, and so is what is shown of it.
    for same in [secret(&data), json!({ "spec": shown["spec"] })] {
        let again = rest.put(DB, &same).await;
        assert_eq!((again.status, &again.body["metadata"]["generation"]), (200, &json!(1)), "{}", again.body);
        said.push(again.body);
    }
    // One value changes, and the others stay.
    let patch = secret(&json!({ "PASSWORD": format!("{CANARY}-2"), "key.der": null, "NEW": "" }));
    let media = [("content-type", "application/merge-patch+json")];
    let patched = rest.call("PATCH", DB, &media, Some(&patch)).await.body;
    assert_eq!(patched["metadata"]["generation"], 2, "{patched}");
    assert_ne!(patched["spec"]["data"]["PASSWORD"], shown["spec"]["data"]["PASSWORD"]);
    let names: Vec<_> = patched["spec"]["data"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["NEW", "PASSWORD"]);
    // Of a value that is there no more nothing is kept.
    let old = rest.put(DB, &json!({ "spec": shown["spec"] })).await;
    assert_eq!((old.status, old.body["errors"][0]["path"].as_str()), (422, Some("spec.data.PASSWORD")));
    // Nor is a value told by the error about it.
    let wrong = rest.put(DB, &secret(&json!({ "A": { "base64": CANARY } }))).await;
    assert_eq!(wrong.status, 422);
    said.extend([made.body, patched, old.body, wrong.body]);

    let path = format!("/v1/secrets?watch=true&resource_version={}", from.as_str().unwrap());
    let mut events = Events::of(&mut Rest::operator(&running).await, &path).await;
    said.extend([events.next().await.object, events.next().await.object]);
    for path in ["/v1/secrets", DB, "/v1/audit", "/v1/pools"] {
        said.push(rest.get(path).await.body);
    }
    running.stop().await;
    let said = serde_json::to_string(&said).unwrap();
    assert!(said.contains("PASSWORD") && !said.contains("canary"), "{said}");
    assert_eq!(holds(&report.data_dir, b"canary"), [""; 0]);
    assert_ne!(holds(&report.data_dir, b"PASSWORD"), [""; 0], "files are searched as they are");
}

#[tokio::test]
async fn a_request_that_is_sent_again_is_done_once_and_with_another_value_it_is_another() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let mut body = secret(&json!({ "PIN": "1234" }));
    body["metadata"] = json!({ "name": "db" });
    for status in [201, 200] {
        let made =
            rest.call("POST", "/v1/tenants/acme/secrets", &[("idempotency-key", "a")], Some(&body)).await;
        assert_eq!(made.status, status, "{}", made.body);
    }
    // As long as the first, and all that is told of both is the same.
    body["spec"]["data"]["PIN"] = json!("4321");
    let other = rest.call("POST", "/v1/tenants/acme/secrets", &[("idempotency-key", "a")], Some(&body)).await;
    assert_eq!(other.code(), "idempotency_key_reused", "{}", other.body);
}

#[tokio::test]
async fn a_changed_secret_changes_the_pools_that_name_it_and_is_delivered_to_their_nodes_alone() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let tenant = json!({ "spec": { "quotas": { "max_pools": 9 } } });
    assert_eq!(rest.put("/v1/tenants/acme", &tenant).await.status, 201);
    assert_eq!(rest.put(DB, &secret(&json!({ "PASSWORD": CANARY }))).await.status, 201);
    let tls = "/v1/tenants/acme/secrets/tls";
    assert_eq!(rest.put(tls, &secret(&json!({ "key": "k" }))).await.status, 201);
    let (_node, mut session) = join(&running, "node-a", 8).await;
    for (name, names) in [("both", &["tls", "db"][..]), ("none", &[]), ("other", &["tls"])] {
        let made = rest.put(&format!("/v1/tenants/acme/pools/{name}"), &naming(names)).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }
    let before = hashes_until(&mut session, "all pools", |hashes| hashes.len() == 3).await;
    assert_eq!(before["acme/none"], None);
    let digest = before["acme/both"].unwrap();
    assert_ne!(Some(digest), before["acme/other"]);
    let bytes = ask(&mut session, "acme", &digest).await.unwrap();
    assert_eq!(Digest::of(&bytes), digest);
    let bundle: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!((&bundle["db"]["PASSWORD"], &bundle["tls"]["key"]), (&json!(CANARY), &json!("k")));

    // It changes: only what names it is another revision, and what was is no longer given.
    assert_eq!(rest.put(DB, &secret(&json!({ "PASSWORD": "next" }))).await.status, 200);
    let after = hashes(&mut session).await;
    assert_ne!(after["acme/both"], before["acme/both"]);
    assert_eq!((after["acme/other"], after["acme/none"]), (before["acme/other"], None));
    assert_eq!(ask(&mut session, "acme", &digest).await.unwrap_err().code, "secrets_unknown");
    let next = after["acme/both"].unwrap();
    let bytes = ask(&mut session, "acme", &next).await.unwrap();
    assert!(String::from_utf8(bytes).unwrap().contains("\"PASSWORD\": \"next\""));

    // Another node is given none of it, nor is another tenant's name of use.
    let (_other, mut elsewhere) = join(&running, "node-b", 1).await;
    assert_eq!(ask(&mut elsewhere, "acme", &next).await.unwrap_err().code, "secrets_unknown");
    assert_eq!(ask(&mut session, "globex", &next).await.unwrap_err().code, "secrets_unknown");
    // What no pool names is given to no node, and what is labelled anew is no other.
    let labels =
        json!({ "metadata": { "labels": { "a": "b" } }, "spec": { "data": { "PASSWORD": "next" } } });
    assert_eq!(rest.put(DB, &labels).await.status, 200);
    session.expect_quiet().await;
    assert_eq!(rest.put("/v1/tenants/acme/pools/both", &naming(&[])).await.status, 200);
    hashes_until(&mut session, "a pool without secrets", |hashes| hashes["acme/both"].is_none()).await;
    assert_eq!(ask(&mut session, "acme", &next).await.unwrap_err().code, "secrets_unknown");
    assert_eq!(running.metric("mvm_coordinator_secrets_delivered_total").await, 2);
    assert_eq!(holds(&report.data_dir, b"canary"), [""; 0]);
}

#[tokio::test]
async fn a_large_bundle_comes_in_pieces_and_a_document_comes_between_them() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    // Each byte takes six in the bundle.
    let large = "\u{1}".repeat(30_000);
    let made = rest.put(DB, &secret(&json!({ "A": large }))).await;
    assert_eq!(made.status, 201, "{}", made.body);
    assert_eq!(rest.put(POOL, &naming(&["db"])).await.status, 201);
    let (_node, mut session) = join(&running, "node-a", 8).await;
    let digest = hashes(&mut session).await["acme/web"].unwrap();
    let bytes = ask(&mut session, "acme", &digest).await.unwrap();
    assert!(bytes.len() > 2 * mvm_proto::wire::SECRETS_PIECE_BYTES);
    assert_eq!(Digest::of(&bytes), digest);
    // A list that no agent sends ends the session.
    let bundle = SecretsBundle { tenant_id: "acme".to_owned(), digest: digest.to_string() };
    let bundles = vec![bundle; mvm_proto::wire::MAX_SECRETS_WANTED + 1];
    session.send(agent_frame::Body::SecretsWanted(SecretsWanted { bundles })).await;
    assert!(session.end().await.unwrap().reason.contains("asks for more"));
}

#[tokio::test]
async fn a_pool_waits_for_a_secret_that_is_not_there_and_says_which() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let pool = POOL;
    assert_eq!(rest.put(pool, &naming(&["db", "tls"])).await.status, 201);
    let (_node, mut session) = join(&running, "node-a", 8).await;
    let waiting = hashes(&mut session).await["acme/web"].expect("it names a bundle that there is not");
    assert_eq!(ask(&mut session, "acme", &waiting).await.unwrap_err().code, "secrets_unknown");
    secrets_ready(&mut rest, "SecretMissing", "waits for secret db, tls").await;
    assert_eq!(rest.put(DB, &secret(&json!({}))).await.status, 201);
    secrets_ready(&mut rest, "SecretMissing", "waits for secret tls").await;
    assert_eq!(rest.put("/v1/tenants/acme/secrets/tls", &secret(&json!({ "a": "b" }))).await.status, 201);
    secrets_ready(&mut rest, "Ready", "").await;
    let made = hashes(&mut session).await["acme/web"].unwrap();
    assert_ne!(made, waiting);
    assert!(ask(&mut session, "acme", &made).await.is_ok());

    // Gone with force, what runs goes on: the pool is still wanted, and names no bundle that there is.
    let refused = rest.call("DELETE", DB, &[], None).await;
    assert_eq!((refused.status, refused.code()), (409, "secret_in_use"), "{}", refused.body);
    assert!(refused.body["detail"].as_str().unwrap().contains("pool/acme/web"), "{}", refused.body);
    assert_eq!(rest.call("DELETE", &format!("{DB}?force=true"), &[], None).await.status, 200);
    let gone = hashes(&mut session).await["acme/web"].unwrap();
    assert!(gone == waiting && gone != made);
    // One that is made anew under the name has other values, whatever they are.
    assert_eq!(rest.put(DB, &secret(&json!({}))).await.status, 201);
    assert_ne!(hashes(&mut session).await["acme/web"], Some(made));
    let deleted = rest.call("DELETE", &format!("{pool}?force=true"), &[], None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.body);
    assert_eq!(rest.call("DELETE", DB, &[], None).await.status, 200);
    assert_eq!(rest.get(DB).await.status, 404);
}

#[tokio::test]
async fn a_tenant_has_so_many_secrets_of_so_many_bytes() {
    use mvm_proto::object::{MAX_SECRET_BYTES, MAX_TENANT_SECRET_BYTES, MAX_TENANT_SECRETS};
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let path = |n: usize| format!("/v1/tenants/acme/secrets/s{n}");
    let unknown = rest.put(&path(0), &secret(&json!({}))).await;
    assert_eq!((unknown.status, unknown.code()), (422, "tenant_unknown"));
    acme(&mut rest).await;
    let fit = usize::try_from(MAX_TENANT_SECRET_BYTES).unwrap() / MAX_SECRET_BYTES;
    let largest = secret(&json!({ "A": "x".repeat(MAX_SECRET_BYTES) }));
    for n in 0..fit {
        let made = rest.put(&path(n), &largest).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }
    let over = rest.put(&path(fit), &secret(&json!({ "A": "x" }))).await;
    assert_eq!((over.status, over.code()), (422, "quota_exceeded"), "{}", over.body);
    // Less is always taken, and makes room.
    assert_eq!(rest.put(&path(0), &secret(&json!({}))).await.status, 200);
    assert_eq!(rest.put(&path(fit), &secret(&json!({ "A": "x" }))).await.status, 201);
    for n in fit + 1..MAX_TENANT_SECRETS {
        assert_eq!(rest.put(&path(n), &secret(&json!({}))).await.status, 201);
    }
    let over = rest.put(&path(MAX_TENANT_SECRETS), &secret(&json!({}))).await;
    assert_eq!((over.status, over.code()), (422, "quota_exceeded"), "{}", over.body);
    assert_eq!(rest.call("DELETE", &path(1), &[], None).await.status, 200);
    assert_eq!(rest.put(&path(MAX_TENANT_SECRETS), &largest).await.status, 201);
}

#[tokio::test]
async fn secrets_go_with_a_tenant_that_is_deleted_with_its_data() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    for (tenant, on_delete) in [("acme", "delete"), ("globex", "keep")] {
        let made =
            rest.put(&format!("/v1/tenants/{tenant}"), &json!({ "spec": { "on_delete": on_delete } })).await;
        assert_eq!(made.status, 201, "{}", made.body);
        for name in ["a", "b"] {
            let path = format!("/v1/tenants/{tenant}/secrets/{name}");
            assert_eq!(rest.put(&path, &secret(&json!({ "A": "x" }))).await.status, 201);
        }
        let gone = rest.call("DELETE", &format!("/v1/tenants/{tenant}?wait=20s"), &[], None).await;
        assert_eq!(gone.status, 200, "{}", gone.body);
    }
    let left = rest.get("/v1/secrets").await.body;
    let left: Vec<_> =
        left["items"].as_array().unwrap().iter().map(|item| &item["metadata"]["tenant"]).collect();
    assert_eq!(left, ["globex", "globex"]);
    // What was kept can be deleted, and what was deleted is not there for a tenant of the same name.
    assert_eq!(rest.call("DELETE", "/v1/tenants/globex/secrets/a", &[], None).await.status, 200);
    acme(&mut rest).await;
    let made = rest.put("/v1/tenants/acme/secrets/a", &secret(&json!({}))).await;
    assert_eq!((made.status, &made.body["metadata"]["generation"]), (201, &json!(1)), "{}", made.body);
}

#[tokio::test]
async fn a_key_sees_secrets_only_where_its_role_may() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(DB, &secret(&json!({ "A": "x" }))).await.status, 201);
    for (role, reads, writes) in [
        ("admin", 200, 200),
        ("operator", 200, 200),
        ("tenant-admin", 200, 200),
        ("tenant-user", 404, 404),
        ("viewer", 404, 404),
    ] {
        let mut key = json!({ "spec": { "role": role } });
        if role.starts_with("tenant") {
            key["spec"]["tenant"] = json!("acme");
        }
        let made = rest.put(&format!("/v1/api-keys/{role}"), &key).await;
        let text = made.body["status"]["secret"].as_str().unwrap().to_owned();
        let mut caller = Rest::with_key(&running, Some(&text)).await;
        let read = caller.get(DB).await.status;
        let wrote = caller.put(DB, &secret(&json!({ "A": role }))).await.status;
        assert_eq!((read, wrote), (reads, writes), "{role}");
    }
}

#[tokio::test]
async fn a_new_key_encrypts_all_anew_and_changes_no_pool() {
    let (_dir, report) = new_cluster();
    let keys = report.data_dir.join("secrets.keys");
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(DB, &secret(&json!({ "A": CANARY }))).await.status, 201);
    assert_eq!(rest.put(POOL, &naming(&["db"])).await.status, 201);
    let (mut node, mut session) = join(&running, "node-a", 8).await;
    let document = session.document().await;
    let mark = mark_of(&document);
    session.ack(mark.clone(), Stage::Accepted).await;
    session.ack(mark.clone(), Stage::Converged).await;
    let digest = document.get().desired.pools().next().unwrap().1.secrets_hash.unwrap();
    let shown = rest.get(DB).await.body["spec"].clone();
    running.stop().await;

    let old = fs::read_to_string(&keys).unwrap();
    let new = format!("{}\n", "ab".repeat(32));
    let write = |text: &str| mvm_pki::files::write_private(&keys, text.as_bytes()).unwrap();
    // Both first, and then the new one alone.
    for lines in [format!("{new}{old}"), new] {
        write(&lines);
        let running = Running::start(&report.data_dir).await;
        node.address = running.addresses.quic;
        let mut session = connect(&node, 8, Some(mark.clone())).await;
        // Asked as soon as it can be answered.
        let given = async {
            loop {
                if let Ok(bytes) = ask(&mut session, "acme", &digest).await {
                    return bytes;
                }
            }
        };
        assert_eq!(Digest::of(&soon("the bundle", given).await), digest);
        session.expect_quiet().await;
        let mut rest = Rest::operator(&running).await;
        assert_eq!(rest.get(DB).await.body["spec"], shown);
        running.stop().await;
    }

    // Without the key nothing of it is to be had, what runs is left alone, and it can be declared again.
    write(&old);
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let why = "can't read secret db: the key ";
    secrets_ready(&mut rest, "SecretUnreadable", why).await;
    node.address = running.addresses.quic;
    let mut session = connect(&node, 8, Some(mark)).await;
    let waiting = hashes(&mut session).await["acme/web"].unwrap();
    assert_ne!(waiting, digest);
    let kept = rest.put(DB, &json!({ "spec": shown })).await;
    assert_eq!(kept.status, 422, "{}", kept.body);
    assert_eq!(rest.put(DB, &secret(&json!({ "A": CANARY }))).await.status, 200);
    let again = hashes(&mut session).await["acme/web"].unwrap();
    assert!(ask(&mut session, "acme", &again).await.is_ok());
}
