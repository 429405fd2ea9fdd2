//! Guests that lie about their files, or never end. What they cost is bounded, and the last copy stays whole.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mvm_proto::guest::{Entry, SetEntry};
use parking_lot::Mutex;

use super::folder::{Folder, looks, write};
use super::{Breaking, EVERY, at, brought_back, session_store};
use crate::guest::LinkError;
use crate::persist::PersistError;
use crate::persist::blob_store::BlobStore;
use crate::persist::guest_files::GuestFiles;
use crate::persist::head::FolderContent;
use crate::persist::index::{CHUNK_BYTES, MAX_INDEX_BYTES};
use crate::persist::session::Session;
use crate::persist::space::{SessionSpace, TenantSpace};

/// What these sessions may have.
const MAX_BYTES: u64 = 8 * CHUNK_BYTES;

/// What such a guest does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Manner {
    /// Says that it has a file of this size, and gives as many bytes as are asked for.
    Endless { size: u64 },
    /// Has a file as large as may be, that is another at every look.
    Changes,
    /// Says of its file at every look that it is larger.
    Grows,
    /// Has a folder in every folder, with names as long as this.
    Nested { name: usize },
    /// Has this many links, to targets as long as this.
    Links { count: usize, target: usize },
    /// Stops answering after this many pieces.
    Silent { after: u64 },
}

#[derive(Debug)]
struct Hostile {
    manner: Manner,
    looks: AtomicU64,
    read_bytes: AtomicU64,
    random: Mutex<fastrand::Rng>,
}

impl Hostile {
    fn new(manner: Manner) -> Self {
        let random = Mutex::new(fastrand::Rng::with_seed(7));
        Self { manner, looks: AtomicU64::default(), read_bytes: AtomicU64::default(), random }
    }
}

fn named(name: &str, mode: u32) -> Entry {
    Entry { name: name.to_owned(), mode, ..Entry::default() }
}

impl GuestFiles for Hostile {
    async fn list(&self, folder: &str) -> Result<Vec<Entry>, LinkError> {
        if folder == "/" {
            return Ok(vec![named("session", 0o040_700)]);
        }
        let look = self.looks.fetch_add(1, Ordering::SeqCst);
        let file = |size| vec![Entry { size, ..named("file", 0o100_600) }];
        Ok(match self.manner {
            Manner::Endless { size } => file(size),
            Manner::Changes => {
                let changed_ms = i64::try_from(look).unwrap();
                vec![Entry { size: MAX_BYTES, changed_ms, ..named("file", 0o100_600) }]
            }
            Manner::Grows => file((look + 1) * CHUNK_BYTES),
            Manner::Nested { name } => vec![named(&"n".repeat(name), 0o040_700)],
            Manner::Links { count, target } => {
                let link = |number| Entry {
                    target: "t".repeat(target),
                    ..named(&format!("link-{number}"), 0o120_777)
                };
                (0..count).map(link).collect()
            }
            Manner::Silent { .. } => file(MAX_BYTES),
        })
    }

    async fn read(&self, _path: &str, _offset: u64, limit: u64) -> Result<Vec<u8>, LinkError> {
        let before = self.read_bytes.fetch_add(limit, Ordering::SeqCst);
        if matches!(self.manner, Manner::Silent { after } if before >= after * CHUNK_BYTES) {
            let within = Duration::from_secs(10);
            tokio::time::sleep(within).await;
            return Err(LinkError::Silent(within));
        }
        let mut bytes = vec![0; usize::try_from(limit).unwrap()];
        self.random.lock().fill(&mut bytes);
        Ok(bytes)
    }

    async fn write(&self, _: &str, _: u64, _: &[u8], _: bool) -> Result<(), LinkError> {
        Err(LinkError::Unexpected)
    }

    async fn set_entry(&self, _: SetEntry) -> Result<(), LinkError> {
        Err(LinkError::Unexpected)
    }
}

/// A session that holds something, with limits of its own.
async fn limited(blobs: &Breaking, space: Option<TenantSpace>) -> (Session<Breaking>, Folder) {
    let folder = Folder::new();
    write(&folder.path("notes"), b"remember this");
    let session_store = session_store(blobs).limited(MAX_BYTES, space);
    let mut session =
        Session::take(session_store, &super::holder(1), FolderContent::Nothing, EVERY).await.unwrap();
    session.copy_folder(&folder, folder.root(), EVERY, at(1)).await.unwrap();
    (session, folder)
}

async fn stored_bytes(blobs: &Breaking) -> u64 {
    blobs.list("acme").await.unwrap().iter().map(|listed| listed.bytes).sum()
}

/// What a session does with such a guest, time after time.
async fn refused(manner: Manner) -> (String, Hostile) {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    let (mut session, folder) = limited(&blobs, None).await;
    let guest = Hostile::new(manner);
    let mut said = BTreeSet::new();
    for time in 0..5 {
        let error = session.copy_folder(&guest, "/session", EVERY, at(2 + time)).await.unwrap_err();
        said.insert(error.to_string());
        let stored = stored_bytes(&blobs).await;
        assert!(stored <= MAX_BYTES + CHUNK_BYTES, "{stored} bytes after copy {time}: {error}");
    }
    drop(session);
    assert_eq!(brought_back(&blobs).await, looks(&folder), "the last copy is whole");
    (said.into_iter().collect::<Vec<_>>().join("; "), guest)
}

