//! QUIC with mutual TLS: HTTP/3 and node sessions on one endpoint.
//!
//! A [`Server`] owns one UDP socket and serves protocols that are told apart by ALPN: `h3`, where any axum router answers
//! requests; `mvm/1`, the node session, where an agent opens one long-lived stream of length-prefixed protobuf
//! frames; and `mvm-tunnel/1`, the [`tunnel`] of a node, with a stream for each operation. The other side is [`Client`] for
//! HTTP/3, [`dial_session`] for sessions and [`dial_tunnel`] for tunnels. Who may do what is not decided
//! here: this crate says who the peer is ([`Peer`]) and holds the [`Limits`].
//!
//! This is the only crate that imports quinn and h3.

pub mod backoff;
pub mod client;
pub mod connect;
pub mod frame;
mod h3_streams;
pub mod limits;
pub mod peer;
pub mod post;
mod quic;
pub mod rate_limit;
pub mod reset;
pub mod resolve;
pub mod server;
pub mod session;
pub mod slots;
pub mod tunnel;

pub use backoff::Backoff;
pub use client::{Client, RequestError, ResponseBody};
pub use connect::ConnectError;
pub use limits::Limits;
pub use peer::Peer;
pub use post::{PostError, Posted, Poster};
pub use rate_limit::RateLimit;
pub use reset::ResetKey;
pub use resolve::{ResolveError, Target, TargetError};
pub use server::{BindError, Registry, Server, ServerStats, SessionHandler, TunnelHandler};
pub use session::{
    AckBatcher, ClientSession, FrameReceiver, FrameSender, Pace, ServerSession, SessionControl,
    SessionDialer, SessionError, close_code, dial_session,
};
pub use slots::{Slot, Slots};
pub use tunnel::{Tunnel, TunnelReceiver, TunnelSender, TunnelStream, dial_tunnel, tunnel_limits};

/// HTTP/3.
pub const ALPN_H3: &[u8] = b"h3";
/// The node session, version 1.
pub const ALPN_SESSION: &[u8] = b"mvm/1";
/// Tunnels, version 1.
pub const ALPN_TUNNEL: &[u8] = b"mvm-tunnel/1";
