//! Nodes that are being drained: what they said that they have, what the planner decided for it, and what is told of it.
//!
//! [`World::decide_drains`] runs with every settling that changed no placement otherwise, so that what it begins is one
//! transaction with where it goes.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::blocks::Block;
use mvm_planner::fleet::drain::{
    Left, Manners, Platform, Refused, Remains, Resident, Surroundings, Way, drain,
};
use mvm_proto::object::{DrainStatus, DrainedInstance};
use mvm_proto::status::NodeInfo;
use mvm_proto::{InstanceId, NodeId, Phase, Timestamp};

use super::World;
use super::moves::{MoveRecord, Moved, Step};
use crate::fleet::Standing;

/// Nodes that begin moves in one settling: their records and placements fit one transaction.
const NODES_AT_ONCE: usize = 4;
/// After a node refused an instance, others are tried before it for so long.
const REFUSED_FOR: std::time::Duration = std::time::Duration::from_secs(60);
/// Instances that the status of a node names.
const MAX_TOLD: usize = 256;
/// Of those, the last that have gone.
const MAX_GONE_TOLD: usize = 64;

/// One node's drain, as far as this process knows; all of it is found out again after a start.
#[derive(Debug, Clone, Default)]
pub(crate) struct Drain {
    /// What the node said that it has; none: it was not asked yet.
    residents: Option<Vec<(Resident, Option<u32>)>>,
    left: Vec<Left>,
    /// The last ones, oldest first.
    gone: Vec<DrainedInstance>,
    count: u32,
    refused: BTreeMap<InstanceId, BTreeMap<NodeId, (Refused, Timestamp)>>,
    failed: BTreeMap<PoolKey, BTreeMap<NodeId, (Refused, Timestamp)>>,
    /// Something changed since it was decided last.
    is_open: bool,
}

impl World {
    /// The nodes that are being drained.
    pub(crate) fn draining(&self) -> Vec<NodeId> {
        self.drains.keys().cloned().collect()
    }

    /// A node is to be drained, or not any more.
    pub(super) fn set_drain(&mut self, id: &NodeId, drained: bool) {
        if drained {
            self.drains.entry(id.clone()).or_default().is_open = true;
        } else if self.drains.remove(id).is_some() {
            self.stale_nodes.insert(id.clone());
            self.touched.insert(id.clone());
        }
    }

    /// What a node that is drained has, as it said after so many moves had ended. Whether it is news.
    pub(crate) fn hear_residents(
        &mut self,
        id: &NodeId,
        residents: Vec<(Resident, Option<u32>)>,
        ended: u64,
    ) -> bool {
        // What it said before a move ended may name what has gone.
        let is_old = self.moves.ended != ended;
        let Some(drain) = self.drains.get_mut(id).filter(|_| !is_old) else { return false };
        if drain.residents.as_ref() == Some(&residents) && drain.left.is_empty() {
            return false;
        }
        let is_news = drain.residents.as_ref() != Some(&residents);
        drain.residents = Some(residents);
        // What is left is tried again, also when nothing changed: another node may have room by now.
        drain.is_open = true;
        if is_news {
            self.touched.insert(id.clone());
            self.stale_nodes.insert(id.clone());
        }
        true
    }

    /// A node that is drained came back.
    pub(super) fn reopen_drain(&mut self, id: &NodeId, came: bool) {
        if let Some(drain) = self.drains.get_mut(id).filter(|_| came) {
            drain.is_open = true;
        }
    }

    /// Whether something was decided for a node that its newest document may not say yet.
    pub(crate) fn is_pending(&self, node: &NodeId, tenant: &mvm_proto::TenantId) -> bool {
        self.touched.contains(node) || self.undivided.contains(tenant) || self.unsaved.contains(node)
    }

    /// How many moves have ended: see [`World::hear_residents`].
    pub(crate) fn moves_ended(&self) -> u64 {
        self.moves.ended
    }

    /// Takes what goes from nodes that are drained to its new place, ends what has arrived, and takes back what can't go.
    pub(super) fn decide_drains(&mut self, now: Timestamp) {
        if self.moves.is_empty() && self.drains.is_empty() {
            return;
        }
        self.give_up_moves(now);
        self.end_replacements(now);
        let open: Vec<NodeId> =
            self.drains.iter().filter(|(_, drain)| drain.is_open).map(|(id, _)| id.clone()).collect();
        if open.is_empty() {
            return;
        }
        let mut surroundings = self.surroundings();
        for id in open.into_iter().take(NODES_AT_ONCE) {
            self.decide_drain(&id, &mut surroundings, now);
        }
    }

