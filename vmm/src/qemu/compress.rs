//! Compresses a snapshot in the background, and finds which of its files holds the guest.
//!
//! The manifest is what names a snapshot and never changes. What was compressed is a second file, `packed`, with a note of its
//! own beside it. The note is written when the file is on disk whole, and the file it was made from goes after that: at
//! every instant one of the two can be restored.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mvm_host::{Access, Host, Operation};
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::QemuDriver;
use super::snapshot::{FileStamp, Found, SNAPSHOT, STATE};
use crate::crash;
use crate::encoding::{self, Encoding, StreamKey};
use crate::{DriverError, SnapshotOptions, run_files};

const ACTION: &str = "compress the snapshot of";

/// The state, compressed, in place of `state`.
pub(super) const COMPRESSED: &str = "packed";
pub(super) const NOTE: &str = "packed.json";
const UNFINISHED: &str = "packed.tmp";
const UNFINISHED_NOTE: &str = "packed.json.tmp";

/// What is written before the disk is waited for: a wake that comes meanwhile waits for no more than this.
const SYNC_EVERY_BYTES: u64 = 8 << 20;

/// What was compressed, when it was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// The manifest that it belongs to.
    pub(super) snapshot: Digest,
    pub(super) compression: SnapshotCompression,
    /// What it must come to again.
    pub(super) plain_bytes: u64,
    pub(super) packed: FileStamp,
    /// What the file hashes to.
    pub(super) digest: Digest,
}

/// The file that a guest is in, and how.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) name: &'static str,
    pub(super) encoding: Encoding,
    pub(super) stamp: FileStamp,
    /// What it must come to; absent: it tells its end by itself.
    pub(super) plain_bytes: Option<u64>,
    /// What it hashes to; absent: the checksums have that.
    pub(super) digest: Option<Digest>,
}

impl Source {
    fn state(found: &Found) -> Self {
        let (encoding, stamp) = (found.manifest.encoding.clone(), found.manifest.state.clone());
        Self { name: STATE, encoding, stamp, plain_bytes: None, digest: None }
    }

    fn compressed(found: &Found, note: Note) -> Self {
        // By the same key as what it was made from.
        let encoding = Encoding { compression: note.compression, key: found.manifest.encoding.key.clone() };
        let (plain_bytes, digest) = (Some(note.plain_bytes), Some(note.digest));
        Self { name: COMPRESSED, encoding, stamp: note.packed, plain_bytes, digest }
    }
}

impl<H: Host> QemuDriver<H> {
    /// Which file of a snapshot is to be restored.
    pub(super) async fn source(&self, instance: &InstanceId, found: &Found) -> io::Result<Source> {
        let text = run_files::read(&*self.inner.host, instance, &format!("{SNAPSHOT}/{NOTE}")).await?;
        let note = text.and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        Ok(match note.filter(|note| note.snapshot == found.digest) {
            Some(note) => Source::compressed(found, note),
            None => Source::state(found),
        })
    }

    /// What an agent that ended in the middle of it left behind.
    pub(super) async fn remove_uncompressed(&self, instance: &InstanceId) -> Result<(), DriverError> {
        for name in [STATE, UNFINISHED, UNFINISHED_NOTE] {
            self.remove_file(instance, ACTION, &format!("{SNAPSHOT}/{name}")).await?;
        }
        Ok(())
    }

    /// Puts a compressed file in the place of `state`. Ends early when it is told to stop; then nothing has changed.
    pub(super) async fn compress(
        &self,
        instance: &InstanceId,
        found: &Found,
        options: &SnapshotOptions,
        stop: &Arc<AtomicBool>,
    ) -> Result<(), DriverError> {
        let packed = self.write_compressed(instance, found, options, stop).await;
        let note = match packed {
            Ok(Some(note)) if !stop.load(Ordering::Relaxed) => note,
            other => {
                // The first error is the one to report.
                let _ = self.remove_file(instance, ACTION, &format!("{SNAPSHOT}/{UNFINISHED}")).await;
                return other.map(|_| ());
            }
        };
        crash::point("pack.written");
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let text = serde_json::to_string(&note).map_err(|cause| io(cause.into()))?;
        self.rename(instance, UNFINISHED, COMPRESSED).await?;
        crash::point("pack.named");
        let name = format!("{SNAPSHOT}/{UNFINISHED_NOTE}");
        let write = Operation::WriteFile { instance: instance.clone(), name, text };
        self.perform(instance, ACTION, write).await?;
        self.rename(instance, UNFINISHED_NOTE, NOTE).await?;
        crash::point("pack.noted");
        self.remove_file(instance, ACTION, &format!("{SNAPSHOT}/{STATE}")).await?;
        crash::point("pack.done");
        Ok(())
    }

