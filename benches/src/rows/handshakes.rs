//! Full mutual-TLS handshakes per second through our server and clients, beside bare quinn and rustls.
//!
//! Both servers run in one thread on one core, both clients in another on the other; the same chain, the same suites.
//! A batch ends when every handshake is complete on both sides; connections are closed outside of the timed part.
//! On both sides of the comparison a handshake is in flight until the *server* has completed it. A TLS 1.3 client is done
//! earlier; were it to go on at once, its Initials would pile up in the server's socket buffer, and the packets dropped
//! there, each worth a second's timeout, would be all that is measured.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::BoxFuture;
use futures::stream::{StreamExt as _, TryStreamExt as _};
use mvm_pki::{ClientAuth, Identity};
use mvm_transport::{
    ALPN_H3, ALPN_SESSION, Client, Limits, Server, ServerSession, SessionDialer, SessionHandler,
};
use tokio_util::sync::CancellationToken;

use super::runtime;
use crate::authority::{Certificates, SERVER_NAME, now};
use crate::bare::{self, Accepted, LOOPBACK, Protocol};
use crate::effort::Effort;
use crate::machine::{Core, pin_this_thread, this_thread, thread_cpu_time};
use crate::row::{Goal, Row, Subject, Unit};

/// Handshakes in flight: a server is kept busy, and none is asked to prove its address.
const WIDTH: usize = 32;
/// Within 1.2 times of bare.
const GOAL: Goal = Goal::RatioAtLeast(0.83);
/// A batch takes a fraction of a second; a machine on which it takes this long can't measure it.
const BATCH_LIMIT: Duration = Duration::from_secs(30);

/// The servers, in their thread.
struct Servers {
    ours: SocketAddr,
    bare: SocketAddr,
    /// Handshakes that the bare server has completed.
    accepted: Arc<Accepted>,
    thread: PathBuf,
    shutdown: CancellationToken,
}

/// One batch: handshakes per second, and the server's CPU time for each.
#[derive(Debug, Clone, Copy)]
struct Batch {
    rate: f64,
    server_us: f64,
}

struct Hold;

impl SessionHandler for Hold {
    fn handle(&self, _: Identity, _: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            session.control.closed().await;
        })
    }
}

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let certificates = Arc::new(Certificates::make(now())?);
    let servers = start_servers(&certificates)?;
    pin_this_thread(Core::Load)?;
    let rows = runtime()?.block_on(async {
        Ok(vec![
            session_row(effort, &certificates, &servers).await?,
            http_row(effort, &certificates, &servers).await?,
        ])
    });
    servers.shutdown.cancel();
    rows
}

/// Node sessions: one socket for all on both sides, nothing after the handshake.
async fn session_row(effort: &Effort, certificates: &Certificates, servers: &Servers) -> Result<Row> {
    let limits = limits();
    let tls = our_client(certificates, ALPN_SESSION)?;
    let dialer = SessionDialer::bind(LOOPBACK)?;
    let endpoint = bare::client()?;
    let config = bare::client_config(certificates, Protocol::Plain)?;
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..effort.pairs {
        let dial = || async { Ok(dialer.dial(servers.ours, SERVER_NAME, tls.clone(), &limits).await?) };
        let (batch, sessions) = batch(effort.handshakes, servers, None, dial).await?;
        ours.push(batch);
        sessions.iter().for_each(|session| session.control.close(0, ""));
        bare.push(
            bare_batch(effort, servers, Protocol::Plain, || Ok((endpoint.clone(), config.clone()))).await?,
        );
    }
    Ok(row("handshakes, node session", "bare quinn + rustls", &ours, &bare))
}

/// HTTP/3 clients, with HTTP/3's own streams opened: each has a socket of its own, on both sides of the comparison.
async fn http_row(effort: &Effort, certificates: &Certificates, servers: &Servers) -> Result<Row> {
    let limits = limits();
    let tls = our_client(certificates, ALPN_H3)?;
    let config = bare::client_config(certificates, Protocol::Http3)?;
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..effort.pairs {
        let dial = || async { Ok(Client::connect(servers.ours, SERVER_NAME, tls.clone(), &limits).await?) };
        let (batch, clients) = batch(effort.handshakes, servers, None, dial).await?;
        ours.push(batch);
        futures::future::join_all(clients.into_iter().map(Client::close)).await;
        let fresh = || Ok((bare::client()?, config.clone()));
        bare.push(bare_batch(effort, servers, Protocol::Http3, fresh).await?);
    }
    Ok(row("handshakes, HTTP/3 client", "bare quinn + rustls + h3", &ours, &bare))
}

async fn bare_batch(
    effort: &Effort,
    servers: &Servers,
    protocol: Protocol,
    from: impl Fn() -> Result<(quinn::Endpoint, quinn::ClientConfig)>,
) -> Result<Batch> {
    let target = servers.accepted.count() + effort.handshakes as u64;
    let dial = || {
        let from = &from;
        async move {
            servers.accepted.wait_for_room().await?;
            let (endpoint, config) = from()?;
            let connection = endpoint.connect_with(config, servers.bare, SERVER_NAME)?.await?;
            let http = match protocol {
                Protocol::Plain => None,
                Protocol::Http3 => Some(bare::http_client(connection.clone()).await?),
            };
            Ok((endpoint, connection, http))
        }
    };
    let (batch, held) = batch(effort.handshakes, servers, Some(target), dial).await?;
    held.iter().for_each(|(_, connection, _)| connection.close(0u32.into(), b""));
    Ok(batch)
}

