//! Opening a connection, and saying in words why it could not be opened.
//!
//! A TLS 1.3 client has finished before the server has judged its certificate. So that a refusal is an error of the
//! dialling and not of the first request, [`dial`] waits for the server's confirmation too.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use mvm_pki::refusal::{alert_in_words, refusal_in_text};
use mvm_pki::{Identity, Refusal};
use quinn::ConnectionError;
use tokio::time::{Instant, sleep, timeout_at};

use crate::limits::Limits;
use crate::quic;
use crate::session::close_code;

/// Crypto errors on the wire are this plus the TLS alert's number.
const CRYPTO_ERROR_BASE: u64 = 0x100;
/// The alert of a server that speaks none of the offered protocols.
const ALERT_NO_APPLICATION_PROTOCOL: u8 = 120;
/// The QUIC code of a server that wants no more connections.
const CONNECTION_REFUSED: u64 = 0x2;
/// How often to look for the server's confirmation, which quinn counts but does not announce.
const CONFIRM_EVERY: Duration = Duration::from_millis(1);

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    #[error("could not open a UDP socket")]
    Socket(#[source] io::Error),
    #[error("{name:?} is not a server name that a certificate could show")]
    ServerName { name: String },
    #[error("the TLS settings are not valid for QUIC")]
    Settings(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("timed out after {waited:?}: is a coordinator or agent listening on UDP {address}?")]
    TimedOut { address: SocketAddr, waited: Duration },
    /// Our verifier's finding about the peer.
    #[error("refused the certificate of {address}")]
    PeerRefused {
        address: SocketAddr,
        #[source]
        refusal: Refusal,
    },
    /// The peer's finding about us. Its reason is the peer's word, so it is for people, not for decisions.
    #[error("the peer refused our certificate: {reason}")]
    RefusedByPeer { address: SocketAddr, reason: String, refusal: Option<Refusal> },
    #[error("no common protocol (ALPN): {address} does not speak {wanted}")]
    NoCommonProtocol { address: SocketAddr, wanted: String },
    #[error("{address} refused the connection: its connection limit is reached; try again later")]
    Busy { address: SocketAddr },
    #[error("{address} closed the connection: {reason} (code {code})")]
    Closed { address: SocketAddr, code: u64, reason: String },
    #[error("could not connect to {address}: {reason}")]
    Failed { address: SocketAddr, reason: String },
}

impl ConnectError {
    /// What was wrong with a certificate: the peer's as we found, or ours as the peer says.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::PeerRefused { refusal, .. } => Some(refusal),
            Self::RefusedByPeer { refusal, .. } => refusal.as_ref(),
            _ => None,
        }
    }
}

/// A connection on which both sides have verified each other.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) endpoint: quinn::Endpoint,
    pub(crate) connection: quinn::Connection,
    pub(crate) peer: Identity,
}

/// Dials from a socket of its own.
pub(crate) async fn dial(
    address: SocketAddr,
    server_name: &str,
    tls: rustls::ClientConfig,
    alpn: &[u8],
    limits: &Limits,
) -> Result<Dialled, ConnectError> {
    let socket = quic::client_socket(address).map_err(ConnectError::Socket)?;
    let endpoint = quic::client_endpoint(socket).map_err(ConnectError::Socket)?;
    dial_from(endpoint, address, server_name, tls, alpn, limits).await
}

/// Dials from an endpoint that other connections may share.
pub(crate) async fn dial_from(
    endpoint: quinn::Endpoint,
    address: SocketAddr,
    server_name: &str,
    tls: rustls::ClientConfig,
    alpn: &[u8],
    limits: &Limits,
) -> Result<Dialled, ConnectError> {
    let config = quic::client_config(tls, alpn, limits).map_err(ConnectError::Settings)?;
    let connecting = endpoint.connect_with(config, address, server_name).map_err(|error| match error {
        quinn::ConnectError::InvalidServerName(name) => ConnectError::ServerName { name },
        other => ConnectError::Failed { address, reason: other.to_string() },
    })?;
    let deadline = Instant::now() + limits.handshake_timeout;
    let shaken = async {
        let connection = connecting.await?;
        confirmed(&connection).await?;
        Ok(connection)
    };
    let connection = match timeout_at(deadline, shaken).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return Err(explain(&error, address, alpn, limits)),
        Err(_) => return Err(ConnectError::TimedOut { address, waited: limits.handshake_timeout }),
    };
    let chain = quic::chain_of(&connection);
    let peer = mvm_pki::tls::peer_identity(chain.as_deref())
        .map_err(|refusal| ConnectError::PeerRefused { address, refusal })?;
    Ok(Dialled { endpoint, connection, peer })
}

