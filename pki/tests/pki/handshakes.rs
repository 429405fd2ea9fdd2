//! Who gets in, and the reason that everyone else is given, in both directions.

use std::sync::Arc;
use std::time::Duration;

use mvm_pki::refusal::refusal_in_text;
use mvm_pki::{ClientAuth, LEAF_LIFE, LiveCredential, Refusal, Role, refusal_of, tls};
use rcgen::{ExtendedKeyUsagePurpose, KeyPair};
use rustls::{AlertDescription, CertificateError, Error, HandshakeKind};

use crate::support::*;

/// The server's reason for refusing this client, and the alert that the client was given.
fn refused_client(client: rustls::ClientConfig, server: rustls::ServerConfig) -> (Refusal, AlertDescription) {
    let errors = Connection::open(client, server, "localhost").map(|_| ()).unwrap_err();
    let error = errors.server.expect("the server refuses");
    let refusal = refusal_of(&error).unwrap_or_else(|| panic!("no refusal in {error:?}"));
    assert_eq!(refusal_in_text(&error.to_string()).as_ref(), Some(&refusal));
    match errors.client {
        Some(Error::AlertReceived(alert)) => (refusal, alert),
        other => panic!("the client was told {other:?}"),
    }
}

/// The client's reason for refusing this server, and the alert that the server was given.
fn refused_server(client: rustls::ClientConfig, server: rustls::ServerConfig) -> (Refusal, AlertDescription) {
    refused_server_at("localhost", client, server)
}

fn refused_server_at(
    host: &str,
    client: rustls::ClientConfig,
    server: rustls::ServerConfig,
) -> (Refusal, AlertDescription) {
    let errors = Connection::open(client, server, host).map(|_| ()).unwrap_err();
    let error = errors.client.expect("the client refuses");
    let refusal = refusal_of(&error).unwrap_or_else(|| panic!("no refusal in {error:?}"));
    assert_eq!(refusal_in_text(&error.to_string()).as_ref(), Some(&refusal));
    match errors.server {
        Some(Error::AlertReceived(alert)) => (refusal, alert),
        other => panic!("the server was told {other:?}"),
    }
}

