//! Receives frames, holding no more memory than has arrived.
//!
//! A length that a peer claims reserves nothing. A frame that came in one piece is decoded from the packet itself; only
//! a frame in several pieces is gathered, and its buffer is given back with it. An idle receiver holds no buffer at all.
//! The first frame may be short only, and every frame is measured before it is decoded: see `mvm_proto::wire::frames`.

use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use mvm_proto::wire::frames::{Frame, MAX_FIRST_FRAME_BYTES, decode_frame};
use quinn::ReadError;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::control::{SessionControl, SessionError, close_code};
use crate::frame::PREFIX_BYTES;
use crate::limits::Limits;

/// Bytes asked of the stream at once.
const READ_BYTES: usize = 64 * 1024;

/// How fast a peer is read. One that sends more waits: its window stays full. An agent sends some KiB a second; a list
/// of instances or the acks of a thousand documents fit into the burst.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    pub bytes_per_second: u32,
    pub burst_bytes: u32,
}

/// What a frame costs of the pace beside its bytes: small frames take processor time too.
const FRAME_COST_BYTES: usize = 2048;

/// Reads frames from a session's stream.
#[derive(Debug)]
pub struct FrameReceiver<M> {
    stream: quinn::RecvStream,
    control: SessionControl,
    frames: Frames,
    /// The limit of every frame but the first.
    max_frame_bytes: usize,
    deadline: Duration,
    budget: Option<Budget>,
    silence: Option<Duration>,
    /// When the frame that is being received, or the silence since the last one, began.
    since: Instant,
    message: PhantomData<fn() -> M>,
}

impl<M: Frame> FrameReceiver<M> {
    pub(super) fn new(stream: quinn::RecvStream, control: SessionControl, limits: &Limits) -> Self {
        Self {
            stream,
            control,
            frames: Frames::new(limits.max_frame_bytes.min(MAX_FIRST_FRAME_BYTES)),
            max_frame_bytes: limits.max_frame_bytes,
            deadline: limits.request_timeout,
            budget: None,
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

    /// Reads the peer no faster than this from here on; at first there is no such bound.
    pub fn set_pace(&mut self, pace: Pace) {
        self.budget = Some(Budget::new(pace, Instant::now()));
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
                self.frames.limit = self.max_frame_bytes;
                self.spend(FRAME_COST_BYTES);
                return decode_frame(payload).map(Some).map_err(SessionError::Malformed);
            }
            if let Some(until) = self.budget.as_ref().and_then(Budget::spent_until) {
                sleep_until(until).await;
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
                    self.spend(chunk.bytes.len());
                    self.frames.arrived(chunk.bytes);
                }
                None if inside => return Err(SessionError::Truncated),
                None => return Ok(None),
            }
        }
    }

    fn spend(&mut self, bytes: usize) {
        if let Some(budget) = &mut self.budget {
            budget.spend(bytes, Instant::now());
        }
    }
}

/// Bytes that may be read before the pace has to be waited for.
#[derive(Debug)]
struct Budget {
    pace: Pace,
    /// Below zero: read ahead of the pace.
    left: f64,
    at: Instant,
}

impl Budget {
    fn new(pace: Pace, now: Instant) -> Self {
        Self { pace, left: pace.burst_bytes.into(), at: now }
    }

    fn spend(&mut self, bytes: usize, now: Instant) {
        let gained =
            now.saturating_duration_since(self.at).as_secs_f64() * f64::from(self.pace.bytes_per_second);
        let spent = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.left = (self.left + gained).min(self.pace.burst_bytes.into()) - f64::from(spent);
        self.at = now;
    }

    /// When it is no longer overdrawn; `None` when it is not.
    fn spent_until(&self) -> Option<Instant> {
        let seconds = -self.left / f64::from(self.pace.bytes_per_second.max(1));
        (seconds > 0.0).then(|| self.at + Duration::from_secs_f64(seconds))
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
pub(crate) struct Frames {
    limit: usize,
    /// What arrived last and is not yet cut.
    chunk: Bytes,
    /// The beginning of a frame whose end has not arrived.
    partial: BytesMut,
}

impl Frames {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, chunk: Bytes::new(), partial: BytesMut::new() }
    }

    /// Takes a chunk; to be called only when [`Frames::next`] gave `None`.
    pub(crate) fn arrived(&mut self, chunk: Bytes) {
        self.chunk = chunk;
    }

    /// Whether a frame has begun and not ended.
    pub(crate) fn inside(&self) -> bool {
        !self.partial.is_empty() || !self.chunk.is_empty()
    }

    /// The next whole frame without its prefix, or `None` when more must arrive first.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, SessionError> {
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
    use prost::Message as _;

    fn goodbye(length: usize) -> Bytes {
        crate::frame::encode_once(&Goodbye { reason: "x".repeat(length), redial: true })
    }

    fn cut(pieces: &[Bytes], limit: usize) -> Result<Vec<usize>, SessionError> {
        let mut frames = Frames::new(limit);
        let mut lengths = Vec::new();
        for piece in pieces {
            frames.arrived(piece.clone());
            while let Some(payload) = frames.next()? {
                lengths.push(Goodbye::decode(payload).expect("a goodbye").reason.len());
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
    fn a_pace_lets_a_burst_through_and_then_so_many_bytes_a_second() {
        let begun = Instant::now();
        let mut budget = Budget::new(Pace { bytes_per_second: 1000, burst_bytes: 5000 }, begun);
        budget.spend(5000, begun);
        assert_eq!(budget.spent_until(), None);
        budget.spend(2000, begun);
        assert_eq!(budget.spent_until(), Some(begun + Duration::from_secs(2)));
        budget.spend(0, begun + Duration::from_secs(2));
        assert_eq!(budget.spent_until(), None);
        // However long it was quiet, no more than a burst is saved up.
        budget.spend(6000, begun + Duration::from_secs(3600));
        assert_eq!(budget.spent_until(), Some(begun + Duration::from_secs(3601)));
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
