//! `mvm node`: the machines of the cluster and how they fare.

mod manage;

use clap::{Args, Subcommand};
use mvm_proto::NodeId;
use mvm_proto::status::{Capability, Condition, ConditionKind, Counts, Mark, NodeInfo, NodeStatus};
use mvm_proto::wire::control::v1::{GetNodeRequest, Node, RemoveNodeRequest};

use crate::client::{Operator, all_nodes, within};
use crate::commands::resources;
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, mib, or_dash, when, when_exactly};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// All nodes, a line each
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// One node in full; without a name and a coordinator, this machine's
    #[command(aliases = ["info", "show", "inspect"])]
    Get(GetArgs),
    /// How this machine's node fares, or the one that --endpoint names
    Stats(StatsArgs),
    /// Hand a node over: documents from declared objects, or from `mvm push`
    Manage(manage::ManageArgs),
    /// Forget a node: its session is closed at once and its certificate refused from then on
    #[command(visible_alias = "rm")]
    Remove(OneArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Absent: the node whose agent is asked
    name: Option<NodeId>,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    /// The node's id
    node: NodeId,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: NodeCommand) -> Run {
    match command {
        NodeCommand::List(args) => {
            let mut client = args.operator.connect(global).await?;
            // A table has a line per node; programs get all that is known.
            let summary = matches!(global.output, output::Format::Table | output::Format::Wide);
            let list = all_nodes(&mut client, summary, global.timeout()).await?;
            for node in &list {
                incomplete(node, Progress::new(global.quiet));
            }
            Ok(output::show(global.output, &list, |wide| nodes(&list, wide))?)
        }
        NodeCommand::Get(args) => get(global, args).await,
        NodeCommand::Stats(args) => {
            let agent = args.endpoint.open_agent(global, "a node's own statistics").await?;
            let status: NodeStatus = agent.get("/v1/node/stats").await?;
            let node = Node { node_id: status.node_id.clone(), status: Some(status), ..Node::default() };
            Ok(output::show(global.output, &node.status, |_| output::properties(status_rows(&node)))?)
        }
        NodeCommand::Manage(args) => manage::run(global, args).await,
        NodeCommand::Remove(args) => {
            let mut client = args.operator.connect(global).await?;
            let request = RemoveNodeRequest { node_id: args.node.to_string() };
            let answer = within(global.timeout(), client.remove_node(request)).await?;
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

/// Says of a node that more was left out of its row than a summary leaves out.
fn incomplete(node: &Node, progress: Progress) {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    for cut in conditions.filter(|condition| condition.is(ConditionKind::StatusComplete)) {
        progress.say(format!("warning: {} is not told whole: {}", node.node_id, cut.message));
    }
}

/// A named node is asked of the coordinator, the one that is here of its own agent.
async fn get(global: &Global, args: GetArgs) -> Run {
    let session = match &args.name {
        Some(_) => args.endpoint.open_coordinator(global).await?,
        None => args.endpoint.open(global).await?,
    };
    match (session, args.name.or(args.endpoint.node().cloned())) {
        (Session::Coordinator(mut client), Some(name)) => {
            let request = GetNodeRequest { node_id: name.to_string() };
            let node = within(global.timeout(), client.get_node(request)).await?;
            Ok(output::show(global.output, &node, |wide| details(&node, wide))?)
        }
        (Session::Coordinator(_), None) => {
            Err(Outcome::Usage(anyhow::anyhow!("which node?\nsee which there are with: mvm node list")))
        }
        (Session::Agent(agent), name) => {
            let info: NodeInfo = agent.get("/v1/node/info").await?;
            if let Some(name) = name.filter(|name| name.as_str() != info.node_id) {
                let id = &info.node_id;
                return Err(Outcome::Failed(anyhow::anyhow!("this is node {id}, not {name}")));
            }
            Ok(output::show(global.output, &info, |_| output::properties(info_rows(&info)))?)
        }
    }
}

/// What the driver can do, in one row, and each that it lacks with the reason.
fn capability_rows(capabilities: &[Capability]) -> Vec<(&'static str, String)> {
    let has: Vec<&str> =
        capabilities.iter().filter(|it| it.lacking.is_empty()).map(|it| it.name.as_str()).collect();
    let mut rows = Vec::new();
    if !has.is_empty() {
        rows.push(("driver has", has.join(", ")));
    }
    let lacking = capabilities.iter().filter(|it| !it.lacking.is_empty());
    rows.extend(lacking.map(|it| ("driver lacks", format!("{}: {}", it.name, it.lacking))));
    rows
}

pub(crate) fn info_rows(info: &NodeInfo) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("node", info.node_id.clone()),
        ("cluster", or_dash(&info.cluster)),
        ("agent", format!("{} on {} {}", or_dash(&info.version), or_dash(&info.kernel), or_dash(&info.arch))),
        ("started", when_exactly(&info.started_at)),
        ("desired state from", or_dash(&info.source)),
        ("driver", format!("{} ({})", or_dash(&info.driver), or_dash(&info.accelerator))),
    ];
    rows.extend(resources::of_node(info, None));
    rows.extend(capability_rows(&info.capabilities));
    rows.extend(info.passed_over.iter().map(|over| ("not used", format!("{}: {}", over.what, over.reason))));
    rows.extend(info.roots.iter().map(|root| ("trusts root", root.clone())));
    rows.extend(conditions(&info.conditions));
    rows
}

fn conditions(conditions: &[Condition]) -> Vec<(&'static str, String)> {
    let text = |c: &Condition| format!("{}={} {} {}", c.r#type, c.status, c.reason, c.message);
    conditions.iter().map(|condition| ("condition", text(condition))).collect()
}

pub(crate) fn nodes(nodes: &[Node], wide: bool) -> output::Table {
    let mut headings = vec![
        "NODE",
        "CONNECTED",
        "LAST SEEN",
        "ASSIGNED",
        "ACCEPTED",
        "CONVERGED",
        "RUNNING",
        "WARM",
        "SLEEPING",
        "VCPUS",
        "MEMORY",
    ];
    if wide {
        headings.extend(["DISK", "VCPUS PER PROCESSOR", "DRIVER", "VERSION", "ADDRESS", "CERTIFICATE UNTIL"]);
    }
    let mut table = output::plain();
    table.set_header(headings);
    for node in nodes {
        let status = node.status.clone().unwrap_or_default();
        let info = node.info.clone().unwrap_or_default();
        let (desired, actual) = (node.desired.unwrap_or_default(), node.actual.unwrap_or_default());
        let (used, capacity) = (status.usage.unwrap_or_default(), info.capacity.unwrap_or_default());
        let connected = match (node.connected, node.second_address.is_empty()) {
            (true, true) => "yes",
            (true, false) => "yes, two machines",
            (false, _) => "no",
        };
        let connected = connected.to_owned();
        let mut row = vec![
            node.node_id.clone(),
            connected,
            when(&node.last_seen_at, wide),
            generation(node.assigned.as_ref()),
            generation(status.accepted.as_ref()),
            generation(status.converged.as_ref()),
            running(&actual, &desired),
            format!("{}/{}", actual.warm, desired.warm),
            format!("{}/{}", actual.sleeping, desired.sleeping),
            format!("{}/{}", used.vcpus, capacity.vcpus),
            format!("{}/{}", mib(used.mem_mib), mib(capacity.mem_mib)),
        ];
        if wide {
            row.extend([
                format!("{}/{}", mib(used.disk_mib), mib(capacity.disk_mib)),
                resources::per_processor(used.vcpus, info.processors),
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

pub(crate) fn details(node: &Node, wide: bool) -> output::Table {
    let info = node.info.clone().unwrap_or_default();
    let status = node.status.clone().unwrap_or_default();
    let since = format!("since {}", when_exactly(&node.connected_since));
    let mut rows = vec![
        ("node", node.node_id.clone()),
        ("connected", if node.connected { since } else { "no".to_owned() }),
        ("last seen", when_exactly(&node.last_seen_at)),
        ("enrolled", when_exactly(&node.enrolled_at)),
        ("certificate until", when_exactly(&node.certificate_not_after)),
        ("certificate under root", or_dash(&node.certificate_root)),
        ("document assigned", generation(node.assigned.as_ref())),
        ("document accepted", generation(status.accepted.as_ref())),
        ("document converged", generation(status.converged.as_ref())),
        ("document expires", when_exactly(&node.document_expires_at)),
        ("driver", format!("{} ({})", or_dash(&info.driver), or_dash(&info.accelerator))),
        ("agent", format!("{} on {} {}", or_dash(&info.version), or_dash(&info.kernel), or_dash(&info.arch))),
    ];
    if !node.second_address.is_empty() {
        rows.push(("second machine", second_machine(node)));
    }
    rows.extend(resources::of_node(&info, Some(&status)));
    rows.extend(capability_rows(&info.capabilities));
    rows.extend(info.passed_over.iter().map(|over| ("not used", format!("{}: {}", over.what, over.reason))));
    rows.extend(info.roots.iter().map(|root| ("trusts root", root.clone())));
    rows.extend(pool_rows(&status));
    rows.extend(conditions(&info.conditions));
    rows.extend(conditions(&status.conditions));
    let shown = if wide { node.events.len() } else { node.events.len().min(10) };
    for event in &node.events[node.events.len() - shown..] {
        rows.push(("event", format!("{} {} {} {}", event.at, event.kind, event.subject, event.message)));
    }
    output::properties(rows)
}

/// Two machines with the certificate of one node, and what to do about it.
fn second_machine(node: &Node) -> String {
    format!(
        "{} at {} wants a session with the certificate of this node since {}; {} has it. Stop the wrong one, or: mvm node \
         remove {node_id}, then enrol the right one with a new token",
        or_dash(&node.second_hostname),
        node.second_address,
        when_exactly(&node.second_since),
        or_dash(&node.remote_address),
        node_id = node.node_id,
    )
}

pub(crate) fn status_rows(node: &Node) -> Vec<(&'static str, String)> {
    let status = node.status.clone().unwrap_or_default();
    let usage = status.usage.unwrap_or_default();
    let mut rows = vec![
        ("node", node.node_id.clone()),
        ("observed", when_exactly(&status.observed_at)),
        ("document accepted", generation(status.accepted.as_ref())),
        ("document converged", generation(status.converged.as_ref())),
        ("instances", usage.instances.to_string()),
        ("allocated", resources::amount(&usage)),
        ("on disk", mib(usage.disk_used_mib)),
        (
            "in memory",
            format!(
                "{}: {} by running instances, {} by warm ones",
                mib(usage.running_memory_mib.saturating_add(usage.warm_memory_mib)),
                mib(usage.running_memory_mib),
                mib(usage.warm_memory_mib)
            ),
        ),
        ("next pass", when_exactly(&status.next_reconcile_at)),
    ];
    rows.extend(pool_rows(&status));
    rows.extend(conditions(&status.conditions));
    rows
}

/// Those that run and work, of those that are wanted; and those that run and do not work.
pub(crate) fn running(have: &Counts, want: &Counts) -> String {
    let works = have.running.saturating_sub(have.down);
    let down = if have.down > 0 { format!(" ({} down)", have.down) } else { String::new() };
    format!("{works}/{}{down}", want.running)
}

fn pool_rows(status: &NodeStatus) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    for pool in &status.pools {
        let (want, have) = (pool.desired.unwrap_or_default(), pool.actual.unwrap_or_default());
        rows.push((
            "pool",
            format!(
                "{}/{}: running {}, warm {}/{}, sleeping {}/{}{}",
                pool.tenant_id,
                pool.pool_id,
                running(&have, &want),
                have.warm,
                want.warm,
                have.sleeping,
                want.sleeping,
                if pool.managed { "" } else { " (unmanaged)" }
            ),
        ));
        rows.extend(pool.deferred.iter().map(|why| ("", format!("  {why}"))));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_has_is_one_row_and_each_that_it_lacks_has_its_reason() {
        let told = |name: &str, lacking: &str| Capability { name: name.into(), lacking: lacking.into() };
        let capabilities = [told("forks", ""), told("moves", "not tried"), told("balloon", "")];
        let info = NodeInfo { capabilities: capabilities.to_vec(), ..NodeInfo::default() };
        let rows = info_rows(&info);
        let of = |name: &str| -> Vec<&str> {
            rows.iter().filter(|(row, _)| *row == name).map(|(_, text)| text.as_str()).collect()
        };
        assert_eq!(
            (of("driver has"), of("driver lacks")),
            (vec!["forks, balloon"], vec!["moves: not tried"])
        );
        // An agent that does not tell is shown as before.
        assert_eq!(
            info_rows(&NodeInfo::default()).iter().filter(|(row, _)| row.starts_with("driver ")).count(),
            0
        );
    }
}
