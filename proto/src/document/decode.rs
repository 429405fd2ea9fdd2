//! From JSON text to a document: strict, and with everything that is wrong at once.
//!
//! Each function reads one object: first every field on its own, then the rules between fields on those that could
//! be read, and last the value, if nothing was missing. Nothing is guessed, and `null` is not "absent".

mod network;
mod removed_tenants;
mod workload_override;

use super::rules::{self, Subnets, Unique};
use super::workload::{
    self, DECIDED_WITHIN_SECONDS, ExecCheck, FAILURE_THRESHOLD, HEALTH_INTERVAL_SECONDS,
    HEALTH_TIMEOUT_SECONDS, Health, HealthCheck, HttpCheck, Restart, START_PERIOD_SECONDS, TcpCheck,
};
use super::{
    DesiredCounts, DesiredState, DocumentErrors, Egress, EgressMode, IO_BYTES_PER_SECOND, IO_OPS_PER_SECOND,
    IoLimits, MAX_DOCUMENT_BYTES, MAX_GUEST_PATH_BYTES, MAX_MIN_READY_SECONDS, MAX_STORE_BYTES,
    MAX_WARMUP_SECONDS, Network, Persist, Pool, PoolPolicies, PoolRole, Provenance, Quotas, Resources,
    RuntimePolicy, SCHEMA_VERSION, SeccompPolicy, SignedDocument, SleepPolicy, SnapshotCompression, Tenant,
    Update, UpdateSleeping, Warmup, default_stopped_retention, default_warmup_timeout,
};
use crate::json::{Fields, Json, MAX_INTEGER, Node, Number, Report};
use crate::{PoolId, TenantId};
use network::network;
use removed_tenants::removed_tenants;
use workload_override::workload_override;

const DOCUMENT: &[&str] = &[
    "schema_version",
    "node_id",
    "cluster",
    "epoch",
    "generation",
    "issued_at",
    "expires_at",
    "tenants",
    "prune_unknown_tenants",
    "prune_unknown_pools",
    "removed_tenants",
];
const ASSIGNED: [&str; 4] = ["epoch", "generation", "issued_at", "expires_at"];
const TENANT: &[&str] = &["tenant_id", "pinned", "network", "quotas", "secrets_hash", "egress", "pools"];
const QUOTAS: &[&str] = &[
    "max_vcpus",
    "max_mem_mib",
    "max_running",
    "max_warm",
    "max_pools",
    "max_instances_per_pool",
    "max_disk_gib",
];
const EGRESS: &[&str] = &["mode"];
const POOL: &[&str] = &[
    "pool_id",
    "flake_ref",
    "profile",
    "image_digest",
    "role",
    "instance_resources",
    "desired_counts",
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
    "secrets_hash",
    "update",
];
const UPDATE: &[&str] = &["max_unavailable", "max_surge", "replace_failed", "min_ready_seconds", "sleeping"];
const RESOURCES: &[&str] = &["vcpus", "mem_mib", "data_disk_mib"];
const COUNTS: &[&str] = &["running", "warm", "sleeping"];
const RUNTIME_POLICY: &[&str] =
    &["min_running_seconds", "min_warm_seconds", "drain_timeout_seconds", "graceful_shutdown_seconds"];
const SLEEP_POLICY: &[&str] = &["warm_after_seconds", "sleep_after_seconds", "cpu_idle_percent"];
const PERSIST: &[&str] = &["path", "store", "every_seconds"];
const WARMUP: &[&str] = &["command", "timeout_seconds"];
const CHECKS: [&str; 3] = ["exec", "http", "tcp"];
const HEALTH: &[&str] = &[
    CHECKS[0],
    CHECKS[1],
    CHECKS[2],
    "start_period_seconds",
    "interval_seconds",
    "timeout_seconds",
    "failure_threshold",
];
const EXEC_CHECK: &[&str] = &["command"];
const HTTP_CHECK: &[&str] = &["port", "path"];
const TCP_CHECK: &[&str] = &["port"];
const IO_LIMITS: &[&str] =
    &["read_bytes_per_second", "write_bytes_per_second", "read_ops_per_second", "write_ops_per_second"];

