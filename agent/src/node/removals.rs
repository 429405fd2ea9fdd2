//! Tenants that were removed together with their data, and guest sessions that are deleted by hand or by age: what is done to
//! them on this node, and what is told of it. [`crate::upkeep`] and the ways in call this.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::TenantId;
use mvm_proto::document::RemovedTenant;
use mvm_proto::status::{Condition, ConditionKind, TenantRemoval};
use mvm_proto::text::chain;
use tokio::sync::watch;

use super::CurrentDocument;
use super::handle::NodeHandle;
use crate::audit::Entry;
pub(crate) use crate::persist::WhichSessions;
use crate::persist::{DeletedSessions, FoundSessions};

/// Who decided, in the audit logs.
const BY_DOCUMENT: &str = "reconcile";

/// What the status says of each tenant that the document in force has removed: what is known of it, and nothing of others.
pub(super) fn of_document(
    current_document: Option<&CurrentDocument>,
    known: &[TenantRemoval],
) -> Vec<TenantRemoval> {
    let removed = current_document.into_iter().flat_map(|document| &document.desired.removed_tenants);
    let told = |removed: &RemovedTenant| {
        let known = known.iter().find(|known| is_of(known, removed));
        known.cloned().unwrap_or_else(|| removal(removed, &[Waiting::NotLooked]))
    };
    removed.map(told).collect()
}

fn is_of(removal: &TenantRemoval, removed: &RemovedTenant) -> bool {
    removal.tenant_id == removed.tenant_id.as_str() && removal.uid == removed.uid
}

/// Whether nothing is left of tenants that were removed.
pub(super) fn condition(removals: &[TenantRemoval], now: mvm_proto::Timestamp) -> Condition {
    let new = |holds, reason, message: String| {
        Condition::new(ConditionKind::TenantsRemoved, holds, reason, message, now)
    };
    let mut left = removals.iter().filter(|removal| !removal.done);
    match left.next() {
        None => new(true, "NothingLeft", String::new()),
        Some(first) => {
            let message = format!("{}: {}", first.tenant_id, first.waits_for);
            let more = left.count();
            let rest = if more > 0 { format!(" (and {more} more tenants)") } else { String::new() };
            new(false, "Removing", format!("{message}{rest}"))
        }
    }
}

/// What the removal of a tenant waits for on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Waiting {
    NotLooked,
    /// A newer document may exist.
    NotConfirmed,
    Expired,
    Instances(usize),
    Templates(usize),
    /// Session stores and secrets, each with the reason.
    Data(Vec<String>),
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotLooked => f.write_str("it was not looked at yet"),
            Self::NotConfirmed => {
                f.write_str("no coordinator has confirmed yet that the document is the newest")
            }
            Self::Expired => f.write_str("the document has expired, so nothing is deleted"),
            Self::Instances(1) => f.write_str("one of its instances is still on this node"),
            Self::Instances(count) => write!(f, "{count} of its instances are still on this node"),
            Self::Templates(count) => write!(f, "{count} of its templates are still on this node"),
            Self::Data(reasons) => {
                f.write_str(reasons.first().map_or("", String::as_str))?;
                match reasons.len() {
                    0 | 1 => Ok(()),
                    count => write!(f, " (and {} more)", count - 1),
                }
            }
        }
    }
}

/// What is told of a removal; nothing is waited for: it is done.
pub(crate) fn removal(removed: &RemovedTenant, waits_for: &[Waiting]) -> TenantRemoval {
    TenantRemoval {
        tenant_id: removed.tenant_id.to_string(),
        uid: removed.uid.clone(),
        done: waits_for.is_empty(),
        waits_for: waits_for.first().map_or_else(String::new, ToString::to_string),
    }
}

impl NodeHandle {
    /// The document in force, as it changes.
    pub(crate) fn documents(&self) -> watch::Receiver<Option<Arc<CurrentDocument>>> {
        self.shared.current_document.subscribe()
    }

