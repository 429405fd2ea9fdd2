//! Notes of certificates that were made from the files alone, for the coordinator to take up when it runs.

use std::path::{Path, PathBuf};

use mvm_pki::files::{create_private_dir, write_atomic};
use mvm_proto::Digest;

use crate::records::IssuedOffline;
use crate::stored::encode;

/// Leaves a note of a certificate that was made from the files alone.
pub(crate) fn note_issued(dir: &Path, issued: &IssuedOffline) -> std::io::Result<()> {
    create_private_dir(dir)?;
    let path = note_path(dir, &issued.certificate.fingerprint);
    write_atomic(path, &encode(issued), 0o600)
}

pub(crate) fn note_path(dir: &Path, fingerprint: &Digest) -> PathBuf {
    dir.join(format!("{}.json", fingerprint.hex()))
}

pub(crate) fn read_note(path: &Path) -> Option<IssuedOffline> {
    let bytes = std::fs::read(path).ok()?;
    let note = serde_json::from_slice(&bytes);
    note.inspect_err(
        |error| tracing::warn!(path = %path.display(), %error, "unreadable note of a certificate"),
    )
    .ok()
}
