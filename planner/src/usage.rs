//! What instances use of a node and of their tenant's quotas, phase by phase.

use mvm_proto::Phase;
use mvm_proto::document::{Network, Resources};

use crate::observation::ObservedInstance;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) vcpus: u64,
    pub(crate) mem_mib: u64,
    pub(crate) disk_mib: u64,
    pub(crate) running: u64,
    pub(crate) warm: u64,
    pub(crate) instances: u64,
    /// Of those that this node may give to its tenant's instances.
    pub(crate) addresses: u64,
}

impl Usage {
    /// What an instance of this size uses in this phase.
    ///
    /// Its data disk exists from its creation to its end; a snapshot adds the size of the guest's memory.
    /// Booted only to be put to warm or sleep, it is not counted as running.
    pub(crate) fn of(phase: Phase, size: &Resources, staging: Option<Phase>) -> Self {
        let resting = Self { disk_mib: size.data_disk_mib, instances: 1, addresses: 1, ..Self::default() };
        let vcpus = u64::from(size.vcpus);
        match phase {
            Phase::Running => {
                let running = u64::from(!matches!(staging, Some(Phase::Warm | Phase::Sleeping)));
                Self { vcpus, mem_mib: size.mem_mib, running, ..resting }
            }
            Phase::Warm => Self { mem_mib: size.mem_mib, warm: 1, ..resting },
            Phase::Sleeping => Self { disk_mib: size.data_disk_mib + size.mem_mib, ..resting },
            Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed => resting,
            Phase::Destroyed => Self::default(),
        }
    }

    /// What an instance uses now; one that is being moved, the most of where it was and where it goes. What is being
    /// stopped or destroyed uses what it has until it is seen to be gone, and nothing more, whatever it was booted for.
    pub(crate) fn now(instance: &ObservedInstance) -> Self {
        let at = |phase| Self::of(phase, &instance.resources, instance.staging);
        let to = match instance.moving_to {
            None | Some(Phase::Stopped | Phase::Destroyed) => return at(instance.phase),
            Some(to) => to,
        };
        let ends = at(instance.phase).most(at(to));
        if instance.is_undecided() {
            let kept = Self::of(Phase::Running, &instance.resources, None);
            return kept.most(Self::boot(&instance.resources, instance.staging));
        }
        // A replacement boots on its way back to rest.
        if instance.is_being_replaced() {
            let staging = (to != Phase::Running).then_some(to);
            return ends.most(Self::of(Phase::Running, &instance.resources, staging));
        }
        match instance.staging {
            Some(_) if to == Phase::Running => ends.most(Self::boot(&instance.resources, instance.staging)),
            Some(_) => ends.most(at(Phase::Running)),
            None => ends,
        }
    }

    /// The most that an instance uses from its boot until it is where the boot was meant to bring it.
    ///
    /// Its place at rest is taken from the beginning: so that it is still free when the boot is done.
    pub(crate) fn boot(size: &Resources, staging: Option<Phase>) -> Self {
        let target = staging.unwrap_or(Phase::Running);
        Self::of(Phase::Running, size, staging).most(Self::of(target, size, None))
    }

    /// What an instance that is being booted anew will use: its pool's size, which may not be its own yet.
    pub(crate) fn soon(instance: &ObservedInstance, pool_size: Option<&Resources>) -> Self {
        let (Some(_), Some(size)) = (instance.moving_to, pool_size) else { return Self::default() };
        let rests = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
        match instance.moving_to {
            Some(to) if instance.is_being_replaced() => Self::boot(size, Some(to)),
            Some(Phase::Running) if !rests => Self::boot(size, instance.staging),
            _ => Self::default(),
        }
    }

    /// The same of an instance whose address is not one that this node may give: it is in no one's way.
    pub(crate) fn held_by(self, instance: &ObservedInstance, network: Option<&Network>) -> Self {
        let Some((network, offset)) = network.zip(instance.offset) else { return self };
        // Of a whole subnet every instance has one, also one that is still in an earlier subnet.
        let counts = network.is_whole() || network.offers(offset);
        Self { addresses: if counts { self.addresses } else { 0 }, ..self }
    }

    pub(crate) fn most(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// What `self` uses more than `base`.
    pub(crate) fn beyond(self, base: Self) -> Self {
        self.zip(base, u64::saturating_sub)
    }

    /// What so many of these use together.
    pub(crate) fn times(self, number: u32) -> Self {
        self.zip(self, |one, _| one.saturating_mul(u64::from(number)))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
    }

    fn zip(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            vcpus: with(self.vcpus, other.vcpus),
            mem_mib: with(self.mem_mib, other.mem_mib),
            disk_mib: with(self.disk_mib, other.disk_mib),
            running: with(self.running, other.running),
            warm: with(self.warm, other.warm),
            instances: with(self.instances, other.instances),
            addresses: with(self.addresses, other.addresses),
        }
    }
}
