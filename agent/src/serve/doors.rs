//! The doors others come in by: the unix socket, the loopback port, HTTP/3. Bound first, opened when all is in place.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::Router;
use mvm_pki::{ClientAuth, tls};
use mvm_transport::{ALPN_H3, Server};
use tokio::net::TcpListener;
use tracing::warn;

use super::error::AgentError;
use super::member::Member;
use super::tasks::{Tasks, http_task};
use crate::api::{Api, Door};
use crate::local_socket::{LocalSocket, operators_group};
use crate::settings::AgentSettings;

pub(super) struct Doors {
    socket: LocalSocket,
    metrics: TcpListener,
    metrics_address: SocketAddr,
    /// Absent: this node has no certificates to show on the network.
    server: Option<Server>,
}

impl Doors {
    pub(super) async fn bind(settings: &AgentSettings, member: Option<&Member>) -> Result<Self, AgentError> {
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
        tasks.spawn("socket", http_task(self.socket, api.router(Door::Local), stop.clone()));
        tasks.spawn("metrics", http_task(self.metrics, health, stop.clone()));
        if let Some(server) = self.server {
            tasks.spawn("api", server.serve(Some(api.router(Door::Network)), None, stop));
        }
    }
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
