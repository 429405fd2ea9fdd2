//! The one place where documents are accepted, whichever way they came.
//!
//! An envelope passes, in this order: size, shape, signature, schema, place in the order, images, this node's own
//! limits. It is then recorded in the ledger, and only after that handed to the reconcile task. One document at a
//! time: a mutex around trust and ledger keeps two pushes from passing the same check.

mod refusal;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use mvm_image::Vouched;
use mvm_pki::status::expiries;
use mvm_pki::trust::{RootMetadata, TrustBundle, TrustStore};
use mvm_proto::envelope::{MAX_ENVELOPE_BYTES, Payload};
use mvm_proto::status::Mark;
use mvm_proto::text::is_caused_by;
use mvm_proto::wire::session::v1::DocumentDelta;
use mvm_proto::{
    DesiredState, Envelope, NodeId, Problem, SignedDocument, Timestamp, TraceContext, Unverified, Verified,
};
use parking_lot::Mutex;
use refusal::{broken_envelope, ledger_problem, refuse_limits, too_large, trust_problem};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::intake::ledger::{Ledger, LedgerError, Verdict, judge};
use crate::node::CurrentDocument;

/// What no document may make this node do, even if it is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HardLimits {
    /// Each tenant is a bridge and a set of firewall rules.
    pub max_tenants: usize,
    /// The sum of all wanted counts: far beyond what one machine runs, far below what fills its disk with records.
    pub max_instances: usize,
}

impl Default for HardLimits {
    fn default() -> Self {
        Self { max_tenants: 4096, max_instances: 20_000 }
    }
}

#[derive(Debug, Clone)]
pub struct AcceptorSettings {
    pub node_id: NodeId,
    /// The cluster's trust, as pinned at enrolment: `<certs-dir>/trust.json`.
    pub trust_file: PathBuf,
    /// Where the last accepted document is kept: [`crate::intake::ledger::LEDGER_FILE`] in the data directory.
    pub ledger_file: PathBuf,
    pub limits: HardLimits,
}

/// What became of a document that was not refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    pub mark: Mark,
    /// False: it was already in force.
    pub is_new: bool,
}

#[derive(Debug)]
pub struct Acceptor {
    shared: Arc<Shared>,
    /// Documents are checked and recorded one after the other.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    settings: AcceptorSettings,
    clock: Clock,
    held: Mutex<Held>,
    /// What others ask for, apart from what is locked while the disk is waited for.
    published: Mutex<Published>,
    current_document: watch::Sender<Option<Arc<CurrentDocument>>>,
    vouched: watch::Sender<Vouched>,
}

#[derive(Debug)]
struct Held {
    trust: TrustStore,
    ledger: Ledger,
}

#[derive(Debug, Clone)]
struct Published {
    high_water: Option<Mark>,
    /// As JSON.
    envelope: Option<Bytes>,
    root_version: u64,
    images_version: u64,
    is_dev: bool,
    expiries: Vec<(&'static str, Timestamp)>,
}

impl Held {
    fn reset_if_due(&mut self) -> Result<(), LedgerError> {
        if self.ledger.high_water().is_some() && resets_since(&self.trust, self.ledger.root_version()) {
            self.ledger.reset(self.trust.root_version())?;
        }
        Ok(())
    }

    fn publish(&self) -> Published {
        Published {
            high_water: self.ledger.high_water().cloned(),
            envelope: self.ledger.envelope().cloned(),
            root_version: self.trust.root_version(),
            images_version: self.trust.images_version(),
            is_dev: self.trust.is_dev(),
            expiries: expiries(None, None, Some(&self.trust)),
        }
    }
}

impl Acceptor {
    /// Opens trust and ledger. A damaged file is an error: starting without it would allow a rollback.
    pub fn open(settings: AcceptorSettings, clock: Clock) -> Result<Arc<Self>, Problem> {
        let trust = TrustStore::load(&settings.trust_file).map_err(|error| error.to_problem())?;
        let ledger = Ledger::open(&settings.ledger_file).map_err(|error| ledger_problem(&error))?;
        let mut held = Held { trust, ledger };
        // A root that resets the mark may have been saved just before a crash.
        held.reset_if_due().map_err(|error| ledger_problem(&error))?;
        let current_document = watch::Sender::new(held.ledger.current_document().cloned());
        let vouched = watch::Sender::new(Vouched::by(&held.trust));
        let published = Mutex::new(held.publish());
        let shared = Arc::new(Shared {
            settings,
            clock,
            held: Mutex::new(held),
            published,
            current_document,
            vouched,
        });
        Ok(Arc::new(Self { shared, turn: tokio::sync::Mutex::new(()) }))
    }

