//! TCP connections with mutual TLS for gRPC.
//!
//! One task accepts; each handshake runs in its own with a deadline, so a slow one holds up nobody. Connections are
//! counted from the first byte: at the limit, nothing is accepted until one ends.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use mvm_pki::Identity;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use crate::metrics::Metrics;

/// From the first byte to the verified certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// After accept failed (no file descriptors left), wait for some to be freed.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

/// Who is at the other end, in every request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct GrpcPeer {
    pub(crate) identity: Identity,
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

async fn accept_task(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    limit: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    ready: mpsc::Sender<std::io::Result<GrpcStream>>,
) {
    loop {
        let Ok(permit) = Arc::clone(&limit).acquire_owned().await else { return };
        let (tcp, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let (acceptor, ready, metrics) = (acceptor.clone(), ready.clone(), Arc::clone(&metrics));
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(tcp, acceptor, permit)).await {
                Ok(Ok(stream)) => drop(ready.send(Ok(stream)).await),
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
    permit: OwnedSemaphorePermit,
) -> Result<GrpcStream, String> {
    tcp.set_nodelay(true).map_err(|error| error.to_string())?;
    let stream = acceptor.accept(tcp).await.map_err(|error| error.to_string())?;
    let (_, connection) = stream.get_ref();
    let identity =
        mvm_pki::tls::peer_identity(connection.peer_certificates()).map_err(|refusal| refusal.to_string())?;
    Ok(GrpcStream { stream, peer: GrpcPeer { identity }, _permit: permit })
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
