//! A sleeping instance on its way to another node: its files handed out as they are, and taken in where they fit.
//!
//! Copying gives files other stamps, and stamps are what a snapshot is known by. So a snapshot that comes in is believed
//! by content alone: its manifest is the one that its record names, its state hashes to its seal or, compressed, to the
//! note beside it; what is encrypted proves itself when it is read. Only then is a manifest with the stamps that the
//! files have here written, and seal or note made out to that one.

use std::fs::File;
use std::io;

use mvm_host::{Access, Host, Operation};
use mvm_proto::{Digest, InstanceId};

use super::QemuDriver;
use super::args::{self, DATA_DISK};
use super::pack::{NOTE, Note, PACKED};
use super::snapshot::{
    FileStamp, Fit, Found, MANIFEST, MadeOn, Manifest, SEAL, SNAPSHOT, STATE, Seal, UNFINISHED, digest_of,
};
use crate::{DriverError, Keeping, Part, SnapshotRef, VmSpec, run_files};

const EXPORT: &str = "export";
const IMPORT: &str = "import";

/// What vouches for the file that a guest is in.
enum Proof {
    Seal(Seal),
    Note(Note),
    /// The file itself, to whoever has its key.
    Key,
}

impl<H: Host> QemuDriver<H> {
    /// Every file that a wake of it needs, as it is, and the data disk that belongs to it.
    pub(super) async fn carry_out(&self, wanted: &SnapshotRef) -> Result<Vec<Part>, DriverError> {
        let saved = &wanted.instance;
        let unusable = |reason: String| DriverError::Unusable { instance: saved.clone(), reason };
        let io = |cause| DriverError::Io { instance: saved.clone(), action: EXPORT, cause };
        let host = &*self.inner.host;
        // Until its files are open nobody compresses it; after that what is open stays as it is.
        let turn = loop {
            self.stop_sealing(saved).await;
            if let Some(turn) = self.turn_to_seal(saved) {
                break turn;
            }
            tokio::task::yield_now().await;
        };
        // Whoever takes it in knows its content by the seal.
        self.seal_in(&turn, &Keeping::plain()).await?;
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
        if source.name == PACKED {
            needed.push(NOTE);
        } else if source.form.key.is_none() {
            needed.push(SEAL);
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

    /// A run directory with room for a snapshot.
    pub(super) async fn make_room(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.perform(instance, IMPORT, Operation::MakeRunDir { instance: instance.clone() }).await?;
        let name = UNFINISHED.to_owned();
        self.perform(instance, IMPORT, Operation::MakeDir { instance: instance.clone(), name })
            .await
            .map(|_| ())
    }

    pub(super) async fn incoming(&self, instance: &InstanceId, name: &str) -> Result<File, DriverError> {
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
        let file = file.map_err(|cause| self.host_error(instance, IMPORT, cause))?;
        file.ok_or_else(|| io(io::ErrorKind::NotFound.into()))
    }

    /// Gives what came in its name, if it is what was sent and can be restored here.
    pub(super) async fn carry_in(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        keeping: &Keeping,
    ) -> Result<SnapshotRef, DriverError> {
        let instance = &spec.instance;
        let unusable = |reason: String| DriverError::Unusable { instance: instance.clone(), reason };
        let io = |cause| DriverError::Io { instance: instance.clone(), action: IMPORT, cause };
        let found = self.came(instance, exported).await.map_err(io)?.map_err(unusable)?;
        if found.manifest.revision != spec.revision {
            return Err(unusable(format!("it is of revision {}", found.manifest.revision)));
        }
        if let Some(reason) = keeping.refuses(&found.manifest.form) {
            return Err(unusable(reason));
        }
        // Without its key it would sleep here for ever.
        let locked = keeping.lock_to_open(&found.manifest.form, instance, spec.revision);
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
        let proof = self.believed(instance, &found).await.map_err(io)?.map_err(unusable)?;
        let manifest = self.with_stamps_of_here(instance, &found.manifest, &proof).await.map_err(io)?;
        let (manifest, file) = manifest.map_err(unusable)?;
        let text = serde_json::to_string_pretty(&manifest).map_err(|cause| io(cause.into()))?;
        let digest = Digest::of(text.as_bytes());
        let proof = match proof {
            Proof::Seal(seal) => Some((SEAL, serde_json::to_string(&Seal { snapshot: digest, ..seal }))),
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
    async fn came(&self, instance: &InstanceId, exported: &SnapshotRef) -> io::Result<Result<Found, String>> {
        let name = format!("{UNFINISHED}/{MANIFEST}");
        let Some(text) = run_files::read(&*self.inner.host, instance, &name).await? else {
            return Ok(Err("its manifest is missing".to_owned()));
        };
        if Digest::of(&text) != exported.digest {
            return Ok(Err("its manifest is not the one that its record names".to_owned()));
        }
        Ok(Found::parse(&text))
    }

    /// What vouches for the file that the guest is in, if that is what was saved.
    async fn believed(&self, instance: &InstanceId, found: &Found) -> io::Result<Result<Proof, String>> {
        let host = &*self.inner.host;
        if found.manifest.memory.is_some() {
            return Ok(Err("it is a template's, and no instance's".to_owned()));
        }
        let note = run_files::read(host, instance, &format!("{UNFINISHED}/{NOTE}")).await?;
        let note = note.and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        if let Some(note) = note.filter(|note| note.snapshot == found.digest) {
            let same = self.hashes_to(instance, PACKED, note.digest).await?;
            return Ok(same.map(|()| Proof::Note(note)));
        }
        if found.manifest.form.key.is_some() {
            return Ok(Ok(Proof::Key));
        }
        let seal = run_files::read(host, instance, &format!("{UNFINISHED}/{SEAL}")).await?;
        let seal = seal.and_then(|text| serde_json::from_slice::<Seal>(&text).ok());
        let Some(seal) = seal.filter(|seal| seal.snapshot == found.digest && seal.memory.is_none()) else {
            return Ok(Err("it came without what its files hash to".to_owned()));
        };
        let same = self.hashes_to(instance, STATE, seal.state).await?;
        Ok(same.map(|()| Proof::Seal(seal)))
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
    async fn with_stamps_of_here(
        &self,
        instance: &InstanceId,
        manifest: &Manifest,
        proof: &Proof,
    ) -> io::Result<Result<(Manifest, FileStamp), String>> {
        let host = &*self.inner.host;
        let (name, bytes) = match proof {
            Proof::Note(note) => (PACKED, note.packed.bytes),
            Proof::Seal(_) | Proof::Key => (STATE, manifest.state.bytes),
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
        // Of what was compressed the state is gone, and nobody asks for its stamp.
        let state = if name == STATE { file.clone() } else { manifest.state.clone() };
        Ok(Ok((Manifest { state, disk, ..manifest.clone() }, file)))
    }

    fn host_error(
        &self,
        instance: &InstanceId,
        action: &'static str,
        cause: mvm_host::HostError,
    ) -> DriverError {
        DriverError::Host { instance: instance.clone(), action, cause }
    }
}

/// A name without a path in it: what else it may be is for whoever makes the file to say.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains('/')
}
