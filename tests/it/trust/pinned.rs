//! Offline keys sign on top of the pinned trust, whatever a coordinator supplies.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mvm_pki::trust::{RoleSpec, RootSpec};
use mvm_pki::{ImagesMetadata, RootMetadata, SigningKey, TrustBundle, TrustStore};
use mvm_proto::{Digest, Timestamp};
use mvm_tests::{Cluster, ClusterSettings, path_text};

use crate::trust::signing;

const DAY: Duration = Duration::from_secs(86_400);

fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

pub(crate) fn production() -> ClusterSettings {
    ClusterSettings { dev: false, ..ClusterSettings::default() }
}

fn key() -> SigningKey {
    SigningKey::generate().unwrap()
}

/// The trust that a thief makes: its own root key, and everyone else's key in the roles that it likes.
pub(crate) fn forge(version: u64, dev: bool, director: RoleSpec, image: RoleSpec) -> TrustStore {
    let root = key();
    let spec = RootSpec {
        cluster: "test".parse().unwrap(),
        expires_at: now() + 10 * DAY,
        dev,
        resets_high_water: false,
        root: RoleSpec::single(root.public()),
        director,
        image,
    };
    let metadata = RootMetadata { version, ..RootMetadata::first(&spec, now()).unwrap() };
    TrustStore::pin(metadata.seal(&[&root]), now()).unwrap()
}

/// A forged root that names the real image key beside the thief's, and the thief's statement of an evil image.
fn forged_images(cluster: &Cluster, version: u64, evil: Digest) -> TrustBundle {
    let real = SigningKey::from_file(&signing(cluster, "image.key")).unwrap().public();
    let (director, image) = (key(), key());
    let both = RoleSpec { keys: vec![image.public(), real], threshold: 1, expires_at: None };
    let mut store = forge(version, false, RoleSpec::single(director.public()), both);
    let statement = ImagesMetadata::new("test".parse().unwrap(), 7, [evil], now(), DAY).unwrap();
    store.advance_images(statement.seal(&[&image]), now()).unwrap();
    store.bundle()
}

fn pins(cluster: &Cluster) -> [PathBuf; 2] {
    [signing(cluster, "trust.json"), cluster.coordinator_dir().join("operator/trust.json")]
}

/// Whether a node that trusts `real` would start `image` once it has taken what is in `signed`.
fn counts(real: &TrustStore, signed: &Path, image: Digest) -> bool {
    let signed: TrustBundle = serde_json::from_slice(&std::fs::read(signed).unwrap()).unwrap();
    let mut node = real.clone();
    let _ = node.update(&signed, now());
    node.images().is_some_and(|images| images.digests.contains(&image))
}

fn write(path: &Path, bundle: &TrustBundle) {
    std::fs::write(path, serde_json::to_vec(bundle).unwrap()).unwrap();
}

#[test]
fn no_offline_key_signs_on_top_of_a_forged_root() {
    let cluster = Cluster::init(production());
    let (supplied, out) = (cluster.path().join("supplied.json"), cluster.path().join("out.json"));
    let (image, root) = (signing(&cluster, "image.key"), signing(&cluster, "root.key"));
    let real = TrustStore::load(&pins(&cluster)[0]).unwrap();
    let (good, evil) = (Digest::of(b"good"), Digest::of(b"evil"));
    let vouch = ["vouch", "--image-key", path_text(&image), "--digest", &good.to_string()].map(str::to_owned);
    let next_root = ["next-root", "--root-key", path_text(&root)].map(str::to_owned);
    for version in [1, 2, 3] {
        write(&supplied, &forged_images(&cluster, version, evil));
        for command in [&vouch[..], &next_root[..]] {
            let mut args = vec!["trust"];
            args.extend(command.iter().map(String::as_str));
            args.extend(["--from", path_text(&supplied), "--out", path_text(&out), "--yes"]);
            let output = cluster.mvm(&args);
            assert!(
                !out.exists(),
                "{command:?} signed on top of root version {version}; the evil image counts on nodes: {}",
                counts(&real, &out, evil)
            );
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == Some(1) && told.contains("nothing was signed"), "{told}");
        }
    }
    for pin in pins(&cluster) {
        assert_eq!(TrustStore::load(&pin).unwrap().bundle(), real.bundle());
    }
}

#[test]
fn without_a_pin_or_a_confirmation_nothing_is_signed() {
    let cluster = Cluster::start_with(production());
    let key = signing(&cluster, "image.key");
    let digest = Digest::of(b"an image").to_string();
    let vouch = ["trust", "vouch", "--image-key", path_text(&key), "--digest", &digest];
    let told = cluster.mvm_fails(&vouch, 2);
    assert!(told.contains("--yes") && told.contains(&format!("+ image {digest}")), "{told}");

    let first = cluster.mvm_json(&["trust", "get"]);
    assert_eq!((first["pinned"].as_str(), first["images_version"].as_u64()), (Some("yes"), Some(1)));
    for pin in pins(&cluster) {
        std::fs::remove_file(pin).unwrap();
    }
    let told = cluster.mvm_fails(&[&vouch[..], &["--yes"]].concat(), 1);
    assert!(told.contains("mvm trust pin --digest"), "{told}");

    let told = cluster.mvm_fails(&["trust", "pin", "--digest", &digest], 1);
    assert!(told.contains(&digest), "{told}");
    cluster.mvm_ok(&["trust", "pin", "--digest", first["root_digest"].as_str().unwrap()]);
    let state = cluster.mvm_json(&[&vouch[..], &["--yes"]].concat());
    assert_eq!((state["pinned"].as_str(), state["image_digests"].as_u64()), (Some("yes"), Some(1)));
    let told = cluster.mvm_fails(&["trust", "pin", "--digest", &digest], 1);
    assert!(told.contains("already"), "a pin is not replaced: {told}");
}

#[test]
fn an_images_statement_that_the_coordinator_hides_is_noticed_and_not_lost() {
    let cluster = Cluster::start_with(production());
    let (key, out) = (signing(&cluster, "image.key"), cluster.path().join("out.json"));
    let [one, two] = [b"one", b"two"].map(|image| Digest::of(image).to_string());
    let vouch = ["trust", "vouch", "--yes", "--image-key", path_text(&key), "--digest"];
    // Signed and never handed over: to this operator the coordinator looks as if it hid version 2.
    cluster.mvm_ok(&[&vouch[..], &[&one, "--out", path_text(&out)]].concat());
    let output = cluster.mvm(&[&vouch[..], &[&two, "-o", "json"]].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("version 1 of the images statement") && told.contains("hides"), "{told}");
    let state: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((state["images_version"].as_u64(), state["image_digests"].as_u64()), (Some(3), Some(2)));
    for pin in pins(&cluster) {
        assert_eq!(TrustStore::load(&pin).unwrap().images_version(), 3);
    }
}

#[test]
fn a_token_for_another_trust_root_than_the_pinned_one_is_not_handed_out() {
    let mut cluster = Cluster::start_with(production());
    let create = ["coordinator", "token", "create", "--node", "node-a"];
    cluster.mvm_ok(&create);
    cluster.kill_coordinator();
    let director = SigningKey::from_file(&signing(&cluster, "director.key")).unwrap().public();
    let forged = forge(1, true, RoleSpec::single(director), RoleSpec::single(key().public()));
    forged.save(&cluster.coordinator_dir().join("trust.json")).unwrap();
    cluster.start_coordinator();
    let output = cluster.mvm(&create);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("pinned") && output.stdout.is_empty(), "{told}");
    assert!(told.contains(&forged.root_digest().to_string()), "{told}");
}
