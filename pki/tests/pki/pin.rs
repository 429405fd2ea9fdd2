//! Pinned trust: which root a party starts from, and what it makes of a bundle from someone who may lie.

use mvm_pki::trust::{ROOT_METADATA_LIFE, RoleSpec, RootSpec, root_digest};
use mvm_pki::{RootMetadata, TrustBundle, TrustError, TrustStore};
use mvm_proto::Digest;

use crate::support::now;
use crate::trust::{IMAGES_VALID_FOR, Keys, code, desired_with, statement};

/// A store at root version `version`, every root naming the same keys.
fn at_version(keys: &Keys, version: u64) -> TrustStore {
    let mut store = keys.store();
    while store.root_version() < version {
        let next = store.root().next(&keys.spec(), now()).unwrap();
        store.advance_root(next.seal(&keys.two()), now()).unwrap();
    }
    store
}

/// What a compromised coordinator makes: the same cluster, its own root keys, the real image key beside its own.
fn forged(real: &Keys, thief: &Keys, version: u64, evil: Digest) -> TrustBundle {
    let mut spec = thief.spec();
    spec.image =
        RoleSpec { keys: vec![thief.image.public(), real.image.public()], threshold: 1, expires_at: None };
    let root = RootMetadata { version, ..RootMetadata::first(&spec, now()).unwrap() };
    let images = statement(7, &[evil]).seal(&[&thief.image]);
    TrustBundle { roots: vec![root.seal(&thief.two())], images: Some(images) }
}

#[test]
fn a_root_is_pinned_by_its_digest_wherever_it_is_in_the_chain() {
    let keys = Keys::new();
    let bundle = at_version(&keys, 4).bundle();
    for root in &bundle.roots {
        let (store, followed) = TrustStore::pin_digest(&bundle, root_digest(root), now()).unwrap();
        assert_eq!(store.root_version(), 4);
        assert_eq!(store.root_digest(), root_digest(&bundle.roots[3]));
        assert_eq!(store.root_envelopes().len(), followed.roots.len() + 1);
    }
}

#[test]
fn a_chain_without_the_root_of_that_digest_is_not_pinned() {
    let (real, thief) = (Keys::new(), Keys::new());
    let digest = real.store().root_digest();
    let forged = forged(&real, &thief, 1, Digest::of(b"evil"));
    assert_eq!(code(TrustStore::pin_digest(&forged, digest, now())), "trust_root_other");
    // The real root in front of a forged successor does not help.
    let mut mixed = at_version(&thief, 2).bundle();
    mixed.roots[0] = real.first().seal(&real.two());
    assert_eq!(code(TrustStore::pin_digest(&mixed, digest, now())), "signature_insufficient");
}

#[test]
fn a_forged_root_is_refused_by_a_pin_at_every_version() {
    let (real, thief) = (Keys::new(), Keys::new());
    for held in 1..=3 {
        let pin = at_version(&real, held);
        for version in 1..=held + 2 {
            let mut followed = pin.clone();
            let refused =
                followed.follow_supplied(&forged(&real, &thief, version, Digest::of(b"evil")), now());
            let expected = if version <= held { "trust_conflict" } else { "signature_insufficient" };
            assert_eq!(code(refused), expected, "version {version} against {held}");
            assert_eq!(followed.bundle(), pin.bundle());
        }
    }
}

#[test]
fn a_forged_images_statement_is_not_taken_by_a_pin() {
    let (real, thief) = (Keys::new(), Keys::new());
    let (good, evil) = (Digest::of(b"good"), Digest::of(b"evil"));
    let mut pin = real.store();
    pin.advance_images(real.images(3, &[good]), now()).unwrap();
    for (images, expected) in [
        (statement(9, &[evil]).seal(&[&thief.image]), "signature_insufficient"),
        (real.images(3, &[evil]), "trust_conflict"),
    ] {
        let bundle = TrustBundle { roots: real.store().bundle().roots, images: Some(images) };
        let supplied = pin.follow_supplied(&bundle, now()).unwrap();
        assert_eq!(supplied.images_refused.map(|error| error.code()), Some(expected));
        assert_eq!(pin.images().unwrap().digests, [good]);
    }
}

#[test]
fn a_bundle_that_lags_behind_the_pin_is_noticed_and_takes_nothing_back() {
    let keys = Keys::new();
    let mut pin = at_version(&keys, 3);
    pin.advance_images(keys.images(5, &[Digest::of(b"new")]), now()).unwrap();
    let old = TrustBundle { images: Some(keys.images(4, &[])), ..at_version(&keys, 2).bundle() };
    let empty = TrustBundle::default();
    for (shown, root, images) in [(&old, 2, 4), (&empty, 0, 0)] {
        let before = pin.bundle();
        let supplied = pin.follow_supplied(shown, now()).unwrap();
        assert_eq!((supplied.root_behind, supplied.images_behind), (Some(root), Some(images)));
        assert_eq!(pin.bundle(), before);
    }
    let same = pin.follow_supplied(&pin.bundle(), now()).unwrap();
    assert_eq!((same.root_behind, same.images_behind), (None, None));
}

#[test]
fn an_images_statement_that_expired_is_still_numbered_above() {
    let keys = Keys::new();
    let mut pin = keys.store();
    let mut bundle = pin.bundle();
    bundle.images = Some(keys.images(6, &[Digest::of(b"i")]));
    let late = now() + IMAGES_VALID_FOR;
    assert!(late < now() + ROOT_METADATA_LIFE);
    assert!(pin.follow_supplied(&bundle, late).unwrap().images_refused.is_none());
    assert_eq!(pin.images_version(), 6);
    assert_eq!(code(pin.check_images(&desired_with(&[Some(Digest::of(b"i"))]), late)), "images_expired");
}

#[test]
fn a_root_is_followed_though_the_images_statement_beside_it_is_refused() {
    let (old, new) = (Keys::new(), Keys::new());
    let (good, evil) = (Digest::of(b"good"), Digest::of(b"evil"));
    let mut store = old.store();
    store.advance_images(old.images(5, &[good]), now()).unwrap();
    let next = |spec: RootSpec| old.first().next(&spec, now()).unwrap().seal(&old.two());
    let director = next(RootSpec { director: RoleSpec::single(new.director.public()), ..old.spec() });
    let image = next(RootSpec { image: RoleSpec::single(new.image.public()), ..old.spec() });
    // An image key that signed two statements of one number, and one that the new root does not name any more.
    for (root, kept, expected) in
        [(director, vec![good], "trust_conflict"), (image, vec![], "signature_insufficient")]
    {
        let mut store = store.clone();
        let bundle = TrustBundle { roots: vec![root], images: Some(old.images(5, &[evil])) };
        let followed = store.update(&bundle, now()).unwrap();
        assert_eq!((followed.roots.len(), store.root_version()), (1, 2));
        assert_eq!(followed.images_refused.map(|error: TrustError| error.code()), Some(expected));
        assert_eq!(store.images().map(|held| held.digests.clone()).unwrap_or_default(), kept);
    }
}
