//! One declared change that makes a new document for every node of a large fleet, beside NATS.
//!
//! The coordinator's work is all of it: the change is applied, stored, placed; every node's document is rendered, numbered, signed,
//! made durable, sent, and acknowledged. NATS is given finished bytes, which its publisher makes durable as often; what signing
//! costs is therefore ours alone, and stays in the figure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aws_lc_rs::signature::Ed25519KeyPair;
use bytes::Bytes;
use futures::stream::{StreamExt as _, TryStreamExt as _};
use mvm_client::{ControlClient, Objects};
use mvm_proto::wire::control::v1::GetNodeRequest;
use mvm_tests::Cluster;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::apply::apply;
use crate::authority::{Certificates, now};
use crate::fake_node::{FakeNode, Heard};
use crate::machine::cpu_time;
use crate::nats::{Nats, Publisher, Taken};
use crate::operator;
use crate::row::{Goal, Row, Subject, Unit};
use crate::statistics::Summary;

/// Text in the pool's health check, so that a document has 4 KiB. What is checked holds on all nodes at once; another environment
/// would be a revision, which goes over them in turn.
const TEXT_BYTES: usize = 2700;
const NATS_LARGE: usize = 4096;
const NATS_SMALL: usize = 256;
/// Applies in flight when nodes are handed over.
const WIDTH: usize = 64;
const LIMIT: Duration = Duration::from_secs(60);
/// Work that follows the last ack counts too: statuses, offers.
const AFTERMATH: Duration = Duration::from_millis(250);
/// Without documents for so long, the fleet is at rest.
const QUIET: Duration = Duration::from_secs(1);

const WALL_GOAL: Goal = Goal::RatioAtMost(0.8);
const CPU_GOAL: Goal = Goal::RatioAtMost(0.6);
const SMALL_GOAL: Goal = Goal::RatioAtMost(0.5);

struct Fleet<'a> {
    objects: Objects,
    client: ControlClient,
    heard: UnboundedReceiver<Heard>,
    nodes: usize,
    coordinator: u32,
    pool: Pool,
    cluster: &'a Cluster,
}

/// One instance on each node, or two.
struct Pool {
    running: usize,
    text: String,
}

/// One declared change, until the last node acknowledged its document.
#[derive(Debug, Clone, Copy)]
struct Change {
    wall: Duration,
    cpu: Duration,
    documents: usize,
}

pub(super) async fn declared(
    rounds: usize,
    cluster: &Cluster,
    coordinator: u32,
    nodes: &[FakeNode],
    heard: UnboundedReceiver<Heard>,
) -> Result<Vec<Row>> {
    let certificates = Certificates::make(now())?;
    let nats = Nats::start(&certificates)?;
    let mut publisher = match &nats {
        Some(nats) => {
            nats.subscribe(nodes.len()).await?;
            Some(nats.publisher(nodes.len())?)
        }
        None => None,
    };
    let pool = Pool { running: nodes.len(), text: text(TEXT_BYTES) };
    let (objects, client) = (operator::objects(cluster).await?, operator::connect(cluster).await?);
    let mut fleet = Fleet { objects, client, heard, nodes: nodes.len(), coordinator, pool, cluster };
    fleet.place(nodes).await?;
    let (mut large, mut small) = (Vec::new(), Vec::new());
    // The first of each fills caches and buffers on both sides.
    for round in 0..=rounds {
        fleet.pool.text = text(TEXT_BYTES);
        let ours = fleet.change().await?;
        let theirs = publish(&mut publisher, NATS_LARGE).await?;
        fleet.pool.running = nodes.len() * (1 + (round + 1) % 2);
        let ours_small = fleet.change().await?;
        let theirs_small = publish(&mut publisher, NATS_SMALL).await?;
        if round > 0 {
            large.push((ours, theirs));
            small.push((ours_small, theirs_small));
        }
    }
    Ok(rows(&large, &small, nodes.len()))
}

async fn publish(publisher: &mut Option<Publisher>, bytes: usize) -> Result<Option<Taken>> {
    match publisher {
        Some(publisher) => publisher.fan_out(Bytes::from(text(bytes))).await.map(Some),
        None => Ok(None),
    }
}

fn text(bytes: usize) -> String {
    std::iter::repeat_with(fastrand::alphanumeric).take(bytes).collect()
}

