//! Tenants that were removed with their data, and sessions that are deleted by hand, on an agent that lives from a file.

use std::path::Path;

use mvm_proto::Digest;
use serde_json::{Value, json};

use crate::serve::cluster::{Cluster, NODE, Running, desired_json, exchange, get_socket, now, wait_until};

/// A session of `acme/workers` in a store, as an agent leaves it: held by this instance of another node, or by none.
fn put_session(store: &Path, tenant: &str, slot: u32, number: u64, holder: Option<&str>) {
    let pool = store.join(tenant).join("workers");
    let index = br#"{"entries":[]}"#;
    let digest = Digest::of(index);
    let (heads, content) = (pool.join(format!("heads/{slot}")), pool.join(format!("content/{slot}")));
    std::fs::create_dir_all(&heads).unwrap();
    std::fs::create_dir_all(&content).unwrap();
    std::fs::write(content.join(digest.hex()), index).unwrap();
    let head = json!({
        "version": 1, "number": number, "index": digest, "taken_at": now(), "every_seconds": 3600,
        "holder": holder.map(|instance| json!({ "node": "node-2", "instance": instance })),
    });
    let path = heads.join(format!("{number:020}"));
    std::fs::write(path.with_extension("new"), head.to_string()).unwrap();
    std::fs::rename(path.with_extension("new"), path).unwrap();
}

fn declare(file: &Path, document: &Value) {
    std::fs::write(file.with_extension("new"), document.to_string()).unwrap();
    std::fs::rename(file.with_extension("new"), file).unwrap();
}

async fn post_socket(path: &Path, uri: &str, body: &Value) -> (u16, Value) {
    let (stream, body) = (tokio::net::UnixStream::connect(path).await.unwrap(), body.to_string());
    let head = format!(
        "POST {uri} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let (status, answer) = exchange(stream, &format!("{head}{body}")).await;
    (status, serde_json::from_str(&answer).unwrap())
}

#[tokio::test]
async fn a_removed_tenant_is_deleted_once_its_instances_are_gone_and_none_of_its_sessions_is_in_use() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    let (secrets, store) = (cluster.dir.path().join("secrets"), cluster.dir.path().join("sessions"));
    std::fs::create_dir(&secrets).unwrap();
    for name in ["acme", "acme.snapshot-key", "pool.acme.workers", "other", "s3.acme"] {
        std::fs::write(secrets.join(name), b"secret").unwrap();
    }
    put_session(&store, "acme", 0, 3, None);
    put_session(&store, "acme", 1, 5, Some("i-00000007"));
    put_session(&store, "other", 0, 1, None);
    let mut document: Value = serde_json::from_str(&desired_json(NODE, 2)).unwrap();
    document["prune_unknown_tenants"] = json!(true);
    declare(&file, &document);
    let mut settings = cluster.settings();
    settings.desired_file = Some(file.clone());
    settings.node_id = Some(NODE.parse().unwrap());
    (settings.secrets_dir, settings.sessions_dir) = (secrets.clone(), store.clone());
    let agent = Running::start(settings).await;
    agent.wait_for_running(2).await;

    document["tenants"] = json!([]);
    document["removed_tenants"] = json!([{ "tenant_id": "acme", "uid": "a1" }]);
    declare(&file, &document);
    let mut status = agent.node.status();
    let told = |part: &str| {
        let part = part.to_owned();
        move |status: &mvm_proto::status::NodeStatus| {
            status.removals.iter().any(|removal| removal.uid == "a1" && removal.waits_for.contains(&part))
        }
    };
    status.wait_for(told("acme/workers/1: it is in use by i-00000007 of node node-2")).await.unwrap();
    assert!(agent.node.instances(None).is_empty(), "instances go first");
    let condition = |status: &mvm_proto::status::NodeStatus| {
        let found = status.conditions.iter().find(|condition| condition.r#type == "TenantsRemoved");
        found.map(|condition| condition.status.clone()).unwrap_or_default()
    };
    assert_eq!(condition(&status.borrow()), "False");
    assert!(secrets.join("acme").exists(), "what another node may still need is deleted last");

    // The other node gives it back.
    put_session(&store, "acme", 1, 6, None);
    status.wait_for(|status| status.removals.iter().any(|removal| removal.done)).await.unwrap();
    assert_eq!(condition(&status.borrow()), "True");
    let names = |dir: &Path| {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(
        (names(&store), names(&secrets)),
        (vec!["other".to_owned()], vec!["other".into(), "s3.acme".into()])
    );

    // Nothing more is said of it once the document does not name it.
    document["removed_tenants"] = json!([]);
    declare(&file, &document);
    status.wait_for(|status| status.removals.is_empty()).await.unwrap();
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn sessions_are_listed_and_deleted_by_hand_unless_they_are_in_use() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    std::fs::write(&file, desired_json(NODE, 0)).unwrap();
    let store = cluster.dir.path().join("sessions");
    put_session(&store, "acme", 0, 3, None);
    put_session(&store, "acme", 1, 5, Some("i-00000007"));
    put_session(&store, "other", 0, 1, None);
    let mut settings = cluster.settings();
    settings.desired_file = Some(file);
    settings.node_id = Some(NODE.parse().unwrap());
    settings.sessions_dir = store;
    let agent = Running::start(settings).await;
    let list = async |query: &str| {
        let (status, body) = get_socket(&agent.socket, &format!("/v1/sessions{query}")).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["unreadable"]), (200, &json!([])), "{body}");
        let sessions = body["sessions"].as_array().unwrap().clone();
        sessions
            .iter()
            .map(|it| format!("{} {}", it["session"], it["state"]).replace('"', ""))
            .collect::<Vec<_>>()
    };
    let all = ["acme/workers/0 free", "acme/workers/1 in_use", "other/workers/0 free"];
    assert_eq!(list("").await, all);
    assert_eq!(list("?tenant=other&pool=workers").await, all[2..]);

    let delete = async |body: Value| post_socket(&agent.socket, "/v1/sessions/delete", &body).await;
    let (status, refused) = delete(json!({ "tenant": "acme", "pool": "workers", "session": 1 })).await;
    assert_eq!((status, &refused["deleted"]), (200, &json!([])));
    let reason = refused["kept"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("it is in use by i-00000007 of node node-2"), "{reason}");
    let (_, young) = delete(json!({ "tenant": "acme", "unused_seconds": 3600 })).await;
    assert_eq!((&young["deleted"], &young["kept"]), (&json!([]), &json!([])));
    let (_, deleted) = delete(json!({ "tenant": "acme", "pool": "workers", "session": 0 })).await;
    assert_eq!(deleted["deleted"][0]["session"], "acme/workers/0", "{deleted}");
    assert_eq!(list("").await, all[1..]);
    for bad in [json!({ "pool": "workers" }), json!({ "tenant": "acme", "session": 1 })] {
        let (status, problem) = delete(bad).await;
        assert!((400..500).contains(&status), "{problem}");
        assert_eq!(problem["code"], "bad_body", "{problem}");
    }
    let log = cluster.data_dir().join("tenants/acme/audit.log");
    wait_until(|| std::fs::read_to_string(&log).is_ok_and(|log| log.contains("delete-session"))).await;
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("acme/workers/0 in local") && log.contains("local"), "{log}");
    agent.stop().await.unwrap();
}
