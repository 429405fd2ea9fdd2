//! Laws about compressed and encrypted snapshots: they restore the same guest, without the key nothing is lost, and what was
//! damaged is never restored.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use mvm_proto::document::SnapshotCompression;
use mvm_proto::{InstanceId, TenantId};

use super::guests::greet;
use super::{Broken, Held, Subject, compressed, done, same, spec, state};
use crate::snapshot_key::{KEY_SUFFIX, KeyError, TenantKey};
use crate::{Driver, DriverError, SnapshotOptions, SnapshotPolicy, SnapshotRef, VmSpec, VmState};

const TENANT: &str = "conformance";

const POLICIES: [SnapshotPolicy; 5] = [
    SnapshotPolicy { compression: SnapshotCompression::Lz4, encryption: false },
    SnapshotPolicy { compression: SnapshotCompression::Zstd, encryption: false },
    SnapshotPolicy { compression: SnapshotCompression::None, encryption: true },
    SnapshotPolicy { compression: SnapshotCompression::Lz4, encryption: true },
    SnapshotPolicy { compression: SnapshotCompression::Zstd, encryption: true },
];

/// A place for keys, and one tenant that has one.
#[derive(Debug)]
struct Keys<'a> {
    dir: &'a Path,
    tenant: TenantId,
}

impl<'a> Keys<'a> {
    fn new(law: &'static str, dir: &'a Path) -> Result<Self, Broken> {
        Ok(Self { dir, tenant: done(law, TENANT.parse())? })
    }

    fn put(&self, law: &'static str, key: u8) -> Held {
        let path = self.dir.join(format!("{TENANT}{KEY_SUFFIX}"));
        self.remove();
        done(law, fs::write(&path, [key; 32]))?;
        done(law, fs::set_permissions(&path, Permissions::from_mode(0o400)))
    }

    fn remove(&self) {
        let _ = fs::remove_file(self.dir.join(format!("{TENANT}{KEY_SUFFIX}")));
    }

    fn options(&self, policy: SnapshotPolicy) -> SnapshotOptions {
        SnapshotOptions { policy, key: Some(TenantKey::new(self.dir, &self.tenant)) }
    }
}

/// All of them. `keys` is an empty directory of this user; `damage` changes what is in an instance's snapshot.
pub async fn encoding_suite<D: Driver>(
    driver: &D,
    subject: &Subject,
    keys: &Path,
    damage: impl AsyncFn(&InstanceId),
) -> Held {
    let spec = spec(subject, 50);
    what_was_kept_in_any_form_is_restored(driver, &spec, keys).await?;
    without_its_key_nothing_is_saved_and_nothing_lost(driver, &spec, keys).await?;
    what_was_to_be_encrypted_is_not_restored_in_clear(driver, &spec, keys).await?;
    what_was_damaged_is_never_restored(driver, &spec, keys, damage).await?;
    done("an instance is removed", driver.remove(&spec.instance).await)
}

/// The same guest: what it wrote to its memory is there after every sleep, whatever the form.
pub async fn encoded_guests<D: Driver>(driver: &D, subject: &Subject, keys: &Path) -> Held {
    const LAW: &str = "a guest's memory survives every way of being kept";
    const FILE: &str = "/tmp/kept";
    let (spec, keys) = (spec(subject, 51), Keys::new(LAW, keys)?);
    keys.put(LAW, 1)?;
    done(LAW, driver.boot(&spec).await)?;
    let mut expected = String::new();
    for (number, encoding) in POLICIES.into_iter().enumerate() {
        let mut guest = greet(LAW, driver, &spec).await?;
        // What was written before the last sleep is there, and grows before the next.
        if number > 0 {
            same(LAW, done(LAW, guest.read(FILE).await)?, expected.clone())?;
        }
        expected = format!("{expected}{number}");
        done(LAW, guest.write(FILE, &expected).await)?;
        drop(guest);
        let options = keys.options(encoding);
        let saved = rest(LAW, driver, &spec, &options).await?;
        done(LAW, driver.restore(&spec, &saved, &options).await)?;
        done(LAW, driver.resume(&spec.instance).await)?;
    }
    let mut guest = greet(LAW, driver, &spec).await?;
    same(LAW, done(LAW, guest.read(FILE).await)?, expected)?;
    done(LAW, driver.remove(&spec.instance).await)
}

/// Puts one that runs to rest, with all that is done later.
async fn rest<D: Driver>(
    law: &'static str,
    driver: &D,
    spec: &VmSpec,
    options: &SnapshotOptions,
) -> Result<SnapshotRef, Broken> {
    done(law, driver.pause(&spec.instance).await)?;
    let saved = done(law, driver.snapshot(&spec.instance, options).await)?;
    done(law, driver.kill(&spec.instance).await)?;
    done(law, compressed(driver, &spec.instance, options).await)?;
    Ok(saved)
}

