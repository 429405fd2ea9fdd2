//! Sessions between folders and stores, with both breaking at every possible moment.

mod deletion;
mod folder;
mod hostile;
mod lease;
mod moved;
mod slots;
mod stores;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use mvm_proto::{InstanceId, Timestamp};

use super::PersistError;
use super::blob_store::{BlobStore, BlobStoreError, Listed, ObjectBlobStore};
use super::head::{FolderContent, Holder};
use super::index::CHUNK_BYTES;
use super::session::Session;
use super::session_store::SessionStore;
use folder::{Folder, looks, write};

const EVERY: u64 = 10;

/// Long before now: what these tests write counts as changed just now, so every byte is compared.
fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_ms(1_700_000_000_000 + seconds * 1000)
}

/// So late that a file which was written just now is known by its times.
fn settled() -> Timestamp {
    Timestamp::from(std::time::SystemTime::now() + Duration::from_secs(60))
}

fn holder(bits: u32) -> Holder {
    Holder { node: "node-a".parse().unwrap(), instance: InstanceId::from_bits(bits) }
}

/// A blob store that counts what is written and ends for good after so many writes.
#[derive(Debug, Clone)]
struct Breaking {
    inner: ObjectBlobStore,
    path: PathBuf,
    writes_left: Arc<AtomicI64>,
    sent_bytes: Arc<AtomicU64>,
}

impl Breaking {
    fn at(path: &Path) -> Self {
        Self {
            inner: ObjectBlobStore::open("local", path, path).unwrap(),
            path: path.to_owned(),
            writes_left: Arc::new(AtomicI64::new(i64::MAX)),
            sent_bytes: Arc::default(),
        }
    }

    /// As if this much had passed in the store since each of its objects was written.
    fn make_older(&self, age: Duration) {
        let mut folders = vec![self.path.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                let metadata = entry.metadata().unwrap();
                if metadata.is_dir() {
                    folders.push(entry.path());
                    continue;
                }
                let then = metadata.modified().unwrap() - age;
                std::fs::File::open(entry.path()).unwrap().set_modified(then).unwrap();
            }
        }
    }

    /// As a process that ends here would: nothing is written any more.
    fn pass(&self, bytes: usize) -> Result<(), BlobStoreError> {
        if self.writes_left.fetch_sub(1, Ordering::SeqCst) <= 0 {
            return Err(BlobStoreError::Broken);
        }
        self.sent_bytes.fetch_add(bytes as u64, Ordering::SeqCst);
        Ok(())
    }
}

impl BlobStore for Breaking {
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BlobStoreError> {
        self.pass(bytes.len())?;
        self.inner.put(key, bytes).await
    }

    async fn put_new(&self, key: &str, bytes: Bytes) -> Result<bool, BlobStoreError> {
        self.pass(0)?;
        self.inner.put_new(key, bytes).await
    }

    async fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>, BlobStoreError> {
        self.inner.get(key, limit).await
    }

    async fn list(&self, below: &str) -> Result<Vec<Listed>, BlobStoreError> {
        self.inner.list(below).await
    }

    async fn delete(&self, key: &str) -> Result<(), BlobStoreError> {
        self.pass(0)?;
        self.inner.delete(key).await
    }
}

fn session_store(blobs: &Breaking) -> SessionStore<Breaking> {
    SessionStore::new(blobs.clone(), &"acme".parse().unwrap(), &"workers".parse().unwrap())
}

async fn take(blobs: &Breaking, bits: u32) -> Session<Breaking> {
    Session::take(session_store(blobs), &holder(bits), FolderContent::Nothing, EVERY).await.unwrap()
}

/// A session of every kind of thing.
fn fill(folder: &Folder) {
    write(&folder.path("empty"), b"");
    write(&folder.path("deep/down/notes.md"), b"remember this");
    write(&folder.path("big"), &vec![7; usize::try_from(CHUNK_BYTES).unwrap() * 2 + 5]);
    std::fs::create_dir_all(folder.path("nothing in here")).unwrap();
    std::os::unix::fs::symlink("deep/down", folder.path("link")).unwrap();
    folder.chmod("deep/down/notes.md", 0o640);
    folder.chmod("deep", 0o700);
}

/// What a new instance of the pool gets once every other is gone for good.
async fn brought_back(blobs: &Breaking) -> BTreeMap<String, String> {
    let folder = Folder::new();
    blobs.make_older(Duration::from_secs(3600));
    let mut session = take(blobs, 0xffff).await;
    assert_eq!(session.slot, 0);
    session.bring_back(&folder, folder.root()).await.unwrap();
    looks(&folder)
}

