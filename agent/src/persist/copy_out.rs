//! Copies a session out of a guest that may be writing to it.
//!
//! A file counts as read when a listing made after its last byte equals the listing before. A file that changes all the time
//! keeps its version of the last copy and is named in the report. A file whose metadata are those of the last copy is not
//! read again.
//!
//! Sizes and names come from the guest: each listing is checked against the limits of a session before a byte is read.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::guest::{Entry as Listed, FailureCode};
use mvm_proto::{Digest, Timestamp};

use super::PersistError;
use super::blob_store::BlobStore;
use super::guest_files::GuestFiles;
use super::index::{
    CHUNK_BYTES, Entry, Index, Kind, MAX_ENTRIES, MAX_INDEX_BYTES, entry_bytes, is_name, kind_of,
};
use super::session_store::SessionStore;
use crate::crash;
use crate::guest::LinkError;

/// How often a file that changes is read before it is left as it was.
const ROUNDS: usize = 4;

/// Two changes within a tick of the guest's clock have the same time. A file is known by its times only once this much
/// has passed since the last of them; before, its bytes are compared.
const SETTLED_MS: i64 = 2000;

/// How much of a path an error repeats.
const SHOWN_CHARS: usize = 100;

/// What tells one version of a file from another without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Looks {
    mode: u32,
    size: u64,
    modified_ms: i64,
    changed_ms: i64,
}

impl Looks {
    fn of(listed: &Listed) -> Self {
        let Listed { mode, size, modified_ms, changed_ms, .. } = *listed;
        Self { mode, size, modified_ms, changed_ms }
    }
}

/// A file's content, how it looked, and when it was read by the agent's clock.
#[derive(Debug, Clone)]
struct Read {
    looks: Looks,
    at_ms: i64,
    chunks: Vec<Digest>,
}

impl Read {
    fn still_holds(&self, looks: &Looks) -> bool {
        self.looks == *looks && self.looks.changed_ms.saturating_add(SETTLED_MS) < self.at_ms
    }
}

/// What is remembered from one copy to the next, beside the index.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    files: BTreeMap<String, Read>,
    /// Content that the store has.
    present: BTreeSet<Digest>,
}

impl Memory {
    /// The store has what this index names.
    pub(crate) fn of(index: &Index) -> Self {
        Self { files: BTreeMap::new(), present: index.chunks() }
    }

    /// A file that need not be read: it looks as it did, and the store still has all of it.
    fn known(&self, path: &str, looks: &Looks) -> Option<&Read> {
        let known = self.files.get(path).filter(|known| known.still_holds(looks))?;
        known.chunks.iter().all(|chunk| self.present.contains(chunk)).then_some(known)
    }

    /// The store has nothing else any more.
    pub(crate) fn keep_only(&mut self, chunks: BTreeSet<Digest>) {
        self.present = chunks;
    }
}

#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) index: Index,
    /// Files that never held still: the last copy's version of them stands.
    pub(crate) unsettled: Vec<String>,
    /// Names that can't be kept: devices, sockets, pipes, and names that are not text.
    pub(crate) skipped: usize,
    pub(crate) sent_bytes: u64,
    size: Size,
}

/// What the entries so far come to.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    file_bytes: u64,
    index_bytes: u64,
}

pub(crate) struct CopyOut<'a, S, F> {
    pub(crate) store: &'a SessionStore<S>,
    pub(crate) slot: u32,
    pub(crate) files: &'a F,
    /// The session's folder in the guest.
    pub(crate) root: &'a str,
    pub(crate) before: &'a Index,
    pub(crate) memory: &'a mut Memory,
    pub(crate) now: Timestamp,
}

