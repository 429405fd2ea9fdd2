//! A pool's template: a guest of the pool's revision that booted without an identity, ran the pool's warm-up if there is one,
//! and was saved. Every instance of the pool is a fork of it.

use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId, PoolId, TenantId, Timestamp};
use mvm_vmm::SnapshotRef;
use serde::{Deserialize, Serialize};

use crate::instance::record::Record;

/// What is remembered of a pool's template: one per pool, of the newest revision that was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    pub tenant: TenantId,
    pub pool: PoolId,
    /// Under which its files are kept; no instance has it.
    pub id: InstanceId,
    pub revision: Digest,
    pub image: Option<Digest>,
    pub resources: Resources,
    /// Whether its machine has a network card: a fork's must be the same.
    pub connected: bool,
    pub state: TemplateState,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum TemplateState {
    /// Being made, or left half made by an agent that ended.
    Begun,
    Ready {
        snapshot: SnapshotRef,
    },
    /// Nothing can be forked from this revision: instances boot.
    Unsuitable {
        reason: String,
        until: Timestamp,
    },
}

impl Template {
    /// Whether it is a template for this instance.
    #[must_use]
    pub fn fits(&self, record: &Record) -> bool {
        self.revision == record.revision
            && self.image == record.image
            && self.resources == record.resources
            && self.connected == record.net.is_some()
    }
}
