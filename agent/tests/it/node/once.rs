//! `mvm agent reconcile`: one document, once.

use std::path::Path;
use std::time::Duration;

use mvm_agent::isolation::IsolationSettings;
use mvm_agent::node::assemble::NodeError;
use mvm_agent::node::info::CapacityCaps;
use mvm_agent::node::{OnceSettings, reconcile_once};
use mvm_agent::persist::SessionLimits;
use mvm_host::cgroup::CgroupSettings;
use mvm_proto::DesiredState;
use mvm_vmm::DriverKind;
use mvm_vmm::VmmSettings;
use serde_json::json;

use crate::node::cluster::at;
use crate::node::documents::{document, parse, simple};
use crate::node::snapshot_options::put_key;

fn settings(dir: &Path) -> OnceSettings {
    OnceSettings {
        data_dir: dir.to_owned(),
        node_id: None,
        driver: DriverKind::Fake,
        vmm: VmmSettings::default(),
        images_dir: dir.join("images"),
        secrets_dir: dir.join("secrets"),
        sessions_dir: dir.join("sessions"),
        session_limits: SessionLimits::default(),
        sweep_after: Duration::from_secs(60),
        boot_deadline: Duration::from_secs(90),
        capacity: CapacityCaps::default(),
        isolation: IsolationSettings::NONE,
        groups: CgroupSettings::default(),
        dry_run: false,
    }
}

#[tokio::test]
async fn a_document_is_made_true_and_the_second_time_there_is_nothing_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let report = reconcile_once(simple(3, 1, 2), settings(dir.path()), at(0)).await.unwrap();
    assert!(report.converged, "{report:?}");
    assert!(report.steps.len() >= 6 && report.errors.is_empty() && report.deferred.is_empty());
    let report = reconcile_once(simple(3, 1, 2), settings(dir.path()), at(1)).await.unwrap();
    assert_eq!((report.converged, report.steps.len(), report.rounds), (true, 0, 1));
    let mut gone = document(&[]);
    gone["prune_unknown_tenants"] = json!(true);
    let report = reconcile_once(parse(&gone), settings(dir.path()), at(2)).await.unwrap();
    assert!(report.converged, "{report:?}");
    let left = std::fs::read_dir(dir.path().join("fake-vms")).unwrap().count();
    assert_eq!(left, 0, "no VM is left");
}

#[tokio::test]
async fn a_dry_run_plans_and_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = dir.path().join("never-made");
    let dry = |path: &Path| OnceSettings { dry_run: true, ..settings(path) };
    let report = reconcile_once(simple(2, 0, 0), dry(&fresh), at(0)).await.unwrap();
    assert_eq!((report.dry_run, report.converged, report.steps.len()), (true, false, 2));
    assert!(!fresh.exists());

    reconcile_once(simple(2, 0, 0), settings(&fresh), at(0)).await.unwrap();
    let report = reconcile_once(simple(3, 0, 0), dry(&fresh), at(1)).await.unwrap();
    assert_eq!(report.steps.len(), 1, "{report:?}");
    let report = reconcile_once(simple(2, 0, 0), dry(&fresh), at(1)).await.unwrap();
    assert!(report.converged, "{report:?}");
}

#[tokio::test]
async fn another_nodes_document_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let other = OnceSettings { node_id: Some("node-2".parse().unwrap()), ..settings(dir.path()) };
    let error = reconcile_once(simple(1, 0, 0), other, at(0)).await.unwrap_err();
    assert!(matches!(error, NodeError::OtherNode { .. }));
}

#[tokio::test]
async fn what_quota_forbids_is_reported_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let capped = OnceSettings {
        capacity: CapacityCaps { vcpus: Some(2), ..CapacityCaps::default() },
        ..settings(dir.path())
    };
    let report = reconcile_once(simple(3, 0, 0), capped, at(0)).await.unwrap();
    assert_eq!((report.converged, report.steps.len(), report.deferred.len()), (false, 2, 1));
    assert!(report.deferred[0].reason.contains("the node's vcpus"), "{:?}", report.deferred);
}

#[tokio::test]
async fn every_example_converges() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut tried = 0;
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        tried += 1;
        let dir = tempfile::tempdir().unwrap();
        // Of the one whose snapshots are encrypted.
        put_key(dir.path(), 1);
        let mut example: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        // Its bundles are on no machine of ours.
        for tenant in example["tenants"].as_array_mut().unwrap() {
            tenant.as_object_mut().unwrap().remove("secrets_hash");
        }
        let desired = DesiredState::parse(example.to_string().as_bytes()).unwrap();
        let report = reconcile_once(desired, settings(dir.path()), at(0)).await.unwrap();
        assert!(report.converged, "{}: {report:?}", path.display());
    }
    assert!(tried >= 3);
}
