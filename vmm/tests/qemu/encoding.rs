//! Snapshots that are compressed and encrypted, with real guests: what is in their memory, and what is on the disk.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::conformance::{self, Client};
use mvm_vmm::snapshot_key::TenantKey;
use mvm_vmm::{
    Compression as _, Driver as _, DriverError, Migration as _, QemuDriver, SnapshotOptions, SnapshotPolicy,
    SnapshotRef, VmSpec, VmState,
};
use tokio::time::Instant;

use super::damage::SmallDisk;
use super::{DataDir, driver, pids, spec, subject_where_it_can_run};

const PLAIN: SnapshotPolicy = SnapshotPolicy { compression: SnapshotCompression::None, encryption: false };
const LZ4: SnapshotPolicy = SnapshotPolicy { compression: SnapshotCompression::Lz4, encryption: false };
const ZSTD: SnapshotPolicy = SnapshotPolicy { compression: SnapshotCompression::Zstd, encryption: false };
const ENCRYPTED: SnapshotPolicy = SnapshotPolicy { encryption: true, ..PLAIN };
const ENCRYPTED_LZ4: SnapshotPolicy = SnapshotPolicy { encryption: true, ..LZ4 };
const ENCRYPTED_ZSTD: SnapshotPolicy = SnapshotPolicy { encryption: true, ..ZSTD };

/// Less than what QEMU is given to load a snapshot: what is damaged is noticed, not waited for.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);

/// A secrets directory with one tenant's key.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new() -> Self {
        let keys = Self(tempfile::tempdir().unwrap());
        keys.put([1; 32]);
        keys
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("acme.snapshot-key")
    }

    fn put(&self, key: [u8; 32]) {
        let _ = fs::remove_file(self.path());
        fs::write(self.path(), key).unwrap();
        fs::set_permissions(self.path(), Permissions::from_mode(0o400)).unwrap();
    }

    fn options(&self, policy: SnapshotPolicy) -> SnapshotOptions {
        SnapshotOptions { policy, key: Some(TenantKey::new(self.0.path(), &"acme".parse().unwrap())) }
    }
}

fn snapshot_dir(data_dir: &Path, instance: &InstanceId) -> PathBuf {
    data_dir.join("vms").join(instance.as_str()).join("snapshot")
}

/// The file that the guest is in.
fn guest_file(data_dir: &Path, instance: &InstanceId) -> PathBuf {
    let dir = snapshot_dir(data_dir, instance);
    let packed = dir.join("packed");
    if packed.exists() { packed } else { dir.join("state") }
}

/// Changes one byte as a disk that fails does: nothing else about the file tells it.
fn flip(path: &Path, at: u64) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    file.set_modified(modified).unwrap();
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// Puts one that runs to rest, without what is done later.
async fn save(driver: &QemuDriver, spec: &VmSpec, options: &SnapshotOptions) -> SnapshotRef {
    driver.pause(&spec.instance).await.unwrap();
    let saved = driver.snapshot(&spec.instance, options).await.unwrap();
    driver.kill(&spec.instance).await.unwrap();
    saved
}

async fn guest(driver: &QemuDriver, instance: &InstanceId) -> Client {
    Client::greet(driver.guest(instance).await.unwrap()).await.unwrap()
}

#[tokio::test]
async fn qemu_keeps_the_laws_of_compression_and_encryption() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), tempfile::tempdir().unwrap());
    let damage = async |instance: &InstanceId| {
        let path = guest_file(dir.path(), instance);
        flip(&path, length(&path) / 2);
    };
    conformance::encoding_suite(&driver(dir.path()), &subject, keys.path(), damage).await.unwrap();
}

#[tokio::test]
async fn guests_on_qemu_go_on_where_they_were_however_they_were_kept() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), tempfile::tempdir().unwrap());
    conformance::encoded_guests(&driver(dir.path()), &subject, keys.path()).await.unwrap();
}

/// Every file below a directory in which these bytes are.
fn files_with(dir: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            found.extend(files_with(&path, bytes));
        } else if meta.is_file() && fs::read(&path).unwrap().windows(bytes.len()).any(|part| part == bytes) {
            found.push(path);
        }
    }
    found
}

