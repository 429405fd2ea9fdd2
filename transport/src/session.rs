//! The node session, ALPN `mvm/1`: one long-lived bidirectional stream that the agent opens.
//!
//! Each side has a [`FrameSender`], a [`FrameReceiver`] and a [`SessionControl`]. They can live in different tasks: the
//! sender waits when the peer does not read, the receiver is cancel-safe, and the control ends both at once.

mod acks;
mod control;
mod receiver;
mod sender;

use std::net::SocketAddr;

use mvm_proto::wire::session::v1::{AgentFrame, CoordinatorFrame};

use crate::connect::ConnectError;
use crate::limits::Limits;
pub use acks::AckBatcher;
pub use control::{SessionControl, SessionError, close_code};
pub use receiver::FrameReceiver;
pub use sender::FrameSender;

/// The coordinator's end.
#[derive(Debug)]
pub struct ServerSession {
    pub frames_in: FrameReceiver<AgentFrame>,
    pub frames_out: FrameSender<CoordinatorFrame>,
    pub control: SessionControl,
}

/// The agent's end.
#[derive(Debug)]
pub struct ClientSession {
    pub frames_in: FrameReceiver<CoordinatorFrame>,
    pub frames_out: FrameSender<AgentFrame>,
    pub control: SessionControl,
}

/// Dials a coordinator and opens the session's stream. The coordinator hears of it with the first frame sent.
pub async fn dial_session(
    _addr: SocketAddr,
    _server_name: &str,
    _tls: rustls::ClientConfig,
    _limits: &Limits,
) -> Result<ClientSession, ConnectError> {
    todo!()
}