    async fn rename(
        &self,
        instance: &InstanceId,
        from: &'static str,
        to: &'static str,
    ) -> Result<(), DriverError> {
        let [from, to] = [from, to].map(|name| format!("{SNAPSHOT}/{name}"));
        let rename = Operation::Rename { instance: instance.clone(), from, to };
        self.perform(instance, ACTION, rename).await.map(|_| ())
    }

    /// The new file, on disk. None: the state is not what the manifest says, or the work was stopped.
    async fn write_compressed(
        &self,
        instance: &InstanceId,
        found: &Found,
        options: &SnapshotOptions,
        stop: &Arc<AtomicBool>,
    ) -> Result<Option<Note>, DriverError> {
        let io = |cause| DriverError::Io { instance: instance.clone(), action: ACTION, cause };
        let host = &*self.inner.host;
        let manifest = &found.manifest;
        let locked = options.key_to_restore(&manifest.encoding, instance, manifest.revision);
        let key =
            locked.map_err(|cause| DriverError::Key { instance: instance.clone(), action: ACTION, cause })?;
        let state = run_files::open(host, instance, &format!("{SNAPSHOT}/{STATE}")).await.map_err(io)?;
        let Some(state) = state.filter(|state| FileStamp::of(state).is_ok_and(|now| now == manifest.state))
        else {
            return Ok(None);
        };
        let name = format!("{SNAPSHOT}/{UNFINISHED}");
        self.remove_file(instance, ACTION, &name).await?;
        let file = host.open_file(instance, &name, Access::Create).await.map_err(run_files::io_cause);
        let file = file.map_err(io)?.ok_or_else(|| io(io::ErrorKind::NotFound.into()))?;
        let (encoding, compression) = (manifest.encoding.clone(), options.policy.compression);
        let (stop, before, snapshot) = (Arc::clone(stop), manifest.state.clone(), found.digest);
        let compressing = tokio::task::spawn_blocking(move || {
            let packed = recompress(&state, file, &encoding, compression, key.as_ref(), &stop)?;
            // Looked at after it was read: what changed before or meanwhile shows.
            let same = FileStamp::of(&state)? == before;
            let (packed, digest, plain_bytes) = packed;
            Ok::<_, io::Error>(same.then_some(Note { snapshot, compression, plain_bytes, packed, digest }))
        });
        match compressing.await.map_err(io::Error::other).map_err(io)? {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            packed => packed.map_err(io),
        }
    }
}

/// Reads the state, and writes it compressed, encrypted as it was, and durable.
fn recompress(
    state: &File,
    into: File,
    encoding: &Encoding,
    compression: SnapshotCompression,
    key: Option<&StreamKey>,
    stop: &AtomicBool,
) -> io::Result<(FileStamp, Digest, u64)> {
    let from = encoding::decode(state.try_clone()?, encoding.compression, key)?;
    let into = Writing { file: into, hash: sha2::Sha256::new(), unsynced: 0 };
    let wanted = || !stop.load(Ordering::Relaxed);
    let (into, plain_bytes) = encoding::encode(from, into, compression, key, wanted)?;
    into.file.sync_all()?;
    let digest = Digest::from_bytes(into.hash.finalize().into());
    Ok((FileStamp::of(&into.file)?, digest, plain_bytes))
}

/// Hashes what it writes, and never has much that is not on disk yet.
struct Writing {
    file: File,
    hash: sha2::Sha256,
    unsynced: u64,
}

impl Write for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.unsynced += written as u64;
        if self.unsynced >= SYNC_EVERY_BYTES {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
