//! `mvm tenant` and `mvm pool`: who has instances here, and how each pool fares against its document.

use clap::{Args, Subcommand};
use mvm_proto::object::kind_named;
use mvm_proto::status::{Capacity, InstanceStatus, NodeInfo, PoolStatus, Usage};
use mvm_proto::wire::control::v1::{GetNodeRequest, Node};
use mvm_proto::{PoolId, TenantId};
use serde::{Deserialize, Serialize};

use crate::client::{self, all_nodes, within};
use crate::commands::resources;
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::of_kind;
use crate::objects::{self, ObjectArgs};
use crate::output::{self, mib, when};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// All tenants, a line each
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// One tenant with its pools
    #[command(aliases = ["info", "show", "inspect"])]
    Get(TenantArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// All pools, a line each
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// One pool with its instances
    #[command(aliases = ["info", "show", "inspect"])]
    Get(PoolArgs),
    /// Tell the load of a pool that is scaled by it
    #[command(after_help = LOAD_EXAMPLES)]
    Load(LoadArgs),
}

const LOAD_EXAMPLES: &str = "\
Examples:
  mvm pool load acme/workers 120     120 entries wait in its queue

Of the whole pool: entries of its queue (metric queue_depth), or requests in a second (requests). Nodes measure cpu
themselves. What is older than two minutes counts for nothing, so tell it every few seconds.";

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// TENANT/NAME, or NAME with -t or a context's tenant
    pool: String,
    /// What was measured
    value: f64,
    #[command(flatten)]
    object: ObjectArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TenantArgs {
    tenant: TenantId,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// tenant/pool
    #[arg(value_parser = parse_pool)]
    pool: (TenantId, PoolId),
    #[command(flatten)]
    endpoint: EndpointArgs,
}

fn parse_pool(text: &str) -> Result<(TenantId, PoolId), String> {
    let parse = || -> Option<(TenantId, PoolId)> {
        let (tenant, pool) = text.split_once('/')?;
        Some((tenant.parse().ok()?, pool.parse().ok()?))
    };
    parse().ok_or_else(|| "must be tenant/pool".to_owned())
}

/// A pool, and the node that has it; none when an agent was asked directly.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Placed {
    #[serde(flatten)]
    pub(crate) node: Option<On>,
    #[serde(flatten)]
    pub(crate) pool: PoolStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node_capacity: Option<Capacity>,
}

/// The node that reported a pool, and whether it still is connected.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct On {
    pub(crate) node_id: String,
    pub(crate) connected: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) last_seen_at: String,
}