    /// Deletes what this node and its session stores have of a removed tenant. What is waited for; nothing: nothing is left.
    pub(crate) async fn remove_tenant(
        &self,
        removed: &RemovedTenant,
        document: &CurrentDocument,
    ) -> Option<Waiting> {
        let (executor, tenant) = (&self.shared.actor.executor, &removed.tenant_id);
        if document.is_expired(executor.clock.now()) {
            return Some(Waiting::Expired);
        }
        let instances = self.instances_of(tenant);
        if instances > 0 {
            return Some(Waiting::Instances(instances));
        }
        let templates = self.records().templates();
        let templates = templates.into_iter().filter(|template| template.tenant == *tenant).count();
        if templates > 0 {
            return Some(Waiting::Templates(templates));
        }
        // Sessions first: the credentials of their stores are not the tenant's, but its key may still be needed to tell.
        let mut left = self.sessions().clear(tenant, &removed.session_stores).await;
        if left.is_empty()
            && let Err(error) = executor.secrets.remove_tenant(tenant)
        {
            left.push(chain(&error));
        }
        if !left.is_empty() {
            return Some(Waiting::Data(left));
        }
        let told = "its sessions, disks and secrets are deleted on this node".to_owned();
        executor.events.publish("TenantRemoved", tenant.to_string(), told.clone());
        executor.audit.append(self.entry(tenant, BY_DOCUMENT, "remove-tenant", told));
        None
    }

    fn instances_of(&self, tenant: &TenantId) -> usize {
        let mut count = 0;
        self.records().for_each(|record, _| count += usize::from(record.tenant == *tenant));
        count
    }

    /// Says how far the removal of tenants is; the next status has it.
    pub(crate) fn set_removals(&self, removals: Vec<TenantRemoval>) {
        let changed = self.shared.removals.send_if_modified(|known| {
            let changed = *known != removals;
            *known = removals;
            changed
        });
        if changed {
            self.trigger();
        }
    }

    /// The guest sessions in the stores that this node knows.
    pub async fn guest_sessions(&self, which: &WhichSessions) -> FoundSessions {
        self.sessions().list(which, self.records()).await
    }

    /// Deletes guest sessions that are not in use.
    pub async fn delete_guest_sessions(&self, which: &WhichSessions, by: &str) -> DeletedSessions {
        let executor = &self.shared.actor.executor;
        let deleted = self.sessions().delete(which, self.records()).await;
        for session in &deleted.deleted {
            let reason =
                format!("{} in {}, last used at {}", session.session, session.store, session.used_at);
            tracing::info!(session = %session.session, store = %session.store, %by, "deleted a session");
            executor.events.publish("SessionDeleted", session.session.clone(), format!("deleted by {by}"));
            if let Some(tenant) = session.session.split('/').next().and_then(|name| name.parse().ok()) {
                executor.audit.append(self.entry(&tenant, by, "delete-session", reason));
            }
        }
        deleted
    }

    fn entry(&self, tenant: &TenantId, by: &str, action: &str, reason: String) -> Entry {
        Entry {
            at: self.shared.actor.executor.clock.now(),
            tenant: tenant.clone(),
            pool: None,
            instance: None,
            actor: by.to_owned(),
            action: action.to_owned(),
            reason,
            outcome: "done".to_owned(),
        }
    }
}

/// How long until what is waited for is looked at again: instances go one by one, a store that failed may stay away for long.
pub(crate) fn look_again(waiting: &Waiting, failures: u32) -> Duration {
    const SOON: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(60);
    match waiting {
        Waiting::Data(_) => SOON.saturating_mul(1 << failures.min(6)).min(LONGEST),
        Waiting::Expired => LONGEST,
        Waiting::NotLooked | Waiting::NotConfirmed | Waiting::Instances(_) | Waiting::Templates(_) => SOON,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_store_is_asked_less_often_and_at_least_once_a_minute() {
        let data = Waiting::Data(vec!["down".to_owned()]);
        let waits: Vec<_> = (0..9).map(|failures| look_again(&data, failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(look_again(&Waiting::Instances(3), 9), Duration::from_secs(1));
    }
}
