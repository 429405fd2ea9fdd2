//! The desired-state document for one node: what a coordinator declares and an agent makes true.
//!
//! [`DesiredState`] is the user-visible part; [`Provenance`] is what a coordinator adds before it signs.
//! Reading is in [`decode`]: strict, and with all errors at once. The JSON Schema is generated from these types.

mod address_blocks;
pub(crate) mod decode;
mod io_limits;
mod policies;
mod removed_tenants;
pub(crate) mod rules;
pub mod schema;
mod source;
mod subnet;
mod update;
mod workload;
mod workload_override;

use std::fmt;
use std::net::Ipv4Addr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::envelope::Payload;
use crate::{ClusterId, Digest, FieldError, NodeId, PoolId, Problem, ProfileId, TenantId, Timestamp};

pub use address_blocks::BLOCK_SIZE;
pub use io_limits::{IO_BYTES_PER_SECOND, IO_OPS_PER_SECOND, IoLimits};
pub use policies::{POOL_POLICIES, PoolPolicies};
pub use removed_tenants::{MAX_SESSION_STORES, MAX_UID_BYTES, RemovedTenant};
pub use source::{ImageSource, SourceError};
pub use subnet::{MAX_PREFIX, MIN_PREFIX, SubnetError};
pub use update::{DEFAULT_MIN_READY_SECONDS, MAX_MIN_READY_SECONDS, Update, UpdateSleeping};
pub use workload::{ExecCheck, Health, HealthCheck, HttpCheck, Restart, TcpCheck};
pub use workload_override::{
    MAX_ENV_NAME_BYTES, MAX_USER_ID, MAX_USER_NAME_BYTES, MAX_WORKLOAD_ARGS, MAX_WORKLOAD_BYTES,
    MAX_WORKLOAD_ENV, MAX_WORKLOAD_TEXT_BYTES, User, WorkloadOverride,
};

/// The version of the document's schema that this build reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// The `payloadType` of a signed document.
pub const DOCUMENT_PAYLOAD_TYPE: &str = "application/vnd.mvm.desired-state.v1+json";

/// The largest document, before base64 and signature.
pub const MAX_DOCUMENT_BYTES: usize = 4 * 1024 * 1024;

/// The most bytes of a pool's `flake_ref`.
pub const MAX_FLAKE_REF_BYTES: usize = 2048;
/// The most bytes of a path inside a guest: what Linux takes.
pub const MAX_GUEST_PATH_BYTES: usize = 4095;
/// The most bytes of the name of a store for persisted sessions.
pub const MAX_STORE_BYTES: usize = 2048;
/// The most words of a warm-up's command, and the most bytes of each.
pub const MAX_COMMAND_WORDS: usize = 64;
pub const MAX_COMMAND_WORD_BYTES: usize = 4096;
/// The longest that a warm-up may take: a template that takes longer keeps its whole pool waiting.
pub const MAX_WARMUP_SECONDS: u64 = 3600;
/// The largest `tenant_net_id`: it is part of interface names, which are short.
pub const MAX_TENANT_NET_ID: u16 = 4095;

/// What one node is meant to run, as users declare it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DesiredState {
    /// The version of this schema.
    #[schemars(range(min = 1, max = 1))]
    pub schema_version: u32,
    /// Whose document this is; every other node refuses it.
    pub node_id: NodeId,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterId>,
    /// Ids, net ids and subnets differ between them.
    pub tenants: Vec<Tenant>,
    /// Destroy what belongs to tenants that are not listed.
    #[schemars(default)]
    pub prune_unknown_tenants: bool,
    /// Destroy what belongs to pools that their tenant does not list.
    #[schemars(default)]
    pub prune_unknown_pools: bool,
    /// Tenants that were deleted together with their data: this node deletes what it has of them and of their sessions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default, length(max = 4096))]
    pub removed_tenants: Vec<RemovedTenant>,
}

/// What a coordinator adds: whose document this is, its place in the order, and how long it may be acted on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Provenance {
    /// Whose node this is; a node of another cluster refuses the document.
    pub cluster: ClusterId,
    /// The leader's fencing number.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991u64))]
    pub epoch: u64,
    /// Grows with every document for the node.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991u64))]
    pub generation: u64,
    pub issued_at: Timestamp,
    /// When the document stops being accepted; what was accepted stays in force.
    pub expires_at: Timestamp,
}

