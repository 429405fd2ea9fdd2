//! TCP connections with mutual TLS for gRPC.
//!
//! One task accepts and never waits for a peer. Each handshake runs in its own task with a deadline and a place among
//! the handshakes; where there is none left, the newest takes the oldest one's, of its own network first. An honest
//! handshake is over in milliseconds, so silent connections only ever push each other out. A place among the
//! connections is taken by a verified certificate alone.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use mvm_pki::Identity;
use mvm_pki::tls::PeerCertificate;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use crate::metrics::Metrics;
use crate::rate_limit::network_of;

/// From the first byte to the verified certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Peers that have proven nothing yet, all together. Anyone may open these, so they are fewer than the connections.
const MAX_HANDSHAKES: usize = 128;
/// Of those, from one network: a whole office of operators behind one address, and far from all places.
const MAX_HANDSHAKES_PER_NETWORK: usize = 16;
/// After accept failed (no file descriptors left), wait for some to be freed.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

/// Who is at the other end, in every request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct GrpcPeer {
    pub(crate) identity: Identity,
    pub(crate) certificate: PeerCertificate,
}

/// A connection whose client proved who it is.
pub(crate) struct GrpcStream {
    stream: TlsStream<TcpStream>,
    peer: GrpcPeer,
    /// The place under the limit, given back when the connection ends.
    _permit: OwnedSemaphorePermit,
}

impl Connected for GrpcStream {
    type ConnectInfo = GrpcPeer;
    fn connect_info(&self) -> GrpcPeer {
        self.peer.clone()
    }
}

/// Accepts until `shutdown`; what succeeded comes out of the receiver.
pub(crate) fn accept(
    listener: TcpListener,
    tls: rustls::ServerConfig,
    max_connections: usize,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> mpsc::Receiver<std::io::Result<GrpcStream>> {
    let (ready, connections) = mpsc::channel(1);
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let limit = Arc::new(Semaphore::new(max_connections));
    tokio::spawn(async move {
        let accepting = accept_task(listener, acceptor, limit, metrics, ready);
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accepting => {}
        }
    });
    connections
}

/// The handshakes under way, oldest first.
#[derive(Default)]
struct Handshakes {
    tasks: JoinSet<()>,
    places: Vec<Place>,
}

struct Place {
    network: IpAddr,
    address: SocketAddr,
    task: AbortHandle,
}

impl Handshakes {
    /// Starts one more; returns who had to make room for it.
    fn start(
        &mut self,
        address: SocketAddr,
        handshake: impl Future<Output = ()> + Send + 'static,
    ) -> Option<SocketAddr> {
        while self.tasks.try_join_next().is_some() {}
        self.places.retain(|place| !place.task.is_finished());
        let network = network_of(address.ip());
        let of_network = self.places.iter().filter(|place| place.network == network).count();
        let oldest = if of_network >= MAX_HANDSHAKES_PER_NETWORK {
            self.places.iter().position(|place| place.network == network)
        } else {
            (self.places.len() >= MAX_HANDSHAKES).then_some(0)
        };
        let displaced = oldest.map(|index| self.places.remove(index));
        let task = self.tasks.spawn(handshake);
        self.places.push(Place { network, address, task });
        displaced.map(|place| {
            place.task.abort();
            place.address
        })
    }
}

async fn accept_task(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    limit: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    ready: mpsc::Sender<std::io::Result<GrpcStream>>,
) {
    let mut handshakes = Handshakes::default();
    loop {
        let (tcp, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        let (limit, counted) = (Arc::clone(&limit), Arc::clone(&metrics));
        let displaced = handshakes.start(address, async move {
            match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(tcp, acceptor, limit)).await {
                // Handed over elsewhere: who is verified can no longer be displaced.
                Ok(Ok(stream)) => drop(tokio::spawn(async move { ready.send(Ok(stream)).await })),
                Ok(Err(reason)) => refused(&counted, address, &reason),
                Err(_) => refused(&counted, address, "the handshake took too long"),
            }
        });
        if let Some(displaced) = displaced {
            refused(&metrics, displaced, "newer handshakes needed its place");
        }
    }
}

fn refused(metrics: &Metrics, address: SocketAddr, reason: &str) {
    metrics.grpc_handshakes_failed.inc();
    tracing::info!(%address, %reason, "refused a connection for gRPC");
}

async fn handshake(
    tcp: TcpStream,
    acceptor: TlsAcceptor,
    limit: Arc<Semaphore>,
) -> Result<GrpcStream, String> {
    tcp.set_nodelay(true).map_err(|error| error.to_string())?;
    let stream = acceptor.accept(tcp).await.map_err(|error| error.to_string())?;
    let (_, connection) = stream.get_ref();
    let (identity, certificate) =
        mvm_pki::tls::peer(connection.peer_certificates()).map_err(|refusal| refusal.to_string())?;
    let permit = limit.try_acquire_owned().map_err(|_| format!("no connection is left for {identity}"))?;
    Ok(GrpcStream { stream, peer: GrpcPeer { identity, certificate }, _permit: permit })
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for GrpcStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent(handshakes: &mut Handshakes, address: [u8; 4], port: u16) -> Option<u16> {
        let address = SocketAddr::from((address, port));
        handshakes.start(address, std::future::pending()).map(|displaced| displaced.port())
    }

    #[tokio::test]
    async fn a_network_displaces_its_own_oldest_handshake_and_nobody_elses() {
        let mut handshakes = Handshakes::default();
        assert_eq!(silent(&mut handshakes, [192, 0, 2, 1], 1), None);
        for port in 100..100 + MAX_HANDSHAKES_PER_NETWORK as u16 {
            assert_eq!(silent(&mut handshakes, [192, 0, 2, 2], port), None);
        }
        assert_eq!(silent(&mut handshakes, [192, 0, 2, 2], 200), Some(100));
        assert_eq!(silent(&mut handshakes, [192, 0, 2, 2], 201), Some(101));
    }

    #[tokio::test]
    async fn handshakes_of_many_networks_stay_bounded_and_the_oldest_goes_first() {
        let mut handshakes = Handshakes::default();
        for port in 0..MAX_HANDSHAKES as u16 {
            assert_eq!(silent(&mut handshakes, [10, 0, 0, port as u8], port), None);
        }
        assert_eq!(silent(&mut handshakes, [10, 1, 0, 0], 1000), Some(0));
        assert_eq!(handshakes.places.len(), MAX_HANDSHAKES);
    }
}
