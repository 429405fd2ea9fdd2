//! A node under test: its task, its driver, and how to end it as a crash would.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mvm_agent::clock::Clock;
use mvm_agent::instance::records::Records;
use mvm_agent::isolation::IsolationSettings;
use mvm_agent::node::CurrentDocument;
use mvm_agent::node::assemble::{Node, NodeSettings};
use mvm_agent::node::handle::NodeHandle;
use mvm_agent::node::reconcile_task::reconcile_task;
use mvm_agent::persist::SessionLimits;
use mvm_image::{Images, Vouched};
use mvm_proto::status::{Capacity, NodeStatus};
use mvm_proto::{DesiredState, InstanceId};
use mvm_store::{Settings, SledStore, StoreError};
use mvm_vmm::{AnyDriver, Driver, FakeDriver, VmmSettings};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::cluster::at;
use crate::node::documents::NODE;

/// Far longer than anything here takes; on paused time it costs nothing.
const PATIENCE: Duration = Duration::from_secs(3600);

pub(crate) struct TestNode {
    pub(crate) driver: FakeDriver,
    pub(crate) handle: NodeHandle,
    pub(crate) desired: watch::Sender<Option<Arc<CurrentDocument>>>,
    pub(crate) stop: CancellationToken,
    pub(crate) task: tokio::task::JoinHandle<()>,
}

pub(crate) fn settings(dir: &Path) -> NodeSettings {
    NodeSettings {
        node_id: NODE.parse().unwrap(),
        data_dir: dir.to_owned(),
        host: None,
        driver: mvm_vmm::DriverKind::Fake,
        vmm: VmmSettings::default(),
        images_dir: dir.join("images"),
        vouched: Vouched::unchecked(),
        secrets_dir: dir.join("secrets"),
        sessions_dir: dir.join("sessions"),
        session_limits: SessionLimits::default(),
        sweep_after: Duration::from_secs(60),
        boot_deadline: Duration::from_secs(90),
        capacity: Capacity { vcpus: 64, mem_mib: 65_536, disk_mib: 1_000_000, max_instances: 100 },
        isolation: IsolationSettings::NONE,
        interval: Duration::from_secs(30),
        parallel_steps: 4,
        tracer: mvm_telemetry::Tracer::default(),
        clock: Clock::starting_at(at(0)),
    }
}

/// Opens the records, waiting for an earlier owner's writer to let go.
pub(crate) async fn records(dir: &Path) -> Arc<Records> {
    loop {
        match SledStore::open(dir.join("state"), Settings::default()).await {
            Ok(store) => return Records::open(store).await.unwrap(),
            Err(StoreError::InUse { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

impl TestNode {
    pub(crate) async fn start(dir: &Path) -> Self {
        Self::start_with(dir, settings(dir)).await
    }

    pub(crate) async fn start_with(dir: &Path, settings: NodeSettings) -> Self {
        Self::start_on(dir, settings, FakeDriver::open(&dir.join("fake-vms")).unwrap()).await
    }

    /// With a driver that may already be told to fail.
    pub(crate) async fn start_on(dir: &Path, settings: NodeSettings, driver: FakeDriver) -> Self {
        let images = Images::imagined(settings.vouched.clone());
        Self::start_from(dir, settings, driver, images).await
    }

    /// With images that are already open.
    pub(crate) async fn start_from(
        dir: &Path,
        settings: NodeSettings,
        driver: FakeDriver,
        images: Images,
    ) -> Self {
        let (fake, records) = (Arc::new(AnyDriver::Fake(driver.clone())), records(dir).await);
        let (node, handle) = Node::with(&settings, fake, records, images).await;
        let desired = watch::Sender::new(None);
        let stop = CancellationToken::new();
        let task = tokio::spawn(reconcile_task(node, desired.subscribe(), stop.clone()));
        Self { driver, handle, desired, stop, task }
    }

    pub(crate) fn want(&self, desired: DesiredState) {
        self.desired.send_replace(Some(CurrentDocument::local(desired)));
    }

    /// Waits for a status of which `holds` is true.
    pub(crate) async fn until(&self, holds: impl Fn(&NodeStatus) -> bool) -> NodeStatus {
        let mut status = self.handle.status();
        let found = tokio::time::timeout(PATIENCE, status.wait_for(|status| holds(status))).await;
        match found {
            Ok(status) => status.unwrap().clone(),
            Err(_) => panic!("still {:#?}", self.handle.status().borrow().clone()),
        }
    }

    pub(crate) async fn until_counts(&self, running: u32, warm: u32, sleeping: u32) -> NodeStatus {
        self.until(|status| {
            let is = |pool: &mvm_proto::status::PoolStatus| {
                let actual = pool.actual.unwrap_or_default();
                (actual.running, actual.warm, actual.sleeping) == (running, warm, sleeping)
            };
            status.pools.iter().all(is)
                && !status.pools.is_empty()
                && condition(status, "Converged") == "True"
        })
        .await
    }

    pub(crate) fn ids(&self, phase: &str) -> Vec<InstanceId> {
        let instances = self.handle.instances(None);
        let of_phase = instances.iter().filter(|i| i.phase == phase);
        of_phase.map(|i| i.instance_id.parse().unwrap()).collect()
    }

    pub(crate) async fn vms(&self) -> usize {
        self.driver.list().await.unwrap().len()
    }

    /// Ends everything at once, as kill -9 does; only files stay.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

pub(crate) fn condition<'a>(status: &'a NodeStatus, kind: &str) -> &'a str {
    status.conditions.iter().find(|c| c.r#type == kind).map_or("", |c| c.status.as_str())
}

pub(crate) fn reason<'a>(status: &'a NodeStatus, kind: &str) -> &'a str {
    status.conditions.iter().find(|c| c.r#type == kind).map_or("", |c| c.reason.as_str())
}
