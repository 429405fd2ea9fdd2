//! Snapshots that must not be used, and disks without room for one.

use std::fs::{self, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::Command;

use mvm_needs::{Need, can_run};
use mvm_proto::document::Resources;
use mvm_vmm::{
    Compression as _, Driver as _, DriverError, Forks as _, Purpose, SnapshotOptions, SnapshotRef, VmSpec,
    VmState,
};

use super::{DataDir, driver, pids, spec, subject_where_it_can_run};

fn overwrite(path: &Path, at: u64, byte: u8) {
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte]).unwrap();
}

#[tokio::test]
async fn a_snapshot_that_is_damaged_or_does_not_fit_is_refused_and_a_good_one_is_not() {
    let Some(mut subject) = subject_where_it_can_run() else { return };
    subject.resources = Resources { data_disk_mib: 16, ..subject.resources };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    let spec = spec(&subject, 10);
    let instance = &spec.instance;
    driver.boot(&spec).await.unwrap();
    driver.pause(instance).await.unwrap();
    let snapshot = driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(instance).await.unwrap();

    let run_dir = dir.path().join("vms").join(instance.as_str());
    let [state, manifest, disk] =
        ["snapshot/state", "snapshot/manifest.json", "data.img"].map(|name| run_dir.join(name));
    let refused = async |snapshot: &SnapshotRef, what: &str| {
        let error = driver.restore(&spec, snapshot, &SnapshotOptions::plain()).await.unwrap_err();
        let text = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(text.contains(what), "{text}");
        assert_eq!(driver.adopt(instance).await.unwrap(), None);
        assert!(pids(dir.path(), instance).await.is_empty());
    };

    let whole = fs::read(&state).unwrap();
    fs::write(&state, &whole).unwrap();
    refused(&snapshot, "touched before anyone knew what it hashes to").await;
    driver.kill(instance).await.unwrap();
    driver.boot(&spec).await.unwrap();
    driver.pause(instance).await.unwrap();
    let snapshot = driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(instance).await.unwrap();
    driver.compress_snapshot(instance, &SnapshotOptions::plain()).await.unwrap();

    let whole = fs::read(&state).unwrap();
    overwrite(&state, whole.len() as u64 / 2, whole[whole.len() / 2] ^ 1);
    refused(&snapshot, "damaged").await;
    fs::write(&state, &whole[..whole.len() / 2]).unwrap();
    refused(&snapshot, "bytes, not").await;
    // Touched, and still what was saved: it was put back from a copy.
    fs::write(&state, &whole).unwrap();

    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"qemu\": \"", "\"qemu\": \"0.")).unwrap();
    refused(&snapshot, "has no snapshot").await;
    fs::write(&manifest, text.replace("\"format\": 3", "\"format\": 1")).unwrap();
    refused(&snapshot, "of format 1").await;
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    refused(&snapshot, "EOF").await;
    fs::write(&manifest, &text).unwrap();

    driver.restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap();
    assert_eq!(driver.adopt(instance).await.unwrap().unwrap().state, VmState::Paused);
    driver.kill(instance).await.unwrap();

    overwrite(&disk, 4096, 1);
    refused(&snapshot, "data disk moved on").await;
    driver.discard_snapshot(instance).await.unwrap();
    let error = driver.restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap_err();
    assert!(matches!(error, DriverError::NoSnapshot { .. }), "{error:?}");
    driver.remove(instance).await.unwrap();
}

#[tokio::test]
async fn a_template_that_was_written_to_is_not_forked_and_its_forks_outlive_it() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    let template = VmSpec { purpose: Purpose::Template, ..spec(&subject, 20) };
    driver.boot(&template).await.unwrap();
    driver.pause(&template.instance).await.unwrap();
    let snapshot = driver.snapshot(&template.instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(&template.instance).await.unwrap();
    let fork = spec(&subject, 21);
    driver.fork(&fork, &snapshot).await.unwrap();
    driver.resume(&fork.instance).await.unwrap();

    // What a VMM that its guest has taken over could do by the descriptor that it has.
    let memory = dir.path().join("vms").join(template.instance.as_str()).join("snapshot/memory");
    overwrite(&memory, 4096, 1);
    let second = spec(&subject, 22);
    let error = driver.fork(&second, &snapshot).await.unwrap_err();
    assert!(matches!(error, DriverError::Unusable { .. }), "{error:?}");
    assert_eq!(driver.adopt(&second.instance).await.unwrap(), None);

    driver.remove(&template.instance).await.unwrap();
    assert!(!memory.exists());
    assert_eq!(driver.adopt(&fork.instance).await.unwrap().unwrap().state, VmState::Running);
    driver.pause(&fork.instance).await.unwrap();
    let saved = driver.snapshot(&fork.instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(&fork.instance).await.unwrap();
    driver.restore(&fork, &saved, &SnapshotOptions::plain()).await.unwrap();
    assert_eq!(driver.adopt(&fork.instance).await.unwrap().unwrap().state, VmState::Paused);
    driver.remove(&fork.instance).await.unwrap();
}

/// A small file system of its own; needs root.
pub(super) struct SmallDisk(pub(super) tempfile::TempDir);

impl SmallDisk {
    pub(super) fn mount(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(dir.path())
            .output()
            .unwrap();
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        Self(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        super::end_all(self.0.path().to_owned());
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_fails_the_snapshot_and_leaves_the_vm_as_it_was() {
    let Some(subject) = subject_where_it_can_run() else { return };
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let disk = SmallDisk::mount("64m");
    let dir = disk.0.path();
    let driver = driver(dir);
    let spec = spec(&subject, 11);
    let instance = &spec.instance;
    driver.boot(&spec).await.unwrap();
    driver.pause(instance).await.unwrap();

    let filler = dir.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 65536]).is_ok() {}
    drop(file);
    let error = driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap_err();
    let text = format!("{error}: {:?}", std::error::Error::source(&error).map(|cause| format!("{cause:?}")));
    assert!(text.contains("space") || text.contains("StorageFull"), "{text}");
    let run_dir = dir.join("vms").join(instance.as_str());
    assert!(!run_dir.join("snapshot").exists());
    assert!(!run_dir.join("snapshot.tmp").exists());

    // A little room: what fails now is QEMU's own writing.
    fs::write(run_dir.join("small"), [1; 1]).unwrap_err();
    OpenOptions::new()
        .write(true)
        .open(&filler)
        .unwrap()
        .set_len(fs::metadata(&filler).unwrap().len() - 262_144)
        .unwrap();
    let error = driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap_err();
    assert!(matches!(error, DriverError::Vmm { .. } | DriverError::Io { .. }), "{error:?}");
    assert!(!run_dir.join("snapshot").exists() && !run_dir.join("snapshot.tmp").exists());
    assert_eq!(driver.adopt(instance).await.unwrap().unwrap().state, VmState::Paused);

    fs::remove_file(&filler).unwrap();
    driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap();
    driver.resume(instance).await.unwrap();
    assert_eq!(driver.adopt(instance).await.unwrap().unwrap().state, VmState::Running);
    driver.remove(instance).await.unwrap();
    assert!(!run_dir.exists());
}
