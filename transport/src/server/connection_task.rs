//! One connection, from its first packet to its end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use mvm_pki::Identity;
use quinn::ConnectionError;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, error, info_span, warn};

use super::admission::Permit;
use super::http::serve_http;
use super::stats::{Count, ServerStats};
use super::{Registry, SessionHandler, TunnelHandler};
use crate::connect::alert_of;
use crate::limits::Limits;
use crate::peer::Peer;
use crate::session::{ServerSession, close_code};
use crate::tunnel::Tunnel;
use crate::{ALPN_H3, ALPN_SESSION, ALPN_TUNNEL, quic};

/// The alert sent for having no protocol in common.
const ALERT_NO_APPLICATION_PROTOCOL: u8 = 120;

/// What all connections share.
pub(super) struct Services {
    pub(super) http: Option<axum::Router>,
    pub(super) sessions: Option<Arc<dyn SessionHandler>>,
    pub(super) tunnels: Option<Arc<dyn TunnelHandler>>,
    pub(super) registry: Option<Arc<dyn Registry>>,
    pub(super) limits: Limits,
    pub(super) stats: Arc<ServerStats>,
    pub(super) shutdown: CancellationToken,
}

/// Runs one connection. Never panics: a panic inside is logged and counted.
pub(super) async fn connection_task(incoming: quinn::Incoming, permit: Permit, services: Arc<Services>) {
    let address = incoming.remote_address();
    let stats = Arc::clone(&services.stats);
    let work = run(incoming, permit, services).instrument(info_span!("connection", %address));
    if AssertUnwindSafe(work).catch_unwind().await.is_err() {
        stats.count(Count::panics);
        error!(%address, "a connection's task panicked; the others go on");
    }
}

async fn run(incoming: quinn::Incoming, mut permit: Permit, services: Arc<Services>) {
    let Some(connection) = shake_hands(incoming, &mut permit, &services).await else { return };
    let identity = match identity_of(&connection) {
        Ok(identity) => identity,
        Err(reason) => {
            // The verifier has judged this very chain, so this is a gap between the two, not a peer's mistake.
            warn!(%reason, "closing a connection whose verified certificate has no identity");
            return connection.close(close_code::NOT_HERE.into(), b"no identity");
        }
    };
    let counts = match (&services.registry, &identity, quic::certificate_of(&connection)) {
        (Some(registry), Some(identity), Some(certificate)) => registry.counts(identity, &certificate).await,
        _ => true,
    };
    if let Err(full) = permit.established(identity.as_ref(), counts) {
        debug!(%full, "closing a connection above the limits");
        return connection.close(close_code::OVERLOADED.into(), b"too many connections");
    }
    services.stats.count(Count::connections_accepted);
    let activity = permit.activity();
    // Boxed, so that an idle session does not carry the room of an HTTP connection, nor of its own handshake.
    match quic::protocol_of(&connection).as_deref() {
        Some(ALPN_H3) => match &services.http {
            Some(router) => {
                let certificate = quic::certificate_of(&connection);
                let peer = Peer { identity, certificate, address: connection.remote_address() };
                let cut = cut_off(&connection, &mut permit, peer.identity.is_none(), &services);
                tokio::select! {
                    () = Box::pin(serve_http(connection.clone(), router.clone(), peer, activity, &services)) => {}
                    () = cut => {}
                }
            }
            None => connection.close(close_code::NOT_HERE.into(), b"HTTP/3 is not served here"),
        },
        Some(ALPN_SESSION) => match (&services.sessions, identity) {
            (Some(handler), Some(identity)) => {
                let opened = timeout(services.limits.handshake_timeout, connection.accept_bi());
                let streams = tokio::select! {
                    opened = opened => match opened {
                        Ok(Ok(streams)) => streams,
                        Ok(Err(error)) => return debug!(%error, "the peer left before it opened its session"),
                        Err(_) => {
                            return connection.close(close_code::TOO_SLOW.into(), b"no session was opened");
                        }
                    },
                    () = permit.evicted() => return close_evicted(&connection, &services),
                };
                // A session is in use for as long as it lasts, and idle before it was opened.
                let Some(_busy) = activity.begin() else { return close_evicted(&connection, &services) };
                let handler = Arc::clone(handler);
                Box::pin(serve_session(connection, streams, handler, identity, &services)).await;
            }
            (_, None) => connection.close(close_code::NOT_HERE.into(), b"a session needs a certificate"),
            (None, _) => connection.close(close_code::NOT_HERE.into(), b"sessions are not served here"),
        },
        Some(ALPN_TUNNEL) => match (&services.tunnels, identity) {
            (Some(handler), Some(identity)) => {
                let Some(_busy) = activity.begin() else { return close_evicted(&connection, &services) };
                let handler = Arc::clone(handler);
                Box::pin(serve_tunnel(connection, handler, identity, &services)).await;
            }
            (_, None) => connection.close(close_code::NOT_HERE.into(), b"a tunnel needs a certificate"),
            (None, _) => connection.close(close_code::NOT_HERE.into(), b"tunnels are not served here"),
        },
        _ => connection.close(close_code::NOT_HERE.into(), b"unknown protocol"),
    }
}

