//! A cluster's keys, and an acceptor that trusts them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use mvm_agent::clock::Clock;
use mvm_agent::intake::acceptor::{Acceptor, AcceptorSettings, HardLimits};
use mvm_agent::intake::ledger::LEDGER_FILE;
use mvm_pki::signing::{SigningKey, seal};
use mvm_pki::trust::{ImageSource, ImagesMetadata, RoleSpec, RootMetadata, RootSpec, TrustStore};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::{Digest, Timestamp};
use serde_json::{Value, json};

use crate::node::documents::{CLUSTER, NODE, document, pool, tenant};

pub(crate) const NOW_MS: i64 = 1_800_000_000_000;
pub(crate) const DAY: Duration = Duration::from_secs(86_400);

pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_ms(NOW_MS + seconds * 1000)
}

pub(crate) struct Cluster {
    pub(crate) dir: PathBuf,
    pub(crate) root: SigningKey,
    pub(crate) director: SigningKey,
    pub(crate) image: SigningKey,
    pub(crate) first_root: RootMetadata,
    now_ms: Arc<AtomicI64>,
    _temporary: Option<tempfile::TempDir>,
}

impl Cluster {
    pub(crate) fn dev() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        Self { _temporary: Some(dir), ..Self::in_dir(&path, true) }
    }

    pub(crate) fn production() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        Self { _temporary: Some(dir), ..Self::in_dir(&path, false) }
    }

    pub(crate) fn in_dir(dir: &Path, dev: bool) -> Self {
        let key = || SigningKey::generate().unwrap();
        let (root, director, image) = (key(), key(), key());
        let spec = spec(&root, &director, &image, dev);
        let first_root = RootMetadata::first(&spec, at(-3600)).unwrap();
        let trust = TrustStore::pin(first_root.seal(&[&root]), at(0)).unwrap();
        trust.save(&dir.join("trust.json")).unwrap();
        let now_ms = Arc::new(AtomicI64::new(NOW_MS));
        Self { dir: dir.to_owned(), root, director, image, first_root, now_ms, _temporary: None }
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.dir.join(LEDGER_FILE)
    }

    pub(crate) fn settings(&self) -> AcceptorSettings {
        AcceptorSettings {
            node_id: NODE.parse().unwrap(),
            trust_file: self.dir.join("trust.json"),
            ledger_file: self.ledger(),
            limits: HardLimits::default(),
        }
    }

    pub(crate) fn open(&self) -> Arc<Acceptor> {
        self.try_open().unwrap()
    }

    pub(crate) fn try_open(&self) -> Result<Arc<Acceptor>, mvm_proto::Problem> {
        let now_ms = Arc::clone(&self.now_ms);
        let clock = Clock::new(move || Timestamp::from_unix_ms(now_ms.load(Ordering::SeqCst)));
        Acceptor::open(self.settings(), clock)
    }

    pub(crate) fn set_time(&self, seconds: i64) {
        self.now_ms.store(at(seconds).unix_ms(), Ordering::SeqCst);
    }

    /// A root that follows the first one.
    pub(crate) fn next_root(&self, resets_high_water: bool) -> Vec<u8> {
        let mut spec = spec(&self.root, &self.director, &self.image, self.first_root.dev);
        spec.resets_high_water = resets_high_water;
        self.first_root.next(&spec, at(-60)).unwrap().seal(&[&self.root]).to_json()
    }

    pub(crate) fn images(&self, digests: &[Digest]) -> Vec<u8> {
        self.statement(1, digests, &[])
    }

    /// A statement of images, with references that nodes may build and what must come of each.
    pub(crate) fn statement(&self, version: u64, digests: &[Digest], sources: &[(&str, Digest)]) -> Vec<u8> {
        let cluster = CLUSTER.parse().unwrap();
        let images = ImagesMetadata::new(cluster, version, digests.iter().copied(), at(-60), DAY).unwrap();
        let source = |(flake_ref, digest): &(&str, Digest)| ImageSource {
            flake_ref: (*flake_ref).to_owned(),
            digest: *digest,
        };
        let images = images.with_sources(sources.iter().map(source)).unwrap();
        images.seal(&[&self.image]).to_json()
    }

    pub(crate) fn sign(&self, payload: &Value) -> Vec<u8> {
        seal(DOCUMENT_PAYLOAD_TYPE, payload.to_string().into_bytes(), &[&self.director]).to_json()
    }
}

fn spec(root: &SigningKey, director: &SigningKey, image: &SigningKey, dev: bool) -> RootSpec {
    RootSpec {
        cluster: CLUSTER.parse().unwrap(),
        expires_at: at(0) + 365 * DAY,
        dev,
        resets_high_water: false,
        root: RoleSpec::single(root.public()),
        director: RoleSpec::single(director.public()),
        image: RoleSpec::single(image.public()),
    }
}

/// What a coordinator signs, for this place in the order.
pub(crate) fn payload(epoch: u64, generation: u64) -> Value {
    let mut payload = document(&[tenant("acme", 3, &[pool("workers", 1, 0, 0)])]);
    let fields = json!({
        "cluster": CLUSTER, "epoch": epoch, "generation": generation,
        "issued_at": at(-10).to_string(), "expires_at": at(86_400).to_string(),
    });
    payload.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    payload
}
