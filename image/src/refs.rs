//! Records the image of each reference, and which images are in use: small files, each replaced whole.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mvm_proto::document::ImageSource;
use mvm_proto::{Digest, ProfileId, Timestamp};
use serde::{Deserialize, Serialize};

use super::error::{ImageError, OnPath};
use super::staging::sync_folder;
use super::stamp::Stamp;
use super::store::{Store, StoreLock};

const IN_USE: &str = "in-use";

/// A reference that was built or imported, and the image it gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    pub reference: String,
    pub profile: ProfileId,
    pub digest: Digest,
    pub built_at: Timestamp,
    /// How its folder looked, where it is one. Older versions did not look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<Stamp>,
    /// What it was made of, for people.
    #[serde(default)]
    pub made_of: Vec<String>,
    /// Never collected.
    #[serde(default)]
    pub pinned: bool,
}

/// What one agent's instances need.
#[derive(Debug, Serialize, Deserialize)]
struct InUse {
    /// The agent's data folder. When it is gone, so are its instances.
    owner: PathBuf,
    images: BTreeSet<Digest>,
}

impl Store {
    /// What this reference gave when it was last built.
    pub fn reference(&self, reference: &str, profile: &ProfileId) -> Result<Option<Built>, ImageError> {
        let path = self.reference_path(reference, profile);
        // The file's name is a hash: its content says what it is of.
        Ok(read_or_build_again(&path)?
            .filter(|built| key(&built.reference, &built.profile) == key(reference, profile)))
    }

    /// Every reference, by name.
    pub fn references(&self) -> Result<Vec<Built>, ImageError> {
        let folder = self.refs();
        let mut found = Vec::new();
        for entry in fs::read_dir(&folder).on("read", &folder)? {
            let path = entry.on("read", &folder)?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                found.extend(read_or_build_again(&path)?);
            }
        }
        found.sort_by(|a, b| (&a.reference, &a.profile).cmp(&(&b.reference, &b.profile)));
        Ok(found)
    }

    pub(super) fn set_reference(&self, _lock: &StoreLock, built: &Built) -> Result<(), ImageError> {
        replace(&self.reference_path(&built.reference, &built.profile), built)
    }

    /// Keeps what a reference gave from being collected, or no longer.
    pub fn pin(&self, reference: &str, profile: &ProfileId, pinned: bool) -> Result<(), ImageError> {
        let lock = self.lock()?;
        match self.reference(reference, profile)? {
            Some(built) => self.set_reference(&lock, &Built { pinned, ..built }),
            None => Err(ImageError::Reference {
                reference: reference.to_owned(),
                fault: "never built or imported here".to_owned(),
            }),
        }
    }

    pub(super) fn drop_reference(&self, _lock: &StoreLock, built: &Built) -> Result<(), ImageError> {
        let path = self.reference_path(&built.reference, &built.profile);
        fs::remove_file(&path).on("remove", &path)
    }

    /// The images that instances need, as their agents wrote them down last. Nothing may be removed on a guess: a list
    /// that can't be read is an error.
    pub fn in_use(&self) -> Result<BTreeSet<Digest>, ImageError> {
        let folder = self.in_use_folder();
        let mut images = BTreeSet::new();
        for entry in fs::read_dir(&folder).on("read", &folder)? {
            let path = entry.on("read", &folder)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let Some(list) = read::<InUse>(&path)? else { continue };
            if list.owner.exists() {
                images.extend(list.images);
            }
        }
        Ok(images)
    }

    /// The same of one agent alone; `None` when it never wrote anything down.
    pub fn in_use_by(&self, owner: &Path) -> Result<Option<BTreeSet<Digest>>, ImageError> {
        Ok(read::<InUse>(&self.in_use_path(owner))?.map(|list| list.images))
    }

    pub(super) fn set_in_use(
        &self,
        _lock: &StoreLock,
        owner: &Path,
        images: &BTreeSet<Digest>,
    ) -> Result<(), ImageError> {
        let path = self.in_use_path(owner);
        let owner = owner.canonicalize().unwrap_or_else(|_| owner.to_owned());
        replace(&path, &InUse { owner, images: images.clone() })
    }

    pub(super) fn in_use_folder(&self) -> PathBuf {
        self.root().join(IN_USE)
    }

    fn in_use_path(&self, owner: &Path) -> PathBuf {
        let owner = owner.canonicalize().unwrap_or_else(|_| owner.to_owned());
        self.in_use_folder().join(format!("{}.json", Digest::of(owner.as_os_str().as_bytes()).hex()))
    }

    /// A name that no reference can lead out of the folder.
    fn reference_path(&self, reference: &str, profile: &ProfileId) -> PathBuf {
        let key = Digest::of(key(reference, profile).as_bytes());
        self.refs().join(format!("{}.json", key.hex()))
    }
}

/// What tells one reference from another: a profile names an output of a flake, and means nothing to the others.
fn key(reference: &str, profile: &ProfileId) -> String {
    let profile = match ImageSource::parse(reference) {
        Ok(ImageSource::Busybox | ImageSource::Folder(_)) => "",
        Ok(ImageSource::Flake(_)) | Err(_) => profile.as_str(),
    };
    format!("{reference}\0{profile}")
}

/// `None` when there is no such file.
fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, ImageError> {
    let bytes = match fs::read(path) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.on("read", path)?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| ImageError::invalid(path, format!("damaged: {error}")))
}

/// The same, where a damaged file is as good as none: it is written whole, and what it said can be found out again.
fn read_or_build_again(path: &Path) -> Result<Option<Built>, ImageError> {
    match read(path) {
        Err(error @ ImageError::Invalid { .. }) => {
            tracing::warn!(%error, "a reference to an image can't be read; going on without it");
            Ok(None)
        }
        read => read,
    }
}

fn replace<T: Serialize>(path: &Path, value: &T) -> Result<(), ImageError> {
    let bytes = serde_json::to_vec(value).map_err(std::io::Error::from).on("write", path)?;
    // Writers hold the lock: no other process uses the name.
    let new = path.with_extension("new");
    let mut file = File::create(&new).on("write", &new)?;
    file.write_all(&bytes).on("write", &new)?;
    file.sync_all().on("write", &new)?;
    fs::rename(&new, path).on("write", path)?;
    path.parent().map_or(Ok(()), sync_folder)
}
