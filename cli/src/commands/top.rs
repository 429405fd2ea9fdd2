//! `mvm top`: what nodes and pools have of what there is, as the nodes last said.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use mvm_proto::TenantId;
use mvm_proto::object::{DemandShape, FleetDemand};
use mvm_proto::status::{Counts, Usage};
use mvm_proto::wire::control::v1::Node;
use serde::Serialize;

use crate::client::{Operator, all_nodes};
use crate::commands::resources::plus;
use crate::exit::Run;
use crate::global::Global;
use crate::objects::{ObjectArgs, within};
use crate::output::{self, Table, mib};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum TopCommand {
    /// Each node: what its instances have, of what it may give
    #[command(alias = "node", after_help = "Example:\n  mvm top nodes")]
    Nodes(TopNodesArgs),
    /// Each pool: its instances and what they have, over all nodes
    #[command(alias = "pool", after_help = "Example:\n  mvm top pools -t acme")]
    Pools(TopPoolsArgs),
    /// What has no place for want of nodes, by shape, and the nodes that have nothing
    #[command(after_help = "Examples:\n  mvm top demand\n  mvm top demand -o json")]
    Demand(ObjectArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TopNodesArgs {
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct TopPoolsArgs {
    /// Only this tenant's
    #[arg(short, long, value_name = "TENANT", env = "MVM_TENANT")]
    tenant: Option<TenantId>,
    /// Of all tenants
    #[arg(short = 'A', long)]
    all_tenants: bool,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: TopCommand) -> Run {
    match command {
        TopCommand::Nodes(args) => {
            let mut client = args.operator.connect(global).await?;
            let nodes = all_nodes(&mut client, false, global.timeout()).await?;
            let lines: Vec<_> = nodes.iter().map(NodeLine::of).collect();
            Ok(output::show(global.output, &lines, |_| node_table(&lines))?)
        }
        TopCommand::Pools(args) => {
            let mut client = args.operator.connect(global).await?;
            let nodes = all_nodes(&mut client, false, global.timeout()).await?;
            let only = args.tenant.filter(|_| !args.all_tenants);
            let lines = pool_lines(&nodes, only.as_ref());
            Ok(output::show(global.output, &lines, |_| pool_table(&lines))?)
        }
        TopCommand::Demand(args) => {
            let mut objects = args.open(global).await?;
            let demand = within(global.timeout(), objects.demand()).await?;
            if demand == FleetDemand::default() {
                Progress::new(global.quiet).say("nothing lacks a place, and no node is empty");
            }
            Ok(output::show_all(global.output, &demand, |_| demand_tables(&demand))?)
        }
    }
}

/// What a node's instances have, and what it may give.
#[derive(Debug, Serialize)]
pub(crate) struct NodeLine {
    node: String,
    connected: bool,
    allocated: Usage,
    capacity: Usage,
}

impl NodeLine {
    pub(crate) fn of(node: &Node) -> Self {
        let capacity = node.info.as_ref().and_then(|info| info.capacity).unwrap_or_default();
        let capacity = Usage {
            vcpus: capacity.vcpus,
            mem_mib: capacity.mem_mib,
            disk_mib: capacity.disk_mib,
            instances: capacity.max_instances,
            ..Usage::default()
        };
        let allocated = node.status.as_ref().and_then(|status| status.usage).unwrap_or_default();
        Self { node: node.node_id.clone(), connected: node.connected, allocated, capacity }
    }
}

pub(crate) fn node_table(lines: &[NodeLine]) -> Table {
    let mut table =
        output::table(["NODE", "CONNECTED", "VCPUS", "%", "MEMORY", "%", "DISK", "%", "INSTANCES"]);
    for NodeLine { node, connected, allocated, capacity } in lines {
        let of = |has: String, all: String| format!("{has}/{all}");
        table.add_row([
            node.clone(),
            if *connected { "yes" } else { "no" }.to_owned(),
            of(allocated.vcpus.to_string(), capacity.vcpus.to_string()),
            percent(allocated.vcpus.into(), capacity.vcpus.into()),
            of(mib(allocated.mem_mib), mib(capacity.mem_mib)),
            percent(allocated.mem_mib, capacity.mem_mib),
            of(mib(allocated.disk_mib), mib(capacity.disk_mib)),
            percent(allocated.disk_mib, capacity.disk_mib),
            of(allocated.instances.to_string(), capacity.instances.to_string()),
        ]);
    }
    table
}

fn percent(part: u64, whole: u64) -> String {
    let percent = part.saturating_mul(100).checked_div(whole);
    percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

/// A pool's instances on all nodes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PoolLine {
    tenant: String,
    pool: String,
    nodes: u32,
    running: u32,
    warm: u32,
    sleeping: u32,
    allocated: Usage,
}

pub(crate) fn pool_lines(nodes: &[Node], only: Option<&TenantId>) -> Vec<PoolLine> {
    let mut lines: BTreeMap<(String, String), PoolLine> = BTreeMap::new();
    for pool in nodes.iter().filter_map(|node| node.status.as_ref()).flat_map(|status| &status.pools) {
        if only.is_some_and(|only| only.as_str() != pool.tenant_id) {
            continue;
        }
        let key = (pool.tenant_id.clone(), pool.pool_id.clone());
        let line = lines.entry(key.clone()).or_insert_with(|| PoolLine {
            tenant: key.0,
            pool: key.1,
            ..PoolLine::default()
        });
        let Counts { running, warm, sleeping, .. } = pool.actual.unwrap_or_default();
        line.nodes += 1;
        line.running += running;
        line.warm += warm;
        line.sleeping += sleeping;
        line.allocated = plus(line.allocated, pool.allocated.unwrap_or_default());
    }
    lines.into_values().collect()
}

pub(crate) fn pool_table(lines: &[PoolLine]) -> Table {
    let mut table =
        output::table(["TENANT", "POOL", "NODES", "RUNNING", "WARM", "SLEEPING", "VCPUS", "MEMORY", "DISK"]);
    for line in lines {
        let counts = [line.nodes, line.running, line.warm, line.sleeping, line.allocated.vcpus];
        let sizes = [line.allocated.mem_mib, line.allocated.disk_mib].map(mib);
        let names = [line.tenant.clone(), line.pool.clone()];
        table.add_row(names.into_iter().chain(counts.map(|count| count.to_string())).chain(sizes));
    }
    table
}

/// What lacks a node, then the nodes that lack instances.
pub(crate) fn demand_tables(demand: &FleetDemand) -> Vec<Table> {
    let mut shapes = output::table(["VCPUS", "MEMORY", "NODE LABELS", "RUNNING", "WARM", "SLEEPING"]);
    for DemandShape { vcpus, mem_mib, node_labels, counts } in &demand.unplaced {
        let labels: Vec<_> = node_labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let labels = if labels.is_empty() { "-".to_owned() } else { labels.join(",") };
        let counts = [counts.running, counts.warm, counts.sleeping].map(|count| count.to_string());
        shapes.add_row([vcpus.to_string(), mib(*mem_mib), labels].into_iter().chain(counts));
    }
    let mut empty = output::table(["EMPTY NODE", "CORDONED"]);
    for node in &demand.empty_nodes {
        empty.add_row([node.node.as_str(), if node.cordoned { "yes" } else { "no" }]);
    }
    vec![shapes, empty]
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::{NodeStatus, PoolStatus};

    use super::*;

    fn node(name: &str, pools: &[(&str, &str, u32)]) -> Node {
        let pool = |(tenant, pool, running): &(&str, &str, u32)| PoolStatus {
            tenant_id: (*tenant).to_owned(),
            pool_id: (*pool).to_owned(),
            actual: Some(Counts { running: *running, ..Counts::default() }),
            allocated: Some(Usage { vcpus: 2 * running, mem_mib: 1024, ..Usage::default() }),
            ..PoolStatus::default()
        };
        let status = NodeStatus { pools: pools.iter().map(pool).collect(), ..NodeStatus::default() };
        Node { node_id: name.to_owned(), status: Some(status), ..Node::default() }
    }

    #[test]
    fn demand_is_told_by_shape_beside_the_nodes_that_have_nothing() {
        let demand: FleetDemand = serde_json::from_value(serde_json::json!({
            "unplaced": [
                { "vcpus": 2, "mem_mib": 4096, "node_labels": { "gpu": "yes" }, "counts": { "running": 3 } },
                { "vcpus": 4, "mem_mib": 512, "counts": { "warm": 1 } },
            ],
            "empty_nodes": [{ "node": "n7", "cordoned": true }],
        }))
        .unwrap();
        let told: Vec<String> = demand_tables(&demand).iter().map(Table::render).collect();
        let shapes = "\
VCPUS  MEMORY     NODE LABELS  RUNNING  WARM  SLEEPING
2      4.0 GiB    gpu=yes      3        0     0
4      512.0 MiB  -            0        1     0
";
        assert_eq!(told, [shapes, "EMPTY NODE  CORDONED\nn7          yes\n"]);
    }

    #[test]
    fn a_pool_is_summed_over_its_nodes() {
        let nodes = [
            node("n1", &[("acme", "workers", 2), ("globex", "web", 1)]),
            node("n2", &[("acme", "workers", 3)]),
        ];
        let expected = "\
TENANT  POOL     NODES  RUNNING  WARM  SLEEPING  VCPUS  MEMORY   DISK
acme    workers  2      5        0     0         10     2.0 GiB  0.0 MiB
globex  web      1      1        0     0         2      1.0 GiB  0.0 MiB
";
        assert_eq!(pool_table(&pool_lines(&nodes, None)).render(), expected);
        let acme = "acme".parse().unwrap();
        assert_eq!(pool_lines(&nodes, Some(&acme)).len(), 1);
        assert_eq!((percent(1, 3), percent(1, 0)), ("33%".to_owned(), "-".to_owned()));
    }
}
