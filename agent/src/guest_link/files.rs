//! Files in a guest. Large ones go in pieces, each asked for when the one before it arrived.

use mvm_proto::InstanceId;
use mvm_proto::guest::{CHUNK_BYTES, Entry, ListDirectory, ReadFile, SetEntry, WriteFile, host_frame};

use super::call::Event;
use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// How much of a file is asked for at once.
pub const READ_PIECE_BYTES: u64 = 256 * 1024;

/// A directory with more entries than this is not listed: no person reads it, and a guest could make it endless.
const MAX_ENTRIES: usize = 100_000;

impl GuestLinks {
    /// At most [`READ_PIECE_BYTES`] of a file from `offset` on. Less means that the file ends there.
    pub async fn read_piece(
        &self,
        instance: &InstanceId,
        path: &str,
        offset: u64,
        limit: u64,
    ) -> Result<Vec<u8>, LinkError> {
        let limit = if limit == 0 { READ_PIECE_BYTES } else { limit.min(READ_PIECE_BYTES) };
        let body = host_frame::Body::ReadFile(ReadFile { path: path.to_owned(), offset, limit });
        let call = self.begin(instance, "reading a file", 2, body).await?;
        let most = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut data = Vec::new();
        loop {
            let next = tokio::time::timeout(ANSWER_WITHIN, call.next()).await;
            match next.map_err(|_| LinkError::Silent(ANSWER_WITHIN))? {
                Event::Chunk(chunk) => {
                    if data.len() + chunk.data.len() > most {
                        return Err(LinkError::Flooded);
                    }
                    data.extend_from_slice(&chunk.data);
                    if chunk.last {
                        return Ok(data);
                    }
                }
                Event::Again => data.clear(),
                Event::Accepted => {}
                Event::Broken(error) => return Err(error),
                _ => return Err(LinkError::Unexpected),
            }
        }
    }

    /// A whole file, if it has at most `limit` bytes.
    pub async fn read_file(
        &self,
        instance: &InstanceId,
        path: &str,
        limit: u64,
    ) -> Result<Vec<u8>, LinkError> {
        let mut data = Vec::new();
        loop {
            let piece = self.read_piece(instance, path, data.len() as u64, 0).await?;
            data.extend_from_slice(&piece);
            if data.len() as u64 > limit {
                return Err(LinkError::TooLong);
            }
            if (piece.len() as u64) < READ_PIECE_BYTES {
                return Ok(data);
            }
        }
    }

    /// One piece of a file. `offset` 0 begins a new one, `last` puts it in place of the old one.
    pub async fn write_piece(
        &self,
        instance: &InstanceId,
        path: &str,
        offset: u64,
        data: &[u8],
        last: bool,
        mode: u32,
    ) -> Result<(), LinkError> {
        let file = WriteFile { path: path.to_owned(), offset, data: data.to_vec(), last, mode };
        self.ask(instance, "writing a file", ANSWER_WITHIN, host_frame::Body::WriteFile(file)).await
    }

    /// Replaces a file by these bytes, at once.
    pub async fn write_file(
        &self,
        instance: &InstanceId,
        path: &str,
        data: &[u8],
        mode: u32,
    ) -> Result<(), LinkError> {
        let mut offset = 0;
        loop {
            let piece = &data[offset..data.len().min(offset + CHUNK_BYTES)];
            let next = offset + piece.len();
            let last = next == data.len();
            self.write_piece(instance, path, offset as u64, piece, last, mode).await?;
            if last {
                return Ok(());
            }
            offset = next;
        }
    }

    /// Makes a folder or a link, or gives a file that is there its owner, mode and time.
    pub async fn set_entry(&self, instance: &InstanceId, entry: SetEntry) -> Result<(), LinkError> {
        let body = host_frame::Body::SetEntry(entry);
        self.ask_since(3, instance, "bringing back a session", ANSWER_WITHIN, body).await
    }

    pub async fn list_directory(&self, instance: &InstanceId, path: &str) -> Result<Vec<Entry>, LinkError> {
        self.list(instance, "listing a directory", 2, path).await
    }

    /// The same with owners, links' targets, and times that no program in the guest can set.
    pub async fn list_whole(&self, instance: &InstanceId, path: &str) -> Result<Vec<Entry>, LinkError> {
        self.list(instance, "copying a session out", 3, path).await
    }

    async fn list(
        &self,
        instance: &InstanceId,
        what: &'static str,
        needs: u32,
        path: &str,
    ) -> Result<Vec<Entry>, LinkError> {
        let body = host_frame::Body::ListDirectory(ListDirectory { path: path.to_owned() });
        let call = self.begin(instance, what, needs, body).await?;
        let mut entries = Vec::new();
        loop {
            let next = tokio::time::timeout(ANSWER_WITHIN, call.next()).await;
            match next.map_err(|_| LinkError::Silent(ANSWER_WITHIN))? {
                Event::Directory(directory) => {
                    if entries.len() + directory.entries.len() > MAX_ENTRIES {
                        return Err(LinkError::Flooded);
                    }
                    entries.extend(directory.entries);
                    if directory.last {
                        return Ok(entries);
                    }
                }
                Event::Again => entries.clear(),
                Event::Accepted => {}
                Event::Broken(error) => return Err(error),
                _ => return Err(LinkError::Unexpected),
            }
        }
    }
}
