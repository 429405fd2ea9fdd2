//! One test per rule of the document, each on the smallest document that shows it.

use serde_json::{Value, json};

use super::*;
use crate::document::Egress;
use crate::json::MAX_ERRORS;

/// A document with every required field and nothing else.
pub(super) fn minimal() -> Value {
    json!({
        "schema_version": 1,
        "node_id": "node-a",
        "tenants": [{
            "tenant_id": "acme",
            "network": { "tenant_net_id": 3, "ipv4_subnet": "10.240.3.0/24" },
            "quotas": {
                "max_vcpus": 16, "max_mem_mib": 32768, "max_running": 8, "max_warm": 4,
                "max_pools": 3, "max_instances_per_pool": 10, "max_disk_gib": 100
            },
            "pools": [{
                "pool_id": "workers",
                "flake_ref": "github:org/openclaw-worker?rev=abc123",
                "profile": "minimal",
                "instance_resources": { "vcpus": 2, "mem_mib": 1024, "data_disk_mib": 2048 },
                "desired_counts": { "running": 3, "warm": 1, "sleeping": 2 }
            }]
        }]
    })
}

fn signed_form() -> Value {
    let mut document = minimal();
    let more = json!({
        "cluster": "prod", "epoch": 1, "generation": 7,
        "issued_at": "2026-01-31T09:30:00Z", "expires_at": "2026-02-01T09:30:00Z"
    });
    document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    document
}

/// Changes what is at a JSON pointer; a field that is not there is added.
pub(super) fn with(mut document: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match document.pointer_mut(parent).unwrap() {
        Value::Object(members) => drop(members.insert(key.to_owned(), value)),
        Value::Array(items) => items[key.parse::<usize>().unwrap()] = value,
        _ => panic!("{parent} has no members"),
    }
    document
}

fn without(mut document: Value, pointer: &str) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    document.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key).unwrap();
    document
}

pub(super) fn errors(document: &Value) -> Vec<String> {
    lines(DesiredState::parse(document.to_string().as_bytes()).err())
}

fn signed_errors(document: &Value) -> Vec<String> {
    lines(signed(document.to_string().as_bytes()).err())
}

fn lines(errors: Option<DocumentErrors>) -> Vec<String> {
    errors.map_or_else(Vec::new, |errors| errors.0.iter().map(ToString::to_string).collect())
}

#[test]
fn a_document_without_optional_fields_gets_the_documented_defaults() {
    let document = local(minimal().to_string().as_bytes()).unwrap();
    assert!(!document.prune_unknown_tenants && !document.prune_unknown_pools && document.cluster.is_none());
    let tenant = &document.tenants[0];
    assert_eq!((tenant.pinned, tenant.secrets_hash, &tenant.egress), (false, None, &Egress::default()));
    let pool = &tenant.pools[0];
    assert_eq!((pool.pinned, pool.critical, pool.snapshot_encryption), (false, false, false));
    assert_eq!((pool.role, pool.image_digest, pool.persist.as_ref()), (PoolRole::Worker, None, None));
    assert_eq!(pool.seccomp_policy, SeccompPolicy::Baseline);
    assert_eq!(pool.snapshot_compression, SnapshotCompression::None);
    assert_eq!(pool.stopped_retention_seconds, 3600);
    let runtime = pool.runtime_policy;
    assert_eq!((runtime.min_running_seconds, runtime.min_warm_seconds), (60, 30));
    assert_eq!((runtime.drain_timeout_seconds, runtime.graceful_shutdown_seconds), (30, 15));
    let sleep = pool.sleep_policy;
    assert_eq!((sleep.warm_after_seconds, sleep.sleep_after_seconds, sleep.cpu_idle_percent), (300, 900, 5));
}

