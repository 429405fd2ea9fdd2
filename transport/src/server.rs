//! One UDP endpoint that serves HTTP/3, node sessions and tunnels.
//!
//! [`Server::serve`] owns the accept loop. Each attempt is judged by `admission` before any cryptography is done for it;
//! each admitted one gets a task (`connection_task`), and under it each HTTP request its own. A panic in any of these
//! ends that connection or request and nothing else.

mod admission;
mod connection_task;
mod http;
mod request_body;
mod request_head;
mod stats;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use axum::extract::DefaultBodyLimit;
use futures::future::BoxFuture;
use mvm_pki::Identity;
use mvm_proto::Digest;
use quinn::EndpointConfig;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info};

use crate::limits::Limits;
use crate::quic;
use crate::reset::{self, NoRandomness, ResetKey};
use crate::session::{ServerSession, close_code};
use crate::tunnel::Tunnel;
use admission::{Admission, Decision};
use connection_task::{Services, connection_task};
pub use stats::ServerStats;

/// How long closed connections may take to tell their peers, at the very end.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("could not listen on UDP {address}")]
    Socket {
        address: SocketAddr,
        #[source]
        cause: io::Error,
    },
    #[error("the TLS settings are not valid for QUIC")]
    Settings(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("could not prepare the connection ids")]
    Randomness(#[source] NoRandomness),
}

/// Answers node sessions. The future runs in a task of its own; its panic ends only its session.
pub trait SessionHandler: Send + Sync + 'static {
    /// Speaks with one node until the session ends. Returning ends it, so what was sent last is to be waited for with
    /// [`crate::FrameSender::finish`] first.
    fn handle(&self, peer: Identity, address: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()>;
}

impl<F> SessionHandler for F
where
    F: Fn(Identity, SocketAddr, ServerSession) -> BoxFuture<'static, ()> + Send + Sync + 'static,
{
    fn handle(&self, peer: Identity, address: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()> {
        self(peer, address, session)
    }
}

/// Serves tunnels. The future runs in a task of its own, and the tunnel ends when it returns.
pub trait TunnelHandler: Send + Sync + 'static {
    fn handle(&self, peer: Identity, tunnel: Tunnel) -> BoxFuture<'static, ()>;
}

impl<F> TunnelHandler for F
where
    F: Fn(Identity, Tunnel) -> BoxFuture<'static, ()> + Send + Sync + 'static,
{
    fn handle(&self, peer: Identity, tunnel: Tunnel) -> BoxFuture<'static, ()> {
        self(peer, tunnel)
    }
}

/// Says whether a certificate that the handshake verified still counts. One that does not is heard, so that it learns
/// why it is refused, but takes no slot of those of its identity that do.
pub trait Registry: Send + Sync + 'static {
    fn counts<'a>(&'a self, peer: &'a Identity, certificate: &'a Digest) -> BoxFuture<'a, bool>;
}

/// A bound endpoint. It accepts nothing before [`Server::serve`].
pub struct Server {
    endpoint: quinn::Endpoint,
    address: SocketAddr,
    limits: Limits,
    stats: Arc<ServerStats>,
    registry: Option<Arc<dyn Registry>>,
    tunnels: Option<Arc<dyn TunnelHandler>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Binds the socket. Must be called inside a tokio runtime.
    ///
    /// Peers of a process that is killed notice by their idle timeout; see [`Server::bind_with`].
    pub fn bind(addr: SocketAddr, tls: rustls::ServerConfig, limits: Limits) -> Result<Self, BindError> {
        Self::bind_endpoint(addr, EndpointConfig::default(), tls, limits)
    }

    /// As [`Server::bind`], with a key that outlives the process: peers of a predecessor that was killed learn with
    /// their next packet that it is gone.
    pub fn bind_with(
        addr: SocketAddr,
        tls: rustls::ServerConfig,
        limits: Limits,
        reset_key: &ResetKey,
    ) -> Result<Self, BindError> {
        let endpoint = reset::endpoint_config(reset_key).map_err(BindError::Randomness)?;
        Self::bind_endpoint(addr, endpoint, tls, limits)
    }

