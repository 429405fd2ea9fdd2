//! A cluster in memory, and TLS connections without sockets.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use mvm_pki::{
    Anchors, Authority, ClientAuth, Credential, CsrNames, ExpectedPeer, Identity, LEAF_LIFE, LeafKey,
    LeafProfile, LiveAnchors, LiveCredential, Role, RootAuthority, tls,
};
use mvm_proto::{ClusterId, Timestamp};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};

pub(crate) const ALPN: &[u8] = b"mvm/1";

pub(crate) fn now() -> Timestamp {
    Timestamp::from_unix_ms(1_800_000_000_000)
}

pub(crate) fn cluster() -> ClusterId {
    "fleet".parse().unwrap()
}

pub(crate) fn identity(role: Role, name: &str) -> Identity {
    Identity::new(cluster(), role, name).unwrap()
}

/// A root with its issuing authority.
pub(crate) struct Pki {
    pub(crate) root: RootAuthority,
    pub(crate) issuing: Authority,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let root = RootAuthority::create(&cluster(), now()).unwrap();
        let issuing = root.create_issuing(now()).unwrap();
        Self { root, issuing }
    }

    pub(crate) fn credential_at(&self, role: Role, name: &str, at: Timestamp) -> Credential {
        let profile = LeafProfile {
            identity: identity(role, name),
            dns: vec!["localhost".into()],
            ips: vec!["127.0.0.1".parse().unwrap()],
            life: LEAF_LIFE,
        };
        let key = LeafKey::generate().unwrap();
        let csr = key.csr_der(&CsrNames::default()).unwrap();
        Credential::new(key, self.issuing.issue(&csr, &profile, at).unwrap().chain).unwrap()
    }

    pub(crate) fn credential(&self, role: Role, name: &str) -> Credential {
        self.credential_at(role, name, now())
    }

    pub(crate) fn anchors(&self) -> LiveAnchors {
        LiveAnchors::new(self.root.anchors())
    }

    /// A leaf that this authority would never issue: its key signs what `shape` made of an honest one.
    pub(crate) fn odd_leaf(&self, shape: impl FnOnce(&mut CertificateParams)) -> Arc<CertifiedKey> {
        let dir = tempfile::tempdir().unwrap();
        self.issuing.save(dir.path()).unwrap();
        let signer = KeyPair::from_pem(&std::fs::read_to_string(dir.path().join("ca.key")).unwrap()).unwrap();
        let issuer = Issuer::from_ca_cert_der(self.issuing.certificate(), &signer).unwrap();
        let mut params = CertificateParams::default();
        let date = |time: Timestamp| time::OffsetDateTime::from_unix_timestamp(time.unix_secs()).unwrap();
        params.not_before = date(now() - Duration::from_secs(60));
        params.not_after = date(now() + LEAF_LIFE);
        params.subject_alt_names = vec![uri("spiffe://fleet/node/n")];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        shape(&mut params);
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &issuer).unwrap().der().clone();
        certified(vec![leaf, self.issuing.certificate().clone()], &key)
    }
}

pub(crate) fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().unwrap())
}

pub(crate) fn certified(chain: Vec<CertificateDer<'static>>, key: &KeyPair) -> Arc<CertifiedKey> {
    let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&der).unwrap();
    Arc::new(CertifiedKey::new(chain, key))
}

#[derive(Debug)]
struct FixedTime(Timestamp);

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        let secs = u64::try_from(self.0.unix_secs()).unwrap();
        Some(UnixTime::since_unix_epoch(Duration::from_secs(secs)))
    }
}

pub(crate) fn coordinator() -> ExpectedPeer {
    ExpectedPeer { cluster: cluster(), role: Role::Coordinator, name: None, check_host: true }
}

pub(crate) fn server(credential: &LiveCredential, anchors: &LiveAnchors) -> ServerConfig {
    let config = tls::server_config(credential, anchors, &cluster(), ClientAuth::Required, &[ALPN]).unwrap();
    server_at(config, now())
}

pub(crate) fn server_at(mut config: ServerConfig, at: Timestamp) -> ServerConfig {
    config.time_provider = Arc::new(FixedTime(at));
    config
}

