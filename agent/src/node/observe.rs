//! What the node sees of itself: its records, corrected by what the driver says lives and what guests say of themselves.
//!
//! Whether a VM runs or is paused is the driver's word; whether it has something to do is its guest's; why, since when
//! and for whom is the record's. A VM that is gone without having been stopped is a failure. A VM without a record
//! is reported and left alone here: see [`crate::node::sweep`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_planner::{Capacity, Observation};
use mvm_proto::{InstanceId, Phase, Timestamp, WorkloadState};
use mvm_vmm::{AnyDriver, Driver, DriverError, Vm, VmExit, VmState};
use tokio::sync::broadcast;

use crate::crash;
use crate::guest::{GuestLinks, GuestView};
use crate::instance::record::Record;
use crate::instance::records::Records;

/// A program that was started again is ready within this and the time that its health check has, or has failed.
const STARTS_WITHIN: Duration = Duration::from_secs(300);

/// One look at the node.
#[derive(Debug, Default)]
pub struct Seen {
    pub observation: Observation,
    /// Instances whose VM ended by itself since the last look, and how.
    pub died: Vec<(InstanceId, String)>,
    /// Instances whose program fares otherwise than at the last look: the kind of event, and what is to be told.
    pub workloads: Vec<(InstanceId, &'static str, String)>,
    /// VMs that no record owns.
    pub orphans: Vec<InstanceId>,
    /// Instances that sleep, and whose VM is there all the same.
    pub beside_snapshot: Vec<InstanceId>,
}

/// How VMs ended, as the driver tells it. Kept from one look to the next, for an end may be told before or after the look
/// that finds the VM gone.
#[derive(Debug)]
pub struct Ends {
    exits: broadcast::Receiver<VmExit>,
    heard: BTreeMap<InstanceId, String>,
}

impl Ends {
    #[must_use]
    pub fn of(driver: &AnyDriver) -> Self {
        Self { exits: driver.exits(), heard: BTreeMap::new() }
    }

