//! From a push to the agent's word that the document is durable: real coordinator, real agent, real operator.
//!
//! The floor under it is what no arrangement of these processes can avoid: the same bytes made durable twice, once at
//! each end, and one round trip between them over bare QUIC.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mvm_tests::{Cluster, PATIENCE};

use super::{as_shipped, runtime};
use crate::authority::{Certificates, SERVER_NAME, now};
use crate::document::sized_user_document;
use crate::effort::Effort;
use crate::machine::{Core, pin_process, pin_this_thread};
use crate::row::{Figure, Row, Subject, Unit};
use crate::statistics::Summary;
use crate::{bare, operator};

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
    let log = File::options().create(true).append(true).open(cluster.path().join("floor"))?;
    let (mut pairs, mut stored, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
    runtime()?.block_on(async {
        let mut client = operator::connect(&cluster).await?;
        let endpoint = bare::client()?;
        let config = bare::client_config(&echo.certificates, bare::Protocol::Plain)?;
        let connection = endpoint.connect_with(config, echo.address, SERVER_NAME)?.await?;
        // The first makes the instance and fills every cache.
        operator::push(&mut client, NODE, document.clone()).await?;
        wait_converged(&cluster).await?;
        let begun = Instant::now();
        while pairs.len() < effort.pushes && begun.elapsed() < LIMIT {
            let pushed = operator::push(&mut client, NODE, document.clone()).await?;
            let at = Instant::now();
            for _ in 0..2 {
                (&log).write_all(&document)?;
                log.sync_data()?;
            }
            bare::round_trip(&connection, &document).await?;
            pairs.push((ms(pushed.accepted), ms(at.elapsed())));
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

struct Echo {
    address: std::net::SocketAddr,
    certificates: Arc<Certificates>,
}

/// A bare QUIC server on the coordinator's core.
fn start_echo() -> Result<Echo> {
    let certificates = Arc::new(Certificates::make(now())?);
    let (tell, told) = std::sync::mpsc::channel();
    let theirs = Arc::clone(&certificates);
    std::thread::spawn(move || -> Result<()> {
        pin_this_thread(Core::Server)?;
        runtime()?.block_on(async {
            let server = bare::server(&theirs)?;
            tell.send(server.local_addr()?)?;
            bare::echo_task(server).await;
            Ok(())
        })
    });
    Ok(Echo { address: told.recv().context("the echo server did not start")?, certificates })
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
