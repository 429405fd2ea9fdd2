//! The laws of what nodes are given, on a world whose documents arrive late, whose acknowledgements get lost, and whose
//! coordinator starts again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::blocks::Block;
use mvm_planner::fleet::{AwayGrace, Placed, PoolKey};
use mvm_proto::document::{BLOCK_SIZE, DesiredCounts, Quotas, Tenant};
use mvm_proto::object::{API_VERSION, Object, TenantQuotas, read};
use mvm_proto::status::{Capacity, NodeInfo};
use mvm_proto::{DesiredState, NodeId, TenantId, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::live::{Addresses, PoolNews};
use super::{NodeNews, NodeOffers, Offered, Placements, PoolsHeard, World};
use crate::fleet::Standing;
use crate::records::Numbers;

const NODES: usize = 3;
const POOLS: usize = 2;
const GRACE: u64 = 300;

fn node_id(at: usize) -> NodeId {
    format!("n{at}").parse().unwrap()
}

fn tenant_id() -> TenantId {
    "acme".parse().unwrap()
}

fn object(kind: &str, name: &str, spec: &Value, status: Value) -> Object {
    let tenant = (kind == "Pool").then(tenant_id);
    let metadata = json!({ "name": name, "tenant": tenant });
    let metadata = if tenant.is_some() { metadata } else { json!({ "name": name }) };
    let declared = json!({ "api_version": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec });
    let declared = read(declared.to_string().as_bytes()).unwrap();
    Object {
        api_version: API_VERSION.to_owned(),
        kind: kind.to_owned(),
        metadata: declared.metadata,
        spec: declared.spec,
        status,
    }
}

fn pool_object(at: usize, counts: DesiredCounts) -> Object {
    let DesiredCounts { running, warm, sleeping } = counts;
    let spec = json!({
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1 + at, "mem_mib": 64 },
        "counts": { "running": running, "warm": warm, "sleeping": sleeping },
    });
    object("Pool", &format!("p{at}"), &spec, Value::Null)
}

fn tenant_object(quotas: TenantQuotas, subnet: &str) -> Object {
    let status = json!({ "net_id": 1, "subnet": subnet });
    object("Tenant", "acme", &json!({ "quotas": quotas }), status)
}

#[derive(Debug, Clone)]
enum Event {
    Declare(usize, DesiredCounts),
    Settle,
    /// The transaction of a settling is lost with the coordinator.
    SettleLost,
    /// A node accepts one of the documents that are on their way to it, and starts and ends instances as it says.
    Accept(usize, prop::sample::Index),
    /// Its acknowledgement arrives.
    Acknowledge(usize),
    /// Its status arrives.
    Report(usize),
    /// It is there, or not.
    Connect(usize, bool),
    Cordon(usize, bool),
    Pass(u64),
    Restart,
}

fn counts() -> impl Strategy<Value = DesiredCounts> {
    (0u32..9, 0u32..4, 0u32..4).prop_map(|(running, warm, sleeping)| DesiredCounts {
        running,
        warm,
        sleeping,
    })
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0..POOLS, counts()).prop_map(|(pool, counts)| Event::Declare(pool, counts)),
        8 => Just(Event::Settle),
        1 => Just(Event::SettleLost),
        6 => (0..NODES, any::<prop::sample::Index>()).prop_map(|(node, which)| Event::Accept(node, which)),
        4 => (0..NODES).prop_map(Event::Acknowledge),
        4 => (0..NODES).prop_map(Event::Report),
        2 => (0..NODES, any::<bool>()).prop_map(|(node, there)| Event::Connect(node, there)),
        1 => (0..NODES, any::<bool>()).prop_map(|(node, cordoned)| Event::Cordon(node, cordoned)),
        1 => (1u64..400).prop_map(Event::Pass),
        1 => Just(Event::Restart),
    ];
    proptest::collection::vec(event, 0..60)
}

/// Quotas from little to more than is ever asked for.
fn quotas() -> impl Strategy<Value = TenantQuotas> {
    (1u32..5, 1u32..30, 1u32..30).prop_map(|(scale, vcpus, running)| TenantQuotas {
        max_vcpus: vcpus * scale,
        max_mem_mib: u64::from(vcpus * scale) * 64,
        max_running: running * scale,
        max_warm: running,
        max_pools: 10,
        max_instances_per_pool: 16 * scale,
        max_disk_gib: 64,
    })
}

fn subnet() -> impl Strategy<Value = &'static str> {
    prop_oneof![Just("10.1.0.0/24"), Just("10.1.0.0/26"), Just("10.1.0.0/27")]
}

