//! From a push to the agent's word that the document is durable: real coordinator, real agent, real operator.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mvm_tests::{Cluster, PATIENCE};

use super::floor::{Floor, start_echo};
use super::{as_shipped, runtime};
use crate::document::sized_user_document;
use crate::effort::Effort;
use crate::machine::{Core, pin_process, pin_this_thread};
use crate::operator;
use crate::row::{Figure, Row, Subject, Unit};
use crate::statistics::Summary;

const NODE: &str = "node-a";
const DOCUMENT_BYTES: usize = 1 << 10;
/// In all: a machine on which the pushes take longer can't measure them.
const LIMIT: Duration = Duration::from_secs(120);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let mut cluster = Cluster::start_with(as_shipped());
    cluster.join(NODE);
    let coordinator = cluster.coordinator.as_ref().context("the coordinator runs")?.pid();
    let agent = cluster.agents.get(NODE).context("the agent runs")?.process.pid();
    pin_process(coordinator, Core::Server)?;
    pin_process(agent, Core::Load)?;
    let echo = start_echo()?;
    pin_this_thread(Core::Load)?;

    let document = serde_json::to_vec(&sized_user_document(NODE, DOCUMENT_BYTES)?)?;
    let (mut pairs, mut stored, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
    runtime()?.block_on(async {
        let mut client = operator::connect(&cluster).await?;
        let floor = Floor::connect(&echo, cluster.path()).await?;
        // The first makes the instance and fills every cache.
        operator::push(&mut client, NODE, document.clone()).await?;
        wait_converged(&cluster).await?;
        let begun = Instant::now();
        while pairs.len() < effort.pushes && begun.elapsed() < LIMIT {
            let pushed = operator::push(&mut client, NODE, document.clone()).await?;
            pairs.push((ms(pushed.accepted), ms(floor.take(&document, 1).await?)));
            let at = Instant::now();
            mvm_pki::files::write_private(cluster.path().join("replaced"), &document)?;
            replaced.push(ms(at.elapsed()));
            stored.push(ms(pushed.stored));
        }
        anyhow::Ok(())
    })?;
    let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    let tail = Summary::of(&ours).context("nothing was pushed")?.p99;
    let stored = Summary::of(&stored).context("nothing was pushed")?.median;
    let replaced = Summary::of(&replaced).context("nothing was pushed")?.median;
    let floors: Vec<f64> = pairs.iter().map(|(_, floor)| *floor).collect();
    let floor_tail = Summary::of(&floors).context("nothing was pushed")?.p99;
    let floor = "2 x fdatasync + QUIC round trip";
    let p99 = Row::single(
        Subject::Push,
        "push to accepted, 1 KiB, p99",
        Some(Figure { value: tail, unit: Unit::Milliseconds }),
    );
    Ok(vec![
        Row::of(Subject::Push, "push to accepted, 1 KiB, p50", &ours, Unit::Milliseconds)
            .beside(floor, &pairs)
            .note(format!("of it until stored at the coordinator: {stored:.1} ms"))
            .note(format!(
                "replacing a file of that size durably, as the node's ledger does, alone: {replaced:.1} ms"
            )),
        p99.beside(floor, &[(tail, floor_tail)]),
    ])
}

async fn wait_converged(cluster: &Cluster) -> Result<()> {
    let converged = || {
        cluster.node(NODE).is_some_and(|node| {
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions
                .iter()
                .any(|condition| condition["type"] == "Converged" && condition["status"] == "True")
        })
    };
    let begun = Instant::now();
    // A node that never converges is another suite's finding; pushes can be timed all the same.
    while !converged() && begun.elapsed() < PATIENCE / 3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