pub(crate) fn client(
    credential: Option<&LiveCredential>,
    anchors: &LiveAnchors,
    expected: ExpectedPeer,
) -> ClientConfig {
    client_at(tls::client_config(credential, anchors, expected, &[ALPN]).unwrap(), now())
}

pub(crate) fn client_at(mut config: ClientConfig, at: Timestamp) -> ClientConfig {
    config.time_provider = Arc::new(FixedTime(at));
    config
}

/// Shows `key` whatever the configuration's own credential is.
pub(crate) fn showing(mut config: ClientConfig, key: Arc<CertifiedKey>) -> ClientConfig {
    config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(key));
    config
}

pub(crate) fn serving(mut config: ServerConfig, key: Arc<CertifiedKey>) -> ServerConfig {
    config.cert_resolver = Arc::new(SingleCertAndKey::from(key));
    config
}

/// Both ends of one connection.
pub(crate) struct Connection {
    pub(crate) client: ClientConnection,
    pub(crate) server: ServerConnection,
}

/// The first error that each end met.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    pub(crate) client: Option<rustls::Error>,
    pub(crate) server: Option<rustls::Error>,
}

impl Connection {
    pub(crate) fn open(client: ClientConfig, server: ServerConfig, host: &str) -> Result<Self, Errors> {
        Self::open_shared(&Arc::new(client), &Arc::new(server), host)
    }

    pub(crate) fn open_shared(
        client: &Arc<ClientConfig>,
        server: &Arc<ServerConfig>,
        host: &str,
    ) -> Result<Self, Errors> {
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let mut connection = Self {
            client: ClientConnection::new(client.clone(), name).unwrap(),
            server: ServerConnection::new(server.clone()).unwrap(),
        };
        let mut errors = Errors::default();
        // A handshake takes three flights; the rest is for the alert that ends a failed one.
        for _ in 0..6 {
            pump(&mut connection.client, &mut connection.server, &mut errors.server);
            pump(&mut connection.server, &mut connection.client, &mut errors.client);
        }
        if errors.client.is_some() || errors.server.is_some() {
            return Err(errors);
        }
        assert!(!connection.client.is_handshaking() && !connection.server.is_handshaking());
        Ok(connection)
    }

    /// Sends a word each way.
    pub(crate) fn talk(&mut self) {
        let mut errors = Errors::default();
        self.client.writer().write_all(b"ping").unwrap();
        self.server.writer().write_all(b"pong").unwrap();
        pump(&mut self.client, &mut self.server, &mut errors.server);
        pump(&mut self.server, &mut self.client, &mut errors.client);
        let mut word = [0; 4];
        self.server.reader().read_exact(&mut word).unwrap();
        assert_eq!(&word, b"ping");
        self.client.reader().read_exact(&mut word).unwrap();
        assert_eq!(&word, b"pong");
    }
}

/// Carries what one end has to say to the other.
fn pump<A, B, S, T>(from: &mut A, to: &mut B, error: &mut Option<rustls::Error>)
where
    A: std::ops::DerefMut<Target = rustls::ConnectionCommon<S>>,
    B: std::ops::DerefMut<Target = rustls::ConnectionCommon<T>>,
    S: rustls::SideData,
    T: rustls::SideData,
{
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).unwrap();
    }
    let mut bytes = bytes.as_slice();
    while !bytes.is_empty() && error.is_none() {
        to.read_tls(&mut bytes).unwrap();
        if let Err(cause) = to.process_new_packets() {
            *error = Some(cause);
        }
    }
}

/// A server of `pki` in the role of coordinator, and its anchors.
pub(crate) fn honest_server(pki: &Pki) -> ServerConfig {
    server(&LiveCredential::new(pki.credential(Role::Coordinator, "main")), &pki.anchors())
}

/// A client of `pki` in the role of a node.
pub(crate) fn honest_client(pki: &Pki) -> ClientConfig {
    client(Some(&LiveCredential::new(pki.credential(Role::Node, "n"))), &pki.anchors(), coordinator())
}

pub(crate) fn both(first: &Anchors, second: &Anchors) -> Anchors {
    let mut anchors = first.clone();
    for root in second.certificates() {
        anchors.add(root.clone()).unwrap();
    }
    anchors
}
