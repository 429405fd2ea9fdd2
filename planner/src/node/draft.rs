//! The plan while the stages add to it.

use std::collections::BTreeSet;

use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{InstanceId, Phase};

use super::budget::Budget;
use super::clock::Clock;
use super::hold::Hold;
use super::pressure::MEMORY_PRESSURE;
use crate::limits::Shortage;
use crate::observation::ObservedInstance;
use crate::plan::{Action, Deferred, NodePlan, Step};
use crate::usage::Usage;

/// What the passes share: the plan so far and what is left to spend.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) plan: NodePlan,
    pub(crate) budget: Budget,
    pub(crate) clock: Clock,
    /// The node is short of memory: no pass may start anything.
    pub(crate) under_pressure: bool,
    pub(crate) freshness: Freshness,
}

/// Whether the document may still change anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    Current,
    /// What it asks for is kept, not changed: no pass may make, replace, stop or destroy an instance.
    Expired,
}

/// The pool that a pass works on, and its places in the budget.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolRef<'a> {
    pub(crate) tenant: &'a Tenant,
    pub(crate) pool: &'a Pool,
    pub(crate) tenant_index: usize,
    pub(crate) pool_index: usize,
    /// Among the tenant's pools, as written.
    pub(crate) position: usize,
}

impl Draft {
    /// Why nothing of any pool may be started now.
    pub(crate) fn no_growth(&self) -> Option<String> {
        self.under_pressure.then(|| MEMORY_PRESSURE.to_owned())
    }

    pub(crate) fn spend(&mut self, pool_ref: PoolRef<'_>, more: Usage) -> Result<(), Shortage> {
        self.budget.spend(pool_ref.tenant_index, pool_ref.pool_index, more)
    }

    pub(crate) fn step(
        &mut self,
        pool_ref: PoolRef<'_>,
        instance: Option<&ObservedInstance>,
        action: Action,
        staging: Option<Phase>,
        reason: String,
    ) {
        self.plan.steps.push(Step {
            tenant: pool_ref.tenant.tenant_id.clone(),
            pool: pool_ref.pool.pool_id.clone(),
            instance: instance.map(|instance| instance.id.clone()),
            action,
            staging,
            reason,
        });
    }

    pub(crate) fn defer(
        &mut self,
        pool_ref: PoolRef<'_>,
        instance: Option<&InstanceId>,
        action: Action,
        count: usize,
        reason: String,
    ) {
        self.plan.deferred.push(Deferred {
            tenant: pool_ref.tenant.tenant_id.clone(),
            pool: pool_ref.pool.pool_id.clone(),
            instance: instance.cloned(),
            action,
            count: u32::try_from(count).unwrap_or(u32::MAX),
            reason,
        });
    }

    /// The plan. What one pass could not do another may have done since: that is no longer deferred.
    pub(crate) fn finish(mut self) -> NodePlan {
        self.plan.next_deadline = self.clock.next_deadline();
        let NodePlan { steps, deferred, .. } = &mut self.plan;
        if !steps.is_empty() && !deferred.is_empty() {
            let taken: BTreeSet<_> =
                steps.iter().filter_map(|step| Some((step.instance.as_ref()?, step.action as u8))).collect();
            deferred.retain(|one| {
                one.instance.as_ref().is_none_or(|id| !taken.contains(&(id, one.action as u8)))
            });
        }
        self.plan
    }

    /// A step that a hold forbids.
    pub(crate) fn held(
        &mut self,
        pool_ref: PoolRef<'_>,
        instance: &ObservedInstance,
        action: Action,
        why: &str,
        hold: Hold,
    ) {
        let reason = format!("{}; {why}", hold.describe(&self.clock));
        self.defer(pool_ref, Some(&instance.id), action, 1, reason);
    }
}
