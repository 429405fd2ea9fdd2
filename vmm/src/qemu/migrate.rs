//! Migrates a sleeping instance to another node: exports its files as they are, and imports them where they fit.
//!
//! A snapshot is known by the stamps of its files, and a copy has other stamps. So an imported snapshot is verified by
//! content: its manifest is the one that its record names, and its state has the digest in its checksums or, compressed, in
//! the note beside it; what is encrypted is authenticated when it is read. Then a manifest with the stamps of the files
//! here is written, and checksums or note for that manifest.

use std::fs::File;
use std::io;

use futures::future::BoxFuture;
use mvm_host::{Access, Host, Operation};
use mvm_proto::{Digest, InstanceId};

use super::QemuDriver;
use super::args::{self, DATA_DISK};
use super::compress::{COMPRESSED, NOTE, Note};
use super::snapshot::{
    CHECKSUMS, Checksums, FileStamp, Fit, Found, MANIFEST, MadeOn, Manifest, SNAPSHOT, STATE, UNFINISHED,
    digest_of,
};
use crate::{Driver as _, DriverError, Migration, Part, SnapshotOptions, SnapshotRef, VmSpec, run_files};

const EXPORT: &str = "export";
const IMPORT: &str = "import";

/// What the file that holds the guest is verified by.
enum Proof {
    Checksums(Checksums),
    Note(Note),
    /// Authenticated encryption: by its key, when it is read.
    Key,
}

impl<H: Host> Migration for QemuDriver<H> {
    fn export<'a>(&'a self, snapshot: &'a SnapshotRef) -> BoxFuture<'a, Result<Vec<Part>, DriverError>> {
        Box::pin(self.open_parts(snapshot))
    }

    fn begin_import<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(async move {
            self.remove(instance).await?;
            self.perform(instance, IMPORT, Operation::MakeRunDir { instance: instance.clone() }).await?;
            let make = Operation::MakeDir { instance: instance.clone(), name: UNFINISHED.to_owned() };
            self.perform(instance, IMPORT, make).await.map(|_| ())
        })
    }

    fn import_part<'a>(
        &'a self,
        instance: &'a InstanceId,
        name: &'a str,
    ) -> BoxFuture<'a, Result<File, DriverError>> {
        Box::pin(self.create_part(instance, name))
    }

    fn import<'a>(
        &'a self,
        spec: &'a VmSpec,
        exported: &'a SnapshotRef,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<SnapshotRef, DriverError>> {
        Box::pin(self.accept_parts(spec, exported, options))
    }
}

impl<H: Host> QemuDriver<H> {
    /// Every file that a restore of it needs, as it is, and the data disk that belongs to it.
    async fn open_parts(&self, wanted: &SnapshotRef) -> Result<Vec<Part>, DriverError> {
        let saved = &wanted.instance;
        let unusable = |reason: String| DriverError::Unusable { instance: saved.clone(), reason };
        let io = |cause| DriverError::Io { instance: saved.clone(), action: EXPORT, cause };
        let host = &*self.inner.host;
        // Held until its files are open, so that none is compressed meanwhile. An open file stays as it is.
        let locked = loop {
            self.stop_compression(saved).await;
            if let Some(locked) = self.lock_snapshot(saved) {
                break locked;
            }
            tokio::task::yield_now().await;
        };
        // The importing node verifies its content by the checksums.
        self.compress_or_checksum(&locked, &SnapshotOptions::plain()).await?;
        let found = Found::read(host, saved).await.map_err(io)?.transpose().map_err(unusable)?;
        let Some(found) = found.filter(|found| found.digest == wanted.digest) else {
            return Err(DriverError::NoSnapshot { instance: saved.clone(), digest: wanted.digest });
        };
        let source = self.source(saved, &found).await.map_err(io)?;
        if let Some(reason) = self.damage(saved, &found, &source).await.map_err(io)? {
            return Err(unusable(reason));
        }
        if FileStamp::of_disk(host, saved).await.map_err(io)? != found.manifest.disk {
            return Err(unusable("its data disk moved on since it was made".to_owned()));
        }
        let mut needed = vec![MANIFEST, source.name];
        if source.name == COMPRESSED {
            needed.push(NOTE);
        } else if source.encoding.key.is_none() {
            needed.push(CHECKSUMS);
        }
        let mut names: Vec<String> = needed.into_iter().map(|name| format!("{SNAPSHOT}/{name}")).collect();
        if found.manifest.disk.is_some() {
            names.push(DATA_DISK.to_owned());
        }
        let mut parts = Vec::with_capacity(names.len());
        for name in names {
            let file = run_files::open(host, saved, &name).await.map_err(io)?;
            let file = file.ok_or_else(|| unusable(format!("its {name} is gone")))?;
            parts.push(Part { name, file });
        }
        Ok(parts)
    }

