//! A tenant's quotas, divided among the nodes: each node's document carries a share, and all shares together are never
//! more than the quota, whatever was accepted and whatever was lost on its way.
//!
//! A share is what is placed on the node, plus a burst lease: what may wake there, be claimed or be refilled without
//! asking the coordinator. A share that shrinks is offered first, and given elsewhere once the node acknowledged it.
//! A node that is away keeps its share. Shares stay as they are while they are about right, so that a change on one
//! node leaves the documents of the others alone.

mod divide;
mod need;

use std::collections::BTreeMap;

use mvm_proto::document::{DesiredCounts, Quotas, Resources};
use mvm_proto::{NodeId, PoolId, TenantId};
use serde::Serialize;

use super::offers::{Most as _, Offers};
use divide::{Line, divide};
use need::{AMOUNTS, Amounts, Need};

/// What a node has of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolNeed {
    pub resources: Resources,
    /// Its counts on this node.
    pub placed: DesiredCounts,
    /// What it has beyond its counts: claimed instances.
    pub claimed: DesiredCounts,
}

impl PoolNeed {
    /// How many instances it has, and how many more may be started for a while: each needs an address.
    #[must_use]
    pub fn addresses(&self) -> (u32, u32) {
        let number = |instances: u64| u32::try_from(instances).unwrap_or(u32::MAX);
        (number(self.instances()), number(self.burst().instances))
    }
}

/// A tenant on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShareNode {
    pub pools: BTreeMap<PoolId, PoolNeed>,
    /// The shares that it may follow.
    pub offers: Offers<Quotas>,
    /// It was not heard of lately: what it may follow stays counted, and it gets no more.
    pub away: bool,
}

/// The shares that the nodes' documents are to carry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shares {
    /// One for each node that was asked about; all zero where the tenant is to have nothing any more.
    pub shares: BTreeMap<NodeId, Quotas>,
    /// Nodes whose share is less than what is placed there.
    pub short: Vec<ShareShort>,
    /// Some node is to have more as soon as others acknowledged less. While none is, no acknowledgement changes a share.
    pub waiting: bool,
}

/// A node has less of a quota than what is placed on it needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShareShort {
    pub node: NodeId,
    pub limit: &'static str,
    pub needed: u64,
    pub share: u64,
    pub reason: String,
}

/// A share of nothing: the tenant has no place on the node.
pub const NO_SHARE: Quotas = Quotas {
    max_vcpus: 0,
    max_mem_mib: 0,
    max_running: 0,
    max_warm: 0,
    max_pools: 0,
    max_instances_per_pool: 0,
    max_disk_gib: 0,
};

/// Divides a tenant's quotas among the nodes where it has, had or is to have instances.
///
/// `max_pools` is not divided: a document lists the pools that were placed on its node. `max_instances_per_pool` is one
/// number for all pools of a document, so a node's share of it is for the pool that has the most there.
#[must_use]
pub fn shares(tenant: &TenantId, quotas: &Quotas, nodes: &BTreeMap<NodeId, ShareNode>) -> Shares {
    let needs: Vec<Need> = nodes.values().map(|node| Need::of(&node.pools)).collect();
    let held: Vec<Quotas> = nodes.values().map(|node| node.offers.most().unwrap_or(NO_SHARE)).collect();
    let mut whole = Amounts::of(quotas);
    whole.per_pool(|limit| limit.saturating_add(uneven_pools(nodes, &needs)));
    let mut given = vec![Amounts::default(); nodes.len()];
    let (mut short, mut waiting) = (Vec::new(), false);
    for (at, limit) in AMOUNTS.iter().enumerate() {
        let line = |((node, need), held): ((&ShareNode, &Need), &Quotas)| Line {
            need: need.placed.0[at],
            burst: need.burst.0[at],
            held: Amounts::of(held).0[at],
            offered: Amounts::of(node.offers.current().unwrap_or(&NO_SHARE)).0[at],
            away: node.away,
        };
        let lines: Vec<Line> = nodes.values().zip(&needs).zip(&held).map(line).collect();
        let most = Amounts::of(quotas).0[at];
        let divided = divide(whole.0[at], most, &lines);
        waiting |= divided.waiting;
        for (((node, line), share), given) in nodes.keys().zip(&lines).zip(&divided.shares).zip(&mut given) {
            given.0[at] = *share;
            if *share < line.need {
                let reason = reason(tenant, limit, whole.0[at], nodes, &lines);
                short.push(ShareShort {
                    node: node.clone(),
                    limit,
                    needed: line.need,
                    share: *share,
                    reason,
                });
            }
        }
    }
    let max_pools = |node: &ShareNode| if node.pools.is_empty() { 0 } else { quotas.max_pools };
    let shares =
        nodes.iter().zip(given).map(|((id, node), given)| (id.clone(), given.quotas(max_pools(node))));
    Shares { shares: shares.collect(), short, waiting }
}

/// The most that a tenant's nodes may follow together, as [`shares`] counts it: never more than its quotas.
#[must_use]
pub fn promised<'a>(nodes: impl IntoIterator<Item = (&'a Offers<Quotas>, &'a Quotas)>) -> Quotas {
    let most = |(offers, new): (&Offers<Quotas>, &Quotas)| offers.most().map_or(*new, |held| held.most(new));
    let mut sum = Amounts::default();
    let mut max_pools = 0;
    for held in nodes.into_iter().map(most) {
        sum = sum.plus(&Amounts::of(&held));
        max_pools = max_pools.max(held.max_pools);
    }
    sum.quotas(max_pools)
}

/// How much the sum of the largest pools of each node is beyond the largest pool of all.
fn uneven_pools(nodes: &BTreeMap<NodeId, ShareNode>, needs: &[Need]) -> u64 {
    let mut totals: BTreeMap<&PoolId, u64> = BTreeMap::new();
    for (pool, need) in nodes.values().flat_map(|node| &node.pools) {
        *totals.entry(pool).or_default() += need.instances();
    }
    let largest: u64 = needs.iter().map(|need| need.largest()).sum();
    largest.saturating_sub(totals.into_values().max().unwrap_or(0))
}

fn reason(
    tenant: &TenantId,
    limit: &str,
    quota: u64,
    nodes: &BTreeMap<NodeId, ShareNode>,
    lines: &[Line],
) -> String {
    let needed: u64 = lines.iter().filter(|line| !line.away).map(|line| line.need).sum();
    let away: u64 = lines.iter().filter(|line| line.away).map(|line| line.held).sum();
    let is_keeping = |line: &Line| line.away && line.held > 0;
    let names: Vec<&str> =
        nodes.keys().zip(lines).filter(|(_, line)| is_keeping(line)).map(|(id, _)| id.as_str()).collect();
    let start = format!("quota of tenant {tenant}: {limit} is {quota}");
    match (needed.saturating_add(away) > quota, names.is_empty()) {
        (true, true) => format!("{start}, and what is placed needs {needed}"),
        (true, false) => {
            format!(
                "{start}, what is placed needs {needed}, and {away} are kept for nodes that are away: {}",
                names.join(", ")
            )
        }
        (false, _) => format!("{start}, and other nodes have not yet acknowledged that they have less of it"),
    }
}
