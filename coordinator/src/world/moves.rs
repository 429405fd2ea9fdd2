//! Moves between nodes: what the store has of each, and what it means for documents, quotas and addresses.
//!
//! A move begins with its record and the placement at its target, in one transaction. From then on `placed` says where
//! the instance is to be, and this says how far it is ([`Moves::adjust`]): the source's document asks for it until it
//! has left the counts there, the target's from when it has arrived. [`drains`](super::drains) begins moves and ends them;
//! [`drain_task`](crate::drain_task) carries them out.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::blocks::Block;
use mvm_planner::fleet::drain::Refused;
use mvm_proto::document::DesiredCounts;
use mvm_proto::{Digest, InstanceId, NodeId, Phase, TenantId, Timestamp};
use serde::{Deserialize, Serialize};

/// One move, as it is stored under `moves/<id>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MoveRecord {
    pub(crate) tenant: mvm_proto::TenantId,
    pub(crate) pool: mvm_proto::PoolId,
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    /// The count in which it has its place.
    pub(crate) phase: Phase,
    /// None: another one is started at the target before the source stops one.
    pub(crate) instance: Option<Moved>,
    pub(crate) step: Step,
    pub(crate) begun_at: Timestamp,
}

/// The instance that moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) id: InstanceId,
    /// Its address's distance from its subnet's own; none: it did not tell.
    pub(crate) offset: Option<u32>,
    /// What it sleeps in, once that is known.
    pub(crate) snapshot: Option<Digest>,
}

/// How far a move is. Each step is durable before what follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    /// The target is told of it. The instance is where it was.
    Planned,
    /// It sleeps, and runs at its source no more.
    Departed,
    /// It is whole at the target, and runs at neither.
    Received,
    /// The source is told to remove it: from here on it goes on at the target alone.
    Releasing,
    /// The source has nothing of it any more.
    Released,
    /// It is taken back: placed where it was, and what came to the target is removed there.
    GivenUp,
}

impl MoveRecord {
    pub(crate) fn key(&self) -> PoolKey {
        PoolKey { tenant: self.tenant.clone(), pool: self.pool.clone() }
    }

    /// Its name for people: of the instance, or of the pool.
    pub(crate) fn name(&self) -> String {
        match &self.instance {
            Some(moved) => format!("{}/{}/{}", self.tenant, self.pool, moved.id),
            None => format!("{}/{}", self.tenant, self.pool),
        }
    }

    /// How much more, or less, than what is placed its ends are asked for.
    fn of_counts(&self, node: &NodeId) -> i8 {
        let source = *node == self.from;
        match (&self.instance, self.step) {
            // Marked by its own node from `departed` on: it is no surplus there, so the count may go first.
            (Some(_), Step::Planned) if source => 1,
            (Some(_), Step::Planned | Step::Departed) if !source => -1,
            // Until the other one works.
            (None, Step::Planned) if source => 1,
            _ => 0,
        }
    }

    /// The same of what of its tenant's quotas each end has: the target's part is free once the source has let go of it.
    fn of_quotas(&self, node: &NodeId) -> i8 {
        let source = *node == self.from;
        match (&self.instance, self.step) {
            (_, Step::Planned) if source => 1,
            (Some(_), Step::Planned) => -1,
            _ => 0,
        }
    }
}

/// What documents are adjusted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adjusted {
    Counts,
    Quotas,
}

/// All moves that are under way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Moves {
    records: BTreeMap<String, MoveRecord>,
    /// Those that the store has not as they are here, and those that it is to delete.
    unsaved: BTreeSet<String>,
    /// How many have ended: what a node said before that is old.
    pub(super) ended: u64,
    /// What each waits for now, for people.
    waits: BTreeMap<String, String>,
    /// Those that are to be taken back, with the reason.
    pub(super) to_give_up: BTreeMap<String, Refused>,
}

