//! The durable record of one instance, written before and after each effect that matters.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use mvm_image::BootImage;
use mvm_planner::MAX_OVERRIDE;
use mvm_planner::{Action, ObservedInstance, Workload};
use mvm_proto::document::{
    Health, IoLimits, Persist, Resources, Restart, SeccompPolicy, Subnet, Warmup, WorkloadOverride,
};
use mvm_proto::instance::IllegalTransition;
use mvm_proto::status::InstanceStatus;
use mvm_proto::{Digest, InstanceId, NodeId, Phase, PoolId, TenantId, Timestamp, WorkloadState};
use mvm_vmm::{Bounds, Purpose, SnapshotPolicy, SnapshotRef, VmSpec};
use serde::{Deserialize, Serialize};

use crate::instance::SessionMark;
use crate::instance::transfer::Transfer;

/// The first wait after a failure; each further failure doubles it.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// A broken image is tried this often at least.
const LONGEST_RETRY: Duration = Duration::from_secs(300);
/// An instance that ran this long before it failed did not fail to start: it begins again with the first wait.
const STABLE_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub id: InstanceId,
    /// Its address's offset inside the tenant's subnet. Not given again while this record exists.
    pub offset: u32,
    pub address: Ipv4Addr,
    /// The network that the address is in. Absent: it was made by an agent without networks.
    #[serde(default)]
    pub net: Option<Net>,
    /// The number of its tenant's network when it last started, also where it has no card: its VMM's user follows.
    #[serde(default)]
    pub net_id: u16,
    /// Which system calls its VMM is left.
    #[serde(default)]
    pub seccomp: SeccompPolicy,
    pub phase: Phase,
    pub since: Timestamp,
    pub reason: String,
    pub revision: Digest,
    pub resources: Resources,
    pub flake_ref: String,
    /// What the document says the image must be.
    pub image_digest: Option<Digest>,
    /// What its image turned out to be when it last booted: the files that it is restored with.
    #[serde(default)]
    pub image: Option<Digest>,
    /// The newest identity that its guest was given.
    #[serde(default)]
    pub generation: u64,
    pub snapshot: Option<SnapshotRef>,
    /// How its snapshot is kept: as its pool said when it last started or was put to sleep.
    #[serde(default)]
    pub at_rest: SnapshotPolicy,
    /// The digest of the secrets that it was last started with: the ones that it is given at every wake.
    #[serde(default)]
    pub secrets: Option<Digest>,
    /// They are its pool's own, not its tenant's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub own_secrets: bool,
    /// Its guest was asked to wipe them, and has not been given them since.
    #[serde(default)]
    pub secrets_wiped: bool,
    /// What it really has on disk, as last measured.
    #[serde(default)]
    pub disk_used_bytes: u64,
    /// What its VMM cost in memory when that was last measured.
    #[serde(default)]
    pub memory_used_bytes: u64,
    pub last_used_at: Option<Timestamp>,
    /// Since when its guest has nothing to do; absent: it has, or that is unknown.
    #[serde(default)]
    pub idle_since: Option<Timestamp>,
    pub override_until: Option<Timestamp>,
    pub claimed: bool,
    pub on_demand: bool,
    pub home: Option<Phase>,
    pub staging: Option<Phase>,
    pub failures: u32,
    pub retry_not_before: Option<Timestamp>,
    /// What its pool said of sessions when it last started.
    #[serde(default)]
    pub persist: Option<Persist>,
    /// What was run in the template that it is a fork of, or is to be if that is made anew.
    #[serde(default)]
    pub warmup: Option<Warmup>,
    /// What its pool let it do to the disk when it last started or was put to sleep: for when the document does not name
    /// the pool any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_limits: Option<Box<IoLimits>>,
    /// What its pool said of its program when it last started, or since.
    #[serde(default, skip_serializing_if = "is_default")]
    pub restart: Restart,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<Health>>,
    /// What its guest runs in place of what its image says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload_override: Option<Box<WorkloadOverride>>,
    /// How its program fares; absent: it works, and was not started again since the boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<Workload>>,
    #[serde(default)]
    pub session: Option<SessionMark>,
    /// The node that it came from, whose name its session may still bear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub came_from: Option<NodeId>,
    /// The nodes before that one: a session still bears the name of the last of them that could reach its store.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub came_through: Vec<NodeId>,
    /// When what it is now was written to an archive. While that is imported elsewhere, it must not run here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exported_at: Option<Timestamp>,
    /// It is on its way to or from another node, by the coordinator's order: it must not run here meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Box<Transfer>>,
    /// An effect that was begun and whose outcome is not recorded yet.
    pub intent: Option<Intent>,
}