/// Waits until the server has confirmed the handshake, and with it our certificate.
async fn confirmed(connection: &quinn::Connection) -> Result<(), ConnectionError> {
    while connection.stats().frame_rx.handshake_done == 0 {
        tokio::select! {
            error = connection.closed() => return Err(error),
            () = sleep(CONFIRM_EVERY) => {}
        }
    }
    Ok(())
}

/// A connection's end during its handshake, in words.
fn explain(error: &ConnectionError, address: SocketAddr, alpn: &[u8], limits: &Limits) -> ConnectError {
    match error {
        ConnectionError::TransportError(ours) => match alert_of(ours.code.into()) {
            Some(ALERT_NO_APPLICATION_PROTOCOL) => no_common_protocol(address, alpn),
            _ => match refusal_in_text(&ours.reason) {
                Some(refusal) => ConnectError::PeerRefused { address, refusal },
                None => ConnectError::Failed { address, reason: error.to_string() },
            },
        },
        ConnectionError::ConnectionClosed(theirs) => match refused_by_peer(theirs) {
            Some(_) if alert_of(theirs.error_code.into()) == Some(ALERT_NO_APPLICATION_PROTOCOL) => {
                no_common_protocol(address, alpn)
            }
            Some((reason, refusal)) => ConnectError::RefusedByPeer { address, reason, refusal },
            None if u64::from(theirs.error_code) == CONNECTION_REFUSED => ConnectError::Busy { address },
            None => ConnectError::Failed { address, reason: error.to_string() },
        },
        ConnectionError::ApplicationClosed(theirs) => {
            let code = theirs.error_code.into_inner();
            if code == u64::from(close_code::OVERLOADED) {
                return ConnectError::Busy { address };
            }
            ConnectError::Closed { address, code, reason: text_of(&theirs.reason) }
        }
        ConnectionError::TimedOut => ConnectError::TimedOut { address, waited: limits.handshake_timeout },
        other => ConnectError::Failed { address, reason: other.to_string() },
    }
}

fn no_common_protocol(address: SocketAddr, alpn: &[u8]) -> ConnectError {
    ConnectError::NoCommonProtocol { address, wanted: text_of(alpn) }
}

/// The TLS alert in a QUIC error code.
pub(crate) fn alert_of(code: u64) -> Option<u8> {
    code.checked_sub(CRYPTO_ERROR_BASE).and_then(|alert| u8::try_from(alert).ok())
}

/// Why the peer refused our certificate, where its close says that it did: in words, and as the refusal that it sent along.
pub(crate) fn refused_by_peer(close: &quinn::ConnectionClose) -> Option<(String, Option<Refusal>)> {
    let alert = alert_of(close.error_code.into())?;
    let refusal = refusal_in_text(&String::from_utf8_lossy(&close.reason));
    Some((reason_of(alert, refusal.as_ref()), refusal))
}

/// A peer's words, made safe to print: they come from the network.
pub(crate) fn text_of(bytes: &[u8]) -> String {
    const LONGEST: usize = 200;
    mvm_proto::text::one_line(&String::from_utf8_lossy(bytes), LONGEST)
}

/// What a peer's alert means: in the refusal's words where it sent one along, else in the alert's.
fn reason_of(alert: u8, refusal: Option<&Refusal>) -> String {
    refusal.map_or_else(|| alert_in_words(alert).to_owned(), Refusal::to_string)
}
