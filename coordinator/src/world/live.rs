//! What placement needs to know of a node from its session: when it was heard, what it has, what it said.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::blocks::Block;
use mvm_proto::object::PoolCounts;
use mvm_proto::status::{Condition, ConditionKind, NodeInfo, NodeStatus, TenantRemoval, Usage};
use mvm_proto::{PoolId, TenantId, Timestamp};

use crate::fleet::second_session::SecondMachine;
use crate::fleet::{Fleet, Live, PoolsWithNews, Standing};
use crate::records::{Numbers, StatusRecord};

/// A node's newest word.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeNews {
    pub(crate) standing: Standing,
    /// Since when it does not count as there; none: it does, or was not heard of since the start.
    pub(crate) away_since: Option<Timestamp>,
    pub(crate) info: Option<NodeInfo>,
    pub(crate) ready: Option<(bool, String)>,
    pub(crate) converged: Option<Numbers>,
    /// The newest document that it said to follow; none of what it said to a coordinator before this one.
    pub(crate) accepted: Option<Numbers>,
    /// The document that its newest status is of.
    pub(crate) reported: Option<Numbers>,
    /// Which addresses its instances have, by tenant; none of an older agent.
    pub(crate) addresses: BTreeMap<TenantId, Addresses>,
    pub(crate) refused: Option<String>,
    /// What it says of itself beside being ready.
    pub(crate) conditions: Vec<Condition>,
    pub(crate) usage: Option<Usage>,
    /// What is to be said of another machine that wants a session as this node.
    pub(crate) second_machine: Option<String>,
    /// What it has of each pool that it knows of.
    pub(crate) pools: BTreeMap<PoolKey, PoolNews>,
    /// How far it deleted the data of tenants, by the uid of each tenant's object.
    pub(crate) removals: BTreeMap<(TenantId, String), TenantRemoval>,
}

/// What was heard of a node's pools.
#[derive(Debug, Clone)]
pub(crate) enum PoolsHeard {
    /// All that it has.
    All(BTreeMap<PoolKey, PoolNews>),
    /// Those that changed; none: the node has nothing of it any more.
    Some(Vec<(PoolKey, Option<PoolNews>)>),
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
    /// Warm, of the revision of its document, free, with a guest that works.
    pub(crate) claimable: u32,
    /// Of an older revision; none: the agent does not tell.
    pub(crate) old: Option<u32>,
    pub(crate) has_template: bool,
    pub(crate) has_image: bool,
    /// The next four of an agent that knows grants.
    pub(crate) serving: u32,
    /// Of an older revision, for a rollout to replace.
    pub(crate) outdated: u32,
    /// Beyond the running count.
    pub(crate) surge: u32,
    pub(crate) failing: String,
    /// Of one instance's processors, summed over those that run; none: the agent does not tell.
    pub(crate) cpu_percent: Option<u32>,
}

/// Which addresses of a tenant a node's instances have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// Blocks of its document.
    pub(crate) blocks: BTreeSet<Block>,
    /// Offsets outside them.
    pub(crate) offsets: BTreeSet<u32>,
}

impl Addresses {
    /// Whether an instance has this address, as far as is told.
    pub(crate) fn has(&self, offset: u32) -> bool {
        self.blocks.contains(&Block::of(offset)) || self.offsets.contains(&offset)
    }

    /// All blocks that they are in.
    pub(crate) fn in_use(&self) -> BTreeSet<Block> {
        self.blocks.iter().copied().chain(self.offsets.iter().map(|offset| Block::of(*offset))).collect()
    }
}

impl NodeNews {
    /// Whether it has instances of a tenant, in any phase.
    pub(crate) fn has_instances(&self, tenant: &TenantId) -> bool {
        let pools = self.pools.iter().filter(|(key, _)| key.tenant == *tenant);
        pools.into_iter().any(|(_, pool)| pool.instances > 0)
    }

