//! A fleet whose nodes get lost and return, and what really runs there meanwhile.

use std::collections::BTreeMap;

use mvm_planner::fleet::offers::{DocumentNumber, Offers};
use mvm_planner::fleet::{Beyond, Fleet, Placed, Placer, PoolKey};
use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Timestamp};
use proptest::prelude::*;

use crate::world::placement::{counts, room_left, tenant_use};

type Document = BTreeMap<PoolKey, DesiredCounts>;

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Away(prop::sample::Index),
    Seconds(u64),
    Counts(prop::sample::Index, DesiredCounts),
    /// The fleet is settled, and documents are offered.
    Settle,
    Accept(prop::sample::Index),
    Acknowledge(prop::sample::Index),
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let index = any::<prop::sample::Index>;
    let event = prop_oneof![
        3 => index().prop_map(Event::Away),
        2 => (1u64..400).prop_map(Event::Seconds),
        2 => (index(), counts()).prop_map(|(which, counts)| Event::Counts(which, counts)),
        5 => Just(Event::Settle),
        5 => index().prop_map(Event::Accept),
        5 => index().prop_map(Event::Acknowledge),
    ];
    proptest::collection::vec(event, 0..30)
}

#[derive(Debug, Default)]
struct Node {
    offers: Offers<Document>,
    sent: Option<(DocumentNumber, Document)>,
    follows: Option<(DocumentNumber, Document)>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) fleet: Fleet,
    pub(crate) placer: Placer,
    pub(crate) now: Timestamp,
    nodes: BTreeMap<NodeId, Node>,
    documents: u64,
    /// How often a node that was away had something that was placed elsewhere as well.
    pub(crate) doubles: usize,
}

impl World {
    /// All nodes are there, and have nothing but what is placed.
    pub(crate) fn new(mut fleet: Fleet, now: Timestamp) -> Self {
        for node in fleet.nodes.values_mut() {
            node.away_since = None;
            node.beyond.clear();
        }
        let nodes = fleet.nodes.keys().map(|id| (id.clone(), Node::default())).collect();
        Self { placer: Placer::of(&fleet), fleet, now, nodes, documents: 0, doubles: 0 }
    }

    pub(crate) fn happens(&mut self, event: &Event) {
        let node = |which: &prop::sample::Index| {
            self.nodes.keys().nth(which.index(self.nodes.len())).cloned().unwrap()
        };
        match event {
            Event::Away(which) => {
                let id = node(which);
                let known = self.fleet.nodes.get_mut(&id).unwrap();
                known.away_since = if known.away_since.is_some() { None } else { Some(self.now) };
                self.placer.set_node(&id, Some(known.clone()));
            }
            Event::Seconds(seconds) => self.now = self.now + std::time::Duration::from_secs(*seconds),
            Event::Counts(which, counts) if !self.fleet.pools.is_empty() => {
                let which = which.index(self.fleet.pools.len());
                let (key, pool) = self.fleet.pools.iter_mut().nth(which).unwrap();
                pool.counts = *counts;
                self.placer.set_pool(key, Some(pool.clone()));
            }
            Event::Counts(..) => {}
            Event::Settle => self.settle(),
            Event::Accept(which) => {
                let id = node(which);
                self.accept(&id);
            }
            Event::Acknowledge(which) => {
                let id = node(which);
                self.acknowledge(&id);
            }
        }
    }

    fn settle(&mut self) {
        self.placer.settle(self.now);
        let placed = self.placer.plan().placed;
        for (id, node) in &mut self.nodes {
            let document: Document =
                placed.iter().filter_map(|(key, placed)| Some((key.clone(), *placed.get(id)?))).collect();
            if node.sent.as_ref().map(|(_, sent)| sent.clone()).unwrap_or_default() != document {
                self.documents += 1;
                node.offers.offer((1, self.documents), document.clone());
                node.sent = Some(((1, self.documents), document));
            }
        }
        self.tell();
        let is_away = |id: &NodeId| self.fleet.nodes[id].away_since.is_some();
        let truth = self.in_truth();
        let doubled = |(key, placed): &(&PoolKey, &Placed)| {
            let at = |id: &&NodeId| is_away(id) && !placed.contains_key(*id);
            truth.get(*key).is_some_and(|truth| truth.keys().any(|id| at(&id))) && !placed.is_empty()
        };
        self.doubles += placed.iter().filter(doubled).count();
    }