/// Reads a document as users write it.
pub(super) fn local(bytes: &[u8]) -> Result<DesiredState, DocumentErrors> {
    read(bytes, |fields| {
        for name in ASSIGNED {
            if let Some(node) = fields.node(name) {
                node.refuse::<()>("must be absent: the coordinator assigns it when it signs the document");
            }
        }
        let cluster = fields.maybe("cluster", |node| node.parse());
        let desired = desired_state(fields, rules::image_reference);
        Some(DesiredState { cluster: cluster?, ..desired? })
    })
}

/// Reads the payload of a signed envelope.
pub(super) fn signed(bytes: &[u8]) -> Result<SignedDocument, DocumentErrors> {
    read(bytes, |fields| {
        let provenance = provenance(fields);
        // What a node accepted once it reads again, whatever this version makes of its references.
        let desired = desired_state(fields, rules::reference);
        Some(SignedDocument::new(provenance?, desired?))
    })
}

fn read<T>(bytes: &[u8], decode: impl FnOnce(&Fields<'_, '_>) -> Option<T>) -> Result<T, DocumentErrors> {
    let report = Report::default();
    let json = Json::read(bytes, MAX_DOCUMENT_BYTES, &report);
    // Nothing else in a document of another version can be judged by this one's rules.
    if let Some(version) = json.as_ref().and_then(other_version) {
        return Err(DocumentErrors::unknown_version(version));
    }
    let value =
        json.as_ref().and_then(|json| Node::root(json, &report).fields(DOCUMENT)).and_then(|f| decode(&f));
    match (value, report.into_errors()) {
        (Some(value), errors) if errors.is_empty() => Ok(value),
        (_, errors) => Err(DocumentErrors(errors)),
    }
}

fn other_version(json: &Json<'_>) -> Option<u64> {
    match json.get("schema_version") {
        Some(Json::Number(Number::Unsigned(version))) => {
            Some(*version).filter(|version| *version != u64::from(SCHEMA_VERSION))
        }
        _ => None,
    }
}

fn provenance(fields: &Fields<'_, '_>) -> Option<Provenance> {
    let cluster = fields.get("cluster", |node| node.parse());
    let epoch = fields.get("epoch", |node| node.integer(1..=MAX_INTEGER));
    let generation = fields.get("generation", |node| node.integer(1..=MAX_INTEGER));
    let issued_at = fields.get("issued_at", |node| node.parse());
    let expires_at = fields.get("expires_at", |node| {
        let expires_at = node.parse()?;
        match issued_at {
            Some(issued_at) if expires_at <= issued_at => node.refuse("must be later than issued_at"),
            _ => Some(expires_at),
        }
    });
    Some(Provenance {
        cluster: cluster?,
        epoch: epoch?,
        generation: generation?,
        issued_at: issued_at?,
        expires_at: expires_at?,
    })
}

/// How a `flake_ref` is read.
type ReadReference = fn(&Node<'_, '_>) -> Option<String>;

/// All but `cluster`, which local and signed documents treat differently.
fn desired_state(fields: &Fields<'_, '_>, reference: ReadReference) -> Option<DesiredState> {
    let schema_version = fields.get("schema_version", |node| node.integer32(SCHEMA_VERSION..=SCHEMA_VERSION));
    let node_id = fields.get("node_id", |node| node.parse());
    let mut across = AcrossTenants::new(reference);
    let tenants = fields.get("tenants", |node| all(&node, |at, item| tenant(&item, at, &mut across)));
    let prune_unknown_tenants = fields.or("prune_unknown_tenants", false, |node| node.boolean());
    let prune_unknown_pools = fields.or("prune_unknown_pools", false, |node| node.boolean());
    let removed = fields.or("removed_tenants", Vec::new(), |node| removed_tenants(&node, &across.ids));
    Some(DesiredState {
        schema_version: schema_version?,
        node_id: node_id?,
        cluster: None,
        tenants: tenants?,
        prune_unknown_tenants: prune_unknown_tenants?,
        prune_unknown_pools: prune_unknown_pools?,
        removed_tenants: removed?,
    })
}

