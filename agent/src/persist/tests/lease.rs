//! Holders that are slow, stand still, or whose clocks are wrong.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_proto::guest::{Entry, SetEntry};
use tokio::sync::Semaphore;

use super::folder::{Folder, looks, write};
use super::{Breaking, EVERY, at, brought_back, holder, session_store, take};
use crate::guest::LinkError;
use crate::persist::PersistError;
use crate::persist::blob_store::{BlobStore, BlobStoreError, Listed};
use crate::persist::guest_files::GuestFiles;
use crate::persist::head::FolderContent;
use crate::persist::session::Session;
use crate::persist::session_store::SessionStore;

/// Every read and every write takes this long.
#[derive(Debug)]
struct Slow<'a> {
    folder: &'a Folder,
    takes: Duration,
}

impl GuestFiles for Slow<'_> {
    async fn list(&self, folder: &str) -> Result<Vec<Entry>, LinkError> {
        self.folder.list(folder).await
    }

    async fn read(&self, path: &str, offset: u64, limit: u64) -> Result<Vec<u8>, LinkError> {
        tokio::time::sleep(self.takes).await;
        self.folder.read(path, offset, limit).await
    }

    async fn write(&self, path: &str, offset: u64, data: &[u8], last: bool) -> Result<(), LinkError> {
        tokio::time::sleep(self.takes).await;
        self.folder.write(path, offset, data, last).await
    }

    async fn set_entry(&self, entry: SetEntry) -> Result<(), LinkError> {
        self.folder.set_entry(entry).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_is_renewed_while_it_is_copied_and_while_it_is_brought_back() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    for name in 0..10 {
        write(&folder.path(&name.to_string()), &[name]);
    }
    let takes = Duration::from_secs(EVERY);
    let mut session = take(&blobs, 1).await;
    let number = || async { session_store(&blobs).head(0).await.unwrap().unwrap().head.number };
    let before = number().await;
    session.copy_folder(&Slow { folder: &folder, takes }, folder.root(), EVERY, at(1)).await.unwrap();
    let copied = number().await;
    assert!(copied >= before + 10, "{before} to {copied}");
    let there = Folder::new();
    session.bring_back(&Slow { folder: &there, takes }, there.root()).await.unwrap();
    assert!(number().await >= copied + 9, "{copied} to {}", number().await);
    // And what comes after it has the right number.
    session.copy_folder(&folder, folder.root(), EVERY, at(2)).await.unwrap();
    assert_eq!(looks(&there), looks(&folder));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_was_taken_meanwhile_is_left_alone_before_the_copy_is_over() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    write(&folder.path("one"), b"one");
    let mut session = take(&blobs, 1).await;
    // It was away for long, and does not know.
    blobs.make_older(Duration::from_secs(120));
    take(&blobs, 2).await;
    let slow = Slow { folder: &folder, takes: Duration::from_secs(EVERY * 100) };
    let begun = tokio::time::Instant::now();
    let kept = session.copy_folder(&slow, folder.root(), EVERY, at(1)).await;
    assert!(matches!(kept, Err(PersistError::Taken(_))), "{kept:?}");
    assert!(begun.elapsed() <= Duration::from_secs(EVERY), "{:?}", begun.elapsed());
}

/// Waits, before it lists content, until it is let go on.
#[derive(Debug, Clone)]
struct Gated {
    inner: Breaking,
    gate: Arc<Semaphore>,
    waits: Arc<Semaphore>,
}

impl BlobStore for Gated {
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BlobStoreError> {
        self.inner.put(key, bytes).await
    }

    async fn put_new(&self, key: &str, bytes: Bytes) -> Result<bool, BlobStoreError> {
        self.inner.put_new(key, bytes).await
    }

    async fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>, BlobStoreError> {
        self.inner.get(key, limit).await
    }

    async fn list(&self, below: &str) -> Result<Vec<Listed>, BlobStoreError> {
        if below.contains("/content/") {
            self.waits.add_permits(1);
            self.gate.acquire().await.unwrap().forget();
        }
        self.inner.list(below).await
    }

