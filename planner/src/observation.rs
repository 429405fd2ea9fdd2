//! What a node saw of itself: the planner's only knowledge of the world.
//!
//! The JSON form is what `mvm agent observe` prints and `mvm plan node --observed` reads.

mod decode;
pub mod schema;

use mvm_proto::document::{Pool, Resources, Tenant};
use mvm_proto::{Digest, InstanceId, Phase, PoolId, TenantId, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::revision::revision_of;
use crate::workload::Workload;

pub use decode::{MAX_OBSERVATION_BYTES, ObservationErrors};

/// Everything that runs, rests or failed on one node, and what the node can bear.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    pub capacity: Capacity,
    pub instances: Vec<ObservedInstance>,
    /// What can't be started now, whatever the counts say: secrets or artifacts are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
    /// The node is short of memory now: nothing more is started for the counts, and what is idle is put to sleep.
    #[serde(default, skip_serializing_if = "is_false")]
    pub memory_pressure: bool,
}

/// What the whole node may use, whatever the tenants' quotas add up to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    pub vcpus: u32,
    pub mem_mib: u64,
    pub disk_mib: u64,
    pub max_instances: u32,
}

/// A tenant, or one of its pools, whose instances can't be started, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Blocked {
    pub tenant: TenantId,
    /// Absent: all of the tenant's pools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ObservedInstance {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub id: InstanceId,
    pub phase: Phase,
    /// When it entered its phase.
    pub since: Timestamp,
    /// What it was made of when it last booted.
    pub revision: Digest,
    pub resources: Resources,
    /// The last work it did; absent: none since `since`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<Timestamp>,
    /// Since when it has nothing to do; absent: busy, or not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since: Option<Timestamp>,
    /// A person acted on it: hands off until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub override_until: Option<Timestamp>,
    /// A sandbox holds it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub claimed: bool,
    /// It is on its way to or from another node, and left alone: it fills a place in its home count where one is free, and is
    /// no surplus where none is.
    #[serde(default, skip_serializing_if = "is_false")]
    pub moving: bool,
    /// A request woke it, not a count.
    #[serde(default, skip_serializing_if = "is_false")]
    pub on_demand: bool,
    /// The count in which a woken instance keeps its place; absent: running. Of one that moves absent: its phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Phase>,
    /// It was booted only to be put to this phase, or (running) to stand in while another is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging: Option<Phase>,
    /// A step is being carried out on it that ends in this phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving_to: Option<Phase>,
    /// The last step on it failed; the next may be tried then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_not_before: Option<Timestamp>,
    /// How many steps on it failed in a row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures: u32,
    /// The program in its guest; absent: it works, and was not started again since the guest was booted. Boxed: most
    /// instances have none, and plans go over all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<Workload>>,
    /// Its address's distance from its subnet's own; absent: it is one that this node may give.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub offset: Option<u32>,
}

impl ObservedInstance {
    /// One of the pool as it would boot now, of which nothing else is known.
    #[must_use]
    pub fn of(tenant: &Tenant, pool: &Pool, id: InstanceId, phase: Phase, since: Timestamp) -> Self {
        Self {
            tenant: tenant.tenant_id.clone(),
            pool: pool.pool_id.clone(),
            id,
            phase,
            since,
            revision: revision_of(tenant, pool),
            resources: pool.instance_resources,
            last_used_at: None,
            idle_since: None,
            override_until: None,
            claimed: false,
            moving: false,
            on_demand: false,
            home: None,
            staging: None,
            moving_to: None,
            retry_not_before: None,
            failures: 0,
            workload: None,
            offset: None,
        }
    }

    /// The count that one that moves has its place in.
    pub(crate) fn moving_in(&self) -> Option<Phase> {
        self.moving.then(|| self.home.unwrap_or(self.phase))
    }

    /// Only a replacement ends in the phase where it began, and nothing else goes from a boot straight to rest.
    ///
    /// Of a running one this tells only until it is stopped: from there on it looks like any other start.
    pub(crate) fn is_being_replaced(&self) -> bool {
        match self.moving_to {
            Some(Phase::Warm | Phase::Sleeping) if self.is_startable() => true,
            to => to == Some(self.phase) && !self.is_undecided(),
        }
    }

    /// It was booted for something else and runs, but its step is not over: either that boot just ended, or it is being
    /// kept as one of those that run. The two look the same.
    pub(crate) fn is_undecided(&self) -> bool {
        self.staging.is_some() && self.phase == Phase::Running && self.moving_to == Some(Phase::Running)
    }

    /// Its VM ended by itself, or the last step on it failed, also when starting it again was cut short: nothing decided
    /// that it should not run.
    pub(crate) fn has_failed(&self) -> bool {
        self.phase == Phase::Failed || (self.is_startable() && self.retry_not_before.is_some())
    }

    /// Its guest runs and its program does not work.
    pub(crate) fn is_down(&self) -> bool {
        self.phase == Phase::Running && self.workload.as_ref().is_some_and(|workload| workload.is_down())
    }

    /// Stopped, failed or never booted: a start boots it anew.
    pub(crate) fn is_startable(&self) -> bool {
        matches!(self.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_false(value: &bool) -> bool {
    !value
}
