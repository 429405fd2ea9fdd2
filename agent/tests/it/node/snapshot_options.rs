//! How sleeping instances are kept, as steps carry it out: what the pool says at the time, and nothing lost without a key.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use mvm_agent::instance::PoolSpec;
use mvm_planner::Action;
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{DesiredState, Phase};
use mvm_vmm::{Driver as _, FakeDriver, SnapshotPolicy};
use serde_json::json;

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::subject::Subject;

fn desired(compression: &str, encryption: bool) -> DesiredState {
    let mut workers = pool("workers", 1, 0, 0);
    workers["snapshot_compression"] = json!(compression);
    workers["snapshot_encryption"] = json!(encryption);
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

fn spec(desired: &DesiredState) -> PoolSpec {
    let (tenant, pool) = desired.pools().next().unwrap();
    PoolSpec::of(tenant, pool)
}

/// The key of `acme`, where a node below this directory looks for it.
pub(crate) fn put_key(dir: &Path, key: u8) {
    let _ = fs::create_dir(dir.join("secrets"));
    let path = dir.join("secrets/acme.snapshot-key");
    let _ = fs::remove_file(&path);
    fs::write(&path, [key; 32]).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
}

fn remove_key(dir: &Path) {
    fs::remove_file(dir.join("secrets/acme.snapshot-key")).unwrap();
}

async fn console(subject: &Subject) -> String {
    String::from_utf8(subject.executor.driver.console(&subject.id, 4096).await.unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_the_pool_says_of_snapshots_changes_no_revision_and_counts_from_the_next_sleep() {
    let dir = tempfile::tempdir().unwrap();
    let mut subject = Subject::new(dir.path(), &desired("none", false)).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    assert_eq!(subject.record().at_rest, SnapshotPolicy::default());
    let now = spec(&desired("zstd", false));
    assert_eq!(now.revision, subject.spec.revision);
    subject.spec = now;
    subject.take(Action::Wake).await.unwrap();
    assert_eq!(subject.record().at_rest, SnapshotPolicy::default());
    subject.take(Action::Sleep).await.unwrap();
    let compression = SnapshotCompression::Zstd;
    assert_eq!(subject.record().at_rest, SnapshotPolicy { compression, encryption: false });
}

#[tokio::test(start_paused = true)]
async fn without_a_key_a_sleep_fails_before_its_guest_notices() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("secrets")).unwrap();
    let subject = Subject::new(dir.path(), &desired("lz4", true)).await;
    subject.take(Action::Create).await.unwrap();
    let before = console(&subject).await;
    // It would be told by these.
    subject.fail(&["pause", "resume", "snapshot"]);
    subject.take(Action::Sleep).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot.clone()), (Phase::Running, None));
    assert!(record.reason.contains("there is no snapshot key"), "{}", record.reason);
    assert!(record.reason.contains("acme.snapshot-key"), "{}", record.reason);
    assert_eq!(console(&subject).await, before);
    put_key(dir.path(), 1);
    // What was planned is still to come: nothing of it was called.
    subject.take(Action::Sleep).await.unwrap_err();
    assert!(!subject.record().reason.contains("key"), "{}", subject.record().reason);
}

#[tokio::test(start_paused = true)]
async fn without_its_key_a_sleeper_keeps_its_memory_and_wakes_when_the_key_is_back() {
    let dir = tempfile::tempdir().unwrap();
    put_key(dir.path(), 1);
    let subject = Subject::new(dir.path(), &desired("zstd", true)).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    let kept = subject.record().snapshot;
    assert!(kept.is_some());
    remove_key(dir.path());
    for says in ["there is no snapshot key", "is needed; put that one back"] {
        subject.take(Action::Wake).await.unwrap_err();
        let record = subject.record();
        assert_eq!((record.phase, record.snapshot), (Phase::Sleeping, kept.clone()));
        assert!(record.reason.contains(says), "{}", record.reason);
        put_key(dir.path(), 2);
    }
    put_key(dir.path(), 1);
    subject.take(Action::Wake).await.unwrap();
    assert_eq!(subject.record().phase, Phase::Running);
    assert!(console(&subject).await.contains("restored"));
}

#[tokio::test(start_paused = true)]
async fn what_was_damaged_under_the_right_key_starts_from_the_beginning_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    put_key(dir.path(), 1);
    let subject = Subject::new(dir.path(), &desired("none", true)).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    subject.driver.damage_snapshot(&subject.id);
    let mut events = subject.executor.events.subscribe();
    subject.take(Action::Wake).await.unwrap();
    assert_eq!(events.recv().await.unwrap().kind, "SnapshotUnusable");
    assert_eq!((subject.record().phase, subject.record().snapshot), (Phase::Running, None));
}

#[tokio::test(start_paused = true)]
async fn memory_in_clear_is_restored_only_if_it_was_saved_so() {
    let dir = tempfile::tempdir().unwrap();
    put_key(dir.path(), 1);
    let mut subject = Subject::new(dir.path(), &desired("none", false)).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    // The pool asks for encryption since: what sleeps was saved before that, and its record says so.
    subject.spec = spec(&desired("none", true));
    subject.take(Action::Wake).await.unwrap();
    assert!(console(&subject).await.contains("restored"));

    // Saved encrypted, says the record: what lies there in clear is not what was saved.
    subject.spec = spec(&desired("none", false));
    subject.take(Action::Sleep).await.unwrap();
    let mut record = subject.record();
    record.at_rest.encryption = true;
    subject.records().save(&record).await.unwrap();
    let mut events = subject.executor.events.subscribe();
    subject.take(Action::Wake).await.unwrap();
    let told = events.try_recv().unwrap();
    assert_eq!(told.kind, "SnapshotUnusable");
    assert!(told.message.contains("in clear"), "{}", told.message);
    assert_eq!((subject.record().phase, subject.record().snapshot), (Phase::Running, None));
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_can_not_encrypt_saves_nothing_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    put_key(dir.path(), 1);
    let driver = FakeDriver::in_memory().without_encryption();
    let subject = Subject::on(driver, dir.path(), &desired("none", true)).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot), (Phase::Running, None));
    assert!(record.reason.contains("the fake driver can't do"), "{}", record.reason);
    assert!(!console(&subject).await.contains("saved"));
}
