//! TLS configurations: 1.3 only, mutual, no resumption, no early data.

use std::sync::Arc;

use mvm_proto::ClusterId;
use rustls::crypto::CryptoProvider;
use rustls_pki_types::CertificateDer;

use crate::identity::{Identity, Role};
use crate::live::{LiveAnchors, LiveCredential};
use crate::refusal::Refusal;

#[derive(Debug, thiserror::Error)]
#[error("could not set up TLS")]
pub struct TlsError(#[from] rustls::Error);

/// Whether a server insists on a client certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    Required,
    /// For enrolment, where the client has none yet. One that is presented is still judged.
    Optional,
}

/// Whom a client means to reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedPeer {
    pub cluster: ClusterId,
    pub role: Role,
    /// The name in the identity, when one certain peer is meant.
    pub name: Option<String>,
    /// Whether a DNS or IP name must match the server name too.
    pub check_host: bool,
}

#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    todo!()
}

pub fn server_config(
    credential: &LiveCredential,
    anchors: &LiveAnchors,
    cluster: &ClusterId,
    auth: ClientAuth,
    alpn: &[&[u8]],
) -> Result<rustls::ServerConfig, TlsError> {
    let _ = (credential, anchors, cluster, auth, alpn);
    todo!()
}

pub fn client_config(
    credential: Option<&LiveCredential>,
    anchors: &LiveAnchors,
    expected: ExpectedPeer,
    alpn: &[&[u8]],
) -> Result<rustls::ClientConfig, TlsError> {
    let _ = (credential, anchors, expected, alpn);
    todo!()
}

/// Accepts ANY server certificate. Only to download the roots of which a join token holds the fingerprint.
pub fn discovery_client_config(alpn: &[&[u8]]) -> Result<rustls::ClientConfig, TlsError> {
    let _ = alpn;
    todo!()
}

/// The identity in an already verified chain.
pub fn peer_identity(certs: Option<&[CertificateDer<'_>]>) -> Result<Identity, Refusal> {
    let _ = certs;
    todo!()
}
