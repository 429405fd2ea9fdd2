//! TLS configurations for every endpoint: 1.3 only, mutual, no resumption, no early data.
//!
//! A server takes any role of its own cluster, because what a role may do is decided per endpoint, above. A client
//! says which peer it means to reach. Resumption is off on both sides: a resumed session would skip the certificate check,
//! and a renewed, expired or removed peer would go unnoticed.

mod verify;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mvm_proto::{ClusterId, Digest, Timestamp};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::KeyUsage;

use crate::certificate;
use crate::credential::{Anchors, Credential};
use crate::identity::{Identity, Role, identity_of};
use crate::live::{LiveAnchors, LiveCredential, Prepared};
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

/// The peer that a client means to reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedPeer {
    pub cluster: ClusterId,
    pub role: Role,
    /// The name in the identity, when one certain peer is meant.
    pub name: Option<String>,
    /// Whether a DNS or IP name must match the server name too.
    pub check_host: bool,
}

/// The cryptography that everything here uses. AES-128-GCM comes first: it is the fastest where AES is in hardware,
/// and QUIC needs it for its first packets anyway.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let make = || {
        let suites = vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ];
        Arc::new(CryptoProvider { cipher_suites: suites, ..aws_lc_rs::default_provider() })
    };
    PROVIDER.get_or_init(make).clone()
}

/// A server that shows `credential` and takes clients of `cluster` that `anchors` vouch for.
pub fn server_config(
    credential: &LiveCredential,
    anchors: &LiveAnchors,
    cluster: &ClusterId,
    auth: ClientAuth,
    alpn: &[&[u8]],
) -> Result<ServerConfig, TlsError> {
    let verifier = verify::ClientVerifier::new(anchors.clone(), cluster.clone(), auth);
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(credential.clone()));
    config.alpn_protocols = owned(alpn);
    config.ignore_client_order = true;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(config)
}

/// A client that shows `credential`, if any, and speaks only to `expected`.
pub fn client_config(
    credential: Option<&LiveCredential>,
    anchors: &LiveAnchors,
    expected: ExpectedPeer,
    alpn: &[&[u8]],
) -> Result<ClientConfig, TlsError> {
    let verifier = verify::ServerVerifier::new(anchors.clone(), expected);
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let config = match credential {
        Some(credential) => builder.with_client_cert_resolver(Arc::new(credential.clone())),
        None => builder.with_no_client_auth(),
    };
    Ok(hardened(config, alpn))
}

/// Accepts ANY server certificate, so whatever comes over it is a stranger's word. Only to download the roots, of
/// which a join token holds the fingerprint: [`crate::Anchors::pinned`] then decides whether to believe them. Never
/// send anything secret over it.
pub fn discovery_client_config(alpn: &[&[u8]]) -> Result<ClientConfig, TlsError> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verify::AnyServer))
        .with_no_client_auth();
    Ok(hardened(config, alpn))
}

fn hardened(mut config: ClientConfig, alpn: &[&[u8]]) -> ClientConfig {
    config.alpn_protocols = owned(alpn);
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    config
}

fn owned(alpn: &[&[u8]]) -> Vec<Vec<u8>> {
    alpn.iter().map(|protocol| protocol.to_vec()).collect()
}

/// Verifies a chain (leaf first) outside a handshake, as it was when its leaf became valid: for a chain that an
/// authority has just issued to us, before it is used. Its age is checked by the peer it is shown to.
pub fn verify_issued(anchors: &Anchors, credential: &Credential) -> Result<(), Refusal> {
    let [leaf, intermediates @ ..] = credential.chain() else { return Err(Refusal::NoCertificate) };
    let time = u64::try_from(credential.not_before().unix_secs()).unwrap_or(0);
    let time = UnixTime::since_unix_epoch(Duration::from_secs(time));
    let prepared = Prepared::new(anchors.clone());
    for usage in [KeyUsage::client_auth(), KeyUsage::server_auth()] {
        let identity = verify::verified_identity(&prepared, leaf, intermediates, time, usage)?;
        verify::check_cluster(&identity, anchors.cluster())?;
    }
    Ok(())
}

/// What an already verified certificate says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate {
    pub fingerprint: Digest,
    pub serial_hex: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// The identity in an already verified chain, with the certificate that says so.
pub fn peer(certs: Option<&[CertificateDer<'_>]>) -> Result<(Identity, PeerCertificate), Refusal> {
    let identity = peer_identity(certs)?;
    let leaf = certs.and_then(<[_]>::first).ok_or(Refusal::NoCertificate)?;
    let facts = certificate::facts(leaf).map_err(|error| Refusal::NoIdentity(error.to_string()))?;
    let certificate::Facts { serial_hex, not_before, not_after, .. } = facts;
    let fingerprint = certificate::fingerprint(leaf);
    Ok((identity, PeerCertificate { fingerprint, serial_hex, not_before, not_after }))
}

/// The identity in an already verified chain.
pub fn peer_identity(certs: Option<&[CertificateDer<'_>]>) -> Result<Identity, Refusal> {
    let leaf = certs.and_then(<[_]>::first).ok_or(Refusal::NoCertificate)?;
    identity_of(leaf).map_err(|cause| Refusal::NoIdentity(cause.to_string()))
}