    /// Checks a DSSE envelope, makes it durable, and puts it in force.
    pub async fn accept(&self, envelope_json: &[u8]) -> Result<Accepted, Problem> {
        self.accept_traced(envelope_json, None).await
    }

    /// The same of a document that belongs to a trace, as what is done for it then does.
    pub async fn accept_traced(
        &self,
        envelope_json: &[u8],
        trace: Option<TraceContext>,
    ) -> Result<Accepted, Problem> {
        if envelope_json.len() > MAX_ENVELOPE_BYTES {
            return Err(too_large(envelope_json.len()));
        }
        let envelope = Envelope::from_json(envelope_json).map_err(|error| broken_envelope(&error))?;
        let _turn = self.turn.lock().await;
        let shared = Arc::clone(&self.shared);
        // Signatures and fsync take milliseconds; the connections' threads have other things to do.
        blocking(move || shared.accept(&envelope, trace)).await
    }

    /// The envelope that a delta makes of the one in force, as JSON; none where it is of another.
    #[must_use]
    pub fn rebuilt(&self, delta: DocumentDelta) -> Option<Bytes> {
        let held = Envelope::from_json(&self.shared.published().envelope?).ok()?;
        delta.envelope(&held.payload).ok().map(|envelope| envelope.to_json().into())
    }

    /// Follows the cluster's root and images metadata: DSSE envelopes as JSON, oldest first.
    pub async fn update_trust(&self, roots: &[Vec<u8>], images: &[Vec<u8>]) -> Result<(), Problem> {
        let read = |bytes: &Vec<u8>| Envelope::from_json(bytes).map_err(|error| broken_envelope(&error));
        let roots = roots.iter().map(read).collect::<Result<_, _>>()?;
        // The newest statement says all that the older ones said.
        let images = images.last().map(read).transpose()?;
        let bundle = TrustBundle { roots, images };
        let _turn = self.turn.lock().await;
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.update_trust(&bundle)).await
    }

    /// The highest document ever accepted under the current root; absent: none.
    #[must_use]
    pub fn high_water(&self) -> Option<Mark> {
        self.shared.published().high_water
    }

    #[must_use]
    pub fn root_version(&self) -> u64 {
        self.shared.published().root_version
    }

    #[must_use]
    pub fn images_version(&self) -> u64 {
        self.shared.published().images_version
    }

    #[must_use]
    pub fn is_dev_cluster(&self) -> bool {
        self.shared.published().is_dev
    }

    /// When what this node goes by ends: the trust root, the images statement, the document in force.
    #[must_use]
    pub fn expiries(&self) -> Vec<(&'static str, Timestamp)> {
        let document =
            self.shared.current_document.borrow().as_ref().and_then(|document| document.expires_at);
        let mut expiries = self.shared.published().expiries;
        expiries.extend(document.map(|at| ("document", at)));
        expiries
    }

    /// The images that may start here, now and whenever the cluster's trust changes.
    #[must_use]
    pub fn vouched(&self) -> watch::Receiver<Vouched> {
        self.shared.vouched.subscribe()
    }

    /// The document in force, now and whenever it changes.
    #[must_use]
    pub fn current_document(&self) -> watch::Receiver<Option<Arc<CurrentDocument>>> {
        self.shared.current_document.subscribe()
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Problem::new(500, "internal", format!("the check panicked: {error}"), "see the agent's log"))
    })
}