/// What a node does, whatever the coordinator knows of it.
#[derive(Debug, Default, Clone)]
struct Truth {
    connected: bool,
    sent: Vec<(Numbers, DesiredState)>,
    /// Which of them it follows.
    follows: Option<usize>,
    acknowledged: Option<Numbers>,
    reported: Option<(Option<Numbers>, BTreeSet<u32>)>,
    offsets: BTreeSet<u32>,
}

impl Truth {
    /// All that it follows, or may come to follow.
    fn may_follow(&self) -> &[(Numbers, DesiredState)] {
        &self.sent[self.follows.unwrap_or(0)..]
    }

    fn numbers(&self) -> Option<Numbers> {
        self.follows.map(|at| self.sent[at].0)
    }
}

/// What survives the coordinator.
#[derive(Debug, Default, Clone)]
struct Stored {
    objects: BTreeMap<String, Object>,
    placed: BTreeMap<PoolKey, Placed>,
    offers: BTreeMap<NodeId, NodeOffers>,
}

#[derive(Debug)]
struct Lab {
    world: World,
    stored: Stored,
    truths: BTreeMap<NodeId, Truth>,
    now: Timestamp,
    epoch: u64,
    quotas: TenantQuotas,
}

impl Lab {
    fn new(quotas: TenantQuotas, subnet: &str) -> Self {
        let now = Timestamp::from_unix_ms(0);
        let mut lab = Self {
            world: World::new(now, AwayGrace(Duration::from_secs(GRACE))),
            stored: Stored::default(),
            truths: (0..NODES)
                .map(|at| (node_id(at), Truth { connected: true, ..Truth::default() }))
                .collect(),
            now,
            epoch: 1,
            quotas,
        };
        for at in 0..NODES {
            lab.declare(object("Node", node_id(at).as_str(), &json!({}), Value::Null));
            lab.hear(&node_id(at));
        }
        lab.declare(tenant_object(quotas, subnet));
        lab
    }

    fn declare(&mut self, object: Object) {
        self.world.declare(&object);
        self.stored.objects.insert(object.reference(), object);
    }

    fn hear(&mut self, id: &NodeId) {
        let (news, pools) = self.news(id);
        self.world.hear(id, news, pools);
    }

    fn news(&self, id: &NodeId) -> (NodeNews, PoolsHeard) {
        let truth = &self.truths[id];
        let (reported, offsets) = truth.reported.clone().unwrap_or_default();
        let mut addresses = Addresses::default();
        let document = truth.sent.iter().find(|(numbers, _)| Some(*numbers) == reported);
        let own = document.and_then(|(_, document)| document.tenants.first()).map(blocks).unwrap_or_default();
        for offset in &offsets {
            if own.contains(&Block::of(*offset))
                || document.is_none_or(|(_, document)| document.tenants.is_empty())
            {
                addresses.blocks.insert(Block::of(*offset));
            } else {
                addresses.offsets.insert(*offset);
            }
        }
        let pool = PoolNews { instances: u32::try_from(offsets.len()).unwrap(), ..PoolNews::default() };
        let key = PoolKey { tenant: tenant_id(), pool: "p0".parse().unwrap() };
        let capacity = Capacity { vcpus: 64, mem_mib: 65_536, disk_mib: 65_536, max_instances: 1000 };
        let standing = if truth.connected { Standing::Present } else { Standing::Unknown };
        let news = NodeNews {
            standing,
            info: Some(NodeInfo { capacity: Some(capacity), ..NodeInfo::default() }),
            accepted: truth.acknowledged.filter(|_| truth.connected),
            reported: reported.filter(|_| truth.connected),
            addresses: (!offsets.is_empty()).then(|| (tenant_id(), addresses)).into_iter().collect(),
            ..NodeNews::default()
        };
        let pools = (!offsets.is_empty()).then_some((key, pool));
        (news, PoolsHeard::All(pools.into_iter().collect()))
    }

