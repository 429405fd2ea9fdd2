//! What a coordinator's handlers and tasks share.

use std::net::IpAddr;
use std::sync::Arc;

use mvm_pki::{Authority, LiveAnchors};
use mvm_proto::{Digest, Timestamp};
use mvm_telemetry::Tracer;
use mvm_transport::RateLimit;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::clock::SteadyClock;
use crate::documents::Documents;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::init::ClusterFile;
use crate::key_calls::KeyCalls;
use crate::metrics::Metrics;
use crate::objects::Objects;
use crate::operators::Operators;
use crate::rate_limit::Holder;
use crate::secrets::SecretKeys;
use crate::settings::CoordinatorSettings;
use crate::stored::Backend;
use crate::trust::Trust;
use crate::tunnels::Tunnels;
use crate::world::World;

pub(crate) struct State {
    pub(crate) settings: CoordinatorSettings,
    pub(crate) cluster: ClusterFile,
    pub(crate) store: Backend,
    pub(crate) authority: Arc<Authority>,
    /// The root that what the authority issues leads to.
    pub(crate) issuing_root: Option<Digest>,
    pub(crate) anchors: LiveAnchors,
    /// Which of the roots vouches for which, for those that trust only some of them.
    pub(crate) endorsements_pem: String,
    pub(crate) trust: Arc<Trust>,
    pub(crate) documents: Documents,
    pub(crate) operators: Operators,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) tunnels: Tunnels,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tracer: Tracer,
    /// Per network.
    pub(crate) enrol_limit: RateLimit<IpAddr>,
    pub(crate) renew_limit: RateLimit<Holder>,
    pub(crate) session_limit: RateLimit<Holder>,
    pub(crate) objects: Objects,
    /// What happened to objects.
    pub(crate) events: Events,
    pub(crate) key_calls: KeyCalls,
    /// Grows with each credential that may have been revoked.
    pub(crate) revocations: tokio::sync::watch::Sender<u64>,
    pub(crate) secret_keys: Arc<SecretKeys>,
    pub(crate) epoch: u64,
    /// Of the epoch's record: a guard of what only the newest process may write.
    pub(crate) epoch_version: u64,
    /// What placement is decided from. Held for single steps only, never over an await.
    pub(crate) world: Arc<Mutex<World>>,
    pub(crate) started_at: Timestamp,
    /// What tells how long nodes are away.
    pub(crate) steady: SteadyClock,
    /// How many plans are worked out at a time.
    pub(crate) plans: tokio::sync::Semaphore,
    pub(crate) shutdown: CancellationToken,
}

impl State {
    /// A credential may have been revoked: requests under way look whether theirs still counts.
    pub(crate) fn revoked(&self) {
        self.revocations.send_modify(|number| *number = number.wrapping_add(1));
    }
}
