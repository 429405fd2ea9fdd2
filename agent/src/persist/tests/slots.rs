//! Sessions of several tenants, some of whose guests make their copies take for ever.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use mvm_proto::guest::{Chunk, Directory, Entry, Failure, guest_frame, host_frame};
use mvm_proto::status::InstanceStatus;
use mvm_proto::{Digest, InstanceId, Timestamp};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::super::{SessionLimits, SessionSettings, Sessions};
use super::{EVERY, FolderContent, Holder, ObjectBlobStore, Session, SessionStore};
use crate::clock::Clock;
use crate::events::Events;
use crate::guest::fake_guest::{Answers, links_to};
use crate::instance::record::Record;
use crate::instance::records::Records;
use crate::upkeep::session_copy_task::session_copy_task;

/// One copy may take this long.
const COPY_WITHIN: Duration = Duration::from_secs(600);

/// A running instance that has a session of its own.
async fn record(dir: &Path, tenant: &str, bits: u32) -> Record {
    let record: Record = serde_json::from_value(json!({
        "tenant": tenant, "pool": "web", "id": InstanceId::from_bits(bits), "offset": 2, "address": "10.1.0.2",
        "phase": "running", "since": Timestamp::from_unix_ms(0), "reason": "test", "revision": Digest::of(b"it"),
        "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 }, "flake_ref": "builtin:busybox",
        "claimed": false, "on_demand": false, "failures": 0,
        "persist": { "path": "/session", "store": "local", "every_seconds": EVERY },
    }))
    .unwrap();
    let session_store =
        SessionStore::new(ObjectBlobStore::open("local", dir, dir).unwrap(), &record.tenant, &record.pool);
    let me = Holder { node: "node-a".parse().unwrap(), instance: record.id.clone() };
    let slot = Session::take(session_store, &me, FolderContent::Content, EVERY).await.unwrap().slot;
    Record { session: Some(super::super::SessionMark::Bound { slot }), ..record }
}

/// A guest with one file in its session. A slow one sends it byte by byte, each just before it would count as silent.
fn one_file(slow: bool, body: host_frame::Body) -> Answers {
    let answer = match body {
        host_frame::Body::ListDirectory(list) => {
            let (name, mode, size) = match list.path.as_str() {
                "/" => ("session", 0o040_700, 0),
                _ => ("file", 0o100_600, 1 << 20),
            };
            let entry = Entry { name: name.to_owned(), mode, size, ..Entry::default() };
            guest_frame::Body::Directory(Directory { entries: vec![entry], last: true })
        }
        host_frame::Body::ReadFile(read) => {
            let length = if slow { 1 } else { read.limit.min(32 << 10) };
            let data = vec![7; usize::try_from(length).unwrap()];
            guest_frame::Body::Chunk(Chunk { data, last: true })
        }
        _ => guest_frame::Body::Failure(Failure::default()),
    };
    let answer = async move {
        if slow {
            tokio::time::sleep(Duration::from_secs(9)).await;
        }
        answer
    };
    futures::stream::once(answer).boxed()
}

fn shown(sessions: &Sessions, record: &Record) -> InstanceStatus {
    let mut status = InstanceStatus::default();
    sessions.show(record, &mut status);
    status
}

#[tokio::test(start_paused = true)]
async fn guests_that_make_copies_endless_stop_no_other_tenants_copies() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::empty();
    let mut slow = Vec::new();
    for bits in 1..=10 {
        slow.push(record(dir.path(), "greedy", bits).await);
    }
    let slow_ids: BTreeSet<InstanceId> = slow.iter().map(|record| record.id.clone()).collect();
    let links = links_to(move |instance, body| one_file(slow_ids.contains(instance), body));
    for record in &slow {
        records.set(record.clone());
        links.open(&record.id);
    }
    let settings = SessionSettings {
        node: "node-a".parse().unwrap(),
        sessions_dir: dir.path().to_owned(),
        secrets_dir: dir.path().to_owned(),
        limits: SessionLimits { copy_within: COPY_WITHIN, ..SessionLimits::default() },
    };
    let clock = Clock::starting_at(Timestamp::from_unix_ms(1_800_000_000_000));
    let sessions = Arc::new(Sessions::new(settings, links.clone(), clock.clone(), Events::new(clock)));
    let stop = CancellationToken::new();
    let task = tokio::spawn(session_copy_task(Arc::clone(&sessions), Arc::clone(&records), stop.clone()));
    // By then they have all of the slots that they can have.
    tokio::time::sleep(Duration::from_secs(120)).await;

    let other = record(dir.path(), "other", 100).await;
    links.open(&other.id);
    records.set(other.clone());
    let begun = Instant::now();
    while shown(&sessions, &other).persisted_at.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", shown(&sessions, &other));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Those that are endless are cut off, which is told, and make room for the next.
    tokio::time::sleep(3 * COPY_WITHIN).await;
    let cut = slow.iter().filter(|record| shown(&sessions, record).persist_error.contains("within 600s"));
    assert_eq!(cut.count(), slow.len());
    stop.cancel();
    task.await.unwrap();
}
