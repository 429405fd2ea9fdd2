//! Root certificates: each new one is endorsed by one that is trusted.

use mvm_coordinator::{InitError, add_root, retire_root, switch_issuing};
use mvm_pki::endorsement::{Endorsements, follow};
use mvm_pki::{Anchors, RootAuthority};

use crate::support::{new_cluster, now};

#[test]
fn a_new_root_and_the_present_one_endorse_each_other() {
    let (dir, report) = new_cluster();
    let (data, key_dir) = (&report.data_dir, dir.path().join("second"));
    let first = Anchors::load(&data.join("pki/root/ca.crt")).unwrap();
    add_root(data, &key_dir, None, now()).unwrap();
    let both = Anchors::load(&data.join("pki/root/ca.crt")).unwrap();
    let second = RootAuthority::load(&key_dir).unwrap();
    let endorsements = Endorsements::load(&data.join("pki/root/endorsements.pem")).unwrap();
    for trusted in [first, second.anchors()] {
        assert_eq!(follow(&trusted, &both, &endorsements, now()).unwrap().anchors, both);
    }
    switch_issuing(data, &key_dir, now()).unwrap();
    retire_root(data, &report.ca_fingerprint, now()).unwrap();
    assert_eq!(Anchors::load(&data.join("pki/root/ca.crt")).unwrap(), second.anchors());
}

#[test]
fn nothing_is_issued_under_a_root_that_no_other_one_endorses() {
    let (dir, report) = new_cluster();
    let (data, key_dir) = (&report.data_dir, dir.path().join("second"));
    add_root(data, &key_dir, None, now()).unwrap();
    // As a change of roots that an older version began.
    std::fs::remove_file(data.join("pki/root/endorsements.pem")).unwrap();
    let switched = switch_issuing(data, &key_dir, now());
    assert!(matches!(switched, Err(InitError::UnendorsedRoot { .. })), "{switched:?}");
    add_root(data, &key_dir, None, now()).unwrap();
    switch_issuing(data, &key_dir, now()).unwrap();
}

#[test]
fn a_root_is_added_only_on_the_word_of_one_that_is_trusted() {
    let (dir, report) = new_cluster();
    let away = dir.path().join("away");
    std::fs::create_dir(&away).unwrap();
    let (key, list) = (report.data_dir.join("pki/root/ca.key"), report.data_dir.join("pki/root/ca.crt"));
    std::fs::rename(key, away.join("ca.key")).unwrap();
    std::fs::copy(list, away.join("ca.crt")).unwrap();
    let (new, stranger) = (dir.path().join("new"), dir.path().join("stranger"));
    assert!(add_root(&report.data_dir, &new, None, now()).is_err(), "the key is away");
    assert!(!new.exists());
    std::fs::create_dir(&stranger).unwrap();
    RootAuthority::create(&"test".parse().unwrap(), now()).unwrap().save(&stranger).unwrap();
    let added = add_root(&report.data_dir, &new, Some(&stranger), now());
    assert!(matches!(added, Err(InitError::UntrustedRoot { .. })), "{added:?}");
    add_root(&report.data_dir, &new, Some(&away), now()).unwrap();
}
