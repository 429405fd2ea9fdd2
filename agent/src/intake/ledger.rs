//! The last accepted document and its place in the order: one file, durable before the first effect.
//!
//! [`judge`] holds the rules, pure. [`Ledger`] holds the file, apart from any database: temp, fsync, rename. A file
//! that can't be read is an error and never an empty ledger, for that would let an old document in again.

pub mod judge;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use mvm_pki::files::write_atomic;
use mvm_proto::envelope::Payload;
use mvm_proto::status::Mark;
use mvm_proto::{Digest, Envelope, SignedDocument, TraceContext, Verified};
use serde::{Deserialize, Serialize};

use crate::node::CurrentDocument;

pub use judge::{MAX_SKEW, Refused, Verdict, judge};

/// The ledger's name in the data directory.
pub const LEDGER_FILE: &str = "ledger.json";

/// The file's format; a newer one is not guessed at.
const FORMAT: u32 = 1;

/// Documents name what tenants run: only root reads them.
const MODE: u32 = 0o600;

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("could not {action} the ledger {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "the ledger {path} is damaged ({reason}). It holds the highest document that this node accepted, so it is not \
         replaced by an empty one: restore it from a backup, or move it away and have the cluster's root reset this \
         node's high-water mark"
    )]
    Damaged { path: PathBuf, reason: String },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    /// The version of the root under which the mark was set.
    root_version: u64,
    /// Absent: never set, or reset by a root.
    high_water: Option<StoredMark>,
    /// The envelope in force as it was sent; absent: none yet.
    envelope: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredMark {
    epoch: u64,
    generation: u64,
    digest: Digest,
}

#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    root_version: u64,
    high_water: Option<Mark>,
    envelope: Option<Bytes>,
    current_document: Option<Arc<CurrentDocument>>,
}

impl Ledger {
    /// Reads the ledger; a node that has none yet starts an empty one.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        let empty = Self {
            path: path.to_owned(),
            root_version: 0,
            high_water: None,
            envelope: None,
            current_document: None,
        };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(empty),
            Err(cause) => return Err(LedgerError::Io { action: "read", path: path.to_owned(), cause }),
        };
        let damaged = |reason: String| LedgerError::Damaged { path: path.to_owned(), reason };
        let file: File = serde_json::from_slice(&bytes).map_err(|cause| damaged(cause.to_string()))?;
        if file.format != FORMAT {
            return Err(damaged(format!("its format is {}, this program reads {FORMAT}", file.format)));
        }
        let high_water = file.high_water.map(|mark| Mark::new(mark.epoch, mark.generation, mark.digest));
        let envelope = file.envelope.map(Bytes::from);
        let current_document = match &envelope {
            None => None,
            Some(bytes) => {
                // It was verified when it was recorded; keys may have expired since, the document has not.
                let envelope = Envelope::from_json(bytes).map_err(|cause| damaged(cause.to_string()))?;
                let document =
                    SignedDocument::parse(&envelope.payload).map_err(|cause| damaged(cause.to_string()))?;
                Some(CurrentDocument::signed(document, Digest::of(&envelope.payload), None))
            }
        };
        let recorded = current_document.as_ref().and_then(|current_document| current_document.mark.as_ref());
        if high_water.is_some() && high_water.as_ref() != recorded {
            return Err(damaged("its document does not match its recorded digest".to_owned()));
        }
        Ok(Self { root_version: file.root_version, high_water, envelope, current_document, ..empty })
    }

    #[must_use]
    pub fn high_water(&self) -> Option<&Mark> {
        self.high_water.as_ref()
    }

    #[must_use]
    pub fn current_document(&self) -> Option<&Arc<CurrentDocument>> {
        self.current_document.as_ref()
    }

    /// The envelope in force as it was sent, as JSON.
    #[must_use]
    pub fn envelope(&self) -> Option<&Bytes> {
        self.envelope.as_ref()
    }

    /// The root version that the mark belongs to; 0 before the first document.
    #[must_use]
    pub fn root_version(&self) -> u64 {
        self.root_version
    }

    /// Makes a document the one in force, with the trace that it belongs to, which is not kept. Durable when it returns; on an
    /// error the last one stays.
    pub fn record(
        &mut self,
        document: &Verified<SignedDocument>,
        root_version: u64,
        trace: Option<TraceContext>,
    ) -> Result<Arc<CurrentDocument>, LedgerError> {
        let current_document = CurrentDocument::signed(document.get().clone(), document.digest(), trace);
        let envelope = Bytes::from(document.envelope().to_json());
        self.write(current_document.mark.as_ref(), Some(&envelope), root_version)?;
        self.high_water.clone_from(&current_document.mark);
        self.envelope = Some(envelope);
        self.root_version = root_version;
        self.current_document = Some(Arc::clone(&current_document));
        Ok(current_document)
    }

    /// Forgets the mark, as a root may ask. The document stays in force.
    pub fn reset(&mut self, root_version: u64) -> Result<(), LedgerError> {
        self.write(None, self.envelope.as_deref(), root_version)?;
        self.high_water = None;
        self.root_version = root_version;
        Ok(())
    }

    fn write(
        &self,
        mark: Option<&Mark>,
        envelope: Option<&[u8]>,
        root_version: u64,
    ) -> Result<(), LedgerError> {
        let file = File {
            format: FORMAT,
            root_version,
            high_water: mark.and_then(|mark| {
                let digest = mark.digest.parse().ok()?;
                Some(StoredMark { epoch: mark.epoch, generation: mark.generation, digest })
            }),
            envelope: envelope.map(|bytes| String::from_utf8_lossy(bytes).into_owned()),
        };
        // Strings and numbers always serialise.
        let bytes = serde_json::to_vec(&file).unwrap_or_default();
        write_atomic(&self.path, &bytes, MODE).map_err(|cause| LedgerError::Io {
            action: "write",
            path: self.path.clone(),
            cause,
        })
    }
}