#[test]
fn a_warm_up_has_a_minute_unless_it_says_otherwise() {
    let of = |warmup: Value| {
        let document = with(minimal(), "/tenants/0/pools/0/warmup", warmup);
        let document = local(document.to_string().as_bytes()).unwrap();
        document.tenants[0].pools[0].warmup.as_deref().cloned().unwrap()
    };
    let command = vec!["/app/warm".to_owned(), "with spaces".to_owned()];
    assert_eq!(of(json!({ "command": command })), Warmup { command, timeout_seconds: 60 });
    assert_eq!(of(json!({ "command": ["x"], "timeout_seconds": 3600 })).timeout_seconds, 3600);
    assert_eq!(local(minimal().to_string().as_bytes()).unwrap().tenants[0].pools[0].warmup, None);
}

#[test]
fn each_limit_on_the_disk_may_be_absent_and_is_then_not_written_either() {
    let of = |limits: &Value| {
        let document = with(minimal(), "/tenants/0/pools/0/io_limits", limits.clone());
        let document = local(document.to_string().as_bytes()).unwrap();
        *document.tenants[0].pools[0].io_limits.clone().unwrap()
    };
    let all = json!({
        "read_bytes_per_second": 65_536, "write_bytes_per_second": 1_u64 << 40,
        "read_ops_per_second": 10, "write_ops_per_second": 1_000_000_000,
    });
    for (name, value) in all.as_object().unwrap() {
        let one = json!({ name: value });
        let limits = of(&one);
        assert!(limits.is_sensible());
        assert_eq!(serde_json::to_value(limits).unwrap(), one);
    }
    assert_eq!(serde_json::to_value(of(&all)).unwrap(), all);
    // A document without any is written as it was before there were limits: to the byte, for it may be signed.
    let without = serde_json::to_string(&local(minimal().to_string().as_bytes()).unwrap()).unwrap();
    assert!(!without.contains("io_limits"), "{without}");
}

#[test]
fn a_health_check_is_read_with_its_defaults_and_written_as_it_is_read() {
    let of = |health: Value| {
        let document = with(minimal(), "/tenants/0/pools/0/health", health);
        *local(document.to_string().as_bytes()).unwrap().tenants[0].pools[0].health.clone().unwrap()
    };
    let short = of(json!({ "http": { "port": 8080 } }));
    let whole = json!({
        "http": { "port": 8080, "path": "/" },
        "start_period_seconds": 30, "interval_seconds": 10, "timeout_seconds": 5, "failure_threshold": 3,
    });
    assert_eq!(short, of(whole.clone()));
    assert_eq!(serde_json::to_value(&short).unwrap(), whole);
    assert_eq!(short.decided_within().as_secs(), 30 + 3 * 15);
    let exec = of(json!({ "exec": { "command": ["/bin/true"] }, "failure_threshold": 1 }));
    assert_eq!(exec.check, HealthCheck::Exec(ExecCheck { command: vec!["/bin/true".to_owned()] }));
    // A document that says nothing of it is written as before: to the byte, for it may be signed.
    let without = serde_json::to_string(&local(minimal().to_string().as_bytes()).unwrap()).unwrap();
    assert!(!without.contains("health") && !without.contains("restart"), "{without}");
    let never = with(minimal(), "/tenants/0/pools/0/restart", json!("on-failure"));
    let never = local(never.to_string().as_bytes()).unwrap();
    assert!(serde_json::to_string(&never).unwrap().contains("\"restart\":\"on-failure\""));
}

#[test]
fn limits_on_the_disk_make_a_pool_no_larger_than_a_pointer_does() {
    assert_eq!(size_of::<Option<Box<IoLimits>>>(), size_of::<usize>());
}

#[test]
fn limits_that_no_document_could_hold_are_not_sensible() {
    let bytes = |read_bytes_per_second| IoLimits { read_bytes_per_second, ..IoLimits::default() };
    let ops = |write_ops_per_second| IoLimits { write_ops_per_second, ..IoLimits::default() };
    for limits in [bytes(None), bytes(Some(0)), bytes(Some(65_535)), bytes(Some(u64::MAX)), ops(Some(9))] {
        assert!(!limits.is_sensible(), "{limits:?}");
    }
    assert!(ops(Some(10)).is_sensible() && !ops(Some(u64::from(u32::MAX))).is_sensible());
}

