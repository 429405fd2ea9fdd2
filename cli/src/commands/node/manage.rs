//! `mvm node manage`: a node gets its documents from declared objects, or from pushes. Says what the change takes away, and asks
//! before it is made.

use clap::{Args, ValueEnum};
use mvm_client::{Name, Objects};
use mvm_proto::NodeId;
use mvm_proto::object::{ManagedBy, kind_named};
use mvm_proto::status::PoolStatus;
use mvm_proto::wire::control::v1::GetNodeRequest;
use serde_json::json;

use crate::client::{Operator, within};
use crate::confirm::{Question, confirm};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{self, set_in_spec, tell};

const EXAMPLES: &str = "\
Examples:
  mvm node manage n1 --by objects      placement fills it from declared tenants and pools
  mvm node manage n1 --by push         nothing is placed there any more; `mvm push` gives it documents";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ManageArgs {
    /// The node's id
    node: NodeId,
    /// Where the node's documents come from
    #[arg(long, value_enum)]
    by: By,
    /// Do not ask when instances are affected
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum By {
    Objects,
    Push,
}

impl From<By> for ManagedBy {
    fn from(by: By) -> Self {
        match by {
            By::Objects => Self::Objects,
            By::Push => Self::Push,
        }
    }
}

pub(super) async fn run(global: &Global, args: ManageArgs) -> Run {
    let kind = kind_named("nodes").map_err(|error| Outcome::Usage(anyhow::anyhow!(error)))?;
    let name = Name::of(kind, None, args.node.as_str());
    let by = ManagedBy::from(args.by);
    let channel = args.operator.channel(global).await?;
    let mut declared = Objects::new(channel.clone());
    let object = objects::within(global.timeout(), declared.get(&name)).await?;
    if object.spec.get("managed_by").and_then(|by| by.as_str()) == Some(by.as_str()) {
        return Ok(tell(global.output, &name, &format!("is managed by {} already", by.as_str()))?);
    }
    if !args.yes {
        let request = GetNodeRequest { node_id: args.node.to_string() };
        let node = within(global.timeout(), mvm_client::control(channel).get_node(request)).await?;
        let pools = node.status.unwrap_or_default().pools;
        if let Some(consequence) = consequence(&args.node, by, &pools) {
            let question = Question {
                text: "Hand it over all the same?",
                undone: "nothing was changed",
                advice: "repeat with --yes",
            };
            confirm(&consequence, &question)?;
        }
    }
    let by_text = json!(by.as_str());
    let setting = set_in_spec(&mut declared, &name, "managed_by", &by_text);
    objects::within(global.timeout(), setting).await?;
    Ok(tell(global.output, &name, &format!("is managed by {}", by.as_str()))?)
}

/// What becomes of the instances that a node has; none if it has none.
fn consequence(node: &NodeId, by: ManagedBy, pools: &[PoolStatus]) -> Option<String> {
    let count = |pool: &PoolStatus| {
        let actual = pool.actual.unwrap_or_default();
        let all = [actual.running, actual.warm, actual.sleeping, pool.stopped, pool.failed];
        all.into_iter().map(u64::from).sum::<u64>()
    };
    let has = pools.iter().map(|pool| (pool, count(pool))).filter(|(_, count)| *count > 0);
    let has: Vec<_> =
        has.map(|(pool, count)| format!("{}/{} ({count})", pool.tenant_id, pool.pool_id)).collect();
    if has.is_empty() {
        return None;
    }
    let has = has.join(", ");
    Some(match by {
        ManagedBy::Objects => format!(
            "{node} has instances of {has}: those of pools that no object declares are stopped, then destroyed with their disks"
        ),
        ManagedBy::Push => format!(
            "{node} has instances of {has}: they are placed on other nodes as well, and run here until the next `mvm push` to \
             {node}; give it a taint with the effect `drain` first (`mvm edit node {node}`) to move them"
        ),
    })
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::Counts;

    use super::*;

    #[test]
    fn what_a_node_has_is_told_before_it_is_handed_over() {
        let node: NodeId = "n1".parse().unwrap();
        let empty =
            PoolStatus { tenant_id: "acme".to_owned(), pool_id: "db".to_owned(), ..PoolStatus::default() };
        let pool = PoolStatus {
            pool_id: "web".to_owned(),
            actual: Some(Counts { running: 2, ..Counts::default() }),
            stopped: 1,
            ..empty.clone()
        };
        assert_eq!(consequence(&node, ManagedBy::Objects, std::slice::from_ref(&empty)), None);
        let told = consequence(&node, ManagedBy::Objects, &[empty, pool.clone()]).unwrap();
        assert!(told.contains("of acme/web (3)") && told.contains("destroyed"), "{told}");
        let told = consequence(&node, ManagedBy::Push, &[pool]).unwrap();
        assert!(told.contains("until the next `mvm push` to n1"), "{told}");
    }
}