#[tokio::test]
async fn a_session_comes_back_elsewhere_as_it_was() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    fill(&folder);
    let blobs = Breaking::at(store.path());
    let mut session = take(&blobs, 1).await;
    session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    assert_eq!(session.taken_at(), Some(at(1)));
    session.release().await.unwrap();
    assert_eq!(brought_back(&blobs).await, looks(&folder));
}

#[tokio::test]
async fn a_missing_folder_is_an_empty_session() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    let mut session = take(&blobs, 1).await;
    session.copy_folder(&folder, &folder.text("never/made"), EVERY, at(1)).await.unwrap();
    assert!(brought_back(&blobs).await.is_empty());
}

#[tokio::test]
async fn only_changed_content_is_sent_and_unreferenced_content_is_removed() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    fill(&folder);
    let blobs = Breaking::at(store.path());
    let mut session = take(&blobs, 1).await;
    let first = session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    // Two chunks of the big file are the same.
    assert_eq!(first.sent_bytes, CHUNK_BYTES + 5 + 13);
    for now in [at(2), settled()] {
        let sent = blobs.sent_bytes.load(Ordering::SeqCst);
        let again = session.copy_folder(&folder, folder.root(), EVERY, now).await.unwrap();
        assert_eq!((again.sent_bytes, blobs.sent_bytes.load(Ordering::SeqCst)), (0, sent));
    }
    // Its length and all other chunks stay.
    let mut big = std::fs::read(folder.path("big")).unwrap();
    big[0] = 8;
    write(&folder.path("big"), &big);
    let changed = session.copy_folder(&folder, folder.root(), EVERY, settled()).await.unwrap();
    assert_eq!(changed.sent_bytes, CHUNK_BYTES);
    std::fs::remove_file(folder.path("big")).unwrap();
    session.copy_folder(&folder, folder.root(), EVERY, settled()).await.unwrap();
    let left = blobs.list("acme").await.unwrap();
    let kinds = |kind: &str| left.iter().filter(|listed| listed.key.contains(kind)).count();
    // One head; an index and the notes.
    assert_eq!((kinds("/heads/"), kinds("/content/")), (1, 2), "{left:?}");
    assert_eq!(brought_back(&blobs).await, looks(&folder));
}

#[tokio::test]
async fn whatever_write_is_the_last_the_session_is_the_old_or_the_new_one() {
    let mut outcomes = BTreeSet::new();
    for writes in 0.. {
        let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
        fill(&folder);
        let blobs = Breaking::at(store.path());
        let mut session = take(&blobs, 1).await;
        session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
        let old = looks(&folder);
        write(&folder.path("deep/down/notes.md"), b"forget that");
        write(&folder.path("deep/new"), b"new");
        std::fs::remove_file(folder.path("empty")).unwrap();
        let new = looks(&folder);

        blobs.writes_left.store(writes, Ordering::SeqCst);
        let kept = session.copy_folder(&folder, folder.root(), EVERY, at(2)).await;
        let unbroken = blobs.writes_left.load(Ordering::SeqCst) >= 0;
        blobs.writes_left.store(i64::MAX, Ordering::SeqCst);
        drop(session);
        let found = brought_back(&blobs).await;
        assert!(found == old || found == new, "after {writes} writes: {found:#?}");
        // What was said to be kept is.
        assert!(kept.is_err() || found == new, "after {writes} writes");
        outcomes.insert((kept.is_ok(), found == new));
        if unbroken {
            break;
        }
    }
    // Broken before the head; after it, while tidying up; and not at all.
    assert_eq!(outcomes, BTreeSet::from([(false, false), (false, true), (true, true)]));
}

#[tokio::test]
async fn a_file_that_is_written_all_the_time_is_never_kept_half() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    write(&folder.path("log"), b"first");
    write(&folder.path("calm"), b"calm");
    let blobs = Breaking::at(store.path());
    let mut session = take(&blobs, 1).await;
    session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    let old = looks(&folder);
    // From now on it is another one after each piece that is read of it.
    folder.change_while_read("log");
    let kept = session.copy_folder(&folder, folder.root(), EVERY, at(2)).await.unwrap();
    assert_eq!(kept.unsettled, ["log"]);
    assert_eq!(brought_back(&blobs).await, old);
}