#[test]
fn members_of_one_cluster_meet_know_each_other_and_share_no_tickets() {
    let pki = Pki::new();
    let (client, server) = (Arc::new(honest_client(&pki)), Arc::new(honest_server(&pki)));
    for host in ["localhost", "127.0.0.1", "localhost"] {
        let mut connection = Connection::open_shared(&client, &server, host).unwrap();
        connection.talk();
        let seen = tls::peer_identity(connection.server.peer_certificates()).unwrap();
        assert_eq!(seen, identity(Role::Node, "n"));
        let seen = tls::peer_identity(connection.client.peer_certificates()).unwrap();
        assert_eq!(seen, identity(Role::Coordinator, "main"));
        assert_eq!(connection.client.handshake_kind(), Some(HandshakeKind::Full));
        assert_eq!(connection.client.tls13_tickets_received(), 0);
        assert_eq!(connection.client.alpn_protocol(), Some(ALPN));
        let suite = connection.client.negotiated_cipher_suite().unwrap().suite();
        assert_eq!(suite, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    }
    assert_eq!((server.max_early_data_size, server.send_tls13_tickets), (0, 0));
}

#[test]
fn every_role_of_the_cluster_is_let_in_by_a_server() {
    let pki = Pki::new();
    for role in [Role::Coordinator, Role::Node, Role::Operator] {
        let credential = LiveCredential::new(pki.credential(role, "x"));
        let client = client(Some(&credential), &pki.anchors(), coordinator());
        Connection::open(client, honest_server(&pki), "localhost").unwrap();
    }
}

#[test]
fn an_expired_certificate_is_refused_as_expired() {
    let pki = Pki::new();
    let later = now() + LEAF_LIFE + Duration::from_secs(1);
    let expired = Refusal::Expired { not_after: now() + LEAF_LIFE };
    let fresh = LiveCredential::new(pki.credential_at(Role::Coordinator, "main", later));
    let (refusal, alert) = refused_client(
        client_at(honest_client(&pki), later),
        server_at(server(&fresh, &pki.anchors()), later),
    );
    assert_eq!((refusal, alert), (expired.clone(), AlertDescription::CertificateExpired));
    let (refusal, alert) = refused_server(client_at(honest_client(&pki), later), honest_server(&pki));
    assert_eq!((refusal, alert), (expired, AlertDescription::CertificateExpired));
}

#[test]
fn a_certificate_from_the_future_is_refused_as_not_yet_valid() {
    let pki = Pki::new();
    let later = now() + Duration::from_secs(3600);
    let early = Refusal::NotYetValid { not_before: later - mvm_pki::authority::SKEW };
    let node = LiveCredential::new(pki.credential_at(Role::Node, "n", later));
    let (refusal, _) =
        refused_client(client(Some(&node), &pki.anchors(), coordinator()), honest_server(&pki));
    assert_eq!(refusal, early);
    let main = LiveCredential::new(pki.credential_at(Role::Coordinator, "main", later));
    let (refusal, alert) = refused_server(honest_client(&pki), server(&main, &pki.anchors()));
    assert_eq!((refusal, alert), (early, AlertDescription::CertificateExpired));
}

#[test]
fn a_clock_that_is_a_little_behind_does_no_harm() {
    let pki = Pki::new();
    let behind = now() - Duration::from_secs(59);
    Connection::open(client_at(honest_client(&pki), behind), honest_server(&pki), "localhost").unwrap();
}

#[test]
fn a_foreign_authority_is_refused_in_both_directions() {
    let (pki, foreign) = (Pki::new(), Pki::new());
    let stranger = LiveCredential::new(foreign.credential(Role::Node, "n"));
    let refused = refused_client(client(Some(&stranger), &pki.anchors(), coordinator()), honest_server(&pki));
    assert_eq!(refused, (Refusal::ForeignAuthority, AlertDescription::UnknownCA));
    let refused = refused_server(honest_client(&pki), honest_server(&foreign));
    assert_eq!(refused, (Refusal::ForeignAuthority, AlertDescription::UnknownCA));
}

#[test]
fn another_cluster_under_the_same_authority_is_refused_in_both_directions() {
    let pki = Pki::new();
    let node = pki.odd_leaf(|leaf| leaf.subject_alt_names = vec![uri("spiffe://other/node/n")]);
    let wrong = Refusal::WrongCluster { expected: cluster(), found: "other".parse().unwrap() };
    let refused = refused_client(showing(honest_client(&pki), node), honest_server(&pki));
    assert_eq!(refused, (wrong.clone(), AlertDescription::CertificateUnknown));
    let main = pki.odd_leaf(|leaf| leaf.subject_alt_names = vec![uri("spiffe://other/coordinator/main")]);
    let refused = refused_server(honest_client(&pki), serving(honest_server(&pki), main));
    assert_eq!(refused, (wrong, AlertDescription::CertificateUnknown));
}

#[test]
fn a_server_of_the_wrong_role_is_refused() {
    let pki = Pki::new();
    for found in [Role::Node, Role::Operator] {
        let credential = LiveCredential::new(pki.credential(found, "main"));
        let refused = refused_server(honest_client(&pki), server(&credential, &pki.anchors()));
        let wrong = Refusal::WrongRole { expected: Role::Coordinator, found };
        assert_eq!(refused, (wrong, AlertDescription::CertificateUnknown));
    }
}

#[test]
fn a_server_with_another_name_or_another_host_is_refused() {
    let pki = Pki::new();
    let credential = LiveCredential::new(pki.credential(Role::Node, "n"));
    let mut expected = coordinator();
    expected.name = Some("other".into());
    let (refusal, _) =
        refused_server(client(Some(&credential), &pki.anchors(), expected), honest_server(&pki));
    assert_eq!(refusal, Refusal::WrongName { expected: "other".into(), presented: vec!["main".into()] });

    for host in ["example.org", "127.0.0.2"] {
        let (refusal, _) = refused_server_at(host, honest_client(&pki), honest_server(&pki));
        let presented = vec!["localhost".into(), "127.0.0.1".into()];
        assert_eq!(refusal, Refusal::WrongName { expected: host.into(), presented });
    }
    let relaxed = mvm_pki::ExpectedPeer { check_host: false, name: Some("main".into()), ..coordinator() };
    let client = client(Some(&credential), &pki.anchors(), relaxed);
    Connection::open(client, honest_server(&pki), "example.org").unwrap();
}

#[test]
fn a_client_without_a_certificate_is_refused_unless_the_server_enrols() {
    let pki = Pki::new();
    let bare = || client(None, &pki.anchors(), coordinator());
    let refused = refused_client(bare(), honest_server(&pki));
    assert_eq!(refused, (Refusal::NoCertificate, AlertDescription::CertificateRequired));

    let credential = LiveCredential::new(pki.credential(Role::Coordinator, "main"));
    let enrolling = || {
        let config =
            tls::server_config(&credential, &pki.anchors(), &cluster(), ClientAuth::Optional, &[ALPN]);
        server_at(config.unwrap(), now())
    };
    let connection = Connection::open(bare(), enrolling(), "localhost").unwrap();
    assert_eq!(tls::peer_identity(connection.server.peer_certificates()), Err(Refusal::NoCertificate));
    // One that is shown is judged all the same.
    let stranger = LiveCredential::new(Pki::new().credential(Role::Node, "n"));
    let refused = refused_client(client(Some(&stranger), &pki.anchors(), coordinator()), enrolling());
    assert_eq!(refused.0, Refusal::ForeignAuthority);
}

#[test]
fn exactly_one_readable_identity_is_needed_and_the_common_name_is_none() {
    let pki = Pki::new();
    let named = |uris: &'static [&'static str]| {
        pki.odd_leaf(|leaf| {
            leaf.distinguished_name.push(rcgen::DnType::CommonName, "spiffe://fleet/node/n");
            leaf.subject_alt_names = uris.iter().map(|text| uri(text)).collect();
        })
    };
    for uris in [
        &[][..],
        &["spiffe://fleet/node/n", "spiffe://fleet/node/m"],
        &["spiffe://fleet/node/n", "https://example.org"],
        &["spiffe://fleet/node/../coordinator/main"],
        &["spiffe://fleet/admin/n"],
        &["https://fleet/node/n"],
    ] {
        let (refusal, _) = refused_client(showing(honest_client(&pki), named(uris)), honest_server(&pki));
        assert_eq!(refusal.code(), "no_identity", "{uris:?}");
    }
}

