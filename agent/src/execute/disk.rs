//! The disk space that instances use: measured after each change, and checked before more is written.
//!
//! The planner reserves sizes, which are what instances may grow to. This module counts what is really there, with logs,
//! leftovers and the overhead of files.

use std::collections::BTreeMap;
use std::sync::Arc;

use mvm_host::{QuotaExceeded, fits};
use mvm_planner::Action;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, TenantId};
use parking_lot::{Mutex, MutexGuard};

use super::{Executor, StepError};
use crate::instance::PoolSpec;
use crate::instance::record::Record;

/// What a VMM writes beside a guest's memory: the state of its devices, and notes.
const DEVICES_BYTES: u64 = 4 << 20;

/// Each page of memory is written with its address: a 512th of it, and a reserve of as much.
const ADDRESSES_PART: u64 = 256;

/// Why a snapshot is not begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    #[error(
        "a snapshot of it passes max_disk_gib of {tenant}: {exceeded}; free some of it, or raise the quota"
    )]
    Quota { tenant: TenantId, exceeded: QuotaExceeded },
    #[error(
        "the node's disk has no room for a snapshot of it: {wanted_bytes} bytes are wanted, {free_bytes} are free; \
         make room there"
    )]
    Disk { wanted_bytes: u64, free_bytes: u64 },
}

/// Snapshots that are being written, and the most that each comes to: two at once don't count on the same room.
#[derive(Debug, Clone, Default)]
pub struct Writing(Arc<Mutex<BTreeMap<InstanceId, (TenantId, u64)>>>);

/// The room for one snapshot, until it is written or given up.
#[derive(Debug)]
pub(super) struct Room {
    writing: Writing,
    instance: InstanceId,
}

/// What there is, before anything that is being written.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// What the tenant may have; absent: the document does not say.
    quota_bytes: Option<u64>,
    /// What the tenant has, sessions that are kept on this node included.
    used_bytes: u64,
    /// What the file system can hold.
    free_bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.writing.lock().remove(&self.instance);
    }
}

impl Writing {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, (TenantId, u64)>> {
        self.0.lock()
    }

    /// Takes the room for a snapshot, if quota and disk have it.
    fn take(
        &self,
        instance: &InstanceId,
        tenant: &TenantId,
        wanted_bytes: u64,
        found: &Found,
    ) -> Result<Room, NoRoom> {
        let mut all = self.lock();
        let of_tenant = all.values().filter(|(other, _)| other == tenant).map(|(_, bytes)| *bytes);
        let used_bytes = of_tenant.fold(found.used_bytes, u64::saturating_add);
        let free_bytes = all.values().fold(found.free_bytes, |free, (_, bytes)| free.saturating_sub(*bytes));
        if let Some(quota_bytes) = found.quota_bytes {
            fits(quota_bytes, used_bytes, wanted_bytes)
                .map_err(|exceeded| NoRoom::Quota { tenant: tenant.clone(), exceeded })?;
        }
        if free_bytes < wanted_bytes {
            return Err(NoRoom::Disk { wanted_bytes, free_bytes });
        }
        all.insert(instance.clone(), (tenant.clone(), wanted_bytes));
        Ok(Room { writing: self.clone(), instance: instance.clone() })
    }
}

/// The most that a snapshot of a guest with this much memory takes.
fn snapshot_bytes(mem_mib: u64) -> u64 {
    let memory = mem_mib.saturating_mul(1 << 20);
    memory.saturating_add(memory / ADDRESSES_PART).saturating_add(DEVICES_BYTES)
}

impl Executor {
    /// The room for a snapshot of the instance. Absent: it has nothing on disk, and its driver writes no files.
    pub(super) async fn room_for_snapshot(
        &self,
        record: &Record,
        spec: Option<&PoolSpec>,
    ) -> Result<Option<Room>, StepError> {
        self.room_for(record, spec, snapshot_bytes(record.resources.mem_mib)).await
    }

    /// The same for as much as it is known to come to.
    pub(super) async fn room_for(
        &self,
        record: &Record,
        spec: Option<&PoolSpec>,
        wanted_bytes: u64,
    ) -> Result<Option<Room>, StepError> {
        let Some(disk) = self.isolation.disk_use(&record.id).await? else { return Ok(None) };
        self.records.set_disk_used(&record.id, disk.used_bytes);
        let sessions_bytes = self.sessions.disk_used(record).await;
        let found = Found {
            quota_bytes: spec.map(|spec| spec.max_disk_bytes),
            used_bytes: self.records.disk_used(&record.tenant).saturating_add(sessions_bytes),
            free_bytes: disk.free_bytes,
        };
        Ok(Some(self.writing.take(&record.id, &record.tenant, wanted_bytes, &found)?))
    }

    /// Notes what an instance has on disk after a step that may have changed it.
    pub(super) async fn measure_after(&self, action: Action, id: &InstanceId) {
        if !matches!(action, Action::Warm | Action::Resume | Action::Destroy) {
            self.measure(id).await;
        }
    }

    /// The same for all that run: only their disks grow by themselves.
    pub(crate) async fn measure_running(&self) {
        let mut running = Vec::new();
        self.records.for_each(|record, _| {
            if record.phase == Phase::Running {
                running.push(record.id.clone());
            }
        });
        for id in running {
            self.measure(&id).await;
        }
    }

    pub(crate) async fn measure(&self, id: &InstanceId) {
        match self.isolation.disk_use(id).await {
            Ok(found) => self.records.set_disk_used(id, found.map_or(0, |found| found.used_bytes)),
            Err(error) => {
                tracing::warn!(%id, error = %chain(&error), "could not measure what an instance has on disk");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_snapshots_at_once_do_not_count_on_the_same_room() {
        let [one, two, three] = [1, 2, 3].map(InstanceId::from_bits);
        let [acme, beta]: [TenantId; 2] = ["acme", "beta"].map(|id| id.parse().unwrap());
        let writing = Writing::default();
        let found = Found { quota_bytes: Some(100), used_bytes: 20, free_bytes: 150 };
        let first = writing.take(&one, &acme, 60, &found).unwrap();
        let refused = writing.take(&two, &acme, 60, &found).unwrap_err();
        let exceeded = QuotaExceeded { quota_bytes: 100, used_bytes: 80, wanted_bytes: 60 };
        assert_eq!(refused, NoRoom::Quota { tenant: acme.clone(), exceeded });
        let _other = writing.take(&two, &beta, 80, &found).unwrap();
        let refused = writing.take(&three, &beta, 20, &Found { quota_bytes: None, ..found }).unwrap_err();
        assert_eq!(refused, NoRoom::Disk { wanted_bytes: 20, free_bytes: 10 });
        drop(first);
        writing.take(&three, &acme, 60, &found).unwrap();
    }

    #[test]
    fn a_snapshot_is_counted_with_its_addresses_and_devices() {
        assert_eq!(snapshot_bytes(256), (256 << 20) + (1 << 20) + (4 << 20));
        assert_eq!(snapshot_bytes(u64::MAX), u64::MAX);
    }
}
