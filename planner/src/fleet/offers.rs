//! What a node may be following: what it acknowledged last, and what was offered to it since.
//!
//! An offer may have been accepted although its acknowledgement was lost. So until a later one arrives, a node is counted
//! with the most of everything that it may follow. A coordinator stores this beside the node's document: a new leader
//! must know what the old one offered.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::document::{DesiredCounts, Quotas};
use serde::{Deserialize, Serialize};

/// The number of a document: its epoch and its generation.
pub type DocumentNumber = (u64, u64);

/// Open offers that are kept apart. The oldest of more are united, which only counts a node with too much for a while.
const MAX_OPEN: usize = 8;

/// The most of two values, amount by amount.
pub trait Most {
    #[must_use]
    fn most(&self, other: &Self) -> Self;
}

impl Most for Quotas {
    fn most(&self, other: &Self) -> Self {
        Self {
            max_vcpus: self.max_vcpus.max(other.max_vcpus),
            max_mem_mib: self.max_mem_mib.max(other.max_mem_mib),
            max_running: self.max_running.max(other.max_running),
            max_warm: self.max_warm.max(other.max_warm),
            max_pools: self.max_pools.max(other.max_pools),
            max_instances_per_pool: self.max_instances_per_pool.max(other.max_instances_per_pool),
            max_disk_gib: self.max_disk_gib.max(other.max_disk_gib),
        }
    }
}

impl Most for DesiredCounts {
    fn most(&self, other: &Self) -> Self {
        Self {
            running: self.running.max(other.running),
            warm: self.warm.max(other.warm),
            sleeping: self.sleeping.max(other.sleeping),
        }
    }
}

impl<T: Ord + Clone> Most for BTreeSet<T> {
    fn most(&self, other: &Self) -> Self {
        self | other
    }
}

impl<K: Ord + Clone, V: Most + Clone> Most for BTreeMap<K, V> {
    fn most(&self, other: &Self) -> Self {
        let mut most = self.clone();
        for (key, value) in other {
            let value = most.get(key).map_or_else(|| value.clone(), |known| known.most(value));
            most.insert(key.clone(), value);
        }
        most
    }
}

/// One part of a node's documents, such as a tenant's share of its quotas, as far as the node may follow it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offers<T> {
    /// The first is the one that the node acknowledged last, if it acknowledged any; the last is in its document now.
    /// An offer stands for all documents from its number to the next one's.
    entries: Vec<(DocumentNumber, T)>,
    acknowledged: bool,
}

impl<T> Default for Offers<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), acknowledged: false }
    }
}

impl<T: Most + Clone + PartialEq> Offers<T> {
    /// A document of this number carries this value. Numbers only grow: an older one changes nothing.
    pub fn offer(&mut self, number: DocumentNumber, value: T) {
        let last = self.entries.last();
        if last.is_some_and(|(at, known)| *at >= number || *known == value) {
            return;
        }
        self.entries.push((number, value));
        let first_open = usize::from(self.acknowledged);
        if self.entries.len() > MAX_OPEN + first_open {
            let (_, oldest) = self.entries.remove(first_open);
            if let Some((_, next)) = self.entries.get_mut(first_open) {
                *next = next.most(&oldest);
            }
        }
    }

    /// The node follows the document of this number, and no older one ever again.
    pub fn acknowledge(&mut self, number: DocumentNumber) {
        let Some(at) = self.entries.iter().rposition(|(offered, _)| *offered <= number) else { return };
        self.entries.drain(..at);
        self.acknowledged = true;
    }

    /// The node forgets its numbers, as a trust root may tell it to: what it said of them no longer counts, and any of
    /// what was offered may be what it follows. Every number to come is above all that there were.
    pub fn forget_numbers(&mut self) {
        self.entries.iter_mut().for_each(|(number, _)| *number = (0, 0));
        self.acknowledged = false;
    }

    /// What the node's document says now.
    #[must_use]
    pub fn current(&self) -> Option<&T> {
        self.entries.last().map(|(_, value)| value)
    }

    /// Since which document it says so.
    #[must_use]
    pub fn current_since(&self) -> Option<DocumentNumber> {
        self.entries.last().map(|(number, _)| *number)
    }

    /// All that the node may follow, each with the first document that says so; what it acknowledged last first.
    pub fn open(&self) -> impl Iterator<Item = (DocumentNumber, &T)> {
        self.entries.iter().map(|(number, value)| (*number, value))
    }

    /// What the node acknowledged last.
    #[must_use]
    pub fn acknowledged(&self) -> Option<&T> {
        self.entries.first().filter(|_| self.acknowledged).map(|(_, value)| value)
    }

    /// The most that the node may follow; none if nothing was ever offered.
    #[must_use]
    pub fn most(&self) -> Option<T> {
        self.entries.iter().map(|(_, value)| value.clone()).reduce(|most, value| most.most(&value))
    }

    /// Whether the node acknowledged what its document says now.
    #[must_use]
    pub fn is_agreed(&self) -> bool {
        self.entries.is_empty() || (self.acknowledged && self.entries.len() == 1)
    }
}