/// Reads every item, also after a bad one; the list only if all were good.
pub(crate) fn all<'a, T>(
    node: &Node<'_, 'a>,
    mut read: impl FnMut(usize, Node<'_, 'a>) -> Option<T>,
) -> Option<Vec<T>> {
    let items = node.items()?;
    let mut list = Some(Vec::with_capacity(items.len()));
    for (at, item) in items.enumerate() {
        match read(at, item) {
            Some(value) => {
                if let Some(list) = &mut list {
                    list.push(value);
                }
            }
            None => list = None,
        }
    }
    list
}

/// What must differ between tenants, and how all their references are read.
struct AcrossTenants {
    ids: Unique<TenantId>,
    net_ids: Unique<u16>,
    subnets: Subnets,
    reference: ReadReference,
}

impl AcrossTenants {
    fn new(reference: ReadReference) -> Self {
        Self { ids: Unique::default(), net_ids: Unique::default(), subnets: Subnets::default(), reference }
    }
}

/// What the pools of one tenant are held to.
struct AcrossPools<'q> {
    quotas: Option<&'q Quotas>,
    ids: Unique<PoolId>,
    /// How many instances they want, whatever else is wrong with them.
    wanted: u64,
    reference: ReadReference,
}

fn tenant(node: &Node<'_, '_>, at: usize, across: &mut AcrossTenants) -> Option<Tenant> {
    let fields = node.fields(TENANT)?;
    let tenant_id = fields.get("tenant_id", |node| {
        let id = node.parse()?;
        across.ids.check(&id, "tenants", at, &node);
        Some(id)
    });
    let pinned = fields.or("pinned", false, |node| node.boolean());
    let network = fields.get("network", |node| network(&node, at, across)).unwrap_or_default();
    let quotas = fields.get("quotas", |node| quotas(&node));
    let secrets_hash = fields.maybe("secrets_hash", |node| node.parse());
    let egress = fields.or("egress", Egress::default(), |node| egress(&node));
    let pools =
        fields.get("pools", |node| pools(&node, quotas.as_ref(), network.addresses(), across.reference));
    Some(Tenant {
        tenant_id: tenant_id?,
        pinned: pinned?,
        network: network.whole()?,
        quotas: quotas?,
        secrets_hash: secrets_hash?,
        egress: egress?,
        pools: pools?,
    })
}

fn quotas(node: &Node<'_, '_>) -> Option<Quotas> {
    let fields = node.fields(QUOTAS)?;
    let small = |name| fields.get(name, |node| node.integer32(0..=u32::MAX));
    let large = |name| fields.get(name, |node| node.integer(0..=MAX_INTEGER));
    let max_vcpus = small("max_vcpus");
    let max_mem_mib = large("max_mem_mib");
    let max_running = small("max_running");
    let max_warm = small("max_warm");
    let max_pools = small("max_pools");
    let max_instances_per_pool = small("max_instances_per_pool");
    let max_disk_gib = large("max_disk_gib");
    Some(Quotas {
        max_vcpus: max_vcpus?,
        max_mem_mib: max_mem_mib?,
        max_running: max_running?,
        max_warm: max_warm?,
        max_pools: max_pools?,
        max_instances_per_pool: max_instances_per_pool?,
        max_disk_gib: max_disk_gib?,
    })
}

pub(crate) fn egress(node: &Node<'_, '_>) -> Option<Egress> {
    let modes = [("none", EgressMode::None), ("nat", EgressMode::Nat)];
    let mode = node.fields(EGRESS)?.or("mode", EgressMode::default(), |node| node.choice(&modes));
    Some(Egress { mode: mode? })
}

fn pools(
    node: &Node<'_, '_>,
    quotas: Option<&Quotas>,
    addresses: Option<Network>,
    reference: ReadReference,
) -> Option<Vec<Pool>> {
    let mut across = AcrossPools { quotas, ids: Unique::default(), wanted: 0, reference };
    let pools = all(node, |at, item| pool(&item, at, &mut across));
    if let Some(quotas) = quotas {
        rules::pools_within_quota(node, quotas);
    }
    if let Some(addresses) = addresses {
        rules::instances_within_addresses(node, across.wanted, &addresses);
    }
    pools
}

