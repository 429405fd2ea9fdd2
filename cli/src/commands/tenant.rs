//! `mvm tenant` and `mvm pool`: who has instances here, and how each pool fares against its document.

use clap::{Args, Subcommand};
use mvm_proto::status::{InstanceStatus, PoolStatus};
use mvm_proto::wire::control::v1::GetNodeRequest;
use mvm_proto::{PoolId, TenantId};
use serde::{Deserialize, Serialize};

use crate::client::{all_nodes, within};
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;

#[derive(Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// All tenants, a line each
    List(ListArgs),
    /// One tenant with its pools
    Info(TenantArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// All pools, a line each
    List(ListArgs),
    /// One pool with its instances
    Info(PoolArgs),
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

/// A pool, and the node that has it; empty when an agent was asked directly.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Placed {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node_id: String,
    #[serde(flatten)]
    pub(crate) pool: PoolStatus,
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
}

pub(crate) async fn run(global: &Global, command: TenantCommand) -> Run {
    match command {
        TenantCommand::List(args) => {
            let tenants = by_tenant(&pools(global, &args.endpoint).await?);
            Ok(output::show(global.output, &tenants, |_| tenant_table(&tenants))?)
        }
        TenantCommand::Info(args) => match args.endpoint.open(global).await? {
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
                Ok(output::show(global.output, &found, |_| pool_table(&found))?)
            }
        },
    }
}

pub(crate) async fn run_pool(global: &Global, command: PoolCommand) -> Run {
    match command {
        PoolCommand::List(args) => {
            let found = pools(global, &args.endpoint).await?;
            Ok(output::show(global.output, &found, |_| pool_table(&found))?)
        }
        PoolCommand::Info(args) => {
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
                    Ok(output::show(global.output, &found, |_| pool_table(&found))?)
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
            let pools = listed.tenants.into_iter().flat_map(|tenant| tenant.pools);
            Ok(pools.map(|pool| Placed { node_id: String::new(), pool }).collect())
        }
        Session::Coordinator(mut client) => {
            let nodes = match endpoint.node() {
                Some(node) => {
                    let request = GetNodeRequest { node_id: node.to_string() };
                    vec![within(global.timeout(), client.get_node(request)).await?]
                }
                None => all_nodes(&mut client, false, global.timeout()).await?,
            };
            let placed = nodes.into_iter().flat_map(|node| {
                let node_id = node.node_id;
                let pools = node.status.unwrap_or_default().pools.into_iter();
                pools.map(move |pool| Placed { node_id: node_id.clone(), pool })
            });
            Ok(placed.collect())
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
    }
    tenants
}

pub(crate) fn tenant_table(tenants: &[TenantLine]) -> output::Table {
    let mut table = output::table(["TENANT", "POOLS", "RUNNING", "WARM", "SLEEPING", "STOPPED", "FAILED"]);
    for line in tenants {
        let counts = [line.running, line.warm, line.sleeping, line.stopped, line.failed];
        let mut row = vec![line.tenant_id.clone(), line.pools.to_string()];
        row.extend(counts.map(|count| count.to_string()));
        table.add_row(row);
    }
    table
}

pub(crate) fn pool_table(pools: &[Placed]) -> output::Table {
    let with_node = pools.iter().any(|placed| !placed.node_id.is_empty());
    let mut table = output::plain();
    let mut headings =
        vec!["TENANT", "POOL", "RUNNING", "WARM", "SLEEPING", "STOPPED", "FAILED", "MANAGED", "DEFERRED"];
    if with_node {
        headings.insert(0, "NODE");
    }
    table.set_header(headings);
    for Placed { node_id, pool } in pools {
        let mut row = vec![pool.tenant_id.clone(), pool.pool_id.clone()];
        row.extend(counts(pool));
        row.push(pool.deferred.first().cloned().unwrap_or_else(|| "-".to_owned()));
        if with_node {
            row.insert(0, node_id.clone());
        }
        table.add_row(row);
    }
    table
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
        if pool.managed { "yes" } else { "no" }.to_owned(),
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
    for pool in found["pools"].as_array().into_iter().flatten() {
        if let Ok(pool) = serde_json::from_value::<PoolStatus>(pool.clone()) {
            let counts = counts(&pool);
            let text = format!(
                "{}: running {}, warm {}, sleeping {}",
                pool.pool_id, counts[0], counts[1], counts[2]
            );
            rows.push(("pool", text));
        }
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
        rows.push(("revision", output::or_dash(&status.revision)));
        rows.extend(status.deferred.iter().map(|why| ("deferred", why.clone())));
    }
    rows.push(("managed", if found.managed { "yes" } else { "no" }.to_owned()));
    if let Some(desired) = &found.desired {
        rows.push(("image", plain(&desired["flake_ref"])));
        rows.push(("resources", desired["instance_resources"].to_string()));
    }
    for one in &found.instances {
        rows.push(("instance", format!("{} {} {}", one.instance_id, one.phase, one.reason)));
    }
    output::properties(rows)
}