    fn decide_drain(&mut self, id: &NodeId, surroundings: &mut Surroundings, now: Timestamp) {
        let Some(drain) = self.drains.get_mut(id) else { return };
        drain.is_open = false;
        let present = self.nodes.get(id).is_some_and(|entry| entry.news.standing == Standing::Present);
        let Some(residents) = drain.residents.clone().filter(|_| present) else { return };
        let lately = |tries: &BTreeMap<NodeId, (Refused, Timestamp)>| -> BTreeMap<NodeId, Refused> {
            let fresh = tries.iter().filter(|(_, (_, at))| now.since(*at) < REFUSED_FOR);
            fresh.map(|(node, (reason, _))| (node.clone(), reason.clone())).collect()
        };
        surroundings.refused = drain.refused.iter().map(|(id, tries)| (id.clone(), lately(tries))).collect();
        surroundings.failed = drain.failed.iter().map(|(key, tries)| (key.clone(), lately(tries))).collect();
        let known: Vec<Resident> = residents
            .iter()
            .map(|(one, _)| {
                let is_moving = self
                    .moves
                    .on(id)
                    .any(|record| record.instance.as_ref().is_some_and(|moved| moved.id == one.id));
                Resident { is_moving: one.is_moving || is_moving, ..one.clone() }
            })
            .collect();
        let rolling = |key: &PoolKey| self.rollouts.is_rolling(key);
        let (rolled, still): (Vec<Resident>, Vec<Resident>) =
            known.into_iter().partition(|one| rolling(&one.key));
        let plan = drain_still(&mut self.placer, id, &still, &rolled, surroundings);
        for begun in &plan.begin {
            for end in [id, &begun.to] {
                *surroundings.under_way.entry(end.clone()).or_default() += 1;
            }
            let instance = match &begun.way {
                Way::Hand => {
                    self.unsettled.insert(begun.key.clone());
                    continue;
                }
                Way::Replace => None,
                Way::Move(instance) => residents
                    .iter()
                    .find(|(one, _)| one.id == *instance)
                    .map(|(one, offset)| Moved { id: one.id.clone(), offset: *offset, snapshot: None }),
            };
            self.unsettled.insert(begun.key.clone());
            self.moves.begin(MoveRecord {
                tenant: begun.key.tenant.clone(),
                pool: begun.key.pool.clone(),
                from: id.clone(),
                to: begun.to.clone(),
                phase: begun.phase,
                instance,
                step: Step::Planned,
                begun_at: now,
            });
        }
        let changed = !plan.begin.is_empty();
        if let Some(drain) = self.drains.get_mut(id) {
            if changed || drain.left != plan.left {
                self.stale_nodes.insert(id.clone());
                self.touched.insert(id.clone());
            }
            drain.left = plan.left;
        }
    }

    fn surroundings(&self) -> Surroundings {
        let platforms = self
            .nodes
            .iter()
            .filter_map(|(id, entry)| Some((id.clone(), platform(entry.news.info.as_ref()?))));
        let mut under_way: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (_, record) in self.moves.iter() {
            for end in [&record.from, &record.to] {
                *under_way.entry(end.clone()).or_default() += 1;
            }
        }
        let manners =
            self.drains.values().flat_map(|drain| drain.residents.iter().flatten()).filter_map(|(one, _)| {
                let policies = &self.pools.get(&one.key)?.spec.policies;
                Some((one.key.clone(), Manners { pinned: policies.pinned, critical: policies.critical }))
            });
        Surroundings {
            platforms: platforms.collect(),
            under_way,
            manners: manners.collect(),
            ..Surroundings::default()
        }
    }

    /// A replacement is there once its node has as many as are placed on it.
    fn end_replacements(&mut self, now: Timestamp) {
        let is_there = |record: &MoveRecord| {
            let key = record.key();
            let placed =
                self.stored.get(&key).and_then(|placed| placed.get(&record.to)).copied().unwrap_or_default();
            let asked = self.moves.adjust(&key, &record.to, placed, super::moves::Adjusted::Counts);
            let news = self.nodes.get(&record.to).and_then(|entry| entry.news.pools.get(&key));
            news.is_some_and(|news| match record.phase {
                Phase::Running => news.actual.running.saturating_sub(news.down) >= asked.running,
                Phase::Warm => news.actual.warm >= asked.warm,
                _ => news.actual.sleeping >= asked.sleeping,
            })
        };
        let of_counts =
            |(_, record): &(&String, &MoveRecord)| record.instance.is_none() && record.step == Step::Planned;
        let is_saved = |(id, _): &(&String, &MoveRecord)| self.moves.stored(id).is_some();
        let all = self.moves.iter().filter(of_counts).filter(is_saved);
        let (done, open): (Vec<_>, Vec<_>) = all.partition(|(_, record)| is_there(record));
        let late = open.into_iter().filter(|(_, record)| now.since(record.begun_at) > REPLACED_WITHIN);
        let late: Vec<String> = late.map(|(id, _)| id.clone()).collect();
        let gone = self
            .moves
            .iter()
            .filter(|(_, record)| record.instance.is_none() && !self.pools.contains_key(&record.key()));
        let done: BTreeSet<String> = done.into_iter().chain(gone).map(|(id, _)| id.clone()).collect();
        for id in done {
            if let Some(record) = self.moves.end(&id, false) {
                self.moved(&record);
            }
        }
        for id in late {
            let reason = "the instance that was to replace it did not come up in time".to_owned();
            self.moves.to_give_up.insert(id, Refused { reason, lasting: true });
        }
        if !self.moves.to_give_up.is_empty() {
            self.give_up_moves(now);
        }
    }