#[test]
fn every_required_field_is_missed_by_its_path() {
    let required = [
        "/schema_version",
        "/node_id",
        "/tenants",
        "/tenants/0/tenant_id",
        "/tenants/0/network",
        "/tenants/0/network/tenant_net_id",
        "/tenants/0/network/ipv4_subnet",
        "/tenants/0/quotas",
        "/tenants/0/quotas/max_vcpus",
        "/tenants/0/quotas/max_mem_mib",
        "/tenants/0/quotas/max_running",
        "/tenants/0/quotas/max_warm",
        "/tenants/0/quotas/max_pools",
        "/tenants/0/quotas/max_instances_per_pool",
        "/tenants/0/quotas/max_disk_gib",
        "/tenants/0/pools",
        "/tenants/0/pools/0/pool_id",
        "/tenants/0/pools/0/flake_ref",
        "/tenants/0/pools/0/profile",
        "/tenants/0/pools/0/instance_resources",
        "/tenants/0/pools/0/instance_resources/vcpus",
        "/tenants/0/pools/0/instance_resources/mem_mib",
        "/tenants/0/pools/0/instance_resources/data_disk_mib",
        "/tenants/0/pools/0/desired_counts",
        "/tenants/0/pools/0/desired_counts/running",
        "/tenants/0/pools/0/desired_counts/warm",
        "/tenants/0/pools/0/desired_counts/sleeping",
    ];
    for pointer in required {
        let path = pointer[1..].replace("/0", "[0]").replace('/', ".");
        let expected = format!("{path}: must be there, found nothing");
        assert_eq!(errors(&without(minimal(), pointer)), [expected]);
    }
}

