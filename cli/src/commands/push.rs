//! `mvm push`: validates a document, has it numbered, signed and stored, and follows it to the node.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use mvm_coordinator::ControlClient;
use mvm_proto::document::MAX_DOCUMENT_BYTES;
use mvm_proto::wire::control::v1::{GetNodeRequest, PushProgress, PushRequest};
use mvm_proto::{DesiredState, NodeId};
use mvm_transport::Target;

use crate::client::{self, Operator, problem_from_json, refused, within};
use crate::commands::direct;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::progress::Progress;

/// As many as fit a screen; `mvm node info` has them all.
const MAX_REASONS: usize = 20;

#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// The document; `-` reads standard input
    #[arg(short, long = "file", value_name = "FILE")]
    file: PathBuf,
    /// The node to push to, instead of the document's own node_id
    #[arg(long, value_name = "NODE")]
    node: Option<NodeId>,
    /// Only validate
    #[arg(long)]
    dry_run: bool,
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
    if let Some(agent) = &args.direct {
        let dir = args.operator.coordinator_dir;
        let desired = parse(&bytes)?;
        return direct::push(global, agent, &dir, desired, args.node, args.dry_run, !args.no_wait).await;
    }
    // Found here as well as by the coordinator, so that a typing error needs no connection to be told.
    parse(&bytes)?;
    let mut client = args.operator.connect(global).await?;
    let wait_seconds =
        if args.no_wait { 0 } else { u32::try_from(global.timeout.as_secs()).unwrap_or(u32::MAX).max(1) };
    let request = PushRequest {
        document: bytes,
        node_id: args.node.map(|node| node.to_string()).unwrap_or_default(),
        dry_run: args.dry_run,
        wait_seconds,
    };
    let mut stream = client.push(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut seen: Vec<PushProgress> = Vec::new();
    while let Some(step) = stream.message().await.map_err(|status| refused(&status))? {
        progress.say(line(&step));
        seen.push(step);
    }
    let outcome = conclude(global, &seen, args.dry_run, args.no_wait);
    if let (Err(Outcome::TimedOut(_)), Some(last)) = (&outcome, seen.last()) {
        for reason in reasons(global, &mut client, &last.node_id).await {
            progress.say(format!("  {reason}"));
        }
    }
    outcome
}

/// Why a node has not converged, in its own words: conditions that do not hold, steps that it did not take.
async fn reasons(global: &Global, client: &mut ControlClient, node: &str) -> Vec<String> {
    let request = GetNodeRequest { node_id: node.to_owned() };
    let Ok(node) = within(global.timeout, client.get_node(request)).await else { return Vec::new() };
    let status = node.status.unwrap_or_default();
    let conditions = status.conditions.iter().filter(|condition| condition.status != "True");
    let conditions = conditions.map(|c| format!("{}={}: {} {}", c.r#type, c.status, c.reason, c.message));
    let deferred = status.pools.iter().flat_map(|pool| {
        pool.deferred.iter().map(move |why| format!("{}/{}: {why}", pool.tenant_id, pool.pool_id))
    });
    conditions.chain(deferred).take(MAX_REASONS).collect()
}

fn conclude(global: &Global, seen: &[PushProgress], dry_run: bool, no_wait: bool) -> Run {
    let Some(last) = seen.last() else {
        return Err(anyhow!("the coordinator ended the push without a word").into());
    };
    if global.output != output::Format::Table && global.output != output::Format::Wide {
        output::show(global.output, &last, |_| output::table([""]))?;
    }
    match last.stage.as_str() {
        "converged" => Ok(()),
        "validated" if dry_run => Ok(()),
        "stored" | "sent" | "waiting" | "accepted" if no_wait => Ok(()),
        "refused" => Err(Outcome::Failed(
            problem_from_json(&last.problem).context(format!("{} refused the document", last.node_id)),
        )),
        stage => Err(Outcome::TimedOut(anyhow!(
            "{} has not converged within {} (stage: {stage})\nthe document is stored and will be delivered; \
             follow it with: mvm node info {}",
            last.node_id,
            humantime::format_duration(global.timeout),
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
