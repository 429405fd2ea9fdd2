//! Whose word counts: roots, directors and image keys, and everyone who is none of them.

use std::time::Duration;

use mvm_pki::trust::{ImageSource, ROOT_METADATA_LIFE, RoleSpec, RootSpec, TrustRole, root_digest};
use mvm_pki::{ImagesMetadata, RootMetadata, SigningKey, TrustBundle, TrustError, TrustStore, seal};
use mvm_proto::document::{DOCUMENT_PAYLOAD_TYPE, SCHEMA_VERSION};
use mvm_proto::{DesiredState, Digest, Envelope, Provenance, SignedDocument, Timestamp, Unverified};

use crate::support::{cluster, now};

/// Keys for every role: three root keys of which two must sign, one director, one image key.
pub(crate) struct Keys {
    pub(crate) root: [SigningKey; 3],
    pub(crate) director: SigningKey,
    pub(crate) image: SigningKey,
}

impl Keys {
    pub(crate) fn new() -> Self {
        let key = || SigningKey::generate().unwrap();
        Self { root: [key(), key(), key()], director: key(), image: key() }
    }

    pub(crate) fn spec(&self) -> RootSpec {
        RootSpec {
            cluster: cluster(),
            expires_at: now() + ROOT_METADATA_LIFE,
            dev: false,
            resets_high_water: false,
            root: RoleSpec {
                keys: self.root.iter().map(SigningKey::public).collect(),
                threshold: 2,
                expires_at: None,
            },
            director: RoleSpec::single(self.director.public()),
            image: RoleSpec::single(self.image.public()),
        }
    }

    pub(crate) fn first(&self) -> RootMetadata {
        RootMetadata::first(&self.spec(), now()).unwrap()
    }

    pub(crate) fn two(&self) -> [&SigningKey; 2] {
        [&self.root[0], &self.root[2]]
    }

    pub(crate) fn store(&self) -> TrustStore {
        TrustStore::pin(self.first().seal(&self.two()), now()).unwrap()
    }

    pub(crate) fn images(&self, version: u64, digests: &[Digest]) -> Envelope {
        statement(version, digests).seal(&[&self.image])
    }
}

/// How long [`statement`] holds.
pub(crate) const IMAGES_VALID_FOR: Duration = Duration::from_secs(90 * 24 * 60 * 60);

pub(crate) fn statement(version: u64, digests: &[Digest]) -> ImagesMetadata {
    ImagesMetadata::new(cluster(), version, digests.iter().copied(), now(), IMAGES_VALID_FOR).unwrap()
}

fn document() -> SignedDocument {
    SignedDocument {
        provenance: Provenance {
            cluster: cluster(),
            epoch: 1,
            generation: 7,
            issued_at: now(),
            expires_at: now() + Duration::from_secs(86400),
        },
        desired: desired(),
    }
}

fn desired() -> DesiredState {
    DesiredState {
        schema_version: SCHEMA_VERSION,
        node_id: "n".parse().unwrap(),
        cluster: None,
        tenants: vec![],
        prune_unknown_tenants: false,
        prune_unknown_pools: false,
        removed_tenants: vec![],
    }
}

/// One tenant with a pool per digest.
pub(crate) fn desired_with(images: &[Option<Digest>]) -> DesiredState {
    use mvm_proto::document::*;
    let pool = |(at, image_digest): (usize, &Option<Digest>)| Pool {
        pool_id: format!("p{at}").parse().unwrap(),
        flake_ref: "builtin:test".into(),
        profile: "default".parse().unwrap(),
        image_digest: *image_digest,
        role: PoolRole::Worker,
        instance_resources: Resources { vcpus: 1, mem_mib: 64, data_disk_mib: 0 },
        desired_counts: DesiredCounts::default(),
        pinned: false,
        critical: false,
        runtime_policy: RuntimePolicy::default(),
        sleep_policy: SleepPolicy::default(),
        seccomp_policy: SeccompPolicy::default(),
        snapshot_compression: SnapshotCompression::default(),
        snapshot_encryption: false,
        stopped_retention_seconds: 0,
        persist: None,
        warmup: None,
        io_limits: None,
        restart: mvm_proto::document::Restart::default(),
        health: None,
        workload: None,
        secrets_hash: None,
        update: None,
    };
    let tenant = Tenant {
        tenant_id: "t".parse().unwrap(),
        pinned: false,
        network: Network {
            tenant_net_id: 1,
            ipv4_subnet: "10.1.0.0/24".to_owned().try_into().unwrap(),
            address_blocks: None,
            reserved_offsets: Vec::new(),
        },
        quotas: Quotas {
            max_vcpus: 1,
            max_mem_mib: 1,
            max_running: 1,
            max_warm: 1,
            max_pools: 9,
            max_instances_per_pool: 1,
            max_disk_gib: 1,
        },
        secrets_hash: None,
        egress: Egress::default(),
        pools: images.iter().enumerate().map(pool).collect(),
    };
    DesiredState { tenants: vec![tenant], ..desired() }
}