/// Dials `count` times, [`WIDTH`] at once; done when the bare server has accepted `target` as well, if one is given.
/// Ours needs none: it waits for the server's confirmation by itself.
async fn batch<C, F: Future<Output = Result<C>>>(
    count: usize,
    servers: &Servers,
    target: Option<u64>,
    dial: impl FnMut() -> F,
) -> Result<(Batch, Vec<C>)> {
    let mut dial = dial;
    let cpu_before = thread_cpu_time(&servers.thread)?;
    let begun = Instant::now();
    let all =
        futures::stream::iter((0..count).map(|_| dial())).buffer_unordered(WIDTH).try_collect::<Vec<C>>();
    let held = tokio::time::timeout(BATCH_LIMIT, all).await.context("handshakes take too long")??;
    while target.is_some_and(|target| servers.accepted.count() < target) {
        ensure!(begun.elapsed() < BATCH_LIMIT, "the bare server has not accepted all");
        tokio::task::yield_now().await;
    }
    let took = begun.elapsed();
    let cpu = thread_cpu_time(&servers.thread)?.saturating_sub(cpu_before);
    let each = |time: Duration| time.as_secs_f64() / count as f64;
    Ok((Batch { rate: 1.0 / each(took), server_us: each(cpu) * 1e6 }, held))
}

fn row(name: &str, peer: &str, ours: &[Batch], bare: &[Batch]) -> Row {
    let rates: Vec<f64> = ours.iter().map(|batch| batch.rate).collect();
    let pairs = |part: fn(&Batch) -> f64| -> Vec<(f64, f64)> {
        ours.iter().zip(bare).map(|(ours, bare)| (part(ours), part(bare))).collect()
    };
    let cpu = pairs(|batch| batch.server_us);
    let median = |side: fn(&(f64, f64)) -> f64| {
        crate::statistics::Summary::of(&cpu.iter().map(side).collect::<Vec<_>>()).map_or(0.0, |s| s.median)
    };
    let ratio = crate::statistics::Ratio::of(&cpu).map_or(0.0, |ratio| ratio.median);
    Row::of(Subject::Handshakes, name, &rates, Unit::PerSecond)
        .beside(peer, &pairs(|batch| batch.rate))
        .goal(GOAL)
        .note(format!(
            "server's CPU {:.0} us each, bare {:.0} us, paired ratio {ratio:.2}",
            median(|(ours, _)| *ours),
            median(|(_, bare)| *bare)
        ))
}

fn start_servers(certificates: &Arc<Certificates>) -> Result<Servers> {
    let (tell, told) = std::sync::mpsc::channel();
    let certificates = Arc::clone(certificates);
    std::thread::spawn(move || {
        let failed = tell.clone();
        if let Err(error) = serve(&certificates, &tell) {
            let _ = failed.send(Err(error));
        }
    });
    told.recv().context("the servers' thread has ended")?
}

fn serve(certificates: &Certificates, tell: &std::sync::mpsc::Sender<Result<Servers>>) -> Result<()> {
    pin_this_thread(Core::Server)?;
    runtime()?.block_on(async {
        let alpn = [ALPN_SESSION, ALPN_H3];
        let (coordinator, anchors) = (&certificates.coordinator, &certificates.live_anchors());
        let tls = mvm_pki::tls::server_config(
            coordinator,
            anchors,
            &certificates.cluster,
            ClientAuth::Required,
            &alpn,
        )?;
        let ours = Server::bind(LOOPBACK, tls, limits())?;
        let bare = bare::server(certificates)?;
        let (accepted, shutdown) = (Arc::new(Accepted::new(WIDTH)), CancellationToken::new());
        let servers = Servers {
            ours: ours.local_addr(),
            bare: bare.local_addr()?,
            accepted: Arc::clone(&accepted),
            thread: this_thread(),
            shutdown: shutdown.clone(),
        };
        tell.send(Ok(servers))?;
        tokio::spawn(bare::accept_task(bare, accepted));
        ours.serve(Some(axum::Router::new()), Some(Arc::new(Hold)), shutdown).await;
        Ok(())
    })
}

fn our_client(certificates: &Certificates, alpn: &[u8]) -> Result<rustls::ClientConfig> {
    let anchors = certificates.live_anchors();
    Ok(mvm_pki::tls::client_config(Some(&certificates.node), &anchors, certificates.expected(), &[alpn])?)
}

/// The defaults, but for the number of connections that one identity may have: one node plays them all here.
fn limits() -> Limits {
    Limits { max_connections_per_identity: usize::MAX, drain_timeout: Duration::ZERO, ..Limits::default() }
}