#[tokio::test]
async fn a_file_without_end_is_not_read() {
    for size in [u64::MAX, 8 << 60, MAX_BYTES + 1] {
        let (said, guest) = refused(Manner::Endless { size }).await;
        assert!(said.contains("\"file\"") && said.contains(&MAX_BYTES.to_string()), "{said}");
        assert_eq!(guest.read_bytes.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn a_file_that_is_another_at_every_read_adds_nothing_to_the_store_for_good() {
    // Each read gives new bytes: after one round all that may be sent is sent.
    let (said, _) = refused(Manner::Changes).await;
    assert!(said.contains("changed while it was copied"), "{said}");
    let (said, _) = refused(Manner::Grows).await;
    assert!(said.contains("exceeds its size limit"), "{said}");
}

#[tokio::test]
async fn names_and_links_are_counted_before_they_are_remembered() {
    // More than an index may have long before there are too many of them.
    let (said, guest) = refused(Manner::Nested { name: 4000 }).await;
    assert!(said.contains(&MAX_INDEX_BYTES.to_string()), "{said}");
    let depth = guest.looks.load(Ordering::SeqCst) / 5;
    assert!(depth * depth / 2 * 4000 <= MAX_INDEX_BYTES + depth * 4000, "{depth}");
    let (said, _) = refused(Manner::Links { count: 50_000, target: 1000 }).await;
    assert!(said.contains(&MAX_INDEX_BYTES.to_string()), "{said}");
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_falls_silent_leaves_nothing_but_the_last_copy() {
    let (said, _) = refused(Manner::Silent { after: 3 }).await;
    assert!(said.contains("did not answer"), "{said}");
}

#[tokio::test]
async fn an_index_that_grows_by_escapes_is_refused_before_anything_is_replaced() {
    /// Each of these is six bytes long in an index.
    #[derive(Debug)]
    struct Escapes;
    impl GuestFiles for Escapes {
        async fn list(&self, folder: &str) -> Result<Vec<Entry>, LinkError> {
            if folder == "/" {
                return Ok(vec![named("session", 0o040_700)]);
            }
            let link =
                |number: u32| Entry { target: "\u{1}".repeat(1000), ..named(&number.to_string(), 0o120_777) };
            Ok((0..10_000).map(link).collect())
        }
        async fn read(&self, _: &str, _: u64, _: u64) -> Result<Vec<u8>, LinkError> {
            Err(LinkError::Unexpected)
        }
        async fn write(&self, _: &str, _: u64, _: &[u8], _: bool) -> Result<(), LinkError> {
            Err(LinkError::Unexpected)
        }
        async fn set_entry(&self, _: SetEntry) -> Result<(), LinkError> {
            Err(LinkError::Unexpected)
        }
    }
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    let (mut session, folder) = limited(&blobs, None).await;
    let before = blobs.list("acme").await.unwrap();
    let refused = session.copy_folder(&Escapes, "/session", EVERY, at(2)).await;
    assert!(matches!(refused, Err(PersistError::TooLarge(_))), "{refused:?}");
    assert_eq!(blobs.list("acme").await.unwrap().len(), before.len());
    drop(session);
    assert_eq!(brought_back(&blobs).await, looks(&folder));
}

#[tokio::test]
async fn sessions_count_towards_the_quota_of_their_tenant_with_what_its_instances_have() {
    let store = tempfile::tempdir().unwrap();
    let blobs = Breaking::at(store.path());
    let tenant: mvm_proto::TenantId = "acme".parse().unwrap();
    let all = std::sync::Arc::new(SessionSpace::default());
    let space = TenantSpace {
        all: std::sync::Arc::clone(&all),
        tenant: tenant.clone(),
        store: "local".to_owned(),
        folder: store.path().to_owned(),
    };
    all.note(&tenant, Some(6 * CHUNK_BYTES), 2 * CHUNK_BYTES);
    let (mut session, folder) = limited(&blobs, Some(space.clone())).await;
    let old = looks(&folder);
    let piece = |bytes: u8| vec![bytes; usize::try_from(CHUNK_BYTES).unwrap()];
    for name in 1..=5 {
        write(&folder.path(&name.to_string()), &piece(name));
    }
    let refused = session.copy_folder(&folder, folder.root(), EVERY, at(2)).await;
    assert!(matches!(&refused, Err(PersistError::OverQuota { .. })), "{refused:?}");
    drop(session);
    assert_eq!(brought_back(&blobs).await, old);

    // With less of it there is room, also where an earlier copy was taken for more.
    let session_store = session_store(&blobs).limited(MAX_BYTES, Some(space));
    let mut session =
        Session::take(session_store, &super::holder(0xffff), FolderContent::Nothing, EVERY).await.unwrap();
    for name in 3..=5 {
        std::fs::remove_file(folder.path(&name.to_string())).unwrap();
    }
    session.copy_folder(&folder, folder.root(), EVERY, at(3)).await.unwrap();
    assert_eq!(brought_back(&blobs).await, looks(&folder));
    // Another tenant's are its own.
    assert!(all.used(&tenant) > 0);
    assert_eq!(all.used(&"acme2".parse().unwrap()), 0);
}
