//! The nodes that take something new, best first, in classes of equal labels and taints.
//!
//! A pool looks at each class once, and inside a class at the best nodes only.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use mvm_proto::placement::{Labels, Taint};
use mvm_proto::{Digest, NodeId};

use super::state::NodeState;
use crate::limits::node_limits;
use crate::usage::Usage;

/// What all nodes of a class have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClassKey {
    pub(super) labels: Labels,
    pub(super) taints: BTreeSet<Taint>,
}

/// A node and its rank: the best score first, equals in the order of their names.
pub(super) type Entry = (Reverse<u64>, NodeId);

#[derive(Debug, Clone, Default)]
pub(super) struct Class {
    ranked: BTreeSet<Entry>,
    with_image: BTreeMap<Digest, BTreeSet<Entry>>,
    /// What is free on each node; the last entry tells whether the class has room for anything at all.
    free_vcpus: BTreeSet<(u64, NodeId)>,
    free_mem: BTreeSet<(u64, NodeId)>,
}

/// What the index holds of one node, so that it can be taken out again.
#[derive(Debug, Clone)]
pub(super) struct Indexed {
    class: Arc<ClassKey>,
    score: u64,
    free_vcpus: u64,
    free_mem: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    classes: BTreeMap<Arc<ClassKey>, Class>,
}

impl Class {
    pub(super) fn len(&self) -> usize {
        self.ranked.len()
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.ranked.iter().map(|(_, node)| node)
    }

    /// Whether some node may have room for this; not whether one has.
    pub(super) fn may_fit(&self, need: &Usage) -> bool {
        let most = |free: &BTreeSet<(u64, NodeId)>| free.last().map_or(0, |(free, _)| *free);
        need.vcpus <= most(&self.free_vcpus) && need.mem_mib <= most(&self.free_mem)
    }

    /// The next node after this one, of all or of those with an image.
    pub(super) fn next(&self, image: Option<&Digest>, after: Option<&Entry>) -> Option<&Entry> {
        let entries = match image {
            None => &self.ranked,
            Some(image) => self.with_image.get(image)?,
        };
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        entries.range((from, Bound::Unbounded)).next()
    }
}

impl Index {
    pub(super) fn classes(&self) -> impl Iterator<Item = (&Arc<ClassKey>, &Class)> {
        self.classes.iter()
    }

    pub(super) fn class(&self, key: &ClassKey) -> Option<&Class> {
        self.classes.get(key)
    }

    /// Puts a node where it belongs now, or takes it out if it takes nothing new.
    pub(super) fn update(&mut self, id: &NodeId, node: &mut NodeState) {
        self.remove(id, node);
        if !node.accepts() {
            return;
        }
        let [vcpus, mem, ..] = node_limits(&node.room, &node.in_use(), &Usage::default());
        let free = |(_, allowed, used, _): (&str, u64, u64, u64)| allowed.saturating_sub(used);
        let indexed = Indexed {
            class: Arc::clone(&node.class),
            score: node.score().total(),
            free_vcpus: free(vcpus),
            free_mem: free(mem),
        };
        let class = self.classes.entry(Arc::clone(&indexed.class)).or_default();
        let entry = (Reverse(indexed.score), id.clone());
        for image in &node.spec.images {
            class.with_image.entry(*image).or_default().insert(entry.clone());
        }
        class.ranked.insert(entry);
        class.free_vcpus.insert((indexed.free_vcpus, id.clone()));
        class.free_mem.insert((indexed.free_mem, id.clone()));
        node.indexed = Some(indexed);
    }

    pub(super) fn remove(&mut self, id: &NodeId, node: &mut NodeState) {
        let Some(indexed) = node.indexed.take() else { return };
        let Some(class) = self.classes.get_mut(&indexed.class) else { return };
        let entry = (Reverse(indexed.score), id.clone());
        for image in &node.spec.images {
            if let Some(entries) = class.with_image.get_mut(image) {
                entries.remove(&entry);
                if entries.is_empty() {
                    class.with_image.remove(image);
                }
            }
        }
        class.ranked.remove(&entry);
        class.free_vcpus.remove(&(indexed.free_vcpus, id.clone()));
        class.free_mem.remove(&(indexed.free_mem, id.clone()));
        if class.ranked.is_empty() {
            self.classes.remove(&indexed.class);
        }
    }
}