#[test]
fn unknown_fields_are_refused_at_every_level() {
    let full = with(minimal(), "/tenants/0/egress", json!({}));
    let full = with(full, "/tenants/0/pools/0/runtime_policy", json!({}));
    let full = with(full, "/tenants/0/pools/0/sleep_policy", json!({}));
    let persist = json!({ "path": "/home", "store": "s3://bucket", "every_seconds": 60 });
    let full = with(full, "/tenants/0/pools/0/persist", persist);
    let full = with(full, "/tenants/0/pools/0/warmup", json!({ "command": ["/app/warm", "all of it"] }));
    let full = with(full, "/tenants/0/pools/0/io_limits", json!({ "write_bytes_per_second": 1_048_576 }));
    let full = with(full, "/tenants/0/pools/0/health", json!({ "http": { "port": 80 } }));
    let full = with(full, "/tenants/0/pools/0/workload", json!({ "user": 1000 }));
    assert_eq!(errors(&full), [""; 0]);
    for parent in [
        "",
        "/tenants/0",
        "/tenants/0/network",
        "/tenants/0/quotas",
        "/tenants/0/egress",
        "/tenants/0/pools/0",
        "/tenants/0/pools/0/instance_resources",
        "/tenants/0/pools/0/desired_counts",
        "/tenants/0/pools/0/runtime_policy",
        "/tenants/0/pools/0/sleep_policy",
        "/tenants/0/pools/0/persist",
        "/tenants/0/pools/0/warmup",
        "/tenants/0/pools/0/io_limits",
        "/tenants/0/pools/0/health",
        "/tenants/0/pools/0/health/http",
        "/tenants/0/pools/0/workload",
    ] {
        let found = errors(&with(full.clone(), &format!("{parent}/surprise"), json!(1)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("surprise: must not be there: the fields here are "), "{found:?}");
    }
}

#[test]
fn each_field_says_what_it_must_be_and_what_it_was() {
    let cases = [
        ("/schema_version", json!("1"), "schema_version: must be an integer, 1, found \"1\""),
        ("/node_id", json!("Node_A"), "node_id: must be 1 to 63 characters"),
        ("/node_id", json!(null), "node_id: must be a string, found null"),
        ("/cluster", json!(null), "cluster: must be a string, found null"),
        ("/tenants", json!({}), "tenants: must be an array, found an object of 0"),
        ("/prune_unknown_tenants", json!(1), "prune_unknown_tenants: must be true or false, found 1"),
        ("/prune_unknown_pools", json!("no"), "prune_unknown_pools: must be true or false, found \"no\""),
        ("/tenants/0", json!([]), "tenants[0]: must be an object, found an array of 0"),
        ("/tenants/0/tenant_id", json!("../etc"), "tenants[0].tenant_id: must be 1 to 63"),
        ("/tenants/0/pinned", json!("yes"), "tenants[0].pinned: must be true or false"),
        ("/tenants/0/network/tenant_net_id", json!(4096), "tenant_net_id: must be 0..=4095, found 4096"),
        ("/tenants/0/network/tenant_net_id", json!(-1), "tenant_net_id: must be 0..=4095, found -1"),
        ("/tenants/0/network/ipv4_subnet", json!("10.0.0.1/24"), "host bits zero: 10.0.0.0/24"),
        ("/tenants/0/network/ipv4_subnet", json!("8.8.8.0/24"), "must lie inside 10.0.0.0/8"),
        ("/tenants/0/quotas/max_vcpus", json!(4_294_967_296_u64), "must be 0..=4294967295"),
        ("/tenants/0/quotas/max_mem_mib", json!(1.0), "must be an integer, 0..=9007199254740991, found 1.0"),
        ("/tenants/0/quotas/max_disk_gib", json!(9_007_199_254_740_992_u64), "found 9007199254740992"),
        ("/tenants/0/secrets_hash", json!("sha256:abc..."), "must be `sha256:` followed by 64"),
        ("/tenants/0/egress", json!("nat"), "tenants[0].egress: must be an object, found \"nat\""),
        ("/tenants/0/egress", json!({"mode": "open"}), "egress.mode: must be one of `none`, `nat`"),
        ("/tenants/0/pools/0/pool_id", json!("-a"), "pools[0].pool_id: must be 1 to 63"),
        ("/tenants/0/pools/0/flake_ref", json!(""), "flake_ref: must be 1 to 2048 printable"),
        ("/tenants/0/pools/0/flake_ref", json!("a b"), "flake_ref: must be 1 to 2048 printable"),
        ("/tenants/0/pools/0/flake_ref", json!("oci:alpine"), "flake_ref: must not be a container image"),
        ("/tenants/0/pools/0/flake_ref", json!("oci:alpine"), "builtin:busybox, path:/DIR and Nix flakes"),
        ("/tenants/0/pools/0/flake_ref", json!("builtin:alpine"), "flake_ref: must be builtin:busybox"),
        ("/tenants/0/pools/0/flake_ref", json!("nixpkgs"), "flake_ref: must begin with builtin:, path:"),
        ("/tenants/0/pools/0/flake_ref", json!("a\u{202e}b"), r#"found "a\u{202e}b""#),
        ("/tenants/0/pools/0/profile", json!("a.b"), "profile: must be 1 to 63"),
        ("/tenants/0/pools/0/image_digest", json!("latest"), "image_digest: must be `sha256:`"),
        ("/tenants/0/pools/0/role", json!("boss"), "must be one of `gateway`, `builder`, `worker`"),
        ("/tenants/0/pools/0/instance_resources/vcpus", json!(33), "vcpus: must be 1..=32, found 33"),
        ("/tenants/0/pools/0/instance_resources/vcpus", json!(0), "vcpus: must be 1..=32, found 0"),
        ("/tenants/0/pools/0/instance_resources/mem_mib", json!(31), "must be 32..=65536, found 31"),
        ("/tenants/0/pools/0/instance_resources/data_disk_mib", json!(1_048_577), "must be 0..=1048576"),
        ("/tenants/0/pools/0/desired_counts/running", json!(1001), "running: must be 0..=1000, found 1001"),
        ("/tenants/0/pools/0/critical", json!(0), "critical: must be true or false, found 0"),
        ("/tenants/0/pools/0/runtime_policy", json!({"min_warm_seconds": "30"}), "must be an integer"),
        ("/tenants/0/pools/0/sleep_policy", json!({"cpu_idle_percent": 101}), "must be 0..=100, found 101"),
        ("/tenants/0/pools/0/seccomp_policy", json!("off"), "must be one of `baseline`, `strict`"),
        ("/tenants/0/pools/0/snapshot_compression", json!("gz"), "must be one of `none`, `lz4`, `zstd`"),
        ("/tenants/0/pools/0/snapshot_encryption", json!(null), "must be true or false, found null"),
        ("/tenants/0/pools/0/stopped_retention_seconds", json!(-1), "must be 0..=9007199254740991"),
        (
            "/tenants/0/pools/0/persist",
            json!({"path": "/a/../b", "store": "local", "every_seconds": 1}),
            "persist.path: must be an absolute path below `/`, without `.`, `..` or empty steps",
        ),
        ("/tenants/0/pools/0/warmup", json!("/app/warm"), "pools[0].warmup: must be an object"),
        ("/tenants/0/pools/0/warmup", json!({}), "warmup.command: must be there, found nothing"),
        ("/tenants/0/pools/0/warmup", json!({"command": "/app/warm"}), "warmup.command: must be an array"),
        ("/tenants/0/pools/0/warmup", json!({"command": []}), "warmup.command: must be 1 to 64 strings"),
        (
            "/tenants/0/pools/0/warmup",
            json!({"command": vec!["a"; 65]}),
            "warmup.command: must be 1 to 64 strings",
        ),
        (
            "/tenants/0/pools/0/warmup",
            json!({"command": ["a", 1]}),
            "warmup.command[1]: must be a string, found 1",
        ),
        ("/tenants/0/pools/0/warmup", json!({"command": ["a", ""]}), "warmup.command[1]: must be 1 to 4096"),
        ("/tenants/0/pools/0/warmup", json!({"command": ["a\nb"]}), "warmup.command[0]: must be 1 to 4096"),
        (
            "/tenants/0/pools/0/warmup",
            json!({"command": ["a"], "timeout_seconds": 0}),
            "warmup.timeout_seconds: must be 1..=3600, found 0",
        ),
        (
            "/tenants/0/pools/0/warmup",
            json!({"command": ["a"], "timeout_seconds": 3601}),
            "warmup.timeout_seconds: must be 1..=3600, found 3601",
        ),
        ("/tenants/0/pools/0/io_limits", json!(1_048_576), "pools[0].io_limits: must be an object"),
        ("/tenants/0/pools/0/io_limits", json!(null), "pools[0].io_limits: must be an object, found null"),
        (
            "/tenants/0/pools/0/io_limits",
            json!({}),
            "io_limits: must have at least one of read_bytes_per_second, write_bytes_per_second, \
             read_ops_per_second, write_ops_per_second",
        ),
        (
            "/tenants/0/pools/0/io_limits",
            json!({"read_bytes_per_second": 0}),
            "io_limits.read_bytes_per_second: must be 65536..=1099511627776, found 0",
        ),
        (
            "/tenants/0/pools/0/io_limits",
            json!({"write_bytes_per_second": (1_u64 << 40) + 1}),
            "io_limits.write_bytes_per_second: must be 65536..=1099511627776, found 1099511627777",
        ),
        (
            "/tenants/0/pools/0/io_limits",
            json!({"read_ops_per_second": 9}),
            "io_limits.read_ops_per_second: must be 10..=1000000000, found 9",
        ),
        (
            "/tenants/0/pools/0/io_limits",
            json!({"write_ops_per_second": "max"}),
            "io_limits.write_ops_per_second: must be an integer, 10..=1000000000, found \"max\"",
        ),
        ("/tenants/0/pools/0/restart", json!("sometimes"), "pools[0].restart: must be "),
        (
            "/tenants/0/pools/0/health",
            json!({"interval_seconds": 5}),
            "health: must have exactly one of exec, http, tcp",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"tcp": {"port": 80}, "http": {"port": 80}}),
            "health: must have exactly one of exec, http, tcp",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"tcp": {"port": 0}}),
            "health.tcp.port: must be 1..=65535, found 0",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"http": {"port": 80, "path": "healthz"}}),
            "health.http.path: must begin with `/`",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"exec": {"command": []}}),
            "health.exec.command: must be 1 to 64 strings",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"tcp": {"port": 80}, "failure_threshold": 0}),
            "health.failure_threshold: must be 1..=100, found 0",
        ),
        (
            "/tenants/0/pools/0/health",
            json!({"tcp": {"port": 80}, "interval_seconds": 3600}),
            "health: must reach a result within 7200 s",
        ),
    ];
    for (pointer, value, message) in cases {
        let found = errors(&with(minimal(), pointer, value));
        assert_eq!(found.len(), 1, "{pointer}: {found:?}");
        assert!(found[0].contains(message), "{pointer}: {found:?}");
    }
}

