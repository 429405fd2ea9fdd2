//! `mvm plan`: what would be done, and why, without touching anything.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use clap::{Args, Subcommand};
use mvm_planner::observation::MAX_OBSERVATION_BYTES;
use mvm_planner::{Effect, NodePlan, Observation, plan_node, revision_of};
use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{DesiredState, Digest, InstanceId, PoolId, TenantId, Timestamp};
use serde::Serialize;

use crate::commands::block_on;
use crate::commands::plan_objects::{self, PlanObjectsArgs};
use crate::commands::push::read_document;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  mvm plan -f acme.yaml
  mvm plan --delete pool/acme/workers
  mvm plan node --desired node-a.json --observed seen.json

Exit codes of `mvm plan -f`: 0 nothing would change, 2 something would, 1 it failed.";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    command: Option<PlanCommand>,
    #[command(flatten)]
    objects: PlanObjectsArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// Plan the next steps of a node from a given state towards a document
    Node(PlanNodeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PlanNodeArgs {
    /// The desired-state document; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    desired: PathBuf,
    /// The node's state, as `mvm agent observe -o json` prints it; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    observed: PathBuf,
    /// When the plan is made, as 2026-01-31T09:30:00Z [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    now: Option<Timestamp>,
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    text.parse::<Timestamp>().map_err(|error| error.to_string())
}

pub(crate) fn run(global: &Global, args: PlanArgs) -> Run {
    match args.command {
        Some(PlanCommand::Node(args)) => node(global, &args),
        // 2 says that something would change, and nothing else.
        None => block_on(plan_objects::run(global, args.objects)).map_err(|outcome| match outcome {
            Outcome::Usage(error) => Outcome::Failed(error),
            other => other,
        }),
    }
}

fn node(global: &Global, args: &PlanNodeArgs) -> Run {
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
    let shown = PlanOutput::new(&desired, plan);
    Ok(output::show(global.output, &shown, |wide| shown.table(wide))?)
}

/// A plan, what it comes to, and what its steps lead to.
#[derive(Serialize)]
pub(crate) struct PlanOutput {
    #[serde(flatten)]
    plan: NodePlan,
    effects: BTreeMap<Effect, u32>,
    pools: Vec<PoolRevision>,
}

impl PlanOutput {
    pub(crate) fn new(desired: &DesiredState, plan: NodePlan) -> Self {
        Self { effects: plan.effects(desired), pools: revisions(desired), plan }
    }

    /// Whether the node is as the document says.
    pub(crate) fn is_done(&self) -> bool {
        self.plan.steps.is_empty() && self.plan.deferred.is_empty()
    }

    /// How many instances start, change or go, in one line.
    pub(crate) fn summary(&self) -> String {
        let told: Vec<_> = self.effects.iter().map(|(effect, count)| format!("{count} {effect}")).collect();
        told.join(", ")
    }
}

/// The revision that instances of a pool are brought to: what an observation names when they are.
#[derive(Serialize)]
struct PoolRevision {
    tenant: TenantId,
    pool: PoolId,
    revision: Digest,
}

fn revisions(desired: &DesiredState) -> Vec<PoolRevision> {
    let of = |(tenant, pool): (&Tenant, &Pool)| PoolRevision {
        tenant: tenant.tenant_id.clone(),
        pool: pool.pool_id.clone(),
        revision: revision_of(tenant, pool),
    };
    desired.pools().map(of).collect()
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

impl PlanOutput {
    /// Steps, then what was not done, then unmanaged instances, then when time alone changes the plan; wide, also the
    /// pools' revisions.
    pub(crate) fn table(&self, wide: bool) -> output::Table {
        let Self { plan, pools, .. } = self;
        let mut table = output::table(["PLAN", "ACTION", "TENANT", "POOL", "INSTANCE", "REASON"]);
        let name =
            |id: Option<&InstanceId>, none: &str| id.map_or_else(|| none.to_owned(), ToString::to_string);
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
        let dash = || "-".to_owned();
        for pool in pools.iter().filter(|_| wide) {
            let (tenant, name) = (pool.tenant.to_string(), pool.pool.to_string());
            table.add_row([
                "pool".to_owned(),
                dash(),
                tenant,
                name,
                dash(),
                format!("revision {}", pool.revision),
            ]);
        }
        if let Some(at) = plan.next_deadline {
            let reason = format!("time alone changes the plan at {at}");
            table.add_row(["next".to_owned(), dash(), dash(), dash(), dash(), reason]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_observation_written_by_hand_with_the_shown_revision_is_as_the_document_says() {
        let desired = json!({
            "schema_version": 1, "node_id": "node",
            "tenants": [{
                "tenant_id": "acme",
                "network": { "tenant_net_id": 3, "ipv4_subnet": "10.240.3.0/24" },
                "quotas": {
                    "max_vcpus": 4, "max_mem_mib": 1024, "max_running": 4, "max_warm": 4, "max_pools": 4,
                    "max_instances_per_pool": 4, "max_disk_gib": 4,
                },
                "pools": [{
                    "pool_id": "workers", "flake_ref": "builtin:busybox", "profile": "minimal",
                    "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
                    "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
                }],
            }],
        });
        let desired = DesiredState::parse(desired.to_string().as_bytes()).unwrap();
        let shown = serde_json::to_value(revisions(&desired)).unwrap();
        let observed = json!({
            "capacity": { "vcpus": 8, "mem_mib": 8192, "disk_mib": 8192, "max_instances": 8 },
            "instances": [{
                "tenant": shown[0]["tenant"], "pool": shown[0]["pool"], "id": "i-00000001", "phase": "running",
                "since": "2026-01-31T09:30:00Z", "revision": shown[0]["revision"],
                "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
            }],
        });
        let observed = Observation::parse(observed.to_string().as_bytes()).unwrap();
        let plan = plan_node(&desired, &observed, "2026-01-31T10:30:00Z".parse().unwrap());
        assert!(plan.is_empty(), "{plan:?}");
    }
}
