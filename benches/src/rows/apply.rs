//! From an applied pool to its nodes: until ten real agents have made it true, and until it has reached its nodes in a fleet
//! of a thousand sessions.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mvm_client::{ApplyOptions, Name, Objects};
use mvm_proto::object::{Object, kind_named};
use mvm_tests::Cluster;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::floor::{Floor, start_echo};
use super::{as_shipped, fleet, runtime};
use crate::effort::Effort;
use crate::fake_node::{Heard, enrol_all};
use crate::machine::{Core, pin_process, pin_this_thread};
use crate::operator;
use crate::row::{Figure, Goal, Row, Subject, Unit};
use crate::statistics::Summary;

/// The nodes that the pool is on.
const NODES: u32 = 10;
/// What a small change to a pool costs more than its floor.
const CONVERGED_GOAL: Goal = Goal::RatioAtMost(3.0);
/// Milliseconds.
const REACHED_GOAL: Goal = Goal::FigureBelow(100.0);
/// For one change; a healthy machine needs milliseconds.
const LIMIT: Duration = Duration::from_secs(30);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let mut rows = converged(effort)?;
    let reached = std::thread::scope(|scope| scope.spawn(|| reached(effort)).join());
    rows.push(reached.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    Ok(rows)
}

/// One instance more on each of the pool's nodes, until the pool says that all of them run.
fn converged(effort: &Effort) -> Result<Vec<Row>> {
    let mut cluster = Cluster::start_with(as_shipped());
    for number in 0..NODES {
        cluster.join(&format!("node-{number}"));
    }
    let coordinator = cluster.coordinator.as_ref().context("the coordinator runs")?.pid();
    pin_process(coordinator, Core::Server)?;
    let echo = start_echo()?;
    pin_this_thread(Core::Load)?;
    runtime()?.block_on(async {
        let mut objects = operator::objects(&cluster).await?;
        let floor = Floor::connect(&echo, cluster.path()).await?;
        for number in 0..NODES {
            apply(&mut objects, &roomy(&format!("node-{number}"))).await?;
        }
        apply(&mut objects, &tenant()).await?;
        apply_and_wait(&mut objects, NODES).await?;
        let (mut pairs, mut stored) = (Vec::new(), Vec::new());
        for round in 0..u32::try_from(effort.applies)? {
            let (until_stored, until_ready) = apply_and_wait(&mut objects, NODES * (round + 2)).await?;
            let floor = floor.take(&serde_json::to_vec(&pool(NODES))?, 2).await?;
            pairs.push((ms(until_ready), ms(floor)));
            stored.push(ms(until_stored));
        }
        let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
        let stored = Summary::of(&stored).context("nothing was applied")?.median;
        let name = format!("pool applied until its {NODES} nodes run one more each, p50");
        Ok(vec![
            Row::of(Subject::Apply, name, &ours, Unit::Milliseconds)
                .beside("2 x fdatasync + 2 QUIC round trips", &pairs)
                .goal(CONVERGED_GOAL)
                .note(format!("real agents, fake driver; of it until the object is stored: {stored:.1} ms")),
        ])
    })
}

/// A change to a pool that is on ten of many nodes, until each of the ten has its document.
fn reached(effort: &Effort) -> Result<Row> {
    let (_, many) = effort.sessions;
    let mut cluster = Cluster::start_with(as_shipped());
    let nodes = enrol_all(&mut cluster, many)?;
    let coordinator = cluster.coordinator.as_ref().context("the coordinator runs")?.pid();
    pin_process(coordinator, Core::Server)?;
    pin_this_thread(Core::Load)?;
    let mut times = Vec::new();
    runtime()?.block_on(async {
        let (told, mut heard) = unbounded_channel();
        fleet::dial(&cluster, &nodes, Some(told)).await?;
        let mut objects = operator::objects(&cluster).await?;
        apply(&mut objects, &tenant()).await?;
        let mut pool = pool(NODES);
        for round in 0..=effort.applies {
            pool["spec"]["sleep_policy"] = json!({ "warm_after_seconds": 600 + round });
            let begun = Instant::now();
            apply(&mut objects, &pool).await?;
            let reached = documents(&mut heard, begun).await?;
            // The first makes the placement and fills every cache.
            if round > 0 {
                times.extend(reached);
            }
        }
        anyhow::Ok(())
    })?;
    let summary = Summary::of(&times).context("nothing was applied")?;
    let name = format!("pool changed until its {NODES} of {many} nodes have it, p99");
    let figure = Figure { value: summary.p99, unit: Unit::Milliseconds };
    Ok(Row::single(Subject::Apply, name, Some(figure)).goal(REACHED_GOAL).note(format!(
        "p50 {:.1} ms, {} documents; real QUIC sessions, nodes verify nothing",
        summary.median, summary.samples
    )))
}

/// Milliseconds until each of the pool's nodes had its document.
async fn documents(heard: &mut UnboundedReceiver<Heard>, begun: Instant) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    while times.len() < NODES as usize {
        let next = tokio::time::timeout(LIMIT, heard.recv()).await.context("a document did not come")?;
        let heard = next.context("all sessions ended")?;
        times.push(ms(heard.at.duration_since(begun)));
    }
    Ok(times)
}

/// Declares so many running, and waits until the pool says so. How long until it was stored, and until then.
async fn apply_and_wait(objects: &mut Objects, running: u32) -> Result<(Duration, Duration)> {
    let name = Name::of(kind_named("pools").map_err(anyhow::Error::msg)?, Some("bench"), "web");
    let watching = objects.clone();
    let begun = Instant::now();
    let applied = apply(objects, &pool(running)).await?;
    let stored = begun.elapsed();
    let generation = applied.metadata.generation;
    let done = |object: Option<&Object>| object.is_some_and(|object| is_ready(object, generation));
    let waited = tokio::time::timeout(LIMIT, watching.wait_for(&name, done)).await;
    waited.with_context(|| format!("{running} do not run"))??;
    Ok((stored, begun.elapsed()))
}

fn is_ready(object: &Object, generation: u64) -> bool {
    let ready =
        |condition: &mvm_proto::status::Condition| condition.r#type == "Ready" && condition.status == "True";
    object.status.get("observed_generation").and_then(Value::as_u64) >= Some(generation)
        && object.conditions().iter().any(ready)
}

pub(super) async fn apply(objects: &mut Objects, declared: &Value) -> Result<Object> {
    let applied = objects.apply(declared, ApplyOptions::default()).await?;
    ensure!(applied.object.metadata.generation > 0, "what is applied has a generation");
    Ok(applied.object)
}

/// Room for all rounds on one machine.
fn roomy(node: &str) -> Value {
    json!({
        "api_version": "mvm/v1", "kind": "Node", "metadata": { "name": node },
        "spec": { "overcommit": { "vcpus": 100, "mem": 10 } },
    })
}

fn tenant() -> Value {
    json!({
        "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "bench" },
        "spec": { "quotas": { "max_vcpus": 10_000, "max_mem_mib": 10_000_000, "max_running": 10_000, "max_instances_per_pool": 10_000 } },
    })
}

fn pool(running: u32) -> Value {
    json!({
        "api_version": "mvm/v1", "kind": "Pool", "metadata": { "tenant": "bench", "name": "web" },
        "spec": {
            "image": { "ref": "builtin:busybox" },
            "resources": { "vcpus": 1, "mem_mib": 32 },
            "counts": { "running": running },
            "placement": { "spread": { "by": "node", "max_skew": 1 }, "max_per_node": running.div_ceil(NODES) },
        },
    })
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
