//! Takes the tunnels that nodes dial.
//!
//! A node is looked up before anything of it is read, and again once its tunnel is in the table, as sessions do: it may have
//! been removed meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use mvm_pki::{Identity, Role};
use mvm_proto::NodeId;
use mvm_proto::wire::tunnel::v1::{Frame, Hello, Welcome, frame};
use mvm_transport::{Tunnel, TunnelHandler, TunnelStream, close_code};

use crate::enrolment;
use crate::rate_limit::Holder;
use crate::state::State;
use crate::stored::now;

/// From the handshake to the tunnel's hello. An agent sends it at once.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// Takes tunnels from the transport.
pub(crate) struct AcceptTunnels(pub(crate) Arc<State>);

impl TunnelHandler for AcceptTunnels {
    fn handle(&self, peer: Identity, tunnel: Tunnel) -> BoxFuture<'static, ()> {
        let state = Arc::clone(&self.0);
        Box::pin(async move {
            let holder = Holder::Certificate(tunnel.peer_certificate());
            if state.session_limit.take(holder, Instant::now()).is_err() {
                // A line for each would be a flood of its own.
                return tunnel.close(close_code::OVERLOADED, "too many tunnels of this certificate");
            }
            if let Err((code, reason)) = serve(&state, &peer, &tunnel).await {
                tracing::warn!(%peer, address = %tunnel.remote_address(), %reason, "refused a tunnel");
                tunnel.close(code, &reason);
            }
        })
    }
}

type Refused = (u32, String);

async fn serve(state: &State, peer: &Identity, tunnel: &Tunnel) -> Result<(), Refused> {
    let node = peer.node_id().filter(|_| peer.role() == Role::Node);
    let node = node.ok_or_else(|| (close_code::NOT_HERE, format!("{peer} is not a node")))?;
    admit(state, &node, tunnel).await?;
    let (mut control, hello) = match tokio::time::timeout(HELLO_WITHIN, hear(tunnel)).await {
        Ok(heard) => heard.ok_or_else(|| (close_code::PROTOCOL, "the tunnel has no hello".to_owned()))?,
        Err(_) => return Err((close_code::TOO_SLOW, "no hello came".to_owned())),
    };
    let entry = state.tunnels.take(&node, &hello.ticket, tunnel);
    let entry = entry.ok_or_else(|| {
        (close_code::NOT_HERE, format!("the session of node {node} asked for no such tunnel"))
    })?;
    // It may have been removed since it was admitted.
    admit(state, &node, tunnel).await?;
    tracing::debug!(%node, address = %tunnel.remote_address(), "a tunnel stands");
    let welcome = Frame { body: Some(frame::Body::Welcome(Welcome {})) };
    if control.frames_out.send(&welcome).await.is_ok() {
        let reason = tunnel.closed().await;
        tracing::debug!(%node, %reason, "a tunnel ended");
    }
    entry.forget_ended();
    Ok(())
}

async fn hear(tunnel: &Tunnel) -> Option<(TunnelStream<Frame>, Hello)> {
    let mut control = tunnel.accept::<Frame>().await.ok()?;
    match control.frames_in.recv().await {
        Ok(Some(Frame { body: Some(frame::Body::Hello(hello)) })) => Some((control, hello)),
        _ => None,
    }
}

async fn admit(state: &State, node: &NodeId, tunnel: &Tunnel) -> Result<(), Refused> {
    let certificate = tunnel.peer_certificate();
    let admitted = enrolment::admitted(state, node, certificate.as_ref(), now()).await;
    admitted.map(drop).map_err(|problem| {
        let code =
            if matches!(problem.status, 403 | 404) { close_code::REMOVED } else { close_code::OVERLOADED };
        (code, problem.detail)
    })
}