impl Fleet<'_> {
    /// One instance on each node. The nodes may have had documents by push.
    async fn place(&mut self, nodes: &[FakeNode]) -> Result<()> {
        let handed_over = futures::stream::iter(nodes.iter().map(|node| {
            let mut objects = self.objects.clone();
            async move {
                let node = json!({
                    "api_version": "mvm/v1", "kind": "Node", "metadata": { "name": node.id.as_str() },
                    "spec": { "managed_by": "objects" },
                });
                apply(&mut objects, &node).await
            }
        }));
        handed_over.buffer_unordered(WIDTH).try_collect::<Vec<_>>().await?;
        apply(&mut self.objects, &tenant()).await?;
        apply(&mut self.objects, &self.pool.object()).await?;
        let mut newest: BTreeMap<String, Heard> = BTreeMap::new();
        let begun = Instant::now();
        while let Ok(heard) = tokio::time::timeout(QUIET, self.heard.recv()).await {
            let heard = heard.context("all sessions ended")?;
            newest.insert(heard.node.to_string(), heard);
            ensure!(begun.elapsed() < LIMIT, "documents do not end");
        }
        ensure!(newest.len() == self.nodes, "{} of {} nodes have a document", newest.len(), self.nodes);
        Ok(())
    }

    async fn change(&mut self) -> Result<Change> {
        while self.heard.try_recv().is_ok() {}
        let cpu_before = cpu_time(self.coordinator)?;
        let begun = Instant::now();
        apply(&mut self.objects, &self.pool.object()).await?;
        let mut last = None;
        for _ in 0..self.nodes {
            let next = tokio::time::timeout(LIMIT, self.heard.recv()).await;
            let next = next.with_context(|| format!("a document did not come: {}", self.cluster.url()))?;
            last = Some(next.context("all sessions ended")?);
        }
        let last = last.context("there are nodes")?;
        self.acknowledged(&last).await?;
        let wall = begun.elapsed();
        tokio::time::sleep(AFTERMATH).await;
        let mut documents = self.nodes;
        while self.heard.try_recv().is_ok() {
            documents += 1;
        }
        Ok(Change { wall, cpu: cpu_time(self.coordinator)?.saturating_sub(cpu_before), documents })
    }

    /// Until the coordinator has heard the ack that was sent last.
    async fn acknowledged(&mut self, last: &Heard) -> Result<()> {
        let begun = Instant::now();
        loop {
            let request = GetNodeRequest { node_id: last.node.to_string() };
            let node = self.client.get_node(request).await?.into_inner();
            if node.status.and_then(|status| status.accepted) == last.mark {
                return Ok(());
            }
            ensure!(begun.elapsed() < LIMIT, "the last ack was not heard");
        }
    }
}

impl Pool {
    fn object(&self) -> Value {
        json!({
            "api_version": "mvm/v1", "kind": "Pool", "metadata": { "tenant": "bench", "name": "everywhere" },
            "spec": {
                "image": { "ref": "builtin:busybox" },
                "resources": { "vcpus": 1, "mem_mib": 32 },
                "counts": { "running": self.running },
                "placement": { "spread": { "by": "node", "max_skew": 1 }, "max_per_node": 2 },
                "health": { "exec": { "command": ["/bin/check", self.text] } },
            },
        })
    }
}

fn tenant() -> Value {
    json!({
        "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "bench" },
        "spec": {
            "quotas": {
                "max_vcpus": 100_000, "max_mem_mib": 10_000_000, "max_running": 100_000,
                "max_instances_per_pool": 100_000,
            },
            "network": { "subnet": "10.200.0.0/16" },
        },
    })
}

fn rows(large: &[(Change, Option<Taken>)], small: &[(Change, Option<Taken>)], nodes: usize) -> Vec<Row> {
    let each = |time: Duration| time.as_secs_f64() * 1e6 / nodes as f64;
    let wall = |name: String, pairs: &[(Change, Option<Taken>)]| {
        let ours: Vec<f64> = pairs.iter().map(|(ours, _)| ms(ours.wall)).collect();
        let both: Vec<(f64, f64)> =
            pairs.iter().filter_map(|(ours, nats)| Some((ms(ours.wall), ms(nats.as_ref()?.wall)))).collect();
        beside(Row::of(Subject::Fanout, name, &ours, Unit::Milliseconds), &both)
    };
    let cpu = |name: String, pairs: &[(Change, Option<Taken>)]| {
        let ours: Vec<f64> = pairs.iter().map(|(ours, _)| each(ours.cpu)).collect();
        let both: Vec<(f64, f64)> = pairs
            .iter()
            .filter_map(|(ours, nats)| Some((each(ours.cpu), each(nats.as_ref()?.server_cpu))))
            .collect();
        let publisher: Vec<f64> =
            pairs.iter().filter_map(|(_, nats)| Some(each(nats.as_ref()?.publisher_cpu))).collect();
        let row = beside(Row::of(Subject::Fanout, name, &ours, Unit::Microseconds), &both);
        match Summary::of(&publisher) {
            Some(publisher) => row.note(format!(
                "NATS' server alone; its publisher, which signs nothing, takes {:.0} us more",
                publisher.median
            )),
            None => row,
        }
    };
    let documents: usize = large.iter().chain(small).map(|(ours, _)| ours.documents).sum();
    let changes = (large.len() + small.len()).max(1);
    vec![
        wall(format!("4 KiB declared on {nodes} nodes, last ack"), large)
            .goal(WALL_GOAL)
            .note("one applied change: stored, placed; for each node rendered, signed, durable, sent, acknowledged")
            .note(format!("{:.2} documents for each node and change", documents as f64 / (changes * nodes) as f64)),
        cpu(format!("4 KiB declared on {nodes} nodes, coordinator's CPU each"), large)
            .goal(CPU_GOAL)
            .note(format!("one Ed25519 signature, which a batch shares, takes {:.0} us", signature_us())),
        wall(format!("counts changed in 4 KiB on {nodes} nodes, last ack"), small),
        cpu(format!("counts changed in 4 KiB on {nodes} nodes, coordinator's CPU each"), small).goal(SMALL_GOAL),
    ]
}

fn beside(row: Row, pairs: &[(f64, f64)]) -> Row {
    if pairs.is_empty() {
        return row.note("nats-server is not installed: scripts/setup --bench");
    }
    row.beside("NATS, acked", pairs)
}

/// What one signature of a document of this size takes, in this process.
fn signature_us() -> f64 {
    const TIMES: u32 = 200;
    let Ok(pair) = Ed25519KeyPair::generate() else { return f64::NAN };
    let document = [b'x'; NATS_LARGE];
    let begun = Instant::now();
    for _ in 0..TIMES {
        std::hint::black_box(pair.sign(std::hint::black_box(&document)));
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
