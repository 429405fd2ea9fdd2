//! Declared objects: reading, admission, storing and watching, written once for all kinds.
//!
//! Every write goes one way, whatever asked for it: the caller is known, the object was read strictly and has its defaults;
//! then its role, the rules of its kind and its tenant's quotas are checked, and one transaction guarded by what was
//! read writes the object, what belongs to it, and the entry of the audit log.

mod access;
mod admission;
mod audit;
mod decide;
mod keys;
mod network;
mod once;
mod read;
mod record;
mod statuses;
mod turns;
mod uids;
mod values;
mod watch;
mod write;

pub(crate) use access::{Caller, Reach, Verb, allowed, enter, may_tell_load};
pub(crate) use audit::{Entering, newest as newest_audit, note_entry, trim_audit};
pub(crate) use keys::caller_of_key;
pub(crate) use network::confirm_removals;
pub(crate) use once::forget_old;
pub(crate) use read::{Filter, get, list};
pub(crate) use record::{API_KEY_OBJECTS, decode_object};
pub(crate) use statuses::{StatusOf, set_statuses};
use turns::Turns;
pub(crate) use uids::{Uids, current};
pub(crate) use watch::{Changed, Watching, revision, watch};
pub(crate) use write::{
    DeleteOptions, Mode, Writing, Written, apply, change_spec, delete, delete_pools_of, ensure_node, finish,
    propose, remove_node,
};

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use mvm_proto::{ClusterId, NodeId, Problem, TenantId};
use mvm_transport::RateLimit;
use parking_lot::Mutex;

use crate::causes::Causes;
use crate::rate_limit::too_soon;
use crate::secrets::SecretKeys;
use crate::stored::Backend;
use crate::trust::Trust;
use crate::world::World;

/// What declared objects are kept in, and held against.
pub(crate) struct Objects {
    store: Backend,
    cluster: ClusterId,
    trust: Arc<Trust>,
    world: Arc<Mutex<World>>,
    turns: Turns,
    /// By the names of API keys.
    writes: RateLimit<String>,
    secret_keys: Arc<SecretKeys>,
    /// Which requests asked for the changes that are under way.
    pub(crate) causes: Causes,
}

/// Writes of one key in the long run, and at once: a program applies its files in seconds, and one that never stops writing
/// neither fills the store nor keeps nodes busy with new documents.
const WRITES_PER_SECOND: f64 = 20.0;
const WRITES_BURST: f64 = 1000.0;

impl Objects {
    pub(crate) fn new(
        store: Backend,
        cluster: ClusterId,
        trust: Arc<Trust>,
        world: Arc<Mutex<World>>,
        secret_keys: Arc<SecretKeys>,
    ) -> Self {
        let writes = RateLimit::new(WRITES_PER_SECOND, WRITES_BURST);
        Self {
            store,
            cluster,
            trust,
            world,
            turns: Turns::default(),
            writes,
            secret_keys,
            causes: Causes::default(),
        }
    }

    /// One more write of this caller, unless it makes too many.
    fn pace(&self, caller: &Caller) -> Result<(), Problem> {
        if !caller.is_key() {
            return Ok(());
        }
        self.writes
            .take(caller.name.clone(), Instant::now())
            .map_err(|wait| too_soon(format!("{} has made too many changes lately", caller.name), wait).0)
    }

    /// The nodes that may still have something of a tenant.
    fn nodes_of(&self, tenant: &TenantId) -> BTreeSet<NodeId> {
        self.world.lock().offered.nodes_of(tenant).cloned().collect()
    }
}
