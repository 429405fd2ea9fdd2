//! Sends frames: each in one write, waiting while the peer does not read.

use std::marker::PhantomData;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use quinn::{StoppedError, WriteError};
use tokio::time::timeout;

use super::control::{SessionControl, SessionError, close_code};
use crate::frame::{PREFIX_BYTES, encode_once};
use crate::limits::Limits;

/// Writes frames to a session's stream.
///
/// Not cancel-safe, on purpose: a frame given up half-way leaves a stream that no receiver could read. The session is
/// then over, and every later call says so.
#[derive(Debug)]
pub struct FrameSender<M> {
    stream: quinn::SendStream,
    control: SessionControl,
    max_frame_bytes: usize,
    deadline: Duration,
    /// A frame has been begun and not ended.
    inside_a_frame: bool,
    message: PhantomData<fn(M)>,
}

impl<M: Message> FrameSender<M> {
    pub(super) fn new(stream: quinn::SendStream, control: SessionControl, limits: &Limits) -> Self {
        Self {
            stream,
            control,
            max_frame_bytes: limits.max_frame_bytes,
            deadline: limits.request_timeout,
            inside_a_frame: false,
            message: PhantomData,
        }
    }

    /// Sends one message. Waits while the peer's window is full, at most the request timeout.
    pub async fn send(&mut self, message: &M) -> Result<(), SessionError> {
        self.send_encoded(encode_once(message)).await
    }

    /// Sends what [`encode_once`] made; the bytes are shared, not copied.
    pub async fn send_encoded(&mut self, frame: Bytes) -> Result<(), SessionError> {
        let claimed = frame.len().saturating_sub(PREFIX_BYTES);
        if claimed > self.max_frame_bytes {
            return Err(SessionError::FrameTooLarge { claimed, limit: self.max_frame_bytes });
        }
        if self.inside_a_frame {
            return Err(SessionError::Interrupted);
        }
        self.inside_a_frame = true;
        match timeout(self.deadline, self.stream.write_chunk(frame)).await {
            Ok(Ok(())) => {
                self.inside_a_frame = false;
                Ok(())
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_) => {
                self.control.close(close_code::TOO_SLOW, "the peer does not read");
                Err(SessionError::SlowFrame { waited: self.deadline })
            }
        }
    }

    /// Says that nothing more will be sent, and waits until the peer has it all.
    pub async fn finish(&mut self) -> Result<(), SessionError> {
        // An error means that the stream is finished or reset already; `stopped` then says which.
        self.stream.finish().ok();
        match timeout(self.deadline, self.stream.stopped()).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(code))) => Err(SessionError::Reset { code: code.into_inner() }),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(SessionError::SlowFrame { waited: self.deadline }),
        }
    }
}

impl From<StoppedError> for SessionError {
    fn from(error: StoppedError) -> Self {
        match error {
            StoppedError::ConnectionLost(error) => error.into(),
            other @ StoppedError::ZeroRttRejected => Self::Lost(other.to_string()),
        }
    }
}

impl From<WriteError> for SessionError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Stopped(code) => Self::Reset { code: code.into_inner() },
            WriteError::ConnectionLost(error) => error.into(),
            WriteError::ClosedStream => Self::ClosedHere,
            other @ WriteError::ZeroRttRejected => Self::Lost(other.to_string()),
        }
    }
}