#[tokio::test]
async fn what_is_in_a_guest_s_memory_is_in_no_file_when_it_is_encrypted() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), Keys::new());
    let (driver, spec) = (driver(dir.path()), spec(&subject, 20));
    let instance = &spec.instance;
    let canary = b"CANARY-5d1f0c7a-of-a-guest-s-memory";
    driver.boot(&spec).await.unwrap();
    let text = String::from_utf8_lossy(canary).repeat(1000);
    guest(&driver, instance).await.write("/tmp/canary", &text).await.unwrap();
    for (encoding, is_found) in [(PLAIN, true), (ENCRYPTED, false), (ENCRYPTED_ZSTD, false)] {
        let options = keys.options(encoding);
        let saved = save(&driver, &spec, &options).await;
        let [before, after] = {
            let before = files_with(dir.path(), canary);
            driver.compress_snapshot(instance, &options).await.unwrap();
            [before, files_with(dir.path(), canary)]
        };
        let expected = if is_found { vec![guest_file(dir.path(), instance)] } else { Vec::new() };
        assert_eq!((before, after), (expected.clone(), expected), "{encoding:?}");
        driver.restore(&spec, &saved, &options).await.unwrap();
        driver.discard_snapshot(instance).await.unwrap();
        driver.resume(instance).await.unwrap();
        assert_eq!(guest(&driver, instance).await.read("/tmp/canary").await.unwrap(), text);
        assert_eq!(files_with(dir.path(), canary), Vec::<PathBuf>::new(), "{encoding:?} was given up");
    }
    driver.remove(instance).await.unwrap();
}

#[tokio::test]
#[allow(clippy::print_stdout, reason = "the figures are worth more than that they were below a limit")]
async fn a_compressed_snapshot_is_smaller_and_leaves_nothing_else() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), Keys::new());
    let (driver, spec) = (driver(dir.path()), spec(&subject, 21));
    let instance = &spec.instance;
    driver.boot(&spec).await.unwrap();
    drop(guest(&driver, instance).await);
    for encoding in [PLAIN, LZ4, ZSTD, ENCRYPTED, ENCRYPTED_LZ4, ENCRYPTED_ZSTD] {
        let options = keys.options(encoding);
        let began = Instant::now();
        let saved = save(&driver, &spec, &options).await;
        let save_ms = began.elapsed().as_millis();
        let before = length(&guest_file(dir.path(), instance));
        let began = Instant::now();
        driver.compress_snapshot(instance, &options).await.unwrap();
        let seal_ms = began.elapsed().as_millis();
        let after = length(&guest_file(dir.path(), instance));
        if encoding.compression != SnapshotCompression::None {
            assert!(after < before / 2, "{encoding:?}: {before} became {after}");
            let files = fs::read_dir(snapshot_dir(dir.path(), instance)).unwrap();
            let mut names: Vec<_> = files.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            let expected = ["form.json", "manifest.json", "owner.json", "packed", "packed.json"];
            assert_eq!(names, expected, "{encoding:?}");
        }
        let began = Instant::now();
        driver.restore(&spec, &saved, &options).await.unwrap();
        let restore_ms = began.elapsed().as_millis();
        driver.resume(instance).await.unwrap();
        drop(guest(&driver, instance).await);
        println!(
            "{encoding:?}: {after} bytes; saved {save_ms} ms, sealed {seal_ms} ms, restored {restore_ms} ms"
        );
    }
    driver.remove(instance).await.unwrap();
}

#[tokio::test]
async fn an_encrypted_snapshot_that_was_cut_changed_or_exchanged_is_of_no_use() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), Keys::new());
    let driver = driver(dir.path());
    let [one, two] = [22, 23].map(|number| spec(&subject, number));
    for spec in [&one, &two] {
        driver.boot(spec).await.unwrap();
    }
    for encoding in [ENCRYPTED, ENCRYPTED_ZSTD] {
        let options = keys.options(encoding);
        let mut saved = Vec::new();
        for spec in [&one, &two] {
            saved.push(save(&driver, spec, &options).await);
            driver.compress_snapshot(&spec.instance, &options).await.unwrap();
        }
        let [mine, other] = [&one, &two].map(|spec| guest_file(dir.path(), &spec.instance));
        let whole = fs::read(&mine).unwrap();
        let refused = async |what: &str| {
            let error = driver.restore(&one, &saved[0], &options).await.unwrap_err();
            assert!(matches!(&error, DriverError::Unusable { .. }), "{encoding:?}, {what}: {error:?}");
            assert!(error.to_string().contains(what), "{encoding:?}, {what}: {error}");
            assert!(pids(dir.path(), &one.instance).await.is_empty());
        };
        fs::write(&mine, &whole[..whole.len() - 1]).unwrap();
        refused("bytes, not").await;
        let end = whole.len() as u64 - 1;
        for (at, what) in
            [(0, "not what was encrypted"), (13, "header"), (end / 2, "changed"), (end, "changed")]
        {
            fs::write(&mine, &whole).unwrap();
            flip(&mine, at);
            refused(what).await;
        }
        // Another's memory, cut or filled up to the length that is expected here.
        fs::copy(&other, &mine).unwrap();
        File::options().write(true).open(&mine).unwrap().set_len(whole.len() as u64).unwrap();
        refused("sealed for instance").await;
        // What was put back from a copy is what it was.
        fs::write(&mine, &whole).unwrap();
        for (spec, saved) in [(&one, &saved[0]), (&two, &saved[1])] {
            driver.restore(spec, saved, &options).await.unwrap();
            driver.resume(&spec.instance).await.unwrap();
        }
    }
    for spec in [&one, &two] {
        driver.remove(&spec.instance).await.unwrap();
    }
}

