//! Tunnels, ALPN `mvm-tunnel/1`: a QUIC connection for bytes, apart from the node session, so that no document ever waits
//! behind a file or the output of a program.
//!
//! The agent dials ([`dial_tunnel`]), because nodes may be behind NAT; a server hands what it accepted to its
//! [`TunnelHandler`](crate::TunnelHandler). Either side may open bidirectional streams ([`Tunnel::open`]) as far as the
//! other lets it ([`Tunnel::let_open`]). A stream carries length-prefixed protobuf frames of one operation. A writer
//! waits for as long as the reader at the other end does not read: QUIC's flow control is the back-pressure. What breaks
//! a rule ends its stream alone, never the tunnel.

mod stream;

use std::net::SocketAddr;
use std::time::Duration;

use mvm_pki::Identity;
use mvm_proto::Digest;
use mvm_proto::wire::frames::{Frame, MAX_TUNNEL_FRAME_BYTES};

use crate::ALPN_TUNNEL;
use crate::connect::{ConnectError, dial};
use crate::limits::Limits;
use crate::quic;
use crate::session::SessionError;
pub use stream::{TunnelReceiver, TunnelSender, TunnelStream, stream_code};

/// Streams that a coordinator may have open on a tunnel: more than an agent admits, so that the rest learn why they are refused.
pub const MAX_TUNNEL_STREAMS: u32 = 288;
/// Bytes of one stream that may be under way: what a guest sends before its reader has confirmed any.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Of a whole tunnel: as much as all streams have, so that readers that stopped hold up no other stream.
const CONNECTION_WINDOW_BYTES: u32 = MAX_TUNNEL_STREAMS * STREAM_WINDOW_BYTES;
/// Bytes of ours that were not acknowledged. Streams that are not read have sent no more than their windows, which is
/// acknowledged, so that this bounds what is lost on the way alone: 8 MiB fill 100 ms of 640 Mbit/s.
const SEND_WINDOW_BYTES: u64 = 8 * 1024 * 1024;

/// The limits of an endpoint that speaks tunnels: those of sessions with larger windows. The agent may open the stream of
/// its hello, and no other before [`Tunnel::let_open`].
#[must_use]
pub fn tunnel_limits(base: &Limits) -> Limits {
    Limits {
        max_frame_bytes: MAX_TUNNEL_FRAME_BYTES,
        max_streams: 1,
        stream_window: STREAM_WINDOW_BYTES,
        connection_window: CONNECTION_WINDOW_BYTES,
        send_window: SEND_WINDOW_BYTES,
        ..base.clone()
    }
}

/// One end of a tunnel. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tunnel {
    connection: quinn::Connection,
}

impl Tunnel {
    pub(crate) fn new(connection: quinn::Connection) -> Self {
        Self { connection }
    }

    /// Opens a stream. Waits while as many are open as the other side allows; it hears of the stream with the first frame.
    pub async fn open<M: Frame>(&self) -> Result<TunnelStream<M>, SessionError> {
        Ok(TunnelStream::new(self.connection.open_bi().await?))
    }

    /// The next stream that the other side opens. Dropping the future loses none.
    pub async fn accept<M: Frame>(&self) -> Result<TunnelStream<M>, SessionError> {
        Ok(TunnelStream::new(self.connection.accept_bi().await?))
    }

    /// How many streams the other side may have open from now on.
    pub fn let_open(&self, streams: u32) {
        self.connection.set_max_concurrent_bi_streams(streams.into());
    }

    /// Ends the tunnel with all of its streams. `code` is one of [`close_code`](crate::close_code).
    pub fn close(&self, code: u32, reason: &str) {
        self.connection.close(code.into(), reason.as_bytes());
    }

    /// Waits until the tunnel has ended, and says why.
    pub async fn closed(&self) -> SessionError {
        self.connection.closed().await.into()
    }

    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.connection.close_reason().is_some()
    }

    #[must_use]
    pub fn remote_address(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    /// Of the path, as measured.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.connection.rtt()
    }

    /// The fingerprint of the peer's verified certificate: SHA-256 of its DER.
    #[must_use]
    pub fn peer_certificate(&self) -> Option<Digest> {
        quic::certificate_of(&self.connection)
    }
}

/// Dials a tunnel to a coordinator. The other side may open no stream before [`Tunnel::let_open`]. `limits` are those of
/// [`tunnel_limits`].
pub async fn dial_tunnel(
    addr: SocketAddr,
    server_name: &str,
    tls: rustls::ClientConfig,
    limits: &Limits,
) -> Result<(Tunnel, Identity), ConnectError> {
    let dialled = Box::pin(dial(addr, server_name, tls, ALPN_TUNNEL, limits)).await?;
    Ok((Tunnel::new(dialled.connection), dialled.peer))
}