    async fn create_part(&self, instance: &InstanceId, name: &str) -> Result<File, DriverError> {
        let io = |cause| DriverError::Io { instance: instance.clone(), action: IMPORT, cause };
        let place = match name.strip_prefix(SNAPSHOT).and_then(|rest| rest.strip_prefix('/')) {
            Some(name) if is_plain(name) => format!("{UNFINISHED}/{name}"),
            None if name == DATA_DISK => name.to_owned(),
            _ => {
                let reason = format!("{name:?} is no file of a snapshot");
                return Err(DriverError::Unusable { instance: instance.clone(), reason });
            }
        };
        let file = self.inner.host.open_file(instance, &place, Access::Create).await;
        let file =
            file.map_err(|cause| DriverError::Host { instance: instance.clone(), action: IMPORT, cause })?;
        file.ok_or_else(|| io(io::ErrorKind::NotFound.into()))
    }

    /// Makes the parts that came the instance's snapshot, if they are what was sent and can be restored here.
    async fn accept_parts(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        let instance = &spec.instance;
        let unusable = |reason: String| DriverError::Unusable { instance: instance.clone(), reason };
        let io = |cause| DriverError::Io { instance: instance.clone(), action: IMPORT, cause };
        let found = self.received_manifest(instance, exported).await.map_err(io)?.map_err(unusable)?;
        if found.manifest.revision != spec.revision {
            return Err(unusable(format!("it is of revision {}", found.manifest.revision)));
        }
        if let Some(reason) = options.refuses(&found.manifest.encoding) {
            return Err(unusable(reason));
        }
        // Without its key it would sleep here for ever.
        let locked = options.key_to_restore(&found.manifest.encoding, instance, spec.revision);
        locked.map_err(|cause| DriverError::Key { instance: instance.clone(), action: IMPORT, cause })?;
        let binary = self.binary(instance).await?;
        let here = Fit {
            image: spec.image.digest,
            qemu: &binary.version,
            hardware: args::hardware_digest(spec, &found.manifest.accelerator, found.manifest.balloon),
            host: MadeOn::here().await,
        };
        if let Some(reason) = found.manifest.misfit(&here) {
            return Err(unusable(reason));
        }
        let proof = self.verify_parts(instance, &found).await.map_err(io)?.map_err(unusable)?;
        let manifest = self.with_local_stamps(instance, &found.manifest, &proof).await.map_err(io)?;
        let (manifest, file) = manifest.map_err(unusable)?;
        let text = serde_json::to_string_pretty(&manifest).map_err(|cause| io(cause.into()))?;
        let digest = Digest::of(text.as_bytes());
        let proof = match proof {
            Proof::Checksums(checksums) => {
                Some((CHECKSUMS, serde_json::to_string(&Checksums { snapshot: digest, ..checksums })))
            }
            Proof::Note(note) => {
                Some((NOTE, serde_json::to_string(&Note { snapshot: digest, packed: file, ..note })))
            }
            Proof::Key => None,
        };
        let mut texts = vec![(MANIFEST, text)];
        if let Some((name, text)) = proof {
            texts.push((name, text.map_err(|cause| io(cause.into()))?));
        }
        for (name, text) in texts {
            let (instance, name) = (instance.clone(), format!("{UNFINISHED}/{name}"));
            self.perform(&spec.instance, IMPORT, Operation::WriteFile { instance, name, text }).await?;
        }
        let (from, to) = (UNFINISHED.to_owned(), SNAPSHOT.to_owned());
        self.perform(instance, IMPORT, Operation::Rename { instance: instance.clone(), from, to }).await?;
        Ok(SnapshotRef { instance: instance.clone(), revision: manifest.revision, digest })
    }

