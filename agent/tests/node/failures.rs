//! What is left of an instance when a step on it fails: what its VM and its snapshot prove, and nothing else.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mvm_agent::audit::{AuditLog, AuditSettings};
use mvm_agent::driver::fake::Fault;
use mvm_agent::driver::{BootImage, Bounds, Driver as _, DriverKind, FakeDriver};
use mvm_agent::execute::{Executor, Order, PoolSpec, StepError};
use mvm_agent::guest_link::GuestLinks;
use mvm_agent::image::Images;
use mvm_agent::isolation::{Isolation, IsolationSettings};
use mvm_agent::reconcile::Clock;
use mvm_agent::record::Record;
use mvm_agent::state::Records;
use mvm_host::AnyHost;
use mvm_planner::Action;
use mvm_proto::{InstanceId, Phase};
use tokio::sync::broadcast;

use crate::cluster::at;
use crate::documents::simple;
use crate::test_node::records;

/// One instance, and the steps on it.
struct Subject {
    executor: Executor<FakeDriver>,
    spec: PoolSpec,
    id: InstanceId,
}

impl Subject {
    /// One that runs.
    async fn running(dir: &Path) -> Self {
        let (driver, records) = (Arc::new(FakeDriver::in_memory()), records(dir).await);
        let clock = Clock::starting_at(at(0));
        let desired = simple(1, 0, 0);
        let (tenant, pool) = desired.pools().next().unwrap();
        let spec = PoolSpec::of(tenant, pool);
        let reserved = records.reserve(&tenant.tenant_id, &pool.pool_id, &spec, None, clock.now());
        let (record, lease) = reserved.unwrap();
        drop(lease);
        let executor = Executor {
            links: GuestLinks::new(Arc::clone(&driver), clock.clone()),
            audit: AuditLog::open(dir, AuditSettings::default(), clock.clone()),
            driver,
            records,
            clock,
            images: Images::imagined(),
            isolation: Arc::new(Isolation::new(
                AnyHost::local(dir),
                DriverKind::Fake,
                IsolationSettings::NONE,
            )),
            background: Arc::new(tokio::sync::Semaphore::new(1)),
            boot_deadline: Duration::from_secs(90),
            events: broadcast::Sender::new(16),
        };
        let subject = Self { executor, spec, id: record.id };
        subject.take(Action::Create).await.unwrap();
        subject
    }

    async fn sleeping(dir: &Path) -> Self {
        let subject = Self::running(dir).await;
        subject.take(Action::Sleep).await.unwrap();
        subject
    }

    async fn take(&self, action: Action) -> Result<Phase, StepError> {
        let lease = self.records().lease(&self.id, Phase::Running).unwrap();
        let (reason, spec) = ("the test asks".to_owned(), Some(self.spec.clone()));
        let order = Order { action, staging: None, reason, spec, on_demand: false, asked_by: None };
        self.executor.execute(&lease, &order).await
    }

    /// The next call of each of these fails.
    fn fail(&self, calls: &[&'static str]) {
        for call in calls {
            self.executor.driver.faults.plan(call, Some(&self.id), 1, Fault::Fail);
        }
    }

    fn records(&self) -> &Arc<Records> {
        &self.executor.records
    }

    fn record(&self) -> Record {
        self.records().get(&self.id).unwrap()
    }

    /// Its VM was restored from its snapshot and ran on, and nobody wrote that down.
    async fn run_on_unnoticed(&self) {
        let record = self.record();
        let spec = record.spec(BootImage::imagined(&record.flake_ref), Bounds::default());
        self.executor.driver.restore(&spec, &record.snapshot.unwrap()).await.unwrap();
        self.executor.driver.resume(&self.id).await.unwrap();
    }
}

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
async fn a_start_gives_up_a_snapshot_that_was_left_before_anything_boots() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    let left = Record { phase: Phase::Failed, ..subject.record() };
    assert!(left.snapshot.is_some());
    subject.records().save(&left).await.unwrap();
    // Nothing after the boot is recorded: the agent might end here.
    subject.executor.driver.faults.plan("boot", None, 1, Fault::HangAfter);
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