#[test]
fn all_errors_are_reported_at_once_in_the_order_of_the_text() {
    // Written by hand: the order of the text is the point.
    let text = r#"{
        "tenants": [
            { "pools": [{ "profile": "", "desired_counts": { "warm": 2000, "running": 9, "sleeping": 2 } }],
              "quotas": { "max_instances_per_pool": 10 }, "tenant_id": "Acme",
              "network": { "ipv4_subnet": "10.0.0.0/29", "tenant_net_id": 5000 } },
            7
        ],
        "color": "red",
        "schema_version": 1.0
    }"#;
    let paths: Vec<_> = local(text.as_bytes()).unwrap_err().0.into_iter().map(|error| error.path).collect();
    let expected = [
        "tenants[0].pools[0].profile",
        "tenants[0].pools[0].desired_counts.warm",
        "tenants[0].pools[0].pool_id",
        "tenants[0].pools[0].flake_ref",
        "tenants[0].pools[0].instance_resources",
        "tenants[0].quotas.max_vcpus",
        "tenants[0].quotas.max_mem_mib",
        "tenants[0].quotas.max_running",
        "tenants[0].quotas.max_warm",
        "tenants[0].quotas.max_pools",
        "tenants[0].quotas.max_disk_gib",
        "tenants[0].tenant_id",
        "tenants[0].network.tenant_net_id",
        "tenants[1]",
        "color",
        "schema_version",
        "node_id",
    ];
    assert_eq!(paths, expected);
}

