//! The quinn settings of both sides, hardened: what differs from quinn's defaults, and why.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::{error, io};

use mvm_proto::Digest;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{AckFrequencyConfig, EndpointConfig, IdleTimeout, TokioRuntime, TransportConfig, VarInt};
use rustls_pki_types::CertificateDer;
use tracing::info;

use crate::limits::{
    CRYPTO_BUFFER_BYTES, INCOMING_BUFFER_BYTES, INCOMING_BUFFER_TOTAL_BYTES, Limits, MAX_UNI_STREAMS,
    RETRY_TOKEN_LIFE, SHARED_SOCKET_BYTES,
};

/// So many packets the peer may take without acknowledging them. A document of some kilobytes is then acknowledged together with
/// what the node says to it, in one packet; each less is a packet less to decrypt here, and a task less to wake. What is
/// left unacknowledged is acknowledged after the usual 25 ms.
const PACKETS_PER_ACK: u32 = 9;

type BoxError = Box<dyn error::Error + Send + Sync>;

/// What both sides have in common: bounded windows, few streams, no datagrams.
fn transport(limits: &Limits) -> Result<TransportConfig, BoxError> {
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(PACKETS_PER_ACK));
    let mut config = TransportConfig::default();
    config
        .ack_frequency_config(Some(acks))
        .max_idle_timeout(Some(IdleTimeout::try_from(limits.idle_timeout)?))
        .max_concurrent_uni_streams(VarInt::from_u32(MAX_UNI_STREAMS))
        .stream_receive_window(VarInt::from_u32(limits.stream_window))
        .receive_window(VarInt::from_u32(limits.connection_window))
        .send_window(limits.send_window)
        .crypto_buffer_size(CRYPTO_BUFFER_BYTES)
        // Neither protocol sends datagrams, so none are received: quinn would buffer 1 MiB of them.
        .datagram_receive_buffer_size(None)
        .datagram_send_buffer_size(0);
    Ok(config)
}

/// The server's settings. Tickets, early data and resumption are off already in what `mvm_pki` makes; they are turned
/// off again here because resumption would skip the check of the client's certificate.
pub(crate) fn server_config(
    mut tls: rustls::ServerConfig,
    limits: &Limits,
) -> Result<quinn::ServerConfig, BoxError> {
    tls.max_early_data_size = 0;
    tls.send_tls13_tickets = 0;
    tls.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    let mut transport = transport(limits)?;
    // Keep-alives are the dialling side's: a server with a thousand idle sessions sends nothing of its own accord.
    transport.max_concurrent_bidi_streams(VarInt::from_u32(limits.max_streams));
    let mut tokens = quinn::ValidationTokenConfig::default();
    tokens.sent(0).log(Arc::new(quinn::NoneTokenLog));
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    config
        .transport_config(Arc::new(transport))
        .migration(false)
        .max_incoming(limits.max_handshakes.max(1))
        .incoming_buffer_size(INCOMING_BUFFER_BYTES)
        .incoming_buffer_size_total(INCOMING_BUFFER_TOTAL_BYTES)
        .retry_token_lifetime(RETRY_TOKEN_LIFE)
        .validation_token_config(tokens);
    Ok(config)
}

/// The dialling side's settings, for one protocol.
pub(crate) fn client_config(
    mut tls: rustls::ClientConfig,
    alpn: &[u8],
    limits: &Limits,
) -> Result<quinn::ClientConfig, BoxError> {
    tls.alpn_protocols = vec![alpn.to_vec()];
    tls.enable_early_data = false;
    tls.resumption = rustls::client::Resumption::disabled();
    let mut transport = transport(limits)?;
    // A server has no reason to open a bidirectional stream in either protocol.
    transport.max_concurrent_bidi_streams(VarInt::from_u32(0)).keep_alive_interval(Some(limits.keep_alive));
    let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(Arc::new(transport)).token_store(Arc::new(quinn::NoneTokenStore));
    Ok(config)
}

/// An endpoint on `socket` that only dials.
pub(crate) fn client_endpoint(socket: UdpSocket) -> io::Result<quinn::Endpoint> {
    quinn::Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))
}

/// An endpoint on `socket` that serves.
pub(crate) fn server_endpoint(
    socket: UdpSocket,
    endpoint: EndpointConfig,
    server: quinn::ServerConfig,
) -> io::Result<quinn::Endpoint> {
    quinn::Endpoint::new(endpoint, Some(server), socket, Arc::new(TokioRuntime))
}

/// A socket that many peers send to at once.
pub(crate) fn shared_socket(local: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)?;
    // Privileged first; either way the kernel's answer is what counts, and a small buffer is slow, not wrong.
    setsockopt(&socket, sockopt::RcvBufForce, &SHARED_SOCKET_BYTES)
        .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &SHARED_SOCKET_BYTES))
        .or_else(|_| getsockopt(&socket, sockopt::RcvBuf).map(drop))?;
    let bytes = getsockopt(&socket, sockopt::RcvBuf)?;
    if bytes < SHARED_SOCKET_BYTES {
        info!(
            bytes,
            wanted = SHARED_SOCKET_BYTES,
            "the UDP receive buffer is small: raise net.core.rmem_max"
        );
    }
    Ok(socket)
}

/// A socket for dialling `remote`: any port, of the same address family.
pub(crate) fn client_socket(remote: SocketAddr) -> io::Result<UdpSocket> {
    match remote {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

/// The protocol that the handshake agreed on.
pub(crate) fn protocol_of(connection: &quinn::Connection) -> Option<Vec<u8>> {
    connection.handshake_data()?.downcast::<HandshakeData>().ok()?.protocol
}

/// The chain that the peer showed and that was verified.
pub(crate) fn chain_of(connection: &quinn::Connection) -> Option<Vec<CertificateDer<'static>>> {
    connection.peer_identity()?.downcast().ok().map(|chain| *chain)
}

/// The fingerprint of the certificate that the peer showed and that was verified.
pub(crate) fn certificate_of(connection: &quinn::Connection) -> Option<Digest> {
    chain_of(connection)?.first().map(|leaf| Digest::of(leaf))
}
