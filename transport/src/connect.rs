//! Opening a connection, and saying in words why it could not be opened.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    #[error("could not open a UDP socket")]
    Socket(#[source] io::Error),
    #[error("{name:?} is not a server name that a certificate could show")]
    ServerName { name: String },
    #[error("the TLS settings do not fit QUIC")]
    Settings(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("timed out after {waited:?}: is a coordinator or agent listening on UDP {address}?")]
    TimedOut { address: SocketAddr, waited: Duration },
    /// Our verifier's finding about the peer.
    #[error("refused the certificate of {address}: {reason}")]
    PeerRefused { address: SocketAddr, reason: String },
    /// The peer's finding about us.
    #[error("the peer refused our certificate: {reason}")]
    RefusedByPeer { address: SocketAddr, reason: String },
    #[error("no common protocol (ALPN): {address} does not speak {wanted}")]
    NoCommonProtocol { address: SocketAddr, wanted: &'static str },
    #[error("{address} refused the connection: it has as many as it allows")]
    Busy { address: SocketAddr },
    #[error("{address} closed the connection: {reason} (code {code})")]
    Closed { address: SocketAddr, code: u64, reason: String },
    #[error("could not connect to {address}: {reason}")]
    Failed { address: SocketAddr, reason: String },
}
