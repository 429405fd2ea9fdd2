//! Placements in the store: one record for each pool and node.
//!
//! ```text
//! placed/<tenant>/<pool>/<node>   how many instances of the pool the node is to have
//! ```
//! A record of zeros is of a pool that is being deleted: the node had instances of it, and has not said yet that they are
//! gone.
//!
//! ```text
//! held/<tenant>/<node>            the node had instances of the tenant at some time, and the stores of their sessions
//! ```
//! It stays until nothing of the tenant is left there.
//!
//! ```text
//! rollouts/<tenant>/<pool>        the revisions of a pool, and how far the newest is
//! scaled/<tenant>/<pool>          how many instances are to run of a pool that is scaled
//! moves/<id>                      an instance on its way to another node, and how far it is
//! ```

use std::collections::BTreeMap;

use mvm_planner::fleet::{Placed, PoolKey};
use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Problem, TenantId};

use super::batch::{Batch, Change};
use crate::state::State;
use crate::stored::{Backend, StateError, encode, load_all};
use crate::world::{Holding, Holdings, MoveRecord, RolloutRecord};

pub(crate) const PLACED: &str = "placed/";
const HELD: &str = "held/";
const ROLLOUTS: &str = "rollouts/";
const SCALED: &str = "scaled/";
const MOVES: &str = "moves/";

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

/// The records that differ between two placements of a pool.
pub(super) fn changes(key: &PoolKey, before: &Placed, after: &Placed) -> Vec<Change> {
    let puts = after.iter().filter(|(node, counts)| before.get(*node) != Some(*counts));
    let puts = puts.map(|(node, counts)| (placed_key(key, node), Some(encode(counts))));
    let gone = before.keys().filter(|node| !after.contains_key(*node));
    puts.chain(gone.map(|node| (placed_key(key, node), None))).collect()
}

/// The nodes that have instances of tenants, or had.
pub(super) async fn load_holdings(store: &Backend) -> Result<Holdings, StateError> {
    let mut all = Holdings::default();
    for (path, record) in load_all::<Holding>(store, HELD).await? {
        let Some((tenant, node)) = path.split_once('/') else { continue };
        if let (Ok(tenant), Ok(node)) = (tenant.parse(), node.parse()) {
            all.set(&tenant, &node, record.value);
        }
    }
    Ok(all)
}

/// The revisions of all pools.
pub(super) async fn load_rollouts(store: &Backend) -> Result<BTreeMap<PoolKey, RolloutRecord>, StateError> {
    let mut all = BTreeMap::new();
    for (path, record) in load_all::<RolloutRecord>(store, ROLLOUTS).await? {
        let Some((tenant, pool)) = path.split_once('/') else { continue };
        if let (Ok(tenant), Ok(pool)) = (tenant.parse(), pool.parse()) {
            all.insert(PoolKey { tenant, pool }, record.value);
        }
    }
    Ok(all)
}

pub(super) fn rollout(key: &PoolKey, record: Option<&RolloutRecord>) -> Change {
    (format!("{ROLLOUTS}{}/{}", key.tenant, key.pool), record.map(encode))
}

pub(super) fn holding(tenant: &TenantId, node: &NodeId, holding: Option<&Holding>) -> Change {
    (format!("{HELD}{tenant}/{node}"), holding.map(encode))
}

/// How many instances are to run of pools that are scaled.
pub(super) async fn load_scaled(store: &Backend) -> Result<BTreeMap<PoolKey, u32>, StateError> {
    let stored = load_all::<u32>(store, SCALED).await?.into_iter();
    let read = |(path, record): (String, crate::stored::Versioned<u32>)| {
        let (tenant, pool) = path.split_once('/')?;
        Some((PoolKey { tenant: tenant.parse().ok()?, pool: pool.parse().ok()? }, record.value))
    };
    Ok(stored.filter_map(read).collect())
}

pub(super) fn scaled((key, running): &(PoolKey, Option<u32>)) -> Change {
    (format!("{SCALED}{}/{}", key.tenant, key.pool), running.as_ref().map(encode))
}

/// All moves that are under way.
pub(super) async fn load_moves(store: &Backend) -> Result<BTreeMap<String, MoveRecord>, StateError> {
    let stored = load_all::<MoveRecord>(store, MOVES).await?.into_iter();
    Ok(stored.map(|(id, record)| (id, record.value)).collect())
}

pub(crate) fn moved(id: &str, record: Option<&MoveRecord>) -> Change {
    (format!("{MOVES}{id}"), record.map(encode))
}

/// Stores how far a move is, by itself.
pub(crate) async fn store_move(state: &State, id: &str, record: Option<&MoveRecord>) -> Result<(), Problem> {
    write(state, std::iter::once(moved(id, record))).await
}

/// Nothing of a tenant is left on these nodes.
pub(super) async fn forget_holdings(
    state: &State,
    tenant: &TenantId,
    nodes: &[NodeId],
) -> Result<(), Problem> {
    write(state, nodes.iter().map(|node| holding(tenant, node, None))).await
}

/// A pool is placed nowhere any more.
pub(super) async fn remove(state: &State, key: &PoolKey, placed: &Placed) -> Result<(), Problem> {
    write(state, changes(key, placed, &Placed::new()).into_iter()).await
}

async fn write(state: &State, changes: impl Iterator<Item = Change>) -> Result<(), Problem> {
    let mut batch = Batch::default();
    for change in changes {
        if !batch.takes_placement(&change) {
            std::mem::take(&mut batch).commit(state).await?;
        }
        batch.add_placement(change);
    }
    batch.commit(state).await.map(drop)
}
