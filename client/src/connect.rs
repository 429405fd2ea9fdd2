//! The connection to a coordinator: TLS with an operator's certificate, and gRPC on it.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use mvm_pki::{ExpectedPeer, LiveAnchors, LiveCredential, Refusal, Role, refusal_of};
use mvm_proto::ClusterId;
use mvm_proto::wire::MAX_MESSAGE_BYTES;
use mvm_proto::wire::control::v1::control_client;
use mvm_transport::{ResolveError, Target};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Endpoint, Uri};

use crate::channel::Channel;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The generated client of the service `Control` on a connected channel.
pub type ControlClient = control_client::ControlClient<Channel>;

/// Keeps a long `push` alive through firewalls that forget silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("could not resolve {target}")]
    Resolve {
        target: Target,
        #[source]
        cause: ResolveError,
    },
    #[error("{target} did not answer within {waited:?}")]
    Timeout { target: Target, waited: Duration },
    #[error("could not connect to {target}")]
    Connect {
        target: Target,
        #[source]
        cause: std::io::Error,
    },
    /// Our side refused what answered.
    #[error("what answers at {target} is not this cluster's coordinator")]
    NotTheCoordinator {
        target: Target,
        #[source]
        cause: Refusal,
    },
    #[error("could not agree on TLS with {target}")]
    Tls {
        target: Target,
        #[source]
        cause: BoxError,
    },
    #[error("could not speak gRPC with {target}")]
    Grpc {
        target: Target,
        #[source]
        cause: tonic::transport::Error,
    },
}

/// Connects with an operator's certificate; the peer must be a coordinator of `cluster` with a certificate for the
/// target's host. A connection that is lost is made again at the next call.
pub async fn open(
    target: &Target,
    operator: &LiveCredential,
    anchors: &LiveAnchors,
    cluster: &ClusterId,
    timeout: Duration,
) -> Result<Channel, ClientError> {
    let expired = |_| ClientError::Timeout { target: target.clone(), waited: timeout };
    let opening = Box::pin(open_now(target, operator, anchors, cluster));
    tokio::time::timeout(timeout, opening).await.map_err(expired)?
}

/// The same, with the client of `Control` on it.
pub async fn connect(
    target: &Target,
    operator: &LiveCredential,
    anchors: &LiveAnchors,
    cluster: &ClusterId,
    timeout: Duration,
) -> Result<ControlClient, ClientError> {
    open(target, operator, anchors, cluster, timeout).await.map(control)
}

/// The client of `Control` on a channel.
#[must_use]
pub fn control(channel: Channel) -> ControlClient {
    ControlClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// How long a coordinator on this machine may take from its start until it listens; `serve &` and the next command are
/// often pasted together.
const STARTS_WITHIN: Duration = Duration::from_secs(2);
const TRIED_EVERY: Duration = Duration::from_millis(50);

/// Dials, and while nothing listens on this machine dials again for a moment.
async fn once_started<T, F>(target: &Target, dial: impl Fn() -> F) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    let is_here = target.host() == "localhost"
        || target.host().parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    let begun = tokio::time::Instant::now();
    loop {
        match dial().await {
            Err(ClientError::Connect { cause, .. })
                if is_here
                    && cause.kind() == std::io::ErrorKind::ConnectionRefused
                    && begun.elapsed() < STARTS_WITHIN =>
            {
                tokio::time::sleep(TRIED_EVERY).await;
            }
            other => return other,
        }
    }
}

async fn open_now(
    target: &Target,
    operator: &LiveCredential,
    anchors: &LiveAnchors,
    cluster: &ClusterId,
) -> Result<Channel, ClientError> {
    let tls_error = |cause: BoxError| ClientError::Tls { target: target.clone(), cause };
    let expected =
        ExpectedPeer { cluster: cluster.clone(), role: Role::Coordinator, name: None, check_host: true };
    let tls = mvm_pki::tls::client_config(Some(operator), anchors, expected, &[b"h2"])
        .map_err(|cause| tls_error(cause.into()))?;
    let name = ServerName::try_from(target.host().to_owned()).map_err(|cause| tls_error(cause.into()))?;

    // The first connection is made here, so that its failure is told by our types and not through tonic's.
    let tcp = once_started(target, || dial(target)).await?;
    let connector = TlsConnector::from(std::sync::Arc::new(tls));
    let stream = connector.connect(name.clone(), tcp).await.map_err(|cause| told(target, cause))?;

    let mut first = Some(stream);
    let redial = target.clone();
    let service = tower::service_fn(move |_: Uri| {
        let (ready, connector, name, target) =
            (first.take(), connector.clone(), name.clone(), redial.clone());
        async move {
            let stream = match ready {
                Some(stream) => stream,
                None => connector.connect(name, dial(&target).await?).await?,
            };
            Ok::<_, BoxError>(TokioIo::new(stream))
        }
    });
    let grpc_error = |cause| ClientError::Grpc { target: target.clone(), cause };
    let endpoint = Endpoint::from_shared(target.to_string())
        .map_err(grpc_error)?
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_while_idle(false);
    endpoint.connect_with_connector(service).await.map(Channel::from).map_err(grpc_error)
}

async fn dial(target: &Target) -> Result<TcpStream, ClientError> {
    let addresses =
        target.resolve().await.map_err(|cause| ClientError::Resolve { target: target.clone(), cause })?;
    let connect_error = |cause| ClientError::Connect { target: target.clone(), cause };
    let tcp = TcpStream::connect(addresses.as_slice()).await.map_err(connect_error)?;
    tcp.set_nodelay(true).map_err(connect_error)?;
    Ok(tcp)
}

/// A failed handshake in our own words when our verifier was the cause.
fn told(target: &Target, cause: std::io::Error) -> ClientError {
    let inner = cause.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner.and_then(refusal_of) {
        Some(cause) => ClientError::NotTheCoordinator { target: target.clone(), cause },
        None => ClientError::Tls { target: target.clone(), cause: cause.into() },
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::ErrorKind;

    use super::*;

    async fn tries(target: &str, refusals: u32, kind: ErrorKind) -> (u32, bool) {
        let (target, tried) = (target.parse::<Target>().unwrap(), Cell::new(0));
        let done = once_started(&target, || {
            tried.set(tried.get() + 1);
            let cause = std::io::Error::from(kind);
            let refused = ClientError::Connect { target: target.clone(), cause };
            std::future::ready(if tried.get() > refusals { Ok(()) } else { Err(refused) })
        });
        let reached = done.await.is_ok();
        (tried.get(), reached)
    }

    #[tokio::test(start_paused = true)]
    async fn a_coordinator_that_starts_on_this_machine_is_waited_for_and_no_other() {
        assert_eq!(tries("https://localhost:4433", 3, ErrorKind::ConnectionRefused).await, (4, true));
        assert_eq!(tries("https://c1.example:4433", 3, ErrorKind::ConnectionRefused).await, (1, false));
        assert_eq!(tries("https://[::1]:4433", 3, ErrorKind::TimedOut).await, (1, false));
        let (tried, reached) = tries("https://127.0.0.1:4433", u32::MAX, ErrorKind::ConnectionRefused).await;
        assert!(!reached && tried > 10, "it ends: {tried} tries");
    }
}
