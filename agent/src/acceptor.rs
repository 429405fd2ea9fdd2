//! The one place where documents are accepted, whichever way they came.

use std::path::PathBuf;
use std::sync::Arc;

use mvm_proto::status::Mark;
use mvm_proto::{NodeId, Problem};
use tokio::sync::watch;

use crate::ledger::InForce;
use crate::reconcile::Clock;

/// What no document may make this node do, whoever signed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HardLimits {
    pub max_tenants: usize,
    pub max_instances: usize,
}

impl Default for HardLimits {
    fn default() -> Self {
        Self { max_tenants: 256, max_instances: 4096 }
    }
}

#[derive(Debug, Clone)]
pub struct AcceptorSettings {
    pub node_id: NodeId,
    /// The cluster's trust, as pinned at enrolment: `<certs-dir>/trust.json`.
    pub trust_file: PathBuf,
    /// Where the last accepted document is kept: [`crate::ledger::LEDGER_FILE`] in the data directory.
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
pub struct Acceptor {}

impl Acceptor {
    /// Opens trust and ledger. A damaged file is an error: starting without it would allow a rollback.
    pub fn open(settings: AcceptorSettings, clock: Clock) -> Result<Arc<Self>, Problem> {
        let _ = (settings, clock);
        todo!()
    }

    /// Checks a DSSE envelope, makes it durable, and puts it in force.
    pub async fn accept(&self, envelope_json: &[u8]) -> Result<Accepted, Problem> {
        let _ = envelope_json;
        todo!()
    }

    /// Follows the cluster's root and images metadata: DSSE envelopes as JSON, oldest first.
    pub async fn update_trust(&self, roots: &[Vec<u8>], images: &[Vec<u8>]) -> Result<(), Problem> {
        let _ = (roots, images);
        todo!()
    }

    /// The highest document ever accepted under the current root; absent: none.
    #[must_use]
    pub fn high_water(&self) -> Option<Mark> {
        todo!()
    }

    #[must_use]
    pub fn root_version(&self) -> u64 {
        todo!()
    }

    #[must_use]
    pub fn images_version(&self) -> u64 {
        todo!()
    }

    #[must_use]
    pub fn is_dev_cluster(&self) -> bool {
        todo!()
    }

    /// The document in force, now and whenever it changes.
    #[must_use]
    pub fn in_force(&self) -> watch::Receiver<Option<Arc<InForce>>> {
        todo!()
    }
}