#[tokio::test]
async fn a_compressed_snapshot_that_was_cut_or_changed_is_of_no_use() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), Keys::new());
    let (driver, spec) = (driver(dir.path()), spec(&subject, 24));
    driver.boot(&spec).await.unwrap();
    drop(guest(&driver, &spec.instance).await);
    for encoding in [LZ4, ZSTD] {
        let options = keys.options(encoding);
        let saved = save(&driver, &spec, &options).await;
        driver.compress_snapshot(&spec.instance, &options).await.unwrap();
        let path = guest_file(dir.path(), &spec.instance);
        let whole = fs::read(&path).unwrap();
        let refused = async |what: &str| {
            let began = Instant::now();
            let error = driver.restore(&spec, &saved, &options).await.unwrap_err();
            assert!(began.elapsed() < REFUSED_WITHIN, "{encoding:?}, {what}: {:?}", began.elapsed());
            assert!(matches!(&error, DriverError::Unusable { .. }), "{encoding:?}, {what}: {error:?}");
            assert!(pids(dir.path(), &spec.instance).await.is_empty());
        };
        for at in [0, 1, 2, 3].map(|part| part * whole.len() as u64 / 4 + 1) {
            flip(&path, at);
            refused("changed by the disk").await;
            flip(&path, at);
        }
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        refused("cut").await;
        fs::write(&path, &whole).unwrap();
        flip(&path, 100);
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .set_modified(std::time::SystemTime::now())
            .unwrap();
        refused("changed on disk").await;
        fs::write(&path, &whole).unwrap();
        driver.restore(&spec, &saved, &options).await.unwrap();
        driver.resume(&spec.instance).await.unwrap();
    }
    driver.remove(&spec.instance).await.unwrap();
}

#[tokio::test]
async fn a_wake_stops_what_is_being_compressed_and_takes_what_is_there() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (dir, keys) = (DataDir::new(), Keys::new());
    let (driver, spec) = (driver(dir.path()), spec(&subject, 25));
    let options = keys.options(ENCRYPTED_ZSTD);
    driver.boot(&spec).await.unwrap();
    drop(guest(&driver, &spec.instance).await);
    let saved = save(&driver, &spec, &options).await;
    let snapshot = snapshot_dir(dir.path(), &spec.instance);
    let wake = async {
        // Once it is under way.
        while !snapshot.join("packed.tmp").exists() {
            tokio::task::yield_now().await;
        }
        driver.restore(&spec, &saved, &options).await
    };
    let (sealed, woken) = tokio::join!(driver.compress_snapshot(&spec.instance, &options), wake);
    sealed.unwrap();
    woken.unwrap();
    assert!(snapshot.join("state").exists() && !snapshot.join("packed").exists());
    assert!(!snapshot.join("packed.tmp").exists());
    assert_eq!(driver.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Paused);
    driver.remove(&spec.instance).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_of_the_format_before_is_restored() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let (driver, spec) = (driver(dir.path()), spec(&subject, 26));
    driver.boot(&spec).await.unwrap();
    let saved = save(&driver, &spec, &SnapshotOptions::plain()).await;
    let path = snapshot_dir(dir.path(), &spec.instance).join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["format"] = 2.into();
    assert!(manifest.as_object_mut().unwrap().remove("form").is_some());
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    fs::write(&path, &text).unwrap();
    let saved = SnapshotRef { digest: Digest::of(text.as_bytes()), ..saved };
    driver.restore(&spec, &saved, &SnapshotOptions::plain()).await.unwrap();
    // And it is compressed like any other.
    driver.kill(&spec.instance).await.unwrap();
    let options = SnapshotOptions { policy: ZSTD, key: None };
    driver.compress_snapshot(&spec.instance, &options).await.unwrap();
    assert!(guest_file(dir.path(), &spec.instance).ends_with("packed"));
    driver.restore(&spec, &saved, &options).await.unwrap();
    driver.remove(&spec.instance).await.unwrap();
}

