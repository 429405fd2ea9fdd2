//! Files in a guest. Large ones go in pieces, each asked for when the one before it arrived.

use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::guest::{CHUNK_BYTES, Entry, ListDirectory, ReadFile, SetEntry, WriteFile, host_frame};

use super::call::{Call, Event};
use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// How much of a file is asked for at once.
pub const READ_PIECE_BYTES: u64 = 256 * 1024;

/// A directory with more entries than this is not listed: no person reads it, and a guest could make it endless.
const MAX_ENTRIES: usize = 100_000;

/// The same for what its entries take in memory: room for that many entries with names of 150 bytes.
const MAX_LISTING_BYTES: usize = 24 * 1024 * 1024;

/// The whole of an answer, in however many pieces it comes. A guest that sends each piece just before
/// [`ANSWER_WITHIN`] is over would otherwise take hours for one listing.
const WHOLE_ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// What one entry of a listing takes in memory. Both of its texts are the guest's to choose.
pub(super) fn entry_bytes(entry: &Entry) -> usize {
    size_of::<Entry>() + entry.name.len() + entry.target.len()
}

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
        whole(chunks(&call, limit)).await
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
        whole(entries(&call)).await
    }
}

/// What comes of an answer that is whole within [`WHOLE_ANSWER_WITHIN`].
async fn whole<T>(answer: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
    let within = WHOLE_ANSWER_WITHIN;
    tokio::time::timeout(within, answer).await.unwrap_or(Err(LinkError::Silent(within)))
}

/// The pieces of one answer put together: at most `limit` bytes.
async fn chunks(call: &Call, limit: u64) -> Result<Vec<u8>, LinkError> {
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

/// All entries of one listing.
async fn entries(call: &Call) -> Result<Vec<Entry>, LinkError> {
    let (mut entries, mut bytes) = (Vec::new(), 0);
    loop {
        let next = tokio::time::timeout(ANSWER_WITHIN, call.next()).await;
        match next.map_err(|_| LinkError::Silent(ANSWER_WITHIN))? {
            Event::Directory(directory) => {
                bytes += directory.entries.iter().map(entry_bytes).sum::<usize>();
                if bytes > MAX_LISTING_BYTES || entries.len() + directory.entries.len() > MAX_ENTRIES {
                    return Err(LinkError::Flooded);
                }
                entries.extend(directory.entries);
                if directory.last {
                    return Ok(entries);
                }
            }
            Event::Again => {
                entries.clear();
                bytes = 0;
            }
            Event::Accepted => {}
            Event::Broken(error) => return Err(error),
            _ => return Err(LinkError::Unexpected),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use mvm_proto::guest::{Chunk, Directory, guest_frame};
    use tokio::time::Instant;

    use super::*;
    use crate::guest::fake_guest::links_to;

    fn id() -> InstanceId {
        InstanceId::from_bits(1)
    }

    /// Links to a guest that answers each request with `count` pieces, one at a time, and never with the last one.
    fn endless(count: usize, every: Duration, piece: fn() -> guest_frame::Body) -> GuestLinks {
        let links = links_to(move |_, _| {
            let pieces = futures::stream::iter(0..count).then(move |_| async move {
                tokio::time::sleep(every).await;
                piece()
            });
            pieces.boxed()
        });
        links.open(&id());
        links
    }

    fn listing(entries: usize, name: usize, target: usize) -> guest_frame::Body {
        let entry = Entry { name: "n".repeat(name), target: "t".repeat(target), ..Entry::default() };
        guest_frame::Body::Directory(Directory { entries: vec![entry; entries], last: false })
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_is_bounded_in_bytes_of_names_and_targets() {
        // Far fewer than there may be, and more bytes than all of those would have.
        let long: [fn() -> guest_frame::Body; 3] =
            [|| listing(1, 100_000, 0), || listing(1, 0, 100_000), || listing(10, 5_000, 5_000)];
        for piece in long {
            let links = endless(MAX_LISTING_BYTES / 100_000 + 8, Duration::from_millis(1), piece);
            assert_eq!(links.list_whole(&id(), "/").await, Err(LinkError::Flooded));
        }
        // A frame full of nothing is counted by what it takes here.
        let links = endless(1, Duration::ZERO, || listing(60_000, 0, 0));
        assert_eq!(links.list_whole(&id(), "/").await, Err(LinkError::Flooded));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_never_whole_ends_in_time() {
        let links = endless(1, Duration::ZERO, || listing(1, 1, 1));
        let begun = Instant::now();
        assert_eq!(links.list_whole(&id(), "/").await, Err(LinkError::Silent(ANSWER_WITHIN)));
        assert!(begun.elapsed() <= 2 * ANSWER_WITHIN);
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_that_come_just_in_time_end_in_time_all_the_same() {
        let slow = Duration::from_secs(9);
        let links = endless(1000, slow, || guest_frame::Body::Chunk(Chunk { data: vec![1], last: false }));
        let begun = Instant::now();
        let read = links.read_piece(&id(), "/file", 0, 0).await;
        assert_eq!(read, Err(LinkError::Silent(WHOLE_ANSWER_WITHIN)));
        assert!(begun.elapsed() <= WHOLE_ANSWER_WITHIN + ANSWER_WITHIN, "{:?}", begun.elapsed());
        let links = endless(1000, slow, || listing(1, 1, 1));
        let listed = links.list_whole(&id(), "/").await;
        assert_eq!(listed, Err(LinkError::Silent(WHOLE_ANSWER_WITHIN)));
    }
}
