//! `mvm push`: validates a document, has it numbered, signed and stored, and follows it to the node. With `--dry-run` the
//! node's own planner says what would come of it. A document that leaves nothing of a node is asked about first.

mod losses;
mod patience;
mod reasons;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use mvm_client::ControlClient;
use mvm_proto::control::PushStage;
use mvm_proto::document::MAX_DOCUMENT_BYTES;
use mvm_proto::status::NodeStatus;
use mvm_proto::wire::control::v1::{GetNodeRequest, PushProgress, PushRequest};
use mvm_proto::{DesiredState, NodeId};
use mvm_transport::Target;

use crate::client::{self, Operator, problem_from_json, refused, within};
use crate::commands::direct;
use crate::commands::plan::PlanOutput;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::progress::Progress;
use losses::losses;
use patience::patience;
use reasons::reasons;

#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// The document; `-` reads standard input
    #[arg(short, long = "file", value_name = "FILE")]
    file: PathBuf,
    /// The node to push to, instead of the document's own node_id
    #[arg(long, value_name = "NODE")]
    node: Option<NodeId>,
    /// Validate, and show what the node would do: exit code 0 for nothing, 5 for changes; nothing is stored
    #[arg(long)]
    dry_run: bool,
    /// Do not ask before a document that leaves none of the node's instances, or prunes a tenant with some
    #[arg(long)]
    yes: bool,
    /// Return once the document is stored; do not wait for the node
    #[arg(long)]
    no_wait: bool,
    /// Push straight to this agent with the coordinator's own keys, without a running coordinator
    #[arg(long, value_name = "URL", value_parser = client::parse_target)]
    direct: Option<Target>,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, args: PushArgs) -> Run {
    let bytes = read_document(&args.file)?;
    let progress = Progress::new(global.quiet);
    // Found here as well as by the coordinator, so that a typing error needs no connection to be told.
    let mut desired = parse(&bytes)?;
    if let Some(node) = &args.node {
        desired.node_id = node.clone();
    }
    let wait = global.chosen_timeout.unwrap_or_else(|| patience(&desired));
    if let Some(agent) = &args.direct {
        let dir = args.operator.coordinator_dir;
        let how = direct::How { dry_run: args.dry_run, yes: args.yes, wait: (!args.no_wait).then_some(wait) };
        return direct::push(global, agent, &dir, desired, how).await;
    }
    let mut client = args.operator.connect(global).await?;
    if !args.dry_run {
        confirm(global, &mut client, &desired, args.yes).await?;
    }
    if global.chosen_timeout.is_none() && !args.no_wait && !args.dry_run {
        progress.say(format!("waits up to {} for {}", humantime::format_duration(wait), desired.node_id));
    }
    let wait_seconds =
        if args.no_wait { 0 } else { u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).max(1) };
    let request = PushRequest {
        document: bytes,
        node_id: args.node.map(|node| node.to_string()).unwrap_or_default(),
        dry_run: args.dry_run,
        wait_seconds,
    };
    let mut stream = client.push(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut seen: Vec<PushProgress> = Vec::new();
    while let Some(step) = stream.message().await.map_err(|status| refused(&status))? {
        if !is_told_at_the_end(&step, &seen) {
            progress.say(line(&step));
        }
        seen.push(step);
    }
    if args.dry_run {
        return preview(global, &desired, seen.last());
    }
    let outcome = conclude(global, &seen, wait, args.no_wait);
    if let (Err(Outcome::TimedOut(_)), Some(last)) = (&outcome, seen.last()) {
        for reason in why(global, &mut client, &last.node_id).await {
            progress.say(format!("  {reason}"));
        }
    }
    outcome
}

/// A refusal, and the end of the wait, are the command's error: told once.
fn is_told_at_the_end(step: &PushProgress, seen: &[PushProgress]) -> bool {
    use PushStage::{Accepted, Refused, Sent, Waiting};
    let is_late =
        || seen.iter().any(|before| matches!(before.known_stage(), Some(Waiting | Sent | Accepted)));
    match step.known_stage() {
        Some(Refused) => true,
        Some(Waiting) => is_late(),
        _ => false,
    }
}

