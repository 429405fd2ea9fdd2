//! A tenant's secrets: in the guest before it knows who it is, out of its memory before that is saved.

use std::fs;
use std::path::Path;

use mvm_planner::Action;
use mvm_proto::{DesiredState, Digest, Phase};
use mvm_vmm::Driver as _;
use mvm_vmm::fake::{Fault, Manner};
use serde_json::json;

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::subject::Subject;

const SECRET: &[u8] = b"TOKEN=hunter2";
const PLACE: &str = "/run/mvm/secrets/bundle";

fn with_secrets() -> DesiredState {
    let mut acme = tenant("acme", 3, &[pool("workers", 1, 0, 0)]);
    acme["secrets_hash"] = json!(Digest::of(SECRET).to_string());
    parse(&document(&[acme]))
}

/// One of a tenant whose bundle is there.
async fn subject(dir: &Path) -> Subject {
    fs::create_dir(dir.join("secrets")).unwrap();
    fs::write(dir.join("secrets/acme"), SECRET).unwrap();
    Subject::new(dir, &with_secrets()).await
}

impl Subject {
    async fn secrets(&self) -> Option<Vec<u8>> {
        self.executor.links.read_file(&self.id, PLACE, 1 << 20).await.ok()
    }

    /// What became of the instance, as its fake VM wrote it down.
    async fn console(&self) -> String {
        String::from_utf8(self.executor.driver.console(&self.id, 4096).await.unwrap()).unwrap()
    }

    async fn fails(&self, action: Action) -> String {
        self.take(action).await.unwrap_err();
        self.record().reason
    }
}

#[tokio::test(start_paused = true)]
async fn secrets_come_before_the_identity_go_before_the_snapshot_and_come_again() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    subject.take(Action::Create).await.unwrap();
    assert_eq!(subject.secrets().await.unwrap(), SECRET);
    assert_eq!(subject.console().await, "booted\nhas secrets\n");
    subject.take(Action::Sleep).await.unwrap();
    assert!(subject.record().secrets_wiped);
    subject.take(Action::Wake).await.unwrap();
    assert_eq!(subject.secrets().await.unwrap(), SECRET);
    assert_eq!(subject.console().await, "booted\nhas secrets\nsaved\nrestored\nhas secrets\n");
    assert!(!subject.record().secrets_wiped);
}

#[tokio::test(start_paused = true)]
async fn one_that_was_only_paused_keeps_them_and_wipes_them_when_it_is_saved_after_all() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Warm).await.unwrap();
    // Nobody has it any more, and nobody needs it.
    fs::remove_file(dir.path().join("secrets/acme")).unwrap();
    subject.take(Action::Resume).await.unwrap();
    assert_eq!(subject.secrets().await.unwrap(), SECRET);
    subject.take(Action::Warm).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    let console = subject.console().await;
    assert!(console.contains("saved\n") && !console.contains("saved with secrets"), "{console}");
}

#[tokio::test(start_paused = true)]
async fn one_whose_save_failed_gets_them_back_before_it_runs_again() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    subject.take(Action::Create).await.unwrap();
    subject.fail(&["snapshot"]);
    subject.take(Action::Sleep).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.secrets_wiped), (Phase::Warm, true));
    assert!(record.reason.contains("could not sleep"), "{}", record.reason);
    subject.take(Action::Resume).await.unwrap();
    assert_eq!(subject.secrets().await.unwrap(), SECRET);
    assert!(!subject.record().secrets_wiped);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_keeps_its_secrets_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    subject.take(Action::Create).await.unwrap();
    subject.driver.faults.set_manner(None, Manner::KeepsSecrets);
    let why = subject.fails(Action::Sleep).await;
    assert!(why.contains("was told to keep them"), "{why}");
    assert!(!subject.console().await.contains("saved"));
    assert_eq!((subject.record().phase, subject.record().snapshot), (Phase::Running, None));
}

#[tokio::test(start_paused = true)]
async fn a_bundle_that_changed_under_a_sleeper_fails_the_wake_and_costs_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    subject.take(Action::Create).await.unwrap();
    subject.take(Action::Sleep).await.unwrap();
    fs::write(dir.path().join("secrets/acme"), "another").unwrap();
    let why = subject.fails(Action::Wake).await;
    assert!(why.contains("the secrets bundle") && why.contains("not sha256:"), "{why}");
    let record = subject.record();
    assert!(record.phase == Phase::Sleeping && record.snapshot.is_some(), "{record:?}");
    fs::write(dir.path().join("secrets/acme"), SECRET).unwrap();
    subject.take(Action::Wake).await.unwrap();
    assert_eq!(subject.secrets().await.unwrap(), SECRET);
}

#[tokio::test(start_paused = true)]
async fn a_guest_too_old_for_secrets_is_not_started_with_them_and_is_without() {
    let dir = tempfile::tempdir().unwrap();
    let subject = subject(dir.path()).await;
    let mut events = subject.executor.events.subscribe();
    subject.driver.faults.set_manner(None, Manner::WithoutSecrets);
    let why = subject.fails(Action::Create).await;
    assert!(why.contains("being given secrets needs version 3"), "{why}");
    assert_eq!(events.recv().await.unwrap().kind, "GuestOutdated");
    assert_eq!(subject.record().phase, Phase::Failed);

    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::new(dir.path(), &crate::node::documents::simple(1, 0, 0)).await;
    let mut events = subject.executor.events.subscribe();
    subject.driver.faults.set_manner(None, Manner::WithoutSecrets);
    subject.take(Action::Create).await.unwrap();
    assert_eq!(events.recv().await.unwrap().kind, "GuestOutdated");
    assert_eq!(subject.secrets().await, None);
}

#[tokio::test(start_paused = true)]
async fn one_that_runs_on_after_its_secrets_were_wiped_is_given_them_back_by_the_next_look() {
    use crate::node::test_node::TestNode;
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("secrets")).unwrap();
    fs::write(dir.path().join("secrets/acme"), SECRET).unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(with_secrets());
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running")[0].clone();
    // The pause after the wiping fails: it goes on as it is.
    node.driver.faults.plan("pause", Some(&id), 1, Fault::Fail);
    let by = "a test".to_owned();
    let manual = mvm_agent::node::actions::Manual {
        tenant: "acme".parse().unwrap(),
        pool: "workers".parse().unwrap(),
        instance: id.clone(),
        action: mvm_proto::ManualAction::Sleep,
        override_for: std::time::Duration::ZERO,
        by,
    };
    node.handle.act(manual).await.unwrap_err();
    let guests = node.handle.guests();
    let back = async {
        while guests.read_file(&id, PLACE, 1 << 20).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(3600), back).await.unwrap();
}