impl Moves {
    pub(crate) fn new(records: BTreeMap<String, MoveRecord>) -> Self {
        Self { records, ..Self::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &MoveRecord)> {
        self.records.iter()
    }

    pub(crate) fn find(&self, id: &str) -> Option<&MoveRecord> {
        self.records.get(id)
    }

    /// A move that the store has as it is here.
    pub(crate) fn stored(&self, id: &str) -> Option<&MoveRecord> {
        self.records.get(id).filter(|_| !self.unsaved.contains(id))
    }

    /// The instances that are carried, of moves that the store has.
    pub(crate) fn carried(&self) -> Vec<String> {
        let carried = self
            .records
            .iter()
            .filter(|(id, record)| record.instance.is_some() && !self.unsaved.contains(*id));
        carried.map(|(id, _)| id.clone()).collect()
    }

    /// Moves of which a node is an end.
    pub(super) fn on<'a>(&'a self, node: &'a NodeId) -> impl Iterator<Item = &'a MoveRecord> {
        self.records.values().filter(move |record| record.from == *node || record.to == *node)
    }

    pub(super) fn begin(&mut self, record: MoveRecord) {
        let id = format!("{:032x}", fastrand::u128(..));
        self.unsaved.insert(id.clone());
        self.records.insert(id, record);
    }

    /// A move is this far, as the store has it already.
    pub(super) fn set_step(&mut self, id: &str, step: Step, snapshot: Option<Digest>) -> Option<&MoveRecord> {
        let record = self.records.get_mut(id)?;
        record.step = step;
        if let (Some(moved), Some(snapshot)) = (&mut record.instance, snapshot) {
            moved.snapshot = Some(snapshot);
        }
        self.waits.remove(id);
        Some(record)
    }

    pub(super) fn change(&mut self, id: &str, change: impl FnOnce(&mut MoveRecord)) {
        if let Some(record) = self.records.get_mut(id) {
            change(record);
            self.unsaved.insert(id.to_owned());
        }
    }

    /// A move is over. Of one that was carried out the store knows already.
    pub(super) fn end(&mut self, id: &str, is_stored: bool) -> Option<MoveRecord> {
        let record = self.records.remove(id)?;
        self.waits.remove(id);
        self.to_give_up.remove(id);
        self.ended += 1;
        if is_stored {
            self.unsaved.remove(id);
        } else {
            self.unsaved.insert(id.to_owned());
        }
        Some(record)
    }

    pub(crate) fn wait_for(&mut self, id: &str, reason: String) -> bool {
        let before = self.waits.get(id).is_some_and(|before| *before == reason);
        self.waits.insert(id.to_owned(), reason);
        !before
    }

    pub(super) fn waits(&self, id: &str) -> String {
        self.waits.get(id).cloned().unwrap_or_default()
    }

    /// What the store is to have of moves that began or ended.
    pub(crate) fn unsaved(&self) -> Vec<(String, Option<MoveRecord>)> {
        self.unsaved.iter().map(|id| (id.clone(), self.records.get(id).cloned())).collect()
    }

    pub(crate) fn saved(&mut self, ids: impl Iterator<Item = String>) {
        for id in ids {
            self.unsaved.remove(&id);
        }
    }

    /// What a node is asked for of a pool, of what is placed there.
    pub(super) fn adjust(
        &self,
        key: &PoolKey,
        node: &NodeId,
        counts: DesiredCounts,
        what: Adjusted,
    ) -> DesiredCounts {
        let mut counts = counts;
        for record in self.on(node).filter(|record| record.key() == *key) {
            let by = match what {
                Adjusted::Counts => record.of_counts(node),
                Adjusted::Quotas => record.of_quotas(node),
            };
            let count = match record.phase {
                Phase::Running => &mut counts.running,
                Phase::Warm => &mut counts.warm,
                _ => &mut counts.sleeping,
            };
            *count = count.saturating_add_signed(by.into());
        }
        counts
    }

    /// Pools that the document of a node names for its moves, whatever is placed there.
    pub(super) fn pools_on(&self, node: &NodeId) -> BTreeSet<PoolKey> {
        self.on(node).filter(|record| record.step != Step::GivenUp).map(MoveRecord::key).collect()
    }

    /// Nodes and pools with moves of a tenant.
    pub(super) fn ends_of<'a>(&'a self, tenant: &'a TenantId) -> impl Iterator<Item = (PoolKey, &'a NodeId)> {
        let records = self.records.values().filter(move |record| record.tenant == *tenant);
        records.flat_map(|record| [(record.key(), &record.from), (record.key(), &record.to)])
    }

    /// Addresses that leave, or left, the node that has their block: they are reserved there before the instance has gone.
    pub(super) fn addresses_of(&self, tenant: &TenantId) -> Vec<(u32, NodeId)> {
        let leaving = |record: &&MoveRecord| {
            record.tenant == *tenant && !matches!(record.step, Step::Planned | Step::GivenUp)
        };
        let leaving = self.records.values().filter(leaving);
        leaving.filter_map(|record| Some((record.instance.as_ref()?.offset?, record.to.clone()))).collect()
    }

    /// Blocks of which a node is to be believed that it has addresses: instances bring them.
    pub(super) fn brought_to(&self, node: &NodeId) -> Vec<(TenantId, Block)> {
        let here = self.records.values().filter(|record| record.to == *node && record.step >= Step::Received);
        let here = here.filter(|record| record.step != Step::GivenUp);
        let block =
            |record: &MoveRecord| Some((record.tenant.clone(), Block::of(record.instance.as_ref()?.offset?)));
        here.filter_map(block).collect()
    }
}
