//! TCP connections with mutual TLS for gRPC.
//!
//! One task accepts and never waits for a peer. Each handshake runs in its own task with a deadline and a place among
//! the handshakes; where there is none left, the newest takes that of the oldest, of its own network or of the one that
//! has most. An honest handshake is over in milliseconds, so silent connections only ever push each other out.
//!
//! A place among the connections is taken by the certificate of an operator or a coordinator alone: a node's connection
//! is closed right after its handshake. One identity has few places, and its newest connection takes the place of its
//! longest idle one (see [`mvm_transport::places`]); `calls` says which are idle.

pub(crate) mod calls;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use mvm_pki::{Identity, Role};
use mvm_transport::places::{Activity, Place, Places, Rules};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
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
/// Connections of one identity: one operator's terminals and scripts, and far from all places.
const MAX_CONNECTIONS_PER_IDENTITY: usize = 32;
/// After accept failed (no file descriptors left), wait for some to be freed.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

/// Who is at the other end, in every request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct GrpcPeer {
    pub(crate) identity: Identity,
    activity: Activity<Identity>,
}

/// A connection whose client proved who it is.
pub(crate) struct GrpcStream {
    stream: TlsStream<TcpStream>,
    peer: GrpcPeer,
    /// Given back when the connection ends; the connection ends when a newer one has taken it.
    place: Place<Identity>,
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
    let places = Arc::new(Places::new(Rules {
        most: max_connections,
        most_per_key: MAX_CONNECTIONS_PER_IDENTITY,
        displace_busy: false,
    }));
    tokio::spawn(async move {
        let accepting = accept_task(listener, acceptor, places, metrics, ready);
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accepting => {}
        }
    });
    connections
}

async fn accept_task(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    places: Arc<Places<Identity>>,
    metrics: Arc<Metrics>,
    ready: mpsc::Sender<std::io::Result<GrpcStream>>,
) {
    let under_way = Places::new(Rules {
        most: MAX_HANDSHAKES,
        most_per_key: MAX_HANDSHAKES_PER_NETWORK,
        displace_busy: true,
    });
    // Ends them when this task ends.
    let mut handshakes = JoinSet::new();
    loop {
        let (tcp, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        while handshakes.try_join_next().is_some() {}
        let mut under_way = match under_way.take(network_of(address.ip())) {
            Ok(place) => place,
            Err(full) => {
                refused(&metrics, address, &full.to_string());
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        let (places, metrics) = (Arc::clone(&places), Arc::clone(&metrics));
        handshakes.spawn(async move {
            let shaken = tokio::select! {
                shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(tcp, acceptor, &places)) => shaken,
                () = under_way.displaced() => Ok(Err("newer handshakes needed its place".to_owned())),
            };
            match shaken {
                // Handed over elsewhere: a verified connection no longer has a place among the handshakes.
                Ok(Ok(stream)) => drop(tokio::spawn(async move { ready.send(Ok(stream)).await })),
                Ok(Err(reason)) => refused(&metrics, address, &reason),
                Err(_) => refused(&metrics, address, "the handshake took too long"),
            }
        });
    }
}

fn refused(metrics: &Metrics, address: SocketAddr, reason: &str) {
    metrics.grpc_handshakes_failed.inc();
    tracing::info!(%address, %reason, "refused a connection for gRPC");
}

async fn handshake(
    tcp: TcpStream,
    acceptor: TlsAcceptor,
    places: &Places<Identity>,
) -> Result<GrpcStream, String> {
    tcp.set_nodelay(true).map_err(|error| error.to_string())?;
    let stream = acceptor.accept(tcp).await.map_err(|error| error.to_string())?;
    let (_, connection) = stream.get_ref();
    let identity =
        mvm_pki::tls::peer_identity(connection.peer_certificates()).map_err(|refusal| refusal.to_string())?;
    match identity.role() {
        Role::Operator | Role::Coordinator => {}
        Role::Node => return Err(format!("{identity} is not an operator")),
    }
    let place = places.take(identity.clone()).map_err(|full| format!("{identity}: {full}"))?;
    let peer = GrpcPeer { identity, activity: place.activity() };
    Ok(GrpcStream { stream, peer, place })
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let Self { stream, place, .. } = self.get_mut();
        if place.poll_displaced(cx).is_ready() {
            // The end of what the peer says ends an idle connection.
            return Poll::Ready(Ok(()));
        }
        Pin::new(stream).poll_read(cx, buffer)
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
