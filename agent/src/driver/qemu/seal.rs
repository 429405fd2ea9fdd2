//! What a snapshot's files hash to: noted once, when nobody waits for it, and looked at only when they were touched.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mvm_proto::{Digest, InstanceId};

use super::snapshot::{FileStamp, Found, MEMORY, SEAL, SNAPSHOT, STATE, Seal, digest_of};
use super::{QemuDriver, lock};
use crate::driver::{DriverError, run_files};
use mvm_host::{Host, Operation};

const ACTION: &str = "seal the snapshot of";

impl<H: Host> QemuDriver<H> {
    pub(super) async fn seal(&self, instance: &InstanceId) -> Result<(), DriverError> {
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let host = &*self.inner.host;
        let Some(Ok(found)) = Found::read(host, instance).await.map_err(io)? else { return Ok(()) };
        if self.read_seal(instance, &found).await.map_err(io)?.is_some() {
            return Ok(());
        }
        let stop = Arc::new(AtomicBool::new(false));
        lock(&self.inner.sealing).insert(instance.clone(), Arc::clone(&stop));
        let hashed = self.hash(instance, &found, &stop).await;
        lock(&self.inner.sealing).retain(|id, own| id != instance || !Arc::ptr_eq(own, &stop));
        let seal = match hashed {
            Ok(Some(seal)) if !stop.load(Ordering::Relaxed) => seal,
            // Used or discarded meanwhile, or touched by someone: then it is not for us to vouch for it.
            Ok(_) => return Ok(()),
            Err(_) if stop.load(Ordering::Relaxed) => return Ok(()),
            Err(cause) => return Err(io(cause)),
        };
        let text = serde_json::to_string(&seal).map_err(|cause| io(cause.into()))?;
        let name = format!("{SNAPSHOT}/{SEAL}");
        self.perform(instance, ACTION, Operation::WriteFile { instance: instance.clone(), name, text })
            .await
            .map(|_| ())
    }

    /// Someone needs the snapshot, or its place.
    pub(super) fn stop_sealing(&self, instance: &InstanceId) {
        if let Some(stop) = lock(&self.inner.sealing).remove(instance) {
            stop.store(true, Ordering::Relaxed);
        }
    }

    /// What is wrong with the files of a snapshot, if anything is.
    pub(super) async fn damage(&self, instance: &InstanceId, found: &Found) -> io::Result<Option<String>> {
        let manifest = &found.manifest;
        let mut touched = false;
        for (name, stamp) in [(STATE, Some(&manifest.state)), (MEMORY, manifest.memory.as_ref())] {
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
        if !touched {
            return Ok(None);
        }
        let Some(seal) = self.read_seal(instance, found).await? else {
            return Ok(Some("it was touched before anyone knew what it hashes to".to_owned()));
        };
        let now = self.hash_as_is(instance, found, &Arc::default()).await?;
        if now.as_ref() == Some(&seal) {
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
