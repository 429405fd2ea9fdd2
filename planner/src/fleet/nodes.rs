//! What is known of each node: what it has and how it stands among the others. [`super::state`] changes what is placed on it.

use mvm_proto::NodeId;

use super::index::{ClassKey, Listed, Standing};
use super::score::Score;
use super::slab::{NodeNumber, PoolNumber};
use super::state::State;
use super::{Beyond, FleetNode};
use crate::limits::{Shortage, first_passed, node_limits};
use crate::observation::Capacity;
use crate::usage::Usage;

#[derive(Debug, Clone)]
pub(super) struct NodeState {
    pub(super) name: NodeId,
    /// What may be promised: its capacity with its overcommit.
    pub(super) room: Capacity,
    /// By what is placed.
    pub(super) used: Usage,
    /// By what is there beyond that.
    pub(super) beyond: Usage,
    /// Of its free shares.
    pub(super) score: Score,
    /// What is placed on it, in no order.
    pub(super) pools: Vec<PoolNumber>,
    /// None until it is in the index.
    pub(super) listed: Option<Listed>,
    /// What it was told to have beyond what is placed, by pool.
    pub(super) told: Vec<(PoolNumber, Beyond)>,
    /// Without what it has beyond.
    pub(super) spec: FleetNode,
}

impl NodeState {
    pub(super) fn new(name: &NodeId, spec: FleetNode) -> Self {
        Self {
            name: name.clone(),
            score: Score::default(),
            room: room(&spec),
            used: Usage::default(),
            beyond: Usage::default(),
            pools: Vec::new(),
            listed: None,
            told: Vec::new(),
            spec,
        }
    }

    /// Whether it takes something new.
    pub(super) fn accepts(&self) -> bool {
        !self.spec.cordoned && self.spec.away_since.is_none()
    }

    /// By all that is there, or may be.
    pub(super) fn in_use(&self) -> Usage {
        self.used.plus(self.beyond)
    }

    pub(super) fn fits(&self, need: &Usage) -> Result<(), Shortage> {
        first_passed(&node_limits(&self.room, &self.in_use(), need))
    }

    /// Whether it has less than what is placed on it needs.
    pub(super) fn is_overfull(&self) -> bool {
        node_limits(&self.room, &self.used, &Usage::default())
            .iter()
            .any(|(_, allowed, used, _)| used > allowed)
    }

    /// Whether taking this off helps against what the node lacks.
    pub(super) fn relieves(&self, need: &Usage) -> bool {
        node_limits(&self.room, &self.used, need)
            .iter()
            .any(|(_, allowed, used, need)| used > allowed && *need > 0)
    }
}

impl State {
    /// What a node has free changed, or whether it takes something new.
    pub(super) fn rank(&mut self, number: NodeNumber) {
        let Some(node) = self.nodes.get_mut(number) else { return };
        let (in_use, accepts) = (node.in_use(), node.accepts());
        node.score = Score::of_room(&node.room, &in_use);
        let [vcpus, mem, ..] = node_limits(&node.room, &in_use, &Usage::default())
            .map(|(_, allowed, used, _)| allowed.saturating_sub(used));
        let score = node.score.room();
        let standing = Standing { score: accepts.then_some(score), free_vcpus: vcpus, free_mem: mem };
        self.numbers.update(number, score, accepts);
        if let Some(listed) = &mut node.listed {
            self.index.update(number, listed, &standing, &self.numbers);
        }
    }

    /// A node is as told, with what is placed on it.
    pub(super) fn declare_node(&mut self, id: &NodeId, spec: FleetNode) -> NodeNumber {
        let known = self.numbers.number(id);
        let number = known.unwrap_or_else(|| {
            let number = self.nodes.insert(NodeState::new(id, spec.clone()));
            self.numbers.join(id, number);
            number
        });
        let Some(node) = self.nodes.get_mut(number) else { return number };
        let key = ClassKey { labels: spec.labels.clone(), taints: spec.taints.clone() };
        let stays =
            |listed: &Listed| self.index.class_of(listed) == Some(&key) && node.spec.images == spec.images;
        let listed = match node.listed.take() {
            Some(listed) if stays(&listed) => listed,
            left => {
                if let Some(left) = left {
                    self.index.leave(number, &left, &node.spec.images, &self.numbers);
                }
                self.index.join(number, key, &spec.images, &self.numbers)
            }
        };
        (node.room, node.spec, node.listed) = (room(&spec), spec, Some(listed));
        self.rank(number);
        number
    }

    /// A node that has nothing any more is gone.
    pub(super) fn forget_node(&mut self, number: NodeNumber) {
        let Some(node) = self.nodes.remove(number) else { return };
        if let Some(listed) = &node.listed {
            self.index.leave(number, listed, &node.spec.images, &self.numbers);
        }
        self.numbers.leave(&node.name);
    }
}

fn room(spec: &FleetNode) -> Capacity {
    let times = |amount: u64, permille: u32| amount.saturating_mul(u64::from(permille)) / 1000;
    let Capacity { vcpus, mem_mib, .. } = spec.capacity;
    let vcpus = times(u64::from(vcpus), spec.overcommit.vcpus_permille);
    Capacity {
        vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX),
        mem_mib: times(mem_mib, spec.overcommit.mem_permille),
        ..spec.capacity
    }
}
