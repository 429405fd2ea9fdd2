//! h3-quinn's streams with three things added that h3 leaves to its user.
//!
//! h3 gathers a whole frame before it looks at it, so a peer could make this process hold a header section or a settings
//! frame of any length. Here every stream carries a [`FrameGuard`] that stops such a frame at its claimed length. The
//! guard of a request also refuses a header section that HTTP/3 calls malformed and h3 does not (`field_section`). And a
//! stream that is dropped before anything was answered on it is reset instead of ended: an end without a response is a
//! connection error to many clients.
//!
//! Two traps of h3-quinn are closed as well: it panics when asked for a stream's id, or to stop it, during a read.

mod field_section;
mod guard;
mod huffman;

use std::task::{Context, Poll};

use bytes::Bytes;
use h3::error::Code;
use h3::quic::{self, BidiStream as _, ConnectionErrorIncoming, RecvStream as _, SendStream as _};
use h3::quic::{StreamErrorIncoming, StreamId, WriteBuf};

use field_section::Fault;
use guard::FrameGuard;

/// A QUIC connection as h3 wants it.
pub(crate) struct Connection {
    inner: h3_quinn::Connection,
    quic: quinn::Connection,
    max_frame: u64,
}

/// Opens request streams.
pub(crate) struct Opener {
    inner: h3_quinn::OpenStreams,
    max_frame: u64,
}

/// A request stream, both directions.
pub(crate) struct Bidi {
    send: Send,
    recv: Recv,
}

/// The sending direction.
pub(crate) struct Send {
    inner: h3_quinn::SendStream<Bytes>,
    silent: bool,
    /// In the middle of a frame. A stream that is dropped then must not look finished: the peer would take that for a broken
    /// connection, and end all requests on it.
    writing: bool,
}

/// The receiving direction.
pub(crate) struct Recv {
    inner: h3_quinn::RecvStream,
    id: StreamId,
    guard: FrameGuard,
    /// Closed when a header section can't be decoded; a request's only.
    connection: Option<quinn::Connection>,
    /// Its header section was malformed.
    malformed: bool,
    /// A read is under way inside `inner`.
    reading: bool,
}

/// Why a stream is not read on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stopped {
    /// A frame other than body data claims to be longer than allowed.
    #[error("a frame of {claimed} bytes is longer than the limit of {limit}")]
    TooLong { claimed: u64, limit: u64 },
    #[error(transparent)]
    Section(#[from] Fault),
}

impl Connection {
    /// `max_frame` bounds every frame that h3 would gather whole: header sections, settings, unknown ones.
    pub(crate) fn new(connection: quinn::Connection, max_frame: usize) -> Self {
        let inner = h3_quinn::Connection::new(connection.clone());
        Self { inner, quic: connection, max_frame: max_frame as u64 }
    }
}

impl Bidi {
    fn new(inner: h3_quinn::BidiStream<Bytes>, guard: FrameGuard) -> Self {
        let (send, recv) = inner.split();
        Self { send: Send { inner: send, silent: true, writing: false }, recv: Recv::new(recv, guard) }
    }
}

impl Recv {
    fn new(inner: h3_quinn::RecvStream, guard: FrameGuard) -> Self {
        let id = inner.recv_id();
        Self { inner, id, guard, connection: None, malformed: false, reading: false }
    }
}

impl quic::Connection<Bytes> for Connection {
    type RecvStream = Recv;
    type OpenStreams = Opener;

    fn poll_accept_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Recv, ConnectionErrorIncoming>> {
        let max_frame = self.max_frame;
        quic::Connection::<Bytes>::poll_accept_recv(&mut self.inner, cx)
            .map_ok(|recv| Recv::new(recv, FrameGuard::unidirectional(max_frame)))
    }

    fn poll_accept_bidi(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bidi, ConnectionErrorIncoming>> {
        let Self { inner, quic, max_frame } = self;
        quic::Connection::<Bytes>::poll_accept_bidi(inner, cx).map_ok(|bidi| {
            let mut bidi = Bidi::new(bidi, FrameGuard::request(*max_frame));
            bidi.recv.connection = Some(quic.clone());
            bidi
        })
    }

    fn opener(&self) -> Opener {
        Opener { inner: quic::Connection::<Bytes>::opener(&self.inner), max_frame: self.max_frame }
    }
}

macro_rules! open_streams {
    ($type:ty) => {
        impl quic::OpenStreams<Bytes> for $type {
            type BidiStream = Bidi;
            type SendStream = Send;

            fn poll_open_bidi(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bidi, StreamErrorIncoming>> {
                let max_frame = self.max_frame;
                quic::OpenStreams::<Bytes>::poll_open_bidi(&mut self.inner, cx)
                    .map_ok(|bidi| Bidi::new(bidi, FrameGuard::response(max_frame)))
            }

            fn poll_open_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<Send, StreamErrorIncoming>> {
                quic::OpenStreams::<Bytes>::poll_open_send(&mut self.inner, cx).map_ok(|inner| Send {
                    inner,
                    silent: true,
                    writing: false,
                })
            }

            fn close(&mut self, code: Code, reason: &[u8]) {
                quic::OpenStreams::<Bytes>::close(&mut self.inner, code, reason);
            }
        }
    };
}

open_streams!(Connection);
open_streams!(Opener);

impl Clone for Opener {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), max_frame: self.max_frame }
    }
}

