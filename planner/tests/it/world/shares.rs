//! A tenant on a few nodes whose documents get lost, arrive late, and are acknowledged late or never.

use std::collections::BTreeMap;

use mvm_planner::fleet::offers::{DocumentNumber, Offers};
use mvm_planner::fleet::shares::{NO_SHARE, PoolNeed, ShareNode, Shares, promised, shares};
use mvm_proto::document::{DesiredCounts, Quotas, Resources};
use mvm_proto::{NodeId, PoolId, TenantId};
use proptest::prelude::*;

const NODES: usize = 4;
const POOLS: usize = 3;

pub(crate) fn tenant_id() -> TenantId {
    "acme".parse().unwrap()
}

fn node_id(at: usize) -> NodeId {
    format!("node-{at}").parse().unwrap()
}

/// What happens around one tenant.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Place(usize, usize, DesiredCounts),
    Claim(usize, usize, u32),
    /// Shares are computed and offered.
    Plan,
    /// A node accepts one of the documents that are on their way to it.
    Accept(usize, prop::sample::Index),
    /// The node's acknowledgement arrives.
    Acknowledge(usize),
    Away(usize),
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    let counts = || {
        (0u32..5, 0u32..3, 0u32..4).prop_map(|(running, warm, sleeping)| DesiredCounts {
            running,
            warm,
            sleeping,
        })
    };
    prop_oneof![
        3 => (0..NODES, 0..POOLS, counts()).prop_map(|(node, pool, counts)| Event::Place(node, pool, counts)),
        1 => (0..NODES, 0..POOLS, 0u32..3).prop_map(|(node, pool, claimed)| Event::Claim(node, pool, claimed)),
        4 => Just(Event::Plan),
        4 => (0..NODES, any::<prop::sample::Index>()).prop_map(|(node, which)| Event::Accept(node, which)),
        4 => (0..NODES).prop_map(Event::Acknowledge),
        1 => (0..NODES).prop_map(Event::Away),
    ]
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    proptest::collection::vec(event(), 0..40)
}

/// Quotas from next to nothing to more than is ever asked for.
pub(crate) fn quotas() -> impl Strategy<Value = Quotas> {
    let scale = prop_oneof![Just(1u32), Just(3), Just(10), Just(100)];
    (scale, 1u32..12, 1u64..12, 0u32..8, 0u32..8, 1u32..8, 1u64..8).prop_map(
        |(scale, vcpus, mem, running, warm, per_pool, disk)| Quotas {
            max_vcpus: vcpus * scale,
            max_mem_mib: mem * 256 * u64::from(scale),
            max_running: running * scale,
            max_warm: warm * scale,
            max_pools: 3,
            max_instances_per_pool: per_pool * scale,
            max_disk_gib: disk * u64::from(scale),
        },
    )
}

/// What a node was sent and what it follows.
#[derive(Debug, Default)]
struct Truth {
    sent: Vec<(DocumentNumber, Quotas)>,
    follows: Option<(DocumentNumber, Quotas)>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) quotas: Quotas,
    pub(crate) nodes: BTreeMap<NodeId, ShareNode>,
    truths: BTreeMap<NodeId, Truth>,
    /// All pools of this tenant are one: its `max_instances_per_pool` divides like every other quota.
    one_pool: bool,
    documents: u64,
}

impl World {
    pub(crate) fn new(quotas: Quotas, one_pool: bool) -> Self {
        let nodes: BTreeMap<_, _> = (0..NODES).map(|at| (node_id(at), ShareNode::default())).collect();
        let truths = nodes.keys().map(|id| (id.clone(), Truth::default())).collect();
        Self { quotas, nodes, truths, one_pool, documents: 0 }
    }

    fn need(&mut self, node: usize, pool: usize) -> &mut PoolNeed {
        let pool = if self.one_pool { 0 } else { pool };
        let resources = Resources {
            vcpus: 1 + u32::try_from(pool).unwrap(),
            mem_mib: 128 << pool,
            data_disk_mib: 512 * u64::try_from(pool).unwrap(),
        };
        let id: PoolId = format!("pool-{pool}").parse().unwrap();
        let empty =
            PoolNeed { resources, placed: DesiredCounts::default(), claimed: DesiredCounts::default() };
        self.nodes.get_mut(&node_id(node)).unwrap().pools.entry(id).or_insert(empty)
    }

    pub(crate) fn happens(&mut self, event: &Event) {
        match event {
            Event::Place(node, pool, counts) => self.need(*node, *pool).placed = *counts,
            Event::Claim(node, pool, claimed) => self.need(*node, *pool).claimed.running = *claimed,
            Event::Plan => drop(self.plan()),
            Event::Accept(node, which) => self.accept(&node_id(*node), which),
            Event::Acknowledge(node) => self.acknowledge(&node_id(*node)),
            Event::Away(node) => {
                let node = self.nodes.get_mut(&node_id(*node)).unwrap();
                node.away = !node.away;
            }
        }
        for node in self.nodes.values_mut() {
            node.pools.retain(|_, pool| pool.placed != DesiredCounts::default() || pool.claimed.running > 0);
        }
    }

    /// More of the first pool are to run on this node.
    pub(crate) fn grow(&mut self, node: usize, more: u32) {
        self.need(node, 0).placed.running += more;
    }

    /// Computes shares and offers those that changed. Says whose changed.
    pub(crate) fn plan(&mut self) -> (Shares, Vec<NodeId>) {
        let plan = shares(&tenant_id(), &self.quotas, &self.nodes);
        let mut changed = Vec::new();
        for (id, share) in &plan.shares {
            let node = self.nodes.get_mut(id).unwrap();
            if node.offers.current().copied().unwrap_or(NO_SHARE) != *share {
                self.documents += 1;
                node.offers.offer((1, self.documents), *share);
                self.truths.get_mut(id).unwrap().sent.push(((1, self.documents), *share));
                changed.push(id.clone());
            }
        }
        (plan, changed)
    }

