//! The tunnel to the coordinator: where streams to this node's guests come in.
//!
//! The session asks for it ([`Tunnels::open`]): this node dials the session's coordinator, at the port that the request names
//! and nowhere else, and shows the request's ticket. From then on the coordinator opens streams, each a task of its own
//! ([`stream`]). A tunnel without streams is closed after [`IDLE`]. A newer tunnel takes the place of an older one, whose
//! streams then count as lost: their programs go on (see [`exec`]).

mod archive;
mod exec;
mod limits;
mod logs;
mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mvm_pki::{LiveAnchors, LiveCredential};
use mvm_proto::Problem;
use mvm_proto::text::chain;
use mvm_proto::wire::tunnel::v1::{Frame, Hello, frame};
use mvm_telemetry::Tracer;
use mvm_transport::tunnel::MAX_TUNNEL_STREAMS;
use mvm_transport::{ALPN_TUNNEL, Limits, Tunnel, close_code, dial_tunnel, tunnel_limits};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::exec::Execs;
use self::limits::StreamLimits;
use crate::metrics::Metrics;
use crate::node::handle::NodeHandle;
use crate::upkeep::certs;

/// What this node can open.
const KINDS: [&str; 6] =
    [stream::EXEC, stream::ATTACH, stream::LOGS, stream::EXPORT, stream::IMPORT, stream::RELEASE];
/// How long a tunnel may have no streams.
pub const IDLE: Duration = Duration::from_secs(600);
/// From the hello to the welcome: a coordinator that takes longer is not well.
const WELCOME_WITHIN: Duration = Duration::from_secs(5);

/// The tunnels of this node. Cheap to clone.
#[derive(Clone)]
pub struct Tunnels {
    shared: Arc<Shared>,
}

/// What tunnels are made with and work on.
pub struct TunnelParts {
    pub credential: LiveCredential,
    pub anchors: LiveAnchors,
    pub limits: Limits,
    pub node: NodeHandle,
    pub metrics: Arc<Metrics>,
    pub tracer: Tracer,
    pub shutdown: CancellationToken,
}

struct Shared {
    parts: TunnelParts,
    limits: Arc<StreamLimits>,
    execs: Execs,
    current: Mutex<Option<Tunnel>>,
}

impl std::fmt::Debug for Tunnels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tunnels").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for TunnelParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TunnelParts").finish_non_exhaustive()
    }
}

impl Tunnels {
    #[must_use]
    pub fn new(parts: TunnelParts) -> Self {
        let (limits, execs) = (Arc::default(), Execs::default());
        Self { shared: Arc::new(Shared { parts, limits, execs, current: Mutex::default() }) }
    }

    /// Dials the tunnel that the session at `session` was asked for. Returns once it stands.
    pub(super) async fn open(
        &self,
        session: SocketAddr,
        host: &str,
        port: u32,
        ticket: String,
    ) -> Result<(), Problem> {
        let port = u16::try_from(port).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| failed(&format!("{port:?} is not a port"), session))?;
        // The host is the session's: a coordinator sends this node nowhere else.
        let address = SocketAddr::new(session.ip(), port);
        let Shared { parts, .. } = &*self.shared;
        let tls = certs::verified(Some(&parts.credential), &parts.anchors, ALPN_TUNNEL)
            .map_err(|error| failed(&chain(&error), address))?;
        let limits = tunnel_limits(&parts.limits);
        let (tunnel, peer) = dial_tunnel(address, host, tls, &limits)
            .await
            .map_err(|error| failed(&chain(&error), address))?;
        let control = match timeout(WELCOME_WITHIN, greet(&tunnel, ticket)).await {
            Ok(Ok(control)) => control,
            Ok(Err(reason)) => return Err(failed(&reason, address)),
            Err(_) => return Err(failed(&format!("no welcome within {WELCOME_WITHIN:?}"), address)),
        };
        info!(coordinator = %peer, %address, "opened a tunnel");
        tunnel.let_open(MAX_TUNNEL_STREAMS);
        if let Some(older) = self.shared.current.lock().replace(tunnel.clone()) {
            older.close(close_code::REPLACED, "replaced by a newer tunnel");
        }
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            serve(&shared, &tunnel).await;
            drop(control);
        });
        Ok(())
    }
}

/// Says which request this tunnel answers. The stream stays open for as long as the tunnel.
async fn greet(tunnel: &Tunnel, ticket: String) -> Result<mvm_transport::TunnelStream<Frame>, String> {
    let mut stream = tunnel.open::<Frame>().await.map_err(|error| chain(&error))?;
    let kinds = KINDS.map(str::to_owned).to_vec();
    let hello = Frame { body: Some(frame::Body::Hello(Hello { ticket, kinds })) };
    stream.frames_out.send(&hello).await.map_err(|error| chain(&error))?;
    match stream.frames_in.recv().await.map_err(|error| chain(&error))?.and_then(|frame| frame.body) {
        Some(frame::Body::Welcome(_)) => Ok(stream),
        _ => Err("the coordinator did not welcome the tunnel".to_owned()),
    }
}

fn failed(reason: &str, address: SocketAddr) -> Problem {
    let detail = format!("could not open a tunnel to UDP {address}: {reason}");
    let remediation =
        "Let nodes reach that UDP port of the coordinator (`mvm coordinator serve --tunnel-listen`).";
    Problem::new(502, "tunnel_failed", detail, remediation)
}

/// Takes streams until the tunnel ends.
async fn serve(shared: &Arc<Shared>, tunnel: &Tunnel) {
    let mut streams = JoinSet::new();
    let mut idle_since = Instant::now();
    loop {
        tokio::select! {
            accepted = tunnel.accept::<Frame>() => match accepted {
                Ok(accepted) => {
                    streams.spawn(stream::serve(Arc::clone(shared), accepted));
                }
                Err(error) => {
                    debug!(%error, "the tunnel ended");
                    break;
                }
            },
            Some(ended) = streams.join_next() => {
                if let Err(error) = ended {
                    warn!(%error, "a stream's task panicked; the others go on");
                }
                if streams.is_empty() {
                    idle_since = Instant::now();
                }
            }
            () = sleep_until(idle_since + IDLE), if streams.is_empty() => {
                debug!("closing a tunnel without streams");
                tunnel.close(close_code::DONE, "no streams");
                break;
            }
            () = shared.parts.shutdown.cancelled() => {
                tunnel.close(close_code::SHUTDOWN, "the agent is stopping");
                break;
            }
        }
    }
    let mut current = shared.current.lock();
    if current.as_ref().is_some_and(Tunnel::is_closed) {
        *current = None;
    }
    drop(current);
    // Each ends by itself, now that its peer is gone.
    if !shared.parts.shutdown.is_cancelled() {
        streams.detach_all();
    }
}