    async fn delete(&self, key: &str) -> Result<(), BlobStoreError> {
        self.inner.delete(key).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_stood_still_removes_nothing_of_the_next_ones() {
    let (store, folder) = (tempfile::tempdir().unwrap(), Folder::new());
    let blobs = Breaking::at(store.path());
    let gated =
        Gated { inner: blobs.clone(), gate: Arc::new(Semaphore::new(1)), waits: Arc::new(Semaphore::new(0)) };
    write(&folder.path("mine"), b"one");
    let its = SessionStore::new(gated.clone(), &"acme".parse().unwrap(), &"workers".parse().unwrap());
    let mut stalled = Session::take(its, &holder(1), FolderContent::Nothing, EVERY).await.unwrap();
    let root = folder.root().to_owned();
    // Its first look for leftovers passes; after its head is written, the process stands still.
    let keep = async move { stalled.copy_folder(&folder, &root, EVERY, at(1)).await };
    let keep = tokio::spawn(keep);
    gated.waits.acquire_many(2).await.unwrap().forget();

    tokio::time::advance(Duration::from_secs(120)).await;
    blobs.make_older(Duration::from_secs(120));
    let mut other = take(&blobs, 2).await;
    assert_eq!(other.slot, 0);
    let theirs = Folder::new();
    other.bring_back(&theirs, theirs.root()).await.unwrap();
    write(&theirs.path("theirs"), b"two");
    other.copy_folder(&theirs, theirs.root(), EVERY, at(2)).await.unwrap();
    let wanted = looks(&theirs);

    gated.gate.add_permits(8);
    let kept = keep.await.unwrap();
    assert!(matches!(kept, Err(PersistError::Taken(_))), "{kept:?}");
    drop(other);
    assert_eq!(brought_back(&blobs).await, wanted);
}

/// A store whose clock is behind every node's.
#[derive(Debug, Clone)]
struct Behind {
    inner: Breaking,
    seconds: i64,
}

impl BlobStore for Behind {
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BlobStoreError> {
        self.inner.put(key, bytes).await
    }

    async fn put_new(&self, key: &str, bytes: Bytes) -> Result<bool, BlobStoreError> {
        self.inner.put_new(key, bytes).await
    }

    async fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>, BlobStoreError> {
        self.inner.get(key, limit).await
    }

    async fn list(&self, below: &str) -> Result<Vec<Listed>, BlobStoreError> {
        let mut all = self.inner.list(below).await?;
        for listed in &mut all {
            let ms = listed.written_at.unix_ms() - self.seconds * 1000;
            listed.written_at = mvm_proto::Timestamp::from_unix_ms(ms);
        }
        Ok(all)
    }

    async fn delete(&self, key: &str) -> Result<(), BlobStoreError> {
        self.inner.delete(key).await
    }
}

#[tokio::test]
async fn a_store_whose_clock_is_wrong_gives_no_session_away() {
    for seconds in [-86_400, 86_400] {
        let store = tempfile::tempdir().unwrap();
        let blobs = Behind { inner: Breaking::at(store.path()), seconds };
        let session_store =
            || SessionStore::new(blobs.clone(), &"acme".parse().unwrap(), &"workers".parse().unwrap());
        let first = Session::take(session_store(), &holder(1), FolderContent::Nothing, EVERY).await.unwrap();
        let second = Session::take(session_store(), &holder(2), FolderContent::Nothing, EVERY).await.unwrap();
        assert_eq!((first.slot, second.slot), (0, 1), "{seconds} s");
        // Silence by the store's own clock is silence.
        blobs.inner.make_older(Duration::from_secs(3 * EVERY + 40));
        let third = Session::take(session_store(), &holder(3), FolderContent::Nothing, EVERY).await.unwrap();
        assert_eq!(third.slot, 0, "{seconds} s");
        assert_eq!(blobs.inner.list("acme/workers/clocks").await.unwrap(), []);
    }
}