impl<S: BlobStore, F: GuestFiles> CopyOut<'_, S, F> {
    pub(crate) async fn run(mut self) -> Result<Copied, PersistError> {
        let mut copied = Copied {
            index: Index::default(),
            unsettled: Vec::new(),
            skipped: 0,
            sent_bytes: 0,
            size: Size::default(),
        };
        let mut files = BTreeMap::new();
        let Some(root) = self.root_entry().await? else {
            self.memory.files = files;
            return Ok(copied);
        };
        copied.index.entries.push(root);
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            self.folder(&folder, &mut copied, &mut files, &mut folders).await?;
            if copied.index.entries.len() > MAX_ENTRIES {
                return Err(PersistError::TooMany);
            }
        }
        copied.index.entries.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        self.memory.files = files;
        Ok(copied)
    }

    /// The metadata of the session's own folder; absent: it does not exist yet.
    async fn root_entry(&self) -> Result<Option<Entry>, PersistError> {
        let (parent, name) = self.root.rsplit_once('/').unwrap_or(("", self.root));
        let parent = if parent.is_empty() { "/" } else { parent };
        let Some(listed) = gone(self.files.list(parent).await)? else { return Ok(None) };
        match listed.into_iter().find(|listed| listed.name == name) {
            None => Ok(None),
            Some(found) if kind_of(found.mode) == Some(Kind::Folder) => {
                Ok(Some(entry("", &found, Vec::new())))
            }
            Some(_) => Err(PersistError::NotAFolder(self.root.to_owned())),
        }
    }

    fn absolute(&self, path: &str) -> String {
        if path.is_empty() { self.root.to_owned() } else { format!("{}/{path}", self.root) }
    }

    async fn folder(
        &mut self,
        folder: &str,
        copied: &mut Copied,
        files: &mut BTreeMap<String, Read>,
        folders: &mut Vec<String>,
    ) -> Result<(), PersistError> {
        let mut read: BTreeMap<String, Read> = BTreeMap::new();
        let mut round = 0;
        let (listed, size) = loop {
            // Gone meanwhile: then so is everything in it.
            let Some(listed) = gone(self.files.list(&self.absolute(folder)).await)? else { return Ok(()) };
            let size = self.size_with(copied.size, folder, &listed)?;
            let mut any = false;
            for found in listed.iter().filter(|found| kind_of(found.mode) == Some(Kind::File)) {
                if round == ROUNDS || !is_keepable(&found.name) {
                    continue;
                }
                let (path, looks) = (join(folder, &found.name), Looks::of(found));
                if read.get(&path).is_some_and(|read| read.looks == looks) {
                    continue;
                }
                if let Some(known) = self.memory.known(&path, &looks) {
                    read.insert(path, known.clone());
                    continue;
                }
                any = true;
                if let Some(chunks) = self.file(&path, &looks, copied).await? {
                    read.insert(path, Read { looks, at_ms: self.now.unix_ms(), chunks });
                }
            }
            if !any {
                break (listed, size);
            }
            round += 1;
        };
        copied.size = size;
        for found in &listed {
            if !is_keepable(&found.name) {
                copied.skipped += 1;
                continue;
            }
            let path = join(folder, &found.name);
            let kept = match kind_of(found.mode) {
                Some(Kind::Folder) => {
                    folders.push(path.clone());
                    Some(entry(&path, found, Vec::new()))
                }
                Some(Kind::Link) => Some(entry(&path, found, Vec::new())),
                Some(Kind::File) => match read.remove(&path).filter(|read| read.looks == Looks::of(found)) {
                    Some(read) => {
                        let kept = entry(&path, found, read.chunks.clone());
                        files.insert(path, read);
                        Some(kept)
                    }
                    None => {
                        let last = self.before.get(&path);
                        let last = last.filter(|last| kind_of(last.mode) == Some(Kind::File)).cloned();
                        copied.unsettled.push(path);
                        last
                    }
                },
                None => {
                    copied.skipped += 1;
                    None
                }
            };
            copied.index.entries.extend(kept);
        }
        Ok(())
    }

    /// What a session comes to with these entries, if it may have that much.
    fn size_with(&self, before: Size, folder: &str, listed: &[Listed]) -> Result<Size, PersistError> {
        let max_bytes = self.store.max_bytes();
        let mut size = before;
        for found in listed {
            let is_file = kind_of(found.mode) == Some(Kind::File) && is_keepable(&found.name);
            let file_bytes = if is_file { found.size } else { 0 };
            size.file_bytes = size.file_bytes.saturating_add(file_bytes);
            if size.file_bytes > max_bytes {
                let path = shortened(&join(folder, &found.name));
                return Err(PersistError::TooLarge(format!(
                    "with {path:?} of {file_bytes} bytes its files have more than {max_bytes} bytes"
                )));
            }
            let texts = folder.len() + found.name.len() + found.target.len();
            size.index_bytes = size.index_bytes.saturating_add(entry_bytes(texts, file_bytes));
            if size.index_bytes > MAX_INDEX_BYTES {
                return Err(PersistError::TooLarge(index_too_long()));
            }
        }
        Ok(size)
    }

    /// Reads a file and sends what the store lacks of it. Absent: it was not what it looked like.
    async fn file(
        &mut self,
        path: &str,
        looks: &Looks,
        copied: &mut Copied,
    ) -> Result<Option<Vec<Digest>>, PersistError> {
        let absolute = self.absolute(path);
        let mut chunks = Vec::new();
        let mut offset = 0;
        while offset < looks.size {
            let length = CHUNK_BYTES.min(looks.size - offset);
            let Some(bytes) = self.chunk(&absolute, offset, length).await? else { return Ok(None) };
            let digest = Digest::of(&bytes);
            if !self.memory.present.contains(&digest) {
                copied.sent_bytes += length;
                let max_bytes = self.store.max_bytes();
                if copied.sent_bytes > max_bytes {
                    let why = format!("more than {max_bytes} bytes changed while it was copied");
                    return Err(PersistError::TooLarge(why));
                }
                self.store.put_content(self.slot, &digest, bytes).await?;
                crash::point("persist.content");
                self.memory.present.insert(digest);
            }
            chunks.push(digest);
            offset += length;
        }
        let settled = looks.changed_ms.saturating_add(SETTLED_MS) < self.now.unix_ms();
        if !settled && !self.reads_the_same(&absolute, looks.size, &chunks).await? {
            return Ok(None);
        }
        Ok(Some(chunks))
    }

    async fn reads_the_same(&self, path: &str, size: u64, chunks: &[Digest]) -> Result<bool, PersistError> {
        let mut offset = 0;
        for digest in chunks {
            let length = CHUNK_BYTES.min(size - offset);
            match self.chunk(path, offset, length).await? {
                Some(bytes) if Digest::of(&bytes) == *digest => offset += length,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Exactly `length` bytes; absent: the file is shorter, gone, or no file any more.
    async fn chunk(&self, path: &str, offset: u64, length: u64) -> Result<Option<Vec<u8>>, PersistError> {
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        while (bytes.len() as u64) < length {
            let have = bytes.len() as u64;
            let piece = match self.files.read(path, offset + have, length - have).await {
                Ok(piece) if piece.is_empty() => return Ok(None),
                Ok(piece) => piece,
                Err(LinkError::Refused { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes))
    }
}

/// Why an index is not written.
pub(crate) fn index_too_long() -> String {
    format!("its names, links and lists of content have more than {MAX_INDEX_BYTES} bytes")
}

/// The beginning of a path that a guest chose.
fn shortened(path: &str) -> String {
    path.chars().take(SHOWN_CHARS).collect()
}

/// What is not there is no failure.
fn gone<T>(found: Result<T, LinkError>) -> Result<Option<T>, PersistError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(LinkError::Refused { code, .. }) if code == FailureCode::NotFound.as_str() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether this names one thing. A name that is not text comes with what stands for the rest of it, and names nothing.
fn is_keepable(name: &str) -> bool {
    is_name(name) && !name.contains(char::REPLACEMENT_CHARACTER)
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

fn entry(path: &str, found: &Listed, chunks: Vec<Digest>) -> Entry {
    let is_file = kind_of(found.mode) == Some(Kind::File);
    Entry {
        path: path.to_owned(),
        mode: found.mode,
        uid: found.uid,
        gid: found.gid,
        modified_ms: found.modified_ms,
        size: if is_file { found.size } else { 0 },
        target: found.target.clone(),
        chunks,
    }
}