#[tokio::test]
async fn a_full_disk_fails_an_encrypted_snapshot_and_costs_a_compressed_one_nothing() {
    let Some(subject) = subject_where_it_can_run() else { return };
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let disk = SmallDisk::mount("120m");
    let (dir, keys) = (disk.0.path(), Keys::new());
    let (driver, spec) = (driver(dir), spec(&subject, 27));
    let (instance, options) = (&spec.instance, keys.options(ENCRYPTED_ZSTD));
    driver.boot(&spec).await.unwrap();
    driver.pause(instance).await.unwrap();
    let filler = dir.join("filler");
    let fill = |leave: u64| {
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 65536]).is_ok() {}
        file.set_len(file.metadata().unwrap().len() - leave).unwrap();
    };
    fill(512 * 1024);
    let error = driver.snapshot(instance, &options).await.unwrap_err();
    assert!(
        matches!(&error, DriverError::Io { cause, .. } if cause.kind() == std::io::ErrorKind::StorageFull)
    );
    let run_dir = dir.join("vms").join(instance.as_str());
    assert!(!run_dir.join("snapshot").exists() && !run_dir.join("snapshot.tmp").exists());
    assert_eq!(driver.adopt(instance).await.unwrap().unwrap().state, VmState::Paused);

    fs::remove_file(&filler).unwrap();
    let saved = driver.snapshot(instance, &options).await.unwrap();
    driver.kill(instance).await.unwrap();
    fill(64 * 1024);
    driver.compress_snapshot(instance, &options).await.unwrap_err();
    assert!(!snapshot_dir(dir, instance).join("packed.tmp").exists());
    fs::remove_file(&filler).unwrap();
    driver.restore(&spec, &saved, &options).await.unwrap();
    driver.remove(instance).await.unwrap();
}

/// Copies what is exported, as an archive would, and takes it in.
async fn moved(
    from: &QemuDriver,
    to: &QemuDriver,
    spec: &VmSpec,
    saved: &SnapshotRef,
    options: &SnapshotOptions,
) -> Result<SnapshotRef, DriverError> {
    to.begin_import(&spec.instance).await.unwrap();
    for mut part in from.export(saved).await.unwrap() {
        let mut copy = to.import_part(&spec.instance, &part.name).await.unwrap();
        part.file.rewind().unwrap();
        std::io::copy(&mut part.file, &mut copy).unwrap();
        copy.sync_all().unwrap();
    }
    to.import(spec, saved, options).await
}

#[tokio::test]
async fn what_is_compressed_or_encrypted_moves_where_its_key_is_and_nowhere_else() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (here, there, keys, no_keys) = (DataDir::new(), DataDir::new(), Keys::new(), Keys::new());
    fs::remove_file(no_keys.path()).unwrap();
    let (from, to) = (driver(here.path()), driver(there.path()));
    for (number, policy) in (70..).zip([ZSTD, ENCRYPTED, ENCRYPTED_ZSTD]) {
        let spec = spec(&subject, number);
        let (instance, options) = (&spec.instance, keys.options(policy));
        from.boot(&spec).await.unwrap();
        from.pause(instance).await.unwrap();
        let saved = from.snapshot(instance, &options).await.unwrap();
        from.kill(instance).await.unwrap();
        from.compress_snapshot(instance, &options).await.unwrap();

        if policy.encryption {
            let refused = moved(&from, &to, &spec, &saved, &no_keys.options(policy)).await;
            assert!(matches!(refused, Err(DriverError::Key { .. })), "{policy:?}: {refused:?}");
        } else {
            let refused = moved(&from, &to, &spec, &saved, &keys.options(ENCRYPTED)).await;
            assert!(matches!(refused, Err(DriverError::Unusable { .. })), "{policy:?}: {refused:?}");
        }
        to.remove(instance).await.unwrap();
        let arrived = moved(&from, &to, &spec, &saved, &options).await.unwrap();
        to.restore(&spec, &arrived, &options).await.unwrap();
        assert_eq!(to.adopt(instance).await.unwrap().unwrap().state, VmState::Paused);
        to.resume(instance).await.unwrap();
        to.remove(instance).await.unwrap();
        from.remove(instance).await.unwrap();
    }
}
