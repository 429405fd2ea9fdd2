//! What is done to a snapshot when nobody waits for it: it is compressed, or what its files hash to is noted, to be
//! looked at only when they were touched. A wake does not wait for either: it stops them.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mvm_host::{Host, Operation};
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId};

use super::pack::Source;
use super::snapshot::{FileStamp, Found, MEMORY, SEAL, SNAPSHOT, STATE, Seal, digest_of};
use super::{QemuDriver, lock};
use crate::{DriverError, Keeping, run_files};

const ACTION: &str = "seal the snapshot of";

/// One that is being compressed or hashed, and the word to stop.
#[derive(Debug, Default)]
pub(super) struct Sealing {
    stop: Arc<AtomicBool>,
    /// Held until nothing of it is under way any more.
    busy: Arc<tokio::sync::Mutex<()>>,
}

/// The turn of whoever compresses or hashes an instance's snapshot. Given up in the middle, it stops what it began.
pub(super) struct Turn<'a, H: Host> {
    driver: &'a QemuDriver<H>,
    instance: &'a InstanceId,
    stop: Arc<AtomicBool>,
    _busy: tokio::sync::OwnedMutexGuard<()>,
}

impl<H: Host> Drop for Turn<'_, H> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        lock(&self.driver.inner.sealing).remove(self.instance);
    }
}

impl<H: Host> QemuDriver<H> {
    pub(super) async fn seal(&self, instance: &InstanceId, keeping: &Keeping) -> Result<(), DriverError> {
        let Some(turn) = self.turn_to_seal(instance) else { return Ok(()) };
        self.seal_in(&turn, keeping).await
    }

    /// The same for whoever has the turn.
    pub(super) async fn seal_in(&self, turn: &Turn<'_, H>, keeping: &Keeping) -> Result<(), DriverError> {
        let instance = turn.instance;
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let host = &*self.inner.host;
        let Some(Ok(found)) = Found::read(host, instance).await.map_err(io)? else { return Ok(()) };
        let (is, wanted) = (self.source(instance, &found).await.map_err(io)?, keeping.at_rest.compression);
        if is.name != STATE {
            return self.clear_after_packing(instance).await;
        }
        // A template's memory is mapped as it is.
        if wanted != SnapshotCompression::None && found.manifest.memory.is_none() {
            return self.pack(instance, &found, keeping, &turn.stop).await;
        }
        // What is encrypted can't be changed without being noticed.
        if is.form.key.is_some() || self.read_seal(instance, &found).await.map_err(io)?.is_some() {
            return Ok(());
        }
        let hashed = self.hash(instance, &found, &turn.stop).await;
        let stopped = turn.stop.load(Ordering::Relaxed);
        let seal = match hashed {
            Ok(Some(seal)) if !stopped => seal,
            // Used or discarded meanwhile, or touched by someone: then it is not for us to vouch for it.
            Ok(_) => return Ok(()),
            Err(_) if stopped => return Ok(()),
            Err(cause) => return Err(io(cause)),
        };
        let text = serde_json::to_string(&seal).map_err(|cause| io(cause.into()))?;
        let name = format!("{SNAPSHOT}/{SEAL}");
        self.perform(instance, ACTION, Operation::WriteFile { instance: instance.clone(), name, text })
            .await
            .map(|_| ())
    }

    /// None while someone else does it, or while the snapshot is being restored.
    pub(super) fn turn_to_seal<'a>(&'a self, instance: &'a InstanceId) -> Option<Turn<'a, H>> {
        let mut all = lock(&self.inner.sealing);
        if all.contains_key(instance) {
            return None;
        }
        let sealing = Sealing::default();
        let busy = Arc::clone(&sealing.busy).try_lock_owned().ok()?;
        let turn = Turn { driver: self, instance, stop: Arc::clone(&sealing.stop), _busy: busy };
        all.insert(instance.clone(), sealing);
        drop(all);
        // Looked at after it was entered: a restore that begins now finds this one and stops it.
        let restoring = lock(&self.inner.starting).contains(instance);
        (!restoring).then_some(turn)
    }

    /// Someone needs the snapshot, or its place: what is done to it stops, and has stopped once this ends.
    pub(super) async fn stop_sealing(&self, instance: &InstanceId) {
        let found = lock(&self.inner.sealing).get(instance).map(|sealing| {
            sealing.stop.store(true, Ordering::Relaxed);
            Arc::clone(&sealing.busy)
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
        if !touched || source.form.key.is_some() {
            return Ok(None);
        }
        let same = match source.digest {
            Some(digest) => match self.open_part(instance, source.name).await? {
                Some(file) => hashed(file, &Arc::default()).await? == digest,
                None => false,
            },
            None => {
                let Some(seal) = self.read_seal(instance, found).await? else {
                    return Ok(Some("it was touched before anyone knew what it hashes to".to_owned()));
                };
                self.hash_as_is(instance, found, &Arc::default()).await?.as_ref() == Some(&seal)
            }
        };
        if same {
            return Ok(None);
        }
        Ok(Some("it is damaged: it does not hash to what it was saved as".to_owned()))
    }

    async fn read_seal(&self, instance: &InstanceId, found: &Found) -> io::Result<Option<Seal>> {
        let text = run_files::read(&*self.inner.host, instance, &format!("{SNAPSHOT}/{SEAL}")).await?;
        let seal = text.and_then(|text| serde_json::from_slice::<Seal>(&text).ok());
        Ok(seal.filter(|seal| seal.snapshot == found.digest))
    }

    /// None when the files are not as the manifest says.
    async fn hash(
        &self,
        instance: &InstanceId,
        found: &Found,
        stop: &Arc<AtomicBool>,
    ) -> io::Result<Option<Seal>> {
        let seal = self.hash_as_is(instance, found, stop).await?;
        // Looked at after they were read: what changed before or meanwhile shows.
        let state = self.stamp_now(instance, STATE).await?;
        let memory = self.stamp_now(instance, MEMORY).await?;
        let same = state.as_ref() == Some(&found.manifest.state) && memory == found.manifest.memory;
        Ok(seal.filter(|_| same))
    }

    async fn hash_as_is(
        &self,
        instance: &InstanceId,
        found: &Found,
        stop: &Arc<AtomicBool>,
    ) -> io::Result<Option<Seal>> {
        let Some(state) = self.open_part(instance, STATE).await? else { return Ok(None) };
        let memory = self.open_part(instance, MEMORY).await?;
        let state = hashed(state, stop).await?;
        let memory = match memory {
            Some(memory) => Some(hashed(memory, stop).await?),
            None => None,
        };
        Ok(Some(Seal { snapshot: found.digest, state, memory }))
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
