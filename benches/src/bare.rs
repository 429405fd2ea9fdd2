//! The peer: quinn and rustls as they come, with our chain, our cipher suites and mutual TLS, and nothing of ours.
//!
//! Two things are not the libraries' defaults. Tickets are off, as they are in ours: their cost is not the handshake's.
//! Receive buffers are as large as ours: with the system's, a few dozen handshakes at once overflow them, and the
//! timeouts that follow would be all that is measured.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use bytes::Bytes;
use mvm_pki::Credential;
use mvm_transport::limits::SHARED_SOCKET_BYTES;
use nix::sys::socket::{setsockopt, sockopt};
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::sync::Semaphore;

use crate::authority::Certificates;

/// What is spoken after the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Nothing.
    Plain,
    /// HTTP/3's own streams and settings, by the h3 crate as it comes.
    Http3,
}

const PLAIN: &[u8] = b"bare";
const HTTP3: &[u8] = b"h3";
/// The longest message that [`echo_task`] returns.
const MAX_ECHO_BYTES: usize = 16 << 20;

/// Any port.
pub const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A server's endpoint on loopback. Must be called inside a tokio runtime.
pub fn server(certificates: &Certificates) -> Result<quinn::Endpoint> {
    let provider = mvm_pki::tls::provider();
    let roots = Arc::new(roots(certificates)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let credential = certificates.coordinator.current();
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(credential.chain().to_vec(), key(&credential)?)?;
    tls.alpn_protocols = vec![PLAIN.to_vec(), HTTP3.to_vec()];
    tls.send_tls13_tickets = 0;
    let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    endpoint(Some(config))
}

pub fn client_config(certificates: &Certificates, protocol: Protocol) -> Result<quinn::ClientConfig> {
    let mut tls = tcp_client_config(certificates)?;
    tls.alpn_protocols = vec![if protocol == Protocol::Plain { PLAIN } else { HTTP3 }.to_vec()];
    Ok(quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?)))
}

/// The same for TLS on TCP, of a server that knows nothing of ALPN.
pub fn tcp_client_config(certificates: &Certificates) -> Result<rustls::ClientConfig> {
    let provider = mvm_pki::tls::provider();
    let roots = Arc::new(roots(certificates)?);
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let credential = certificates.node.current();
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(credential.chain().to_vec(), key(&credential)?)?;
    tls.resumption = rustls::client::Resumption::disabled();
    Ok(tls)
}

/// A client's endpoint on loopback. Must be called inside a tokio runtime.
pub fn client() -> Result<quinn::Endpoint> {
    endpoint(None)
}

fn endpoint(server: Option<quinn::ServerConfig>) -> Result<quinn::Endpoint> {
    let socket = UdpSocket::bind(LOOPBACK)?;
    // Beyond the system's limit only with the privilege for it; as much as allowed without.
    setsockopt(&socket, sockopt::RcvBufForce, &SHARED_SOCKET_BYTES)
        .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &SHARED_SOCKET_BYTES))?;
    Ok(quinn::Endpoint::new(quinn::EndpointConfig::default(), server, socket, Arc::new(quinn::TokioRuntime))?)
}

/// Handshakes that are complete on the server's side, and room for those in flight.
#[derive(Debug)]
pub struct Accepted {
    count: AtomicU64,
    room: Semaphore,
}

impl Accepted {
    /// With room for `width` handshakes in flight.
    #[must_use]
    pub fn new(width: usize) -> Self {
        Self { count: AtomicU64::new(0), room: Semaphore::new(width) }
    }

    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Before a client dials: the room is given back by the server.
    pub async fn wait_for_room(&self) -> Result<()> {
        self.room.acquire().await?.forget();
        Ok(())
    }

    fn one_more(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.room.add_permits(1);
    }
}

/// Accepts whatever comes, and counts handshakes that are complete on this side too.
pub async fn accept_task(server: quinn::Endpoint, accepted: Arc<Accepted>) {
    while let Some(incoming) = server.accept().await {
        let accepted = Arc::clone(&accepted);
        tokio::spawn(async move {
            let Ok(connection) = incoming.await else { return };
            let agreed = connection.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
            if agreed.and_then(|data| data.protocol).as_deref() == Some(HTTP3) {
                let quic = h3_quinn::Connection::new(connection);
                let Ok(mut http) = h3::server::Connection::<_, Bytes>::new(quic).await else { return };
                accepted.one_more();
                // Ends with the connection: the bench sends no request.
                let _ = http.accept().await;
            } else {
                accepted.one_more();
                connection.closed().await;
            }
        });
    }
}

/// What keeps an HTTP/3 connection open on the client's side.
pub type HttpClient = (
    h3::client::Connection<h3_quinn::Connection, Bytes>,
    h3::client::SendRequest<h3_quinn::OpenStreams, Bytes>,
);

/// Opens HTTP/3's streams on a connection, and sends the settings.
pub async fn http_client(connection: quinn::Connection) -> Result<HttpClient> {
    Ok(h3::client::new(h3_quinn::Connection::new(connection)).await?)
}

/// Sends every message of every stream back.
pub async fn echo_task(server: quinn::Endpoint) {
    while let Some(incoming) = server.accept().await {
        tokio::spawn(async move {
            let Ok(connection) = incoming.await else { return };
            while let Ok((mut send, mut recv)) = connection.accept_bi().await {
                let Ok(message) = recv.read_to_end(MAX_ECHO_BYTES).await else { return };
                // The other side measures what comes back, and fails when nothing does.
                let _ = send.write_all(&message).await;
                let _ = send.finish();
            }
        });
    }
}

/// One message there and back.
pub async fn round_trip(connection: &quinn::Connection, message: &[u8]) -> Result<()> {
    let (mut send, mut recv) = connection.open_bi().await?;
    send.write_all(message).await?;
    send.finish()?;
    let back = recv.read_to_end(MAX_ECHO_BYTES).await?;
    anyhow::ensure!(back.len() == message.len(), "the echo has another length");
    Ok(())
}

fn roots(certificates: &Certificates) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for root in certificates.anchors.certificates() {
        roots.add(root.clone())?;
    }
    Ok(roots)
}

fn key(credential: &Credential) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(credential.to_pem().as_bytes()).context("a credential holds its key")
}
