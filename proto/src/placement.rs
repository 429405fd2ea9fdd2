//! Where a pool's instances may and should run, as users declare it, and what nodes say of themselves for that.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::PoolId;

/// Names and values that nodes carry and pools select by. In one order, so that equal labels compare equal.
pub type Labels = BTreeMap<String, String>;

/// What keeps pools off a node unless they tolerate it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Taint {
    pub key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    pub effect: TaintEffect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaintEffect {
    /// Nothing new is placed here; what is here stays.
    NoPlace,
    /// Nothing new is placed here, and what is here is placed elsewhere.
    Drain,
}

/// Lets a pool onto nodes with a taint of this key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Toleration {
    pub key: String,
    /// Absent: any value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Absent: any effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<TaintEffect>,
}

impl Toleration {
    #[must_use]
    pub fn tolerates(&self, taint: &Taint) -> bool {
        self.key == taint.key
            && self.value.as_ref().is_none_or(|value| *value == taint.value)
            && self.effect.is_none_or(|effect| effect == taint.effect)
    }
}

/// How evenly a pool's instances are spread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// `node`, or the key of a label whose values divide the nodes into domains.
    pub by: String,
    /// How many instances more than the emptiest domain a domain may have.
    #[schemars(range(min = 1, max = 1000))]
    pub max_skew: u32,
}

/// A pool's wishes about nodes. Empty: any node that has room.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Placement {
    /// A node must carry all of these.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    pub node_labels: Labels,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// Pools of the same tenant whose nodes are preferred.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub affinity: Vec<PoolId>,
    /// Pools of the same tenant whose nodes are avoided, always.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub anti_affinity: Vec<PoolId>,
    /// The most instances of this pool on one node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_per_node: Option<u32>,
    /// A group of this tenant's pools that are kept on one node, because they must reach each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub colocate: Option<String>,
}
