//! One-shot: plan and execute until nothing is left to do, then report.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::AnyHost;
use mvm_host::cgroup::CgroupSettings;
use mvm_image::Vouched;
use mvm_planner::{Deferred, Observation, Step};
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, NodeId, Timestamp};
use mvm_vmm::{AnyDriver, DriverKind, VmmSettings, choice};
use serde::Serialize;

use super::assemble::{
    DEFAULT_INTERVAL, DEFAULT_PARALLEL_STEPS, Node, NodeError, NodeSettings, STATE_DIR, adopt, check_bounds,
    open_records, planner_capacity,
};
use super::engine::{Engine, failure, subject_of};
use crate::clock::Clock;
use crate::execute::recover::Recovery;
use crate::instance::records::Records;
use crate::isolation::IsolationSettings;
use crate::node::CurrentDocument;
use crate::node::info;
use crate::node::info::CapacityCaps;
use crate::persist::SessionLimits;

/// Staging takes a few rounds per instance, and a document asks for at most some thousands per pool.
const MAX_ROUNDS: u32 = 20_000;

#[derive(Debug, Clone)]
pub struct OnceSettings {
    pub data_dir: PathBuf,
    /// Absent: whatever node the document is for.
    pub node_id: Option<NodeId>,
    pub driver: DriverKind,
    pub vmm: VmmSettings,
    pub images_dir: PathBuf,
    pub secrets_dir: PathBuf,
    /// Sessions that are kept on this machine.
    pub sessions_dir: PathBuf,
    pub session_limits: SessionLimits,
    /// How long an orphan (a VM or directory without a record) is kept before it is removed.
    pub sweep_after: Duration,
    /// How long a guest may take from boot to ready.
    pub boot_deadline: Duration,
    pub capacity: CapacityCaps,
    pub isolation: IsolationSettings,
    pub groups: CgroupSettings,
    /// Plan one round and touch nothing.
    pub dry_run: bool,
}

/// What one `mvm agent reconcile` did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The node is as the document says. A dry run says whether it already was.
    pub converged: bool,
    pub dry_run: bool,
    pub rounds: u32,
    /// Steps in the order in which they were planned.
    pub steps: Vec<Step>,
    /// What the last plan left undone, and why.
    pub deferred: Vec<Deferred>,
    pub errors: Vec<String>,
}

/// Brings the node into agreement with a local document, once.
pub async fn reconcile_once(
    desired: DesiredState,
    settings: OnceSettings,
    now: Timestamp,
) -> Result<Report, NodeError> {
    if let Some(node) = settings.node_id.as_ref().filter(|node| **node != desired.node_id) {
        return Err(NodeError::OtherNode { document: desired.node_id, node: node.clone() });
    }
    let clock = Clock::starting_at(now);
    let measured = info::measure(&settings.data_dir, settings.driver, &settings.capacity, now);
    if settings.dry_run {
        let observation = peek(&settings, now).await?;
        let plan = mvm_planner::plan_node(&desired, &observation, now);
        let converged = plan.steps.is_empty() && plan.deferred.is_empty();
        let (steps, deferred) = (plan.steps, plan.deferred);
        return Ok(Report { converged, dry_run: true, rounds: 1, steps, deferred, errors: Vec::new() });
    }
    let host = AnyHost::local_with_groups(&settings.data_dir, settings.groups.clone());
    check_bounds(&settings.isolation, settings.driver, &host, None).await?;
    choice::check(settings.driver, &settings.vmm).await?;
    let settings = NodeSettings {
        node_id: desired.node_id.clone(),
        host: Some(host),
        // The document is a local file that root wrote.
        vouched: Vouched::unchecked(),
        capacity: measured.capacity.unwrap_or_default(),
        interval: DEFAULT_INTERVAL,
        parallel_steps: DEFAULT_PARALLEL_STEPS,
        tracer: mvm_telemetry::Tracer::default(),
        clock,
        data_dir: settings.data_dir,
        driver: settings.driver,
        vmm: settings.vmm,
        images_dir: settings.images_dir,
        secrets_dir: settings.secrets_dir,
        sessions_dir: settings.sessions_dir,
        session_limits: settings.session_limits,
        sweep_after: settings.sweep_after,
        boot_deadline: settings.boot_deadline,
        isolation: settings.isolation,
    };
    let (mut node, _) = Node::open(settings).await?;
    let report = run(&mut node.engine, &CurrentDocument::local(desired)).await;
    let executor = &node.engine.executor;
    if let Err(error) = executor.audit.flush().await {
        tracing::warn!(error = %chain(&error), "some actions are missing from the audit log");
    }
    executor.records.close().await;
    Ok(report)
}

/// What a node is like whose agent does not run: from a copy of its records, touching nothing.
pub async fn peek(settings: &OnceSettings, now: Timestamp) -> Result<Observation, NodeError> {
    let measured = info::measure(&settings.data_dir, settings.driver, &settings.capacity, now);
    let capacity = planner_capacity(&measured.capacity.unwrap_or_default());
    let copy = Copy::of(&settings.data_dir.join(STATE_DIR))
        .map_err(|cause| NodeError::DataDir { path: settings.data_dir.clone(), cause })?;
    let driver = Arc::new(AnyDriver::peek(settings.driver, &settings.data_dir, &settings.vmm)?);
    let records = match &copy {
        Some(copy) => open_records(&copy.path).await?,
        None => Records::empty(),
    };
    adopt(&driver, &records, Recovery::ReadOnly, now).await;
    let mut ends = crate::node::observe::Ends::of(&driver);
    let seen = crate::node::observe::observe(&driver, &records, None, capacity, &mut ends, || now).await;
    records.close().await;
    Ok(seen.map_err(|cause| NodeError::Recover(cause.into()))?.observation)
}

async fn run(engine: &mut Engine, current_document: &Arc<CurrentDocument>) -> Report {
    let mut report = Report::default();
    while report.rounds < MAX_ROUNDS {
        report.rounds += 1;
        let plans = engine.plans;
        if let Err(error) = engine.pass(Some(current_document)).await {
            report.errors.push(chain(&error));
            return report;
        }
        let Some(plan) = engine.plan() else { return report };
        report.deferred.clone_from(&plan.deferred);
        if engine.runner.is_idle() && plan.steps.is_empty() && engine.needs.is_working() {
            engine.needs.wait().await;
            continue;
        }
        if engine.runner.is_idle() && (plan.steps.is_empty() || engine.plans == plans) {
            report.converged = engine.is_converged() && report.errors.is_empty();
            return report;
        }
        report.steps.extend(plan.steps.iter().cloned());
        while let Some(done) = engine.next_done().await {
            if let Err(error) = &done.result {
                report.errors.push(format!("{}: {}", subject_of(&done), failure(&done.step, error)));
            }
        }
    }
    report.errors.push(format!("not converged after {MAX_ROUNDS} rounds"));
    report
}

/// The records as they are now, beside the original: a dry run must not even take the original's lock.
#[derive(Debug)]
struct Copy {
    path: PathBuf,
}

impl Copy {
    fn of(original: &Path) -> std::io::Result<Option<Self>> {
        if !original.exists() {
            return Ok(None);
        }
        let name = format!("mvm-dry-run-{:016x}", fastrand::u64(..));
        let copy = Self { path: std::env::temp_dir().join(name) };
        mvm_pki::files::create_private_dir(&copy.path)?;
        copy_dir(original, &copy.path)?;
        Ok(Some(copy))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // A copy that can't be removed holds nothing that the original does not.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn copy_dir(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            mvm_pki::files::create_private_dir(&target)?;
            copy_dir(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
