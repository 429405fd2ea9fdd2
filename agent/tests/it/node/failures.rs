//! What is left of an instance when a step on it fails: what its VM and its snapshot prove, and nothing else.

use std::time::Duration;

use mvm_agent::execute::recover::{Recovery, recover};
use mvm_agent::instance::record::Record;
use mvm_planner::Action;
use mvm_proto::Phase;
use mvm_vmm::Driver as _;
use mvm_vmm::fake::Fault;

use crate::node::subject::Subject;

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_memory_has_left_behind_is_given_up_when_a_step_fails() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    subject.run_on_unnoticed().await;
    subject.fail(&["restore", "kill"]);
    subject.take(Action::Wake).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot), (Phase::Running, None));
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_an_agent_left_beside_a_snapshot_never_ran_whatever_it_looks_like() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    let snapshot = subject.record().snapshot;
    // One that does not answer, for it is busy loading, looks as if it ran.
    subject.run_on_unnoticed().await;
    let (driver, now) = (&*subject.executor.driver, subject.executor.clock.now());
    let recovered = recover(driver, subject.records(), Recovery::Act, now).await;
    assert_eq!((recovered.resolved, recovered.unfinished), (1, Vec::new()));
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot), (Phase::Sleeping, snapshot));
    assert!(driver.adopt(&subject.id).await.unwrap().is_none(), "it is ended");
}

#[tokio::test(start_paused = true)]
async fn a_start_gives_up_a_snapshot_that_was_left_before_anything_boots() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    let left = Record { phase: Phase::Failed, ..subject.record() };
    assert!(left.snapshot.is_some());
    subject.records().save(&left).await.unwrap();
    // Nothing after the boot is recorded: the agent might end here.
    subject.driver.faults.plan("boot", None, 1, Fault::HangAfter);
    let begun = tokio::time::timeout(Duration::from_secs(1), subject.take(Action::Start)).await;
    begun.unwrap_err();
    let record = subject.record();
    assert_eq!((record.intent.map(|intent| intent.action), record.snapshot), (Some(Action::Start), None));
}

#[tokio::test(start_paused = true)]
async fn a_sleeper_that_can_not_be_looked_at_keeps_its_phase_and_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    let snapshot = subject.record().snapshot;
    subject.fail(&["restore", "adopt"]);
    subject.take(Action::Wake).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot.as_ref()), (Phase::Sleeping, snapshot.as_ref()));
    assert_eq!(record.failures, 1);
}

#[tokio::test(start_paused = true)]
async fn one_that_runs_and_can_not_be_looked_at_is_not_taken_for_failed() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::running(dir.path()).await;
    subject.fail(&["pause", "adopt"]);
    subject.take(Action::Warm).await.unwrap_err();
    let record = subject.record();
    assert_eq!((record.phase, record.failures), (Phase::Running, 1));
}
