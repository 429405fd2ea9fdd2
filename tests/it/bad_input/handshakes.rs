//! Connections that must not come about, each with its own reason on the side that can see it.

use std::time::Duration;

use mvm_pki::tls::client_config;
use mvm_pki::{
    Authority, Credential, CsrNames, ExpectedPeer, Identity, LeafKey, LeafProfile, LiveAnchors,
    LiveCredential, Refusal, Role, RootAuthority,
};
use mvm_proto::Timestamp;
use mvm_tests::{PATIENCE, wait_until};
use mvm_transport::{ALPN_H3, Client, ConnectError, Limits, dial_session};

use crate::bad_input::one_agent::{OneAgent, UNHURRIED, now};

const HOUR: Duration = Duration::from_secs(3600);

/// A coordinator's credential from `authority`, as if it had been issued at `at`.
fn issued(authority: &Authority, at: Timestamp, life: Duration) -> LiveCredential {
    let identity = Identity::new(authority.cluster().clone(), Role::Coordinator, "coordinator").unwrap();
    let key = LeafKey::generate().unwrap();
    let csr = key.csr_der(&CsrNames::default()).unwrap();
    let profile = LeafProfile { identity, dns: Vec::new(), ips: Vec::new(), life };
    let issued = authority.issue(&csr, &profile, at).unwrap();
    LiveCredential::new(Credential::new(key, issued.chain).unwrap())
}

/// What no authority of ours would issue: this cluster's authority, another cluster's coordinator.
fn of_another_cluster(agent: &OneAgent) -> LiveCredential {
    let dir = agent.data_dir().issuing_ca_dir();
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
    let authority = rcgen::KeyPair::from_pem(&read("ca.key")).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.crt"), authority).unwrap();
    let mut params = rcgen::CertificateParams::default();
    let uri = "spiffe://other/coordinator/coordinator".try_into().unwrap();
    params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let key = rcgen::KeyPair::generate().unwrap();
    let leaf = params.signed_by(&key, &issuer).unwrap();
    let pem = [key.serialize_pem(), leaf.pem(), read("ca.crt")].concat();
    LiveCredential::new(Credential::from_pem(&pem).unwrap())
}

/// The agent's reason for refusing `credential`, as the client learns it.
fn refused(agent: &OneAgent, credential: Option<&LiveCredential>) -> (&'static str, String) {
    match agent.connect(credential) {
        Err(ConnectError::RefusedByPeer { refusal: Some(refusal), reason, .. }) => (refusal.code(), reason),
        other => panic!("expected a refusal by the agent, found {other:?}"),
    }
}

#[test]
fn a_client_whose_certificate_does_not_count_is_refused_and_told_why() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let authority = Authority::load(&agent.data_dir().issuing_ca_dir()).unwrap();
    let expired = issued(&authority, now(), Duration::from_secs(1));
    let foreign_root = RootAuthority::create(agent.trust.cluster(), now()).unwrap();
    let foreign = issued(&foreign_root.create_issuing(now()).unwrap(), now(), HOUR);
    let other_root = RootAuthority::create(&"other".parse().unwrap(), now()).unwrap();
    let other = issued(&other_root.create_issuing(now()).unwrap(), now(), HOUR);
    let early = issued(&authority, now() + HOUR, HOUR);
    let not_after = expired.current().not_after();
    wait_until("the certificate to expire", PATIENCE, || now() > not_after + Duration::from_secs(1));

    let cases = [
        ("none", None, "no_certificate", "no certificate was presented"),
        ("expired", Some(expired), "expired", "the certificate expired at"),
        ("not yet valid", Some(early), "not_yet_valid", "the certificate is not valid before"),
        (
            "same cluster's name, foreign authority",
            Some(foreign),
            "foreign_authority",
            "issuer is not trusted",
        ),
        ("another cluster's", Some(other), "foreign_authority", "issuer is not trusted"),
        (
            "another cluster's name, our authority",
            Some(of_another_cluster(&agent)),
            "wrong_cluster",
            "for cluster other, not for test",
        ),
    ];
    for (name, credential, code, words) in cases {
        let (found, reason) = refused(&agent, credential.as_ref());
        assert_eq!(found, code, "{name}: {reason}");
        assert!(reason.contains(words), "{name}: {reason}");
    }
    // What makes the difference is the certificate and not the address or the moment.
    let good = issued(&authority, now(), HOUR);
    assert_eq!(agent.connect(Some(&good)).unwrap().peer().to_string(), "spiffe://test/node/node-a");
    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}

#[test]
fn a_client_that_speaks_another_protocol_is_refused_in_words() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    // Node sessions are a coordinator's; an agent speaks HTTP/3 alone.
    let tls =
        client_config(Some(&agent.coordinator()), &agent.anchors, agent.expected(), &[ALPN_H3]).unwrap();
    let limits = Limits::default();
    let dialled = agent.runtime.block_on(dial_session(agent.address(), "127.0.0.1", tls, &limits));
    let error = dialled.expect_err("an agent takes no sessions");
    assert!(matches!(error, ConnectError::NoCommonProtocol { .. }), "{error:?}");
    assert!(error.to_string().contains("does not speak mvm/1"), "{error}");
    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}

#[test]
fn a_client_refuses_an_agent_that_is_not_the_one_it_means() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let meant = agent.expected();
    let stranger = RootAuthority::create(agent.trust.cluster(), now()).unwrap().anchors();
    let ours = agent.anchors.clone();
    let cases = [
        (ExpectedPeer { name: Some("node-b".into()), ..meant.clone() }, "127.0.0.1", &ours, "wrong_name"),
        (ExpectedPeer { role: Role::Coordinator, ..meant.clone() }, "127.0.0.1", &ours, "wrong_role"),
        (ExpectedPeer { role: Role::Operator, ..meant.clone() }, "127.0.0.1", &ours, "wrong_role"),
        (
            ExpectedPeer { cluster: "other".parse().unwrap(), ..meant.clone() },
            "127.0.0.1",
            &ours,
            "wrong_cluster",
        ),
        (meant.clone(), "agent.example", &ours, "wrong_name"),
        (meant.clone(), "127.0.0.2", &ours, "wrong_name"),
        (meant, "127.0.0.1", &LiveAnchors::new(stranger), "foreign_authority"),
    ];
    for (expected, server_name, anchors, code) in cases {
        let tls = client_config(Some(&agent.coordinator()), anchors, expected.clone(), &[ALPN_H3]).unwrap();
        let limits = Limits::default();
        let connected = agent.runtime.block_on(Client::connect(agent.address(), server_name, tls, &limits));
        match connected {
            Err(ConnectError::PeerRefused { refusal, .. }) => {
                assert_eq!(Refusal::code(&refusal), code, "{expected:?} at {server_name}: {refusal}");
            }
            other => panic!("{expected:?} at {server_name}: {other:?}"),
        }
    }
    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}
