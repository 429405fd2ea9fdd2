//! A folder of this machine in place of a guest's.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use mvm_proto::guest::{Entry, FailureCode, SetEntry};
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::guest::LinkError;
use crate::persist::guest_files::GuestFiles;
use crate::persist::index::{Kind, kind_of};

#[derive(Debug)]
pub(super) struct Folder {
    /// The session's folder lies in it, so that its own looks can be listed.
    outer: TempDir,
    root: String,
    changing: Mutex<Option<PathBuf>>,
}

/// Small, so that most files take several.
const PIECE_BYTES: u64 = 100_000;

impl Folder {
    pub(super) fn new() -> Self {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("session").to_str().unwrap().to_owned();
        Self { outer, root, changing: Mutex::default() }
    }

    pub(super) fn root(&self) -> &str {
        &self.root
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.root).join(name)
    }

    pub(super) fn text(&self, name: &str) -> String {
        self.outer.path().join(name).to_str().unwrap().to_owned()
    }

    pub(super) fn chmod(&self, name: &str, mode: u32) {
        std::fs::set_permissions(self.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Every read of it is followed by a change.
    pub(super) fn change_while_read(&self, name: &str) {
        *self.changing.lock() = Some(self.path(name));
    }
}

pub(super) fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Everything in it: mode, and content or target.
pub(super) fn looks(folder: &Folder) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![PathBuf::from(&folder.root)];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).into_iter().flatten() {
            let entry = entry.unwrap();
            let (path, metadata) = (entry.path(), entry.metadata().unwrap());
            let content = if metadata.is_dir() {
                folders.push(path.clone());
                String::new()
            } else if metadata.is_symlink() {
                std::fs::read_link(&path).unwrap().display().to_string()
            } else {
                format!("{} at {}", mvm_proto::Digest::of(&std::fs::read(&path).unwrap()), metadata.mtime())
            };
            let name = path.strip_prefix(&folder.root).unwrap().display().to_string();
            found.insert(name, format!("{:o} {content}", metadata.mode()));
        }
    }
    found
}

fn refused(error: &std::io::Error) -> LinkError {
    let code =
        if error.kind() == std::io::ErrorKind::NotFound { FailureCode::NotFound } else { FailureCode::Io };
    LinkError::Refused { code: code.to_string(), message: error.to_string() }
}

impl GuestFiles for Folder {
    async fn list(&self, folder: &str) -> Result<Vec<Entry>, LinkError> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(|error| refused(&error))? {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            let ms = |seconds: i64, nanos: i64| seconds * 1000 + nanos / 1_000_000;
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            entries.push(Entry {
                name: entry.file_name().to_str().unwrap().to_owned(),
                mode: metadata.mode(),
                size: metadata.len(),
                modified_ms: ms(metadata.mtime(), metadata.mtime_nsec()),
                target: target.to_str().unwrap().to_owned(),
                uid: metadata.uid(),
                gid: metadata.gid(),
                changed_ms: ms(metadata.ctime(), metadata.ctime_nsec()),
            });
        }
        Ok(entries)
    }

    async fn read(&self, path: &str, offset: u64, limit: u64) -> Result<Vec<u8>, LinkError> {
        let file = std::fs::File::open(path).map_err(|error| refused(&error))?;
        let mut bytes = vec![0; usize::try_from(limit.min(PIECE_BYTES)).unwrap()];
        let length = file.read_at(&mut bytes, offset).map_err(|error| refused(&error))?;
        bytes.truncate(length);
        let changing = self.changing.lock().clone();
        if changing.as_deref() == Some(Path::new(path)) {
            // The same length each time, and perhaps within one tick of the clock.
            let old = std::fs::read(path).unwrap();
            let new: Vec<u8> = old.iter().map(|byte| byte.wrapping_add(1)).collect();
            std::fs::write(path, new).unwrap();
        }
        Ok(bytes)
    }

    async fn write(&self, path: &str, offset: u64, data: &[u8], last: bool) -> Result<(), LinkError> {
        let beside = format!("{path}.beside");
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(offset == 0).open(&beside);
        file.and_then(|file| file.write_all_at(data, offset)).map_err(|error| refused(&error))?;
        if last {
            std::fs::rename(&beside, path).map_err(|error| refused(&error))?;
        }
        Ok(())
    }

    async fn set_entry(&self, entry: SetEntry) -> Result<(), LinkError> {
        let set = || -> std::io::Result<()> {
            let path = Path::new(&entry.path);
            match kind_of(entry.mode) {
                Some(Kind::Link) => return std::os::unix::fs::symlink(&entry.target, path),
                Some(Kind::Folder) => std::fs::create_dir_all(path)?,
                _ => {}
            }
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(entry.mode & 0o7777))?;
            let since = std::time::Duration::from_millis(entry.modified_ms.unsigned_abs());
            std::fs::File::open(path)?.set_modified(std::time::UNIX_EPOCH + since)
        };
        set().map_err(|error| refused(&error))
    }
}
