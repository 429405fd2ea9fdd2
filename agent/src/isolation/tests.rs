//! An instance's limits on the disk, before its VM starts and while it runs, in a hierarchy of plain files.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::cgroup::{CgroupSettings, Mode, fake};
use mvm_proto::{DesiredState, Digest, Timestamp};
use serde_json::{Value, json};

use super::*;
use crate::clock::Clock;
use crate::events::Events;
use crate::instance::records::Records;

/// A hierarchy with the group of one instance, and data on a file system of this kind on a partition of the disk 8:16.
struct Site {
    _dir: tempfile::TempDir,
    isolation: Arc<Isolation>,
    file: PathBuf,
}

fn site(kind: &str, mode: Mode) -> Site {
    let dir = tempfile::tempdir().unwrap();
    let groups = dir.path().join("groups");
    for below in ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007"] {
        fake::group(&groups.join(below), "cpu memory pids io").unwrap();
    }
    let machine = fake::machine(dir.path(), kind).unwrap();
    let file = groups.join("mvm/acme/web/i-00000007/io.max");
    let settings = CgroupSettings { mode, mount: Some(groups), machine, ..CgroupSettings::default() };
    let host = AnyHost::local_with_groups(dir.path(), settings);
    let wanted = IsolationSettings { cgroups: Effort::Required, ..IsolationSettings::NONE };
    let isolation = Arc::new(Isolation::new(host, DriverKind::Fake, wanted));
    Site { _dir: dir, isolation, file }
}

impl Site {
    fn now(&self) -> String {
        fs::read_to_string(&self.file).unwrap()
    }

    fn check(&self) -> CgroupCheck {
        let time = Duration::from_secs(30);
        CgroupCheck::new(Arc::clone(&self.isolation), time, time, Events::new(Clock::system()))
    }
}

fn record(io_limits: Value) -> Record {
    let mut record = json!({
        "tenant": "acme", "pool": "web", "id": InstanceId::from_bits(7), "offset": 2, "address": "10.1.0.2",
        "phase": "ready", "since": Timestamp::from_unix_ms(0), "reason": "test", "revision": Digest::of(b"it"),
        "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 }, "flake_ref": "builtin:busybox",
        "claimed": false, "on_demand": false, "failures": 0,
    });
    if !io_limits.is_null() {
        record["io_limits"] = io_limits;
    }
    serde_json::from_value(record).unwrap()
}

fn document(pool: &str, io_limits: Value) -> DesiredState {
    let mut pool = json!({
        "pool_id": pool, "flake_ref": "builtin:busybox", "profile": "minimal",
        "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
        "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
    });
    if !io_limits.is_null() {
        pool["io_limits"] = io_limits;
    }
    let tenant = json!({
        "tenant_id": "acme",
        "network": { "tenant_net_id": 1, "ipv4_subnet": "10.1.0.0/24" },
        "quotas": { "max_vcpus": 9, "max_mem_mib": 999, "max_running": 9, "max_warm": 9, "max_pools": 9,
            "max_instances_per_pool": 9, "max_disk_gib": 9 },
        "pools": [pool],
    });
    let text = json!({ "schema_version": 1, "node_id": "node-a", "tenants": [tenant] }).to_string();
    DesiredState::parse(text.as_bytes()).unwrap()
}

fn writes(bytes: u64) -> Value {
    json!({ "write_bytes_per_second": bytes })
}

fn limited(bytes: u64) -> String {
    format!("8:16 rbps=max wbps={bytes} riops=max wiops=max")
}

#[tokio::test]
async fn the_disk_is_limited_before_a_vm_starts_as_the_document_says_or_last_said() {
    let site = site("ext4", Mode::Required);
    let bounds = site.isolation.prepare(&record(writes(1 << 20))).await.unwrap();
    assert_eq!(site.now(), limited(1 << 20), "no document names the pool");
    assert!(bounds.direct_disk);
    *site.isolation.disks() = DiskLimits::of(&document("web", writes(2 << 20)));
    site.isolation.prepare(&record(writes(1 << 20))).await.unwrap();
    assert_eq!(site.now(), limited(2 << 20));
    *site.isolation.disks() = DiskLimits::of(&document("web", Value::Null));
    let bounds = site.isolation.prepare(&record(writes(1 << 20))).await.unwrap();
    assert!(!bounds.direct_disk);
    assert_eq!(site.now(), "8:16 rbps=max wbps=max riops=max wiops=max");
    *site.isolation.disks() = DiskLimits::of(&document("other", writes(2 << 20)));
    site.isolation.prepare(&record(writes(1 << 20))).await.unwrap();
    assert_eq!(site.now(), limited(1 << 20));
}

