//! Making a cluster: files, permissions, refusals.

use std::os::unix::fs::PermissionsExt as _;

use mvm_coordinator::{InitError, InitSettings, create_operator, init};
use mvm_pki::{Credential, Role, TrustStore};

use crate::support::{cluster_id, new_cluster, new_cluster_with, now};

#[test]
fn init_makes_every_file_and_secrets_are_the_owners_alone() {
    let (_dir, report) = new_cluster();
    let mut secrets = vec![report.coordinator_credential, report.director_key, report.operator.credential];
    secrets.extend(report.offline_keys.into_iter().map(|key| key.path));
    secrets.push(report.issuing_ca_dir.join("ca.key"));
    for path in secrets {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", path.display());
    }
    assert!(report.ca_certificate.exists() && report.operator.config.exists());
    assert_eq!(std::fs::metadata(&report.data_dir).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn init_leaves_no_trace_beside_the_data_directory() {
    let (dir, report) = new_cluster();
    let entries: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries, [report.data_dir]);
}

#[test]
fn an_existing_cluster_is_never_overwritten() {
    let (_dir, report) = new_cluster();
    let before = std::fs::read(&report.ca_certificate).unwrap();
    let again = init(&InitSettings::new(&report.data_dir, cluster_id()), now());
    assert!(matches!(again, Err(InitError::Exists { .. })));
    assert_eq!(std::fs::read(&report.ca_certificate).unwrap(), before);
}

#[test]
fn a_directory_with_other_things_in_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("precious"), "x").unwrap();
    let refused = init(&InitSettings::new(dir.path(), cluster_id()), now());
    assert!(matches!(refused, Err(InitError::NotEmpty { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn offline_keys_can_be_put_elsewhere_from_the_start() {
    let keys = tempfile::tempdir().unwrap();
    let offline = keys.path().join("stick");
    let (_dir, report) = new_cluster_with(|settings| settings.root_key_dir = Some(offline.clone()));
    assert!(report.offline_keys.iter().all(|key| key.path.starts_with(&offline) && key.path.exists()));
    assert!(!report.data_dir.join("pki/root/ca.key").exists());
    assert!(!report.data_dir.join("signing/root.key").exists());
    assert!(report.next_steps().contains("offline"));
}

#[test]
fn the_first_trust_root_names_the_cluster_and_says_whether_it_is_for_development() {
    for dev in [true, false] {
        let (_dir, report) = new_cluster_with(|settings| settings.dev = dev);
        let trust = TrustStore::load(&report.trust_file).unwrap();
        assert_eq!((trust.cluster().clone(), trust.root_version(), trust.is_dev()), (cluster_id(), 1, dev));
        assert_eq!(trust.images_version(), 1);
    }
}

#[test]
fn the_trust_is_pinned_for_the_operator_and_beside_the_offline_keys() {
    let keys = tempfile::tempdir().unwrap();
    let stick = keys.path().join("stick");
    for (dev, offline) in [(true, None), (false, None), (false, Some(stick.clone()))] {
        let (_dir, report) = new_cluster_with(|settings| {
            settings.dev = dev;
            settings.root_key_dir.clone_from(&offline);
        });
        let held = TrustStore::load(&report.trust_file).unwrap();
        assert_eq!(held.root_digest(), report.trust_digest);
        let beside = offline.unwrap_or_else(|| report.data_dir.join("signing"));
        assert_eq!(report.offline_pin, beside.join("trust.json"));
        for pin in [report.offline_pin.clone(), report.operator.dir.join("trust.json")] {
            assert_eq!(TrustStore::load(&pin).unwrap().bundle(), held.bundle(), "{}", pin.display());
        }
        let shown = format!("{:?}", report.rows());
        assert!(shown.contains(&report.trust_digest.to_string()), "{shown}");
    }
    // A pin that is there already belongs to another cluster.
    let refused = init(
        &InitSettings {
            root_key_dir: Some(stick),
            ..InitSettings::new(keys.path().join("new"), cluster_id())
        },
        now(),
    );
    assert!(matches!(refused, Err(InitError::Exists { .. })));
}

#[test]
fn operators_are_made_from_the_files_alone() {
    let (dir, report) = new_cluster();
    let out = dir.path().join("alice");
    let life = std::time::Duration::from_secs(3600);
    let files = create_operator(&report.data_dir, "alice", &out, life, now()).unwrap();
    let credential = Credential::load(&files.credential).unwrap();
    assert_eq!((credential.identity().role(), credential.identity().name()), (Role::Operator, "alice"));
    assert!(matches!(
        create_operator(&report.data_dir, "../alice", &out, life, now()),
        Err(InitError::Name { .. })
    ));
    assert!(matches!(
        create_operator(dir.path(), "alice", &out, life, now()),
        Err(InitError::NotInitialised { .. })
    ));
}