    /// Settles, and says to which nodes that gave documents.
    fn settle(&mut self, is_lost: bool) -> Vec<NodeId> {
        let before = self.stored.clone();
        self.world.settle_and_store(self.now);
        self.stored.placed = self.world.stored.all().clone();
        let mut issued = Vec::new();
        for id in std::mem::take(&mut self.world.touched) {
            let desired = self.world.render(&"c1".parse().unwrap(), &id).unwrap();
            let truth = self.truths.get_mut(&id).unwrap();
            let is_same = match truth.sent.last() {
                Some((_, last)) => *last == desired,
                None => desired.tenants.is_empty(),
            };
            if is_same || is_lost {
                continue;
            }
            let text = serde_json::to_vec(&desired).unwrap();
            DesiredState::parse(&text).unwrap_or_else(|errors| panic!("{errors}: {desired:?}"));
            let generation = truth.sent.last().map_or(0, |(numbers, _)| numbers.generation) + 1;
            let numbers = Numbers { epoch: self.epoch, generation };
            self.stored.offers.insert(id.clone(), self.world.offers_with(&id, numbers, &desired.tenants));
            self.world.offer(&id, numbers, &desired.tenants);
            truth.sent.push((numbers, desired));
            issued.push(id);
        }
        if is_lost {
            self.stored = before;
            self.restart();
        }
        issued
    }

    fn accept(&mut self, id: &NodeId, which: Option<&prop::sample::Index>) {
        let truth = self.truths.get_mut(id).unwrap();
        let first = truth.follows.map_or(0, |at| at + 1);
        let newer = truth.sent.len() - first;
        if !truth.connected || newer == 0 {
            return;
        }
        let at = first + which.map_or(newer - 1, |which| which.index(newer));
        truth.follows = Some(at);
        let tenant = truth.sent[at].1.tenants.first().cloned();
        let wanted = tenant.iter().flat_map(|tenant| &tenant.pools).map(|pool| pool.desired_counts);
        let wanted: u32 = wanted.map(|counts| counts.running + counts.warm + counts.sleeping).sum();
        while truth.offsets.len() > wanted as usize {
            truth.offsets.pop_last();
        }
        let offsets: Vec<u32> = tenant.iter().flat_map(|tenant| tenant.network.offsets()).collect();
        for offset in offsets {
            if truth.offsets.len() < wanted as usize {
                truth.offsets.insert(offset);
            }
        }
    }

    fn acknowledge(&mut self, id: &NodeId) {
        let truth = self.truths.get_mut(id).unwrap();
        if truth.connected {
            truth.acknowledged = truth.numbers();
            self.hear(&id.clone());
        }
    }

    fn report(&mut self, id: &NodeId) {
        let truth = self.truths.get_mut(id).unwrap();
        if truth.connected {
            truth.acknowledged = truth.numbers();
            truth.reported = Some((truth.numbers(), truth.offsets.clone()));
            self.hear(&id.clone());
        }
    }

    fn restart(&mut self) {
        self.epoch += 1;
        let mut world = World::new(self.now, AwayGrace(Duration::from_secs(GRACE)));
        for id in self.truths.keys() {
            let (news, pools) = self.news(id);
            let news = NodeNews { standing: Standing::Unknown, accepted: None, reported: None, ..news };
            world.hear(id, news, pools);
        }
        let order =
            |object: &&Object| ["Tenant", "Node", "Pool"].iter().position(|kind| *kind == object.kind);
        let mut objects: Vec<&Object> = self.stored.objects.values().collect();
        objects.sort_by_key(order);
        objects.into_iter().for_each(|object| world.declare(object));
        world.stored = Placements::new(self.stored.placed.clone());
        world.offered = Offered::new(self.stored.offers.clone());
        world.restore();
        world.touched = world.nodes.keys().cloned().collect();
        self.world = world;
        // The hello tells the document that the node follows; its status comes later.
        for (id, truth) in self.truths.clone() {
            self.truths.get_mut(&id).unwrap().acknowledged = truth.numbers();
            self.hear(&id);
        }
    }

    fn happens(&mut self, event: &Event) {
        match event {
            Event::Declare(pool, counts) => self.declare(pool_object(*pool, *counts)),
            Event::Settle => drop(self.settle(false)),
            Event::SettleLost => drop(self.settle(true)),
            Event::Accept(node, which) => self.accept(&node_id(*node), Some(which)),
            Event::Acknowledge(node) => self.acknowledge(&node_id(*node)),
            Event::Report(node) => self.report(&node_id(*node)),
            Event::Connect(node, there) => {
                let id = node_id(*node);
                self.truths.get_mut(&id).unwrap().connected = *there;
                self.hear(&id);
            }
            Event::Cordon(node, cordoned) => {
                let spec = json!({ "cordoned": cordoned });
                self.declare(object("Node", node_id(*node).as_str(), &spec, Value::Null));
            }
            Event::Pass(seconds) => self.now = self.now + Duration::from_secs(*seconds),
            Event::Restart => self.restart(),
        }
    }