impl Shared {
    fn held(&self) -> parking_lot::MutexGuard<'_, Held> {
        self.held.lock()
    }

    fn published(&self) -> Published {
        self.published.lock().clone()
    }

    fn publish(&self, held: &Held) {
        *self.published.lock() = held.publish();
    }

    fn accept(&self, envelope: &Envelope, trace: Option<TraceContext>) -> Result<Accepted, Problem> {
        let now = self.clock.now();
        let mut held = self.held();
        let Held { trust, ledger } = &mut *held;
        let document: Verified<SignedDocument> = trust
            .verify_document(Unverified::new(envelope.clone()), now)
            .map_err(|error| trust_problem(trust, envelope, &error))?;
        let own = (trust.cluster(), &self.settings.node_id);
        let verdict = judge(ledger.high_water(), document.get(), document.digest(), own, now)
            .map_err(|refused| refused.to_problem())?;
        if verdict == Verdict::New {
            let desired = &document.get().desired;
            trust.check_images(desired, now).map_err(|error| trust_problem(trust, envelope, &error))?;
            refuse_limits(desired, &self.settings.limits)?;
            let current_document = ledger
                .record(&document, trust.root_version(), trace)
                .map_err(|error| ledger_problem(&error))?;
            self.publish(&held);
            self.current_document.send_replace(Some(current_document));
        }
        let provenance = &document.get().provenance;
        let mark = Mark::new(provenance.epoch, provenance.generation, document.digest());
        Ok(Accepted { mark, is_new: verdict == Verdict::New })
    }

    /// Follows the roots, and takes the statement of images if it can: one that is refused keeps no root back, and is
    /// told once the root is in force.
    fn update_trust(&self, bundle: &TrustBundle) -> Result<(), Problem> {
        let now = self.clock.now();
        let mut held = self.held();
        let mut next = held.trust.clone();
        let followed = next.update(bundle, now).map_err(|error| error.to_problem())?;
        self.put_in_force(&mut held, next)?;
        followed.images_refused.map_or(Ok(()), |error| Err(error.to_problem()))
    }

    fn put_in_force(&self, held: &mut Held, next: TrustStore) -> Result<(), Problem> {
        let moved = next.root_version() != held.trust.root_version()
            || next.images_version() != held.trust.images_version();
        if !moved {
            // The reset that a root asked for may have failed when it came; sending it again retries it.
            return self.reset_if_due(held);
        }
        next.save(&self.settings.trust_file).map_err(|error| match storage_full(&error) {
            true => ledger_problem(&LedgerError::Io {
                action: "write",
                path: self.settings.trust_file.clone(),
                cause: std::io::ErrorKind::StorageFull.into(),
            }),
            false => error.to_problem(),
        })?;
        held.trust = next;
        self.vouched.send_replace(Vouched::by(&held.trust));
        self.reset_if_due(held)
    }

    /// Forgets the mark if a root since the ledger's asks for it, and says what holds now. After a failure it is still
    /// due: the next update tries it, or the next start, because the root that asks for it is saved.
    fn reset_if_due(&self, held: &mut Held) -> Result<(), Problem> {
        let reset = held.reset_if_due();
        self.publish(held);
        reset.map_err(|error| ledger_problem(&error))
    }
}

fn storage_full(error: &(dyn std::error::Error + 'static)) -> bool {
    is_caused_by(error, |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull)
}

/// Whether a root after `version` asked nodes to forget their marks. All roots in the store were verified.
fn resets_since(trust: &TrustStore, version: u64) -> bool {
    trust
        .root_envelopes()
        .iter()
        .filter_map(|envelope| RootMetadata::parse(&envelope.payload).ok())
        .any(|root| root.version > version && root.resets_high_water)
}

/// How many instances a document asks for.
fn wanted(desired: &DesiredState) -> usize {
    let counts = desired.pools().map(|(_, pool)| {
        let counts = &pool.desired_counts;
        u64::from(counts.running) + u64::from(counts.warm) + u64::from(counts.sleeping)
    });
    usize::try_from(counts.sum::<u64>()).unwrap_or(usize::MAX)
}
