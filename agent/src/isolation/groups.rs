//! The control groups of tenants, once per interval and whenever their quotas change; and what met its limits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::cgroup::{Group, Limit, LimitEvent, TenantLimits, Usages, changes};
use mvm_host::{GroupsFound, Host as _, HostError, Operation, Outcome};
use mvm_proto::status::{Condition, Event};
use mvm_proto::{DesiredState, TenantId, Timestamp};
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::{Effort, Isolation};
use crate::reconcile::Clock;
use crate::state::Records;
use crate::text::chain;

#[derive(Debug)]
pub(crate) struct GroupKeeper {
    isolation: Arc<Isolation>,
    interval: Duration,
    grace: Duration,
    events: broadcast::Sender<Event>,
    clock: Clock,
    last: Option<Instant>,
    /// What was used when it was last looked at.
    usages: Usages,
    /// When groups that nobody owns may be removed.
    due: BTreeMap<Group, Instant>,
    missing: Vec<String>,
    error: Option<String>,
}

impl GroupKeeper {
    pub(crate) fn new(
        isolation: Arc<Isolation>,
        interval: Duration,
        grace: Duration,
        events: broadcast::Sender<Event>,
        clock: Clock,
    ) -> Self {
        let (usages, due, missing) = (Usages::new(), BTreeMap::new(), Vec::new());
        Self { isolation, interval, grace, events, clock, last: None, usages, due, missing, error: None }
    }

    /// Looks if it is time to, or if a tenant's quotas are others than before.
    pub(crate) async fn keep(&mut self, desired: Option<&DesiredState>, records: &Records) {
        if self.isolation.settings.cgroups == Effort::None {
            return;
        }
        let named = desired.into_iter().flat_map(|desired| &desired.tenants);
        let wanted: BTreeMap<TenantId, TenantLimits> =
            named.map(|tenant| (tenant.tenant_id.clone(), self.isolation.limits_of(tenant))).collect();
        let now = Instant::now();
        let same = desired.is_none() || *self.isolation.tenants() == wanted;
        if same && self.last.is_some_and(|at| now.duration_since(at) < self.interval) {
            return;
        }
        self.last = Some(now);
        if desired.is_some() {
            wanted.clone_into(&mut self.isolation.tenants());
        }
        self.error = match self.put_right(&wanted, records, desired.is_some()).await {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(error = %chain(&error), "could not put the tenants' control groups right");
                Some(chain(&error))
            }
        };
    }

    async fn put_right(
        &mut self,
        wanted: &BTreeMap<TenantId, TenantLimits>,
        records: &Records,
        removes: bool,
    ) -> Result<(), HostError> {
        let host = self.isolation.host.clone();
        for (tenant, limits) in wanted {
            let ensure = Operation::EnsureTenantGroup { tenant: tenant.clone(), limits: *limits };
            host.perform(&ensure).await?;
        }
        let Outcome::Groups(found) = host.perform(&Operation::LookAtGroups).await? else {
            return Err(HostError::Refused("the host did not look at control groups".to_owned()));
        };
        let GroupsFound { observed, missing } = found;
        self.missing = missing;
        for event in changes(&self.usages, &observed.groups) {
            self.tell(&event);
        }
        if removes {
            self.sweep(observed.groups.keys(), wanted, records).await?;
        }
        self.usages = observed.groups;
        Ok(())
    }

    /// Removes groups that nobody has owned for long enough: instances first, for a tenant's goes last.
    async fn sweep(
        &mut self,
        groups: impl Iterator<Item = &Group>,
        wanted: &BTreeMap<TenantId, TenantLimits>,
        records: &Records,
    ) -> Result<(), HostError> {
        let now = Instant::now();
        let tenants = records.tenants();
        let mut strangers = BTreeSet::new();
        let mut empty = Vec::new();
        for group in groups {
            match group {
                Group::Instance(instance) if records.get(&instance.instance).is_none() => {
                    strangers.insert(group.clone());
                }
                Group::Tenant(tenant) if !wanted.contains_key(tenant) && !tenants.contains(tenant) => {
                    empty.push(tenant.clone());
                }
                _ => {}
            }
        }
        self.due.retain(|group, _| strangers.contains(group));
        for group in strangers {
            let due = *self.due.entry(group.clone()).or_insert(now + self.grace);
            if let Group::Instance(group) = group
                && due <= now
            {
                self.isolation.host.perform(&Operation::RemoveGroup { group }).await?;
            }
        }
        for tenant in empty {
            // One with an instance that is still within its grace is left for then.
            let removed = self.isolation.host.perform(&Operation::RemoveTenantGroup { tenant }).await;
            if let Err(error) = removed {
                tracing::debug!(error = %chain(&error), "a tenant's control group stays for now");
            }
        }
        Ok(())
    }

    fn tell(&self, event: &LimitEvent) {
        let (kind, message) = match event.limit {
            Limit::OutOfMemory { killed } => ("OutOfMemory", format!("{killed} process(es) killed")),
            Limit::TenantMemory { times } => {
                ("TenantOutOfMemory", format!("the tenant's memory was used up {times} time(s)"))
            }
            Limit::Pids { times } => ("ProcessLimit", format!("{times} process(es) or thread(s) not made")),
            Limit::Throttled { periods, .. } => ("Throttled", format!("had to wait in {periods} period(s)")),
        };
        tracing::warn!(group = %event.group, kind, message);
        let (at, kind) = (self.clock.now().to_string(), kind.to_owned());
        // Nobody listening is no error.
        let _ = self.events.send(Event { at, kind, subject: event.group.to_string(), message });
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        let new = |holds, reason, message: String| Condition::new("LimitsHeld", holds, reason, message, now);
        match (&self.error, self.isolation.settings.cgroups, self.missing.as_slice()) {
            (_, Effort::None, _) => new(false, "Disabled", "--cgroups none".to_owned()),
            (Some(error), ..) => new(false, "Failed", error.clone()),
            (None, _, []) => new(true, "Held", String::new()),
            (None, _, missing) => new(false, "BestEffort", missing.join("; ")),
        }
    }
}
