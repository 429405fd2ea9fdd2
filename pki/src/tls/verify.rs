//! Judging the certificate at the other end of a handshake.
//!
//! `webpki` verifies the chain up to an anchor; it can't look at URI names, so the identity is read afterwards,
//! from the leaf of the verified chain. Time is the one that TLS passes in. The common name is never looked at.

use mvm_proto::ClusterId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::{ClientAuth, ExpectedPeer, peer_identity, provider};
use crate::certificate;
use crate::identity::Identity;
use crate::live::{LiveAnchors, Prepared};
use crate::refusal::Refusal;

fn algorithms() -> WebPkiSupportedAlgorithms {
    provider().signature_verification_algorithms
}

/// Verifies the chain, then reads who the leaf is for.
pub(super) fn verified_identity(
    anchors: &Prepared,
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    now: UnixTime,
    usage: KeyUsage,
) -> Result<Identity, Refusal> {
    let refused = |error| Refusal::of_webpki(&error);
    let parsed = EndEntityCert::try_from(leaf).map_err(refused)?;
    parsed
        .verify_for_usage(algorithms().all, &anchors.trusted, intermediates, now, usage, None, None)
        .map_err(refused)?;
    // `webpki` takes a certificate without purposes for one that has them all; ours name theirs.
    if !certificate::names_purposes(leaf) {
        return Err(Refusal::Unusable("it names no purpose (extended key usage)".to_owned()));
    }
    peer_identity(Some(std::slice::from_ref(leaf)))
}

pub(super) fn check_cluster(identity: &Identity, expected: &ClusterId) -> Result<(), Refusal> {
    if identity.cluster() == expected {
        Ok(())
    } else {
        Err(Refusal::WrongCluster { expected: expected.clone(), found: identity.cluster().clone() })
    }
}

/// For a server: takes any role of its own cluster.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    anchors: LiveAnchors,
    cluster: ClusterId,
    auth: ClientAuth,
}

impl ClientVerifier {
    pub(super) fn new(anchors: LiveAnchors, cluster: ClusterId, auth: ClientAuth) -> Self {
        Self { anchors, cluster, auth }
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.auth == ClientAuth::Required
    }

    /// None: a client has one credential, and hints would tell strangers which roots are trusted here.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        verified_identity(&self.anchors.prepared(), end_entity, intermediates, now, KeyUsage::client_auth())
            .and_then(|identity| check_cluster(&identity, &self.cluster))
            .map(|()| ClientCertVerified::assertion())
            .map_err(|refusal| refusal.into_tls_error(now))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// For a client: accepts only the peer it means to reach.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    anchors: LiveAnchors,
    expected: ExpectedPeer,
}

impl ServerVerifier {
    pub(super) fn new(anchors: LiveAnchors, expected: ExpectedPeer) -> Self {
        Self { anchors, expected }
    }

    fn check(
        &self,
        identity: &Identity,
        leaf: &CertificateDer<'_>,
        host: &ServerName<'_>,
    ) -> Result<(), Refusal> {
        check_cluster(identity, &self.expected.cluster)?;
        if identity.role() != self.expected.role {
            return Err(Refusal::WrongRole { expected: self.expected.role, found: identity.role() });
        }
        if let Some(name) = self.expected.name.as_deref().filter(|name| *name != identity.name()) {
            return Err(Refusal::WrongName {
                expected: name.to_owned(),
                presented: vec![identity.name().to_owned()],
            });
        }
        if self.expected.check_host { check_host(leaf, host) } else { Ok(()) }
    }
}

fn check_host(leaf: &CertificateDer<'_>, host: &ServerName<'_>) -> Result<(), Refusal> {
    let parsed = EndEntityCert::try_from(leaf).map_err(|error| Refusal::of_webpki(&error))?;
    parsed.verify_is_valid_for_subject_name(host).map_err(|_| Refusal::WrongName {
        expected: host.to_str().into_owned(),
        presented: certificate::hosts(leaf),
    })
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verified_identity(&self.anchors.prepared(), end_entity, intermediates, now, KeyUsage::server_auth())
            .and_then(|identity| self.check(&identity, end_entity, server_name))
            .map(|()| ServerCertVerified::assertion())
            .map_err(|refusal| refusal.into_tls_error(now))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Takes any certificate whose key the server holds. See [`super::discovery_client_config`].
#[derive(Debug)]
pub(super) struct AnyServer;

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}
