//! One UDP endpoint that serves HTTP/3 and node sessions.

mod stats;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::future::BoxFuture;
use mvm_pki::identity::Identity;
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;
use crate::session::ServerSession;
pub use stats::ServerStats;

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("could not listen on UDP {address}")]
    Socket {
        address: SocketAddr,
        #[source]
        cause: io::Error,
    },
    #[error("the TLS settings do not fit QUIC")]
    Settings(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Answers node sessions. The future runs in a task of its own; its panic ends only its session.
pub trait SessionHandler: Send + Sync + 'static {
    /// Speaks with one node until the session ends. Returning ends it.
    fn handle(&self, peer: Identity, address: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()>;
}

/// A bound endpoint, not yet serving.
#[derive(Debug)]
pub struct Server {
    stats: Arc<ServerStats>,
}

impl Server {
    /// Binds the socket. Must be called inside a tokio runtime.
    pub fn bind(_addr: SocketAddr, _tls: rustls::ServerConfig, _limits: Limits) -> Result<Self, BindError> {
        todo!()
    }

    /// Where it listens; the port that was given by the system when 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        todo!()
    }

    #[must_use]
    pub fn stats(&self) -> Arc<ServerStats> {
        Arc::clone(&self.stats)
    }

    /// Serves until `shutdown`; then stops accepting, lets requests in flight finish within the drain timeout, and
    /// closes what is left. A protocol given as `None` is not spoken.
    pub async fn serve(
        self,
        _http: Option<axum::Router>,
        _sessions: Option<Arc<dyn SessionHandler>>,
        _shutdown: CancellationToken,
    ) {
        todo!()
    }
}
