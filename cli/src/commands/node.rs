//! `mvm node`: the machines of the cluster and how they fare.

use clap::{Args, Subcommand};
use mvm_proto::NodeId;
use mvm_proto::status::{Counts, Mark};
use mvm_proto::wire::control::v1::{GetNodeRequest, ListNodesRequest, Node, RemoveNodeRequest};

use crate::args::Global;
use crate::client::{Operator, within};
use crate::exit::Run;
use crate::output::{self, or_dash};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// All nodes, a line each
    List(ListArgs),
    /// One node in full
    Info(OneArgs),
    /// Forget a node: its session is closed at once and its certificate refused from then on
    Remove(OneArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    node: NodeId,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: NodeCommand) -> Run {
    match command {
        NodeCommand::List(args) => {
            let mut client = args.operator.connect(global).await?;
            let list = within(global.timeout, client.list_nodes(ListNodesRequest {})).await?;
            Ok(output::show(global.output, &list.nodes, |wide| nodes(&list.nodes, wide))?)
        }
        NodeCommand::Info(args) => {
            let mut client = args.operator.connect(global).await?;
            let request = GetNodeRequest { node_id: args.node.to_string() };
            let node = within(global.timeout, client.get_node(request)).await?;
            Ok(output::show(global.output, &node, |wide| details(&node, wide))?)
        }
        NodeCommand::Remove(args) => {
            let mut client = args.operator.connect(global).await?;
            let request = RemoveNodeRequest { node_id: args.node.to_string() };
            let answer = within(global.timeout, client.remove_node(request)).await?;
            let session =
                if answer.session_closed { "its session is closed" } else { "it was not connected" };
            let node = args.node;
            Progress::new(global.quiet).say(format!(
                "{node} is removed; {session}. What it runs goes on running there: stop it with \
                 `mvm agent reconcile` and an empty document on the node."
            ));
            Ok(())
        }
    }
}

pub(crate) fn nodes(nodes: &[Node], wide: bool) -> comfy_table::Table {
    let mut table = if wide {
        output::table([
            "NODE",
            "CONNECTED",
            "ASSIGNED",
            "ACCEPTED",
            "CONVERGED",
            "RUNNING",
            "WARM",
            "SLEEPING",
            "DRIVER",
            "VERSION",
            "ADDRESS",
            "CERTIFICATE UNTIL",
        ])
    } else {
        output::table([
            "NODE",
            "CONNECTED",
            "ASSIGNED",
            "ACCEPTED",
            "CONVERGED",
            "RUNNING",
            "WARM",
            "SLEEPING",
        ])
    };
    for node in nodes {
        let status = node.status.clone().unwrap_or_default();
        let mut desired = Counts::default();
        let mut actual = Counts::default();
        for pool in &status.pools {
            let (want, have) = (pool.desired.unwrap_or_default(), pool.actual.unwrap_or_default());
            desired.running += want.running;
            desired.warm += want.warm;
            desired.sleeping += want.sleeping;
            actual.running += have.running;
            actual.warm += have.warm;
            actual.sleeping += have.sleeping;
        }
        let connected = if node.connected { "yes" } else { "no" }.to_owned();
        let mut row = vec![
            node.node_id.clone(),
            connected,
            generation(node.assigned.as_ref()),
            generation(status.accepted.as_ref()),
            generation(status.converged.as_ref()),
            format!("{}/{}", actual.running, desired.running),
            format!("{}/{}", actual.warm, desired.warm),
            format!("{}/{}", actual.sleeping, desired.sleeping),
        ];
        if wide {
            let info = node.info.clone().unwrap_or_default();
            row.extend([
                or_dash(&info.driver),
                or_dash(&info.version),
                or_dash(&node.remote_address),
                or_dash(&node.certificate_not_after),
            ]);
        }
        table.add_row(row);
    }
    table
}

fn generation(mark: Option<&Mark>) -> String {
    mark.map_or_else(|| "-".to_owned(), |mark| format!("{}.{}", mark.epoch, mark.generation))
}

fn details(node: &Node, wide: bool) -> comfy_table::Table {
    let info = node.info.clone().unwrap_or_default();
    let status = node.status.clone().unwrap_or_default();
    let capacity = info.capacity.unwrap_or_default();
    let mut rows = vec![
        ("node", node.node_id.clone()),
        (
            "connected",
            if node.connected { format!("since {}", node.connected_since) } else { "no".to_owned() },
        ),
        ("last seen", or_dash(&node.last_seen_at)),
        ("enrolled", or_dash(&node.enrolled_at)),
        ("certificate until", or_dash(&node.certificate_not_after)),
        ("document assigned", generation(node.assigned.as_ref())),
        ("document accepted", generation(status.accepted.as_ref())),
        ("document converged", generation(status.converged.as_ref())),
        ("document expires", or_dash(&node.document_expires_at)),
        ("driver", format!("{} ({})", or_dash(&info.driver), or_dash(&info.accelerator))),
        (
            "capacity",
            format!(
                "{} vCPUs, {} MiB memory, {} MiB disk",
                capacity.vcpus, capacity.mem_mib, capacity.disk_mib
            ),
        ),
        ("agent", format!("{} on {} {}", or_dash(&info.version), or_dash(&info.kernel), or_dash(&info.arch))),
    ];
    for pool in &status.pools {
        let (want, have) = (pool.desired.unwrap_or_default(), pool.actual.unwrap_or_default());
        rows.push((
            "pool",
            format!(
                "{}/{}: running {}/{}, warm {}/{}, sleeping {}/{}{}",
                pool.tenant_id,
                pool.pool_id,
                have.running,
                want.running,
                have.warm,
                want.warm,
                have.sleeping,
                want.sleeping,
                if pool.managed { "" } else { " (unmanaged)" }
            ),
        ));
        rows.extend(pool.deferred.iter().map(|why| ("", format!("  {why}"))));
    }
    for condition in info.conditions.iter().chain(&status.conditions) {
        rows.push((
            "condition",
            format!("{}={} {} {}", condition.r#type, condition.status, condition.reason, condition.message),
        ));
    }
    let shown = if wide { node.events.len() } else { node.events.len().min(10) };
    for event in &node.events[node.events.len() - shown..] {
        rows.push(("event", format!("{} {} {} {}", event.at, event.kind, event.subject, event.message)));
    }
    output::properties(rows)
}