    fn bind_endpoint(
        addr: SocketAddr,
        endpoint: EndpointConfig,
        tls: rustls::ServerConfig,
        limits: Limits,
    ) -> Result<Self, BindError> {
        let server = quic::server_config(tls, &limits).map_err(BindError::Settings)?;
        let bound = quic::shared_socket(addr).and_then(|socket| {
            let address = socket.local_addr()?;
            Ok((quic::server_endpoint(socket, endpoint, server)?, address))
        });
        let (endpoint, address) = bound.map_err(|cause| BindError::Socket { address: addr, cause })?;
        Ok(Self { endpoint, address, limits, stats: Arc::default(), registry: None, tunnels: None })
    }

    /// Asks `registry` about every certificate.
    #[must_use]
    pub fn judged_by(self, registry: Arc<dyn Registry>) -> Self {
        Self { registry: Some(registry), ..self }
    }

    /// Speaks tunnels too, with the windows and streams of this server's limits.
    #[must_use]
    pub fn with_tunnels(self, handler: Arc<dyn TunnelHandler>) -> Self {
        Self { tunnels: Some(handler), ..self }
    }

    /// Where it listens; with the port that the system gave when 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    #[must_use]
    pub fn stats(&self) -> Arc<ServerStats> {
        Arc::clone(&self.stats)
    }

    /// Serves until `shutdown`; then stops accepting, lets requests in flight finish within the drain timeout, and
    /// closes what is left. A protocol given as `None` is not spoken.
    ///
    /// Request bodies reach the router as they arrive, under the body limit; response bodies leave as they are made, and
    /// may be endless. An endless body notices a reader that went away when it next says something.
    pub async fn serve(
        self,
        http: Option<axum::Router>,
        sessions: Option<Arc<dyn SessionHandler>>,
        shutdown: CancellationToken,
    ) {
        // The limit of this server's own is enforced on the stream; axum's, of 2 MB, would answer in plain text.
        let http = http.map(|router| router.layer(DefaultBodyLimit::disable()));
        let admission = Admission::new(&self.limits, Arc::clone(&self.stats));
        let stats = Arc::clone(&self.stats);
        let services = Arc::new(Services {
            http,
            sessions,
            tunnels: self.tunnels.clone(),
            registry: self.registry.clone(),
            limits: self.limits.clone(),
            stats,
            shutdown: shutdown.clone(),
        });
        let tasks = TaskTracker::new();
        info!(address = %self.address, "listening on UDP");
        loop {
            let incoming = tokio::select! {
                () = shutdown.cancelled() => break,
                incoming = self.endpoint.accept() => incoming,
            };
            let Some(incoming) = incoming else { break };
            match admission.decide(incoming.remote_address().ip(), incoming.remote_address_validated()) {
                Decision::Admit(permit) => {
                    tasks.spawn(connection_task(incoming, *permit, Arc::clone(&services)));
                }
                // Only an attempt that is validated already can't be asked again, and that is never decided.
                Decision::Retry => drop(incoming.retry()),
                Decision::Refuse => incoming.refuse(),
                Decision::Ignore => incoming.ignore(),
            }
        }
        self.drain(tasks).await;
    }

    async fn drain(self, tasks: TaskTracker) {
        // New attempts are refused from here on; what is connected goes on.
        self.endpoint.set_server_config(None);
        tasks.close();
        debug!(connections = tasks.len(), "draining");
        if timeout(self.limits.drain_timeout, tasks.wait()).await.is_err() {
            info!(connections = tasks.len(), "closing connections that did not finish in time");
        }
        self.endpoint.close(close_code::SHUTDOWN.into(), b"shutting down");
        timeout(FAREWELL, self.endpoint.wait_idle()).await.ok();
    }
}