    /// The manifest that came, if it is the one that the record names.
    async fn received_manifest(
        &self,
        instance: &InstanceId,
        exported: &SnapshotRef,
    ) -> io::Result<Result<Found, String>> {
        let name = format!("{UNFINISHED}/{MANIFEST}");
        let Some(text) = run_files::read(&*self.inner.host, instance, &name).await? else {
            return Ok(Err("its manifest is missing".to_owned()));
        };
        if Digest::of(&text) != exported.digest {
            return Ok(Err("its manifest is not the one that its record names".to_owned()));
        }
        Ok(Found::parse(&text))
    }

    /// Verifies the file that holds the guest.
    async fn verify_parts(&self, instance: &InstanceId, found: &Found) -> io::Result<Result<Proof, String>> {
        let host = &*self.inner.host;
        if found.manifest.memory.is_some() {
            return Ok(Err("it is a template's, and no instance's".to_owned()));
        }
        let note = run_files::read(host, instance, &format!("{UNFINISHED}/{NOTE}")).await?;
        let note = note.and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        if let Some(note) = note.filter(|note| note.snapshot == found.digest) {
            let same = self.hashes_to(instance, COMPRESSED, note.digest).await?;
            return Ok(same.map(|()| Proof::Note(note)));
        }
        if found.manifest.encoding.key.is_some() {
            return Ok(Ok(Proof::Key));
        }
        let checksums = run_files::read(host, instance, &format!("{UNFINISHED}/{CHECKSUMS}")).await?;
        let checksums = checksums.and_then(|text| serde_json::from_slice::<Checksums>(&text).ok());
        let Some(checksums) =
            checksums.filter(|checksums| checksums.snapshot == found.digest && checksums.memory.is_none())
        else {
            return Ok(Err("it came without the checksums of its files".to_owned()));
        };
        let same = self.hashes_to(instance, STATE, checksums.state).await?;
        Ok(same.map(|()| Proof::Checksums(checksums)))
    }

    async fn hashes_to(
        &self,
        instance: &InstanceId,
        name: &str,
        digest: Digest,
    ) -> io::Result<Result<(), String>> {
        let Some(file) =
            run_files::open(&*self.inner.host, instance, &format!("{UNFINISHED}/{name}")).await?
        else {
            return Ok(Err(format!("its {name} is missing")));
        };
        let hashing = tokio::task::spawn_blocking(move || digest_of(file, || true));
        let same = hashing.await.map_err(io::Error::other)?? == digest;
        Ok(same.then_some(()).ok_or_else(|| format!("its {name} does not hash to what it was saved as")))
    }

    /// The same manifest for the files as they lie here, and the stamp of the one that the guest is in.
    async fn with_local_stamps(
        &self,
        instance: &InstanceId,
        manifest: &Manifest,
        proof: &Proof,
    ) -> io::Result<Result<(Manifest, FileStamp), String>> {
        let host = &*self.inner.host;
        let (name, bytes) = match proof {
            Proof::Note(note) => (COMPRESSED, note.packed.bytes),
            Proof::Checksums(_) | Proof::Key => (STATE, manifest.state.bytes),
        };
        let file = run_files::open(host, instance, &format!("{UNFINISHED}/{name}")).await?;
        let file = file.as_ref().map(FileStamp::of).transpose()?;
        let Some(file) = file.filter(|file| file.bytes == bytes) else {
            return Ok(Err(format!("its {name} is not as long as it was")));
        };
        let disk = FileStamp::of_disk(host, instance).await?;
        let bytes = |stamp: &Option<FileStamp>| stamp.as_ref().map(|stamp| stamp.bytes);
        if bytes(&disk) != bytes(&manifest.disk) {
            return Ok(Err("its data disk is not the one that it was made with".to_owned()));
        }
        // After compression there is no state file, and its stamp is not looked at.
        let state = if name == STATE { file.clone() } else { manifest.state.clone() };
        Ok(Ok((Manifest { state, disk, ..manifest.clone() }, file)))
    }
}

/// A name without a path in it. The host refuses other bad names when it creates the file.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains('/')
}