/// A document with its provenance: the payload of a signed envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedDocument {
    pub provenance: Provenance,
    pub desired: DesiredState,
}

/// The boundary for quota, network, secrets and audit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Tenant {
    pub tenant_id: TenantId,
    /// Reconcile never stops this tenant's instances.
    #[schemars(default)]
    pub pinned: bool,
    pub network: Network,
    pub quotas: Quotas,
    /// The digest of the tenant's secrets bundle, which never travels in the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secrets_hash: Option<Digest>,
    #[schemars(default)]
    pub egress: Egress,
    pub pools: Vec<Pool>,
}

/// What the coordinator assigned to the tenant on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Network {
    /// Names the tenant's bridge and interfaces.
    #[schemars(range(min = 0, max = 4095))]
    pub tenant_net_id: u16,
    /// A private network of /16 to /29 with its host bits zero; overlaps with no other tenant's. `.1` is the gateway,
    /// `.2` the builder, the rest is for instances.
    pub ipv4_subnet: Subnet,
    /// The blocks of 16 addresses that this node may give to instances, by number: block n has the addresses 16n to
    /// 16n + 15 of the subnet. In ascending order. Absent: the whole subnet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(range(min = 0, max = 4095)), extend("uniqueItems" = true))]
    pub address_blocks: Option<Vec<u16>>,
    /// The addresses that this node gives to no instance, by their distance from the subnet's own. In ascending order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default, length(max = 65536), inner(range(min = 0, max = 65535)), extend("uniqueItems" = true))]
    pub reserved_offsets: Vec<u16>,
}

/// A private IPv4 network of /16 to /29 with its host bits zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet {
    address: Ipv4Addr,
    prefix: u8,
}

/// Where the tenant's instances may connect to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Egress {
    #[schemars(default)]
    pub mode: EgressMode,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EgressMode {
    #[default]
    None,
    /// Masqueraded, minus the denied ranges.
    Nat,
}

/// The most that a tenant may use on this node. All are enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Quotas {
    /// Over all running instances.
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_vcpus: u32,
    /// Over all running and warm instances.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub max_mem_mib: u64,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_running: u32,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_warm: u32,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_pools: u32,
    /// In any phase.
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_instances_per_pool: u32,
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub max_disk_gib: u64,
}

/// A homogeneous group of instances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Pool {
    pub pool_id: PoolId,
    /// What to build or fetch: a Nix flake reference, `path:/DIR`, `builtin:busybox`.
    #[schemars(length(max = 2048), regex(pattern = "^[!-~]+$"))]
    pub flake_ref: String,
    pub profile: ProfileId,
    /// What `flake_ref` must resolve to; required in a signed document unless the cluster is a dev cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<Digest>,
    #[schemars(default)]
    pub role: PoolRole,
    pub instance_resources: Resources,
    pub desired_counts: DesiredCounts,
    /// Reconcile never puts this pool's instances to sleep.
    #[schemars(default)]
    pub pinned: bool,
    /// Reconcile never touches this pool's instances.
    #[schemars(default)]
    pub critical: bool,
    #[schemars(default)]
    pub runtime_policy: RuntimePolicy,
    #[schemars(default)]
    pub sleep_policy: SleepPolicy,
    #[schemars(default)]
    pub seccomp_policy: SeccompPolicy,
    #[schemars(default)]
    pub snapshot_compression: SnapshotCompression,
    #[schemars(default)]
    pub snapshot_encryption: bool,
    /// How long a stopped instance that no count wants is kept.
    #[schemars(default = "default_stopped_retention", range(max = 9_007_199_254_740_991u64))]
    pub stopped_retention_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persist: Option<Box<Persist>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Box<Warmup>>,
    /// What each instance may do to the node's disk. Boxed: most pools have none, and plans go over all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_limits: Option<Box<IoLimits>>,
    /// What the end of a guest's program means. Left out where it is the default, for agents that do not know it.
    #[serde(skip_serializing_if = "Restart::is_default")]
    #[schemars(default)]
    pub restart: Restart,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<Health>>,
    /// What its guests run in place of what the image says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<WorkloadOverride>>,
    /// The digest of the pool's own secrets bundle, in place of the tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secrets_hash: Option<Digest>,
    /// How far this node may roll the pool to this revision. Only agents with the feature `rollout-limits` are sent it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update: Option<Update>,
}

