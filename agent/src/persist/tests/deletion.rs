//! Sessions that are deleted: only those that are not in use, once, and whatever breaks in between.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mvm_proto::{Digest, InstanceId, Timestamp};
use proptest::prelude::*;

use super::folder::{Folder, looks, write};
use super::{Breaking, EVERY, at, fill, holder, session_store, take};
use crate::persist::PersistError;
use crate::persist::blob_store::{BlobStore, BlobStoreError};
use crate::persist::deletion::{Verdict, clear_tenant, delete, judge};
use crate::persist::head::{Found, Head, SessionState, VERSION};
use crate::persist::session_store::SessionStore;

async fn keys(blobs: &Breaking, below: &str) -> Vec<String> {
    blobs.list(below).await.unwrap().into_iter().map(|listed| listed.key).collect()
}

async fn found(blobs: &Breaking, slot: u32) -> Found {
    session_store(blobs).head(slot).await.unwrap().unwrap()
}

/// A session with content that was given back.
async fn given_back(blobs: &Breaking, bits: u32) -> Folder {
    let folder = Folder::new();
    fill(&folder);
    let mut session = take(blobs, bits).await;
    session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    session.release().await.unwrap();
    folder
}

#[tokio::test]
async fn a_deleted_session_has_no_content_and_the_next_instance_gets_an_empty_one() {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    given_back(&blobs, 1).await;
    delete(&session_store(&blobs), &found(&blobs, 0).await, &holder(9)).await.unwrap();
    assert!(keys(&blobs, "acme/workers/content").await.is_empty());
    let now = session_store(&blobs).time(&holder(9)).await.unwrap();
    assert_eq!(found(&blobs, 0).await.state(now), SessionState::Empty);
    let there = Folder::new();
    let mut session = take(&blobs, 2).await;
    session.bring_back(&there, there.root()).await.unwrap();
    assert_eq!((session.slot, session.taken_at(), looks(&there).len()), (0, None, 0));
}

#[tokio::test]
async fn a_holder_of_before_learns_that_its_session_was_deleted_and_writes_nothing() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    fill(&folder);
    let mut stale = take(&blobs, 1).await;
    stale.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    // It was away for long, and does not know.
    blobs.make_older(Duration::from_secs(120));
    delete(&session_store(&blobs), &found(&blobs, 0).await, &holder(9)).await.unwrap();
    write(&folder.path("new"), b"new");
    let copied = stale.copy_folder(&folder, folder.root(), EVERY, at(2)).await;
    assert!(matches!(copied, Err(PersistError::Taken(_))), "{copied:?}");
    assert!(found(&blobs, 0).await.head.index.is_none());
}

#[tokio::test]
async fn of_two_nodes_that_delete_one_session_one_does() {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    given_back(&blobs, 1).await;
    let seen = found(&blobs, 0).await;
    delete(&session_store(&blobs), &seen, &holder(8)).await.unwrap();
    let second = delete(&session_store(&blobs), &seen, &holder(9)).await;
    assert!(matches!(second, Err(PersistError::Taken(_))), "{second:?}");
}

#[tokio::test]
async fn whatever_write_is_the_last_a_deletion_is_finished_by_the_next_one() {
    let mut cut_off = BTreeSet::new();
    for writes in 0.. {
        let store = tempfile::tempdir().unwrap();
        let blobs = Breaking::at(store.path());
        given_back(&blobs, 1).await;
        blobs.writes_left.store(writes, Ordering::SeqCst);
        let first = delete(&session_store(&blobs), &found(&blobs, 0).await, &holder(8)).await;
        cut_off.insert(first.is_err());
        blobs.writes_left.store(i64::MAX, Ordering::SeqCst);
        if first.is_ok() {
            break;
        }
        // Until its lease has expired it is another's; then the next one goes on.
        blobs.make_older(Duration::from_secs(120));
        let seen = found(&blobs, 0).await;
        let deleted = delete(&session_store(&blobs), &seen, &holder(9)).await;
        deleted.unwrap_or_else(|error| panic!("after {writes} writes: {error}"));
        assert!(keys(&blobs, "acme/workers/content").await.is_empty(), "after {writes} writes");
    }
    assert_eq!(cut_off, BTreeSet::from([true, false]));
}

