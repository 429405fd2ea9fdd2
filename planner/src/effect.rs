//! What a plan comes to for each instance: the answer to "what would this document do here?".
//!
//! A plan has the next step of each instance; an effect is where that leads. What is stopped because the document no longer
//! names it and asks to prune is gone in the end, with its disk.

use std::collections::BTreeMap;
use std::fmt;

use mvm_proto::{DesiredState, PoolId, TenantId};
use serde::Serialize;

use crate::plan::{Action, NodePlan};

/// From the mildest to the gravest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// It is made, booted, woken or resumed.
    Start,
    /// It is paused or put to sleep.
    Rest,
    /// It boots another revision, or its program is started again.
    Change,
    /// It is stopped; its disk is kept for the pool's `stopped_retention_seconds`.
    Stop,
    /// It goes, with its disk.
    Destroy,
}

impl Effect {
    #[must_use]
    pub fn of(action: Action, tenant: &TenantId, pool: &PoolId, desired: &DesiredState) -> Self {
        match action {
            Action::Create | Action::Start | Action::Wake | Action::Resume => Self::Start,
            Action::Warm | Action::Sleep => Self::Rest,
            Action::Replace | Action::Restart => Self::Change,
            Action::Stop if is_named(desired, tenant, pool) => Self::Stop,
            Action::Stop | Action::Destroy => Self::Destroy,
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Start => "start",
            Self::Rest => "rest",
            Self::Change => "change",
            Self::Stop => "stop",
            Self::Destroy => "destroy",
        })
    }
}

fn is_named(desired: &DesiredState, tenant: &TenantId, pool: &PoolId) -> bool {
    desired.pools().any(|(t, p)| t.tenant_id == *tenant && p.pool_id == *pool)
}

impl NodePlan {
    /// How many instances each effect has, now and later.
    #[must_use]
    pub fn effects(&self, desired: &DesiredState) -> BTreeMap<Effect, u32> {
        let now =
            self.steps.iter().map(|step| (Effect::of(step.action, &step.tenant, &step.pool, desired), 1));
        let later = self.deferred.iter().map(|deferred| {
            (Effect::of(deferred.action, &deferred.tenant, &deferred.pool, desired), deferred.count)
        });
        let mut effects = BTreeMap::new();
        for (effect, count) in now.chain(later) {
            *effects.entry(effect).or_insert(0) += count;
        }
        effects
    }
}