fn pool(node: &Node<'_, '_>, at: usize, across: &mut AcrossPools<'_>) -> Option<Pool> {
    let fields = node.fields(POOL)?;
    let pool_id = fields.get("pool_id", |node| {
        let id = node.parse()?;
        across.ids.check(&id, "pools", at, &node);
        Some(id)
    });
    let flake_ref = fields.get("flake_ref", |node| (across.reference)(&node));
    let profile = fields.get("profile", |node| node.parse());
    let image_digest = fields.maybe("image_digest", |node| node.parse());
    let resources = fields.get("instance_resources", |node| resources(&node));
    let counts = fields.get("desired_counts", |node| {
        let counts = counts(&node)?;
        across.wanted += rules::total(&counts);
        if let Some(quotas) = across.quotas {
            rules::counts_within_quota(&node, &counts, quotas);
        }
        Some(counts)
    });
    let secrets_hash = fields.maybe("secrets_hash", |node| node.parse());
    let update = fields.maybe("update", |node| update(&node));
    let policies = policies(&fields);
    let PoolPolicies {
        role,
        pinned,
        critical,
        runtime_policy,
        sleep_policy,
        seccomp_policy,
        snapshot_compression,
        snapshot_encryption,
        stopped_retention_seconds,
        persist,
        warmup,
        io_limits,
        restart,
        health,
        workload,
    } = policies?;
    Some(Pool {
        pool_id: pool_id?,
        flake_ref: flake_ref?,
        profile: profile?,
        image_digest: image_digest?,
        role,
        instance_resources: resources?,
        desired_counts: counts?,
        pinned,
        critical,
        runtime_policy,
        sleep_policy,
        seccomp_policy,
        snapshot_compression,
        snapshot_encryption,
        stopped_retention_seconds,
        persist,
        warmup,
        io_limits,
        restart,
        health,
        workload,
        secrets_hash: secrets_hash?,
        update: update?,
    })
}

/// What a document's pool and a declared one say in the same words.
pub(crate) fn policies(fields: &Fields<'_, '_>) -> Option<PoolPolicies> {
    const ROLES: [(&str, PoolRole); 3] =
        [("gateway", PoolRole::Gateway), ("builder", PoolRole::Builder), ("worker", PoolRole::Worker)];
    const SECCOMP: [(&str, SeccompPolicy); 2] =
        [("baseline", SeccompPolicy::Baseline), ("strict", SeccompPolicy::Strict)];
    const COMPRESSION: [(&str, SnapshotCompression); 3] = [
        ("none", SnapshotCompression::None),
        ("lz4", SnapshotCompression::Lz4),
        ("zstd", SnapshotCompression::Zstd),
    ];
    const RESTART: [(&str, Restart); 3] =
        [("always", Restart::Always), ("on-failure", Restart::OnFailure), ("never", Restart::Never)];

    let role = fields.or("role", PoolRole::default(), |node| node.choice(&ROLES));
    let pinned = fields.or("pinned", false, |node| node.boolean());
    let critical = fields.or("critical", false, |node| node.boolean());
    let runtime_policy = fields.or("runtime_policy", RuntimePolicy::default(), |node| runtime_policy(&node));
    let sleep_policy = fields.or("sleep_policy", SleepPolicy::default(), |node| sleep_policy(&node));
    let seccomp_policy = fields.or("seccomp_policy", SeccompPolicy::default(), |node| node.choice(&SECCOMP));
    let compression =
        fields.or("snapshot_compression", SnapshotCompression::default(), |node| node.choice(&COMPRESSION));
    let snapshot_encryption = fields.or("snapshot_encryption", false, |node| node.boolean());
    let retention =
        fields.or("stopped_retention_seconds", default_stopped_retention(), |node| seconds(&node));
    let persist = fields.maybe("persist", |node| persist(&node).map(Box::new));
    let warmup = fields.maybe("warmup", |node| warmup(&node).map(Box::new));
    let io_limits = fields.maybe("io_limits", |node| io_limits(&node).map(Box::new));
    let restart = fields.or("restart", Restart::default(), |node| node.choice(&RESTART));
    let health = fields.maybe("health", |node| health(&node).map(Box::new));
    let workload = fields.maybe("workload", |node| workload_override(&node).map(Box::new));
    Some(PoolPolicies {
        role: role?,
        pinned: pinned?,
        critical: critical?,
        runtime_policy: runtime_policy?,
        sleep_policy: sleep_policy?,
        seccomp_policy: seccomp_policy?,
        snapshot_compression: compression?,
        snapshot_encryption: snapshot_encryption?,
        stopped_retention_seconds: retention?,
        persist: persist?,
        warmup: warmup?,
        io_limits: io_limits?,
        restart: restart?,
        health: health?,
        workload: workload?,
    })
}

