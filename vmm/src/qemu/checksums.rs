//! Background work on a snapshot: compresses it, or records the checksums of its files, which are compared only when a
//! file was touched since. A restore cancels it first.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;
use mvm_host::{Host, Operation};
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId};

use super::QemuDriver;
use super::compress::Source;
use super::snapshot::{CHECKSUMS, Checksums, FileStamp, Found, MEMORY, SNAPSHOT, STATE, digest_of};
use crate::{Compression, DriverError, SnapshotOptions, run_files};

const ACTION: &str = "compress or checksum the snapshot of";

/// One snapshot that is being compressed or hashed.
#[derive(Debug, Default)]
pub(super) struct BackgroundWork {
    stop: Arc<AtomicBool>,
    /// Held until the work has ended.
    busy: Arc<tokio::sync::Mutex<()>>,
}

/// The exclusive right to compress or hash an instance's snapshot. Dropping it stops the work.
pub(super) struct SnapshotLock<'a, H: Host> {
    driver: &'a QemuDriver<H>,
    instance: &'a InstanceId,
    stop: Arc<AtomicBool>,
    _busy: tokio::sync::OwnedMutexGuard<()>,
}

impl<H: Host> Drop for SnapshotLock<'_, H> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.driver.inner.work.lock().remove(self.instance);
    }
}

impl<H: Host> Compression for QemuDriver<H> {
    fn compress_snapshot<'a>(
        &'a self,
        instance: &'a InstanceId,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(async move {
            match self.lock_snapshot(instance) {
                Some(locked) => self.compress_or_checksum(&locked, options).await,
                None => Ok(()),
            }
        })
    }
}

impl<H: Host> QemuDriver<H> {
    pub(super) async fn compress_or_checksum(
        &self,
        locked: &SnapshotLock<'_, H>,
        options: &SnapshotOptions,
    ) -> Result<(), DriverError> {
        let instance = locked.instance;
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let host = &*self.inner.host;
        let Some(Ok(found)) = Found::read(host, instance).await.map_err(io)? else { return Ok(()) };
        let (is, wanted) = (self.source(instance, &found).await.map_err(io)?, options.policy.compression);
        if is.name != STATE {
            return self.remove_uncompressed(instance).await;
        }
        // A template's memory is mapped as it is.
        if wanted != SnapshotCompression::None && found.manifest.memory.is_none() {
            return self.compress(instance, &found, options, &locked.stop).await;
        }
        // What is encrypted can't be changed without being noticed.
        if is.encoding.key.is_some() || self.read_checksums(instance, &found).await.map_err(io)?.is_some() {
            return Ok(());
        }
        let hashed = self.hash(instance, &found, &locked.stop).await;
        let stopped = locked.stop.load(Ordering::Relaxed);
        let checksums = match hashed {
            Ok(Some(checksums)) if !stopped => checksums,
            // Used, discarded or changed meanwhile: checksums of it would prove nothing.
            Ok(_) => return Ok(()),
            Err(_) if stopped => return Ok(()),
            Err(cause) => return Err(io(cause)),
        };
        let text = serde_json::to_string(&checksums).map_err(|cause| io(cause.into()))?;
        let name = format!("{SNAPSHOT}/{CHECKSUMS}");
        self.perform(instance, ACTION, Operation::WriteFile { instance: instance.clone(), name, text })
            .await
            .map(|_| ())
    }

    /// None while another task holds it, or while the snapshot is being restored.
    pub(super) fn lock_snapshot<'a>(&'a self, instance: &'a InstanceId) -> Option<SnapshotLock<'a, H>> {
        let mut all = self.inner.work.lock();
        if all.contains_key(instance) {
            return None;
        }
        let work = BackgroundWork::default();
        let busy = Arc::clone(&work.busy).try_lock_owned().ok()?;
        let locked = SnapshotLock { driver: self, instance, stop: Arc::clone(&work.stop), _busy: busy };
        all.insert(instance.clone(), work);
        drop(all);
        // Looked at after it was entered: a restore that begins now finds this one and stops it.
        let restoring = self.inner.starting.lock().contains(instance);
        (!restoring).then_some(locked)
    }

