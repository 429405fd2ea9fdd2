//! Damage is seen, and so is a host of another kind.

use super::*;

fn written(dir: &Path) -> Manifest {
    let files = dir.join("snapshot-a");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join(MEMORY), b"all that the guest knew").unwrap();
    std::fs::write(files.join(STATE), b"where it was").unwrap();
    let manifest = Manifest {
        instance: InstanceId::from_bits(1),
        revision: Digest::of(b"r"),
        directory: "snapshot-a".to_owned(),
        made_on: MadeOn::here(Version::new(1, 16, 1)).unwrap(),
        memory: measure(&files.join(MEMORY), true).unwrap(),
        state: measure(&files.join(STATE), true).unwrap(),
    };
    std::fs::write(dir.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    manifest
}

#[test]
fn what_was_written_is_read_back_whole() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Manifest::read(dir.path()).unwrap(), None);
    let manifest = written(dir.path());
    assert_eq!(Manifest::read(dir.path()).unwrap().as_ref(), Some(&manifest));
    assert_eq!(manifest.damage(dir.path(), true).unwrap(), None);
}

#[test]
fn a_file_that_is_cut_changed_or_gone_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = written(dir.path());
    let memory = dir.path().join("snapshot-a").join(MEMORY);
    std::fs::write(&memory, b"all that the guest KNEW").unwrap();
    assert!(manifest.damage(dir.path(), true).unwrap().unwrap().contains("not what was written"));
    assert_eq!(manifest.damage(dir.path(), false).unwrap(), None, "only its length is looked at");
    std::fs::write(&memory, b"all").unwrap();
    assert!(manifest.damage(dir.path(), false).unwrap().unwrap().contains("3 bytes instead of 23"));
    std::fs::remove_file(&memory).unwrap();
    assert!(manifest.damage(dir.path(), false).unwrap().unwrap().contains("gone"));
}

#[test]
fn another_version_processor_or_kernel_is_named() {
    let here = MadeOn::here(Version::new(1, 16, 1)).unwrap();
    assert_eq!(here.differs(&here), None);
    let other = MadeOn { firecracker: Version::new(1, 15, 1), ..here.clone() };
    assert_eq!(other.differs(&here).unwrap(), "the snapshot was made on Firecracker 1.15.1, this is 1.16.1");
    let other = MadeOn { cpu_model: "Another".into(), ..here.clone() };
    assert!(other.differs(&here).unwrap().contains("Another"));
    let other = MadeOn { host_kernel: "0.0.1".into(), ..here.clone() };
    assert!(other.differs(&here).unwrap().contains("0.0.1"));
}
