//! `mvm plan`: what would be done, and why, without touching anything.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use clap::{Args, Subcommand};
use mvm_planner::observation::MAX_OBSERVATION_BYTES;
use mvm_planner::{NodePlan, Observation, plan_node};
use mvm_proto::{DesiredState, InstanceId, Timestamp};

use crate::args::Global;
use crate::commands::push::read_document;
use crate::exit::{Outcome, Run};
use crate::output;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// What a node in a given state would do next to be as a document says
    Node(PlanNodeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PlanNodeArgs {
    /// The desired-state document; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    desired: PathBuf,
    /// What the node is like, as `mvm agent observe -o json` prints it; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    observed: PathBuf,
    /// When the plan is made, as 2026-01-31T09:30:00Z [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    now: Option<Timestamp>,
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    text.parse::<Timestamp>().map_err(|error| error.to_string())
}

pub(crate) fn run(global: &Global, command: PlanCommand) -> Run {
    let PlanCommand::Node(args) = command;
    let dash = Path::new("-");
    if args.desired == dash && args.observed == dash {
        let text = "only one of --desired and --observed can be read from standard input";
        return Err(Outcome::Usage(anyhow::anyhow!(text)));
    }
    let desired = DesiredState::parse(&read_document(&args.desired)?)
        .with_context(|| format!("could not use {}", args.desired.display()))?;
    let observed = Observation::parse(&read_observation(&args.observed)?)
        .with_context(|| format!("could not use {}", args.observed.display()))?;
    let now = args.now.unwrap_or_else(|| Timestamp::from(SystemTime::now()));
    let plan = plan_node(&desired, &observed, now);
    if plan.steps.is_empty() && plan.deferred.is_empty() && plan.unmanaged.is_empty() {
        Progress::new(global.quiet).say("nothing to do: the node is as the document says");
    }
    Ok(output::show(global.output, &plan, |_| table(&plan))?)
}

fn read_observation(path: &Path) -> Result<Vec<u8>, Outcome> {
    let read = || -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // One more than is read, so that the limit is told by the one who knows it.
        let limit = MAX_OBSERVATION_BYTES as u64 + 1;
        if path == Path::new("-") {
            let stdin = std::io::stdin().lock();
            stdin.take(limit).read_to_end(&mut bytes).context("could not read standard input")?;
        } else {
            let file =
                std::fs::File::open(path).with_context(|| format!("could not open {}", path.display()))?;
            let read = file.take(limit).read_to_end(&mut bytes);
            read.with_context(|| format!("could not read {}", path.display()))?;
        }
        Ok(bytes)
    };
    read().map_err(Outcome::Usage)
}

/// Steps, then what was not done, then what nobody asked for, then when time alone changes the plan.
fn table(plan: &NodePlan) -> output::Table {
    let mut table = output::table(["PLAN", "ACTION", "TENANT", "POOL", "INSTANCE", "REASON"]);
    let name = |id: Option<&InstanceId>, none: &str| id.map_or_else(|| none.to_owned(), ToString::to_string);
    for step in &plan.steps {
        let action = match step.staging {
            Some(staging) => format!("{} (for {staging})", step.action),
            None => step.action.to_string(),
        };
        table.add_row([
            "step".to_owned(),
            action,
            step.tenant.to_string(),
            step.pool.to_string(),
            name(step.instance.as_ref(), "new"),
            step.reason.clone(),
        ]);
    }
    for deferred in &plan.deferred {
        let times = if deferred.count == 1 { String::new() } else { format!(" x{}", deferred.count) };
        table.add_row([
            "deferred".to_owned(),
            format!("{}{times}", deferred.action),
            deferred.tenant.to_string(),
            deferred.pool.to_string(),
            name(deferred.instance.as_ref(), "-"),
            deferred.reason.clone(),
        ]);
    }
    for unmanaged in &plan.unmanaged {
        table.add_row([
            "unmanaged".to_owned(),
            "-".to_owned(),
            unmanaged.tenant.to_string(),
            unmanaged.pool.to_string(),
            unmanaged.instance.to_string(),
            format!("{}; the document does not name it", unmanaged.phase),
        ]);
    }
    if let Some(at) = plan.next_deadline {
        let reason = format!("time alone changes the plan at {at}");
        let dash = || "-".to_owned();
        table.add_row(["next".to_owned(), dash(), dash(), dash(), dash(), reason]);
    }
    table
}
