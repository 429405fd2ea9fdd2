//! What a pool says in a document and as a declared object alike.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Health, IoLimits, Persist, PoolRole, Restart, RuntimePolicy, SeccompPolicy, SleepPolicy,
    SnapshotCompression, Warmup, WorkloadOverride, default_stopped_retention,
};

/// The fields of [`PoolPolicies`].
pub const POOL_POLICIES: [&str; 15] = [
    "role",
    "pinned",
    "critical",
    "runtime_policy",
    "sleep_policy",
    "seccomp_policy",
    "snapshot_compression",
    "snapshot_encryption",
    "stopped_retention_seconds",
    "persist",
    "warmup",
    "io_limits",
    "restart",
    "health",
    "workload",
];

/// How the instances of a pool are run. The fields mean what they mean in a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolPolicies {
    pub role: PoolRole,
    /// Instances are never put to sleep.
    pub pinned: bool,
    /// Instances are never stopped, paused or replaced.
    pub critical: bool,
    pub runtime_policy: RuntimePolicy,
    pub sleep_policy: SleepPolicy,
    pub seccomp_policy: SeccompPolicy,
    pub snapshot_compression: SnapshotCompression,
    pub snapshot_encryption: bool,
    /// How long a stopped instance that no count wants is kept.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub stopped_retention_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persist: Option<Box<Persist>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Box<Warmup>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_limits: Option<Box<IoLimits>>,
    pub restart: Restart,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<Health>>,
    /// What guests run in place of what the image says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<WorkloadOverride>>,
}

impl Default for PoolPolicies {
    fn default() -> Self {
        Self {
            role: PoolRole::default(),
            pinned: false,
            critical: false,
            runtime_policy: RuntimePolicy::default(),
            sleep_policy: SleepPolicy::default(),
            seccomp_policy: SeccompPolicy::default(),
            snapshot_compression: SnapshotCompression::default(),
            snapshot_encryption: false,
            stopped_retention_seconds: default_stopped_retention(),
            persist: None,
            warmup: None,
            io_limits: None,
            restart: Restart::default(),
            health: None,
            workload: None,
        }
    }
}