async fn what_was_kept_in_any_form_is_restored<D: Driver>(driver: &D, spec: &VmSpec, keys: &Path) -> Held {
    const LAW: &str = "what was compressed or encrypted is restored, before that and after";
    let keys = Keys::new(LAW, keys)?;
    keys.put(LAW, 1)?;
    done(LAW, driver.boot(spec).await)?;
    for encoding in POLICIES {
        let options = keys.options(encoding);
        done(LAW, driver.pause(&spec.instance).await)?;
        let saved = done(LAW, driver.snapshot(&spec.instance, &options).await)?;
        // Asking twice is asking once.
        same(LAW, done(LAW, driver.snapshot(&spec.instance, &options).await)?, saved.clone())?;
        done(LAW, driver.kill(&spec.instance).await)?;
        done(LAW, driver.restore(spec, &saved, &options).await)?;
        done(LAW, driver.kill(&spec.instance).await)?;
        for _ in 0..2 {
            done(LAW, compressed(driver, &spec.instance, &options).await)?;
        }
        // A restore needs the key, and not how it was encoded.
        let unknown = keys.options(SnapshotPolicy::default());
        done(LAW, driver.restore(spec, &saved, &unknown).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
        done(LAW, driver.resume(&spec.instance).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Running))?;
    }
    Ok(())
}

async fn without_its_key_nothing_is_saved_and_nothing_lost<D: Driver>(
    driver: &D,
    spec: &VmSpec,
    keys: &Path,
) -> Held {
    const LAW: &str = "without its key nothing is saved, and what was saved is kept";
    let keys = Keys::new(LAW, keys)?;
    let options = keys.options(SnapshotPolicy { compression: SnapshotCompression::Zstd, encryption: true });
    keys.remove();
    done(LAW, driver.pause(&spec.instance).await)?;
    let unsaved = driver.snapshot(&spec.instance, &options).await;
    let missing = |error| matches!(error, Err(DriverError::Key { cause: KeyError::Missing { .. }, .. }));
    same(LAW, missing(unsaved.map(|_| ())), true)?;
    same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
    keys.put(LAW, 1)?;
    let saved = done(LAW, driver.snapshot(&spec.instance, &options).await)?;
    done(LAW, driver.kill(&spec.instance).await)?;
    for compressed_before in [false, true] {
        keys.remove();
        same(LAW, missing(driver.restore(spec, &saved, &options).await), true)?;
        same(LAW, missing(compressed(driver, &spec.instance, &options).await), !compressed_before)?;
        keys.put(LAW, 2)?;
        let other = driver.restore(spec, &saved, &options).await;
        same(LAW, matches!(other, Err(DriverError::Key { cause: KeyError::Other { .. }, .. })), true)?;
        same(LAW, state(LAW, driver, spec).await?, None)?;
        keys.put(LAW, 1)?;
        done(LAW, compressed(driver, &spec.instance, &options).await)?;
    }
    done(LAW, driver.restore(spec, &saved, &options).await)?;
    done(LAW, driver.resume(&spec.instance).await)
}

async fn what_was_to_be_encrypted_is_not_restored_in_clear<D: Driver>(
    driver: &D,
    spec: &VmSpec,
    keys: &Path,
) -> Held {
    const LAW: &str = "what was to be encrypted is not restored in clear";
    let keys = Keys::new(LAW, keys)?;
    keys.put(LAW, 1)?;
    for compression in [SnapshotCompression::None, SnapshotCompression::Zstd] {
        let [clear, encrypted] =
            [false, true].map(|encryption| keys.options(SnapshotPolicy { compression, encryption }));
        let saved = rest(LAW, driver, spec, &clear).await?;
        let refused = driver.restore(spec, &saved, &encrypted).await;
        same(LAW, matches!(refused, Err(DriverError::Unusable { .. })), true)?;
        same(LAW, state(LAW, driver, spec).await?, None)?;
        done(LAW, driver.restore(spec, &saved, &clear).await)?;
        done(LAW, driver.resume(&spec.instance).await)?;
    }
    Ok(())
}

async fn what_was_damaged_is_never_restored<D: Driver>(
    driver: &D,
    spec: &VmSpec,
    keys: &Path,
    damage: impl AsyncFn(&InstanceId),
) -> Held {
    const LAW: &str = "what was damaged is never restored, and said to be of no use";
    let keys = Keys::new(LAW, keys)?;
    keys.put(LAW, 1)?;
    for encoding in POLICIES {
        let options = keys.options(encoding);
        let saved = rest(LAW, driver, spec, &options).await?;
        damage(&spec.instance).await;
        let refused = driver.restore(spec, &saved, &options).await;
        same(LAW, matches!(refused, Err(DriverError::Unusable { .. })), true)?;
        same(LAW, state(LAW, driver, spec).await?, None)?;
        done(LAW, driver.discard_snapshot(&spec.instance).await)?;
        done(LAW, driver.boot(spec).await)?;
    }
    Ok(())
}