    /// What is placed at a target goes back to its source.
    fn give_up_moves(&mut self, now: Timestamp) {
        for (id, reason) in std::mem::take(&mut self.moves.to_give_up) {
            let Some((_, record)) = self.moves.iter().find(|(known, _)| **known == id) else { continue };
            let record = record.clone();
            if record.step >= Step::Releasing {
                continue;
            }
            let key = record.key();
            self.placer.shift_back(&key, record.phase, &record.to, &record.from);
            self.unsettled.insert(key.clone());
            self.touched.extend([record.from.clone(), record.to.clone()]);
            self.undivided.insert(record.tenant.clone());
            if let Some(drain) = self.drains.get_mut(&record.from) {
                let tries = match &record.instance {
                    Some(moved) => drain.refused.entry(moved.id.clone()).or_default(),
                    None => drain.failed.entry(key).or_default(),
                };
                tries.insert(record.to.clone(), (reason, now));
                drain.is_open = true;
            }
            self.stale_nodes.insert(record.from.clone());
            if record.instance.is_some() {
                self.moves.change(&id, |record| record.step = Step::GivenUp);
            } else {
                self.moves.end(&id, false);
            }
        }
    }

    /// Asks for a move to be taken back with the next settling.
    pub(crate) fn give_up_move(&mut self, id: &str, reason: Refused) {
        self.moves.to_give_up.insert(id.to_owned(), reason);
    }

    /// A move is this far, as the store has it: documents follow.
    pub(crate) fn step_taken(&mut self, id: &str, step: Step, snapshot: Option<mvm_proto::Digest>) {
        let Some(record) = self.moves.set_step(id, step, snapshot).cloned() else { return };
        if step >= Step::Received
            && let Some(offset) = record.instance.as_ref().and_then(|moved| moved.offset)
        {
            let block = Block::of(offset);
            let changed = self.offered.change(&record.to, |offers| offers.keep(&record.tenant, block));
            if !changed.is_empty() {
                self.unsaved.insert(record.to.clone());
            }
        }
        self.follow(&record);
    }

    /// A move is over, as the store has it.
    pub(crate) fn move_over(&mut self, id: &str) {
        if let Some(record) = self.moves.end(id, true) {
            if record.step == Step::GivenUp {
                self.follow(&record);
            } else {
                self.moved(&record);
            }
        }
    }

    fn follow(&mut self, record: &MoveRecord) {
        self.touched.extend([record.from.clone(), record.to.clone()]);
        self.undivided.insert(record.tenant.clone());
        self.stale_nodes.insert(record.from.clone());
        if let Some(drain) = self.drains.get_mut(&record.from) {
            drain.is_open = true;
        }
    }

    fn moved(&mut self, record: &MoveRecord) {
        self.follow(record);
        let Some(drain) = self.drains.get_mut(&record.from) else { return };
        let state = if record.instance.is_some() { "moved" } else { "replaced" };
        if let (Some(moved), Some(residents)) = (&record.instance, &mut drain.residents) {
            residents.retain(|(one, _)| one.id != moved.id);
        }
        drain.count = drain.count.saturating_add(1);
        drain.gone.push(DrainedInstance {
            name: record.name(),
            count: 1,
            state: state.to_owned(),
            to: record.to.to_string(),
            reason: String::new(),
        });
        if drain.gone.len() > MAX_GONE_TOLD {
            drain.gone.remove(0);
        }
    }

    /// Pools that a node's document names although nothing of them is placed there: of moves, and of what stays.
    pub(super) fn kept_on(&self, node: &NodeId) -> BTreeSet<PoolKey> {
        let mut kept = self.moves.pools_on(node);
        let left = self.drains.get(node).into_iter().flat_map(|drain| &drain.left);
        kept.extend(left.filter(|left| left.instance.is_some()).map(|left| left.key.clone()));
        kept
    }