fn resources(node: &Node<'_, '_>) -> Option<Resources> {
    let fields = node.fields(RESOURCES)?;
    let vcpus = fields.get("vcpus", |node| node.integer32(1..=32));
    let mem_mib = fields.get("mem_mib", |node| node.integer(32..=65_536));
    let data_disk_mib = fields.get("data_disk_mib", |node| node.integer(0..=1_048_576));
    Some(Resources { vcpus: vcpus?, mem_mib: mem_mib?, data_disk_mib: data_disk_mib? })
}

fn counts(node: &Node<'_, '_>) -> Option<DesiredCounts> {
    let fields = node.fields(COUNTS)?;
    let count = |name| fields.get(name, |node| node.integer32(0..=1000));
    let (running, warm, sleeping) = (count("running"), count("warm"), count("sleeping"));
    Some(DesiredCounts { running: running?, warm: warm?, sleeping: sleeping? })
}

fn update(node: &Node<'_, '_>) -> Option<Update> {
    const SLEEPING: [(&str, UpdateSleeping); 2] =
        [("background", UpdateSleeping::Background), ("on_wake", UpdateSleeping::OnWake)];
    let (fields, default) = (node.fields(UPDATE)?, Update::default());
    let limit = |name| fields.or(name, 0, |node| node.integer32(0..=1000));
    let (max_unavailable, max_surge) = (limit("max_unavailable"), limit("max_surge"));
    let replace_failed = fields.or("replace_failed", false, |node| node.boolean());
    let min_ready_seconds = fields
        .or("min_ready_seconds", default.min_ready_seconds, |node| node.integer(0..=MAX_MIN_READY_SECONDS));
    let sleeping = fields.or("sleeping", default.sleeping, |node| node.choice(&SLEEPING));
    Some(Update {
        max_unavailable: max_unavailable?,
        max_surge: max_surge?,
        replace_failed: replace_failed?,
        min_ready_seconds: min_ready_seconds?,
        sleeping: sleeping?,
    })
}

fn seconds(node: &Node<'_, '_>) -> Option<u64> {
    node.integer(0..=MAX_INTEGER)
}

fn runtime_policy(node: &Node<'_, '_>) -> Option<RuntimePolicy> {
    let fields = node.fields(RUNTIME_POLICY)?;
    let default = RuntimePolicy::default();
    let or = |name, default| fields.or(name, default, |node| seconds(&node));
    let min_running_seconds = or("min_running_seconds", default.min_running_seconds);
    let min_warm_seconds = or("min_warm_seconds", default.min_warm_seconds);
    let drain_timeout_seconds = or("drain_timeout_seconds", default.drain_timeout_seconds);
    let graceful_shutdown_seconds = or("graceful_shutdown_seconds", default.graceful_shutdown_seconds);
    Some(RuntimePolicy {
        min_running_seconds: min_running_seconds?,
        min_warm_seconds: min_warm_seconds?,
        drain_timeout_seconds: drain_timeout_seconds?,
        graceful_shutdown_seconds: graceful_shutdown_seconds?,
    })
}

fn sleep_policy(node: &Node<'_, '_>) -> Option<SleepPolicy> {
    let fields = node.fields(SLEEP_POLICY)?;
    let default = SleepPolicy::default();
    let warm_after = fields.or("warm_after_seconds", default.warm_after_seconds, |node| seconds(&node));
    let sleep_after = fields.or("sleep_after_seconds", default.sleep_after_seconds, |node| seconds(&node));
    let cpu_idle = fields.or("cpu_idle_percent", default.cpu_idle_percent, |node| node.integer32(0..=100));
    if let (Some(warm_after), Some(sleep_after)) = (warm_after, sleep_after) {
        rules::sleeps_after_warming(node, warm_after, sleep_after);
    }
    Some(SleepPolicy {
        warm_after_seconds: warm_after?,
        sleep_after_seconds: sleep_after?,
        cpu_idle_percent: cpu_idle?,
    })
}