fn sealed(keys: &[&SigningKey]) -> Envelope {
    seal(DOCUMENT_PAYLOAD_TYPE, document().to_payload(), keys)
}

pub(crate) fn code(result: Result<impl Sized, TrustError>) -> &'static str {
    result.err().map_or("accepted", |error| error.code())
}

fn verify(store: &TrustStore, envelope: Envelope, at: Timestamp) -> &'static str {
    code(store.verify_document(Unverified::new(envelope), at))
}

#[test]
fn a_document_counts_only_with_the_directors_signature() {
    let (keys, stranger) = (Keys::new(), SigningKey::generate().unwrap());
    let store = keys.store();
    assert_eq!(verify(&store, sealed(&[&keys.director]), now()), "accepted");
    assert_eq!(verify(&store, sealed(&[&stranger, &keys.director]), now()), "accepted");
    for wrong in [&stranger, &keys.image, &keys.root[0]] {
        assert_eq!(verify(&store, sealed(&[wrong]), now()), "signature_insufficient");
    }
    assert_eq!(verify(&store, sealed(&[]), now()), "signature_insufficient");
    let mut claimed = sealed(&[&stranger]);
    claimed.signatures[0].key_id = keys.director.key_id();
    assert_eq!(verify(&store, claimed, now()), "signature_insufficient");
    let mut other_type = sealed(&[&keys.director]);
    other_type.payload_type = "application/json".into();
    assert_eq!(verify(&store, other_type, now()), "bad_envelope");
    let under_other_type = seal("application/json", document().to_payload(), &[&keys.director]);
    let moved = Envelope { payload_type: DOCUMENT_PAYLOAD_TYPE.into(), ..under_other_type };
    assert_eq!(verify(&store, moved, now()), "signature_insufficient");
}

#[test]
fn a_key_is_a_directors_exactly_where_what_it_signs_alone_counts() {
    let (keys, stranger) = (Keys::new(), SigningKey::generate().unwrap());
    let mut two_needed = keys.spec();
    two_needed.director =
        RoleSpec { keys: vec![keys.director.public(), stranger.public()], threshold: 2, expires_at: None };
    let mut short = keys.spec();
    short.director.expires_at = Some(now() + Duration::from_secs(3600));
    for spec in [keys.spec(), two_needed, short] {
        let root = RootMetadata::first(&spec, now()).unwrap().seal(&keys.two());
        let store = TrustStore::pin(root, now()).unwrap();
        for key in [&keys.director, &stranger, &keys.image, &keys.root[0]] {
            for at in [now(), now() + Duration::from_secs(3600), now() + ROOT_METADATA_LIFE] {
                let counts = verify(&store, sealed(&[key]), at);
                assert_eq!(code(store.check_director(&key.public(), at)), counts);
            }
        }
    }
}

#[test]
fn no_document_counts_once_the_directors_or_the_root_have_expired() {
    let keys = Keys::new();
    let hour = now() + Duration::from_secs(3600);
    let mut spec = keys.spec();
    spec.director.expires_at = Some(hour);
    let root = RootMetadata::first(&spec, now()).unwrap().seal(&keys.two());
    let store = TrustStore::pin(root, now()).unwrap();
    assert_eq!(verify(&store, sealed(&[&keys.director]), hour - Duration::from_millis(1)), "accepted");
    assert_eq!(verify(&store, sealed(&[&keys.director]), hour), "trust_role_expired");

    let mut store = keys.store();
    let over = now() + ROOT_METADATA_LIFE;
    assert_eq!(verify(&store, sealed(&[&keys.director]), over), "trust_root_expired");
    // The way out stays open: an expired root still names its successor.
    let spec = RootSpec { expires_at: over + ROOT_METADATA_LIFE, ..keys.spec() };
    let next = keys.first().next(&spec, over).unwrap();
    store.advance_root(next.seal(&keys.two()), over).unwrap();
    assert_eq!(verify(&store, sealed(&[&keys.director]), over), "accepted");
}