    /// How far a node's drain is; and whether nothing is left.
    pub(super) fn drain_status(&self, id: &NodeId) -> Option<(DrainStatus, Drained)> {
        let drain = self.drains.get(id)?;
        let mut instances = Vec::new();
        for (move_id, record) in self.moves.iter().filter(|(_, record)| record.from == *id) {
            let state = match (&record.instance, record.step) {
                (_, Step::GivenUp) => "waits",
                (Some(_), _) => "moving",
                (None, _) => "replacing",
            };
            let waits = self.moves.waits(move_id);
            instances.push(DrainedInstance {
                name: record.name(),
                count: 1,
                state: state.to_owned(),
                to: record.to.to_string(),
                reason: if record.step == Step::GivenUp { format!("goes back: {waits}") } else { waits },
            });
        }
        let mut stays = 0;
        for left in &drain.left {
            let PoolKey { tenant, pool } = &left.key;
            stays += u32::from(left.remains == Remains::Stays);
            instances.push(DrainedInstance {
                name: match &left.instance {
                    Some(instance) => format!("{tenant}/{pool}/{instance}"),
                    None => format!("{tenant}/{pool}"),
                },
                count: left.count,
                state: if left.remains == Remains::Stays { "stays" } else { "waits" }.to_owned(),
                to: String::new(),
                reason: left.reason.clone(),
            });
        }
        let named: BTreeSet<String> = instances.iter().map(|one| one.name.clone()).collect();
        let residents = drain.residents.iter().flatten();
        for (one, _) in residents.filter(|(one, _)| !one.is_moving) {
            let name = format!("{}/{}/{}", one.key.tenant, one.key.pool, one.id);
            let rests = matches!(one.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
            if !named.contains(&name)
                && (!rests || !named.contains(&format!("{}/{}", one.key.tenant, one.key.pool)))
            {
                let reason = format!("it is {}, and its node removes it", one.phase);
                instances.push(DrainedInstance {
                    name,
                    count: 1,
                    state: "waits".to_owned(),
                    to: String::new(),
                    reason,
                });
            }
        }
        let left: u32 = instances.iter().map(|one| one.count).sum();
        let drained = match (&drain.residents, left) {
            (None, _) => Drained::NotHeard,
            (Some(_), 0) => Drained::Empty,
            (Some(_), _) if instances.iter().all(|one| one.state == "stays") => Drained::Blocked(stays),
            (Some(_), left) => Drained::Under(left),
        };
        instances.truncate(MAX_TOLD - MAX_GONE_TOLD);
        instances.extend(drain.gone.iter().cloned());
        Some((DrainStatus { gone: drain.count, left, instances }, drained))
    }
}

/// How a drain stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drained {
    NotHeard,
    Under(u32),
    /// All that is left stays until something is done about it.
    Blocked(u32),
    Empty,
}

/// How long a replacement has to come up.
const REPLACED_WITHIN: std::time::Duration = std::time::Duration::from_secs(600);

/// Decides for pools that are not being rolled out; of those that are everything waits.
fn drain_still(
    placer: &mut mvm_planner::fleet::Placer,
    id: &NodeId,
    still: &[Resident],
    rolled: &[Resident],
    surroundings: &Surroundings,
) -> mvm_planner::fleet::drain::DrainPlan {
    let waiting: BTreeSet<&PoolKey> = rolled.iter().map(|one| &one.key).collect();
    let mut plan = drain(placer, id, still, surroundings, &|key| waiting.contains(key));
    plan.left.extend(rolled.iter().map(|one| Left {
        key: one.key.clone(),
        instance: Some(one.id.clone()),
        count: 1,
        remains: Remains::Waits,
        reason: "its pool is being rolled out: waits until that is done".to_owned(),
    }));
    plan
}

fn platform(info: &NodeInfo) -> Platform {
    let moves = info.capabilities.iter().find(|capability| capability.name == "moves");
    let lacking = match moves {
        None => "its agent does not say whether it can".to_owned(),
        Some(_) if !info.has(mvm_proto::status::Feature::Moves) => {
            "its agent is too old: upgrade it".to_owned()
        }
        Some(moves) => moves.lacking.clone(),
    };
    Platform {
        driver: info.driver.clone(),
        accelerator: info.accelerator.clone(),
        arch: info.arch.clone(),
        kernel: info.kernel.clone(),
        cpu: info.cpu.clone(),
        lacking,
    }
}
