//! What placement needs to know of a node from its session: when it was heard, what it has, what it said.

use std::collections::BTreeMap;

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::PoolCounts;
use mvm_proto::status::{NodeInfo, NodeStatus, TenantRemoval};
use mvm_proto::{PoolId, TenantId, Timestamp};

use crate::fleet::Live;
use crate::records::{Numbers, StatusRecord};

/// A node's newest word.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeNews {
    pub(crate) connected: bool,
    pub(crate) last_seen_at: Option<Timestamp>,
    pub(crate) info: Option<NodeInfo>,
    pub(crate) ready: Option<(bool, String)>,
    pub(crate) converged: Option<Numbers>,
    pub(crate) refused: Option<String>,
    /// What it has of each pool that it knows of.
    pub(crate) pools: BTreeMap<PoolKey, PoolNews>,
    /// How far it deleted the data of tenants, by the uid of each tenant's object.
    pub(crate) removals: BTreeMap<(TenantId, String), TenantRemoval>,
}

/// What a node has of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PoolNews {
    pub(crate) actual: PoolCounts,
    /// Of those that run, how many have a program that does not work.
    pub(crate) down: u32,
    /// In any phase, also stopped and failed ones.
    pub(crate) instances: u32,
    pub(crate) deferred: Vec<String>,
}

impl NodeNews {
    pub(crate) fn of(live: &Live) -> Self {
        let refused = live.refused.as_ref().map(|refused| {
            let problem: Option<mvm_proto::Problem> = serde_json::from_slice(&refused.problem).ok();
            problem.map_or_else(|| "the node refused its document".to_owned(), |problem| problem.detail)
        });
        Self {
            connected: live.session.is_some(),
            refused,
            ..Self::said(live.last_seen_at, live.info.as_ref(), live.status.as_ref(), live.converged.as_ref())
        }
    }

    /// What a node said before this coordinator started.
    pub(crate) fn stored(record: &StatusRecord) -> Self {
        Self::said(
            record.last_seen_at,
            record.info.as_ref(),
            record.status.as_ref(),
            record.converged.as_ref(),
        )
    }

    fn said(
        last_seen_at: Option<Timestamp>,
        info: Option<&NodeInfo>,
        status: Option<&NodeStatus>,
        converged: Option<&mvm_proto::status::Mark>,
    ) -> Self {
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition.r#type == "Ready");
        Self {
            connected: false,
            last_seen_at,
            info: info.cloned(),
            ready: ready.map(|ready| (ready.status == "True", ready.message.clone())),
            converged: converged.map(Numbers::from),
            refused: None,
            pools: status.into_iter().flat_map(|status| &status.pools).filter_map(pool_news).collect(),
            removals: status.into_iter().flat_map(|status| &status.removals).filter_map(removal).collect(),
        }
    }
}

fn removal(told: &TenantRemoval) -> Option<((TenantId, String), TenantRemoval)> {
    Some(((told.tenant_id.parse().ok()?, told.uid.clone()), told.clone()))
}

fn pool_news(pool: &mvm_proto::status::PoolStatus) -> Option<(PoolKey, PoolNews)> {
    let key = PoolKey {
        tenant: pool.tenant_id.parse::<TenantId>().ok()?,
        pool: pool.pool_id.parse::<PoolId>().ok()?,
    };
    let actual = pool.actual.unwrap_or_default();
    let counts = PoolCounts { running: actual.running, warm: actual.warm, sleeping: actual.sleeping };
    let instances = [actual.running, actual.warm, actual.sleeping, pool.stopped, pool.failed];
    let instances = instances.into_iter().fold(0u32, u32::saturating_add);
    Some((key, PoolNews { actual: counts, down: actual.down, instances, deferred: pool.deferred.clone() }))
}
