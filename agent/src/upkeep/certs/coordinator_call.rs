//! One call to a coordinator over HTTP/3: resolve, try its addresses in turn, ask, read the answer or the problem.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use mvm_pki::tls::{self, ExpectedPeer};
use mvm_pki::{LiveAnchors, LiveCredential, Role};
use mvm_proto::Problem;
use mvm_transport::{ALPN_H3, Client, Limits, Target};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::CertsError;

/// An answer of certificates and signing keys is a few KiB; a long history of roots a few hundred.
const MAX_ANSWER_BYTES: usize = 4 * 1024 * 1024;

/// The TLS settings to reach this cluster's coordinator with, with or without a certificate of our own.
pub(crate) fn verified(
    credential: Option<&LiveCredential>,
    anchors: &LiveAnchors,
    alpn: &[u8],
) -> Result<rustls::ClientConfig, tls::TlsError> {
    let cluster = anchors.current().cluster().clone();
    let expected = ExpectedPeer { cluster, role: Role::Coordinator, name: None, check_host: true };
    tls::client_config(credential, anchors, expected, &[alpn])
}

/// The TLS settings that accept anyone: only for fetching what a fingerprint pins.
pub(super) fn unverified() -> Result<rustls::ClientConfig, tls::TlsError> {
    tls::discovery_client_config(&[ALPN_H3])
}

/// A call's parts.
pub(super) struct Call<'a> {
    pub(super) coordinator: &'a Target,
    pub(super) tls: rustls::ClientConfig,
    pub(super) timeout: Duration,
}

impl Call<'_> {
    pub(super) async fn get(self, path: &str) -> Result<Bytes, CertsError> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    pub(super) async fn post<B: Serialize, A: DeserializeOwned>(
        self,
        path: &str,
        body: &B,
    ) -> Result<A, CertsError> {
        let coordinator = self.coordinator.clone();
        let body = serde_json::to_vec(body).map_err(|cause| CertsError::Key(cause.into()))?;
        let answer = self.send(Method::POST, path, body.into()).await?;
        serde_json::from_slice(&answer)
            .map_err(|cause| CertsError::BadAnswer { coordinator, detail: cause.to_string() })
    }

    async fn send(self, method: Method, path: &str, body: Bytes) -> Result<Bytes, CertsError> {
        let (coordinator, waited) = (self.coordinator.clone(), self.timeout);
        match tokio::time::timeout(waited, Box::pin(self.attempt(method, path, body))).await {
            Ok(result) => result,
            Err(_) => Err(CertsError::TimedOut { coordinator, waited }),
        }
    }

    async fn attempt(self, method: Method, path: &str, body: Bytes) -> Result<Bytes, CertsError> {
        let coordinator = self.coordinator;
        let limits = Limits { request_timeout: self.timeout, ..Limits::default() };
        let client = connect(coordinator, &self.tls, &limits).await?;
        let unusable = |detail: String| CertsError::BadAnswer { coordinator: coordinator.clone(), detail };
        let request = Request::builder()
            .method(method)
            .uri(format!("{coordinator}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|cause| unusable(cause.to_string()))?;
        let lost = |cause| CertsError::NoAnswer { coordinator: coordinator.clone(), cause };
        let (head, body) = client.request(request).await.map_err(lost)?.into_parts();
        let bytes = body.bytes(MAX_ANSWER_BYTES).await.map_err(lost)?;
        client.close().await;
        if head.status == StatusCode::OK || head.status == StatusCode::CREATED {
            return Ok(bytes);
        }
        match serde_json::from_slice::<Problem>(&bytes) {
            Ok(problem) => {
                Err(CertsError::Refused { coordinator: coordinator.clone(), problem: Box::new(problem) })
            }
            Err(_) => Err(unusable(format!("status {} without a reason", head.status))),
        }
    }
}

/// A connection to the first of the coordinator's addresses that answers; the last one's error when none does.
async fn connect(
    coordinator: &Target,
    tls: &rustls::ClientConfig,
    limits: &Limits,
) -> Result<Client, CertsError> {
    let addresses = coordinator
        .resolve()
        .await
        .map_err(|cause| CertsError::Resolve { coordinator: coordinator.clone(), cause })?;
    let mut last = CertsError::NoCoordinator;
    for address in addresses {
        match Client::connect(address, coordinator.host(), tls.clone(), limits).await {
            Ok(client) => return Ok(client),
            Err(cause) => {
                last = CertsError::Connect { coordinator: coordinator.clone(), cause: Box::new(cause) };
            }
        }
    }
    Err(last)
}
