//! `mvm dev status`: what of the cluster runs, where it is reached, and where its logs are.

use std::path::PathBuf;
use std::time::Duration;

use mvm_client::{Objects, Query};
use mvm_proto::Timestamp;
use mvm_proto::object::{Object, kind_named};
use serde::Serialize;
use serde_json::Value;

use super::dir::DevDir;
use super::isolation::Modes;
use super::process::{Part, living};
use super::state::State;
use super::{DirArgs, context, members};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::within;
use crate::output::{self, or_dash, when};
use crate::progress::Progress;

/// A coordinator on this machine answers in milliseconds.
const ASKED_FOR: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Both processes run.
    running: bool,
    dir: PathBuf,
    processes: Vec<Process>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<Shown>,
    #[serde(skip_serializing_if = "Option::is_none")]
    images_dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    isolation: Option<Modes>,
    /// As the coordinator has them; absent while it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<Vec<Object>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools: Option<Vec<Object>>,
}

#[derive(Debug, Serialize)]
struct Process {
    name: String,
    running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<Timestamp>,
    address: String,
    metrics: String,
    log: PathBuf,
}

#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    current: bool,
}

pub(super) async fn run(global: &Global, args: DirArgs) -> Run {
    let dir = DevDir::chosen(&args)?;
    let state = State::load(&dir.state_file())?;
    let report = look(global, &dir, state.as_ref()).await?;
    let progress = Progress::new(global.quiet);
    let at = dir.path().display();
    if state.is_some() || !output::is_for_people(global.output) {
        output::show_all(global.output, &report, |wide| tables(&report, wide))?;
    }
    if report.running {
        return Ok(());
    }
    progress.say(match state {
        Some(_) => format!("the development cluster in {at} does not run; to go on with it: mvm dev up"),
        None => format!("there is no development cluster in {at}; to make one: mvm dev up"),
    });
    Err(Outcome::Found(1))
}

/// All that can be seen, whatever runs.
pub(super) async fn look(global: &Global, dir: &DevDir, state: Option<&State>) -> Result<Report, Outcome> {
    let mut report = Report {
        running: false,
        dir: dir.path().to_owned(),
        processes: Vec::new(),
        context: None,
        images_dir: None,
        isolation: None,
        nodes: None,
        pools: None,
    };
    let Some(state) = state else { return Ok(report) };
    let ports = state.ports;
    for (part, address, metrics) in [
        (Part::Coordinator, state.url(), ports.coordinator_metrics),
        (Part::Agent, format!("https://127.0.0.1:{}", ports.agent), ports.agent_metrics),
    ] {
        let recorded = living(&dir.pid_file(part))?;
        report.processes.push(Process {
            name: part.to_string(),
            running: recorded.is_some(),
            pid: recorded.as_ref().map(|recorded| recorded.process.pid),
            since: recorded.map(|recorded| recorded.since),
            address,
            metrics: format!("http://127.0.0.1:{metrics}/metrics"),
            log: dir.log(part),
        });
    }
    report.running = report.processes.iter().all(|process| process.running);
    let named =
        state.context.as_deref().map(|name| context::look(name, &dir.operator())).transpose()?.flatten();
    report.context = named.map(|named| Shown { name: named.name, current: named.is_current });
    report.images_dir = Some(state.images_dir.clone());
    report.isolation = Some(state.isolation);
    if report.processes.iter().any(|process| process.running && process.name == Part::Coordinator.to_string())
    {
        let asked =
            Global { chosen_timeout: Some(global.chosen_timeout.unwrap_or(ASKED_FOR)), ..global.clone() };
        match objects(&asked, dir, state).await {
            Ok((nodes, pools)) => (report.nodes, report.pools) = (Some(nodes), Some(pools)),
            Err(Outcome::Unreachable(error) | Outcome::TimedOut(error)) => {
                Progress::new(global.quiet).say(format!("the coordinator does not answer: {error:#}"));
            }
            Err(other) => return Err(other),
        }
    }
    Ok(report)
}

async fn objects(
    global: &Global,
    dir: &DevDir,
    state: &State,
) -> Result<(Vec<Object>, Vec<Object>), Outcome> {
    let channel = members::operator(dir, state)?.channel(global).await?;
    let mut client = Objects::new(channel);
    let mut listed = Vec::new();
    for kind in ["nodes", "pools"] {
        let kind = kind_named(kind).map_err(|error| Outcome::Usage(anyhow::anyhow!(error)))?;
        listed.push(within(global.timeout(), client.list(&Query::all(kind))).await?.objects);
    }
    let pools = listed.pop().unwrap_or_default();
    Ok((listed.pop().unwrap_or_default(), pools))
}

fn tables(report: &Report, wide: bool) -> Vec<output::Table> {
    let mut processes = output::table(["PROCESS", "STATUS", "PID", "SINCE", "ADDRESS", "LOG"]);
    for process in &report.processes {
        processes.add_row([
            process.name.clone(),
            if process.running { "running" } else { "not running" }.to_owned(),
            process.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            process.since.map_or_else(|| "-".to_owned(), |since| when(&since.to_string(), wide)),
            process.address.clone(),
            process.log.display().to_string(),
        ]);
    }
    let mut rows = vec![("directory", report.dir.display().to_string())];
    rows.extend(report.images_dir.as_ref().map(|dir| ("images", dir.display().to_string())));
    rows.extend(report.context.as_ref().map(|context| {
        let current = if context.current { " (current)" } else { " (not the current one)" };
        ("context", format!("{}{current}", context.name))
    }));
    rows.extend(report.isolation.map(|modes| {
        ("isolation", format!("network {}, cgroups {}, jail {}", modes.network, modes.cgroups, modes.jail))
    }));
    let mut nodes = output::table(["NODE", "STATUS", "DRIVER", "ACCELERATOR", "INSTANCES"]);
    for node in report.nodes.iter().flatten() {
        let told = ["/state", "/driver", "/accelerator", "/allocated/instances"].map(|path| text(node, path));
        nodes.add_row([vec![node.metadata.name.clone()], told.to_vec()].concat());
    }
    let mut pools = output::table(["TENANT", "POOL", "WANTED", "RUNNING", "WARM", "SLEEPING"]);
    for pool in report.pools.iter().flatten() {
        let tenant = pool.metadata.tenant.as_ref().map(ToString::to_string).unwrap_or_default();
        let wanted = or_dash(&shown(pool.spec.pointer("/counts/running")));
        let told = ["/counts/running", "/counts/warm", "/counts/sleeping"].map(|path| text(pool, path));
        pools.add_row([vec![tenant, pool.metadata.name.clone(), wanted], told.to_vec()].concat());
    }
    vec![processes, output::properties(rows), nodes, pools]
}

/// A field of an object's status.
fn text(object: &Object, path: &str) -> String {
    or_dash(&shown(object.status.pointer(path)))
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}