/// Asks before a document that takes everything away, unless `yes`. The coordinator knows what a node has, connected or not.
async fn confirm(global: &Global, client: &mut ControlClient, desired: &DesiredState, yes: bool) -> Run {
    let request = GetNodeRequest { node_id: desired.node_id.to_string() };
    let node = within(global.timeout(), client.get_node(request)).await?;
    confirm_losses(desired, &node.status.unwrap_or_default(), yes)
}

pub(super) fn confirm_losses(desired: &DesiredState, status: &NodeStatus, yes: bool) -> Run {
    match losses(desired, &status.pools) {
        Some(losses) if !yes => losses.confirm(),
        _ => Ok(()),
    }
}

/// What the node's planner answered.
fn preview(global: &Global, desired: &DesiredState, last: Option<&PushProgress>) -> Run {
    let Some(planned) = last.filter(|step| step.known_stage() == Some(PushStage::Planned)) else {
        return Err(anyhow!("the coordinator is too old to tell a plan; the document is valid").into());
    };
    let plan = serde_json::from_slice(&planned.plan).context("could not read the node's plan")?;
    show_plan(global, &PlanOutput::new(desired, plan), &desired.node_id)
}

pub(super) fn show_plan(global: &Global, shown: &PlanOutput, node: &NodeId) -> Run {
    let progress = Progress::new(global.quiet);
    output::show(global.output, shown, |wide| shown.table(wide))?;
    if shown.is_done() {
        progress.say(format!("{node}: nothing to do, the node is as the document says"));
        return Ok(());
    }
    progress.say(format!("{node}: {}; nothing was stored", shown.summary()));
    Err(Outcome::Changes)
}

/// Why a node has not converged, in its own words.
async fn why(global: &Global, client: &mut ControlClient, node: &str) -> Vec<String> {
    let request = GetNodeRequest { node_id: node.to_owned() };
    let node = within(global.timeout(), client.get_node(request)).await;
    node.ok().and_then(|node| node.status).map(|status| reasons(&status)).unwrap_or_default()
}

fn conclude(global: &Global, seen: &[PushProgress], wait: Duration, no_wait: bool) -> Run {
    let Some(last) = seen.last() else {
        return Err(anyhow!("the coordinator ended the push without a word").into());
    };
    if global.output != output::Format::Table && global.output != output::Format::Wide {
        output::show(global.output, &last, |_| output::table([""]))?;
    }
    match last.known_stage() {
        Some(PushStage::Converged) => Ok(()),
        Some(PushStage::Stored | PushStage::Sent | PushStage::Waiting | PushStage::Accepted) if no_wait => {
            Ok(())
        }
        Some(PushStage::Refused) => Err(Outcome::Failed(
            problem_from_json(&last.problem).context(format!("{} refused the document", last.node_id)),
        )),
        _ => Err(Outcome::TimedOut(anyhow!(
            "{} has not converged within {} (stage: {})\nthe document is stored and will be delivered; \
             follow it with: mvm node get {}",
            last.node_id,
            humantime::format_duration(wait),
            last.stage,
            last.node_id
        ))),
    }
}

fn line(step: &PushProgress) -> String {
    let mark =
        step.mark.as_ref().map(|mark| format!(" {}.{}", mark.epoch, mark.generation)).unwrap_or_default();
    let message = if step.message.is_empty() { String::new() } else { format!(": {}", step.message) };
    format!("{}{mark} {}{message}", step.node_id, step.stage)
}

fn parse(bytes: &[u8]) -> Result<DesiredState, Outcome> {
    DesiredState::parse(bytes).map_err(|errors| Outcome::Failed(anyhow::Error::new(errors)))
}

/// Reads a document, a little beyond the limit at most, so that the limit is told by the one who knows it.
pub(crate) fn read_document(path: &Path) -> Result<Vec<u8>, Outcome> {
    let read = || -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let limit = MAX_DOCUMENT_BYTES as u64 + 1;
        if path == Path::new("-") {
            std::io::stdin()
                .lock()
                .take(limit)
                .read_to_end(&mut bytes)
                .context("could not read standard input")?;
        } else {
            let file =
                std::fs::File::open(path).with_context(|| format!("could not open {}", path.display()))?;
            file.take(limit)
                .read_to_end(&mut bytes)
                .with_context(|| format!("could not read {}", path.display()))?;
        }
        Ok(bytes)
    };
    read().map_err(Outcome::Usage)
}
