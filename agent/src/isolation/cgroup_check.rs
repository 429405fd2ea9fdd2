//! Checks the tenants' cgroups: once per interval, and whenever quotas or disk limits change. Repairs what differs, removes
//! orphaned groups, and reports which limits were reached.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::cgroup::{Group, InstanceGroup, Limit, LimitEvent, TenantLimits, Usages, changes};
use mvm_host::{GroupsFound, Host as _, HostError, Operation, Outcome};
use mvm_proto::document::IoLimits;
use mvm_proto::status::{Condition, ConditionKind};
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, TenantId, Timestamp};
use tokio::time::Instant;

use super::disk_limits::{DiskLimits, in_words};
use super::{Effort, Isolation};
use crate::events::Events;
use crate::instance::records::Records;

#[derive(Debug)]
pub(crate) struct CgroupCheck {
    isolation: Arc<Isolation>,
    interval: Duration,
    grace: Duration,
    events: Events,
    last: Option<Instant>,
    /// What was used when it was last looked at.
    usages: Usages,
    /// When orphaned groups may be removed.
    due: BTreeMap<Group, Instant>,
    missing: Vec<String>,
    error: Option<String>,
}

impl CgroupCheck {
    pub(crate) fn new(
        isolation: Arc<Isolation>,
        interval: Duration,
        grace: Duration,
        events: Events,
    ) -> Self {
        let (usages, due, missing) = (Usages::new(), BTreeMap::new(), Vec::new());
        Self { isolation, interval, grace, events, last: None, usages, due, missing, error: None }
    }

    /// Looks if it is time to, or if a tenant's quotas or a pool's limits on the disk are others than before.
    pub(crate) async fn reconcile(&mut self, desired: Option<&DesiredState>, records: &Records) {
        if self.isolation.settings.cgroups == Effort::None {
            return;
        }
        let named = desired.into_iter().flat_map(|desired| &desired.tenants);
        let wanted: BTreeMap<TenantId, TenantLimits> =
            named.map(|tenant| (tenant.tenant_id.clone(), self.isolation.limits_of(tenant))).collect();
        let now = Instant::now();
        let same = desired.is_none_or(|desired| {
            *self.isolation.tenants() == wanted && self.isolation.disks().are_of(desired)
        });
        if same && self.last.is_some_and(|at| now.duration_since(at) < self.interval) {
            return;
        }
        self.last = Some(now);
        if let Some(desired) = desired {
            wanted.clone_into(&mut self.isolation.tenants());
            *self.isolation.disks() = DiskLimits::of(desired);
        }
        self.error = match self.put_right(&wanted, records, desired.is_some()).await {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(error = %chain(&error), "could not repair the tenants' cgroups");
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
        let ensured = self.ensure_tenants(wanted).await;
        let mut found = self.look().await?;
        let unlike = self.isolation.disks().unlike(&found.observed.groups);
        let limited = self.limit_disks(&unlike).await;
        if !unlike.is_empty() {
            // What the kernel took, and what can't be limited, is told by looking.
            found = self.look().await?;
            self.tell_disks(&unlike, &found);
        }
        let GroupsFound { observed, missing } = found;
        self.missing = missing;
        for event in changes(&self.usages, &observed.groups) {
            self.tell(&event);
        }
        if removes {
            self.sweep(observed.groups.keys(), wanted, records).await?;
        }
        self.usages = observed.groups;
        ensured.and(limited)
    }

    /// One tenant whose group can't be had keeps no other from having theirs, nor instances from having their limits.
    async fn ensure_tenants(&self, wanted: &BTreeMap<TenantId, TenantLimits>) -> Result<(), HostError> {
        let mut ensured = Ok(());
        for (tenant, limits) in wanted {
            let ensure = Operation::EnsureTenantGroup { tenant: tenant.clone(), limits: *limits };
            let done = self.isolation.host.perform(&ensure).await.map(|_| ());
            ensured = ensured.and(done);
        }
        ensured
    }

    async fn look(&self) -> Result<GroupsFound, HostError> {
        match self.isolation.host.perform(&Operation::LookAtGroups).await? {
            Outcome::Groups(found) => Ok(found),
            _ => Err(HostError::Refused("the host returned no cgroup inspection".to_owned())),
        }
    }

    /// Gives instances that run the limits of their pools. One that can't have them keeps no other from having them.
    async fn limit_disks(&self, unlike: &[(InstanceGroup, Option<IoLimits>)]) -> Result<(), HostError> {
        let mut limited = Ok(());
        for (group, limits) in unlike {
            let limit = Operation::LimitIo { group: group.clone(), limits: *limits };
            let done = self.isolation.host.perform(&limit).await.map(|_| ());
            limited = limited.and(done);
        }
        limited
    }

    fn tell_disks(&self, were_unlike: &[(InstanceGroup, Option<IoLimits>)], found: &GroupsFound) {
        for (group, limits) in were_unlike {
            let usage = found.observed.groups.get(&Group::from(group.clone()));
            if usage.is_some_and(|usage| usage.io.is(limits.as_ref())) {
                self.events.publish("DiskLimitsChanged", group, in_words(limits.as_ref()));
            }
        }
    }

    /// Removes groups that have been orphans for long enough: instances' first, tenants' last.
    async fn sweep(
        &mut self,
        groups: impl Iterator<Item = &Group>,
        wanted: &BTreeMap<TenantId, TenantLimits>,
        records: &Records,
    ) -> Result<(), HostError> {
        let now = Instant::now();
        let tenants = records.tenants();
        let mut orphans = BTreeSet::new();
        let mut empty = Vec::new();
        for group in groups {
            match group {
                Group::Instance(instance) if records.get(&instance.instance).is_none() => {
                    orphans.insert(group.clone());
                }
                Group::Tenant(tenant) if !wanted.contains_key(tenant) && !tenants.contains(tenant) => {
                    empty.push(tenant.clone());
                }
                _ => {}
            }
        }
        self.due.retain(|group, _| orphans.contains(group));
        for group in orphans {
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
                tracing::debug!(error = %chain(&error), "could not remove a tenant's cgroup yet");
            }
        }
        Ok(())
    }

    fn tell(&self, event: &LimitEvent) {
        let (kind, message) = match event.limit {
            Limit::OutOfMemory { killed } => ("OutOfMemory", format!("{killed} process(es) killed")),
            Limit::TenantMemory { times } => {
                ("TenantOutOfMemory", format!("the tenant reached its memory limit {times} time(s)"))
            }
            Limit::Pids { times } => {
                ("ProcessLimit", format!("could not create {times} process(es) or thread(s)"))
            }
            Limit::Throttled { periods, .. } => {
                ("Throttled", format!("was throttled in {periods} period(s)"))
            }
        };
        self.events.warn(kind, &event.group, message);
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        let new = |holds, reason, message: String| {
            Condition::new(ConditionKind::LimitsHeld, holds, reason, message, now)
        };
        match (&self.error, self.isolation.settings.cgroups, self.missing.as_slice()) {
            (_, Effort::None, _) => new(false, "Disabled", "--cgroups none".to_owned()),
            (Some(error), ..) => new(false, "Failed", error.clone()),
            (None, _, []) => new(true, "Held", String::new()),
            (None, _, missing) => new(false, "BestEffort", missing.join("; ")),
        }
    }
}