impl Pool {
    /// The digest of the secrets that its guests are given: its own, or its tenant's.
    #[must_use]
    pub fn secrets_of(&self, tenant: &Tenant) -> Option<Digest> {
        self.secrets_hash.or(tenant.secrets_hash)
    }
}

/// The default of [`Pool::stopped_retention_seconds`].
#[must_use]
pub fn default_stopped_retention() -> u64 {
    3600
}

/// In the order in which pools are brought up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PoolRole {
    Gateway,
    Builder,
    #[default]
    Worker,
}

/// What each instance of a pool gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Resources {
    #[schemars(range(min = 1, max = 32))]
    pub vcpus: u32,
    #[schemars(range(min = 32, max = 65536))]
    pub mem_mib: u64,
    /// 0: no data disk.
    #[schemars(range(min = 0, max = 1_048_576))]
    pub data_disk_mib: u64,
}

/// How many instances of a pool are wanted in each phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DesiredCounts {
    #[schemars(range(min = 0, max = 1000))]
    pub running: u32,
    #[schemars(range(min = 0, max = 1000))]
    pub warm: u32,
    #[schemars(range(min = 0, max = 1000))]
    pub sleeping: u32,
}

/// How long phases last at least, and how patiently they are ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
#[serde(default)]
pub struct RuntimePolicy {
    /// How long an instance runs at least before it may be stopped or paused.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub min_running_seconds: u64,
    /// How long an instance stays warm at least before it may be put to sleep or stopped.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub min_warm_seconds: u64,
    /// How long a guest may take to finish its work before it is paused.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub drain_timeout_seconds: u64,
    /// How long a guest may take to shut down before it is killed.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub graceful_shutdown_seconds: u64,
}

impl Default for RuntimePolicy {
    fn default() -> Self {
        Self {
            min_running_seconds: 60,
            min_warm_seconds: 30,
            drain_timeout_seconds: 30,
            graceful_shutdown_seconds: 15,
        }
    }
}

/// When idle instances give back what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
#[serde(default)]
pub struct SleepPolicy {
    /// T1: idle for longer than this, a running instance becomes warm. At most `sleep_after_seconds`.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub warm_after_seconds: u64,
    /// T2: idle for longer than this, an instance is put to sleep.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub sleep_after_seconds: u64,
    /// Below this share of its CPUs an instance counts as idle.
    #[schemars(range(min = 0, max = 100))]
    pub cpu_idle_percent: u32,
}

impl Default for SleepPolicy {
    fn default() -> Self {
        Self { warm_after_seconds: 300, sleep_after_seconds: 900, cpu_idle_percent: 5 }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SeccompPolicy {
    #[default]
    Baseline,
    Strict,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotCompression {
    #[default]
    None,
    Lz4,
    Zstd,
}

/// Session persistence: what of the guest is kept, where, and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Persist {
    /// What is kept: a folder inside the guest. `/data` is the whole data disk.
    #[schemars(length(max = 4095), regex(pattern = "^/[!-~]+$"))]
    pub path: String,
    /// Where it is kept: `local`, `file:///FOLDER` or `s3://BUCKET[/PREFIX]`.
    #[schemars(
        length(max = 2048),
        regex(pattern = "^(local|file:///[!-~]+|s3://[a-z0-9-][a-z0-9.-]{2,62}(/[!-~]*)?)$")
    )]
    pub store: String,
    #[schemars(range(min = 1, max = 86_400))]
    pub every_seconds: u64,
}

/// What is run in a pool's template before it is saved: every instance is a fork of what it leaves behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Warmup {
    /// The program and its arguments; no shell.
    #[schemars(length(min = 1, max = 64), inner(length(max = 4096), regex(pattern = "^[ -~]+$")))]
    pub command: Vec<String>,
    /// How long it may take.
    #[schemars(default = "default_warmup_timeout", range(min = 1, max = 3600))]
    pub timeout_seconds: u64,
}

/// The `timeout_seconds` of a warm-up that does not say.
#[must_use]
pub fn default_warmup_timeout() -> u64 {
    60
}

/// Everything wrong with a document, in document order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentErrors(pub Vec<FieldError>);

impl fmt::Display for DocumentErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the document has {} error(s)", self.0.len())?;
        self.0.iter().try_for_each(|error| write!(f, "\n  {error}"))
    }
}

impl std::error::Error for DocumentErrors {}

