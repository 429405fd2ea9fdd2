//! The session of an instance that sleeps, and is moved before the node that it was on could reach its store.

use std::path::Path;
use std::sync::Arc;

use mvm_proto::{Digest, InstanceId, NodeId, Timestamp};
use mvm_vmm::FakeDriver;
use serde_json::json;

use super::super::session_store::SessionStore;
use super::super::{ObjectBlobStore, SessionLimits, SessionSettings, Sessions};
use super::{EVERY, FolderContent, Holder, Session};
use crate::clock::Clock;
use crate::events::Events;
use crate::guest::GuestLinks;
use crate::instance::record::Record;
use crate::instance::records::Records;

fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn sleeper() -> Record {
    serde_json::from_value(json!({
        "tenant": "acme", "pool": "web", "id": InstanceId::from_bits(7), "offset": 2, "address": "10.1.0.2",
        "phase": "sleeping", "since": Timestamp::from_unix_ms(0), "reason": "test", "revision": Digest::of(b"it"),
        "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 }, "flake_ref": "builtin:busybox",
        "claimed": false, "on_demand": false, "failures": 0, "session": { "bound": { "slot": 0 } },
        "persist": { "path": "/session", "store": "local", "every_seconds": EVERY },
    }))
    .unwrap()
}

/// What a node with its sessions there says of the instance, once it has copied to its session.
async fn copied(name: &str, sessions_dir: &Path, record: &Record) -> Record {
    let (driver, clock) = (Arc::new(FakeDriver::in_memory()), Clock::system());
    let settings = SessionSettings {
        node: node(name),
        sessions_dir: sessions_dir.to_owned(),
        secrets_dir: sessions_dir.to_owned(),
        limits: SessionLimits::default(),
    };
    let links = GuestLinks::new(driver, clock.clone());
    let sessions = Sessions::new(settings, links, clock.clone(), Events::new(clock));
    let records = Records::empty();
    records.set(record.clone());
    sessions.copy_or_renew(record, &records).await;
    records.get(&record.id).unwrap()
}

#[tokio::test]
async fn a_sleeper_that_is_moved_on_before_its_store_could_be_reached_keeps_its_session() {
    let store = tempfile::tempdir().unwrap();
    let nowhere = store.path().join("nowhere");
    std::fs::write(&nowhere, "no folder").unwrap();
    let (record, now) = (sleeper(), Timestamp::from_unix_ms(0));
    let session_store = || {
        let blobs = ObjectBlobStore::open("local", store.path(), store.path()).unwrap();
        SessionStore::new(blobs, &record.tenant, &record.pool)
    };
    let first = Holder { node: node("node-a"), instance: record.id.clone() };
    Session::take(session_store(), &first, FolderContent::Nothing, EVERY).await.unwrap();

    let second = copied("node-b", &nowhere, &record.clone().arriving(node("node-a"), None, now)).await;
    assert_eq!(second.came_from, Some(node("node-a")), "the store was not reached");
    // Back and forth is no other way.
    let again = second.arriving(node("node-b"), None, now).arriving(node("node-a"), None, now);
    let arriving = again.arriving(node("node-b"), None, now);
    assert_eq!(arriving.came_through, [node("node-a")]);
    let third = copied("node-c", store.path(), &arriving).await;
    let head = session_store().head(0).await.unwrap().unwrap().head;
    assert_eq!(head.holder.unwrap().node, node("node-c"));
    assert_eq!((third.session, third.came_from), (record.session, None));
    assert!(third.came_through.is_empty(), "it is called by its own name from here on");
}