/// Which network of its tenant an instance is in: the document may say another by now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    pub id: u16,
    pub subnet: Subnet,
}

/// Written before an effect that can't simply be observed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    pub action: Action,
    pub at: Timestamp,
}

impl Record {
    /// All of its memory is in its snapshot: a VM that it has never ran, or ran before.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.phase == Phase::Sleeping && self.snapshot.is_some()
    }

    /// It is being removed, and nothing else is to become of it.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.intent.as_ref().is_some_and(|intent| intent.action == Action::Destroy)
    }

    /// Moves to another phase, if the life of an instance has that move, or stays. The way of every step.
    pub fn advance(&mut self, to: Phase, now: Timestamp, reason: &str) -> Result<(), IllegalTransition> {
        if self.phase != to {
            self.phase.advance(to)?;
        }
        self.correct(to, now, reason);
        Ok(())
    }

    /// The name that events and logs have for it: `tenant/pool/id`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}/{}", self.tenant, self.pool, self.id)
    }

    /// Brings the record in line with what was seen of the instance, whatever it was before.
    pub fn correct(&mut self, phase: Phase, now: Timestamp, reason: &str) {
        if self.phase != phase {
            self.since = now;
        }
        self.phase = phase;
        reason.clone_into(&mut self.reason);
        if phase != Phase::Sleeping {
            // It is another by now than the one in the archive.
            self.exported_at = None;
        }
        if Some(phase) == self.home || !matches!(phase, Phase::Running | Phase::Warm) {
            self.on_demand = false;
            self.home = None;
        }
    }

    /// Notes a failure and when to try again. `jitter` is in 0..1.
    pub fn fail(&mut self, phase: Phase, now: Timestamp, reason: &str, jitter: f64) {
        let stable = match self.phase {
            Phase::Running => now.since(self.since) >= STABLE_AFTER,
            // It came to rest since the last failure, or it would still wait for its retry.
            Phase::Warm | Phase::Sleeping => self.retry_not_before.is_none(),
            _ => false,
        };
        self.failures = if stable { 1 } else { self.failures.saturating_add(1) };
        self.correct(phase, now, reason);
        self.intent = None;
        self.retry_not_before = Some(now + retry_after(self.failures, jitter));
    }

    #[must_use]
    pub fn spec(&self, image: BootImage, bounds: Bounds) -> VmSpec {
        VmSpec {
            instance: self.id.clone(),
            revision: self.revision,
            resources: self.resources,
            image,
            bounds,
            purpose: Purpose::Instance,
        }
    }

    /// As the planner sees it. `moving_to`: a step is being carried out on it.
    #[must_use]
    pub fn observed(&self, moving_to: Option<Phase>) -> ObservedInstance {
        ObservedInstance {
            tenant: self.tenant.clone(),
            pool: self.pool.clone(),
            id: self.id.clone(),
            phase: self.phase,
            since: self.since,
            revision: self.revision,
            resources: self.resources,
            last_used_at: self.last_used_at,
            idle_since: self.idle(),
            override_until: self.override_until,
            claimed: self.claimed,
            moving: self.transfer.is_some(),
            on_demand: self.on_demand,
            home: self.transfer.as_ref().map_or(self.home, |transfer| Some(transfer.counts)),
            staging: self.staging,
            moving_to,
            retry_not_before: self.retry_not_before,
            failures: self.failures,
            workload: self.workload.clone(),
            offset: Some(self.offset),
        }
    }

    /// Takes what its guest says of its program, and says whether that is news.
    pub fn hear_workload(&mut self, state: WorkloadState, now: Timestamp) -> bool {
        if !self.is_news(state) {
            return false;
        }
        self.workload = Workload::seen(self.workload.as_deref().copied(), state, now).map(Box::new);
        true
    }

    /// Whether it fares otherwise than is known.
    #[must_use]
    pub fn is_news(&self, state: WorkloadState) -> bool {
        state != self.workload.as_ref().map_or(WorkloadState::Running, |workload| workload.state)
    }

    /// Its program is down and is started again by its pool's policy.
    #[must_use]
    pub fn is_brought_back(&self) -> bool {
        let state = self.workload.as_ref().map(|workload| workload.state);
        self.phase == Phase::Running && state.is_some_and(|state| state.is_restarted(self.restart))
    }

    /// A guest that runs is idle where it was seen to be; one that rests has nothing to do. A request that was let in
    /// is work, even if nothing else shows it.
    fn idle(&self) -> Option<Timestamp> {
        let after_use = |since: Timestamp| self.last_used_at.map_or(since, |used| used.max(since));
        match self.phase {
            Phase::Running => self.idle_since.map(after_use),
            Phase::Warm => Some(after_use(self.idle_since.unwrap_or(self.since))),
            _ => Some(after_use(self.since)),
        }
    }

    /// The same instance as it arrives on another node: with its name, its content and its sessions, and nothing of what
    /// was under way or decided for it where it was.
    #[must_use]
    pub fn arriving(self, from: NodeId, net: Option<Net>, now: Timestamp) -> Self {
        let mut came_through = self.came_through;
        came_through.extend(self.came_from);
        let mut known = BTreeSet::from([from.clone()]);
        came_through.retain(|node| known.insert(node.clone()));
        Self {
            net,
            phase: Phase::Created,
            since: now,
            reason: format!("comes from {from}"),
            disk_used_bytes: 0,
            idle_since: None,
            override_until: None,
            claimed: false,
            on_demand: false,
            staging: None,
            failures: 0,
            workload: self.workload.map(|workload| Box::new(Workload { restarts: 0, ..*workload })),
            retry_not_before: None,
            came_from: Some(from),
            came_through,
            exported_at: None,
            transfer: None,
            intent: None,
            ..self
        }
    }

    /// Its session bears the name of the node that it is on: what it was called before is over.
    pub fn has_arrived(&mut self) {
        self.came_from = None;
        self.came_through.clear();
    }

    /// The number of the next identity: higher than any before it, also than one that a crash kept from being recorded.
    pub fn next_generation(&mut self, now: Timestamp) -> u64 {
        let by_time = u64::try_from(now.unix_ms()).unwrap_or(0);
        self.generation = by_time.max(self.generation.saturating_add(1));
        self.generation
    }

    /// Whether its times lie ahead of a clock that was set back.
    #[must_use]
    pub fn is_ahead(&self, now: Timestamp) -> bool {
        let fares_since = self.workload.as_ref().map(|workload| workload.since);
        let passed = [Some(self.since), self.last_used_at, self.idle_since, fares_since];
        passed.into_iter().flatten().any(|at| at > now)
            || self.retry_not_before.is_some_and(|at| at > now + LONGEST_RETRY)
            || self.override_until.is_some_and(|at| at > now + MAX_OVERRIDE)
    }

    /// After the clock was set back: no time that has passed lies ahead, and no wait is longer than the longest.
    pub fn rectify(&mut self, now: Timestamp) {
        self.since = self.since.min(now);
        self.last_used_at = self.last_used_at.map(|at| at.min(now));
        self.idle_since = self.idle_since.map(|at| at.min(now));
        if let Some(workload) = &mut self.workload {
            workload.since = workload.since.min(now);
        }
        self.override_until = self.override_until.map(|at| at.min(now + MAX_OVERRIDE));
        self.retry_not_before = self.retry_not_before.map(|at| at.min(now + LONGEST_RETRY));
    }

    /// What it costs in memory as far as is known; what has no VMM costs none.
    #[must_use]
    pub fn memory_used(&self) -> u64 {
        if matches!(self.phase, Phase::Running | Phase::Warm) { self.memory_used_bytes } else { 0 }
    }

    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        let time = |time: Option<Timestamp>| time.map_or_else(String::new, |time| time.to_string());
        InstanceStatus {
            instance_id: self.id.to_string(),
            tenant_id: self.tenant.to_string(),
            pool_id: self.pool.to_string(),
            phase: self.phase.to_string(),
            since: self.since.to_string(),
            reason: self.reason.clone(),
            address: self.address.to_string(),
            revision: self.revision.to_string(),
            last_used_at: time(self.last_used_at),
            override_until: time(self.override_until),
            claimed: self.claimed,
            moving: self.transfer.as_ref().map_or_else(String::new, |transfer| transfer.to_string()),
            data_disk_mib: self.resources.data_disk_mib,
            disk_used_bytes: self.disk_used_bytes,
            memory_used_bytes: self.memory_used(),
            workload: self.workload.as_ref().map_or_else(String::new, |w| w.state.as_str().to_owned()),
            restarts: self.workload.as_ref().map_or(0, |workload| workload.restarts),
            ..InstanceStatus::default()
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// How long to wait after this many failures in a row: doubling, with half of it left to chance.
#[must_use]
pub fn retry_after(failures: u32, jitter: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    let full = FIRST_RETRY.saturating_mul(1 << doublings).min(LONGEST_RETRY);
    full.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_keep_half_of_it_to_chance() {
        let secs = |failures, jitter| retry_after(failures, jitter).as_secs_f64();
        assert_eq!((secs(1, 0.0), secs(1, 1.0), secs(3, 1.0), secs(99, 1.0)), (0.5, 1.0, 4.0, 300.0));
    }
}
