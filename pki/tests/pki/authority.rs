//! What an authority issues, and to whom it refuses.

use std::time::Duration;

use mvm_pki::authority::{ISSUING_LIFE, MAX_CSR_BYTES, MAX_NAMES, SKEW, requested_names};
use mvm_pki::{
    Anchors, Authority, AuthorityError, CertificateStatus, Credential, CredentialError, CsrNames, Identity,
    LEAF_LIFE, LeafKey, LeafProfile, Role, RootAuthority, tls,
};
use mvm_proto::Digest;
use rcgen::{CertificateParams, KeyPair};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::support::*;

fn profile() -> LeafProfile {
    LeafProfile { identity: identity(Role::Node, "n"), dns: vec![], ips: vec![], life: LEAF_LIFE }
}

fn csr() -> Vec<u8> {
    LeafKey::generate().unwrap().csr_der(&CsrNames::default()).unwrap()
}

#[test]
fn a_leaf_says_what_the_profile_says_and_nothing_of_what_the_request_wished() {
    let pki = Pki::new();
    let mut wish = CertificateParams::default();
    wish.distinguished_name.push(rcgen::DnType::CommonName, "coordinator");
    wish.subject_alt_names = vec![uri("spiffe://fleet/coordinator/main")];
    wish.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let request = wish.serialize_request(&key).unwrap();
    let profile = LeafProfile {
        dns: vec!["n.example".into()],
        ips: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        ..profile()
    };
    let issued = pki.issuing.issue(request.der(), &profile, now()).unwrap();
    let (_, leaf) = X509Certificate::from_der(&issued.chain[0]).unwrap();
    assert_eq!(mvm_pki::identity_of(&issued.chain[0]).unwrap(), identity(Role::Node, "n"));
    assert_eq!(leaf.subject().to_string(), "O=fleet, OU=node, CN=n");
    assert!(!leaf.is_ca());
    let usage = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && usage.server_auth && !usage.any);
    assert_eq!(leaf.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 4);
    assert_eq!(leaf.raw_serial().len(), 16);
    assert_eq!(leaf.public_key().subject_public_key.data.as_ref(), rcgen::PublicKeyData::der_bytes(&key));
    let extensions: Vec<_> = leaf.extensions().iter().map(|e| e.oid.to_id_string()).collect();
    assert!(extensions.contains(&"2.5.29.14".into()) && extensions.contains(&"2.5.29.35".into()));
    assert_eq!(issued.not_before, now() - SKEW);
    assert_eq!(issued.not_after, now() + LEAF_LIFE);
    assert_eq!(issued.chain[1], *pki.issuing.certificate());
}

#[test]
fn authorities_are_limited_to_their_place() {
    let pki = Pki::new();
    for (certificate, path_length) in [(pki.root.certificate(), 1), (pki.issuing.certificate(), 0)] {
        let (_, parsed) = X509Certificate::from_der(certificate).unwrap();
        let constraints = parsed.basic_constraints().unwrap().unwrap();
        assert!(constraints.critical && constraints.value.ca);
        assert_eq!(constraints.value.path_len_constraint, Some(path_length));
        let usage = parsed.key_usage().unwrap().unwrap().value;
        assert!(usage.key_cert_sign() && usage.crl_sign() && !usage.digital_signature());
    }
    assert_eq!(pki.issuing.not_after(), now() + ISSUING_LIFE);
    // Near the end of the root's life the issuing authority ends with it, and leaves with that.
    let late = pki.root.not_after() - Duration::from_secs(3600);
    let issuing = pki.root.create_issuing(late).unwrap();
    assert_eq!(issuing.not_after(), pki.root.not_after());
    assert_eq!(issuing.issue(&csr(), &profile(), late).unwrap().not_after, pki.root.not_after());
    let over = pki.root.not_after();
    assert!(matches!(pki.root.create_issuing(over), Err(AuthorityError::Expired { .. })));
    assert!(matches!(issuing.issue(&csr(), &profile(), over), Err(AuthorityError::Expired { .. })));
}

#[test]
fn a_very_short_leaf_still_has_half_its_life_ahead() {
    let pki = Pki::new();
    let short = LeafProfile { life: Duration::from_secs(60), ..profile() };
    let issued = pki.issuing.issue(&csr(), &short, now()).unwrap();
    assert_eq!(issued.not_before, now() - Duration::from_secs(6));
    assert!(
        mvm_pki::rotation::renew_at(issued.not_before, issued.not_after, 0.0)
            > now() + Duration::from_secs(25)
    );
}