    /// The placer is told what nodes may still have.
    fn tell(&mut self) {
        for (id, node) in &self.nodes {
            let still_there = node.offers.most().unwrap_or_default();
            for (key, pool) in &self.fleet.pools {
                let beyond = still_there.get(key).map(|still_there| Beyond {
                    resources: pool.resources,
                    still_there: *still_there,
                    claimed: DesiredCounts::default(),
                });
                let known = self.fleet.nodes.get_mut(id).unwrap();
                match beyond {
                    Some(beyond) => drop(known.beyond.insert(key.clone(), beyond)),
                    None => drop(known.beyond.remove(key)),
                }
                self.placer.set_beyond(id, key, beyond);
            }
        }
    }

    fn accept(&mut self, id: &NodeId) {
        let node = self.nodes.get_mut(id).unwrap();
        if self.fleet.nodes[id].away_since.is_none() && node.sent.is_some() {
            node.follows = node.sent.clone();
        }
    }

    fn acknowledge(&mut self, id: &NodeId) {
        let node = self.nodes.get_mut(id).unwrap();
        if let Some((number, _)) = node.follows.as_ref().filter(|_| self.fleet.nodes[id].away_since.is_none())
        {
            node.offers.acknowledge(*number);
        }
        self.tell();
    }

    /// All nodes return, and everything arrives, until nothing changes.
    pub(crate) fn converge(&mut self) -> usize {
        let ids: Vec<NodeId> = self.nodes.keys().cloned().collect();
        for id in &ids {
            let known = self.fleet.nodes.get_mut(id).unwrap();
            known.away_since = None;
            self.placer.set_node(id, Some(known.clone()));
        }
        for round in 0..50 {
            let before = (self.documents, self.in_truth());
            self.settle();
            for id in &ids {
                self.accept(id);
                self.acknowledge(id);
            }
            if (self.documents, self.in_truth()) == before {
                return round;
            }
        }
        usize::MAX
    }

    /// What nodes run, as they see it.
    pub(crate) fn in_truth(&self) -> BTreeMap<PoolKey, Placed> {
        let mut truth: BTreeMap<PoolKey, Placed> = BTreeMap::new();
        for (id, node) in &self.nodes {
            for (key, counts) in node.follows.iter().flat_map(|(_, document)| document) {
                truth.entry(key.clone()).or_default().insert(id.clone(), *counts);
            }
        }
        truth
    }

    /// A limit that what really runs passes.
    pub(crate) fn passed(&self) -> Option<String> {
        let truth = self.in_truth();
        let too_small = |(id, node): (&NodeId, _)| {
            room_left(&self.fleet, &truth, id, node).is_none().then(|| format!("{id} is overfull"))
        };
        let too_much = |(id, tenant): (&mvm_proto::TenantId, &mvm_planner::fleet::FleetTenant)| {
            let used = tenant_use(&self.fleet, &truth, id);
            (!used.is_within(&tenant.quotas)).then(|| format!("{id} has {used:?} of {:?}", tenant.quotas))
        };
        let too_many = truth.iter().find_map(|(key, placed)| {
            let max = self.fleet.pools[key].placement.max_per_node?;
            let most = placed.values().map(crate::world::placement::instances).max()?;
            (most > u64::from(max)).then(|| format!("{key:?} has {most} on a node"))
        });
        let nodes = self.fleet.nodes.iter().find_map(too_small);
        nodes.or_else(|| self.fleet.tenants.iter().find_map(too_much)).or(too_many)
    }
}
