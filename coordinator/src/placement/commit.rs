//! Placements in the store: one record for each pool and node.
//!
//! ```text
//! placed/<tenant>/<pool>/<node>   how many instances of the pool the node is to have
//! ```
//! A record of zeros is of a pool that is being deleted: the node had instances of it, and has not said yet that they are
//! gone.

use std::collections::BTreeMap;

use mvm_planner::fleet::{Placed, PoolKey};
use mvm_proto::NodeId;
use mvm_proto::document::DesiredCounts;
use mvm_store::{Guard, MAX_CHANGES, Store, Transaction};

use crate::records::EPOCH_KEY;
use crate::stored::{Backend, StateError, encode, load_all};

pub(crate) const PLACED: &str = "placed/";

fn placed_key(key: &PoolKey, node: &NodeId) -> String {
    format!("{PLACED}{}/{}/{node}", key.tenant, key.pool)
}

/// All placements that are stored.
pub(super) async fn load(store: &Backend) -> Result<BTreeMap<PoolKey, Placed>, StateError> {
    let mut all: BTreeMap<PoolKey, Placed> = BTreeMap::new();
    for (path, record) in load_all::<DesiredCounts>(store, PLACED).await? {
        let mut steps = path.split('/');
        let (Some(tenant), Some(pool), Some(node)) = (steps.next(), steps.next(), steps.next()) else {
            continue;
        };
        let (Ok(tenant), Ok(pool), Ok(node)) = (tenant.parse(), pool.parse(), node.parse::<NodeId>()) else {
            continue;
        };
        all.entry(PoolKey { tenant, pool }).or_default().insert(node, record.value);
    }
    Ok(all)
}

/// Writes how a pool's placement changed, in as many transactions as it takes; each is good by itself, and what is
/// missing after a crash is placed again.
pub(super) async fn store(
    store: &Backend,
    epoch_version: u64,
    key: &PoolKey,
    before: &Placed,
    after: &Placed,
) -> Result<(), StateError> {
    let puts = after.iter().filter(|(node, counts)| before.get(*node) != Some(*counts));
    let puts = puts.map(|(node, counts)| (placed_key(key, node), Some(encode(counts))));
    let gone = before.keys().filter(|node| !after.contains_key(*node));
    let changes: Vec<_> = puts.chain(gone.map(|node| (placed_key(key, node), None))).collect();
    for some in changes.chunks(MAX_CHANGES) {
        // Only the process that took the newest epoch places.
        let txn = Transaction::new().guard(EPOCH_KEY, Guard::Version(epoch_version));
        let txn = some.iter().fold(txn, |txn, (key, value)| match value {
            Some(value) => txn.put(key.as_str(), value.clone()),
            None => txn.delete(key.as_str()),
        });
        store.commit(txn).await?;
    }
    Ok(())
}