#[test]
fn a_request_that_does_not_prove_its_key_is_refused() {
    let pki = Pki::new();
    let honest = csr();
    // Between the signed part and the signature lies the name of the algorithm: framing, which is not signed.
    let signed = 3..3 + 2 + usize::from(honest[4]);
    let signature = signed.end + 12 + 3..honest.len();
    for at in signed.chain(signature) {
        for bit in 0..8 {
            let mut changed = honest.clone();
            changed[at] ^= 1 << bit;
            assert!(pki.issuing.issue(&changed, &profile(), now()).is_err(), "bit {bit} of byte {at}");
        }
    }
    let mut unproven = honest;
    *unproven.last_mut().unwrap() ^= 1;
    let refused = pki.issuing.issue(&unproven, &profile(), now());
    assert!(matches!(refused, Err(AuthorityError::RequestUnproven)), "{refused:?}");
}

#[test]
fn requests_with_other_keys_too_long_or_not_requests_at_all_are_refused() {
    let pki = Pki::new();
    let made_with = |algorithm| {
        let key = KeyPair::generate_for(algorithm).unwrap();
        CertificateParams::default().serialize_request(&key).unwrap().der().to_vec()
    };
    pki.issuing.issue(&made_with(&rcgen::PKCS_ED25519), &profile(), now()).unwrap();
    for algorithm in [&rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_RSA_SHA256] {
        let refused = pki.issuing.issue(&made_with(algorithm), &profile(), now());
        assert!(matches!(refused, Err(AuthorityError::RequestKey)), "{refused:?}");
    }
    let long = vec![0x30; MAX_CSR_BYTES + 1];
    let refused = pki.issuing.issue(&long, &profile(), now());
    assert!(matches!(refused, Err(AuthorityError::RequestTooLarge { .. })));
    let trailing = [csr(), vec![0]].concat();
    for bad in [&b""[..], b"nonsense", &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff], &trailing] {
        let refused = pki.issuing.issue(bad, &profile(), now());
        assert!(matches!(refused, Err(AuthorityError::RequestUnreadable)), "{refused:?}");
    }
}

#[test]
fn names_that_a_certificate_must_not_carry_are_refused() {
    let pki = Pki::new();
    for bad in ["*.example", "", "a b", "-", "a..b", "x\n", "é.example", "10.0.0.1/8"] {
        let refused = pki.issuing.issue(&csr(), &LeafProfile { dns: vec![bad.into()], ..profile() }, now());
        assert!(matches!(refused, Err(AuthorityError::Name(_))), "{bad:?}: {refused:?}");
    }
    let many = LeafProfile { dns: vec!["a".into(); MAX_NAMES + 1], ..profile() };
    assert!(matches!(pki.issuing.issue(&csr(), &many, now()), Err(AuthorityError::TooManyNames { .. })));
    let other = Identity::new("other".parse().unwrap(), Role::Node, "n").unwrap();
    let refused = pki.issuing.issue(&csr(), &LeafProfile { identity: other, ..profile() }, now());
    assert!(matches!(refused, Err(AuthorityError::WrongCluster { .. })));
    let refused = pki.issuing.issue(&csr(), &LeafProfile { life: Duration::ZERO, ..profile() }, now());
    assert!(matches!(refused, Err(AuthorityError::NoLife)));
}

#[test]
fn the_names_that_a_request_asks_for_can_be_read_for_the_policy() {
    let names = CsrNames { dns: vec!["n.example".into()], ips: vec!["10.0.0.1".parse().unwrap()] };
    let csr = LeafKey::generate().unwrap().csr_der(&names).unwrap();
    assert_eq!(requested_names(&csr).unwrap(), names);
}

