//! Writes a session into a guest whose work has not begun.

use mvm_proto::guest::{CHUNK_BYTES as PIECE_BYTES, SetEntry};

use super::PersistError;
use super::blob_store::BlobStore;
use super::guest_files::GuestFiles;
use super::index::{Entry, Index, Kind, kind_of};
use super::session_store::SessionStore;
use crate::crash;

/// Makes `root` in the guest what the index says. Links come last, so that no file is written through one.
pub(crate) async fn bring_back<S: BlobStore, F: GuestFiles>(
    store: &SessionStore<S>,
    slot: u32,
    index: &Index,
    files: &F,
    root: &str,
) -> Result<(), PersistError> {
    let of_kind = |kind| index.entries.iter().filter(move |entry| kind_of(entry.mode) == Some(kind));
    for entry in of_kind(Kind::Folder) {
        files.set_entry(look(root, entry)).await?;
    }
    for entry in of_kind(Kind::File) {
        let path = absolute(root, entry);
        let (mut offset, mut left) = (0, entry.size);
        for digest in &entry.chunks {
            let chunk = store.chunk(slot, digest).await?;
            for piece in chunk.chunks(PIECE_BYTES) {
                left = left.checked_sub(piece.len() as u64).ok_or_else(|| wrong_length(entry))?;
                files.write(&path, offset, piece, left == 0).await?;
                offset += piece.len() as u64;
            }
        }
        if left > 0 {
            return Err(wrong_length(entry));
        }
        if entry.size == 0 {
            files.write(&path, 0, &[], true).await?;
        }
        files.set_entry(look(root, entry)).await?;
        crash::point("persist.brought");
    }
    for entry in of_kind(Kind::Link) {
        files.set_entry(look(root, entry)).await?;
    }
    // What was put into a folder changed its time.
    for entry in of_kind(Kind::Folder).collect::<Vec<_>>().into_iter().rev() {
        files.set_entry(look(root, entry)).await?;
    }
    Ok(())
}

fn wrong_length(entry: &Entry) -> PersistError {
    PersistError::Damaged(format!("{:?} has another length than its chunks", entry.path))
}

fn absolute(root: &str, entry: &Entry) -> String {
    if entry.path.is_empty() { root.to_owned() } else { format!("{root}/{}", entry.path) }
}

fn look(root: &str, entry: &Entry) -> SetEntry {
    SetEntry {
        path: absolute(root, entry),
        mode: entry.mode,
        target: entry.target.clone(),
        uid: entry.uid,
        gid: entry.gid,
        modified_ms: entry.modified_ms,
    }
}