    /// Stops the background work on a snapshot that is to be restored or removed, and waits until it has ended.
    pub(super) async fn stop_compression(&self, instance: &InstanceId) {
        let found = self.inner.work.lock().get(instance).map(|work| {
            work.stop.store(true, Ordering::Relaxed);
            Arc::clone(&work.busy)
        });
        if let Some(busy) = found {
            drop(busy.lock().await);
        }
    }

    /// What is wrong with the files of a snapshot, if anything is.
    pub(super) async fn damage(
        &self,
        instance: &InstanceId,
        found: &Found,
        source: &Source,
    ) -> io::Result<Option<String>> {
        let memory = found.manifest.memory.as_ref();
        let mut touched = false;
        for (name, stamp) in [(source.name, Some(&source.stamp)), (MEMORY, memory)] {
            let Some(stamp) = stamp else { continue };
            let Some(file) = self.open_part(instance, name).await? else {
                return Ok(Some(format!("its {name} is gone")));
            };
            let now = FileStamp::of(&file)?;
            if now.bytes != stamp.bytes {
                return Ok(Some(format!("its {name} has {} bytes, not {}", now.bytes, stamp.bytes)));
            }
            touched |= now != *stamp;
        }
        // What is encrypted shows it by itself, when it is read.
        if !touched || source.encoding.key.is_some() {
            return Ok(None);
        }
        let same = match source.digest {
            Some(digest) => match self.open_part(instance, source.name).await? {
                Some(file) => hashed(file, &Arc::default()).await? == digest,
                None => false,
            },
            None => {
                let Some(checksums) = self.read_checksums(instance, found).await? else {
                    return Ok(Some("it was touched before anyone knew what it hashes to".to_owned()));
                };
                self.hash_as_is(instance, found, &Arc::default()).await?.as_ref() == Some(&checksums)
            }
        };
        if same {
            return Ok(None);
        }
        Ok(Some("it is damaged: it does not hash to what it was saved as".to_owned()))
    }

    async fn read_checksums(&self, instance: &InstanceId, found: &Found) -> io::Result<Option<Checksums>> {
        let text = run_files::read(&*self.inner.host, instance, &format!("{SNAPSHOT}/{CHECKSUMS}")).await?;
        let checksums = text.and_then(|text| serde_json::from_slice::<Checksums>(&text).ok());
        Ok(checksums.filter(|checksums| checksums.snapshot == found.digest))
    }

    /// None when the files are not as the manifest says.
    async fn hash(
        &self,
        instance: &InstanceId,
        found: &Found,
        stop: &Arc<AtomicBool>,
    ) -> io::Result<Option<Checksums>> {
        let checksums = self.hash_as_is(instance, found, stop).await?;
        // Looked at after they were read: what changed before or meanwhile shows.
        let state = self.stamp_now(instance, STATE).await?;
        let memory = self.stamp_now(instance, MEMORY).await?;
        let same = state.as_ref() == Some(&found.manifest.state) && memory == found.manifest.memory;
        Ok(checksums.filter(|_| same))
    }

    async fn hash_as_is(
        &self,
        instance: &InstanceId,
        found: &Found,
        stop: &Arc<AtomicBool>,
    ) -> io::Result<Option<Checksums>> {
        let Some(state) = self.open_part(instance, STATE).await? else { return Ok(None) };
        let memory = self.open_part(instance, MEMORY).await?;
        let state = hashed(state, stop).await?;
        let memory = match memory {
            Some(memory) => Some(hashed(memory, stop).await?),
            None => None,
        };
        Ok(Some(Checksums { snapshot: found.digest, state, memory }))
    }

    async fn stamp_now(&self, instance: &InstanceId, name: &str) -> io::Result<Option<FileStamp>> {
        self.open_part(instance, name).await?.as_ref().map(FileStamp::of).transpose()
    }

    async fn open_part(&self, instance: &InstanceId, name: &str) -> io::Result<Option<File>> {
        // A template's memory has a second name in the run directory of each of its forks.
        run_files::open_shared(&*self.inner.host, instance, &format!("{SNAPSHOT}/{name}")).await
    }
}

async fn hashed(file: File, stop: &Arc<AtomicBool>) -> io::Result<Digest> {
    let stop = Arc::clone(stop);
    let hashing = tokio::task::spawn_blocking(move || digest_of(file, || !stop.load(Ordering::Relaxed)));
    hashing.await.map_err(io::Error::other)?
}
