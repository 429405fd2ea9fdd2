//! Why a placement changes, in words.

use std::collections::BTreeMap;

use mvm_proto::document::{DesiredCounts, Resources};
use mvm_proto::placement::Taint;
use mvm_proto::{NodeId, Phase, Timestamp};

use super::ChangeAction;
use crate::fleet::filter::drives_out;
use crate::fleet::state::count;
use crate::fleet::{Fleet, Placed, PoolKey};

/// What the reasons for a pool's changes are taken from.
pub(super) struct Reasons<'a> {
    pub(super) before: &'a Fleet,
    pub(super) after: &'a Fleet,
    pub(super) now: Timestamp,
    pub(super) key: &'a PoolKey,
    pub(super) had: &'a Placed,
    pub(super) has: &'a Placed,
}

impl Reasons<'_> {
    pub(super) fn of(&self, action: &ChangeAction) -> String {
        match action {
            ChangeAction::Start { phase, .. } => self.more(*phase),
            ChangeAction::Stop { node, phase } => self.fewer(node, *phase),
            ChangeAction::Move { from, phase, .. } => self.fewer(from, *phase),
            ChangeAction::Transition { from, to, .. } => {
                format!("the pool's counts changed: {}, {}", self.wanted(*from), self.wanted(*to))
            }
        }
    }

    /// How many the pool wanted and wants.
    fn wanted(&self, phase: Phase) -> String {
        let (before, after) = self.counts(phase);
        if before == after {
            format!("{after} {phase} as before")
        } else {
            format!("{before} to {after} {phase}")
        }
    }

    fn counts(&self, phase: Phase) -> (u32, u32) {
        let of = |fleet: &Fleet| fleet.pools.get(self.key).map_or(0, |pool| count(&pool.counts, phase));
        (of(self.before), of(self.after))
    }

    fn more(&self, phase: Phase) -> String {
        let (before, after) = self.counts(phase);
        if !self.before.pools.contains_key(self.key) {
            format!("the pool is new: it wants {after} {phase}")
        } else if before < after {
            format!("pool grew from {before} to {after} {phase}")
        } else if total(self.had, phase) < before {
            format!("it had no place for all {before} {phase} before")
        } else {
            format!("the pool wants {after} {phase}, and others lost their place")
        }
    }

    fn fewer(&self, id: &NodeId, phase: Phase) -> String {
        let (before, after) = self.counts(phase);
        let Some(pool) = self.after.pools.get(self.key) else { return "the pool was removed".to_owned() };
        let Some(node) = self.after.nodes.get(id) else { return format!("{id} was removed") };
        if let Some(since) = node.away_since.filter(|since| self.after.is_lost(*since, self.now)) {
            return format!("{id} is away since {since}");
        }
        if let Some(taint) = node.taints.iter().find(|taint| drives_out(&pool.placement, taint)) {
            let Taint { key, value, .. } = taint;
            let value = if value.is_empty() { String::new() } else { format!("={value}") };
            return format!("{id} is drained: it has the taint {key}{value}");
        }
        if after < before && total(self.has, phase) < total(self.had, phase) {
            return format!("pool shrank from {before} to {after} {phase}");
        }
        if self.before.pools.get(self.key).is_some_and(|before| before.resources != pool.resources) {
            let Resources { vcpus, mem_mib, data_disk_mib } = pool.resources;
            return format!(
                "an instance now needs {vcpus} vcpus, {mem_mib} MiB of memory and {data_disk_mib} MiB of disk"
            );
        }
        if total(self.had, phase) > after {
            return format!("the pool wants {after} {phase}, and {} were placed", total(self.had, phase));
        }
        format!("{id} has no room for all that was placed on it")
    }
}

fn total(placed: &Placed, phase: Phase) -> u32 {
    let of = |counts: &DesiredCounts| count(counts, phase);
    BTreeMap::values(placed).map(of).fold(0, u32::saturating_add)
}
