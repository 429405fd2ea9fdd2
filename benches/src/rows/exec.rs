//! Programs in a guest through the coordinator: a round trip beside the guest's bare channel, and a document beside output
//! that never ends.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mvm_client::Channel;
use mvm_client::{Exec, ExecEvent};
use mvm_image::Store;
use mvm_proto::document::Resources;
use mvm_proto::wire::tunnel::v1::{self as wire, Open};
use mvm_proto::{Digest, InstanceId};
use mvm_tests::{Cluster, PATIENCE, path_text, small_pool, wait_for};
use mvm_vmm::conformance::Client;
use mvm_vmm::qemu::Accelerator;
use mvm_vmm::{Driver as _, QemuDriver, QemuSettings, VmSpec, VmmSettings};

use super::{as_shipped, runtime};
use crate::document::sized_user_document;
use crate::effort::Effort;
use crate::operator;
use crate::row::{Figure, Goal, Row, Subject, Unit};
use crate::statistics::Summary;

const NODE: &str = "node-a";
const POOL: (&str, &str) = ("acme", "workers");
/// A boot on emulation.
const BOOTS_WITHIN: Duration = Duration::from_secs(120);
/// Times through the coordinator / on the bare channel.
const ROUND_TRIP_GOAL: Goal = Goal::RatioAtMost(2.0);
/// Documents beside output that flows / beside the same program with its output thrown away.
const PUSH_GOAL: Goal = Goal::RatioAtMost(1.2);
/// Runs in each half of a pair.
const ROUNDS: usize = 10;
/// Output that must not stay anywhere.
const MEMORY_BYTES: u64 = 256 << 20;
/// Of another node, so that what is pushed changes nothing where the guest runs.
const OTHER_NODE: &str = "node-b";
const DOCUMENT_BYTES: usize = 1 << 10;

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/images");
    let mut cluster = Cluster::start_with(as_shipped());
    cluster.join_with_microvms(NODE);
    cluster.join(OTHER_NODE);
    let document = cluster.file("pool.json", &small_pool(1, 0, 0).to_string());
    cluster.mvm_ok(&["push", "-f", path_text(&document), "--node", NODE, "--timeout", "2m"]);
    wait_for("the guest to run", BOOTS_WITHIN, || {
        let listed = cluster.mvm_json(&["instance", "list"]);
        (listed[0]["phase"] == "running").then_some(())
    });
    let bare = Bare::boot(&images)?;
    runtime()?.block_on(async {
        let channel = operator::open(&cluster).await?;
        let round_trip = round_trips(effort, &channel, &bare).await?;
        let push = pushes(effort, &cluster, &channel).await?;
        let memory = memory(&cluster, &channel).await?;
        Ok(vec![round_trip, push, memory])
    })
}

async fn round_trips(effort: &Effort, channel: &Channel, bare: &Bare) -> Result<Row> {
    let mut client = bare.connect().await?;
    // The first dials the tunnel and fills every cache.
    run(channel, &["true"]).await?;
    client.run(&["true"]).await.map_err(anyhow::Error::msg)?;
    let mut pairs = Vec::new();
    for _ in 0..effort.pairs {
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            run(channel, &["true"]).await?;
        }
        let ours = each(begun);
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            client.run(&["true"]).await.map_err(anyhow::Error::msg)?;
        }
        pairs.push((ours, each(begun)));
    }
    let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    Ok(Row::of(Subject::Exec, "`true` in a guest through the coordinator", &ours, Unit::Milliseconds)
        .beside("the bare channel of a guest like it", &pairs)
        .goal(ROUND_TRIP_GOAL)
        .note(format!("{ROUNDS} in every half of a pair, one after the other; each is in two audit logs")))
}

/// A document beside output that flows, and beside the same work without output.
async fn pushes(effort: &Effort, cluster: &Cluster, channel: &Channel) -> Result<Row> {
    let document = serde_json::to_vec(&sized_user_document(OTHER_NODE, DOCUMENT_BYTES)?)?;
    let mut client = operator::connect(cluster).await?;
    operator::push(&mut client, OTHER_NODE, document.clone()).await?;
    let mut pairs = Vec::new();
    for _ in 0..effort.pairs {
        let mut half = [0.0; 2];
        for (at, script) in ["cat /dev/zero", "cat /dev/zero > /dev/null"].into_iter().enumerate() {
            let mut exec = Exec::open(channel.clone(), open(&["sh", "-c", script])).await?;
            let begun_with = exec.next().await?;
            ensure!(matches!(begun_with, ExecEvent::Opened(_)), "{begun_with:?}");
            let input = exec.input();
            let reading = tokio::spawn(async move {
                while !matches!(exec.next().await?, ExecEvent::Exit(_)) {}
                anyhow::Ok(())
            });
            let mut times = Vec::new();
            for _ in 0..ROUNDS {
                let pushed = operator::push(&mut client, OTHER_NODE, document.clone()).await?;
                times.push(pushed.accepted.as_secs_f64() * 1e3);
            }
            input.signal(0);
            tokio::time::timeout(PATIENCE, reading).await???;
            half[at] = Summary::of(&times).context("nothing was pushed")?.median;
        }
        pairs.push((half[0], half[1]));
    }
    let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    Ok(Row::of(Subject::Exec, "push to accepted while a program's output flows", &ours, Unit::Milliseconds)
        .beside("the same while its output is thrown away in the guest", &pairs)
        .goal(PUSH_GOAL)
        .note(format!("median of {ROUNDS} pushes in every half of a pair")))
}

