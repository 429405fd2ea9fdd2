//! What the node sees of itself: its records, corrected by what the driver says lives.
//!
//! Whether a VM runs or is paused is the driver's word; why, since when and for whom is the record's. A VM that is
//! gone without having been stopped is a failure. A VM without a record is reported and left alone: killing on a
//! guess is worse than a leak.

use std::collections::BTreeMap;
use std::sync::Arc;

use mvm_planner::{Capacity, Observation};
use mvm_proto::{InstanceId, Phase, Timestamp};

use crate::driver::{Driver, DriverError, Vm, VmState};
use crate::record::Record;
use crate::state::Records;

/// One look at the node.
#[derive(Debug, Default)]
pub struct Seen {
    pub observation: Observation,
    /// Instances whose VM ended by itself since the last look.
    pub died: Vec<InstanceId>,
    /// VMs that no record owns.
    pub strangers: Vec<InstanceId>,
}

/// Looks at the node, and brings the records of idle hands in line with it.
pub async fn observe<D: Driver>(
    driver: &D,
    records: &Arc<Records>,
    capacity: Capacity,
    now: Timestamp,
) -> Result<Seen, DriverError> {
    let listed = driver.list().await?;
    let mut vms: BTreeMap<&InstanceId, &Vm> = listed.iter().map(|vm| (&vm.instance, vm)).collect();
    let mut seen = Seen::default();
    let mut changed = Vec::new();
    records.for_each(|record, moving| {
        let vm = vms.remove(&record.id);
        // Whoever acts on it knows better than this look, which may be older than the act.
        if moving.is_none()
            && let Some(phase) = differs(record, vm.map(|vm| vm.state))
        {
            changed.push((record.id.clone(), phase));
        }
    });
    seen.strangers = vms.into_keys().cloned().collect();
    for (id, phase) in changed {
        if let Some(lease) = records.lease(&id, phase)
            && let Some(mut record) = records.get(&id)
        {
            if phase == Phase::Failed {
                record.fail(phase, now, "its VM ended by itself", fastrand::f64());
                seen.died.push(lease.id().clone());
            } else {
                record.enter(phase, now, "observed");
            }
            if let Err(error) = records.save(&record).await {
                tracing::warn!(%id, error = %crate::text::chain(&error), "could not record what was observed");
                records.set(record);
            }
        }
    }
    let capacity_seen = &mut seen.observation;
    capacity_seen.capacity = capacity;
    records.for_each(|record, moving| capacity_seen.instances.push(record.observed(moving)));
    Ok(seen)
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
