//! What keeps a pool off a node.

use std::collections::BTreeSet;
use std::fmt;

use mvm_proto::PoolId;
use mvm_proto::placement::{Labels, Placement, Taint, TaintEffect};

use crate::limits::Shortage;

/// Why a node is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    Away,
    Cordoned,
    /// The label that it would have to carry.
    Label {
        key: String,
        value: String,
    },
    Taint(Taint),
    Shortage(String),
    MaxPerNode(u32),
    AntiAffinity(PoolId),
    /// Its domain has as many more than the emptiest as `max_skew` allows.
    Skew {
        by: String,
        max_skew: u32,
    },
    /// Without this label it belongs to none of the domains that the pool is spread over.
    NoDomain {
        key: String,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Away => f.write_str("the node is away"),
            Self::Cordoned => f.write_str("the node is cordoned"),
            Self::Label { key, value } => write!(f, "the node lacks the label {key}={value}"),
            Self::Taint(Taint { key, value, .. }) => {
                write!(f, "the node has the taint {key}={value}, which the pool does not tolerate")
            }
            Self::Shortage(shortage) => f.write_str(shortage),
            Self::MaxPerNode(max) => write!(f, "max_per_node is {max}"),
            Self::AntiAffinity(pool) => write!(f, "the node runs {pool}, which anti_affinity names"),
            Self::Skew { by, max_skew } => write!(f, "spread by {by}: max_skew is {max_skew}"),
            Self::NoDomain { key } => write!(f, "spread by {key}: the node lacks this label"),
        }
    }
}

/// What keeps an instance from its place, as one of a few: of all nodes the one that came closest says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnplacedCause {
    /// Of its tenant.
    Quota,
    /// It has to be beside others that are placed already.
    Group,
    /// There is no node, or none that could be asked.
    NoNode,
    Away,
    Cordoned,
    Labels,
    Taint,
    Room,
    MaxPerNode,
    AntiAffinity,
    Spread,
}

impl UnplacedCause {
    pub const ALL: [Self; 11] = [
        Self::Quota,
        Self::Group,
        Self::NoNode,
        Self::Away,
        Self::Cordoned,
        Self::Labels,
        Self::Taint,
        Self::Room,
        Self::MaxPerNode,
        Self::AntiAffinity,
        Self::Spread,
    ];

    /// Its name in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quota => "quota",
            Self::Group => "group",
            Self::NoNode => "no_node",
            Self::Away => "away",
            Self::Cordoned => "cordoned",
            Self::Labels => "labels",
            Self::Taint => "taint",
            Self::Room => "room",
            Self::MaxPerNode => "max_per_node",
            Self::AntiAffinity => "anti_affinity",
            Self::Spread => "spread",
        }
    }
}

impl From<&Obstacle> for UnplacedCause {
    fn from(obstacle: &Obstacle) -> Self {
        match obstacle {
            Obstacle::Away => Self::Away,
            Obstacle::Cordoned => Self::Cordoned,
            Obstacle::Label { .. } => Self::Labels,
            Obstacle::Taint(_) => Self::Taint,
            Obstacle::Shortage(_) => Self::Room,
            Obstacle::MaxPerNode(_) => Self::MaxPerNode,
            Obstacle::AntiAffinity(_) => Self::AntiAffinity,
            Obstacle::Skew { .. } | Obstacle::NoDomain { .. } => Self::Spread,
        }
    }
}

impl From<Shortage> for Obstacle {
    fn from(shortage: Shortage) -> Self {
        Self::Shortage(shortage.to_string())
    }
}

/// What labels and taints have against a pool; equal for all nodes that carry the same.
pub(super) fn against_class(
    placement: &Placement,
    labels: &Labels,
    taints: &BTreeSet<Taint>,
) -> Result<(), Obstacle> {
    for (key, value) in &placement.node_labels {
        if labels.get(key) != Some(value) {
            return Err(Obstacle::Label { key: key.clone(), value: value.clone() });
        }
    }
    for taint in taints {
        if !tolerated(placement, taint) {
            return Err(Obstacle::Taint(taint.clone()));
        }
    }
    Ok(())
}

/// Whether a taint drives out what is placed on its node.
pub(super) fn drives_out(placement: &Placement, taint: &Taint) -> bool {
    taint.effect == TaintEffect::Drain && !tolerated(placement, taint)
}

fn tolerated(placement: &Placement, taint: &Taint) -> bool {
    placement.tolerations.iter().any(|toleration| toleration.tolerates(taint))
}