/// What agent and coordinator grow by while much more than they may hold passes through.
async fn memory(cluster: &Cluster, channel: &Channel) -> Result<Row> {
    let held = || {
        let coordinator = cluster.coordinator.as_ref().map_or(0, mvm_tests::Process::resident_bytes);
        let agent = cluster.agents.get(NODE).map_or(0, |agent| agent.process.resident_bytes());
        coordinator + agent
    };
    let blocks = MEMORY_BYTES >> 20;
    let script = format!("dd if=/dev/zero bs=1048576 count={blocks} 2>/dev/null");
    run(channel, &["sh", "-c", "dd if=/dev/zero bs=1048576 count=8 2>/dev/null"]).await?;
    let (before, begun) = (held(), Instant::now());
    let bytes = run(channel, &["sh", "-c", &script]).await?;
    ensure!(bytes == MEMORY_BYTES, "{bytes} bytes came");
    let (seconds, grown) = (begun.elapsed().as_secs_f64(), held().saturating_sub(before));
    #[allow(clippy::cast_precision_loss, reason = "a figure to be read")]
    let (mib, figure) = (MEMORY_BYTES as f64 / 1048576.0, grown as f64 / 1048576.0);
    let figure = Some(Figure { value: figure, unit: Unit::Mebibytes });
    Ok(Row::single(
        Subject::Exec,
        format!("memory of coordinator and agent after {mib} MiB of output"),
        figure,
    )
    .note(format!("{:.1} MiB/s from a guest on emulation", mib / seconds)))
}

fn open(command: &[&str]) -> Open {
    let command = command.iter().map(|word| (*word).to_owned()).collect();
    Open {
        kind: "exec".to_owned(),
        tenant_id: POOL.0.to_owned(),
        pool_id: POOL.1.to_owned(),
        may_wake: true,
        is_activity: true,
        exec: Some(wire::Exec { command, ..wire::Exec::default() }),
        ..Open::default()
    }
}

/// Runs a program to its end; how much it said.
async fn run(channel: &Channel, command: &[&str]) -> Result<u64> {
    let mut exec = Exec::open(channel.clone(), open(command)).await?;
    let mut bytes = 0;
    loop {
        match exec.next().await? {
            ExecEvent::Output { data, .. } => bytes += data.len() as u64,
            ExecEvent::Exit(exit) => {
                ensure!(exit.code == 0 && exit.signal == 0, "{exit:?}");
                return Ok(bytes);
            }
            ExecEvent::Opened(_) | ExecEvent::Resuming => {}
        }
    }
}

/// Milliseconds per run.
fn each(begun: Instant) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "ten")]
    let rounds = ROUNDS as f64;
    begun.elapsed().as_secs_f64() * 1000.0 / rounds
}

/// A microVM like the cluster's, which only this bench speaks to.
struct Bare {
    dir: tempfile::TempDir,
    instance: InstanceId,
}

impl Bare {
    fn boot(images: &Path) -> Result<Self> {
        let store = Store::open(images)?;
        let newest = store.list()?.into_iter().max_by_key(|digest| store.made_at(digest));
        let image = store.boot_image(&newest.context("target/images is empty: run `make image`")?)?;
        let bare = Self { dir: tempfile::tempdir()?, instance: InstanceId::from_bits(0xbe00_0002) };
        let spec = VmSpec {
            instance: bare.instance.clone(),
            revision: Digest::of(b"bench"),
            resources: Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 },
            image,
            bounds: mvm_vmm::Bounds::default(),
            purpose: mvm_vmm::Purpose::default(),
        };
        runtime()?.block_on(bare.driver().boot(&spec))?;
        Ok(bare)
    }

    fn driver(&self) -> QemuDriver {
        QemuDriver::open(self.dir.path(), QemuSettings::new(&VmmSettings::default()).on(Accelerator::Tcg))
    }

    async fn connect(&self) -> Result<Client> {
        let stream = self.driver().guest(&self.instance).await?;
        Client::greet(stream).await.map_err(anyhow::Error::msg)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        if let Ok(runtime) = runtime() {
            // The temporary folder goes in any case.
            let _ = runtime.block_on(async { self.driver().kill(&self.instance).await });
        }
    }
}
