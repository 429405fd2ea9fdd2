//! What a store holds is there after it was closed and opened again.

use std::time::Duration;

use mvm_store::{Event, Guard, Settings, SledStore, Store, StoreError, Transaction};
use tempfile::TempDir;

async fn open(directory: &TempDir) -> SledStore {
    SledStore::open(directory.path(), Settings::default()).await.unwrap()
}

async fn reopen(store: SledStore, directory: &TempDir) -> SledStore {
    store.close().await;
    drop(store);
    open(directory).await
}

#[tokio::test]
async fn keys_versions_and_the_revision_survive() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    store.commit(Transaction::new().put("a", "1").put("big", vec![7; 300_000])).await.unwrap();
    store.commit(Transaction::new().put("b", "2").delete("a")).await.unwrap();
    let before = store.list("").await.unwrap();
    let store = reopen(store, &directory).await;
    assert_eq!(store.list("").await.unwrap(), before);
    let next = store.commit(Transaction::new().guard("a", Guard::Absent).put("a", "3")).await.unwrap();
    assert_eq!(next.revision, before.revision + 1);
}

#[tokio::test]
async fn a_watch_goes_on_from_before_the_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    let first = store.commit(Transaction::new().put("a", "1")).await.unwrap().revision;
    store.commit(Transaction::new().put("a", "2")).await.unwrap();
    store.commit(Transaction::new().delete("a")).await.unwrap();
    let store = reopen(store, &directory).await;
    let mut watch = store.watch("", first);
    assert!(matches!(watch.next().await.unwrap(), Event::Put(entry) if entry.value == "2"));
    assert_eq!(watch.next().await.unwrap(), Event::Delete { key: "a".into(), version: first + 2 });
}

#[tokio::test]
async fn a_watch_from_before_the_kept_changes_is_told_so() {
    let directory = tempfile::tempdir().unwrap();
    let settings = Settings { log_bytes: 4096, ..Settings::default() };
    let store = SledStore::open(directory.path(), settings.clone()).await.unwrap();
    let mut slow = store.watch("", 0);
    for n in 0..100 {
        store.commit(Transaction::new().put("key", format!("{n:0100}"))).await.unwrap();
    }
    let compacted = |error| matches!(error, StoreError::Compacted { oldest, .. } if oldest > 0);
    assert!(compacted(slow.next().await.unwrap_err()));
    assert!(matches!(slow.next().await, Err(StoreError::Closed)), "after an error a watch has ended");
    store.close().await;
    let store = SledStore::open(directory.path(), settings).await.unwrap();
    assert!(compacted(store.watch("", 1).next().await.unwrap_err()));
    let newest = store.list("").await.unwrap().revision;
    assert_eq!(store.watch("", newest - 1).next().await.unwrap().version(), newest);
}

#[tokio::test(start_paused = true)]
async fn a_lease_has_its_whole_time_again_and_then_ends() {
    const TTL: Duration = Duration::from_secs(10);
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    let lease = store.grant_lease(TTL).await.unwrap();
    let version = store.commit(Transaction::new().put_leased("leader", "me", lease)).await.unwrap().revision;
    tokio::time::sleep(TTL * 9 / 10).await;
    let store = reopen(store, &directory).await;
    let reopened_at = tokio::time::Instant::now();
    let gone = store.watch("leader", version).next().await.unwrap();
    assert_eq!(gone, Event::Delete { key: "leader".into(), version: version + 1 });
    assert!(reopened_at.elapsed() >= TTL, "{:?}", reopened_at.elapsed());
    assert!(matches!(store.keep_alive(lease).await, Err(StoreError::LeaseNotFound { .. })));
    assert_ne!(store.grant_lease(TTL).await.unwrap(), lease, "names are never given twice");
}

#[tokio::test]
async fn a_directory_can_be_opened_only_once() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    let second = SledStore::open(directory.path(), Settings::default()).await.unwrap_err();
    assert!(matches!(&second, StoreError::InUse { path } if path == directory.path()), "{second}");
    store.close().await;
    open(&directory).await;
}

#[tokio::test]
async fn a_closed_store_answers_so_and_ends_its_watches() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    let mut watch = store.watch("", 0);
    let waiting = tokio::spawn(async move { watch.next().await });
    let other = store.clone();
    store.close().await;
    store.close().await;
    assert!(matches!(other.get("a").await, Err(StoreError::Closed)));
    assert!(matches!(other.commit(Transaction::new().put("a", "1")).await, Err(StoreError::Closed)));
    assert!(matches!(waiting.await.unwrap(), Err(StoreError::Closed)));
}

#[tokio::test]
async fn large_values_stay_in_the_log_that_is_synced() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&directory).await;
    for n in 0..4 {
        store.commit(Transaction::new().put("big", vec![n; 3_000_000])).await.unwrap();
    }
    store.close().await;
    let outside = std::fs::read_dir(directory.path().join("blobs")).unwrap().count();
    assert_eq!(outside, 0, "sled moved pages into files that it does not sync");
}

#[tokio::test]
async fn a_state_of_an_unknown_format_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path()).unwrap();
    {
        let db = sled::Config::new().path(directory.path()).flush_every_ms(None).open().unwrap();
        // The head record of a format 9: checksum, length, protobuf field 1 = 9.
        let (name, payload) = (b"meta/state", [8, 9]);
        let sum = crc32fast::hash(&[&name[..], &payload[..]].concat());
        let record = [&sum.to_be_bytes()[..], &2_u32.to_be_bytes(), &payload].concat();
        db.insert([&name[..], &[0, 0, 0]].concat(), record).unwrap();
        db.flush().unwrap();
    }
    let refused = SledStore::open(directory.path(), Settings::default()).await.unwrap_err();
    assert!(matches!(refused, StoreError::UnknownFormat { found: 9, .. }), "{refused}");
}

#[tokio::test]
async fn a_full_disk_is_refused_before_it_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let settings = Settings { reserve_bytes: u64::MAX / 8, ..Settings::default() };
    let store = SledStore::open(directory.path(), settings).await.unwrap();
    let refused = store.commit(Transaction::new().put("a", "1")).await.unwrap_err();
    assert!(matches!(refused, StoreError::NoSpace { .. }), "{refused}");
    store.commit(Transaction::new().delete("a")).await.unwrap();
    assert!(store.list("").await.unwrap().entries.is_empty());
}

#[tokio::test]
async fn what_is_written_where_nothing_is_watched_takes_no_watcher_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let settings = Settings { log_bytes: 4096, watched: vec!["seen/".to_owned()], ..Settings::default() };
    let store = SledStore::open(directory.path(), settings.clone()).await.unwrap();
    let first = store.commit(Transaction::new().put("seen/a", "1")).await.unwrap().revision;
    let mut slow = store.watch("seen/", first);
    for n in 0..100 {
        store.commit(Transaction::new().put("unseen/key", format!("{n:0100}"))).await.unwrap();
    }
    let both = Transaction::new().put("seen/a", "2").put("unseen/key", "last");
    let second = store.commit(both).await.unwrap().revision;
    assert_eq!(second, first + 101, "each transaction has its revision");
    let expected = |event: Event| {
        assert!(matches!(event, Event::Put(entry) if entry.key == "seen/a" && entry.version == second));
    };
    expected(slow.next().await.unwrap());
    assert!(matches!(store.watch("unseen/", 0).next().await, Err(StoreError::InvalidKey { .. })));
    store.close().await;
    let store = SledStore::open(directory.path(), settings).await.unwrap();
    expected(store.watch("seen/", first).next().await.unwrap());
    assert_eq!(store.list("").await.unwrap().revision, second);
}
