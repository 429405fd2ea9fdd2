//! What a session was made of at one moment: every folder, file and link, with its bytes named by their digests.

use std::collections::BTreeSet;
use std::io;

use mvm_proto::Digest;
use serde::{Deserialize, Serialize};

/// How much of a file one object holds: small enough that a file which grows sends little again, large enough that
/// most files are one object.
pub(crate) const CHUNK_BYTES: u64 = 1024 * 1024;

/// A folder with more entries is a whole disk rather than a session, and would not fit into an index either.
pub(crate) const MAX_ENTRIES: usize = 100_000;

/// An index of that many entries with paths of 150 bytes stays below it. The agent has it in memory, several at once.
pub(crate) const MAX_INDEX_BYTES: u64 = 32 * 1024 * 1024;

/// Indexes that earlier versions wrote may be longer, and are read.
pub(crate) const MAX_STORED_INDEX_BYTES: u64 = 256 * 1024 * 1024;

/// What an entry takes in an index beside its texts, and what each of its chunks takes.
const ENTRY_BYTES: u64 = 128;
const CHUNK_NAME_BYTES: u64 = 80;

const TYPE_BITS: u32 = 0o170_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    File,
    Link,
}

/// The kind that a mode says; absent for what can't be kept: devices, pipes, sockets.
pub(crate) fn kind_of(mode: u32) -> Option<Kind> {
    match mode & TYPE_BITS {
        0o040_000 => Some(Kind::Folder),
        0o100_000 => Some(Kind::File),
        0o120_000 => Some(Kind::Link),
        _ => None,
    }
}

/// Everything in a session, by path: what lies in a folder comes after the folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Index {
    pub(crate) entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Below the session's own folder, which is the empty one.
    pub(crate) path: String,
    /// With the type.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified_ms: i64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) target: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) chunks: Vec<Digest>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(size: &u64) -> bool {
    *size == 0
}

/// About what an entry with texts of this length and content of this size takes in an index.
pub(crate) fn entry_bytes(texts: usize, size: u64) -> u64 {
    let chunks = size.div_ceil(CHUNK_BYTES).saturating_mul(CHUNK_NAME_BYTES);
    ENTRY_BYTES.saturating_add(texts as u64).saturating_add(chunks)
}

/// Bytes up to a limit.
struct Bounded {
    bytes: Vec<u8>,
    left: u64,
}

impl io::Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let left = self.left.checked_sub(piece.len() as u64);
        self.left = left.ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Index {
    /// As it is stored; absent: it is longer than `limit`.
    pub(crate) fn to_bytes(&self, limit: u64) -> Option<Vec<u8>> {
        let mut bounded = Bounded { bytes: Vec::new(), left: limit };
        // Strings and numbers always serialise: only the limit can be in the way.
        serde_json::to_writer(&mut bounded, self).ok()?;
        Some(bounded.bytes)
    }

    /// Reads what [`Self::to_bytes`] wrote. What a store returns is not trusted: a writer to the store must not
    /// be able to name a file outside of the session.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let index: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        index.check()?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        if self.entries.len() > MAX_ENTRIES {
            return Err(format!("{} entries are more than {MAX_ENTRIES}", self.entries.len()));
        }
        if !self.entries.is_sorted_by(|one, next| one.path < next.path) {
            return Err("its entries are not in order".to_owned());
        }
        for entry in &self.entries {
            let refuse = |why: &str| Err(format!("{:?} {why}", entry.path));
            if !entry.path.is_empty() && !entry.path.split('/').all(is_name) {
                return refuse("is not a path inside of a session");
            }
            let chunks = match kind_of(entry.mode) {
                None => return refuse("is neither folder, file nor link"),
                Some(Kind::File) => entry.size.div_ceil(CHUNK_BYTES),
                Some(Kind::Folder | Kind::Link) => 0,
            };
            if entry.chunks.len() as u64 != chunks {
                return refuse("has another length than its chunks");
            }
        }
        Ok(())
    }

    /// About how long it is when it is stored.
    pub(crate) fn weight(&self) -> u64 {
        let entries = self.entries.iter();
        let bytes = entries.map(|entry| entry_bytes(entry.path.len() + entry.target.len(), entry.size));
        bytes.fold(0, u64::saturating_add)
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Entry> {
        let at = self.entries.binary_search_by(|entry| entry.path.as_str().cmp(path)).ok()?;
        self.entries.get(at)
    }

    /// Every piece of content that it names.
    pub(crate) fn chunks(&self) -> BTreeSet<Digest> {
        self.entries.iter().flat_map(|entry| entry.chunks.iter().copied()).collect()
    }
}

/// Whether this can be the name of something in a folder. A guest says what it likes.
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, size: u64, chunks: usize) -> Entry {
        let digest = Digest::of(path.as_bytes());
        Entry {
            path: path.to_owned(),
            mode: 0o100_644,
            uid: 0,
            gid: 0,
            modified_ms: 0,
            size,
            target: String::new(),
            chunks: vec![digest; chunks],
        }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let folder = Entry { mode: 0o040_700, ..file("", 0, 0) };
        let index = Index { entries: vec![folder, file("a", 0, 0), file("a.b/c", CHUNK_BYTES + 1, 2)] };
        let bytes = index.to_bytes(MAX_INDEX_BYTES).unwrap();
        assert_eq!(Index::from_bytes(&bytes), Ok(index.clone()));
        let length = bytes.len() as u64;
        assert_eq!(index.to_bytes(length), Some(bytes));
        assert_eq!(index.to_bytes(length - 1), None);
        assert_eq!(index.get("a.b/c").map(|entry| entry.size), Some(CHUNK_BYTES + 1));
        assert_eq!(index.chunks().len(), 1);
    }

    #[test]
    fn an_index_that_leaves_its_session_or_lies_about_its_content_is_refused() {
        let bad = [
            vec![file("../etc/passwd", 0, 0)],
            vec![file("/etc/passwd", 0, 0)],
            vec![file("a//b", 0, 0)],
            vec![file("a/./b", 0, 0)],
            vec![file("a\0b", 0, 0)],
            vec![file("b", 0, 0), file("a", 0, 0)],
            vec![file("a", 0, 0), file("a", 0, 0)],
            vec![file("a", 1, 0)],
            vec![file("a", 1, 2)],
            vec![Entry { mode: 0o020_644, ..file("a", 0, 0) }],
            vec![Entry { mode: 0o040_755, ..file("a", 0, 1) }],
        ];
        for entries in bad {
            let index = Index { entries };
            let bytes = index.to_bytes(MAX_INDEX_BYTES).unwrap();
            assert!(Index::from_bytes(&bytes).is_err(), "{index:?}");
        }
    }
}
