//! What changed of a node's status, and the status as a coordinator keeps it while such changes come.
//!
//! An agent sends its whole status once per session, and then [`between`] what it sent last and what is now. A coordinator
//! keeps a [`KeptStatus`], which costs what a change touches and is never larger than one whole status may be. Pure.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use prost::length_delimiter_len;

use super::fit::{MAX_CONDITIONS, MAX_POOLS, MAX_STATUS_BYTES, fit_status};
use super::{Condition, NodeStatus, PoolStatus};
use crate::Timestamp;
use crate::wire::session::v1::{PoolName, StatusDelta};

/// Tenant and pool.
pub type PoolKey = (String, String);

/// What leads from one status to the next. None where only a whole status tells it, because a condition is gone, or because
/// something changed that changes do not carry.
#[must_use]
pub fn between(before: &NodeStatus, after: &NodeStatus, sequence: u64) -> Option<StatusDelta> {
    let has = |conditions: &[Condition], kind: &str| conditions.iter().any(|one| one.r#type == kind);
    if before.conditions.iter().any(|old| !has(&after.conditions, &old.r#type))
        || before.removals != after.removals
        || before.addresses != after.addresses
    {
        return None;
    }
    let conditions = after.conditions.iter().filter(|condition| !before.conditions.contains(condition));
    let old: BTreeMap<_, _> = before.pools.iter().map(|pool| (name_of(pool), pool)).collect();
    let new: BTreeSet<_> = after.pools.iter().map(name_of).collect();
    let pools = after.pools.iter().filter(|pool| old.get(&name_of(pool)) != Some(pool));
    let gone = old.keys().filter(|name| !new.contains(*name));
    let changed = NodeStatus {
        node_id: after.node_id.clone(),
        observed_at: after.observed_at.clone(),
        accepted: after.accepted.clone(),
        converged: after.converged.clone(),
        conditions: conditions.cloned().collect(),
        pools: pools.cloned().collect(),
        usage: after.usage,
        next_reconcile_at: after.next_reconcile_at.clone(),
        last_reconcile_at: after.last_reconcile_at.clone(),
        removals: Vec::new(),
        addresses: Vec::new(),
    };
    let gone =
        gone.map(|(tenant, pool)| PoolName { tenant_id: tenant.to_string(), pool_id: pool.to_string() });
    Some(StatusDelta { sequence, changed: Some(changed), gone: gone.collect() })
}

/// Whether the later status says more than the earlier one did, the times of observation and what is used aside.
#[must_use]
pub fn is_news(before: &NodeStatus, after: &NodeStatus) -> bool {
    let changed = between(before, after, 0).filter(|delta| delta.gone.is_empty());
    let Some(changed) = changed.and_then(|delta| delta.changed) else { return true };
    let marks = |status: &NodeStatus| (status.accepted.clone(), status.converged.clone());
    !changed.pools.is_empty() || !changed.conditions.is_empty() || marks(before) != marks(after)
}

fn name_of(pool: &PoolStatus) -> (&str, &str) {
    (&pool.tenant_id, &pool.pool_id)
}

fn key_of(pool: &PoolStatus) -> PoolKey {
    (pool.tenant_id.clone(), pool.pool_id.clone())
}

/// The change can't be taken in: one before it is missing, or it would make the status larger than one may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the change does not follow what is known of the status")]
pub struct NeedsWhole;

/// What a change was about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// More than the times of observation and what is used.
    pub is_news: bool,
    /// Pools that are new, changed or gone.
    pub pools: Vec<PoolKey>,
}

/// A node's status, kept up to date with what changes of it.
#[derive(Debug, Clone)]
pub struct KeptStatus {
    status: NodeStatus,
    /// Where each pool is in the status.
    places: BTreeMap<PoolKey, usize>,
    /// The number of the last change; none: a whole status has to come first.
    sequence: Option<u64>,
    /// Encoded bytes of the conditions and of the pools.
    conditions_bytes: usize,
    pools_bytes: usize,
}

impl KeptStatus {
    /// Takes a whole status, and cuts it to what is kept.
    #[must_use]
    pub fn whole(mut status: NodeStatus, now: Timestamp) -> Self {
        fit_status(&mut status, now);
        let places = status.pools.iter().enumerate().map(|(at, pool)| (key_of(pool), at)).collect();
        let conditions_bytes = status.conditions.iter().map(bytes_of).sum();
        let pools_bytes = status.pools.iter().map(bytes_of).sum();
        Self { status, places, sequence: Some(0), conditions_bytes, pools_bytes }
    }

    #[must_use]
    pub fn get(&self) -> &NodeStatus {
        &self.status
    }

    #[must_use]
    pub fn pool(&self, key: &PoolKey) -> Option<&PoolStatus> {
        self.places.get(key).and_then(|at| self.status.pools.get(*at))
    }

    /// No change is taken in before the next whole status: the session that the numbers belong to is over.
    pub fn await_whole(&mut self) {
        self.sequence = None;
    }

    /// Takes in what changed; costs as much as is in it. When it can't be taken in, nothing is, and nothing will be
    /// before a whole status.
    pub fn apply(&mut self, delta: StatusDelta, now: Timestamp) -> Result<Touched, NeedsWhole> {
        let last = self.sequence.take().ok_or(NeedsWhole)?;
        let StatusDelta { sequence, changed, gone } = delta;
        if Some(sequence) != last.checked_add(1) {
            return Err(NeedsWhole);
        }
        let mut changed = changed.unwrap_or_default();
        fit_status(&mut changed, now);
        let (conditions, pools) =
            (std::mem::take(&mut changed.conditions), std::mem::take(&mut changed.pools));
        changed.removals.clone_from(&self.status.removals);
        changed.addresses.clone_from(&self.status.addresses);
        self.check(&changed, &conditions, &pools, &gone)?;

        let mut touched = Touched {
            is_news: !conditions.is_empty()
                || (&self.status.accepted, &self.status.converged) != (&changed.accepted, &changed.converged),
            pools: pools.iter().map(key_of).collect(),
        };
        for PoolName { tenant_id, pool_id } in gone {
            let key = (tenant_id, pool_id);
            self.remove_pool(&key);
            touched.pools.push(key);
        }
        touched.is_news |= !touched.pools.is_empty();
        for pool in pools {
            self.set_pool(pool);
        }
        for condition in conditions {
            self.set_condition(condition);
        }
        let (conditions, pools) =
            (std::mem::take(&mut self.status.conditions), std::mem::take(&mut self.status.pools));
        self.status = NodeStatus { conditions, pools, ..changed };
        self.sequence = Some(sequence);
        Ok(touched)
    }

    /// Whether the status with this change in it is one that could have come whole.
    fn check(
        &self,
        head: &NodeStatus,
        conditions: &[Condition],
        pools: &[PoolStatus],
        gone: &[PoolName],
    ) -> Result<(), NeedsWhole> {
        let gone_names = gone.iter().map(|name| (name.tenant_id.as_str(), name.pool_id.as_str()));
        let names: BTreeSet<_> = pools.iter().map(name_of).chain(gone_names.clone()).collect();
        let kinds: BTreeSet<_> = conditions.iter().map(|one| one.r#type.as_str()).collect();
        if names.len() != pools.len() + gone.len() || kinds.len() != conditions.len() {
            return Err(NeedsWhole);
        }
        let (mut count, mut bytes) = (self.status.pools.len(), self.pools_bytes + self.conditions_bytes);
        let known = |(tenant, pool): (&str, &str)| self.pool(&(tenant.to_owned(), pool.to_owned()));
        for pool in pools {
            bytes += bytes_of(pool);
            match known(name_of(pool)) {
                Some(old) => bytes -= bytes_of(old),
                None => count += 1,
            }
        }
        for old in gone_names.filter_map(known) {
            bytes -= bytes_of(old);
            count -= 1;
        }
        let mut kinds = self.status.conditions.len();
        for condition in conditions {
            bytes += bytes_of(condition);
            match self.status.conditions.iter().find(|old| old.r#type == condition.r#type) {
                Some(old) => bytes -= bytes_of(old),
                None => kinds += 1,
            }
        }
        let most = MAX_STATUS_BYTES.max(self.bytes());
        // One condition more says what was cut off.
        let fits = count <= MAX_POOLS && kinds <= MAX_CONDITIONS + 1 && head.encoded_len() + bytes <= most;
        fits.then_some(()).ok_or(NeedsWhole)
    }

    fn bytes(&self) -> usize {
        self.pools_bytes + self.conditions_bytes
    }

    fn set_pool(&mut self, pool: PoolStatus) {
        self.pools_bytes += bytes_of(&pool);
        match self.places.get(&key_of(&pool)).and_then(|at| self.status.pools.get_mut(*at)) {
            Some(old) => {
                self.pools_bytes -= bytes_of(old);
                *old = pool;
            }
            None => {
                self.places.insert(key_of(&pool), self.status.pools.len());
                self.status.pools.push(pool);
            }
        }
    }

    fn remove_pool(&mut self, key: &PoolKey) {
        let Some(at) = self.places.remove(key) else { return };
        let last = self.status.pools.len() - 1;
        let old = self.status.pools.swap_remove(at);
        self.pools_bytes -= bytes_of(&old);
        if let Some(moved) = self.status.pools.get(at)
            && let Some(place) = self.places.get_mut(&key_of(moved))
            && *place == last
        {
            *place = at;
        }
    }

    fn set_condition(&mut self, condition: Condition) {
        self.conditions_bytes += bytes_of(&condition);
        match self.status.conditions.iter_mut().find(|old| old.r#type == condition.r#type) {
            Some(old) => {
                self.conditions_bytes -= bytes_of(old);
                *old = condition;
            }
            None => self.status.conditions.push(condition),
        }
    }
}

/// In a list of a status: a key of one byte, the length, and the message.
fn bytes_of(message: &impl prost::Message) -> usize {
    let bytes = message.encoded_len();
    1 + length_delimiter_len(bytes) + bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::status::fit::MAX_TEXT_BYTES;
    use crate::status::{ConditionKind, Counts};

    fn now() -> Timestamp {
        Timestamp::from_unix_ms(0)
    }

    fn pool(name: u8, running: u32) -> PoolStatus {
        PoolStatus {
            tenant_id: "acme".to_owned(),
            pool_id: format!("p{name}"),
            actual: Some(Counts { running, ..Counts::default() }),
            ..PoolStatus::default()
        }
    }

    fn status(pools: Vec<PoolStatus>, conditions: Vec<Condition>, time: u32) -> NodeStatus {
        NodeStatus {
            node_id: "n1".to_owned(),
            observed_at: time.to_string(),
            pools,
            conditions,
            ..NodeStatus::default()
        }
    }

    fn statuses() -> impl Strategy<Value = NodeStatus> {
        let pools = proptest::collection::btree_map(0..12_u8, 0..3_u32, 0..10);
        let conditions = proptest::collection::btree_map(0..6_usize, any::<bool>(), 0..6);
        (pools, conditions, 0..5_u32).prop_map(|(pools, conditions, time)| {
            let of = |(kind, holds): (usize, bool)| {
                Condition::new(ConditionKind::ALL[kind], holds, "Why", "", now())
            };
            let pools = pools.into_iter().map(|(name, running)| pool(name, running)).collect();
            status(pools, conditions.into_iter().map(of).collect(), time)
        })
    }

    /// Lists in the order of their names: which place something has says nothing.
    fn sorted(mut status: NodeStatus) -> NodeStatus {
        status.pools.sort_by_key(key_of);
        status.conditions.sort_by(|a, b| a.r#type.cmp(&b.r#type));
        status
    }

    /// What a coordinator holds after an agent sent all of these, as an agent sends them.
    fn told(all: &[NodeStatus]) -> KeptStatus {
        let mut kept = KeptStatus::whole(all[0].clone(), now());
        let mut sequence = 0;
        for pair in all.windows(2) {
            match between(&pair[0], &pair[1], sequence + 1) {
                Some(delta) => {
                    sequence += 1;
                    kept.apply(delta, now()).unwrap();
                }
                None => {
                    sequence = 0;
                    kept = KeptStatus::whole(pair[1].clone(), now());
                }
            }
        }
        kept
    }

    proptest! {
        #[test]
        fn what_is_told_by_changes_is_what_the_whole_would_tell(all in proptest::collection::vec(statuses(), 1..12)) {
            let kept = told(&all);
            prop_assert_eq!(sorted(kept.get().clone()), sorted(all.last().unwrap().clone()));
            let rebuilt = KeptStatus::whole(kept.get().clone(), now());
            prop_assert_eq!((kept.pools_bytes, kept.conditions_bytes), (rebuilt.pools_bytes, rebuilt.conditions_bytes));
            prop_assert_eq!(kept.places, rebuilt.places);
        }

        #[test]
        fn a_change_names_the_pools_that_differ_and_no_others(before in statuses(), after in statuses()) {
            let Some(delta) = between(&before, &after, 1) else { return Ok(()) };
            let mut kept = KeptStatus::whole(before.clone(), now());
            let touched: BTreeSet<_> = kept.apply(delta, now()).unwrap().pools.into_iter().collect();
            let of = |status: &NodeStatus, key: &PoolKey| status.pools.iter().find(|pool| key_of(pool) == *key).cloned();
            let keys = before.pools.iter().chain(&after.pools).map(key_of);
            let differ: BTreeSet<_> = keys.filter(|key| of(&before, key) != of(&after, key)).collect();
            prop_assert_eq!(touched, differ);
        }

    }

    proptest! {
        // Each case is some megabytes.
        #![proptest_config(ProptestConfig::with_cases(12))]

        /// Whatever a node sends as changes, no more is kept of it than of a whole status.
        #[test]
        fn no_changes_make_more_be_kept_than_one_whole_status(
            sizes in proptest::collection::vec((0..6000_usize, 0..2000_usize, 0..80_usize), 1..8),
        ) {
            let mut kept = KeptStatus::whole(status(Vec::new(), Vec::new(), 0), now());
            let mut sequence = 0;
            for (round, (count, text, kinds)) in sizes.into_iter().enumerate() {
                let large = |at: usize| PoolStatus {
                    tenant_id: format!("{round}-{at}"),
                    deferred: vec!["x".repeat(text)],
                    ..PoolStatus::default()
                };
                let condition = |at: usize| Condition { r#type: format!("{round}-{at}"), message: "x".repeat(text), ..Condition::default() };
                let changed = status((0..count).map(large).collect(), (0..kinds).map(condition).collect(), 1);
                sequence += 1;
                if kept.apply(StatusDelta { sequence, changed: Some(changed), gone: Vec::new() }, now()).is_err() {
                    kept = KeptStatus::whole(kept.get().clone(), now());
                    sequence = 0;
                }
                prop_assert!(kept.get().encoded_len() <= MAX_STATUS_BYTES + 4 * MAX_TEXT_BYTES);
                prop_assert!(kept.get().pools.len() <= MAX_POOLS && kept.get().conditions.len() <= MAX_CONDITIONS + 1);
            }
        }
    }

    #[test]
    fn a_change_that_does_not_follow_the_last_is_not_taken_and_none_is_until_the_whole_comes() {
        let first = status(vec![pool(1, 1)], Vec::new(), 0);
        let mut kept = KeptStatus::whole(first.clone(), now());
        let next =
            |running, sequence| between(&first, &status(vec![pool(1, running)], Vec::new(), 0), sequence);
        assert_eq!(kept.apply(next(2, 2).unwrap(), now()), Err(NeedsWhole), "1 is missing");
        assert_eq!(kept.apply(next(2, 1).unwrap(), now()), Err(NeedsWhole), "something was missed");
        assert_eq!(kept.get(), &first);
        kept = KeptStatus::whole(first.clone(), now());
        assert!(kept.apply(next(2, 1).unwrap(), now()).is_ok());
        assert_eq!(kept.get().pools, [pool(1, 2)]);
        kept.await_whole();
        assert_eq!(kept.apply(next(3, 2).unwrap(), now()), Err(NeedsWhole), "numbers of an earlier session");
    }

    #[test]
    fn a_name_that_comes_twice_in_one_change_is_refused() {
        let mut kept = KeptStatus::whole(status(vec![pool(1, 1)], Vec::new(), 0), now());
        let twice = status(vec![pool(2, 1), pool(2, 2)], Vec::new(), 0);
        let delta = StatusDelta { sequence: 1, changed: Some(twice), gone: Vec::new() };
        assert_eq!(kept.apply(delta, now()), Err(NeedsWhole));
    }

    #[test]
    fn a_change_of_the_times_alone_is_no_news() {
        let first = status(vec![pool(1, 1)], Vec::new(), 0);
        let later = status(vec![pool(1, 1)], Vec::new(), 1);
        let mut kept = KeptStatus::whole(first.clone(), now());
        let touched = kept.apply(between(&first, &later, 1).unwrap(), now()).unwrap();
        assert_eq!(touched, Touched::default());
        assert_eq!(kept.get(), &later);
    }
}
