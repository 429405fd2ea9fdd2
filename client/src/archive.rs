//! Sleeping instances as archives, to and from a node through its coordinator.
//!
//! Neither direction keeps more than a few pieces: a reader that is slow slows down the node that writes.

use crate::channel::Channel;
use bytes::Bytes;
use mvm_proto::Problem;
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{Done, Ended, Export, Frame, Import, Open, Piece, Release, frame};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::error::CallError;

/// Of an archive in one frame: a quarter of what a frame may have.
pub const PIECE_BYTES: usize = 32 * 1024;
/// Pieces that wait to be sent.
const WAITING_PIECES: usize = 4;

/// Why an archive was not exported or imported.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error(transparent)]
    Call(#[from] CallError),
    /// The coordinator or the node ended the stream.
    #[error("{0}")]
    Ended(Problem),
    #[error("the archive broke off")]
    BrokeOff,
}

impl From<tonic::Status> for ArchiveError {
    fn from(status: tonic::Status) -> Self {
        Self::Call(status.into())
    }
}

impl ArchiveError {
    /// What the server says against it.
    #[must_use]
    pub fn problem(&self) -> Option<Problem> {
        match self {
            Self::Call(error) => error.problem(),
            Self::Ended(problem) => Some(problem.clone()),
            Self::BrokeOff => None,
        }
    }
}

/// An archive as it comes.
#[derive(Debug)]
pub struct Exported {
    frames: Streaming<Frame>,
    /// Without it the call's own side would be over.
    _caller: mpsc::Sender<Frame>,
}

impl Exported {
    /// The next piece; none after the last one of a whole archive.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ArchiveError> {
        loop {
            match self.frames.message().await?.and_then(|frame| frame.body) {
                Some(frame::Body::Piece(Piece { last: true, data })) if data.is_empty() => return Ok(None),
                Some(frame::Body::Piece(Piece { data, .. })) => return Ok(Some(data)),
                Some(frame::Body::Opened(_)) => {}
                Some(frame::Body::Ended(ended)) => return Err(ended_with(&ended)),
                _ => return Err(ArchiveError::BrokeOff),
            }
        }
    }
}

/// An archive as it is sent.
#[derive(Debug)]
pub struct Importing {
    frames: Streaming<Frame>,
    caller: mpsc::Sender<Frame>,
}

impl Importing {
    /// Sends some bytes of the archive; waits for as long as the node does not take them. `false`: it takes no more, and
    /// [`Importing::finish`] says why.
    pub async fn send(&mut self, mut data: Bytes) -> bool {
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(PIECE_BYTES));
            if self.caller.send(piece_of(piece, false)).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Says that the archive is whole, and waits for what became of it.
    pub async fn finish(mut self) -> Result<Done, ArchiveError> {
        let _ = self.caller.send(piece_of(Bytes::new(), true)).await;
        done(&mut self.frames).await
    }
}

/// Begins to export the sleeping instance that `open` names.
pub async fn export(channel: Channel, open: Open) -> Result<Exported, ArchiveError> {
    let open = Open { kind: "export".to_owned(), export: Some(Export::default()), ..open };
    let (frames, caller) = begin(channel, open).await?;
    Ok(Exported { frames, _caller: caller })
}

/// Begins to import an archive on the node that `open` names.
pub async fn import(channel: Channel, open: Open, override_seconds: u64) -> Result<Importing, ArchiveError> {
    let import = Import { override_seconds, ..Import::default() };
    let open = Open { kind: "import".to_owned(), import: Some(import), ..open };
    let (frames, caller) = begin(channel, open).await?;
    Ok(Importing { frames, caller })
}

/// Removes an instance that was exported with this snapshot, unless it changed since.
pub async fn release(channel: Channel, open: Open, snapshot: String) -> Result<Done, ArchiveError> {
    let open = Open { kind: "release".to_owned(), release: Some(Release { snapshot }), ..open };
    let (mut frames, _caller) = begin(channel, open).await?;
    done(&mut frames).await
}

async fn begin(
    channel: Channel,
    open: Open,
) -> Result<(Streaming<Frame>, mpsc::Sender<Frame>), ArchiveError> {
    let mut client = GuestsClient::new(channel)
        .max_decoding_message_size(MAX_TUNNEL_FRAME_BYTES)
        .max_encoding_message_size(MAX_TUNNEL_FRAME_BYTES);
    let (caller, frames) = mpsc::channel(WAITING_PIECES);
    // There is room for the first.
    let _ = caller.send(Frame { body: Some(frame::Body::Open(open)) }).await;
    let answers = client.open(ReceiverStream::new(frames)).await?;
    Ok((answers.into_inner(), caller))
}

async fn done(frames: &mut Streaming<Frame>) -> Result<Done, ArchiveError> {
    match frames.message().await?.and_then(|frame| frame.body) {
        Some(frame::Body::Done(done)) => Ok(done),
        Some(frame::Body::Ended(ended)) => Err(ended_with(&ended)),
        _ => Err(ArchiveError::BrokeOff),
    }
}

fn ended_with(ended: &Ended) -> ArchiveError {
    serde_json::from_slice(&ended.problem).map_or(ArchiveError::BrokeOff, ArchiveError::Ended)
}

fn piece_of(data: Bytes, last: bool) -> Frame {
    Frame { body: Some(frame::Body::Piece(Piece { data, last })) }
}
