//! The spec from which a pool's instances are made.

use std::time::Duration;

use mvm_image::ImageRef;
use mvm_proto::document::{
    Health, IoLimits, Network, Persist, Pool, Resources, Restart, SeccompPolicy, Tenant, UpdateSleeping,
    Warmup, WorkloadOverride,
};
use mvm_proto::{Digest, ProfileId};
use mvm_vmm::SnapshotPolicy;

/// What a pool's instances are made of now, and how they are put to rest.
#[derive(Debug, Clone)]
pub struct PoolSpec {
    pub revision: Digest,
    pub resources: Resources,
    pub flake_ref: String,
    pub profile: ProfileId,
    pub image_digest: Option<Digest>,
    /// The digest of its secrets, which are its own or its tenant's.
    pub secrets: Option<Digest>,
    pub own_secrets: bool,
    /// Where its addresses come from.
    pub network: Network,
    pub seccomp: SeccompPolicy,
    /// How its instances are kept while they sleep.
    pub at_rest: SnapshotPolicy,
    /// What its tenant may have on disk.
    pub max_disk_bytes: u64,
    /// For a guest to shut down, and to finish its work before it is paused.
    pub grace: Duration,
    pub drain: Duration,
    pub persist: Option<Persist>,
    pub warmup: Option<Warmup>,
    pub io_limits: Option<Box<IoLimits>>,
    /// What the end of its instances' program means, and how its health is checked.
    pub restart: Restart,
    pub health: Option<Box<Health>>,
    pub workload_override: Option<Box<WorkloadOverride>>,
    /// One of an older revision that sleeps boots this one when it is woken.
    pub renews_on_wake: bool,
}

impl PoolSpec {
    #[must_use]
    pub fn of(tenant: &Tenant, pool: &Pool) -> Self {
        Self {
            revision: mvm_planner::revision_of(tenant, pool),
            resources: pool.instance_resources,
            flake_ref: pool.flake_ref.clone(),
            profile: pool.profile.clone(),
            image_digest: pool.image_digest,
            secrets: pool.secrets_of(tenant),
            own_secrets: pool.secrets_hash.is_some(),
            network: tenant.network.clone(),
            seccomp: pool.seccomp_policy,
            at_rest: SnapshotPolicy {
                compression: pool.snapshot_compression,
                encryption: pool.snapshot_encryption,
            },
            max_disk_bytes: tenant.quotas.max_disk_gib.saturating_mul(1 << 30),
            grace: Duration::from_secs(pool.runtime_policy.graceful_shutdown_seconds),
            drain: Duration::from_secs(pool.runtime_policy.drain_timeout_seconds),
            persist: pool.persist.as_deref().cloned(),
            warmup: pool.warmup.as_deref().cloned(),
            io_limits: pool.io_limits.clone(),
            restart: pool.restart,
            health: pool.health.clone(),
            workload_override: pool.workload.clone(),
            renews_on_wake: pool.update.is_some_and(|update| update.sleeping == UpdateSleeping::OnWake),
        }
    }

    /// What a pool's instances boot from, without all the rest.
    #[must_use]
    pub fn image_of(pool: &Pool) -> ImageRef {
        ImageRef {
            flake_ref: pool.flake_ref.clone(),
            profile: pool.profile.clone(),
            digest: pool.image_digest,
        }
    }

    #[must_use]
    pub fn image(&self) -> ImageRef {
        ImageRef {
            flake_ref: self.flake_ref.clone(),
            profile: self.profile.clone(),
            digest: self.image_digest,
        }
    }
}
