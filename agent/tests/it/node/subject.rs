//! One instance, and the steps on it, without a planner.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mvm_agent::audit::{AuditLog, AuditSettings};
use mvm_agent::clock::Clock;
use mvm_agent::events::Events;
use mvm_agent::execute::{Executor, Order, StepError, Writing};
use mvm_agent::guest::GuestLinks;
use mvm_agent::instance::PoolSpec;
use mvm_agent::instance::record::Record;
use mvm_agent::instance::records::Records;
use mvm_agent::isolation::{Isolation, IsolationSettings};
use mvm_agent::persist::{SessionLimits, SessionSettings, Sessions};
use mvm_agent::secrets::Secrets;
use mvm_host::AnyHost;
use mvm_image::BootImage;
use mvm_image::Images;
use mvm_planner::Action;
use mvm_proto::{DesiredState, InstanceId, Phase};
use mvm_vmm::fake::Fault;
use mvm_vmm::{AnyDriver, Bounds, Driver as _, DriverKind, FakeDriver, SnapshotOptions};
use tokio::sync::broadcast;

use crate::node::cluster::at;
use crate::node::documents::simple;
use crate::node::test_node::records;

pub(crate) struct Subject {
    pub(crate) executor: Executor,
    pub(crate) driver: FakeDriver,
    pub(crate) spec: PoolSpec,
    pub(crate) id: InstanceId,
}

impl Subject {
    /// One of the document's first pool that does not exist yet.
    pub(crate) async fn new(dir: &Path, desired: &DesiredState) -> Self {
        Self::on(FakeDriver::in_memory(), dir, desired).await
    }

    pub(crate) async fn on(driver: FakeDriver, dir: &Path, desired: &DesiredState) -> Self {
        let (any, records) = (Arc::new(AnyDriver::Fake(driver.clone())), records(dir).await);
        let clock = Clock::starting_at(at(0));
        let (tenant, pool) = desired.pools().next().unwrap();
        let spec = PoolSpec::of(tenant, pool);
        let reserved = records.reserve(&tenant.tenant_id, &pool.pool_id, &spec, None, clock.now());
        let (record, lease) = reserved.unwrap();
        drop(lease);
        let links = GuestLinks::new(Arc::clone(&any), clock.clone());
        let events = Events::new(clock.clone());
        let settings = SessionSettings {
            node: "node-a".parse().unwrap(),
            sessions_dir: dir.join("sessions"),
            secrets_dir: dir.join("secrets"),
            limits: SessionLimits::default(),
        };
        let executor = Executor {
            sessions: Arc::new(Sessions::new(settings, links.clone(), clock.clone(), events.clone())),
            links,
            audit: AuditLog::open(dir, AuditSettings::default(), clock.clone()),
            driver: any,
            records,
            clock,
            images: Images::imagined(mvm_image::Vouched::unchecked()),
            isolation: Arc::new(Isolation::new(
                AnyHost::local(dir),
                DriverKind::Fake,
                IsolationSettings::NONE,
            )),
            background: Arc::new(tokio::sync::Semaphore::new(1)),
            boot_deadline: Duration::from_secs(90),
            events,
            wakes: broadcast::Sender::new(16),
            ends: broadcast::Sender::new(16),
            secrets: Arc::new(Secrets::new(&dir.join("secrets"))),
            writing: Writing::default(),
            tracer: mvm_telemetry::Tracer::default(),
        };
        Self { executor, driver, spec, id: record.id }
    }

    pub(crate) async fn running(dir: &Path) -> Self {
        let subject = Self::new(dir, &simple(1, 0, 0)).await;
        subject.take(Action::Create).await.unwrap();
        subject
    }

    pub(crate) async fn sleeping(dir: &Path) -> Self {
        let subject = Self::running(dir).await;
        subject.take(Action::Sleep).await.unwrap();
        subject
    }

    pub(crate) async fn take(&self, action: Action) -> Result<Phase, StepError> {
        let lease = self.records().lease(&self.id, Phase::Running).unwrap();
        let (reason, spec) = ("the test asks".to_owned(), Some(self.spec.clone()));
        let order =
            Order { action, staging: None, reason, spec, on_demand: false, asked_by: None, for_move: false };
        self.executor.execute(&lease, &order).await
    }

    /// The next call of each of these fails.
    pub(crate) fn fail(&self, calls: &[&'static str]) {
        for call in calls {
            self.driver.faults.plan(call, Some(&self.id), 1, Fault::Fail);
        }
    }

    pub(crate) fn records(&self) -> &Arc<Records> {
        &self.executor.records
    }

    pub(crate) fn record(&self) -> Record {
        self.records().get(&self.id).unwrap()
    }

    /// Its VM was restored from its snapshot and ran on, and nobody wrote that down.
    pub(crate) async fn run_on_unnoticed(&self) {
        let record = self.record();
        let spec = record.spec(BootImage::imagined(&record.flake_ref), Bounds::default());
        self.executor
            .driver
            .restore(&spec, &record.snapshot.unwrap(), &SnapshotOptions::plain())
            .await
            .unwrap();
        self.executor.driver.resume(&self.id).await.unwrap();
    }
}