    /// Takes in all that was told until now.
    fn hear(&mut self) {
        loop {
            match self.exits.try_recv() {
                Ok(exit) => drop(self.heard.insert(exit.instance, exit.detail)),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => return,
            }
        }
    }
}

/// Looks at the node, and brings the records of idle hands in line with it. A driver tells the end of a VM
/// before it lists it no more, so that `ends` has the reason of each that is found gone.
pub async fn observe(
    driver: &AnyDriver,
    records: &Arc<Records>,
    links: Option<&GuestLinks>,
    capacity: Capacity,
    ends: &mut Ends,
    clock: impl Fn() -> Timestamp,
) -> Result<Seen, DriverError> {
    // In this order: what was done until then is in the past of `now`.
    let before = records.releases();
    let now = clock();
    let listed = driver.list().await?;
    ends.hear();
    let mut vms: BTreeMap<&InstanceId, &Vm> = listed.iter().map(|vm| (&vm.instance, vm)).collect();
    let mut seen = Seen::default();
    let mut changed = Vec::new();
    let mut idle = Vec::new();
    let mut acted = BTreeSet::new();
    records.for_each_since(before, |record, acted_on| {
        let vm = vms.remove(&record.id).map(|vm| vm.state);
        // A step that holds or held its lease knows better than this observation, which may be older.
        if acted_on {
            acted.insert(record.id.clone());
            return;
        }
        if record.is_asleep() && record.intent.is_none() && vm.is_some() {
            seen.beside_snapshot.push(record.id.clone());
        }
        let differs = differs(record, vm);
        let view = links.filter(|_| vm == Some(VmState::Running)).and_then(|links| links.view(&record.id));
        let news = view.and_then(|view| news_of(record, &view, now));
        if differs.is_some() || news.is_some() || record.is_ahead(now) {
            changed.push((record.id.clone(), differs, news));
        }
        if let Some(links) = links {
            follow(links, &record.id, vm);
            let said = links.view(&record.id).and_then(|view| view.idle_at(now));
            if vm == Some(VmState::Running) && said != record.idle_since {
                idle.push((record.id.clone(), said));
            }
        }
    });
    seen.orphans = vms.into_keys().cloned().collect();
    for (id, said) in idle {
        records.set_idle(&id, said);
    }
    for (id, phase, news) in changed {
        let Some(lease) = records.lease(&id, phase.unwrap_or(Phase::Running)) else {
            acted.insert(id);
            continue;
        };
        // Writing down what was seen of another took time, in which a step may have acted on this one.
        if records.acted_since(&id, before) {
            acted.insert(id);
            continue;
        }
        let Some(mut record) = records.get(lease.id()) else { continue };
        match phase {
            Some(Phase::Failed) => {
                let detail = ends.heard.remove(&id).map_or_else(String::new, |detail| format!(": {detail}"));
                let reason = format!("its VM ended by itself{detail}");
                record.fail(Phase::Failed, now, &reason, fastrand::f64());
                record.idle_since = None;
                seen.died.push((id.clone(), reason));
            }
            Some(phase) => record.correct(phase, now, "observed"),
            None => {}
        }
        if let Some((state, message)) = news.filter(|_| record.phase == Phase::Running)
            && record.hear_workload(state, now)
        {
            tell_workload(&record, &message, now, &mut seen);
        }
        record.rectify(now);
        if let Err(error) = records.save(&record).await {
            tracing::warn!(%id, error = %mvm_proto::text::chain(&error), "could not record what was observed");
            records.set(record);
        }
        crash::point("observe.recorded");
    }
    // The next observation decides about an instance that a step acted on.
    ends.heard.retain(|id, _| acted.contains(id));
    let observation = &mut seen.observation;
    observation.capacity = capacity;
    observation.instances = records.observed();
    Ok(seen)
}

/// How its program fares, where that is news, and what the guest says of it. One that was started again and says nothing for
/// longer than it may take has failed.
fn news_of(record: &Record, view: &GuestView, now: Timestamp) -> Option<(WorkloadState, String)> {
    let late = || {
        let since = record.workload.as_ref().filter(|workload| !workload.is_down())?.since;
        let within = STARTS_WITHIN + record.health.as_ref().map_or(Duration::ZERO, |h| h.decided_within());
        let is_late = view.connected && now.since(since) > within;
        is_late.then(|| {
            (WorkloadState::Failed, format!("its workload was not ready within {} s", within.as_secs()))
        })
    };
    let told = view.workload().map(|state| (state, view.message.clone()));
    told.or_else(late).filter(|(state, _)| record.is_news(*state))
}

/// What is to be told of a program that fares otherwise than before.
fn tell_workload(record: &Record, message: &str, now: Timestamp, seen: &mut Seen) {
    let Some(workload) = &record.workload else { return };
    let kind = match workload.state {
        WorkloadState::Running => "WorkloadRecovered",
        WorkloadState::Completed | WorkloadState::Failed => "WorkloadEnded",
        WorkloadState::Unhealthy => "WorkloadUnhealthy",
    };
    let message = if message.is_empty() { "its workload is ready again" } else { message };
    let then = if record.is_brought_back() || !workload.is_down() { "" } else { "; it is not started again" };
    seen.workloads.push((record.id.clone(), kind, format!("{message}{then}")));
    if workload.is_down() && workload.is_in_a_crash_loop(now) {
        let wait = workload.due_at().since(now).as_secs();
        let message = format!("started {} times in a row; the next start is in {wait} s", workload.restarts);
        seen.workloads.push((record.id.clone(), "WorkloadCrashLoop", message));
    }
}

/// Keeps a link to what runs, and to nothing else. A VM that is paused when it is found gets one when it is resumed.
fn follow(links: &GuestLinks, id: &InstanceId, vm: Option<VmState>) {
    match vm {
        Some(VmState::Running) => {
            if links.open(id) {
                links.take_back_sleep(id);
            }
        }
        Some(VmState::Paused) => links.pause(id),
        None => links.forget(id),
    }
}

/// The phase that the VM says, where the record says another.
fn differs(record: &Record, vm: Option<VmState>) -> Option<Phase> {
    use Phase::{Failed, Running, Warm};
    match (record.phase, vm) {
        (Running, Some(VmState::Paused)) => Some(Warm),
        (Warm, Some(VmState::Running)) => Some(Running),
        (Running | Warm, None) => Some(Failed),
        // A VM of one that rests or never ran is dealt with where it is next acted on.
        _ => None,
    }
}
