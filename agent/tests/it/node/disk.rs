//! Disk that is really used: measured, shown, and asked before a snapshot is written.

use std::fs;
use std::path::Path;

use mvm_planner::Action;
use mvm_proto::{DesiredState, Phase};
use serde_json::json;

use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::subject::Subject;

const MIB: usize = 1 << 20;

/// By its size, memory and data disk, one instance is all that its tenant may have.
fn filling_its_quota() -> DesiredState {
    let mut large = pool("workers", 1, 0, 0);
    large["instance_resources"]["mem_mib"] = json!(960);
    let mut acme = tenant("acme", 3, &[large]);
    acme["quotas"]["max_disk_gib"] = json!(1);
    parse(&document(&[acme]))
}

/// The fake driver keeps nothing in run directories: what is there is the test's.
fn fill(dir: &Path, subject: &Subject, mib: usize) {
    let run_dir = dir.join("vms").join(subject.id.as_str());
    fs::create_dir_all(&run_dir).unwrap();
    fs::write(run_dir.join("filler"), vec![1; mib * MIB]).unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_an_instance_has_on_disk_is_measured_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::new(dir.path(), &simple(1, 0, 0)).await;
    subject.take(Action::Create).await.unwrap();
    assert_eq!(subject.record().status().disk_used_bytes, 0);
    fill(dir.path(), &subject, 8);
    subject.take(Action::Sleep).await.unwrap();
    let used = subject.record().status().disk_used_bytes;
    assert!(((8 << 20)..(9 << 20)).contains(&used), "{used}");
    fs::remove_dir_all(dir.path().join("vms")).unwrap();
    subject.take(Action::Stop).await.unwrap();
    assert_eq!(subject.record().disk_used_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_passes_the_quota_with_what_is_there_is_not_begun() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::new(dir.path(), &filling_its_quota()).await;
    subject.take(Action::Create).await.unwrap();
    fill(dir.path(), &subject, 64);
    subject.take(Action::Sleep).await.unwrap_err();
    let why = subject.record().reason;
    assert!(why.contains("max_disk_gib of acme") && why.contains("of the quota's 1073741824"), "{why}");
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot.as_ref()), (Phase::Running, None));
    fill(dir.path(), &subject, 40);
    subject.take(Action::Sleep).await.unwrap();
    assert_eq!(subject.record().phase, Phase::Sleeping);
}

#[tokio::test(start_paused = true)]
async fn sessions_on_the_node_count_with_what_instances_have() {
    let dir = tempfile::tempdir().unwrap();
    let mut kept = pool("workers", 1, 0, 0);
    kept["persist"] = json!({ "path": "/session", "store": "local", "every_seconds": 60 });
    let mut acme = tenant("acme", 3, &[kept]);
    acme["quotas"]["max_disk_gib"] = json!(1);
    let subject = Subject::new(dir.path(), &parse(&document(&[acme]))).await;
    // Another pool's, of which nothing runs here.
    let content = dir.path().join("sessions/acme/gone/content/0");
    fs::create_dir_all(&content).unwrap();
    fs::File::create(content.join("ab")).unwrap().set_len(1 << 30).unwrap();
    subject.take(Action::Create).await.unwrap();
    fill(dir.path(), &subject, 1);
    subject.take(Action::Sleep).await.unwrap_err();
    let why = subject.record().reason;
    assert!(why.contains("max_disk_gib of acme") && why.contains("of the quota's 1073741824"), "{why}");
    assert_eq!(subject.record().phase, Phase::Running);
}

#[tokio::test(start_paused = true)]
async fn a_save_that_fails_leaves_the_instance_warm_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::running(dir.path()).await;
    fill(dir.path(), &subject, 1);
    subject.fail(&["snapshot"]);
    subject.take(Action::Sleep).await.unwrap_err();
    let record = subject.record();
    assert_eq!(record.phase, Phase::Warm);
    assert!(record.reason.contains("was told to fail to snapshot"), "{}", record.reason);
    // Its room is free again.
    subject.take(Action::Sleep).await.unwrap();
}