    /// Everything arrives, until nothing changes any more. Says after how many rounds.
    fn come_to_rest(&mut self) -> usize {
        let ids: Vec<NodeId> = self.truths.keys().cloned().collect();
        for id in &ids {
            self.truths.get_mut(id).unwrap().connected = true;
            self.hear(id);
        }
        for round in 0..40 {
            let issued = self.settle(false);
            for id in &ids {
                self.accept(id, None);
                self.report(id);
            }
            if issued.is_empty() && self.settle(false).is_empty() {
                return round;
            }
        }
        usize::MAX
    }

    /// The most that all nodes may use together, by what they follow and by what is on its way to them.
    fn in_truth(&self) -> [u64; 6] {
        let amounts = |tenant: &Tenant| {
            let Quotas { max_vcpus, max_mem_mib, max_running, max_warm, max_disk_gib, .. } = tenant.quotas;
            let running: u32 = tenant.pools.iter().map(|pool| pool.desired_counts.running).sum();
            [max_vcpus.into(), max_mem_mib, max_running.into(), max_warm.into(), max_disk_gib, running.into()]
        };
        let mut sum = [0; 6];
        for truth in self.truths.values() {
            let tenants = truth.may_follow().iter().filter_map(|(_, document)| document.tenants.first());
            let most = tenants
                .map(amounts)
                .fold([0; 6], |most, more| std::array::from_fn(|at| more[at].max(most[at])));
            sum = std::array::from_fn(|at| sum[at] + most[at]);
        }
        sum
    }

    fn limits(&self) -> [u64; 6] {
        let TenantQuotas { max_vcpus, max_mem_mib, max_running, max_warm, max_disk_gib, .. } = self.quotas;
        [max_vcpus.into(), max_mem_mib, max_running.into(), max_warm.into(), max_disk_gib, max_running.into()]
    }

    /// A block that two nodes may follow, or an address that two instances have.
    fn shared(&self) -> Option<String> {
        let mut holders: BTreeMap<u32, &NodeId> = BTreeMap::new();
        let mut of_address: BTreeMap<u32, &NodeId> = BTreeMap::new();
        for (id, truth) in &self.truths {
            let tenants = truth.may_follow().iter().filter_map(|(_, document)| document.tenants.first());
            for block in tenants.flat_map(blocks).collect::<BTreeSet<_>>() {
                if let Some(other) = holders.insert(block.0, id) {
                    return Some(format!("block {} is with {other} and {id}", block.0));
                }
            }
            for offset in &truth.offsets {
                if let Some(other) = of_address.insert(*offset, id) {
                    return Some(format!("address {offset} is on {other} and {id}"));
                }
                if let Some(other) = holders.get(&(offset / BLOCK_SIZE)).filter(|other| **other != id) {
                    return Some(format!("{id} has address {offset} in a block of {other}"));
                }
            }
        }
        None
    }
}

