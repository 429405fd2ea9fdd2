//! Receives frames, holding no more memory than has arrived.
//!
//! A length that a peer claims reserves nothing. A frame that came in one piece is decoded from the packet itself; only
//! a frame in several pieces is gathered, and its buffer is given back with it. An idle receiver holds no buffer at all.

use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use quinn::ReadError;
use tokio::time::{Instant, timeout_at};

use super::control::{SessionControl, SessionError, close_code};
use crate::frame::PREFIX_BYTES;
use crate::limits::Limits;

/// Bytes asked of the stream at once.
const READ_BYTES: usize = 64 * 1024;

/// Reads frames from a session's stream.
#[derive(Debug)]
pub struct FrameReceiver<M> {
    stream: quinn::RecvStream,
    control: SessionControl,
    frames: Frames,
    deadline: Duration,
    silence: Option<Duration>,
    /// When the frame that is being received, or the silence since the last one, began.
    since: Instant,
    message: PhantomData<fn() -> M>,
}

impl<M: Message + Default> FrameReceiver<M> {
    pub(super) fn new(stream: quinn::RecvStream, control: SessionControl, limits: &Limits) -> Self {
        Self {
            stream,
            control,
            frames: Frames::new(limits.max_frame_bytes),
            deadline: limits.request_timeout,
            silence: None,
            since: Instant::now(),
            message: PhantomData,
        }
    }

    /// How long the peer may stay silent between frames; `None`, as at first, leaves it to the connection's idle
    /// timeout, which keep-alives without any frame satisfy too.
    pub fn set_silence(&mut self, silence: Option<Duration>) {
        self.silence = silence;
        self.since = Instant::now();
    }

    /// The next frame, or `None` when the peer finished its side. Cancel-safe: dropping the future loses nothing.
    ///
    /// After an error that is the peer's fault the session is closed, and every later call fails.
    pub async fn recv(&mut self) -> Result<Option<M>, SessionError> {
        let received = self.next().await;
        if let Err(error) = &received {
            match error {
                SessionError::FrameTooLarge { .. } | SessionError::Malformed(_) | SessionError::Truncated => {
                    self.control.close(close_code::PROTOCOL, &error.to_string());
                }
                SessionError::SlowFrame { .. } | SessionError::Silent { .. } => {
                    self.control.close(close_code::TOO_SLOW, &error.to_string());
                }
                _ => {}
            }
        }
        received
    }

    async fn next(&mut self) -> Result<Option<M>, SessionError> {
        loop {
            if let Some(payload) = self.frames.next()? {
                self.since = Instant::now();
                return M::decode(payload).map(Some).map_err(SessionError::Malformed);
            }
            let inside = self.frames.inside();
            let wait = if inside { Some(self.deadline) } else { self.silence };
            let read = self.stream.read_chunk(READ_BYTES, true);
            let chunk = match wait {
                None => read.await,
                Some(wait) => match timeout_at(self.since + wait, read).await {
                    Ok(chunk) => chunk,
                    Err(_) if inside => return Err(SessionError::SlowFrame { waited: wait }),
                    Err(_) => return Err(SessionError::Silent { waited: wait }),
                },
            };
            match chunk? {
                Some(chunk) => {
                    if !inside {
                        self.since = Instant::now();
                    }
                    self.frames.arrived(chunk.bytes);
                }
                None if inside => return Err(SessionError::Truncated),
                None => return Ok(None),
            }
        }
    }
}

impl From<ReadError> for SessionError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(code) => Self::Reset { code: code.into_inner() },
            ReadError::ConnectionLost(error) => error.into(),
            ReadError::ClosedStream => Self::ClosedHere,
            other => Self::Lost(other.to_string()),
        }
    }
}

/// Cuts a stream of chunks into frames.
#[derive(Debug)]
struct Frames {
    limit: usize,
    /// What arrived last and is not yet cut.
    chunk: Bytes,
    /// The beginning of a frame whose end has not arrived.
    partial: BytesMut,
}

impl Frames {
    fn new(limit: usize) -> Self {
        Self { limit, chunk: Bytes::new(), partial: BytesMut::new() }
    }

    /// Takes a chunk; to be called only when [`Frames::next`] gave `None`.
    fn arrived(&mut self, chunk: Bytes) {
        self.chunk = chunk;
    }