#[test]
fn a_threshold_counts_different_keys_of_the_role() {
    let keys = Keys::new();
    let root = keys.first();
    let [a, b, c] = &keys.root;
    let pin = |signers: &[&SigningKey]| code(TrustStore::pin(root.seal(signers), now()));
    for enough in [&[a, b][..], &[b, c], &[c, a], &[a, b, c], &[&keys.director, a, c]] {
        assert_eq!(pin(enough), "accepted");
    }
    for too_few in [&[][..], &[a], &[a, a], &[a, a, a], &[a, &keys.director], &[&keys.image, &keys.director]]
    {
        assert_eq!(pin(too_few), "signature_insufficient");
    }
    let mut broken = root.seal(&[a, b]);
    broken.signatures[1].bytes[3] ^= 1;
    assert_eq!(code(TrustStore::pin(broken, now())), "signature_insufficient");
    let mut renamed = root.seal(&[a, a]);
    renamed.signatures[1].key_id = b.key_id();
    assert_eq!(code(TrustStore::pin(renamed, now())), "signature_insufficient");
}

#[test]
fn a_root_is_followed_only_by_the_next_version_signed_by_both_sets() {
    let (old, new) = (Keys::new(), Keys::new());
    let mut store = old.store();
    let next = old.first().next(&new.spec(), now()).unwrap();
    let advance = |store: &mut TrustStore, envelope| code(store.advance_root(envelope, now()));
    assert_eq!(advance(&mut store, next.seal(&new.two())), "signature_insufficient");
    assert_eq!(advance(&mut store, next.seal(&old.two())), "signature_insufficient");
    assert_eq!(
        advance(&mut store, next.seal(&[&old.two()[..], &[&new.root[0]]].concat())),
        "signature_insufficient"
    );
    let skipping = next.next(&new.spec(), now()).unwrap();
    assert_eq!(advance(&mut store, skipping.seal(&[old.two(), new.two()].concat())), "trust_version_skipped");
    assert_eq!(advance(&mut store, old.first().seal(&old.two())), "trust_rollback");
    assert_eq!(store.root_version(), 1);

    let change = store.advance_root(next.seal(&[old.two(), new.two()].concat()), now()).unwrap();
    assert_eq!((change.from, change.to, change.resets_high_water), (1, 2, false));
    assert_eq!(store.keys(TrustRole::Director), [new.director.public()]);
    assert_eq!(verify(&store, sealed(&[&new.director]), now()), "accepted");
    assert_eq!(verify(&store, sealed(&[&old.director]), now()), "signature_insufficient");
    // Replays of what was once right.
    assert_eq!(advance(&mut store, old.first().seal(&old.two())), "signature_insufficient");
    assert_eq!(advance(&mut store, next.seal(&[old.two(), new.two()].concat())), "trust_rollback");
    assert_eq!(store.root_version(), 2);
}

#[test]
fn a_root_of_another_cluster_or_from_the_future_is_refused() {
    let keys = Keys::new();
    let mut store = keys.store();
    let mut other = keys.first().next(&keys.spec(), now()).unwrap();
    other.cluster = "other".parse().unwrap();
    assert_eq!(code(store.advance_root(other.seal(&keys.two()), now())), "trust_wrong_cluster");
    let future = keys.first().next(&keys.spec(), now() + Duration::from_secs(301)).unwrap();
    assert_eq!(code(store.advance_root(future.seal(&keys.two()), now())), "trust_from_the_future");
    let over = now() + ROOT_METADATA_LIFE;
    assert_eq!(code(TrustStore::pin(keys.first().seal(&keys.two()), over)), "trust_root_expired");
}