#[test]
fn rules_between_fields_hold_on_what_could_be_read() {
    let mut document = with(minimal(), "/tenants/0/network/ipv4_subnet", json!("10.240.3.0/29"));
    let broken = with(document["tenants"][0]["pools"][0].clone(), "/profile", json!(5));
    document["tenants"][0]["pools"].as_array_mut().unwrap().push(broken);
    let lines = [
        "tenants[0].pools: must want at most 4 instances, as many as 10.240.3.0/29 has addresses for, found 12",
        "tenants[0].pools[1].pool_id: must be unique, but pools[0] has the same value, found \"workers\"",
        "tenants[0].pools[1].profile: must be a string, found 5",
    ];
    assert_eq!(errors(&document), lines);
}

#[test]
fn counts_stay_within_the_quota_of_their_pool_and_pools_within_that_of_their_tenant() {
    let many = with(minimal(), "/tenants/0/pools/0/desired_counts/warm", json!(6));
    let line = "tenants[0].pools[0].desired_counts: must add up to at most 10, \
                the quota's max_instances_per_pool, found 11";
    assert_eq!(errors(&many), [line]);
    let none = with(minimal(), "/tenants/0/quotas/max_pools", json!(0));
    assert_eq!(errors(&none), ["tenants[0].pools: must be at most 0 pools, the quota's max_pools, found 1"]);
}