impl On {
    /// Its name, marked where its report is old.
    fn shown(&self) -> String {
        match self.connected {
            true => self.node_id.clone(),
            false => format!("{} (last seen {})", self.node_id, when(&self.last_seen_at, false)),
        }
    }
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct TenantLine {
    tenant_id: String,
    pools: usize,
    running: u32,
    warm: u32,
    sleeping: u32,
    stopped: u32,
    failed: u32,
    /// Resources of its instances, by their phases.
    allocated: Usage,
    /// The same of those that the documents ask for.
    requested: Usage,
}

pub(crate) async fn run(global: &Global, command: TenantCommand) -> Run {
    match command {
        TenantCommand::List(args) => {
            let tenants = by_tenant(&pools(global, &args.endpoint).await?);
            Ok(output::show(global.output, &tenants, |wide| tenant_table(&tenants, wide))?)
        }
        TenantCommand::Get(args) => match args.endpoint.open(global).await? {
            Session::Agent(agent) => {
                let found: serde_json::Value = agent.get(&format!("/v1/tenants/{}", args.tenant)).await?;
                Ok(output::show(global.output, &found, |_| tenant_details(&found))?)
            }
            Session::Coordinator(_) => {
                let mut found = pools(global, &args.endpoint).await?;
                found.retain(|placed| placed.pool.tenant_id == args.tenant.as_str());
                if found.is_empty() {
                    return Err(unknown(&format!("tenant {}", args.tenant)));
                }
                Ok(output::show(global.output, &found, |wide| pool_table(&found, wide))?)
            }
        },
    }
}

async fn tell_load(global: &Global, args: LoadArgs) -> Run {
    let usage = |error: String| Outcome::Usage(anyhow::anyhow!(error));
    let kind = kind_named("pools").map_err(usage)?;
    let word = args.pool.strip_prefix("pool/").unwrap_or(&args.pool);
    let name = of_kind(kind, word, args.object.tenant()).map_err(usage)?;
    let mut objects = args.object.open(global).await?;
    let status = objects::within(global.timeout(), objects.tell_load(&name, args.value)).await?;
    Ok(output::show(global.output, &status, |_| {
        let load = status.load.map_or_else(|| "-".to_owned(), |load| load.to_string());
        output::properties(vec![
            ("running", status.running.to_string()),
            ("decided from", load),
            ("reason", status.reason.clone()),
        ])
    })?)
}

pub(crate) async fn run_pool(global: &Global, command: PoolCommand) -> Run {
    match command {
        PoolCommand::Load(args) => tell_load(global, args).await,
        PoolCommand::List(args) => {
            let found = pools(global, &args.endpoint).await?;
            Ok(output::show(global.output, &found, |wide| pool_table(&found, wide))?)
        }
        PoolCommand::Get(args) => {
            let (tenant, pool) = &args.pool;
            match args.endpoint.open(global).await? {
                Session::Agent(agent) => {
                    let path = format!("/v1/tenants/{tenant}/pools/{pool}");
                    let found: OnePool = agent.get(&path).await?;
                    Ok(output::show(global.output, &found, |_| pool_details(&found))?)
                }
                Session::Coordinator(_) => {
                    let mut found = pools(global, &args.endpoint).await?;
                    found.retain(|placed| {
                        placed.pool.tenant_id == tenant.as_str() && placed.pool.pool_id == pool.as_str()
                    });
                    if found.is_empty() {
                        return Err(unknown(&format!("pool {tenant}/{pool}")));
                    }
                    Ok(output::show(global.output, &found, |wide| pool_table(&found, wide))?)
                }
            }
        }
    }
}

fn unknown(what: &str) -> Outcome {
    Outcome::Failed(anyhow::anyhow!(
        "there is no {what} on any node\nsee which there are with: mvm pool list"
    ))
}

#[derive(Deserialize)]
struct Tenants {
    tenants: Vec<Tenant>,
}

#[derive(Deserialize)]
struct Tenant {
    pools: Vec<PoolStatus>,
}

async fn pools(global: &Global, endpoint: &EndpointArgs) -> Result<Vec<Placed>, Outcome> {
    match endpoint.open(global).await? {
        Session::Agent(agent) => {
            let listed: Tenants = agent.get("/v1/tenants").await?;
            let info: NodeInfo = agent.get("/v1/node/info").await?;
            let pools = listed.tenants.into_iter().flat_map(|tenant| tenant.pools);
            Ok(pools.map(|pool| Placed { node: None, pool, node_capacity: info.capacity }).collect())
        }
        Session::Coordinator(mut client) => {
            let nodes = match endpoint.node() {
                Some(node) => {
                    let request = GetNodeRequest { node_id: node.to_string() };
                    vec![within(global.timeout(), client.get_node(request)).await?]
                }
                None => all_nodes(&mut client, false, global.timeout()).await?,
            };
            let mut placed = Vec::new();
            for node in nodes {
                let Node { node_id, connected, last_seen_at, info, status, .. } = node;
                let pools = status.unwrap_or_default().pools;
                if !connected && !pools.is_empty() {
                    let warning = client::not_connected(
                        &node_id,
                        &last_seen_at,
                        "its pools are shown as last reported",
                    );
                    Progress::new(global.quiet).say(format!("warning: {warning}"));
                }
                let on = On { node_id, connected, last_seen_at };
                let node_capacity = info.and_then(|info| info.capacity);
                placed.extend(pools.into_iter().map(|pool| Placed {
                    node: Some(on.clone()),
                    pool,
                    node_capacity,
                }));
            }
            Ok(placed)
        }
    }
}

pub(crate) fn by_tenant(pools: &[Placed]) -> Vec<TenantLine> {
    let mut tenants: Vec<TenantLine> = Vec::new();
    for Placed { pool, .. } in pools {
        let line = match tenants.iter_mut().position(|line| line.tenant_id == pool.tenant_id) {
            Some(index) => &mut tenants[index],
            None => {
                let tenant_id = pool.tenant_id.clone();
                tenants.push(TenantLine { tenant_id, ..TenantLine::default() });
                let last = tenants.len() - 1;
                &mut tenants[last]
            }
        };
        let actual = pool.actual.unwrap_or_default();
        line.pools += 1;
        line.running += actual.running;
        line.warm += actual.warm;
        line.sleeping += actual.sleeping;
        line.stopped += pool.stopped;
        line.failed += pool.failed;
        line.allocated = resources::plus(line.allocated, pool.allocated.unwrap_or_default());
        line.requested = resources::plus(line.requested, pool.requested.unwrap_or_default());
    }
    tenants
}

pub(crate) fn tenant_table(tenants: &[TenantLine], wide: bool) -> output::Table {
    let mut headings =
        vec!["TENANT", "POOLS", "RUNNING", "WARM", "SLEEPING", "STOPPED", "FAILED", "VCPUS", "MEMORY"];
    headings.extend(wide.then_some("DISK"));
    let mut table = output::plain();
    table.set_header(headings);
    for line in tenants {
        let counts = [line.running, line.warm, line.sleeping, line.stopped, line.failed];
        let mut row = vec![line.tenant_id.clone(), line.pools.to_string()];
        row.extend(counts.map(|count| count.to_string()));
        row.extend(amounts(&line.allocated, &line.requested, wide));
        table.add_row(row);
    }
    table
}

pub(crate) fn pool_table(pools: &[Placed], wide: bool) -> output::Table {
    let with_node = pools.iter().any(|placed| placed.node.is_some());
    let mut table = output::plain();
    let mut headings = vec![
        "TENANT", "POOL", "RUNNING", "WARM", "SLEEPING", "STOPPED", "FAILED", "VCPUS", "MEMORY", "MANAGED",
        "DEFERRED",
    ];
    if wide {
        headings.splice(9..9, ["DISK", "OF THE NODE"]);
    }
    if with_node {
        headings.insert(0, "NODE");
    }
    table.set_header(headings);
    for Placed { node, pool, node_capacity } in pools {
        let mut row = vec![pool.tenant_id.clone(), pool.pool_id.clone()];
        row.extend(counts(pool));
        let allocated = pool.allocated.unwrap_or_default();
        row.extend(amounts(&allocated, &pool.requested.unwrap_or_default(), wide));
        if wide {
            row.push(resources::share(&allocated, &node_capacity.unwrap_or_default()));
        }
        row.push(if pool.managed { "yes" } else { "no" }.to_owned());
        row.push(pool.deferred.first().cloned().unwrap_or_else(|| "-".to_owned()));
        if with_node {
            row.insert(0, node.as_ref().map_or_else(String::new, On::shown));
        }
        table.add_row(row);
    }
    table.drop_empty(&["DEFERRED"]);
    table
}

/// Allocated of requested: vCPUs and memory, and with `wide` the disk.
fn amounts(allocated: &Usage, requested: &Usage, wide: bool) -> Vec<String> {
    let mut cells = vec![
        format!("{}/{}", allocated.vcpus, requested.vcpus),
        format!("{}/{}", mib(allocated.mem_mib), mib(requested.mem_mib)),
    ];
    cells.extend(wide.then(|| format!("{}/{}", mib(allocated.disk_mib), mib(requested.disk_mib))));
    cells
}

/// Have and want of each count, then the rest.
fn counts(pool: &PoolStatus) -> Vec<String> {
    let (want, have) = (pool.desired.unwrap_or_default(), pool.actual.unwrap_or_default());
    vec![
        super::node::running(&have, &want),
        format!("{}/{}", have.warm, want.warm),
        format!("{}/{}", have.sleeping, want.sleeping),
        pool.stopped.to_string(),
        pool.failed.to_string(),
    ]
}

pub(crate) fn tenant_details(found: &serde_json::Value) -> output::Table {
    let mut rows = vec![
        ("tenant", plain(&found["tenant_id"])),
        ("managed", plain(&found["managed"])),
        ("instances", plain(&found["instances"])),
    ];
    if let Some(desired) = found["desired"].as_object() {
        rows.push(("network", plain(&desired["network"]["ipv4_subnet"])));
        let quotas = desired["quotas"].as_object().into_iter().flatten();
        rows.extend(quotas.map(|(name, value)| ("quota", format!("{name} {value}"))));
    }
    let pools = found["pools"].as_array().into_iter().flatten();
    let pools: Vec<PoolStatus> = pools.filter_map(|pool| serde_json::from_value(pool.clone()).ok()).collect();
    let sum = |of: fn(&PoolStatus) -> Option<Usage>| {
        pools.iter().filter_map(of).fold(Usage::default(), resources::plus)
    };
    rows.push(("allocated", resources::amount(&sum(|pool| pool.allocated))));
    rows.push(("requested", resources::amount(&sum(|pool| pool.requested))));
    for pool in &pools {
        let counts = counts(pool);
        let text =
            format!("{}: running {}, warm {}, sleeping {}", pool.pool_id, counts[0], counts[1], counts[2]);
        rows.push(("pool", text));
    }
    output::properties(rows)
}

fn plain(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

#[derive(Serialize, Deserialize)]
pub(crate) struct OnePool {
    tenant_id: String,
    pool_id: String,
    managed: bool,
    status: Option<PoolStatus>,
    instances: Vec<InstanceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    desired: Option<serde_json::Value>,
}

pub(crate) fn pool_details(found: &OnePool) -> output::Table {
    let mut rows = vec![("pool", format!("{}/{}", found.tenant_id, found.pool_id))];
    if let Some(status) = &found.status {
        let counts = counts(status);
        rows.push(("running", counts[0].clone()));
        rows.push(("warm", counts[1].clone()));
        rows.push(("sleeping", counts[2].clone()));
        rows.push(("allocated", resources::amount(&status.allocated.unwrap_or_default())));
        rows.push(("requested", resources::amount(&status.requested.unwrap_or_default())));
        rows.push(("revision", output::or_dash(&status.revision)));
        rows.extend(status.deferred.iter().map(|why| ("deferred", why.clone())));
    }
    rows.push(("managed", if found.managed { "yes" } else { "no" }.to_owned()));
    if let Some(desired) = &found.desired {
        rows.push(("image", plain(&desired["flake_ref"])));
        let resources = &desired["instance_resources"];
        let number = |name: &str| resources[name].as_u64().unwrap_or_default();
        let (memory, disk) = (mib(number("mem_mib")), mib(number("data_disk_mib")));
        let each = format!("{} vCPUs, {memory} memory, {disk} data disk", number("vcpus"));
        rows.push(("each instance", each));
    }
    for one in &found.instances {
        rows.push(("instance", format!("{} {} {}", one.instance_id, one.phase, one.reason)));
    }
    output::properties(rows)
}
