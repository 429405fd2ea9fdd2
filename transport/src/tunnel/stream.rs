//! One stream of a tunnel: frames both ways, and its end.

use std::marker::PhantomData;

use bytes::Bytes;
use mvm_proto::wire::frames::{Frame, MAX_TUNNEL_FRAME_BYTES, decode_frame};
use prost::Message;

use crate::frame::{PREFIX_BYTES, encode_once};
use crate::session::{Frames, SessionError};

/// Bytes asked of the stream at once.
const READ_BYTES: usize = 64 * 1024;

/// Why a stream was reset or is no longer read.
pub mod stream_code {
    /// Nothing more to say, or nobody listens any more.
    pub const DONE: u32 = 0;
    /// The peer broke the protocol.
    pub const PROTOCOL: u32 = 4;
    /// The sender went away before it had said all.
    pub const INTERRUPTED: u32 = 9;
}

/// Both halves of a stream. They can live in different tasks.
#[derive(Debug)]
pub struct TunnelStream<M> {
    pub frames_in: TunnelReceiver<M>,
    pub frames_out: TunnelSender<M>,
}

impl<M: Frame> TunnelStream<M> {
    pub(super) fn new((send, recv): (quinn::SendStream, quinn::RecvStream)) -> Self {
        let frames_in = TunnelReceiver {
            stream: recv,
            frames: Frames::new(MAX_TUNNEL_FRAME_BYTES),
            message: PhantomData,
        };
        let frames_out =
            TunnelSender { stream: send, inside_a_frame: false, is_finished: false, message: PhantomData };
        Self { frames_in, frames_out }
    }
}

/// Writes frames to a stream. Dropped, it resets the stream unless it was finished: the other side never takes a stream
/// that broke off for one that ended.
#[derive(Debug)]
pub struct TunnelSender<M> {
    stream: quinn::SendStream,
    /// A frame has been begun and not ended.
    inside_a_frame: bool,
    is_finished: bool,
    message: PhantomData<fn(M)>,
}

impl<M: Message> TunnelSender<M> {
    /// Sends one message; waits for as long as the peer does not read. Not cancel-safe: a frame given up half-way ends
    /// the stream.
    pub async fn send(&mut self, message: &M) -> Result<(), SessionError> {
        self.send_encoded(encode_once(message)).await
    }

    /// Sends what [`encode_once`] made.
    pub async fn send_encoded(&mut self, frame: Bytes) -> Result<(), SessionError> {
        let claimed = frame.len().saturating_sub(PREFIX_BYTES);
        if claimed > MAX_TUNNEL_FRAME_BYTES {
            return Err(SessionError::FrameTooLarge { claimed, limit: MAX_TUNNEL_FRAME_BYTES });
        }
        if self.inside_a_frame {
            return Err(SessionError::Interrupted);
        }
        self.inside_a_frame = true;
        self.stream.write_chunk(frame).await?;
        self.inside_a_frame = false;
        Ok(())
    }

    /// Says that nothing more will be sent, without waiting. What was sent still arrives.
    pub fn finish(&mut self) {
        // An error means that the stream is finished or reset already.
        self.stream.finish().ok();
        self.is_finished = true;
    }

    /// Waits until the peer has all that was sent, or wants no more of it.
    pub async fn delivered(&mut self) -> Result<(), SessionError> {
        Ok(self.stream.stopped().await.map(drop)?)
    }

    /// Waits until the peer wants no more of it, or is gone; before the end of the stream it waits for nothing else.
    pub fn gone(&self) -> impl Future<Output = ()> + Send + use<M> {
        let stopped = self.stream.stopped();
        async move {
            let _ = stopped.await;
        }
    }

    /// Ends the stream at once; what was not delivered is dropped.
    pub fn reset(&mut self, code: u32) {
        // An error means that the stream is finished or reset already.
        self.stream.reset(code.into()).ok();
    }
}

impl<M> Drop for TunnelSender<M> {
    fn drop(&mut self) {
        // quinn would finish it. The reset of one that ended already is an error that says nothing new.
        if !self.is_finished {
            self.stream.reset(stream_code::INTERRUPTED.into()).ok();
        }
    }
}

/// Reads frames from a stream.
#[derive(Debug)]
pub struct TunnelReceiver<M> {
    stream: quinn::RecvStream,
    frames: Frames,
    message: PhantomData<fn() -> M>,
}

impl<M: Frame> TunnelReceiver<M> {
    /// The next frame, or `None` when the peer finished its side. Dropping the future loses nothing. After a frame that
    /// breaks a rule the stream is stopped.
    pub async fn recv(&mut self) -> Result<Option<M>, SessionError> {
        let received = self.next().await;
        if let Err(
            SessionError::FrameTooLarge { .. } | SessionError::Malformed(_) | SessionError::Truncated,
        ) = &received
        {
            self.stop(stream_code::PROTOCOL);
        }
        received
    }

    async fn next(&mut self) -> Result<Option<M>, SessionError> {
        loop {
            if let Some(payload) = self.frames.next()? {
                return decode_frame(payload).map(Some).map_err(SessionError::Malformed);
            }
            let inside = self.frames.inside();
            match self.stream.read_chunk(READ_BYTES, true).await? {
                Some(chunk) => self.frames.arrived(chunk.bytes),
                None if inside => return Err(SessionError::Truncated),
                None => return Ok(None),
            }
        }
    }

    /// Tells the peer that nothing more is read.
    pub fn stop(&mut self, code: u32) {
        // An error means that the stream has ended already.
        self.stream.stop(code.into()).ok();
    }
}