impl quic::SendStream<Bytes> for Send {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        let ready = self.inner.poll_ready(cx);
        self.writing &= ready.is_pending();
        ready
    }

    fn send_data<T: Into<WriteBuf<Bytes>>>(&mut self, data: T) -> Result<(), StreamErrorIncoming> {
        self.silent = false;
        self.writing = true;
        self.inner.send_data(data)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        self.silent = false;
        self.inner.poll_finish(cx)
    }

    fn reset(&mut self, reset_code: u64) {
        (self.silent, self.writing) = (false, false);
        self.inner.reset(reset_code);
    }

    fn send_id(&self) -> StreamId {
        self.inner.send_id()
    }
}

impl Drop for Send {
    fn drop(&mut self) {
        if self.silent {
            self.inner.reset(Code::H3_REQUEST_INCOMPLETE.value());
        } else if self.writing {
            self.inner.reset(Code::H3_REQUEST_CANCELLED.value());
        }
    }
}

impl quic::RecvStream for Recv {
    type Buf = Bytes;

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamErrorIncoming>> {
        let polled = self.inner.poll_data(cx);
        self.reading = polled.is_pending();
        let Poll::Ready(Ok(Some(data))) = &polled else { return polled };
        let Err(stopped) = self.guard.pass(data) else { return polled };
        match &stopped {
            // Without its control stream a connection is of no use; a request is one of many.
            Stopped::TooLong { .. } if !self.id.is_request() => {
                let connection_error = ConnectionErrorIncoming::InternalError(stopped.to_string());
                return Poll::Ready(Err(StreamErrorIncoming::ConnectionErrorIncoming { connection_error }));
            }
            Stopped::TooLong { .. } => self.inner.stop_sending(Code::H3_EXCESSIVE_LOAD.value()),
            Stopped::Section(Fault::Malformed(_)) => {
                self.malformed = true;
                self.inner.stop_sending(Code::H3_MESSAGE_ERROR.value());
            }
            Stopped::Section(Fault::Unreadable) => {
                if let Some(connection) = &self.connection {
                    let code = quinn::VarInt::from_u64(Code::QPACK_DECOMPRESSION_FAILED.value());
                    connection.close(code.unwrap_or_default(), stopped.to_string().as_bytes());
                }
            }
        }
        Poll::Ready(Err(StreamErrorIncoming::Unknown(Box::new(stopped))))
    }

    fn stop_sending(&mut self, error_code: u64) {
        // During a read the stream can't be reached; dropping it stops it all the same.
        if !self.reading {
            self.inner.stop_sending(error_code);
        }
    }

    fn recv_id(&self) -> StreamId {
        self.id
    }
}

impl quic::SendStream<Bytes> for Bidi {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        self.send.poll_ready(cx)
    }

    fn send_data<T: Into<WriteBuf<Bytes>>>(&mut self, data: T) -> Result<(), StreamErrorIncoming> {
        self.send.send_data(data)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        self.send.poll_finish(cx)
    }

    fn reset(&mut self, reset_code: u64) {
        self.send.reset(reset_code);
    }

    fn send_id(&self) -> StreamId {
        self.send.send_id()
    }
}

impl quic::RecvStream for Bidi {
    type Buf = Bytes;

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamErrorIncoming>> {
        let polled = self.recv.poll_data(cx);
        if self.recv.malformed {
            self.send.reset(Code::H3_MESSAGE_ERROR.value());
        }
        polled
    }

    fn stop_sending(&mut self, error_code: u64) {
        self.recv.stop_sending(error_code);
    }

    fn recv_id(&self) -> StreamId {
        self.recv.recv_id()
    }
}

impl quic::BidiStream<Bytes> for Bidi {
    type SendStream = Send;
    type RecvStream = Recv;

    fn split(self) -> (Send, Recv) {
        (self.send, self.recv)
    }
}
