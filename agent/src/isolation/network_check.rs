//! Checks the tenants' networks: once per interval, and whenever the wanted networks change. Repairs what differs and removes
//! orphaned links.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::network::{NetworkFound, NetworkWanted, OrphanLink, TenantNet};
use mvm_host::{Host as _, HostError, Operation, Outcome};
use mvm_planner::Blocked;
use mvm_proto::status::{Condition, ConditionKind};
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, InstanceId, Timestamp};
use tokio::sync::watch;
use tokio::time::Instant;

use super::wanted::Wanted;
use super::{Isolation, NetworkMode};
use crate::events::Events;
use crate::instance::records::Records;

/// How many repairs or instances a condition or event names.
const NAMED: usize = 3;

/// Looks after what all instances share.
#[derive(Debug)]
pub(crate) struct NetworkCheck {
    isolation: Arc<Isolation>,
    interval: Duration,
    grace: Duration,
    events: Events,
    /// What the last look was for, and when it was.
    last: Option<(Instant, Vec<TenantNet>)>,
    /// When orphaned links may be removed, by name.
    due: BTreeMap<String, Instant>,
    conflicts: Vec<String>,
    /// Whose TAP was deleted under a VM, and since when that VM runs: one that was started since has a new one.
    cut_off: BTreeMap<InstanceId, Timestamp>,
    error: Option<String>,
    pub(crate) found: watch::Sender<NetworkFound>,
}

impl NetworkCheck {
    pub(crate) fn new(
        isolation: Arc<Isolation>,
        interval: Duration,
        grace: Duration,
        events: Events,
    ) -> Self {
        Self {
            isolation,
            interval,
            grace,
            events,
            last: None,
            due: BTreeMap::new(),
            conflicts: Vec::new(),
            cut_off: BTreeMap::new(),
            error: None,
            found: watch::Sender::default(),
        }
    }

    /// Looks if it is time to, and answers which tenants can't be given their network now.
    pub(crate) async fn reconcile(
        &mut self,
        desired: Option<&DesiredState>,
        records: &Records,
    ) -> Vec<Blocked> {
        if self.isolation.settings.network == NetworkMode::None {
            return Vec::new();
        }
        let mut wanted = self.wanted(desired, records);
        if self.is_due(&wanted) {
            let isolation = Arc::clone(&self.isolation);
            // A step that begins from here on waits; one that began before has its lease. Waiting for this keeps
            // everyone else waiting, too: so it is asked for only when it is time to look.
            let _comparing = isolation.comparing.write().await;
            wanted = self.wanted(desired, records);
            let (now, nets) = (Instant::now(), wanted.network.nets.clone());
            self.look(std::mem::take(&mut wanted.network), desired.is_some(), records).await;
            self.last = Some((now, nets));
        }
        self.conflicts = wanted.conflicts.iter().map(|(tenant, why)| format!("{tenant}: {why}")).collect();
        self.cut_off.retain(|id, since| records.get(id).is_some_and(|record| record.since == *since));
        let blocked = wanted.conflicts.into_iter().map(|(tenant, why)| Blocked {
            tenant,
            pool: None,
            reason: ConditionKind::NetworkReady.blocks(why),
        });
        blocked.collect()
    }

    fn is_due(&self, wanted: &Wanted) -> bool {
        self.last
            .as_ref()
            .is_none_or(|(at, nets)| at.elapsed() >= self.interval || *nets != wanted.network.nets)
    }

    fn wanted(&self, desired: Option<&DesiredState>, records: &Records) -> Wanted {
        let mut all = Vec::new();
        records.for_each(|record, moving| all.push((record.clone(), moving.is_some())));
        let all = all.iter().map(|(record, moving)| (record, *moving));
        self.isolation.wanted(desired, all)
    }

