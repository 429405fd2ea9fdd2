//! The fake host: its VMs, the listeners to their ends, and what each guest remembers.

use std::collections::BTreeMap;
use std::sync::Arc;

use mvm_proto::InstanceId;
use mvm_proto::guest::{Health, Readiness, WorkloadOverride, guest_frame};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{broadcast, watch};

use super::super::{DriverError, VmExit, VmState};
use super::program::Program;
use super::world::{Entry, World};

/// A follower that is further behind looks at the whole list anyway.
const EXITS_KEPT: usize = 1024;

#[derive(Debug)]
pub(super) struct Host {
    world: Mutex<World>,
    lives: Mutex<BTreeMap<InstanceId, Life>>,
    exits: broadcast::Sender<VmExit>,
}

/// What a guest notices of the world around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outside {
    /// Absent: the VM is gone.
    pub(super) vm: Option<VmState>,
    /// What a test makes it say; absent: what it would say by itself.
    pub(super) says: Option<Readiness>,
}

/// One VM's guest, as long as the VM lives in this process.
#[derive(Debug, Clone)]
pub(super) struct Life {
    pub(super) outside: watch::Sender<Outside>,
    pub(super) memory: Arc<Mutex<Memory>>,
}

/// What a guest remembers from one connection to the next.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) hostname: String,
    /// How often its workload was started again, and how that is checked.
    pub(super) restarts: u32,
    pub(super) health: Option<Health>,
    /// What it runs in place of what its image says.
    pub(super) instead: Option<WorkloadOverride>,
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// Answers that the agent has not yet let go.
    pub(super) answers: BTreeMap<u64, Vec<guest_frame::Body>>,
    /// Programs that run, or whose end the agent has not yet let go.
    pub(super) programs: BTreeMap<u64, Program>,
}

/// Where the secrets are in a guest.
pub(super) const SECRETS: &str = "/run/mvm/secrets/bundle";

impl Life {
    pub(super) fn has_secrets(&self) -> bool {
        self.memory.lock().files.contains_key(SECRETS)
    }
}

impl Host {
    pub(super) fn new(world: World) -> Self {
        Self { world: Mutex::new(world), lives: Mutex::default(), exits: broadcast::Sender::new(EXITS_KEPT) }
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock()
    }

    fn lives(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Life>> {
        self.lives.lock()
    }

    pub(super) fn exits(&self) -> broadcast::Receiver<VmExit> {
        self.exits.subscribe()
    }

    /// The guest of a VM that lives.
    pub(super) fn life(&self, instance: &InstanceId) -> Option<Life> {
        let vm = self.world().get(instance)?.vm?.state;
        let new = || Life {
            outside: watch::Sender::new(Outside { vm: Some(vm), says: None }),
            memory: Arc::default(),
        };
        Some(self.lives().entry(instance.clone()).or_insert_with(new).clone())
    }

    pub(super) fn workload(&self, instance: &InstanceId) -> (u32, Option<Health>) {
        self.life(instance).map_or((0, None), |life| {
            let memory = life.memory.lock();
            (memory.restarts, memory.health.clone())
        })
    }

    pub(super) fn instead(&self, instance: &InstanceId) -> Option<WorkloadOverride> {
        self.life(instance).and_then(|life| life.memory.lock().instead.clone())
    }

    pub(super) fn signal(&self, instance: &InstanceId, readiness: Readiness) {
        if let Some(life) = self.life(instance) {
            life.outside.send_modify(|outside| outside.says = Some(readiness));
        }
    }

    /// Changes one entry under the lock, and tells the guest and the listeners.
    pub(super) fn apply<T>(
        &self,
        instance: &InstanceId,
        action: &'static str,
        change: impl FnOnce(&mut Entry, &mut u64) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let mut world = self.world();
        let before = world.get(instance);
        let mut entry = before.clone().unwrap_or_default();
        let mut boots = world.boots;
        let answer = change(&mut entry, &mut boots)?;
        world.boots = boots;
        if before.as_ref() != Some(&entry) {
            let lived = before.is_some_and(|before| before.vm.is_some());
            let vm = entry.vm.as_ref().map(|vm| vm.state);
            let kept = (entry != Entry::default()).then_some(entry);
            world.put(instance, kept).map_err(|cause| DriverError::Io {
                instance: instance.clone(),
                action,
                cause,
            })?;
            drop(world);
            self.tell(instance, lived, vm, &format!("ended by {action}"));
        }
        Ok(answer)
    }

    /// Ends a VM from the inside; its snapshot and disk stay.
    pub(super) fn end(&self, instance: &InstanceId, detail: &str) {
        let mut world = self.world();
        let Some(mut entry) = world.get(instance) else { return };
        let lived = entry.vm.take().is_some();
        // A full disk can't be reported from here.
        let _ = world.put(instance, Some(entry));
        drop(world);
        self.tell(instance, lived, None, detail);
    }

    pub(super) fn tell_earlier_end(&self, instance: &InstanceId) {
        let detail = "an earlier one ended".to_owned();
        let _ = self.exits.send(VmExit { instance: instance.clone(), detail });
    }

    fn tell(&self, instance: &InstanceId, lived: bool, vm: Option<VmState>, detail: &str) {
        let mut lives = self.lives();
        if let Some(life) = lives.get(instance) {
            life.outside.send_modify(|outside| outside.vm = vm);
        }
        if vm.is_none() {
            lives.remove(instance);
        }
        drop(lives);
        if lived && vm.is_none() {
            // Without listeners it is no error.
            let _ = self.exits.send(VmExit { instance: instance.clone(), detail: detail.to_owned() });
        }
    }
}
