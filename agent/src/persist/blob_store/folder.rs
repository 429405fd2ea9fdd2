//! What lies in a folder of this machine that sessions are copied to. No link is followed.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use mvm_proto::Timestamp;
use object_store::path::Path as Key;

use super::{BlobStoreError, Listed};

/// What is below a key.
#[derive(Debug, Default)]
pub(super) struct Walked {
    pub(super) listed: Vec<Listed>,
    /// What no copy put there.
    pub(super) foreign: Vec<PathBuf>,
}

/// Everything below these whole steps; nothing where one of them is a link.
pub(super) fn walk(folder: &Path, below: &str) -> Result<Walked, BlobStoreError> {
    let mut walked = Walked::default();
    if let Err(BlobStoreError::Link { path }) = super::check_links(folder, below) {
        walked.foreign.push(path);
        return Ok(walked);
    }
    let mut folders = vec![(folder.join(below), below.to_owned())];
    while let Some((path, key)) = folders.pop() {
        let failed = |cause| BlobStoreError::Read { path: path.clone(), cause };
        let entries = match std::fs::read_dir(&path) {
            Ok(entries) => entries,
            // It was removed, or never was one.
            Err(cause) if is_gone(&cause) => continue,
            Err(cause) => return Err(failed(cause)),
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                Err(cause) if is_gone(&cause) => continue,
                Err(cause) => return Err(failed(cause)),
            };
            let name = entry.file_name();
            let name = name.to_str().filter(|name| Key::parse(name).is_ok());
            let key = name.map(|name| if key.is_empty() { name.to_owned() } else { format!("{key}/{name}") });
            match key {
                Some(key) if metadata.is_dir() => folders.push((entry.path(), key)),
                Some(key) if metadata.is_file() && is_whole(&key) => walked.listed.push(told(key, &metadata)),
                // Another copy is writing it.
                Some(_) if metadata.is_file() => {}
                _ => walked.foreign.push(entry.path()),
            }
        }
    }
    Ok(walked)
}

fn is_gone(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// What is not yet is called `NAME#NUMBER`.
fn is_whole(key: &str) -> bool {
    let number = key.rsplit_once('#').map(|(_, number)| number);
    number.is_none_or(|number| number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn told(key: String, metadata: &Metadata) -> Listed {
    // Every file system that an agent runs on has this time.
    let written_at = metadata.modified().map_or(Timestamp::from_unix_ms(0), Timestamp::from);
    Listed { key, written_at, bytes: metadata.len() }
}

/// Removes the folders at and below a path that are empty.
pub(super) fn remove_empty(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    // One with something in it stays.
    let _ = std::fs::remove_dir(folder);
}