    async fn look(&mut self, wanted: NetworkWanted, removes: bool, records: &Records) {
        let gone: Vec<TenantNet> = {
            let mut nets = self.isolation.nets();
            let before = std::mem::replace(
                &mut *nets,
                wanted.nets.iter().map(|net| (net.net_id, net.clone())).collect(),
            );
            before.into_values().filter(|net| !nets.contains_key(&net.net_id)).collect()
        };
        self.error = match self.put_right(wanted, gone, removes, records).await {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(error = %chain(&error), "could not repair the tenants' networks");
                Some(chain(&error))
            }
        };
    }

    async fn put_right(
        &mut self,
        wanted: NetworkWanted,
        gone: Vec<TenantNet>,
        removes: bool,
        records: &Records,
    ) -> Result<(), HostError> {
        let host = self.isolation.host.clone();
        for net in gone {
            host.perform(&Operation::RemoveNet { net }).await?;
        }
        let Outcome::Network(found) = host.perform(&Operation::KeepNetwork { wanted }).await? else {
            return Err(HostError::Refused("the host returned no network inspection".to_owned()));
        };
        if !found.repairs.is_empty() {
            self.events.warn("NetworkRepaired", "network", few(&found.repairs));
        }
        let cut_off: Vec<String> = found.cut_off.iter().map(ToString::to_string).collect();
        if !cut_off.is_empty() {
            self.events.warn(
                "NetworkLost",
                "network",
                format!("another program deleted the TAP of {}", few(&cut_off)),
            );
        }
        let since = |id: &InstanceId| Some((id.clone(), records.get(id)?.since));
        self.cut_off.extend(found.cut_off.iter().filter_map(since));
        if removes {
            self.sweep(&found.orphans, records).await?;
        }
        self.found.send_replace(found);
        Ok(())
    }

    /// Removes links of ours that have been orphans for long enough; ports first, bridges last.
    async fn sweep(&mut self, orphans: &[OrphanLink], records: &Records) -> Result<(), HostError> {
        let now = Instant::now();
        self.due.retain(|name, _| orphans.iter().any(|orphan| orphan.name == *name));
        for orphan in orphans {
            let name = orphan.name.clone();
            let instance = orphan.owner.split_once('/').and_then(|(_, id)| id.parse().ok());
            // One that rests, or whose VM died: who owns it is known, and that it is not in use.
            if instance.is_some_and(|id| records.get(&id).is_some()) {
                self.isolation.host.perform(&Operation::RemoveLink { name }).await?;
                continue;
            }
            match self.due.get(&name) {
                None => {
                    let message = format!(
                        "no instance uses {name} of {}; it will be removed in {} s",
                        orphan.owner,
                        self.grace.as_secs()
                    );
                    self.events.warn("StrangerFound", "network", message);
                    self.due.insert(name, now + self.grace);
                }
                Some(due) if *due > now => {}
                Some(_) => {
                    let remove = Operation::RemoveLink { name: name.clone() };
                    self.isolation.host.perform(&remove).await?;
                    self.events.warn(
                        "StrangerRemoved",
                        "network",
                        format!("removed {name}, which no instance used"),
                    );
                }
            }
        }
        Ok(())
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        let new = |holds, reason, message: String| {
            Condition::new(ConditionKind::NetworkReady, holds, reason, message, now)
        };
        if self.isolation.settings.network == NetworkMode::None {
            return new(true, "Disabled", "instances have no network card (--network none)".to_owned());
        }
        let foreign = self.found.borrow().foreign.clone();
        let cut_off: Vec<String> = self.cut_off.keys().map(ToString::to_string).collect();
        match (&self.error, self.conflicts.as_slice(), cut_off.as_slice(), foreign.as_slice()) {
            (Some(error), ..) => new(false, "Failed", error.clone()),
            (None, [_, ..], ..) => new(false, "Conflict", few(&self.conflicts)),
            (None, [], [_, ..], _) => {
                let message =
                    format!("another program deleted the TAP of {}: stop and start them", few(&cut_off));
                new(false, "CutOff", message)
            }
            (None, [], [], [_, ..]) => {
                let message =
                    format!("{} have names that mvm uses, and mvm did not create them", few(&foreign));
                new(false, "ForeignLinks", message)
            }
            (None, [], [], []) => new(true, "InPlace", String::new()),
        }
    }
}

fn few(items: &[String]) -> String {
    let more = items.len().saturating_sub(NAMED);
    let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    format!("{}{rest}", items[..items.len().min(NAMED)].join("; "))
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use mvm_host::AnyHost;

    use super::super::IsolationSettings;
    use super::*;
    use crate::clock::Clock;
    use mvm_vmm::DriverKind;

    #[tokio::test(start_paused = true)]
    async fn a_step_that_makes_a_network_is_waited_for_only_when_a_check_is_due() {
        let dir = tempfile::tempdir().unwrap();
        let settings = IsolationSettings { network: NetworkMode::Bridges, ..IsolationSettings::NONE };
        let isolation = Arc::new(Isolation::new(AnyHost::local(dir.path()), DriverKind::Fake, settings));
        let every = Duration::from_secs(30);
        let mut check = NetworkCheck::new(Arc::clone(&isolation), every, every, Events::new(Clock::system()));
        check.last = Some((Instant::now(), Vec::new()));
        let records = Records::empty();
        let _makes_one = isolation.comparing.read().await;
        assert_eq!(futures::poll!(std::pin::pin!(check.reconcile(None, &records))), Poll::Ready(Vec::new()));
        tokio::time::advance(every).await;
        assert!(futures::poll!(std::pin::pin!(check.reconcile(None, &records))).is_pending());
    }
}