    /// What a node says now, and what of its pools was not taken before.
    pub(crate) fn take(live: &mut Live, fleet: &Fleet, now: Timestamp) -> (Self, PoolsHeard) {
        let refused = live.refused.as_ref().map(|refused| {
            let problem: Option<mvm_proto::Problem> = serde_json::from_slice(&refused.problem).ok();
            problem.map_or_else(|| "the node refused its document".to_owned(), |problem| problem.detail)
        });
        let (standing, away_since) = fleet.standing(live, now);
        let with_news = std::mem::replace(&mut live.pools_with_news, PoolsWithNews::Some(BTreeSet::new()));
        let pools = match (with_news, &live.status) {
            (PoolsWithNews::All, status) => {
                let status = status.iter().flat_map(|status| &status.get().pools);
                PoolsHeard::All(status.filter_map(pool_news).collect())
            }
            (PoolsWithNews::Some(names), Some(status)) => {
                let named = |(tenant, pool): &(String, String)| {
                    Some(PoolKey { tenant: tenant.parse().ok()?, pool: pool.parse().ok()? })
                };
                let heard = names.iter().filter_map(|name| {
                    Some((named(name)?, status.pool(name).and_then(pool_news).map(|(_, news)| news)))
                });
                PoolsHeard::Some(heard.collect())
            }
            (PoolsWithNews::Some(_), None) => PoolsHeard::Some(Vec::new()),
        };
        let second = live.second.as_ref().filter(|second| now < second.until());
        let news = Self {
            standing,
            away_since,
            accepted: live.accepted.as_ref().map(Numbers::from),
            reported: live.reported.as_ref().map(Numbers::from),
            refused,
            second_machine: second.map(|second| second_machine(live, second)),
            ..Self::said(live.info.as_ref(), live.status(), live.converged.as_ref())
        };
        (news, pools)
    }

    /// What a node said before this coordinator started.
    pub(crate) fn stored(record: &StatusRecord) -> (Self, PoolsHeard) {
        let news = Self::said(record.info.as_ref(), record.status.as_ref(), record.converged.as_ref());
        let pools = record.status.iter().flat_map(|status| &status.pools);
        (news, PoolsHeard::All(pools.filter_map(pool_news).collect()))
    }

    fn said(
        info: Option<&NodeInfo>,
        status: Option<&NodeStatus>,
        converged: Option<&mvm_proto::status::Mark>,
    ) -> Self {
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let is_ready = |condition: &&Condition| condition.is(ConditionKind::Ready);
        // A node that says of itself that it is not ready says so with its description.
        let of_info = info.map(|info| info.conditions.as_slice()).unwrap_or_default();
        let ready = conditions.iter().chain(of_info).find(is_ready);
        Self {
            info: info.cloned(),
            ready: ready.map(|ready| (ready.holds(), ready.message.clone())),
            converged: converged.map(Numbers::from),
            conditions: conditions.iter().filter(|condition| !is_ready(condition)).cloned().collect(),
            usage: status.and_then(|status| status.usage),
            addresses: status
                .into_iter()
                .flat_map(|status| &status.addresses)
                .filter_map(addresses)
                .collect(),
            removals: status.into_iter().flat_map(|status| &status.removals).filter_map(removal).collect(),
            ..Self::default()
        }
    }
}

fn removal(told: &TenantRemoval) -> Option<((TenantId, String), TenantRemoval)> {
    Some(((told.tenant_id.parse().ok()?, told.uid.clone()), told.clone()))
}

/// What the object of a node says of a second machine.
fn second_machine(live: &Live, second: &SecondMachine) -> String {
    let named = |host: &str| if host.is_empty() { "a machine".to_owned() } else { host.to_owned() };
    let other = format!(
        "{} at {} wants a session as this node since {}",
        named(&second.hostname),
        second.address,
        second.since
    );
    match &live.session {
        Some(session) => {
            format!("{other}, and {} at {} has it", named(&session.agent.hostname), session.address)
        }
        None => other,
    }
}

fn addresses(told: &mvm_proto::status::TenantAddresses) -> Option<(TenantId, Addresses)> {
    let blocks = told.blocks.iter().map(|block| Block(*block));
    let offsets = told.offsets.iter().copied();
    Some((told.tenant_id.parse().ok()?, Addresses { blocks: blocks.collect(), offsets: offsets.collect() }))
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
    let sum = |counts: mvm_proto::status::Counts| {
        counts.running.saturating_add(counts.warm).saturating_add(counts.sleeping)
    };
    let news = PoolNews {
        actual: counts,
        down: actual.down,
        instances,
        deferred: pool.deferred.clone(),
        claimable: pool.claimable,
        old: pool.current.map(|current| sum(actual).saturating_sub(sum(current))),
        has_template: pool.has_template,
        has_image: pool.has_image,
        serving: pool.serving,
        outdated: pool.outdated,
        surge: pool.surge,
        failing: pool.failing.clone(),
        cpu_percent: pool.cpu_percent,
    };
    Some((key, news))
}