#[test]
fn a_tenants_instances_fill_its_subnet_to_the_last_address_and_no_further() {
    let document = with(minimal(), "/tenants/0/network/ipv4_subnet", json!("10.0.0.0/28"));
    let counts = |n| with(document.clone(), "/tenants/0/pools/0/desired_counts/running", json!(n));
    let roomy = |document| with(document, "/tenants/0/quotas/max_instances_per_pool", json!(1000));
    assert_eq!(errors(&roomy(counts(9))), [""; 0]);
    assert_eq!(errors(&roomy(counts(10))).len(), 1);
}

#[test]
fn tenants_share_no_id_no_net_id_and_no_address() {
    let tenant = |id: &str, net: u16, subnet: &str| {
        let tenant = with(minimal()["tenants"][0].clone(), "/tenant_id", json!(id));
        with(tenant, "/network", json!({ "tenant_net_id": net, "ipv4_subnet": subnet }))
    };
    let tenants = [
        tenant("a", 1, "10.1.1.0/24"),
        tenant("b", 2, "10.2.0.0/16"),
        tenant("a", 2, "10.3.0.0/24"),
        tenant("c", 3, "10.1.0.0/16"),
        tenant("d", 4, "10.1.2.0/24"),
        tenant("e", 5, "10.2.9.0/24"),
    ];
    let mut lines = [
        "tenants[2].tenant_id: must be unique, but tenants[0] has the same value, found \"a\"",
        "tenants[2].network.tenant_net_id: must be unique, but tenants[1] has the same value, found 2",
        "tenants[3].network.ipv4_subnet: must not overlap 10.1.1.0/24 of tenants[0], found \"10.1.0.0/16\"",
        "tenants[4].network.ipv4_subnet: must not overlap 10.1.0.0/16 of tenants[3], found \"10.1.2.0/24\"",
        "tenants[5].network.ipv4_subnet: must not overlap 10.2.0.0/16 of tenants[1], found \"10.2.9.0/24\"",
    ];
    // Which field comes first is up to the JSON writer here, so compare without the order.
    let mut found = errors(&with(minimal(), "/tenants", json!(tenants)));
    lines.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, lines);
}

#[test]
fn a_pool_may_not_sleep_before_it_is_warm() {
    let policy = |policy| with(minimal(), "/tenants/0/pools/0/sleep_policy", policy);
    assert_eq!(errors(&policy(json!({ "warm_after_seconds": 900 }))), [""; 0]);
    let line = "tenants[0].pools[0].sleep_policy: must have warm_after_seconds no larger than \
                sleep_after_seconds, found 901 and 900";
    assert_eq!(errors(&policy(json!({ "warm_after_seconds": 901 }))), [line]);
}