#[test]
fn a_certificate_with_a_changed_byte_or_a_key_of_someone_else_is_refused() {
    let pki = Pki::new();
    let honest = pki.odd_leaf(|_| {});
    // The last byte belongs to the authority's signature.
    let mut chain = honest.cert.clone();
    let mut leaf = chain[0].to_vec();
    *leaf.last_mut().unwrap() ^= 1;
    chain[0] = leaf.into();
    let changed = Arc::new(rustls::sign::CertifiedKey::new(chain, honest.key.clone()));
    let (refusal, alert) = refused_client(showing(honest_client(&pki), changed), honest_server(&pki));
    assert_eq!((refusal, alert), (Refusal::BadSignature, AlertDescription::DecryptError));

    let thief = certified(honest.cert.clone(), &KeyPair::generate().unwrap());
    let (refusal, alert) = refused_client(showing(honest_client(&pki), thief), honest_server(&pki));
    assert_eq!((refusal, alert), (Refusal::BadSignature, AlertDescription::DecryptError));

    let main = pki.credential(Role::Coordinator, "main");
    let thief = certified(main.chain().to_vec(), &KeyPair::generate().unwrap());
    let (refusal, alert) = refused_server(honest_client(&pki), serving(honest_server(&pki), thief));
    assert_eq!((refusal, alert), (Refusal::BadSignature, AlertDescription::DecryptError));
}

