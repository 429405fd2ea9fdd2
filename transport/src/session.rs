//! The node session, ALPN `mvm/1`: one long-lived bidirectional stream that the agent opens.
//!
//! Each side has a [`FrameSender`], a [`FrameReceiver`] and a [`SessionControl`]. They can live in different tasks: the
//! sender waits when the peer does not read, the receiver is cancel-safe, and the control ends both at once.

mod acks;
mod control;
mod receiver;
mod sender;

use std::net::SocketAddr;

use mvm_pki::Identity;
use mvm_proto::wire::session::v1::{AgentFrame, CoordinatorFrame};

use crate::ALPN_SESSION;
use crate::connect::{ConnectError, Dialled, dial, dial_from};
use crate::limits::Limits;
use crate::quic;
pub use acks::{AckBatcher, FLUSH_AFTER, FLUSH_AT};
pub use control::{SessionControl, SessionError, close_code};
pub(crate) use receiver::Frames;
pub use receiver::{FrameReceiver, Pace};
pub use sender::FrameSender;

/// The coordinator's end.
#[derive(Debug)]
pub struct ServerSession {
    pub frames_in: FrameReceiver<AgentFrame>,
    pub frames_out: FrameSender<CoordinatorFrame>,
    pub control: SessionControl,
}

impl ServerSession {
    pub(crate) fn new(
        connection: quinn::Connection,
        (send, recv): (quinn::SendStream, quinn::RecvStream),
        limits: &Limits,
    ) -> Self {
        let control = SessionControl { connection };
        Self {
            frames_in: FrameReceiver::new(recv, control.clone(), limits),
            frames_out: FrameSender::new(send, control.clone(), limits),
            control,
        }
    }
}

/// The agent's end.
#[derive(Debug)]
pub struct ClientSession {
    pub frames_in: FrameReceiver<CoordinatorFrame>,
    pub frames_out: FrameSender<AgentFrame>,
    pub control: SessionControl,
    /// The coordinator, from its verified certificate.
    pub peer: Identity,
}

/// Dials a coordinator and opens the session's stream. The coordinator hears of it with the first frame sent, which has
/// to follow within its handshake timeout.
pub async fn dial_session(
    addr: SocketAddr,
    server_name: &str,
    tls: rustls::ClientConfig,
    limits: &Limits,
) -> Result<ClientSession, ConnectError> {
    let dialled = Box::pin(dial(addr, server_name, tls, ALPN_SESSION, limits)).await?;
    open(dialled, addr, limits).await
}

/// One socket for many sessions: for a process that plays a whole fleet.
#[derive(Debug, Clone)]
pub struct SessionDialer {
    endpoint: quinn::Endpoint,
}

impl SessionDialer {
    /// Opens a socket at `local`, which decides the address family; port 0 lets the system choose. Must be called inside
    /// a tokio runtime.
    pub fn bind(local: SocketAddr) -> Result<Self, ConnectError> {
        let socket = quic::shared_socket(local).map_err(ConnectError::Socket)?;
        Ok(Self { endpoint: quic::client_endpoint(socket).map_err(ConnectError::Socket)? })
    }

    /// As [`dial_session`], from the shared socket.
    pub async fn dial(
        &self,
        addr: SocketAddr,
        server_name: &str,
        tls: rustls::ClientConfig,
        limits: &Limits,
    ) -> Result<ClientSession, ConnectError> {
        let endpoint = self.endpoint.clone();
        let dialling = dial_from(endpoint, addr, server_name, tls, ALPN_SESSION, limits);
        open(Box::pin(dialling).await?, addr, limits).await
    }
}

async fn open(dialled: Dialled, address: SocketAddr, limits: &Limits) -> Result<ClientSession, ConnectError> {
    let Dialled { connection, peer, .. } = dialled;
    let (send, recv) = connection
        .open_bi()
        .await
        .map_err(|error| ConnectError::Failed { address, reason: error.to_string() })?;
    let control = SessionControl { connection };
    Ok(ClientSession {
        frames_in: FrameReceiver::new(recv, control.clone(), limits),
        frames_out: FrameSender::new(send, control.clone(), limits),
        control,
        peer,
    })
}
