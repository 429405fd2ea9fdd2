//! The listeners of an agent: the unix socket, the loopback port, HTTP/3. All are bound first; they accept once the rest is ready.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use std::time::Duration;

use axum::Router;
use mvm_pki::{ClientAuth, tls};
use mvm_proto::text::is_caused_by;
use mvm_transport::{ALPN_H3, Server};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tracing::warn;

use super::error::AgentError;
use super::member::Member;
use super::tasks::{Tasks, http_task};
use crate::intake::api::{Api, Listener};
use crate::intake::local_socket::{LocalSocket, operators_group};
use crate::serve::settings::AgentSettings;

const IN_USE_PATIENCE: Duration = Duration::from_secs(2);
const IN_USE_PAUSE: Duration = Duration::from_millis(10);

pub(super) struct Listeners {
    socket: LocalSocket,
    metrics: TcpListener,
    metrics_address: SocketAddr,
    /// Absent: this node has no certificates to show on the network.
    server: Option<Server>,
}

impl Listeners {
    /// Waits a while for what is in use: a VMM that a killed agent was about to start holds all that the agent had open
    /// until it becomes its program.
    pub(super) async fn bind(settings: &AgentSettings, member: Option<&Member>) -> Result<Self, AgentError> {
        let patience_ends = Instant::now() + IN_USE_PATIENCE;
        loop {
            match Self::try_bind(settings, member).await {
                Err(error) if is_in_use(&error) && Instant::now() < patience_ends => {
                    tokio::time::sleep(IN_USE_PAUSE).await;
                }
                bound => return bound,
            }
        }
    }

    async fn try_bind(settings: &AgentSettings, member: Option<&Member>) -> Result<Self, AgentError> {
        let socket = LocalSocket::bind(&settings.socket, operators_group())
            .map_err(|cause| AgentError::Socket { path: settings.socket.clone(), cause })?;
        let metrics = TcpListener::bind(settings.metrics_listen)
            .await
            .map_err(|cause| AgentError::MetricsListen { address: settings.metrics_listen, cause })?;
        let metrics_address = metrics.local_addr().unwrap_or(settings.metrics_listen);
        if !metrics_address.ip().is_loopback() {
            warn!(address = %metrics_address, "metrics and health are open to the network");
        }
        let server = member.map(|member| bind_api(settings, member)).transpose()?;
        Ok(Self { socket, metrics, metrics_address, server })
    }

    /// Where the API listens, if it does, and where metrics do.
    pub(super) fn addresses(&self) -> (Option<SocketAddr>, SocketAddr) {
        (self.server.as_ref().map(Server::local_addr), self.metrics_address)
    }

    /// Starts to serve.
    pub(super) fn open(self, tasks: &mut Tasks, api: &Api, health: Router) {
        let stop = tasks.stop_token();
        tasks.spawn("socket", http_task(self.socket, api.router(Listener::Local), stop.clone()));
        tasks.spawn("metrics", http_task(self.metrics, health, stop.clone()));
        if let Some(server) = self.server {
            tasks.spawn("api", server.serve(Some(api.router(Listener::Network)), None, stop));
        }
    }
}

fn is_in_use(error: &(dyn std::error::Error + 'static)) -> bool {
    is_caused_by(error, |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse)
}

fn bind_api(settings: &AgentSettings, member: &Member) -> Result<Server, AgentError> {
    let bind = |address| {
        let tls = tls::server_config(
            &member.credential,
            &member.anchors,
            &member.cluster,
            ClientAuth::Required,
            &[ALPN_H3],
        )
        .map_err(AgentError::Tls)?;
        Server::bind(address, tls, settings.limits.clone()).map_err(AgentError::Listen)
    };
    let any_v6 = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    bind(settings.listen).or_else(|error| {
        if settings.listen.ip() != any_v6 {
            return Err(error);
        }
        // A kernel without IPv6 can't listen on `::`, which on all others means IPv4 as well.
        bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), settings.listen.port())).map_err(|_| error)
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_a_killed_agent_was_about_to_start_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = AgentSettings::new(dir.path());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        settings.metrics_listen = listener.local_addr().unwrap();
        // As a VMM that has not become its program yet: it holds what was open in the process that started it.
        let held = Stdio::from(OwnedFd::from(listener));
        let mut holder = Command::new("sleep").arg("infinity").stdin(held).spawn().unwrap();
        let ends = async {
            tokio::time::sleep(IN_USE_PATIENCE / 2).await;
            holder.kill().and_then(|()| holder.wait()).unwrap()
        };
        let (bound, _) = tokio::join!(Listeners::bind(&settings, None), ends);
        assert_eq!(bound.unwrap().addresses(), (None, settings.metrics_listen));
    }
}