fn persist(node: &Node<'_, '_>) -> Option<Persist> {
    let fields = node.fields(PERSIST)?;
    let path = fields.get("path", |node| rules::guest_path(&node, MAX_GUEST_PATH_BYTES));
    let store = fields.get("store", |node| rules::session_store(&node, MAX_STORE_BYTES));
    let every_seconds = fields.get("every_seconds", |node| node.integer(1..=86_400));
    Some(Persist { path: path?, store: store?, every_seconds: every_seconds? })
}

fn warmup(node: &Node<'_, '_>) -> Option<Warmup> {
    let fields = node.fields(WARMUP)?;
    let command = fields.get("command", |node| rules::command(&node));
    let timeout_seconds =
        fields.or("timeout_seconds", default_warmup_timeout(), |node| node.integer(1..=MAX_WARMUP_SECONDS));
    Some(Warmup { command: command?, timeout_seconds: timeout_seconds? })
}

fn io_limits(node: &Node<'_, '_>) -> Option<IoLimits> {
    let fields = node.fields(IO_LIMITS)?;
    if node.is_empty() {
        return node.refuse(format_args!("must have at least one of {}", IO_LIMITS.join(", ")));
    }
    let bytes = |name| fields.maybe(name, |node| node.integer(IO_BYTES_PER_SECOND));
    let ops = |name| fields.maybe(name, |node| node.integer(IO_OPS_PER_SECOND));
    let (read_bytes, write_bytes) = (bytes("read_bytes_per_second"), bytes("write_bytes_per_second"));
    let (read_ops, write_ops) = (ops("read_ops_per_second"), ops("write_ops_per_second"));
    Some(IoLimits {
        read_bytes_per_second: read_bytes?,
        write_bytes_per_second: write_bytes?,
        read_ops_per_second: read_ops?,
        write_ops_per_second: write_ops?,
    })
}

fn health(node: &Node<'_, '_>) -> Option<Health> {
    let fields = node.fields(HEALTH)?;
    let exec = fields.maybe("exec", |node| {
        let command = node.fields(EXEC_CHECK)?.get("command", |node| rules::command(&node));
        Some(HealthCheck::Exec(ExecCheck { command: command? }))
    });
    let http = fields.maybe("http", |node| {
        let fields = node.fields(HTTP_CHECK)?;
        let port = fields.get("port", |node| port(&node));
        let path = fields.or("path", workload::default_path(), |node| rules::url_path(&node));
        Some(HealthCheck::Http(HttpCheck { port: port?, path: path? }))
    });
    let tcp = fields.maybe("tcp", |node| {
        let port = node.fields(TCP_CHECK)?.get("port", |node| port(&node));
        Some(HealthCheck::Tcp(TcpCheck { port: port? }))
    });
    let start_period = fields
        .or("start_period_seconds", workload::default_start_period(), |n| n.integer(START_PERIOD_SECONDS));
    let interval =
        fields.or("interval_seconds", workload::default_interval(), |n| n.integer(HEALTH_INTERVAL_SECONDS));
    let timeout =
        fields.or("timeout_seconds", workload::default_timeout(), |n| n.integer(HEALTH_TIMEOUT_SECONDS));
    let threshold =
        fields.or("failure_threshold", workload::default_threshold(), |n| n.integer32(FAILURE_THRESHOLD));
    if CHECKS.into_iter().filter(|name| fields.node(name).is_some()).count() != 1 {
        return node.refuse(format_args!("must have exactly one of {}", CHECKS.join(", ")));
    }
    let health = Health {
        check: exec?.or(http?).or(tcp?)?,
        start_period_seconds: start_period?,
        interval_seconds: interval?,
        timeout_seconds: timeout?,
        failure_threshold: threshold?,
    };
    let within = health.decided_within().as_secs();
    if within > DECIDED_WITHIN_SECONDS {
        let expected = format_args!(
            "must reach a result within {DECIDED_WITHIN_SECONDS} s: the start period, and interval and timeout for each \
             failure of the threshold"
        );
        return node.refuse_as(expected, format_args!("{within} s"));
    }
    Some(health)
}

fn port(node: &Node<'_, '_>) -> Option<u16> {
    node.integer(1..=u64::from(u16::MAX)).and_then(|port| u16::try_from(port).ok())
}

#[cfg(test)]
mod tests;
