//! Damage is seen, and so is a host of another kind.

use mvm_host::LocalHost;

use super::*;

fn id() -> InstanceId {
    InstanceId::from_bits(1)
}

async fn written(host: &LocalHost) -> Manifest {
    let dir = host.run_dir(&id());
    let files = dir.join("snapshot-a");
    std::fs::create_dir_all(&files).unwrap();
    std::fs::write(files.join(MEMORY), b"all that the guest knew").unwrap();
    std::fs::write(files.join(STATE), b"where it was").unwrap();
    let manifest = Manifest {
        instance: id(),
        revision: Digest::of(b"r"),
        directory: "snapshot-a".to_owned(),
        made_on: MadeOn::here(Version::new(1, 16, 1)).unwrap(),
        memory: measure(File::open(files.join(MEMORY)).unwrap(), true).await.unwrap(),
        state: measure(File::open(files.join(STATE)).unwrap(), true).await.unwrap(),
    };
    std::fs::write(dir.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    manifest
}

#[tokio::test]
async fn what_was_written_is_read_back_whole() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    assert_eq!(Manifest::read(&host, &id()).await.unwrap(), None);
    let manifest = written(&host).await;
    assert_eq!(Manifest::read(&host, &id()).await.unwrap().as_ref(), Some(&manifest));
    assert_eq!(manifest.damage(&host, true).await.unwrap(), None);
}

#[tokio::test]
async fn a_file_that_is_cut_changed_or_gone_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let host = LocalHost::new(dir.path());
    let manifest = written(&host).await;
    let memory = host.run_dir(&id()).join("snapshot-a").join(MEMORY);
    std::fs::write(&memory, b"all that the guest KNEW").unwrap();
    assert!(manifest.damage(&host, true).await.unwrap().unwrap().contains("not what was written"));
    assert_eq!(manifest.damage(&host, false).await.unwrap(), None, "only its length is looked at");
    std::fs::write(&memory, b"all").unwrap();
    assert!(manifest.damage(&host, false).await.unwrap().unwrap().contains("3 bytes instead of 23"));
    std::fs::remove_file(&memory).unwrap();
    assert!(manifest.damage(&host, false).await.unwrap().unwrap().contains("gone"));
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