fn blocks(tenant: &Tenant) -> BTreeSet<Block> {
    tenant.network.address_blocks.iter().flatten().map(|block| Block(u32::from(*block))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn nodes_never_follow_more_than_the_quotas_and_no_block_is_with_two_of_them(
        quotas in quotas(), subnet in subnet(), events in events(),
    ) {
        let mut lab = Lab::new(quotas, subnet);
        for event in &events {
            lab.happens(event);
            let (in_truth, limits) = (lab.in_truth(), lab.limits());
            prop_assert!((0..6).all(|at| in_truth[at] <= limits[at]), "{in_truth:?} of {limits:?} after {event:?}");
            prop_assert_eq!(lab.shared(), None, "after {:?}", event);
        }
    }

    #[test]
    fn what_is_declared_comes_to_rest_and_a_restart_issues_nothing(
        quotas in quotas(), subnet in subnet(), events in events(),
    ) {
        let mut lab = Lab::new(quotas, subnet);
        events.iter().for_each(|event| lab.happens(event));
        let rounds = lab.come_to_rest();
        prop_assert!(rounds <= 20, "{rounds} rounds");
        lab.restart();
        prop_assert_eq!(lab.settle(false), vec![], "after a restart");
        for id in lab.truths.keys().cloned().collect::<Vec<_>>() {
            lab.report(&id);
            prop_assert_eq!(lab.settle(false), vec![], "after the status of {}", id);
        }
    }
}

/// That a node accepted the document without a block says nothing of what still uses the block: only a status does.
#[test]
fn a_block_is_given_back_by_a_status_and_not_by_an_acknowledgement() {
    let mut lab = Lab::new(TenantQuotas::default(), "10.1.0.0/28");
    lab.declare(pool_object(0, DesiredCounts { running: 1, ..DesiredCounts::default() }));
    let holder = lab.settle(false).pop().unwrap();
    lab.accept(&holder, None);
    lab.acknowledge(&holder);
    let drained = json!({ "taints": [{ "key": "repair", "value": "disk", "effect": "drain" }] });
    lab.declare(object("Node", holder.as_str(), &drained, Value::Null));
    lab.settle(false);
    lab.accept(&holder, None);
    // It is still stopping what it has.
    lab.truths.get_mut(&holder).unwrap().offsets = [3].into();
    let given = |lab: &mut Lab| {
        lab.settle(false);
        let others = lab.truths.iter().filter(|(id, _)| **id != holder);
        let documents = others.filter_map(|(_, truth)| truth.sent.last()?.1.tenants.first().map(blocks));
        documents.flatten().count()
    };
    lab.acknowledge(&holder);
    assert_eq!(given(&mut lab), 0, "before any status");
    lab.report(&holder);
    assert_eq!(given(&mut lab), 0, "while an instance has its address");
    lab.truths.get_mut(&holder).unwrap().offsets.clear();
    lab.report(&holder);
    assert_eq!(given(&mut lab), 1);
}

/// As admission asks, of an object of 31,000 bytes.
fn too_large(lab: &Lab, object: &Object) -> Option<(NodeId, usize)> {
    let is_near = lab.world.may_be_too_large(31_000);
    is_near.then(|| lab.world.clone().too_large(object, &"c1".parse().unwrap(), lab.now)).flatten()
}

/// What would not fit into a node's document is found before anything is stored, and what fits is not.
#[test]
fn an_object_that_makes_a_document_too_large_is_found_before_it_is_declared() {
    let mut lab =
        Lab::new(TenantQuotas { max_pools: 200, max_vcpus: 200, ..TenantQuotas::default() }, "10.1.0.0/24");
    let large = |name: &str, running: u32| {
        let value = "x".repeat(15_000);
        let spec = json!({
            "image": { "ref": "builtin:busybox" },
            "resources": { "vcpus": 1, "mem_mib": 32 },
            "counts": { "running": running },
            "workload": { "env": { "A": value, "B": value } },
        });
        object("Pool", name, &spec, Value::Null)
    };
    for at in 1..NODES {
        lab.declare(object("Node", node_id(at).as_str(), &json!({ "cordoned": true }), Value::Null));
    }
    let mut took = 0;
    let refused = loop {
        let next = large(&format!("large-{took}"), 1);
        if let Some(refused) = too_large(&lab, &next) {
            break refused;
        }
        lab.declare(next);
        lab.settle(false);
        let newest = lab.truths[&node_id(0)].sent.last().unwrap().1.clone();
        lab.world.note_size(&newest.node_id, serde_json::to_vec(&newest).unwrap().len());
        took += 1;
        assert!(took < 200, "nothing is ever too large");
    };
    assert!((130..140).contains(&took), "{took} pools of 30 kB fit into 4 MiB");
    assert_eq!((refused.0, refused.1 > mvm_proto::document::MAX_DOCUMENT_BYTES), (node_id(0), true));
    // Without an instance it is in no document.
    assert_eq!(too_large(&lab, &large("idle", 0)), None);
    // Where another node takes it, it fits.
    lab.declare(object("Node", node_id(1).as_str(), &json!({}), Value::Null));
    assert_eq!(too_large(&lab, &large("moved", 1)), None);
}

/// The worlds of the laws are neither idle nor all within their quotas.
#[test]
fn worlds_that_lack_something_and_worlds_that_do_not_are_tried() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut busy, mut lacking, mut shared) = (0, 0, 0);
    for _ in 0..200 {
        let (quotas, subnet, events) =
            (quotas(), subnet(), events()).new_tree(&mut runner).unwrap().current();
        let mut lab = Lab::new(quotas, subnet);
        for event in &events {
            lab.happens(event);
            lacking += usize::from(!lab.world.tenant_lacking(&tenant_id()).is_empty());
        }
        let has = lab.truths.values().filter(|truth| !truth.offsets.is_empty()).count();
        busy += usize::from(has > 0);
        shared += usize::from(has > 1);
    }
    assert!(
        busy > 50 && shared > 20 && lacking > 20,
        "{busy} busy, {shared} on several nodes, {lacking} lacking"
    );
}