/// Closes a connection once a newer one has its slot, or once it lasted as long as one without a certificate may.
async fn cut_off(connection: &quinn::Connection, permit: &mut Permit, anonymous: bool, services: &Services) {
    let life = async {
        if !anonymous {
            std::future::pending::<()>().await;
        }
        sleep(services.limits.anonymous_life).await;
    };
    tokio::select! {
        () = permit.evicted() => close_evicted(connection, services),
        () = life => {
            services.stats.count(Count::anonymous_expired);
            debug!("closing a connection without a certificate at the end of its life");
            connection.close(close_code::TOO_SLOW.into(), b"a connection without a certificate is short");
        }
    }
}

fn close_evicted(connection: &quinn::Connection, services: &Services) {
    services.stats.count(Count::connections_displaced);
    debug!("closing a connection for a newer one");
    connection.close(close_code::OVERLOADED.into(), b"a newer connection took its slot");
}

async fn shake_hands(
    incoming: quinn::Incoming,
    permit: &mut Permit,
    services: &Services,
) -> Option<quinn::Connection> {
    let stats = &services.stats;
    let connecting = match incoming.accept() {
        Ok(connecting) => connecting,
        // The first packet is read here, so an unknown protocol ends here too.
        Err(error) => {
            stats.count(cause_of(&error));
            debug!(%error, "a handshake failed");
            return None;
        }
    };
    let shaken = tokio::select! {
        shaken = timeout(services.limits.handshake_timeout, connecting) => shaken,
        () = permit.evicted() => {
            stats.count(Count::handshakes_displaced);
            debug!("gave up a handshake for one of another address");
            return None;
        }
    };
    match shaken {
        Ok(Ok(connection)) => Some(connection),
        Ok(Err(error)) => {
            stats.count(cause_of(&error));
            debug!(%error, "a handshake failed");
            None
        }
        Err(_) => {
            stats.count(Count::handshakes_timed_out);
            debug!("a handshake took too long");
            None
        }
    }
}

fn cause_of(error: &ConnectionError) -> Count {
    match error {
        ConnectionError::TransportError(ours) => match alert_of(ours.code.into()) {
            Some(ALERT_NO_APPLICATION_PROTOCOL) => Count::handshakes_bad_alpn,
            Some(_) => Count::handshakes_bad_certificate,
            None => Count::handshakes_failed,
        },
        ConnectionError::TimedOut => Count::handshakes_timed_out,
        _ => Count::handshakes_failed,
    }
}

fn identity_of(connection: &quinn::Connection) -> Result<Option<Identity>, mvm_pki::Refusal> {
    match quic::chain_of(connection) {
        None => Ok(None),
        Some(chain) => mvm_pki::tls::peer_identity(Some(chain.as_slice())).map(Some),
    }
}

async fn serve_session(
    connection: quinn::Connection,
    streams: (quinn::SendStream, quinn::RecvStream),
    handler: Arc<dyn SessionHandler>,
    identity: Identity,
    services: &Services,
) {
    // One stream is all there is to a session.
    connection.set_max_concurrent_bi_streams(0_u32.into());
    services.stats.count(Count::sessions);
    let address = connection.remote_address();
    let session = ServerSession::new(connection.clone(), streams, &services.limits);
    let mut handling = handler.handle(identity, address, session);
    tokio::select! {
        () = &mut handling => connection.close(close_code::DONE.into(), b"done"),
        () = services.shutdown.cancelled() => {
            connection.close(close_code::SHUTDOWN.into(), b"shutting down");
            // Its next call fails; what it does then is its own tidying up.
            handling.await;
        }
    }
}

async fn serve_tunnel(
    connection: quinn::Connection,
    handler: Arc<dyn TunnelHandler>,
    identity: Identity,
    services: &Services,
) {
    services.stats.count(Count::tunnels);
    let mut handling = handler.handle(identity, Tunnel::new(connection.clone()));
    tokio::select! {
        () = &mut handling => connection.close(close_code::DONE.into(), b"done"),
        () = services.shutdown.cancelled() => {
            connection.close(close_code::SHUTDOWN.into(), b"shutting down");
            handling.await;
        }
    }
}
