//! What the API answers beside objects: plans and explanations.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rollout::{PlannedRollout, RolloutDetail};
use super::{NodeCounts, PoolCounts, UnplacedCounts};
use crate::NodeId;
use crate::placement::Labels;

/// What a write did, or would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Created,
    Configured,
    Unchanged,
    Deleted,
}

impl Outcome {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Configured => "configured",
            Self::Unchanged => "unchanged",
            Self::Deleted => "deleted",
        }
    }
}

/// What declaring objects would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FleetChange {
    pub objects: Vec<ObjectChange>,
    /// Only nodes on which something changes.
    pub nodes: Vec<NodeChange>,
    /// What no node would take.
    pub unplaced: Vec<PoolUnplaced>,
    /// Revisions that would be rolled out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rollouts: Vec<PlannedRollout>,
}

impl FleetChange {
    /// Whether anything would change at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.objects.iter().all(|object| object.outcome == Outcome::Unchanged)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ObjectChange {
    /// `pool/acme/workers`
    pub object: String,
    pub outcome: Outcome,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<FieldChange>,
}

/// One field that changes; absent means that it is not there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FieldChange {
    /// `spec.counts.running`
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeChange {
    pub node: NodeId,
    pub steps: Vec<PlannedStep>,
}

/// Instances of one pool that change on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedStep {
    /// `acme/workers`
    pub pool: String,
    /// `start`, `stop`, `move_in`, `move_out`, `replace`.
    pub action: String,
    /// `running`, `warm`, `sleeping`.
    pub phase: String,
    pub count: u32,
    /// The other node of a move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<NodeId>,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolUnplaced {
    /// `acme/workers`
    pub pool: String,
    #[serde(flatten)]
    pub unplaced: UnplacedCounts,
}

/// Why a pool is where it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolExplanation {
    /// `acme/workers`
    pub pool: String,
    pub wanted: PoolCounts,
    pub placed: Vec<NodeCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unplaced: Option<UnplacedCounts>,
    /// The quota that keeps it from having one more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// For one more running instance: the nodes that would take it, best first, then the others with what they have
    /// against it.
    pub nodes: Vec<NodeFit>,
    /// What is not done yet, and why.
    pub deferred: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutDetail>,
}

/// What machines are lacking, and which could be taken away: for an autoscaler.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FleetDemand {
    /// What has no place for want of nodes. What a quota forbids is not in it: no machine would help.
    pub unplaced: Vec<DemandShape>,
    /// Nodes that are there and have nothing: nothing placed, and nothing left of what was.
    pub empty_nodes: Vec<EmptyNode>,
}

/// Instances of one shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DemandShape {
    pub vcpus: u32,
    pub mem_mib: u64,
    /// What a node has to carry to take them.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub node_labels: Labels,
    pub counts: PoolCounts,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmptyNode {
    pub node: NodeId,
    pub cordoned: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeFit {
    pub node: NodeId,
    /// How many instances of the pool it has, in all phases.
    pub has: u32,
    /// 0 to 1000; absent of a node that would not take one more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<u64>,
    /// What the node has against one more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

/// The fields in which two values differ, by their paths below `path`.
#[must_use]
pub fn field_changes(path: &str, from: &Value, to: &Value) -> Vec<FieldChange> {
    let mut changes = Vec::new();
    collect(path, Some(from), Some(to), &mut changes);
    changes
}

fn collect(path: &str, from: Option<&Value>, to: Option<&Value>, changes: &mut Vec<FieldChange>) {
    match (from, to) {
        (Some(Value::Object(from)), Some(Value::Object(to))) => {
            let added = to.keys().filter(|key| !from.contains_key(*key));
            for key in from.keys().chain(added) {
                collect(&format!("{path}.{key}"), from.get(key), to.get(key), changes);
            }
        }
        (from, to) if from != to => {
            changes.push(FieldChange { path: path.to_owned(), from: from.cloned(), to: to.cloned() });
        }
        _ => {}
    }
}
