//! Ending a session at once, from anywhere, and saying why one ended.

use std::net::SocketAddr;
use std::time::Duration;

use mvm_proto::Digest;
use mvm_proto::wire::measure::DecodeError;
use quinn::ConnectionError;

use crate::connect::{refused_by_peer, text_of};
use crate::quic;

/// Why a session was closed, as both sides may say it on the wire.
pub mod close_code {
    /// Nothing more to say.
    pub const DONE: u32 = 0;
    /// A newer session of the same node took its place.
    pub const REPLACED: u32 = 1;
    /// The node was removed from the cluster: redialling is pointless.
    pub const REMOVED: u32 = 2;
    /// The process is going away; dial again.
    pub const SHUTDOWN: u32 = 3;
    /// The peer broke the protocol.
    pub const PROTOCOL: u32 = 4;
    /// The peer was too slow, or silent.
    pub const TOO_SLOW: u32 = 5;
    /// A limit on connections was reached; dial again later.
    pub const OVERLOADED: u32 = 6;
    /// The protocol is not spoken on this endpoint, or not with this peer.
    pub const NOT_HERE: u32 = 7;
    /// Another machine has a session with the same certificate.
    pub const SECOND_MACHINE: u32 = 8;
}

/// Why a session can't go on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The peer closed it, with a code of [`close_code`].
    #[error("the peer closed the session: {reason} (code {code})")]
    Closed { code: u64, reason: String },
    #[error("this side closed the session")]
    ClosedHere,
    #[error("the peer sent nothing within the idle timeout")]
    TimedOut,
    /// Another process answers at the peer's address, with the peer's key: dial again.
    #[error("reset by peer: it has restarted and does not know this session")]
    Forgotten,
    #[error("lost the connection: {0}")]
    Lost(String),
    #[error("the peer reset the stream (code {code})")]
    Reset { code: u64 },
    #[error("a frame of {claimed} bytes is longer than the limit of {limit}")]
    FrameTooLarge { claimed: usize, limit: usize },
    /// It is not protobuf, or more than its kind may be.
    #[error("a frame was not decoded: {0}")]
    Malformed(DecodeError),
    #[error("the stream ended inside a frame")]
    Truncated,
    #[error("a frame was not complete {waited:?} after it began")]
    SlowFrame { waited: Duration },
    #[error("no frame for {waited:?}")]
    Silent { waited: Duration },
    #[error("an earlier frame was sent only in part")]
    Interrupted,
}

impl From<ConnectionError> for SessionError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::ApplicationClosed(close) => {
                Self::Closed { code: close.error_code.into_inner(), reason: text_of(&close.reason) }
            }
            ConnectionError::ConnectionClosed(close) => match refused_by_peer(&close) {
                Some((reason, _)) => Self::Lost(format!("the peer refused our certificate: {reason}")),
                None => Self::Lost(text_of(close.to_string().as_bytes())),
            },
            ConnectionError::LocallyClosed => Self::ClosedHere,
            ConnectionError::TimedOut => Self::TimedOut,
            ConnectionError::Reset => Self::Forgotten,
            other => Self::Lost(other.to_string()),
        }
    }
}

/// A handle on a session's connection. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SessionControl {
    pub(crate) connection: quinn::Connection,
}

impl SessionControl {
    /// Ends the session now: both sides' senders and receivers fail at once. `code` is one of [`close_code`].
    pub fn close(&self, code: u32, reason: &str) {
        self.connection.close(code.into(), reason.as_bytes());
    }

    /// Waits until the session has ended, and says why.
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

    /// The fingerprint of the peer's verified certificate: SHA-256 of its DER.
    #[must_use]
    pub fn peer_certificate(&self) -> Option<Digest> {
        quic::certificate_of(&self.connection)
    }
}
