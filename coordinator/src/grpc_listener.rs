//! TCP connections with mutual TLS for gRPC.
//!
//! One task accepts and never waits for a peer. Each handshake runs in its own task with a deadline and a slot among
//! the handshakes; where there is none left, the newest takes that of the oldest, of its own site or of the one that has
//! most, and of one that has said nothing before one that has. An honest handshake is over in milliseconds, so silent
//! connections only ever push each other out.
//!
//! A slot among the connections is taken by the certificate of an operator alone: the connection of a node or a
//! coordinator is closed right after its handshake. Connections without a certificate, for callers with API keys, have few
//! slots of their own, by their sites; when all are taken, the site that has most gives one to a newcomer. One identity has few slots, and its newest connection takes the slot of its
//! longest idle one (see [`mvm_transport::slots`]); `calls` says which are idle. Certificates that are not good any more are
//! counted apart: they take no slot of who has the name now.

pub(crate) mod calls;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mvm_pki::tls::PeerCertificate;
use mvm_pki::{Identity, Role};
use mvm_transport::RateLimit;
use mvm_transport::slots::{Activity, Evict, Rules, Slot, Slots};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::state::State;
use crate::stored::now;

/// From the first byte to the verified certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Peers that have proven nothing yet, all together. Anyone may open these, so they are fewer than the connections.
const MAX_HANDSHAKES: usize = 128;
/// Of those, from one site: a whole office of operators behind one address, and far from all slots.
const MAX_HANDSHAKES_PER_SITE: usize = 16;
/// Connections of one identity: one operator's terminals and scripts, and far from all slots.
const MAX_CONNECTIONS_PER_IDENTITY: usize = 32;
/// After accept failed (no file descriptors left), wait for some to be freed.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);
/// Connections without a certificate, all together and from one site. They take nothing from operators.
const MAX_ANONYMOUS: usize = 256;
const MAX_ANONYMOUS_PER_SITE: usize = 64;
/// Refused connections that the log tells of per second in the long run, and at once; the metrics count all.
const TOLD_PER_SECOND: f64 = 1.0;
const TOLD_BURST: f64 = 60.0;

/// Whose slot it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    /// An operator, and whether its certificate is good.
    Operator(Identity, bool),
    Site(IpAddr),
}

/// Who is at the other end, in every request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct GrpcPeer {
    /// What the connection's certificate proves; none: the client has none.
    pub(crate) proven: Option<(Identity, PeerCertificate)>,
    pub(crate) address: SocketAddr,
    activity: Activity<Holder>,
}

/// A connection whose client proved who it is.
pub(crate) struct GrpcStream {
    stream: TlsStream<TcpStream>,
    peer: GrpcPeer,
    /// Given back when the connection ends; the connection ends when a newer one has taken it.
    slot: Slot<Holder>,
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
    state: Arc<State>,
) -> mpsc::Receiver<std::io::Result<GrpcStream>> {
    let (ready, connections) = mpsc::channel(1);
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let slots = Slots::new(Rules {
        most: state.settings.max_grpc_connections,
        most_per_key: MAX_CONNECTIONS_PER_IDENTITY,
        evict: Evict::Idle,
    });
    // Few hold all of them soon; a watch that is cut off goes on from where it was.
    let evict = Evict::BusyOfOthers;
    let anonymous = Slots::new(Rules { most: MAX_ANONYMOUS, most_per_key: MAX_ANONYMOUS_PER_SITE, evict });
    let told = RateLimit::new(TOLD_PER_SECOND, TOLD_BURST);
    let shared = Arc::new(Shared { acceptor, slots, anonymous, told, state });
    tokio::spawn(async move {
        let shutdown = shared.state.shutdown.clone();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accept_task(listener, shared, ready) => {}
        }
    });
    connections
}

/// What all connections share.
struct Shared {
    acceptor: TlsAcceptor,
    slots: Slots<Holder>,
    /// Of connections without a certificate.
    anonymous: Slots<Holder>,
    told: RateLimit<()>,
    state: Arc<State>,
}