    /// Whether a frame has begun and not ended.
    fn inside(&self) -> bool {
        !self.partial.is_empty() || !self.chunk.is_empty()
    }

    /// The next whole frame without its prefix, or `None` when more must arrive first.
    fn next(&mut self) -> Result<Option<Bytes>, SessionError> {
        if self.partial.is_empty() {
            if let Some(length) = self.length_in(&self.chunk)?
                && self.chunk.len() >= PREFIX_BYTES + length
            {
                self.chunk.advance(PREFIX_BYTES);
                let payload = self.chunk.split_to(length);
                if self.chunk.is_empty() {
                    self.chunk = Bytes::new();
                }
                return Ok(Some(payload));
            }
            // Copied, so that a few bytes do not hold on to a whole packet's buffer.
            self.gather(usize::MAX);
            return Ok(None);
        }
        self.gather(PREFIX_BYTES.saturating_sub(self.partial.len()));
        let Some(length) = self.length_in(&self.partial)? else { return Ok(None) };
        self.gather(PREFIX_BYTES + length - self.partial.len());
        if self.partial.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        let mut frame = std::mem::take(&mut self.partial);
        frame.advance(PREFIX_BYTES);
        Ok(Some(frame.freeze()))
    }

    /// Moves up to `most` bytes from the chunk to the partial frame.
    fn gather(&mut self, most: usize) {
        let piece = self.chunk.split_to(most.min(self.chunk.len()));
        self.partial.extend_from_slice(&piece);
        if self.chunk.is_empty() {
            self.chunk = Bytes::new();
        }
    }

    /// The length that the prefix claims, once the prefix is whole.
    fn length_in(&self, bytes: &[u8]) -> Result<Option<usize>, SessionError> {
        let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let claimed = u32::from_be_bytes(*prefix) as usize;
        if claimed > self.limit {
            return Err(SessionError::FrameTooLarge { claimed, limit: self.limit });
        }
        Ok(Some(claimed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mvm_proto::wire::session::v1::Goodbye;

    fn goodbye(length: usize) -> Bytes {
        crate::frame::encode_once(&Goodbye { reason: "x".repeat(length), redial: true })
    }

    fn cut(pieces: &[Bytes], limit: usize) -> Result<Vec<usize>, SessionError> {
        let mut frames = Frames::new(limit);
        let mut lengths = Vec::new();
        for piece in pieces {
            frames.arrived(piece.clone());
            while let Some(payload) = frames.next()? {
                lengths.push(Goodbye::decode(payload).map_err(SessionError::Malformed)?.reason.len());
            }
        }
        assert!(!frames.inside(), "nothing is left over");
        Ok(lengths)
    }

    #[test]
    fn frames_are_the_same_however_the_bytes_are_cut() {
        let lengths = [0, 1, 200, 5000, 3];
        let stream: Vec<u8> = lengths.iter().flat_map(|length| goodbye(*length)).collect();
        for size in [1, 2, 3, 4, 5, 7, 100, 1200, stream.len()] {
            let pieces: Vec<_> = stream.chunks(size).map(Bytes::copy_from_slice).collect();
            assert_eq!(cut(&pieces, 6000).expect("frames"), lengths, "in pieces of {size}");
        }
    }

    #[test]
    fn a_claim_above_the_limit_is_refused_from_its_prefix_alone() {
        let prefix = Bytes::from_static(&[0, 0, 4, 1]);
        assert!(matches!(
            cut(&[prefix], 1024),
            Err(SessionError::FrameTooLarge { claimed: 1025, limit: 1024 })
        ));
    }

    #[test]
    fn a_claimed_length_reserves_no_memory() {
        let mut frames = Frames::new(usize::MAX);
        frames.arrived(Bytes::from_static(&[0x7f, 0xff, 0xff, 0xff, 1, 2, 3]));
        assert!(frames.next().expect("no error").is_none());
        assert!(frames.partial.capacity() < 1024);
    }

    #[test]
    fn a_large_frame_leaves_no_buffer_behind() {
        let mut frames = Frames::new(usize::MAX);
        let frame = goodbye(1 << 20);
        for piece in frame.chunks(1200) {
            frames.arrived(Bytes::copy_from_slice(piece));
            let _payload = frames.next().expect("a frame");
        }
        assert_eq!((frames.partial.capacity(), frames.chunk.len()), (0, 0));
    }
}