#[test]
fn names_of_a_guest_s_files_are_escaped_and_cut_in_an_event() {
    let names = ["a\x1b[2J\r\n\u{202e}b".to_owned(), "n".repeat(4096)];
    let message = super::unsettled_message(7, &names);
    let start = r"7 file(s) kept changing and were not copied; the store keeps their previous version: a\x1b[2J\r\n\u{202e}b, nnn";
    assert!(message.starts_with(start), "{message}");
    assert!(message.len() < 600 && message.chars().all(mvm_proto::text::is_printable), "{message}");
}

#[tokio::test]
async fn a_holder_that_was_away_finds_its_session_taken_and_touches_nothing() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    write(&folder.path("mine"), b"one");
    let blobs = Breaking::at(store.path());
    let mut away = take(&blobs, 1).await;
    away.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();

    blobs.make_older(Duration::from_secs(120));
    let mut other = take(&blobs, 2).await;
    assert_eq!(other.slot, away.slot);
    let theirs = Folder::new();
    other.bring_back(&theirs, theirs.root()).await.unwrap();
    write(&theirs.path("theirs"), b"two");
    // Twice, so that the number that the first would write next is free again.
    other.copy_folder(&theirs, theirs.root(), EVERY, at(2)).await.unwrap();
    other.copy_folder(&theirs, theirs.root(), EVERY, at(2)).await.unwrap();

    write(&folder.path("mine"), b"three");
    let kept = away.copy_folder(&folder, folder.root(), EVERY, at(3)).await;
    assert!(matches!(kept, Err(PersistError::Taken(_))), "{kept:?}");
    let resumed = Session::resume(session_store(&blobs), 0, &holder(1), &[], EVERY).await.unwrap();
    assert!(resumed.is_none());
    assert_eq!(brought_back(&blobs).await, looks(&theirs));
}

#[tokio::test]
async fn two_that_start_at_once_get_two_sessions_and_content_is_never_mixed() {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    let starts = (1..=6).map(|bits| {
        let blobs = blobs.clone();
        tokio::spawn(async move { take(&blobs, bits).await.slot })
    });
    let slots: BTreeSet<u32> =
        futures::future::join_all(starts).await.into_iter().map(|slot| slot.unwrap()).collect();
    assert_eq!(slots, (0..6).collect());
    // One that has content never takes another's, free or not.
    let free = Session::resume(session_store(&blobs), 3, &holder(99), &[], EVERY).await.unwrap();
    assert!(free.is_none());
    let me = holder(7);
    let mine = Session::take(session_store(&blobs), &me, FolderContent::Content, EVERY).await.unwrap();
    assert_eq!(mine.slot, 6);
}

#[tokio::test]
async fn a_session_goes_on_where_its_instance_was_moved_to_and_only_there() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    write(&folder.path("mine"), b"one");
    let mut there = take(&blobs, 1).await;
    there.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    let before = holder(1);
    let here = Holder { node: "node-b".parse().unwrap(), ..holder(1) };
    let stranger = Holder { node: "node-c".parse().unwrap(), ..holder(2) };
    // Another instance's, or from nowhere: not its own.
    let others = Session::resume(session_store(&blobs), 0, &stranger, &[], EVERY).await.unwrap();
    assert!(others.is_none());
    let moved = Session::resume(session_store(&blobs), 0, &here, std::slice::from_ref(&before), EVERY)
        .await
        .unwrap()
        .unwrap();
    assert_eq!((moved.slot, moved.taken_at()), (0, Some(at(1))));
    // From here on it is held in its new name, and the node that it left has lost it.
    let kept = there.copy_folder(&folder, folder.root(), EVERY, at(2)).await;
    assert!(matches!(kept, Err(PersistError::Taken(_))), "{kept:?}");
    let back = Session::resume(session_store(&blobs), 0, &before, &[], EVERY).await.unwrap();
    assert!(back.is_none());
    assert!(Session::resume(session_store(&blobs), 0, &here, &[], EVERY).await.unwrap().is_some());
}

#[tokio::test]
async fn another_tenants_pool_is_another_place() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    write(&folder.path("secret"), b"one");
    let blobs = Breaking::at(store.path());
    let mut session = take(&blobs, 1).await;
    session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    session.release().await.unwrap();
    for (tenant, pool) in [("acme2", "workers"), ("acme", "workers2"), ("acm", "workers"), ("acme", "worker")]
    {
        let session_store =
            SessionStore::new(blobs.clone(), &tenant.parse().unwrap(), &pool.parse().unwrap());
        assert!(session_store.heads().await.unwrap().is_empty(), "{tenant}/{pool}");
    }
}
