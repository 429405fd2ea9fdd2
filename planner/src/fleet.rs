//! Which nodes run how many instances of which pool.
//!
//! [`place`] answers for a whole [`Fleet`] at once. [`Placer`] holds a fleet between changes and answers for what a
//! change touches: the same answer, at a cost that does not grow with what exists. Both keep what already has a place:
//! an instance changes its node only when its node is lost, drained, removed or too small for it.
//!
//! A node is [`filter`]ed by what a pool demands, then ranked by a [`score`]; [`index`] keeps the nodes in that order.
//! [`explain`] tells, for one pool, why each node was taken or not; it is computed only when it is asked for.

mod allow;
mod beyond;
pub mod blocks;
mod demand;
pub mod diff;
pub mod drain;
mod explain;
mod filter;
mod grow;
mod index;
mod names;
pub mod networks;
mod nodes;
mod numbers;
pub mod offers;
mod placer;
mod queue;
pub mod rollout;
pub mod scale;
mod score;
pub mod shares;
mod shrink;
mod slab;
mod spread;
mod state;
mod tops;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::placement::{Labels, Placement, Taint};
use mvm_proto::{Digest, NodeId, PoolId, TenantId, Timestamp};

use crate::observation::Capacity;

pub use demand::{Demand, EmptyNode};
pub use explain::{Explanation, NodeVerdict, Verdict};
pub use filter::{Obstacle, UnplacedCause};
pub use placer::Placer;
pub use score::Score;

/// How long a node may be away by default before what was placed on it is placed elsewhere.
pub const AWAY_GRACE: Duration = Duration::from_secs(300);

/// How long a node may be away before what was placed on it is placed elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AwayGrace(pub Duration);

impl Default for AwayGrace {
    fn default() -> Self {
        Self(AWAY_GRACE)
    }
}

/// A pool in its tenant. In this order pools of one rank are placed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolKey {
    pub tenant: TenantId,
    pub pool: PoolId,
}

/// What a pool demands of the fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetPool {
    pub resources: Resources,
    /// Over all nodes.
    pub counts: DesiredCounts,
    /// Nodes that have it are preferred.
    pub image: Option<Digest>,
    pub role: PoolRole,
    pub critical: bool,
    pub placement: Placement,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetTenant {
    /// Over all nodes.
    pub quotas: Quotas,
}

/// How much of a node may be promised, in thousandths of what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overcommit {
    pub vcpus_permille: u32,
    pub mem_permille: u32,
}

impl Default for Overcommit {
    fn default() -> Self {
        Self { vcpus_permille: 4000, mem_permille: 1000 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetNode {
    pub labels: Labels,
    pub taints: BTreeSet<Taint>,
    /// Takes nothing new.
    pub cordoned: bool,
    /// Since when it has not been heard of. It takes nothing new meanwhile.
    pub away_since: Option<Timestamp>,
    pub capacity: Capacity,
    pub overcommit: Overcommit,
    pub images: BTreeSet<Digest>,
    /// What it has that is not placed on it.
    pub beyond: BTreeMap<PoolKey, Beyond>,
}

/// What a node has of a pool beyond what is placed on it. It counts against capacity, quotas and `max_per_node`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beyond {
    pub resources: Resources,
    /// The most that any document says that the node may still follow, see [`offers::Offers::most`]: the larger of this
    /// and of what is placed counts, so that nothing is counted twice, and nothing that may still run is forgotten.
    pub still_there: DesiredCounts,
    /// Claimed instances, which are in no count.
    pub claimed: DesiredCounts,
}

/// How many instances of a pool each node has.
pub type Placed = BTreeMap<NodeId, DesiredCounts>;

/// All that placement is decided from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fleet {
    pub nodes: BTreeMap<NodeId, FleetNode>,
    pub tenants: BTreeMap<TenantId, FleetTenant>,
    pub pools: BTreeMap<PoolKey, FleetPool>,
    /// Where instances were placed before.
    pub placed: BTreeMap<PoolKey, Placed>,
    /// When this coordinator became the leader: it heard of no node before, so no grace ends earlier than one after it.
    pub elected_at: Option<Timestamp>,
    pub away_grace: AwayGrace,
}

impl Fleet {
    /// Whether what is placed on a node that is away since then is placed elsewhere.
    #[must_use]
    pub fn is_lost(&self, away_since: Timestamp, now: Timestamp) -> bool {
        is_lost(away_since, self.elected_at, self.away_grace, now)
    }
}

fn is_lost(
    away_since: Timestamp,
    elected_at: Option<Timestamp>,
    AwayGrace(grace): AwayGrace,
    now: Timestamp,
) -> bool {
    now.since(elected_at.map_or(away_since, |elected_at| away_since.max(elected_at))) >= grace
}

/// What could not be placed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unplaced {
    pub counts: DesiredCounts,
    pub cause: UnplacedCause,
    pub reason: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FleetPlan {
    pub placed: BTreeMap<PoolKey, Placed>,
    pub unplaced: BTreeMap<PoolKey, Unplaced>,
}

/// The placement of every pool: as much as has room and quota, with what is placed already left where it is.
#[must_use]
pub fn place(fleet: &Fleet, now: Timestamp) -> FleetPlan {
    let mut placer = Placer::of(fleet);
    placer.settle(now);
    placer.plan()
}