#[tokio::test]
async fn a_link_in_a_store_leads_to_nothing_that_is_listed_read_written_or_deleted() {
    let (store, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let hosts = elsewhere.path().join("file");
    std::fs::write(&hosts, "the host's").unwrap();
    std::fs::create_dir(elsewhere.path().join("empty")).unwrap();
    let blobs = Breaking::at(store.path());
    given_back(&blobs, 1).await;
    let link = store.path().join("acme/workers/content/0/link");
    std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
    let left = clear_tenant(&blobs, &"acme".parse().unwrap(), &holder(9)).await.unwrap();
    assert!(left.is_empty() && keys(&blobs, "acme").await.is_empty(), "{left:?}");
    assert_eq!(blobs.inner.foreign("acme").unwrap(), [link]);
    blobs.inner.remove_empty_folders("acme");

    std::os::unix::fs::symlink(elsewhere.path(), store.path().join("zeta")).unwrap();
    assert!(keys(&blobs, "zeta").await.is_empty() && keys(&blobs, "").await.is_empty());
    assert_eq!(blobs.inner.foreign("zeta").unwrap(), [store.path().join("zeta")]);
    blobs.inner.remove_empty_folders("zeta");
    let refused = [
        blobs.delete("zeta/file").await.unwrap_err(),
        blobs.get("zeta/file", 100).await.unwrap_err(),
        blobs.put("zeta/file", "x".into()).await.unwrap_err(),
        blobs.put_new("zeta/new", "x".into()).await.unwrap_err(),
    ];
    assert!(refused.iter().all(|error| matches!(error, BlobStoreError::Link { .. })), "{refused:?}");
    let mut there: Vec<_> =
        std::fs::read_dir(elsewhere.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    there.sort();
    assert_eq!(
        (there, std::fs::read_to_string(&hosts).unwrap().as_str()),
        (vec!["empty".into(), "file".into()], "the host's")
    );
}

#[tokio::test]
async fn a_tenant_is_cleared_once_none_of_its_sessions_is_in_use_and_no_other_tenant_is_touched() {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    let tenant = "acme".parse().unwrap();
    given_back(&blobs, 1).await;
    let held = {
        let _first = take(&blobs, 7).await;
        take(&blobs, 2).await
    };
    let others = SessionStore::new(blobs.clone(), &"acme-2".parse().unwrap(), &"workers".parse().unwrap());
    let me = holder(3);
    crate::persist::session::Session::take(others, &me, crate::persist::head::FolderContent::Nothing, EVERY)
        .await
        .unwrap();
    let left = clear_tenant(&blobs, &tenant, &holder(9)).await.unwrap();
    assert_eq!(left.len(), 2, "{left:?}");
    let session = format!("acme/workers/{}: it is in use by i-00000002 of node node-a", held.slot);
    assert!(left.iter().any(|reason| reason.starts_with(&session)), "{left:?}");
    held.release().await.unwrap();
    // The other one was never given back.
    blobs.make_older(Duration::from_secs(120));
    for _ in 0..2 {
        assert!(clear_tenant(&blobs, &tenant, &holder(9)).await.unwrap().is_empty());
    }
    assert!(keys(&blobs, "acme").await.is_empty());
    assert_eq!(keys(&blobs, "acme-2").await.len(), 1);
    blobs.inner.remove_empty_folders("acme");
    let folders: Vec<_> =
        std::fs::read_dir(store.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(folders, ["acme-2"]);
}

#[tokio::test]
async fn whatever_write_is_the_last_clearing_a_tenant_is_finished_by_the_next_try() {
    for writes in 0.. {
        let store = tempfile::tempdir().unwrap();
        let blobs = Breaking::at(store.path());
        let tenant = "acme".parse().unwrap();
        given_back(&blobs, 1).await;
        blobs.writes_left.store(writes, Ordering::SeqCst);
        let first = clear_tenant(&blobs, &tenant, &holder(8)).await;
        blobs.writes_left.store(i64::MAX, Ordering::SeqCst);
        if first.is_ok_and(|left| left.is_empty()) {
            assert!(writes > 5, "it was never cut off");
            break;
        }
        blobs.make_older(Duration::from_secs(120));
        let left = clear_tenant(&blobs, &tenant, &holder(9)).await.unwrap();
        assert!(left.is_empty(), "after {writes} writes: {left:?}");
        assert!(keys(&blobs, "acme").await.is_empty(), "after {writes} writes");
    }
}

fn a_found() -> impl Strategy<Value = Found> {
    (any::<bool>(), any::<bool>(), 1..600_u64, 0..10_000_i64).prop_map(
        |(held, full, every_seconds, written)| {
            let head = Head {
                version: VERSION,
                number: 1,
                holder: held.then(|| holder(1)),
                index: full.then(|| Digest::of(b"index")),
                taken_at: full.then(|| at(0)),
                every_seconds,
            };
            Found { slot: 0, head, written_at: at(written) }
        },
    )
}

proptest! {
    /// What is deleted has a lease that anyone may take, is as old as asked for, and is no instance's of this node.
    #[test]
    fn only_what_is_free_and_old_enough_is_deleted(
        found in a_found(),
        bound in any::<bool>(),
        unused in 0..5_000_u64,
        now in 0..20_000_i64,
    ) {
        let (now, unused_for): (Timestamp, _) = (at(now), Duration::from_secs(unused));
        let id = InstanceId::from_bits(7);
        let verdict = judge(&found, bound.then_some(&id), unused_for, now);
        let lease = Duration::from_secs(found.head.every_seconds * 3 + 30);
        let age = now.since(found.written_at);
        let free = found.head.holder.is_none() || age > lease;
        let something = found.head.holder.is_some() || found.head.index.is_some();
        prop_assert_eq!(verdict == Verdict::Delete, free && something && age >= unused_for && !bound);
        if let Verdict::InUse(reason) = verdict {
            prop_assert!(age >= unused_for && (bound || !free), "{}", reason);
        }
    }
}