#[tokio::test]
async fn a_limit_that_can_not_be_held_keeps_the_vm_from_starting_and_only_that() {
    let site = site("overlay", Mode::Required);
    let refused = site.isolation.prepare(&record(writes(1 << 20))).await.unwrap_err().to_string();
    assert!(refused.contains("its file system is overlay"), "{refused}");
    site.isolation.prepare(&record(Value::Null)).await.unwrap();
}

#[tokio::test]
async fn with_best_effort_a_disk_that_is_not_limited_is_used_as_any_other() {
    let site = site("tmpfs", Mode::BestEffort);
    let bounds = site.isolation.prepare(&record(writes(1 << 20))).await.unwrap();
    assert!(!bounds.direct_disk, "a file system without disk may know no way past the page cache");
}

#[tokio::test]
async fn a_limit_that_can_not_be_held_any_more_is_a_condition_until_it_is_not_asked_for() {
    for (mode, reason) in [(Mode::Required, "Failed"), (Mode::BestEffort, "BestEffort")] {
        let site = site("tmpfs", mode);
        let (mut check, records, now) = (site.check(), Records::empty(), Timestamp::from_unix_ms(0));
        check.reconcile(Some(&document("web", Value::Null)), &records).await;
        assert_eq!(check.condition(now).reason, "Held");
        check.reconcile(Some(&document("web", writes(1 << 20))), &records).await;
        let condition = check.condition(now);
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", reason));
        assert!(condition.message.contains("its file system is tmpfs"), "{condition:?}");
        check.reconcile(Some(&document("web", Value::Null)), &records).await;
        assert_eq!(check.condition(now).reason, "Held");
    }
}

#[tokio::test]
async fn what_runs_is_limited_as_the_document_says_and_left_alone_where_it_says_nothing() {
    let site = site("ext4", Mode::Required);
    let (mut check, records) = (site.check(), Records::empty());
    check.reconcile(Some(&document("web", writes(1 << 20))), &records).await;
    assert_eq!(site.now(), limited(1 << 20));
    check.reconcile(Some(&document("web", writes(2 << 20))), &records).await;
    assert_eq!(site.now(), limited(2 << 20));
    check.reconcile(Some(&document("other", Value::Null)), &records).await;
    assert_eq!(site.now(), limited(2 << 20));
}

#[tokio::test]
async fn other_tenants_get_their_limits_when_one_cgroup_fails() {
    let site = site("ext4", Mode::Required);
    let groups = site.file.ancestors().nth(4).unwrap();
    fs::write(groups.join("aaa"), "where its group should be").unwrap();
    let mut desired = document("web", writes(1 << 20));
    let mut other = desired.tenants[0].clone();
    (other.tenant_id, other.network.tenant_net_id) = ("aaa".parse().unwrap(), 2);
    desired.tenants.push(other);
    let mut check = site.check();
    check.reconcile(Some(&desired), &Records::empty()).await;
    assert_eq!(site.now(), limited(1 << 20));
    assert_eq!(check.condition(Timestamp::from_unix_ms(0)).reason, "Failed", "and it is told");
}

#[tokio::test]
async fn networks_are_compared_while_a_group_that_is_taken_away_is_waited_for() {
    let site = site("ext4", Mode::Required);
    let record = record(Value::Null);
    let mut release = std::pin::pin!(site.isolation.release(&record));
    let _ = futures::poll!(&mut release);
    assert!(site.isolation.comparing.try_write().is_ok());
}

#[test]
fn what_an_operator_denies_is_wanted_of_every_network() {
    let deny = vec!["203.0.113.7".parse().unwrap()];
    let flags = IsolationFlags { deny: deny.clone(), ..IsolationFlags::default() };
    let isolation = Isolation::new(
        AnyHost::local(std::path::Path::new("/")),
        DriverKind::Qemu,
        flags.with(DriverKind::Qemu),
    );
    assert_eq!(isolation.wanted(None, std::iter::empty()).network.denied, deny);
}
