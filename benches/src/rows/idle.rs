//! What an agent costs that has nothing to do: memory and CPU, beside an empty process with the same runtime.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use mvm_proto::status::ConditionKind;
use mvm_tests::{Cluster, Process, mvm_binary};
use serde_json::Value;

use super::{as_shipped, runtime};
use crate::document::busy_user_document;
use crate::effort::Effort;
use crate::machine::{cpu_time, resident};
use crate::operator;
use crate::row::{Figure, Goal, Row, Subject, Unit};

const NODE: &str = "node-a";
/// What a node of ordinary size holds.
const INSTANCES: usize = 100;
const MEMORY_GOAL: Goal = Goal::FigureBelow(20.0);
const CPU_GOAL: Goal = Goal::FigureBelow(0.1);
/// The empty process, built beside us; see `src/bin`.
const EMPTY: &str = "mvm-empty-peer";

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let mut cluster = Cluster::start_with(as_shipped());
    cluster.join(NODE);
    let agent = cluster.agents.get(NODE).context("the agent runs")?.process.pid();
    let document = serde_json::to_vec(&busy_user_document(NODE, INSTANCES))?;
    runtime()?.block_on(async {
        let mut client = operator::connect(&cluster).await?;
        operator::push(&mut client, NODE, document).await.map(drop)
    })?;
    cluster.wait_node(NODE, "converged", is_converged);
    let empty = start_empty(&cluster)?;
    std::thread::sleep(effort.settle);

    let before = cpu_time(agent)?;
    std::thread::sleep(effort.watch);
    let used = cpu_time(agent)?.saturating_sub(before);
    let memory = resident(agent)?;
    let share = 100.0 * used.as_secs_f64() / effort.watch.as_secs_f64();

    let figure = |value, unit| Some(Figure { value, unit });
    let mut memory_row = Row::single(
        Subject::Idle,
        format!("idle agent with {INSTANCES} instances, resident memory"),
        figure(memory.all_kib / 1024.0, Unit::Mebibytes),
    )
    .note(format!("of it its own: {:.1} MiB", memory.anonymous_kib / 1024.0));
    if let Some(empty) = empty {
        let peer = resident(empty.pid())?;
        let pair = (memory.all_kib / 1024.0, peer.all_kib / 1024.0);
        memory_row = memory_row.beside("empty tokio + quinn process", &[pair]);
    }
    Ok(vec![
        memory_row.goal(MEMORY_GOAL),
        Row::single(
            Subject::Idle,
            format!("idle agent with {INSTANCES} instances, CPU"),
            figure(share, Unit::PercentOfCore),
        )
        .goal(CPU_GOAL)
        .note(format!("over {:?}, with a session; the driver is the fake one", effort.watch)),
    ])
}

/// Says so of the document in force: the name alone is in every answer.
fn is_converged(node: &Value) -> bool {
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == ConditionKind::Converged.as_str() && one["status"] == "True")
}

/// `None` when it was not built, as in a test run.
fn start_empty(cluster: &Cluster) -> Result<Option<Process>> {
    let path = mvm_binary().with_file_name(EMPTY);
    if !path.exists() {
        return Ok(None);
    }
    let mut command = Command::new(path);
    command.env_clear().stdin(Stdio::null());
    let process = Process::start(command, &cluster.path().join("empty.log"));
    // It says nothing; by then it has bound its socket.
    std::thread::sleep(Duration::from_millis(200));
    Ok(Some(process))
}
