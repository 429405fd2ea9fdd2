//! Sweeps orphans: VMs and directories that no record owns are reported at once and removed after a grace period.
//!
//! A crash between an effect and its record, or a record that was lost with a disk, leaves an orphan. Only what the driver
//! identified as an instance of this data directory is swept; a process that merely looks like one never is. The grace period
//! keeps the sweep from racing a step of the previous agent. It uses the monotonic clock and starts anew with every agent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase};
use mvm_vmm::{AnyDriver, Driver};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::crash;
use crate::events::Events;
use crate::instance::records::Records;

/// After a removal that failed, the next is tried then.
const TRY_AGAIN: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Sweeper {
    grace: Duration,
    /// When each may be removed.
    due: BTreeMap<InstanceId, Instant>,
    /// What is being removed now.
    under_way: Arc<Mutex<BTreeSet<InstanceId>>>,
    events: Events,
}

impl Sweeper {
    pub(crate) fn new(grace: Duration, events: Events) -> Self {
        Self { grace, due: BTreeMap::new(), under_way: Arc::default(), events }
    }

    /// Takes note of what is there without a record now, and begins to remove what has been for long enough.
    pub(crate) fn sweep(&mut self, driver: &Arc<AnyDriver>, records: &Arc<Records>, orphans: &[InstanceId]) {
        let now = Instant::now();
        let present: BTreeSet<&InstanceId> = orphans.iter().collect();
        self.due.retain(|id, _| present.contains(id));
        for id in orphans {
            if !self.due.contains_key(id) {
                self.due.insert(id.clone(), now + self.grace);
                let message =
                    format!("orphan: no record owns it; it will be removed in {} s", self.grace.as_secs());
                self.events.warn("StrangerFound", id, message);
            }
        }
        for (id, due) in &mut self.due {
            if *due > now || records.get(id).is_some() {
                continue;
            }
            *due = now + TRY_AGAIN;
            // One of this name may be about to arrive from elsewhere: the holder of the lease goes first.
            let Some(lease) = records.lease(id, Phase::Destroyed) else { continue };
            if records.get(id).is_some() {
                continue;
            }
            let mut under_way = self.under_way.lock();
            if !under_way.insert(id.clone()) {
                continue;
            }
            drop(under_way);
            let (driver, id, under_way) = (Arc::clone(driver), id.clone(), Arc::clone(&self.under_way));
            let events = self.events.clone();
            tokio::spawn(async move {
                match driver.remove(&id).await {
                    Ok(()) => {
                        crash::point("sweep.removed");
                        events.warn("StrangerRemoved", &id, "no record owned it");
                    }
                    Err(error) => events.warn("StrangerKept", &id, chain(&error)),
                }
                under_way.lock().remove(&id);
                drop(lease);
            });
        }
    }

    /// How long until something is due; absent: nothing is.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.due.values().min().map(|due| due.saturating_duration_since(Instant::now()))
    }
}