    fn accept(&mut self, id: &NodeId, which: &prop::sample::Index) {
        let truth = self.truths.get_mut(id).unwrap();
        let follows = truth.follows.map_or((0, 0), |(number, _)| number);
        let newer: Vec<_> = truth.sent.iter().filter(|(number, _)| *number > follows).collect();
        if !self.nodes[id].away && !newer.is_empty() {
            truth.follows = Some(*newer[which.index(newer.len())]);
        }
    }

    fn acknowledge(&mut self, id: &NodeId) {
        let node = self.nodes.get_mut(id).unwrap();
        if let Some((number, _)) = self.truths[id].follows.filter(|_| !node.away) {
            node.offers.acknowledge(number);
        }
    }

    /// Everything arrives, and everything is acknowledged.
    pub(crate) fn all_arrives(&mut self) {
        for (id, truth) in &mut self.truths {
            let node = self.nodes.get_mut(id).unwrap();
            if let Some(last) = truth.sent.last().filter(|_| !node.away) {
                truth.follows = Some(*last);
                node.offers.acknowledge(last.0);
            }
        }
    }

    /// Plans until nothing changes any more. Says how many rounds changed something.
    pub(crate) fn converge(&mut self) -> usize {
        for round in 0..100 {
            self.all_arrives();
            let (_, changed) = self.plan();
            if changed.is_empty() {
                return round;
            }
        }
        usize::MAX
    }

    /// What all nodes may use together, as they see it, beside what the coordinator counts.
    pub(crate) fn in_truth(&self) -> (Quotas, Quotas) {
        let nothing = Offers::default();
        let follows = self.truths.values().map(|truth| truth.follows.map_or(NO_SHARE, |(_, share)| share));
        let follows: Vec<_> = follows.collect();
        let current = |node: &ShareNode| node.offers.current().copied().unwrap_or(NO_SHARE);
        let counted: Vec<_> = self.nodes.values().map(|node| (&node.offers, current(node))).collect();
        (
            promised(follows.iter().map(|share| (&nothing, share))),
            promised(counted.iter().map(|(offers, share)| (*offers, share))),
        )
    }

    /// The shares that nodes have now.
    pub(crate) fn current(&self) -> BTreeMap<NodeId, Quotas> {
        let current = |node: &ShareNode| node.offers.current().copied().unwrap_or(NO_SHARE);
        self.nodes.iter().map(|(id, node)| (id.clone(), current(node))).collect()
    }

    /// What is placed needs no more than the quotas, computed from the contract alone.
    pub(crate) fn fits(&self) -> bool {
        let mut sum = [0u64; 5];
        let mut totals: BTreeMap<&PoolId, u64> = BTreeMap::new();
        for node in self.nodes.values() {
            let need = node_need(node);
            (0..4).for_each(|at| sum[at] += need[at]);
            sum[4] += need[4].div_ceil(1024);
            for (pool, need) in &node.pools {
                *totals.entry(pool).or_default() += instances(need);
            }
        }
        let limits = limits(&self.quotas);
        (0..5).all(|at| sum[at] <= limits[at])
            && totals.values().all(|total| *total <= u64::from(self.quotas.max_instances_per_pool))
    }

    /// Whether each node's share holds what is placed there.
    pub(crate) fn all_have_what_they_need(&self) -> bool {
        self.nodes.values().all(|node| {
            let share = node.offers.current().copied().unwrap_or(NO_SHARE);
            let (need, limits) = (node_need(node), limits(&share));
            (0..4).all(|at| need[at] <= limits[at])
                && need[4] <= limits[4] * 1024
                && node.pools.values().all(|need| instances(need) <= u64::from(share.max_instances_per_pool))
        })
    }
}

fn limits(quotas: &Quotas) -> [u64; 5] {
    [
        u64::from(quotas.max_vcpus),
        quotas.max_mem_mib,
        u64::from(quotas.max_running),
        u64::from(quotas.max_warm),
        quotas.max_disk_gib,
    ]
}

fn instances(need: &PoolNeed) -> u64 {
    let DesiredCounts { running, warm, sleeping } = need.placed;
    u64::from(running + warm + sleeping + need.claimed.running)
}

/// vCPUs, memory, running, warm, and MiB of disk.
fn node_need(node: &ShareNode) -> [u64; 5] {
    let mut sum = [0; 5];
    for need in node.pools.values() {
        let Resources { vcpus, mem_mib, data_disk_mib } = need.resources;
        let running = u64::from(need.placed.running + need.claimed.running);
        let [warm, sleeping] = [need.placed.warm, need.placed.sleeping].map(u64::from);
        let disk = instances(need) * data_disk_mib + sleeping * mem_mib;
        let more = [running * u64::from(vcpus), (running + warm) * mem_mib, running, warm, disk];
        (0..5).for_each(|at| sum[at] += more[at]);
    }
    sum
}

/// Whether one set of quotas is no more than another; where pools of several sizes are mixed, a share of
/// `max_instances_per_pool` is for the largest on its node, and the sum says nothing.
pub(crate) fn is_within(sum: &Quotas, quotas: &Quotas, one_pool: bool) -> bool {
    let (sum_limits, most) = (limits(sum), limits(quotas));
    (0..5).all(|at| sum_limits[at] <= most[at])
        && (!one_pool || sum.max_instances_per_pool <= quotas.max_instances_per_pool)
        && sum.max_pools <= quotas.max_pools
}