#[test]
fn metadata_that_breaks_a_rule_is_refused_even_when_signed() {
    let keys = Keys::new();
    let good = keys.first();
    let pin = |root: &RootMetadata| code(TrustStore::pin(root.seal(&keys.two()), now()));
    let change = |change: &dyn Fn(&mut RootMetadata)| {
        let mut root = good.clone();
        change(&mut root);
        pin(&root)
    };
    assert_eq!(pin(&good), "accepted");
    for broken in [
        change(&|root| root.version = 0),
        change(&|root| root.version = 1 << 53),
        change(&|root| root.expires_at = root.issued_at),
        change(&|root| root.roles.root.threshold = 0),
        change(&|root| root.roles.root.threshold = 4),
        change(&|root| root.roles.image.key_ids.clear()),
        change(&|root| root.roles.root.key_ids.push(root.roles.root.key_ids[0].clone())),
        change(&|root| root.roles.image.key_ids = root.roles.director.key_ids.clone()),
        change(&|root| root.roles.director.key_ids.push(root.roles.root.key_ids[0].clone())),
        change(&|root| root.keys[0].key_id = root.keys[1].key_id.clone()),
        change(&|root| root.keys.push(root.keys[0].clone())),
        change(&|root| root.roles.image.key_ids.push("0".repeat(64))),
    ] {
        assert_eq!(broken, "trust_metadata_invalid");
    }
    let text = String::from_utf8(good.seal(&[]).payload).unwrap();
    for (what, changed) in [
        ("unknown field", text.replacen('{', "{\"extra\":1,", 1)),
        ("repeated field", text.replacen('{', "{\"dev\":true,", 1)),
        ("unknown field in a role", text.replacen("\"threshold\":2", "\"threshold\":2,\"x\":0", 1)),
        ("missing field", text.replacen("\"dev\":false,", "", 1)),
        ("float version", text.replacen("\"version\":1", "\"version\":1.0", 1)),
        ("trailing data", format!("{text}{{}}")),
        ("deep nesting", "[".repeat(100_000)),
    ] {
        assert_ne!(changed, text, "{what}");
        let envelope = seal(mvm_pki::trust::ROOT_PAYLOAD_TYPE, changed.into_bytes(), &keys.two());
        assert_eq!(code(TrustStore::pin(envelope, now())), "trust_metadata_invalid", "{what}");
    }
    let mut shared = keys.spec();
    shared.image = RoleSpec::single(keys.director.public());
    assert!(RootMetadata::first(&shared, now()).is_err());
}