#[test]
fn a_certificate_for_another_use_or_for_none_and_an_authority_posing_as_a_leaf_are_refused() {
    let pki = Pki::new();
    let server_only =
        pki.odd_leaf(|leaf| leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
    let (refusal, _) = refused_client(showing(honest_client(&pki), server_only), honest_server(&pki));
    assert_eq!(refusal.code(), "unusable");
    let aimless = || pki.odd_leaf(|leaf| leaf.extended_key_usages = Vec::new());
    let (refusal, _) = refused_client(showing(honest_client(&pki), aimless()), honest_server(&pki));
    assert_eq!(refusal.code(), "unusable");
    let (refusal, _) = refused_server(honest_client(&pki), serving(honest_server(&pki), aimless()));
    assert_eq!(refusal.code(), "unusable");
    let authority = pki.odd_leaf(|leaf| {
        leaf.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        leaf.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    });
    let (refusal, _) = refused_client(showing(honest_client(&pki), authority), honest_server(&pki));
    assert_eq!(refusal.code(), "unusable");
}

#[test]
fn a_leaf_can_not_issue_leaves() {
    let pki = Pki::new();
    let key = KeyPair::generate().unwrap();
    let parent = pki.credential(Role::Node, "n");
    let issuer = rcgen::Issuer::from_ca_cert_der(&parent.chain()[0], &key).unwrap();
    let mut forged = rcgen::CertificateParams::default();
    forged.subject_alt_names = vec![uri("spiffe://fleet/coordinator/main")];
    let leaf_key = KeyPair::generate().unwrap();
    let leaf = forged.signed_by(&leaf_key, &issuer).unwrap().der().clone();
    let chain = [vec![leaf], parent.chain().to_vec()].concat();
    let errors = Connection::open(
        showing(honest_client(&pki), certified(chain, &leaf_key)),
        honest_server(&pki),
        "localhost",
    );
    assert!(refusal_of(&errors.map(|_| ()).unwrap_err().server.unwrap()).is_some());
}

#[test]
fn another_protocol_and_an_older_tls_are_refused() {
    let pki = Pki::new();
    let mut other = honest_client(&pki);
    other.alpn_protocols = vec![b"h2".to_vec()];
    let errors = Connection::open(other, honest_server(&pki), "localhost").map(|_| ()).unwrap_err();
    assert_eq!(errors.server, Some(Error::NoApplicationProtocol));

    let old =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
    let errors = Connection::open(old, honest_server(&pki), "localhost").map(|_| ()).unwrap_err();
    assert!(matches!(errors.server, Some(Error::PeerIncompatible(_))), "{errors:?}");
}

#[test]
fn discovery_takes_any_server_that_holds_its_key() {
    let (pki, stranger) = (Pki::new(), Pki::new());
    let credential = LiveCredential::new(pki.credential(Role::Coordinator, "main"));
    let open = || {
        let config =
            tls::server_config(&credential, &pki.anchors(), &cluster(), ClientAuth::Optional, &[ALPN]);
        server_at(config.unwrap(), now())
    };
    let discover = || tls::discovery_client_config(&[ALPN]).unwrap();
    Connection::open(discover(), open(), "anything.example").unwrap();
    let thief = certified(
        stranger.credential(Role::Coordinator, "main").chain().to_vec(),
        &KeyPair::generate().unwrap(),
    );
    let errors = Connection::open(discover(), serving(open(), thief), "localhost").map(|_| ()).unwrap_err();
    assert_eq!(errors.client, Some(Error::InvalidCertificate(CertificateError::BadSignature)));
}
