//! Documents that outlive the director who signed them.
//!
//! A stored document is issued again only if a director of the current trust root signed it. A root that replaces the
//! director would orphan every document signed before, so the digests of those that were good until then are written to
//! a file of the data folder, beside the director's key and outside of the store. An attacker who has an old director's key and
//! can write to the store, or restores an old backup of it, is on no such list: what the store then holds is not signed.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use mvm_proto::Digest;
use parking_lot::RwLock;

#[derive(Debug)]
pub(crate) struct Carried {
    path: PathBuf,
    /// Of what was signed: type and payload.
    digests: RwLock<BTreeSet<Digest>>,
}

impl Carried {
    /// Without the file no document is on the list.
    pub(crate) fn load(path: PathBuf) -> io::Result<Self> {
        let digests = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { path, digests: RwLock::new(digests) })
    }

    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.digests.read().contains(digest)
    }

    /// Durable before it is used.
    pub(super) async fn replace(&self, digests: BTreeSet<Digest>) -> io::Result<()> {
        let (path, bytes) = (self.path.clone(), serde_json::to_vec(&digests)?);
        tokio::task::spawn_blocking(move || mvm_pki::files::write_private(path, &bytes)).await??;
        *self.digests.write() = digests;
        Ok(())
    }
}