#[test]
fn images_count_only_when_an_image_key_vouches_for_them() {
    let keys = Keys::new();
    let mut store = keys.store();
    let (known, unknown) = (Digest::of(b"known"), Digest::of(b"unknown"));
    let check =
        |store: &TrustStore, images: &[Option<Digest>], at| store.check_images(&desired_with(images), at);
    assert_eq!(code(check(&store, &[Some(known)], now())), "images_missing");
    assert_eq!(code(store.check_images(&desired(), now())), "accepted");
    for wrong in [&keys.director, &keys.root[0], &SigningKey::generate().unwrap()] {
        let refused = store.advance_images(statement(1, &[known, unknown]).seal(&[wrong]), now());
        assert_eq!(code(refused), "signature_insufficient");
    }
    assert!(store.advance_images(keys.images(3, &[known]), now()).unwrap());
    assert_eq!(code(check(&store, &[Some(known), Some(known)], now())), "accepted");
    match check(&store, &[Some(known), Some(unknown), None], now()) {
        Err(TrustError::UnknownImages(errors)) => {
            let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
            assert_eq!(paths, ["tenants[0].pools[1].image_digest", "tenants[0].pools[2].image_digest"]);
            assert_eq!(errors[0].found, unknown.to_string());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(code(check(&store, &[Some(known)], now() + IMAGES_VALID_FOR)), "images_expired");

    assert!(!store.advance_images(keys.images(3, &[known]), now()).unwrap());
    assert_eq!(code(store.advance_images(keys.images(2, &[unknown]), now())), "trust_rollback");
    assert_eq!(code(store.advance_images(keys.images(3, &[unknown]), now())), "trust_conflict");
    assert_eq!(
        code(store.advance_images(keys.images(4, &[unknown]), now() + IMAGES_VALID_FOR)),
        "images_expired"
    );
    let mut foreign = statement(9, &[unknown]);
    foreign.cluster = "other".parse().unwrap();
    assert_eq!(code(store.advance_images(foreign.seal(&[&keys.image]), now())), "trust_wrong_cluster");
    assert_eq!(store.images_version(), 3);
}

#[test]
fn sources_are_signed_with_the_statement_in_order_once_each_and_of_its_own_images_only() {
    let keys = Keys::new();
    let (one, other) = (Digest::of(b"one"), Digest::of(b"other"));
    let source = |flake_ref: &str, digest| ImageSource { flake_ref: flake_ref.to_owned(), digest };
    let (a, b) = (source("github:org/a", one), source("github:org/b", one));
    let written = statement(1, &[one]).with_sources([b.clone(), a.clone(), b.clone()]).unwrap();
    assert_eq!(written.sources, [a.clone(), b.clone()]);
    let mut store = keys.store();
    store.advance_images(written.seal(&[&keys.image]), now()).unwrap();
    assert_eq!(store.images().unwrap().sources, [a.clone(), b.clone()]);

    let refused = |sources: Vec<ImageSource>| {
        let odd = ImagesMetadata { sources, ..statement(2, &[one]) };
        code(keys.store().advance_images(odd.seal(&[&keys.image]), now()))
    };
    assert_eq!(refused(vec![a.clone()]), "accepted");
    assert_eq!(refused(vec![b, a.clone()]), "trust_metadata_invalid");
    assert_eq!(refused(vec![a.clone(), a]), "trust_metadata_invalid");
    assert_eq!(refused(vec![source("github:org/a", other)]), "trust_metadata_invalid");
    assert_eq!(refused(vec![source("", one)]), "trust_metadata_invalid");
    assert_eq!(refused(vec![source("github:org/a b", one)]), "trust_metadata_invalid");
    assert_eq!(refused(vec![source(&"r".repeat(2049), one)]), "trust_metadata_invalid");
    let many = |count: usize| (0..count).map(|at| source(&format!("r{at:05}"), one)).collect();
    assert_eq!((refused(many(4096)), refused(many(4097))), ("accepted", "trust_metadata_invalid"));
}

#[test]
fn a_statement_without_sources_is_read_and_written_as_before_there_were_any() {
    let before = statement(1, &[Digest::of(b"one")]);
    let keys = Keys::new();
    let envelope = before.seal(&[&keys.image]);
    let text = String::from_utf8(envelope.payload.clone()).unwrap();
    assert!(!text.contains("sources"), "older nodes read it: {text}");
    let mut store = keys.store();
    store.advance_images(envelope, now()).unwrap();
    assert_eq!(store.images(), Some(&before));
}

#[test]
fn a_dev_cluster_says_so_and_vouches_for_every_image() {
    let keys = Keys::new();
    let root = RootMetadata::first(&RootSpec { dev: true, ..keys.spec() }, now()).unwrap();
    let store = TrustStore::pin(root.seal(&keys.two()), now()).unwrap();
    assert!(store.is_dev());
    assert_eq!(code(store.check_images(&desired_with(&[None]), now())), "accepted");
}

#[test]
fn what_only_stolen_image_keys_vouched_for_goes_with_them() {
    let (old, new) = (Keys::new(), Keys::new());
    let mut store = old.store();
    store.advance_images(old.images((1 << 53) - 1, &[Digest::of(b"evil")]), now()).unwrap();
    let mut spec = old.spec();
    spec.image = RoleSpec::single(new.image.public());
    spec.resets_high_water = true;
    let next = old.first().next(&spec, now()).unwrap();
    let change = store.advance_root(next.seal(&old.two()), now()).unwrap();
    assert!(change.images_dropped && change.resets_high_water);
    assert_eq!(store.images_version(), 0);
    assert!(store.advance_images(new.images(1, &[Digest::of(b"good")]), now()).unwrap());
    assert!(!next.spec().resets_high_water);
}

#[test]
fn a_node_that_missed_versions_follows_the_chain_and_keeps_it_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trust.json");
    let keys: Vec<Keys> = (0..5).map(|_| Keys::new()).collect();
    let mut coordinator = keys[0].store();
    for pair in keys.windows(2) {
        let next = coordinator.root().next(&pair[1].spec(), now()).unwrap();
        let signers = [pair[0].two(), pair[1].two()].concat();
        coordinator.advance_root(next.seal(&signers), now()).unwrap();
    }
    coordinator.advance_images(keys[4].images(1, &[Digest::of(b"i")]), now()).unwrap();
    coordinator.save(&path).unwrap();
    let loaded = TrustStore::load(&path).unwrap();
    assert_eq!(loaded.bundle(), coordinator.bundle());

    let mut node = keys[0].store();
    let text = serde_json::to_string(&loaded.bundle()).unwrap();
    let bundle: TrustBundle = serde_json::from_str(&text).unwrap();
    assert_eq!(node.update(&bundle, now()).unwrap().roots.len(), 4);
    assert_eq!(node.update(&bundle, now()).unwrap().roots.len(), 0);
    assert_eq!((node.root_version(), node.images_version()), (5, 1));
    // Years later the old roots have expired; the chain is still good if its last link is.
    let late = now() + ROOT_METADATA_LIFE;
    let first = root_digest(&bundle.roots[0]);
    assert_eq!(code(TrustStore::pin_digest(&bundle, first, late)), "trust_root_expired");
    assert_eq!(TrustStore::pin_digest(&bundle, first, now()).unwrap().0.root_version(), 5);

    let mut gap = bundle.clone();
    gap.roots.remove(2);
    assert_ne!(code(TrustStore::pin_digest(&gap, first, now())), "accepted");
    assert_eq!(code(TrustStore::pin_digest(&TrustBundle::default(), first, now())), "trust_root_other");
    assert_eq!(code(Keys::new().store().update(&bundle, now())), "signature_insufficient");
}

#[test]
fn a_trust_file_that_was_changed_or_cut_short_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trust.json");
    let keys = Keys::new();
    keys.store().save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    for cut in 0..good.len() {
        std::fs::write(&path, &good[..cut]).unwrap();
        assert_eq!(code(TrustStore::load(&path)), "trust_damaged", "cut at {cut}");
    }
    for at in (0..good.len()).step_by(7) {
        let mut changed = good.clone();
        changed[at] ^= 1;
        std::fs::write(&path, &changed).unwrap();
        assert_eq!(code(TrustStore::load(&path)), "trust_damaged", "byte {at}");
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(code(TrustStore::load(&path)), "trust_file");
}

#[test]
fn no_single_flipped_bit_of_any_envelope_is_accepted() {
    let keys = Keys::new();
    let store = keys.store();
    let flips = |envelope: Envelope, accepted: &dyn Fn(Envelope) -> bool| {
        let json = envelope.to_json();
        assert!(accepted(Envelope::from_json(&json).unwrap()));
        for at in 0..json.len() {
            for bit in 0..8 {
                let mut flipped = json.clone();
                flipped[at] ^= 1 << bit;
                if let Ok(envelope) = Envelope::from_json(&flipped) {
                    assert!(!accepted(envelope), "bit {bit} of byte {at}");
                }
            }
        }
    };
    flips(sealed(&[&keys.director]), &|envelope| {
        store.verify_document(Unverified::new(envelope), now()).is_ok()
    });
    flips(keys.images(1, &[Digest::of(b"i")]), &|envelope| {
        store.clone().advance_images(envelope, now()).is_ok()
    });
    flips(keys.first().seal(&keys.two()), &|envelope| TrustStore::pin(envelope, now()).is_ok());
}

#[test]
fn documents_that_a_director_signed_together_count_each_in_its_place_and_only_as_documents() {
    let keys = Keys::new();
    let store = keys.store();
    let payloads: Vec<Vec<u8>> = (1..=5)
        .map(|generation| {
            let mut document = document();
            document.provenance.generation = generation;
            document.to_payload()
        })
        .collect();
    let digests: Vec<Digest> = payloads.iter().map(|payload| Digest::of(payload)).collect();
    let signatures = keys.director.sign_batch(DOCUMENT_PAYLOAD_TYPE, &digests);
    let verify = |payload: &[u8], signature: &mvm_proto::envelope::Signature| {
        let payload_type = DOCUMENT_PAYLOAD_TYPE.to_owned();
        let signatures = vec![signature.clone()];
        store.verify_document(
            Unverified::new(Envelope { payload_type, payload: payload.to_vec(), signatures }),
            now(),
        )
    };
    for (at, payload) in payloads.iter().enumerate() {
        for (place, signature) in signatures.iter().enumerate() {
            assert_eq!(verify(payload, signature).is_ok(), at == place, "{at} in {place}");
        }
    }
    for bit in 0..signatures[2].bytes.len() * 8 {
        let mut flipped = signatures[2].clone();
        flipped.bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(verify(&payloads[2], &flipped).is_err(), "bit {bit}");
    }
    // Of another type, by a key that is no director's, and by the image key for a statement of images: nothing.
    let other_type = keys.director.sign_batch("application/vnd.mvm.other", &digests);
    assert!(verify(&payloads[0], &other_type[0]).is_err());
    for key in [&keys.image, &keys.root[0], &SigningKey::generate().unwrap()] {
        let mut foreign = key.sign_batch(DOCUMENT_PAYLOAD_TYPE, &digests)[0].clone();
        assert!(verify(&payloads[0], &foreign).is_err());
        foreign.key_id = keys.director.key_id();
        assert!(verify(&payloads[0], &foreign).is_err());
    }
    let mut statement = keys.images(1, &[]);
    let both = [Digest::of(&statement.payload), Digest::of(b"another")];
    statement.signatures = vec![keys.image.sign_batch(&statement.payload_type, &both).remove(0)];
    assert!(keys.store().advance_images(statement, now()).is_err());
    assert!(keys.store().advance_images(keys.images(1, &[]), now()).is_ok());
}