#[test]
fn authorities_read_back_from_their_directories_and_the_root_key_can_be_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    let (root_dir, issuing_dir) = (dir.path().join("pki/root"), dir.path().join("pki/issuing"));
    let pki = Pki::new();
    pki.root.save(&root_dir).unwrap();
    pki.issuing.save(&issuing_dir).unwrap();
    let root = RootAuthority::load(&root_dir).unwrap();
    let issuing = Authority::load(&issuing_dir).unwrap();
    assert_eq!((root.fingerprint(), issuing.cluster()), (pki.root.fingerprint(), &cluster()));
    std::fs::remove_file(root_dir.join("ca.key")).unwrap();
    assert!(matches!(RootAuthority::load(&root_dir), Err(AuthorityError::KeyAway { .. })));
    // Life goes on without it.
    let anchors = Anchors::load(&root_dir.join("ca.crt")).unwrap();
    let key = LeafKey::generate().unwrap();
    let csr = key.csr_der(&CsrNames::default()).unwrap();
    let chain = issuing.issue(&csr, &profile(), now()).unwrap().chain;
    tls::verify_issued(&anchors, &Credential::new(key, chain).unwrap()).unwrap();

    // A key of someone else, and a key that others can read.
    Pki::new().issuing.save(&dir.path().join("other")).unwrap();
    std::fs::copy(dir.path().join("other/ca.key"), issuing_dir.join("ca.key")).unwrap();
    assert!(matches!(Authority::load(&issuing_dir), Err(AuthorityError::Content { .. })));
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(issuing_dir.join("ca.key"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Authority::load(&issuing_dir), Err(AuthorityError::File { .. })));
}

#[test]
fn a_credential_reads_back_from_its_one_file_and_never_pairs_strangers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("certs/node.pem");
    let pki = Pki::new();
    let credential = pki.credential(Role::Node, "n");
    credential.save(&path).unwrap();
    let read = Credential::load(&path).unwrap();
    assert_eq!(read.to_pem(), credential.to_pem());
    assert_eq!((read.identity(), read.chain()), (credential.identity(), credential.chain()));
    let stranger = LeafKey::generate().unwrap();
    let mixed = Credential::new(stranger, credential.chain().to_vec());
    assert!(matches!(mixed, Err(CredentialError::KeyMismatch)), "{mixed:?}");
    let text = credential.to_pem();
    for cut in [0, 1, text.len() / 4, text.len() / 3, text.len() / 2] {
        assert!(Credential::from_pem(&text[..cut]).is_err(), "cut at {cut}");
    }
}

#[test]
fn anchors_hold_roots_of_one_cluster_and_never_none() {
    let (a, b) = (Pki::new(), Pki::new());
    let mut anchors = a.root.anchors();
    assert!(matches!(anchors.retire(&a.root.fingerprint()), Err(CredentialError::LastRoot)));
    anchors.add(b.root.certificate().clone()).unwrap();
    anchors.add(b.root.certificate().clone()).unwrap();
    assert_eq!(anchors.fingerprints(), [a.root.fingerprint(), b.root.fingerprint()]);
    assert_eq!(Anchors::from_pem(&anchors.to_pem()).unwrap(), anchors);
    assert!(matches!(anchors.retire(&Digest::of(b"")), Err(CredentialError::UnknownRoot(_))));

    let pinned = Anchors::pinned(&anchors.to_pem(), &b.root.fingerprint()).unwrap();
    assert_eq!(pinned, b.root.anchors());
    let missed = Anchors::pinned(&anchors.to_pem(), &Pki::new().root.fingerprint());
    assert!(matches!(missed, Err(CredentialError::NotPinned { .. })));

    let other = RootAuthority::create(&"other".parse().unwrap(), now()).unwrap();
    assert!(matches!(anchors.add(other.certificate().clone()), Err(CredentialError::MixedClusters)));
    assert!(matches!(anchors.add(a.issuing.certificate().clone()), Err(CredentialError::NotARoot)));
    assert!(matches!(Anchors::from_pem(""), Err(CredentialError::NoCertificate)));
    anchors.retire(&a.root.fingerprint()).unwrap();
    assert_eq!(anchors, b.root.anchors());
}

#[test]
fn status_tells_of_life_chain_and_roots() {
    let pki = Pki::new();
    let credential = pki.credential(Role::Node, "n");
    let at = |time| CertificateStatus::of(&credential, &pki.root.anchors(), None, time);
    let status = at(now() + LEAF_LIFE / 2);
    assert_eq!((status.percent_of_life, status.identity.as_str()), (50, "spiffe://fleet/node/n"));
    assert_eq!((status.chain.len(), status.roots.len()), (2, 1));
    assert_eq!(status.roots[0].fingerprint, pki.root.fingerprint());
    assert!(
        status.next_renewal > now() + LEAF_LIFE * 49 / 100
            && status.next_renewal < now() + LEAF_LIFE * 61 / 100
    );
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["state"], "valid");
    assert_eq!(serde_json::to_value(at(now() + LEAF_LIFE * 2)).unwrap()["state"], "expired");
    assert_eq!(serde_json::to_value(at(now() - LEAF_LIFE)).unwrap()["state"], "not_yet_valid");
}
