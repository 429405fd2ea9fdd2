//! The signing keys that this cluster trusts: stores root versions and the statement of images, and sends them to nodes.
//!
//! The chain of root versions and the newest statement of images are in `trust.json`. Updates are verified exactly as an agent
//! verifies them, are durable before they are used, and go to every session ahead of the next document.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use mvm_pki::trust::{Followed, TrustRole};
use mvm_pki::{PublicKey, RootMetadata, TrustBundle, TrustError, TrustStore};
use mvm_proto::envelope::Payload as _;
use mvm_proto::wire::session::v1;
use mvm_proto::{Envelope, Problem, Timestamp};
use parking_lot::RwLock;

use crate::refuse;

pub(crate) struct Trust {
    current: RwLock<Known>,
    path: PathBuf,
    /// One update at a time: each is checked against the result of the one before.
    updating: tokio::sync::Mutex<()>,
}

/// What is known, and its bundle as JSON: anyone may ask for it, so it is encoded once.
struct Known {
    store: Arc<TrustStore>,
    encoded: Bytes,
}

impl Known {
    fn new(store: TrustStore) -> Self {
        let encoded = serde_json::to_vec(&store.bundle()).unwrap_or_default().into();
        Self { store: Arc::new(store), encoded }
    }
}

impl Trust {
    pub(crate) fn load(path: PathBuf) -> Result<Self, TrustError> {
        let store = TrustStore::load(&path)?;
        Ok(Self { current: RwLock::new(Known::new(store)), path, updating: tokio::sync::Mutex::new(()) })
    }

    pub(crate) fn current(&self) -> Arc<TrustStore> {
        Arc::clone(&self.current.read().store)
    }

    /// Follows new root versions, all of them or none, and takes a statement of images if it can. Operators send the
    /// chain from its start: the roots that are known already are passed over, as agents do.
    pub(crate) async fn update(
        &self,
        roots: &[Vec<u8>],
        images: &[Vec<u8>],
        now: Timestamp,
    ) -> Result<Followed, Problem> {
        let _one = self.updating.lock().await;
        let mut next = TrustStore::clone(&self.current());
        let roots = roots.iter().map(|root| envelope(root)).collect::<Result<_, _>>()?;
        // The newest statement says all that the older ones said.
        let images = images.last().map(|images| envelope(images)).transpose()?;
        let before = next.images_envelope().cloned();
        let mut followed =
            next.update(&TrustBundle { roots, images: None }, now).map_err(|error| error.to_problem())?;
        // What is sent again changes nothing, however old it is.
        let news = images.filter(|sent| before.is_none_or(|held| held.payload != sent.payload));
        let refused = news.and_then(|images| next.advance_images(images, now).err());
        // A statement that became stale on the way is no news beside the root that it was carried with.
        followed.images_refused = refused.filter(|error| followed.roots.is_empty() || !error.is_stale());
        let path = self.path.clone();
        let next = tokio::task::spawn_blocking(move || next.save(&path).map(|()| next))
            .await
            .map_err(|error| refuse::internal(&error))?
            .map_err(|error| refuse::internal(&error))?;
        *self.current.write() = Known::new(next);
        Ok(followed)
    }

    /// What a node with these versions lacks, oldest first.
    pub(crate) fn since(&self, root_version: u64, images_version: u64) -> Option<v1::Trust> {
        let trust = self.current();
        if root_version >= trust.root_version() && images_version >= trust.images_version() {
            return None;
        }
        // The chain starts at version 1, so as many are known to the node as its version says.
        let known = usize::try_from(root_version).unwrap_or(usize::MAX);
        let roots = trust.root_envelopes().iter().skip(known).map(Envelope::to_json).collect();
        Some(v1::Trust {
            roots,
            images: trust.images_envelope().map(Envelope::to_json).into_iter().collect(),
        })
    }

    /// The directors of the current root.
    pub(crate) fn directors(&self) -> Vec<PublicKey> {
        self.current().root().keys_of(TrustRole::Director)
    }

    /// The version of the newest root that resets high-water marks; 0: none does.
    pub(crate) fn newest_reset(&self) -> u64 {
        let resets = self.chain().into_iter().filter(|root| root.resets_high_water);
        resets.map(|root| root.version).max().unwrap_or(0)
    }

    /// Whether a node that knows the roots up to `version` will forget its mark as soon as it hears of the rest.
    pub(crate) fn resets_since(&self, version: u64) -> bool {
        self.newest_reset() > version
    }

    /// All roots, oldest first. They were verified when they were taken.
    fn chain(&self) -> Vec<RootMetadata> {
        let trust = self.current();
        trust.root_envelopes().iter().filter_map(|root| RootMetadata::parse(&root.payload).ok()).collect()
    }

    pub(crate) fn bundle(&self) -> TrustBundle {
        self.current().bundle()
    }

    /// The bundle as JSON.
    pub(crate) fn encoded(&self) -> Bytes {
        self.current.read().encoded.clone()
    }
}

fn envelope(json: &[u8]) -> Result<Envelope, Problem> {
    Envelope::from_json(json)
        .map_err(|error| Problem::new(400, "bad_envelope", error.to_string(), "Send DSSE envelopes as JSON."))
}