async fn accept_task(
    listener: TcpListener,
    shared: Arc<Shared>,
    ready: mpsc::Sender<std::io::Result<GrpcStream>>,
) {
    let under_way =
        Slots::new(Rules { most: MAX_HANDSHAKES, most_per_key: MAX_HANDSHAKES_PER_SITE, evict: Evict::Busy });
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
        let mut under_way = match under_way.take(site_of(address.ip())) {
            Ok(slot) => slot,
            Err(full) => {
                shared.refused(address, &full.to_string());
                continue;
            }
        };
        let (shared, ready) = (Arc::clone(&shared), ready.clone());
        handshakes.spawn(async move {
            let activity = under_way.activity();
            let shaken = async {
                tcp.peek(&mut [0]).await.map_err(|error| error.to_string())?;
                let _said_something = activity.begin();
                shared.handshake(tcp, address).await
            };
            let shaken = tokio::select! {
                shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, shaken) => shaken,
                () = under_way.evicted() => Ok(Err("newer handshakes needed its slot".to_owned())),
            };
            match shaken {
                // Handed over elsewhere: a verified connection no longer has a slot among the handshakes.
                Ok(Ok(stream)) => drop(tokio::spawn(async move { ready.send(Ok(stream)).await })),
                Ok(Err(reason)) => shared.refused(address, &reason),
                Err(_) => shared.refused(address, "the handshake took too long"),
            }
        });
    }
}

impl Shared {
    fn refused(&self, address: SocketAddr, reason: &str) {
        self.state.metrics.grpc_handshakes_failed.inc();
        if self.told.take((), Instant::now()).is_ok() {
            tracing::info!(%address, %reason, "refused a connection for gRPC");
        }
    }

    async fn handshake(&self, tcp: TcpStream, address: SocketAddr) -> Result<GrpcStream, String> {
        tcp.set_nodelay(true).map_err(|error| error.to_string())?;
        let stream = self.acceptor.accept(tcp).await.map_err(|error| error.to_string())?;
        let (_, connection) = stream.get_ref();
        let Some(certificates) = connection.peer_certificates() else {
            let slot = self.anonymous.take(Holder::Site(site_of(address.ip())));
            let slot = slot.map_err(|full| format!("without a certificate: {full}"))?;
            let peer = GrpcPeer { proven: None, address, activity: slot.activity() };
            return Ok(GrpcStream { stream, peer, slot });
        };
        let (identity, certificate) =
            mvm_pki::tls::peer(Some(certificates)).map_err(|refusal| refusal.to_string())?;
        match identity.role() {
            Role::Operator => {}
            Role::Coordinator | Role::Node => return Err(format!("{identity} is not an operator")),
        }
        // What it calls is judged again, and refused with the reason.
        let is_good = self.state.operators.check(&identity, Some(&certificate.fingerprint), now()).is_ok();
        let slot = self.slots.take(Holder::Operator(identity.clone(), is_good));
        let slot = slot.map_err(|full| format!("{identity}: {full}"))?;
        let peer = GrpcPeer { proven: Some((identity, certificate)), address, activity: slot.activity() };
        Ok(GrpcStream { stream, peer, slot })
    }
}

/// The site that a handshake is counted for: IPv4 as it is, IPv6 by its /48, which is what one site is given.
fn site_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 80 << 80)),
    }
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let Self { stream, slot, .. } = self.get_mut();
        if slot.poll_evicted(cx).is_ready() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_one_site_are_counted_together_and_sites_apart() {
        let site = |text: &str| site_of(text.parse().expect("an address"));
        assert_eq!(site("2001:db8:1:2::3"), site("2001:db8:1:ffff::"));
        assert_ne!(site("2001:db8:1::"), site("2001:db8:2::"));
        assert_eq!(site("::ffff:192.0.2.1"), site("192.0.2.1"));
        assert_ne!(site("192.0.2.1"), site("192.0.2.2"));
    }
}
