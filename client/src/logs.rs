//! What an instance writes to its console, followed across lost connections.
//!
//! [`Logs::open`] asks a coordinator, which relays to the node that has the instance. [`Logs::next`] tells what comes, and
//! goes on by itself from the byte that the caller does not have when the stream breaks. The caller's pace is the node's:
//! what is not read here is not read there.

use bytes::Bytes;
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{self as wire, Frame, LogPiece, Open, Opened, frame};
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::channel::Channel;
use crate::streams::{self, Retry, StreamError};

/// What comes of a console.
#[derive(Debug, Clone, PartialEq)]
pub enum LogsEvent {
    Piece {
        /// Of the first byte, of all that was ever written. Less than before: the console began anew.
        offset: u64,
        data: Bytes,
        /// Bytes before these that were cut off before they were read.
        lost: u64,
    },
    /// The stream broke, and is being opened again.
    Resuming,
}

/// A console that is read.
#[derive(Debug)]
pub struct Logs {
    client: GuestsClient<Channel>,
    /// The header of the first stream.
    open: Open,
    stream: Option<Streaming<Frame>>,
    /// Ends with this value: the server takes its end for that of the reader.
    outgoing: Option<mpsc::UnboundedSender<Frame>>,
    opened: Option<Opened>,
    /// The next byte; absent: none has come.
    at: Option<u64>,
    retry: Retry,
}

impl Logs {
    /// Asks for what `open` says of its instance; its kind is filled in here.
    pub async fn open(channel: Channel, open: Open) -> Result<Self, StreamError> {
        let open = Open { kind: "logs".to_owned(), logs: Some(open.logs.unwrap_or_default()), ..open };
        let client = streams::guests(channel);
        let (stream, outgoing, opened, at) = (None, None, None, None);
        let mut logs = Self { client, open, stream, outgoing, opened, at, retry: Retry::default() };
        logs.connect().await?;
        Ok(logs)
    }

    /// What comes next; none when all was told. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<LogsEvent>, StreamError> {
        loop {
            let Some(stream) = &mut self.stream else {
                self.retry.wait().await;
                if let Err(error) = self.connect().await {
                    self.retry.broke(error)?;
                }
                continue;
            };
            let error = match stream.message().await {
                Ok(Some(Frame { body: Some(frame::Body::Log(piece)) })) => {
                    let LogPiece { data, lost, offset } = piece;
                    self.at = Some(offset.saturating_add(data.len() as u64));
                    return Ok(Some(LogsEvent::Piece { offset, data, lost }));
                }
                Ok(Some(Frame { body: Some(frame::Body::Opened(opened)) })) => {
                    self.retry.is_open();
                    self.opened = Some(opened);
                    continue;
                }
                Ok(Some(Frame { body: Some(frame::Body::Ended(ended)) })) => StreamError::told(&ended),
                // Of a kind that a newer peer knows.
                Ok(Some(Frame { body: None })) => continue,
                Ok(Some(_)) => return Err(StreamError::Unexpected),
                Ok(None) => return Ok(None),
                received @ Err(_) => streams::broken(received),
            };
            (self.stream, self.outgoing) = (None, None);
            self.retry.broke(error)?;
            return Ok(Some(LogsEvent::Resuming));
        }
    }

    async fn connect(&mut self) -> Result<(), StreamError> {
        let (frames, outgoing) = mpsc::unbounded_channel();
        // The other end is here.
        let _ = frames.send(Frame { body: Some(frame::Body::Open(self.header())) });
        self.stream = Some(streams::open(&mut self.client, outgoing).await?);
        self.outgoing = Some(frames);
        Ok(())
    }

    fn header(&self) -> Open {
        let mut open = self.open.clone();
        if let Some(opened) = &self.opened {
            open.tenant_id.clone_from(&opened.tenant_id);
            open.pool_id.clone_from(&opened.pool_id);
            open.instance_id.clone_from(&opened.instance_id);
            open.node_id.clone_from(&opened.node_id);
        }
        if let (Some(at), Some(logs)) = (self.at, &mut open.logs) {
            *logs = wire::Logs { follow: logs.follow, offset: Some(at), ..wire::Logs::default() };
        }
        open
    }
}
