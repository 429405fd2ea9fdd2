//! A coordinator that holds many nodes: memory for each, CPU of holding them, and one document to all of them.
//!
//! The coordinator is a real process. The nodes are real sessions with certificates of their own, all played by this
//! process: they greet, beat, and say `accepted` to every document without looking at it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::stream::{StreamExt as _, TryStreamExt as _};
use mvm_client::ControlClient;
use mvm_tests::Cluster;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::{as_shipped, fanout, runtime};
use crate::document::sized_user_document;
use crate::effort::Effort;
use crate::fake_node::{FakeNode, Heard, enrol_all};
use crate::machine::{Core, cpu_time, pin_process, pin_this_thread, resident};
use crate::operator;
use crate::row::{Goal, Row, Subject, Unit};
use crate::statistics::Summary;

const MEMORY_GOAL: Goal = Goal::FigureBelow(60.0);
const DOCUMENT_BYTES: usize = 4 << 10;
/// Sessions dialled at once: below the number at which addresses must be proven first.
const DIAL_WIDTH: usize = 32;
/// Pushes in flight at once on the operator's one connection.
const PUSH_WIDTH: usize = 128;
const DIAL_LIMIT: Duration = Duration::from_secs(120);

/// One fresh coordinator's figures.
struct Look {
    kib_per_session: f64,
    idle_percent: f64,
    dial_cpu_us: f64,
    fanout_ms: Vec<f64>,
    fanout_cpu_us: Vec<f64>,
    /// Of declared changes, beside NATS.
    declared: Vec<Row>,
}

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let (few, many) = effort.sessions;
    let mut cluster = Cluster::start_with(as_shipped());
    let nodes = enrol_all(&mut cluster, many)?;
    let mut looks = Vec::new();
    for start in 1..=effort.fresh_starts {
        // Only the last is given documents: the next would send them again to every node that joins.
        let fanouts = if start == effort.fresh_starts { effort.fanouts } else { 0 };
        // Fresh: an allocator that has seen enrolments would hide what sessions cost.
        cluster.kill_coordinator();
        cluster.start_coordinator();
        let looked =
            std::thread::scope(|scope| scope.spawn(|| look(effort, fanouts, &cluster, &nodes)).join());
        looks.push(looked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    }
    let all = |part: fn(&Look) -> f64| -> Vec<f64> { looks.iter().map(part).collect() };
    let median = |part| Summary::of(&all(part)).map_or(0.0, |summary| summary.median);
    let memory = Row::of(
        Subject::Sessions,
        format!("coordinator, memory per session, {few} to {many}"),
        &all(|look| look.kib_per_session),
        Unit::Kibibytes,
    );
    let walls: Vec<f64> = looks.iter().flat_map(|look| look.fanout_ms.iter().copied()).collect();
    let cpus: Vec<f64> = looks.iter().flat_map(|look| look.fanout_cpu_us.iter().copied()).collect();
    let declared: Vec<Row> = looks.iter().flat_map(|look| look.declared.clone()).collect();
    let mut rows = vec![
        memory.goal(MEMORY_GOAL).note(format!(
            "holding {many} idle ones: {:.2} % of a core; joining: {:.0} us of CPU each",
            median(|look| look.idle_percent),
            median(|look| look.dial_cpu_us),
        )),
        Row::of(Subject::Fanout, format!("{many} pushes of 4 KiB, last ack"), &walls, Unit::Milliseconds).note(
            "a call for each node: validated, numbered, signed, made durable, sent, acknowledged; nodes verify nothing",
        ),
        Row::of(Subject::Fanout, format!("{many} pushes of 4 KiB, coordinator's CPU each"), &cpus, Unit::Microseconds),
    ];
    rows.extend(declared);
    Ok(rows)
}

/// In a thread of its own, because it binds itself to a core and the next coordinator must not inherit that.
fn look(effort: &Effort, fanouts: usize, cluster: &Cluster, nodes: &[FakeNode]) -> Result<Look> {
    let coordinator = cluster.coordinator.as_ref().context("the coordinator runs")?.pid();
    pin_process(coordinator, Core::Server)?;
    pin_this_thread(Core::Load)?;
    let (few, many) = effort.sessions;
    runtime()?.block_on(async {
        let mut client = operator::connect(cluster).await?;
        let (told, heard) = unbounded_channel();
        let told = (fanouts > 0).then_some(told);
        dial(cluster, &nodes[..few], told.clone()).await?;
        tokio::time::sleep(effort.settle).await;
        let before = resident(coordinator)?.all_kib;

        let cpu_before = cpu_time(coordinator)?;
        dial(cluster, &nodes[few..many], told).await?;
        let dial_cpu = cpu_time(coordinator)?.saturating_sub(cpu_before);
        tokio::time::sleep(effort.settle).await;
        let after = resident(coordinator)?.all_kib;

        let cpu_before = cpu_time(coordinator)?;
        tokio::time::sleep(effort.watch).await;
        let idle = cpu_time(coordinator)?.saturating_sub(cpu_before);

        let (mut fanout_ms, mut fanout_cpu_us) = (Vec::new(), Vec::new());
        for _ in 0..fanouts {
            let (wall, cpu) = fan_out(coordinator, &mut client, &nodes[..many]).await?;
            fanout_ms.push(wall.as_secs_f64() * 1e3);
            fanout_cpu_us.push(cpu.as_secs_f64() * 1e6 / many as f64);
        }
        let declared = match fanouts {
            0 => Vec::new(),
            _ => fanout::declared(fanouts, cluster, coordinator, &nodes[..many], heard)
                .await
                .unwrap_or_else(|error| vec![Row::failed(Subject::Fanout, format!("{error:#}"))]),
        };
        let dialled = (many - few) as f64;
        Ok(Look {
            kib_per_session: (after - before) / dialled,
            idle_percent: 100.0 * idle.as_secs_f64() / effort.watch.as_secs_f64(),
            dial_cpu_us: dial_cpu.as_secs_f64() * 1e6 / dialled,
            fanout_ms,
            fanout_cpu_us,
            declared,
        })
    })
}

/// Opens the sessions and leaves each with a task that plays its node until this runtime ends.
pub(super) async fn dial(
    cluster: &Cluster,
    nodes: &[FakeNode],
    heard: Option<UnboundedSender<Heard>>,
) -> Result<()> {
    let dialled = FakeNode::dialler(cluster)?;
    let all = futures::stream::iter(nodes.iter().map(|node| dialled.join(node, heard.clone())))
        .buffer_unordered(DIAL_WIDTH)
        .try_for_each(|()| std::future::ready(Ok(())));
    tokio::time::timeout(DIAL_LIMIT, all).await.context("sessions take too long")?
}

async fn fan_out(
    coordinator: u32,
    client: &mut ControlClient,
    nodes: &[FakeNode],
) -> Result<(Duration, Duration)> {
    let documents = nodes
        .iter()
        .map(|node| {
            let name = node.id.as_str();
            Ok((name, serde_json::to_vec(&sized_user_document(name, DOCUMENT_BYTES)?)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let cpu_before = cpu_time(coordinator)?;
    let begun = Instant::now();
    futures::stream::iter(documents)
        .map(|(name, document)| {
            let mut client = client.clone();
            async move { operator::push(&mut client, name, document).await.map(drop) }
        })
        .buffer_unordered(PUSH_WIDTH)
        .try_for_each(|()| std::future::ready(Ok(())))
        .await?;
    Ok((begun.elapsed(), cpu_time(coordinator)?.saturating_sub(cpu_before)))
}