impl DocumentErrors {
    fn unknown_version(found: u64) -> Self {
        let expected = format!("must be {SCHEMA_VERSION}, the only schema version that this build reads");
        Self(vec![FieldError { path: "schema_version".to_owned(), expected, found: found.to_string() }])
    }

    /// Whether the document is of another schema version, so that nothing else in it was looked at.
    #[must_use]
    pub fn is_unknown_version(&self) -> bool {
        matches!(&self.0[..], [error] if *error == Self::unknown_version(error.found.parse().unwrap_or(0)).0[0])
    }
}

impl From<DocumentErrors> for Problem {
    fn from(errors: DocumentErrors) -> Self {
        if errors.is_unknown_version() {
            let detail = "the document is of a schema version that this build does not know";
            Problem::new(
                422,
                "schema_version_unknown",
                detail,
                "Upgrade mvm here, or write the document anew.",
            )
        } else {
            let detail = format!("the document has {} error(s)", errors.0.len());
            let remedy = "Correct the listed fields; `mvm schema desired-state` prints the schema.";
            Problem::new(422, "document_invalid", detail, remedy)
        }
        .with_errors(errors.0)
    }
}

impl DesiredState {
    /// Reads a document as users write it: without what a coordinator assigns.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentErrors> {
        decode::local(bytes)
    }

    /// Every pool with its tenant, as written.
    pub fn pools(&self) -> impl Iterator<Item = (&Tenant, &Pool)> {
        self.tenants.iter().flat_map(|tenant| tenant.pools.iter().map(move |pool| (tenant, pool)))
    }

    /// The paths of pools without an image digest: not allowed in a signed document outside a dev cluster.
    #[must_use]
    pub fn pools_without_image_digest(&self) -> Vec<FieldError> {
        rules::pools_without_image_digest(self)
    }
}

impl SignedDocument {
    /// A document whose `cluster` is its provenance's.
    #[must_use]
    pub fn new(provenance: Provenance, desired: DesiredState) -> Self {
        let desired = DesiredState { cluster: Some(provenance.cluster.clone()), ..desired };
        Self { provenance, desired }
    }

    /// The payload to sign.
    #[must_use]
    pub fn to_payload(&self) -> Vec<u8> {
        let content = self.desired.to_content(&self.provenance.cluster);
        Self::payload_of(&self.provenance, &content)
    }

    /// The payload of a document that says `content`, as [`DesiredState::to_content`] made it for the same cluster: its text with the
    /// provenance after the node's id.
    #[must_use]
    pub fn payload_of(provenance: &Provenance, content: &[u8]) -> Vec<u8> {
        // Before these stand a number and two ids, which hold no quotation marks.
        let cluster = memchr::memmem::find(content, br#","cluster":"#).unwrap_or_default();
        let tenants = memchr::memmem::find(content, br#","tenants":"#).unwrap_or_default();
        let (head, tail) = (&content[..cluster], &content[tenants..]);
        // Structs of strings, numbers and lists always serialise.
        let provenance = serde_json::to_vec(provenance).unwrap_or_default();
        let fields = provenance.strip_prefix(b"{").and_then(|fields| fields.strip_suffix(b"}"));
        [head, b",", fields.unwrap_or_default(), tail].concat()
    }
}

impl DesiredState {
    /// What is declared for a node of this cluster, as text: the same of every document that says the same.
    #[must_use]
    pub fn to_content(&self, cluster: &ClusterId) -> Vec<u8> {
        #[derive(Serialize)]
        struct Flat<'a> {
            schema_version: u32,
            node_id: &'a NodeId,
            cluster: &'a ClusterId,
            tenants: &'a [Tenant],
            prune_unknown_tenants: bool,
            prune_unknown_pools: bool,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            removed_tenants: &'a [RemovedTenant],
        }
        let flat = Flat {
            schema_version: self.schema_version,
            node_id: &self.node_id,
            cluster,
            tenants: &self.tenants,
            prune_unknown_tenants: self.prune_unknown_tenants,
            prune_unknown_pools: self.prune_unknown_pools,
            removed_tenants: &self.removed_tenants,
        };
        // Structs of strings, numbers and lists always serialise.
        serde_json::to_vec(&flat).unwrap_or_default()
    }
}

impl Payload for SignedDocument {
    const PAYLOAD_TYPE: &'static str = DOCUMENT_PAYLOAD_TYPE;
    type Error = DocumentErrors;
    fn parse(bytes: &[u8]) -> Result<Self, DocumentErrors> {
        decode::signed(bytes)
    }
}
