//! How often the planner is asked where nothing changed.

use std::time::Duration;

use anyhow::{Context, Result};
use mvm_agent::clock::Clock;
use mvm_agent::isolation::IsolationSettings;
use mvm_agent::node::CurrentDocument;
use mvm_agent::node::assemble::Node;
use mvm_agent::node::assemble::NodeSettings;
use mvm_agent::node::handle::NodeHandle;
use mvm_agent::node::reconcile_task::reconcile_task;
use mvm_agent::persist::SessionLimits;
use mvm_proto::DesiredState;
use mvm_proto::status::{Capacity, ConditionKind};
use mvm_telemetry::Tracer;
use mvm_vmm::DriverKind;
use mvm_vmm::VmmSettings;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::runtime;
use crate::document::busy_user_document;
use crate::row::{Figure, Goal, Row, Subject, Unit};

const NODE: &str = "node-a";
const INSTANCES: usize = 100;
const PASSES: u64 = 1000;
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn measure() -> Result<Row> {
    let dir = tempfile::tempdir()?;
    let settings = NodeSettings {
        node_id: NODE.parse()?,
        data_dir: dir.path().to_owned(),
        host: None,
        driver: DriverKind::Fake,
        vmm: VmmSettings::default(),
        images_dir: dir.path().join("images"),
        vouched: mvm_image::Vouched::unchecked(),
        secrets_dir: dir.path().join("secrets"),
        sessions_dir: dir.path().join("sessions"),
        session_limits: SessionLimits::default(),
        sweep_after: Duration::from_secs(60),
        boot_deadline: Duration::from_secs(90),
        capacity: Capacity { vcpus: 1000, mem_mib: 1 << 20, disk_mib: 1 << 30, max_instances: 1000 },
        isolation: IsolationSettings::NONE,
        interval: Duration::from_secs(3600),
        parallel_steps: 8,
        tracer: Tracer::default(),
        clock: Clock::system(),
    };
    let text = busy_user_document(NODE, INSTANCES).to_string();
    let desired = DesiredState::parse(text.as_bytes()).context("the bench's own document is not valid")?;
    let plans = runtime()?.block_on(async {
        let (node, handle) = Node::open(settings).await?;
        let documents = watch::Sender::new(Some(CurrentDocument::local(desired)));
        let stop = CancellationToken::new();
        let task = tokio::spawn(reconcile_task(node, documents.subscribe(), stop.clone()));
        let plans = tokio::time::timeout(PATIENCE, quiet_plans(&handle)).await;
        stop.cancel();
        task.await?;
        plans.context("the passes took too long")?
    })?;
    let figure = Figure { value: plans as f64, unit: Unit::Times };
    let name = format!("planner asked in {PASSES} passes where nothing changed");
    Ok(Row::single(Subject::Planner, name, Some(figure))
        .goal(Goal::FigureBelow(1.0))
        .note(format!("{INSTANCES} instances at rest on the fake driver; every pass looked at all of them")))
}

/// Waits for rest, then asks for passes one after the other.
async fn quiet_plans(handle: &NodeHandle) -> Result<u64> {
    let mut status = handle.status();
    let converged = |status: &mvm_proto::status::NodeStatus| {
        status.conditions.iter().any(|c| c.is(ConditionKind::Converged) && c.holds())
    };
    status.wait_for(|status| converged(status)).await?;
    let mut passes = handle.passes();
    let begun = *passes.borrow();
    for done in 1..=PASSES {
        handle.trigger();
        passes.wait_for(|pass| pass.count >= begun.count + done).await?;
    }
    let plans = passes.borrow().plans - begun.plans;
    Ok(plans)
}