#[test]
fn a_local_file_may_name_its_cluster_but_not_what_the_coordinator_assigns() {
    assert_eq!(errors(&with(minimal(), "/cluster", json!("prod"))), [""; 0]);
    let mut found = errors(&signed_form());
    found.sort();
    let line = |name: &str, value: &str| {
        format!(
            "{name}: must be absent: the coordinator assigns it when it signs the document, found {value}"
        )
    };
    let expected = [
        line("epoch", "1"),
        line("expires_at", "\"2026-02-01T09:30:00Z\""),
        line("generation", "7"),
        line("issued_at", "\"2026-01-31T09:30:00Z\""),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_signed_document_needs_its_provenance_and_carries_its_cluster_in_both_places() {
    let document = signed(signed_form().to_string().as_bytes()).unwrap();
    assert_eq!(document.desired.cluster.as_ref(), Some(&document.provenance.cluster));
    let expected: Vec<_> = ["cluster", "epoch", "generation", "issued_at", "expires_at"]
        .map(|name| format!("{name}: must be there, found nothing"))
        .into();
    assert_eq!(signed_errors(&minimal()), expected);
}

#[test]
fn provenance_outside_its_ranges_is_refused() {
    let cases = [
        ("/epoch", json!(0), "epoch: must be 1..=9007199254740991, found 0"),
        ("/generation", json!(0), "generation: must be 1..=9007199254740991, found 0"),
        ("/generation", json!(9_007_199_254_740_992_u64), "found 9007199254740992"),
        ("/generation", json!(u64::MAX), "found 18446744073709551615"),
        ("/issued_at", json!("yesterday"), "issued_at: must be a time as in RFC 3339"),
        ("/expires_at", json!("2026-01-31T09:30:00Z"), "expires_at: must be later than issued_at"),
        ("/expires_at", json!(1_769_851_800), "expires_at: must be a string, found 1769851800"),
        ("/cluster", json!("Prod"), "cluster: must be 1 to 63"),
    ];
    for (pointer, value, message) in cases {
        let found = signed_errors(&with(signed_form(), pointer, value));
        assert_eq!(found.len(), 1, "{pointer}: {found:?}");
        assert!(found[0].contains(message), "{pointer}: {found:?}");
    }
    assert_eq!(signed_errors(&with(signed_form(), "/generation", json!(MAX_INTEGER))), [""; 0]);
}

#[test]
fn a_document_of_another_version_is_refused_for_that_alone() {
    let document = json!({ "schema_version": 2, "node": "renamed", "tenants": "no longer a list" });
    let cause = local(document.to_string().as_bytes()).unwrap_err();
    assert!(cause.is_unknown_version());
    let line = "schema_version: must be 1, the only schema version that this build reads, found 2";
    assert_eq!(cause.0[0].to_string(), line);
    assert_eq!(crate::Problem::from(cause).code, "schema_version_unknown");
    let broken = local(b"{}").unwrap_err();
    assert!(!broken.is_unknown_version());
    assert_eq!(crate::Problem::from(broken).code, "document_invalid");
}

#[test]
fn duplicate_keys_do_not_hide_what_else_is_wrong() {
    let text = minimal().to_string().replacen("\"vcpus\":2", "\"vcpus\":99,\"vcpus\":2", 1);
    let path = "tenants[0].pools[0].instance_resources.vcpus";
    let lines = [
        format!("{path}: must be 1..=32, found 99"),
        format!("{path}: must appear once, found the key a second time"),
    ];
    assert_eq!(lines_of(&text), lines);
}

fn lines_of(text: &str) -> Vec<String> {
    lines(local(text.as_bytes()).err())
}

#[test]
fn a_document_of_nothing_but_errors_costs_a_bounded_list() {
    let text = format!("{{\"tenants\":[{}{{}}]}}", "{},".repeat(400_000));
    let errors = local(text.as_bytes()).unwrap_err().0;
    assert_eq!(errors.len(), MAX_ERRORS + 1);
}

#[test]
fn the_largest_document_is_read_and_one_byte_more_is_not() {
    let text = minimal().to_string();
    let padded = |len: usize| format!("{text}{}", " ".repeat(len - text.len()));
    assert!(local(padded(MAX_DOCUMENT_BYTES).as_bytes()).is_ok());
    let line = format!("document: must be at most {MAX_DOCUMENT_BYTES} bytes long, found 4194305 bytes");
    assert_eq!(lines_of(&padded(MAX_DOCUMENT_BYTES + 1)), [line]);
}

#[test]
fn a_node_reads_again_what_it_accepted_with_a_reference_that_no_version_serves_any_more() {
    let accepted = with(signed_form(), "/tenants/0/pools/0/flake_ref", json!("oci:alpine"));
    let read = signed(accepted.to_string().as_bytes()).unwrap();
    assert_eq!(read.desired.tenants[0].pools[0].flake_ref, "oci:alpine");
}
