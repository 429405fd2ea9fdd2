//! Certificates and roots that change under live connections.

use std::sync::Arc;

use mvm_pki::endorsement::{ENDORSEMENT_LIFE, Endorsements, follow};
use mvm_pki::{Anchors, CredentialError, LiveCredential, Refusal, Role, RootAuthority, refusal_of, tls};

use crate::support::*;

#[test]
fn a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on() {
    let pki = Pki::new();
    let (node, main) = (
        LiveCredential::new(pki.credential(Role::Node, "n")),
        LiveCredential::new(pki.credential(Role::Coordinator, "main")),
    );
    let client = Arc::new(client(Some(&node), &pki.anchors(), coordinator()));
    let server = Arc::new(server(&main, &pki.anchors()));
    let mut connections = Vec::new();
    for _ in 0..20 {
        let connection = Connection::open_shared(&client, &server, "localhost").unwrap();
        assert_eq!(connection.server.peer_certificates().unwrap(), node.current().chain());
        assert_eq!(connection.client.peer_certificates().unwrap(), main.current().chain());
        connections.push(connection);
        node.swap(pki.credential(Role::Node, "n"));
        main.swap(pki.credential(Role::Coordinator, "main"));
        connections.iter_mut().for_each(Connection::talk);
    }
    assert_eq!(*node.changed().borrow(), 20);
}

#[test]
fn one_root_takes_over_from_another_without_a_refusal_in_between() {
    let (old, new) = (Pki::new(), Pki::new());
    let (node, main) = (
        LiveCredential::new(old.credential(Role::Node, "n")),
        LiveCredential::new(old.credential(Role::Coordinator, "main")),
    );
    let (at_node, at_main) = (old.anchors(), old.anchors());
    let client = Arc::new(client(Some(&node), &at_node, coordinator()));
    let server = Arc::new(server(&main, &at_main));
    let overlap = both(&old.root.anchors(), &new.root.anchors());
    let steps: [(&str, &dyn Fn()); 7] = [
        ("both trust the old root", &|| {}),
        ("the coordinator trusts both", &|| at_main.swap(overlap.clone())),
        ("the node trusts both", &|| at_node.swap(overlap.clone())),
        ("the node is issued under the new root", &|| node.swap(new.credential(Role::Node, "n"))),
        ("so is the coordinator", &|| main.swap(new.credential(Role::Coordinator, "main"))),
        ("the node retires the old root", &|| at_node.swap(new.root.anchors())),
        ("so does the coordinator", &|| at_main.swap(new.root.anchors())),
    ];
    let mut connections: Vec<Connection> = Vec::new();
    for (step, take) in steps {
        take();
        let opened = Connection::open_shared(&client, &server, "localhost");
        connections.push(opened.unwrap_or_else(|errors| panic!("{step}: {errors:?}")));
        connections.iter_mut().for_each(Connection::talk);
    }
    node.swap(old.credential(Role::Node, "n"));
    let errors = Connection::open_shared(&client, &server, "localhost").map(|_| ()).unwrap_err();
    assert_eq!(refusal_of(&errors.server.unwrap()), Some(Refusal::ForeignAuthority));
    assert_eq!(
        tls::verify_issued(&new.root.anchors(), &old.credential(Role::Node, "n")),
        Err(Refusal::ForeignAuthority)
    );
}

#[test]
fn a_new_issuing_authority_under_the_same_root_needs_no_change_on_peers() {
    let mut pki = Pki::new();
    let server = Arc::new(honest_server(&pki));
    pki.issuing = pki.root.create_issuing(now()).unwrap();
    Connection::open_shared(&Arc::new(honest_client(&pki)), &server, "localhost").unwrap().talk();
}

fn roots(of: &[&RootAuthority]) -> Anchors {
    Anchors::new(of.iter().map(|root| root.certificate().clone()).collect()).unwrap()
}

#[test]
fn trust_follows_endorsements_from_root_to_root_and_no_further() {
    let [a, b, c, stranger] = [(); 4].map(|()| Pki::new().root);
    let mut chain = Endorsements::default();
    chain.add(a.endorse(b.certificate(), now()).unwrap());
    chain.add(b.endorse(c.certificate(), now()).unwrap());
    let offered = roots(&[&c, &stranger, &b]);
    let followed = follow(&a.anchors(), &offered, &chain, now()).unwrap();
    assert_eq!(followed.anchors, roots(&[&c, &b]));
    assert_eq!(followed.left_out, [stranger.fingerprint()]);
    // Without the root in between nothing leads to the last one.
    let followed = follow(&a.anchors(), &roots(&[&c]), &chain, now());
    assert!(matches!(followed, Err(CredentialError::NotEndorsed(_))), "{followed:?}");
}

#[test]
fn an_endorsement_counts_for_one_root_of_its_cluster_and_for_a_while() {
    let (a, b) = (Pki::new().root, Pki::new().root);
    let certificate = a.endorse(b.certificate(), now()).unwrap();
    let mut endorsement = Endorsements::default();
    endorsement.add(certificate.clone());
    let later = now() + ENDORSEMENT_LIFE + std::time::Duration::from_secs(1);
    let followed = follow(&a.anchors(), &b.anchors(), &endorsement, later);
    assert!(matches!(followed, Err(CredentialError::NotEndorsed(_))), "{followed:?}");
    let other = RootAuthority::create(&"other".parse().unwrap(), now()).unwrap();
    assert!(a.endorse(other.certificate(), now()).is_err());
    let followed = follow(&a.anchors(), &other.anchors(), &endorsement, now());
    assert!(matches!(followed, Err(CredentialError::MixedClusters)), "{followed:?}");
    // It endorses; it does not certify: nobody can show it in a handshake.
    let shown = certified(vec![certificate], &rcgen::KeyPair::generate().unwrap());
    let pki = Pki { issuing: a.create_issuing(now()).unwrap(), root: a };
    let errors =
        Connection::open(showing(honest_client(&pki), shown), honest_server(&pki), "localhost").map(|_| ());
    assert_eq!(refusal_of(&errors.unwrap_err().server.unwrap()).unwrap().code(), "unusable");
}

#[test]
fn an_answer_with_a_flood_of_roots_or_endorsements_is_refused() {
    let a = Pki::new().root;
    let mut one = Endorsements::default();
    one.add(a.endorse(a.certificate(), now()).unwrap());
    let flood = Endorsements::from_pem(&one.to_pem().repeat(100)).unwrap();
    let followed = follow(&a.anchors(), &a.anchors(), &flood, now());
    assert!(matches!(followed, Err(CredentialError::TooManyRoots)), "{followed:?}");
    let many: Vec<_> = (0..9).map(|_| Pki::new().root).collect();
    let many = roots(&many.iter().collect::<Vec<_>>());
    assert!(matches!(
        follow(&a.anchors(), &many, &Endorsements::default(), now()),
        Err(CredentialError::TooManyRoots)
    ));
}
