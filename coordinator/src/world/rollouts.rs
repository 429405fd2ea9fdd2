//! Which revision of each pool the nodes' documents name: the planner decides it ([`mvm_planner::fleet::rollout`]) from what is
//! declared, what nodes may be following, and what they said. Decided anew for a pool when something of that changed, before
//! documents are made.
//!
//! What is stored is the pool's history ([`record`]); what a node was given stands in its offers. So a coordinator that starts
//! goes on from what is there.

mod record;
mod seen;
mod told;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::rollout::{Grant, Named, RolloutNode, RolloutPlan, roll};
use mvm_proto::object::{CAUSE_ANNOTATION, OnRolloutFailure, PoolSpec, PoolTemplate, RESUMED_ANNOTATION};
use mvm_proto::{Digest, NodeId, Timestamp};

use super::{PoolEntry, PoolNews, World};
use crate::render;

pub(crate) use record::RolloutRecord;
use record::{Declared, News};
pub(super) use seen::grant_of;

/// The rollouts of all pools.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rollouts {
    pools: BTreeMap<PoolKey, PoolRollout>,
    /// Pools to decide anew.
    open: BTreeSet<PoolKey>,
    /// Pools that are not done: what is heard of them opens them.
    rolling: BTreeSet<PoolKey>,
    /// Pools of which the store has another record, or one too many.
    unsaved: BTreeSet<PoolKey>,
}

#[derive(Debug, Clone)]
struct PoolRollout {
    record: RolloutRecord,
    /// What documents are to name, of the nodes where that is not just what is declared ([`RolloutRecord::is_noted`]).
    named: BTreeMap<NodeId, Named>,
    /// The furthest that it came, and since when.
    progress: Option<(u64, Timestamp)>,
}

impl Rollouts {
    /// What the store has.
    pub(crate) fn new(records: BTreeMap<PoolKey, RolloutRecord>) -> Self {
        let pools = records
            .into_iter()
            .map(|(key, record)| (key, PoolRollout { record, named: BTreeMap::new(), progress: None }));
        let pools: BTreeMap<_, _> = pools.collect();
        Self { open: pools.keys().cloned().collect(), pools, ..Self::default() }
    }

    /// Whether a revision of it goes over the fleet now.
    pub(super) fn is_rolling(&self, key: &PoolKey) -> bool {
        self.rolling.contains(key)
    }

    /// Something changed that a rollout is decided by.
    pub(super) fn open(&mut self, key: &PoolKey) {
        self.open.insert(key.clone());
    }

    /// A node said something of a pool.
    pub(super) fn heard(&mut self, key: &PoolKey, news: Option<&PoolNews>) {
        if self.rolling.contains(key) || news.is_some_and(|news| news.outdated > 0) {
            self.open(key);
        }
    }

    /// What the store has to be told, and takes: [`Rollouts::unsave`] undoes that.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(PoolKey, Option<RolloutRecord>)> {
        let unsaved = std::mem::take(&mut self.unsaved).into_iter();
        unsaved.map(|key| (key.clone(), self.pools.get(&key).map(|pool| pool.record.clone()))).collect()
    }

    pub(crate) fn unsave(&mut self, keys: impl IntoIterator<Item = PoolKey>) {
        self.unsaved.extend(keys);
    }

    /// The spec of a pool as a node's document has it, and how far the node may roll.
    pub(super) fn spec_for<'a>(
        &self,
        key: &PoolKey,
        node: &NodeId,
        spec: &'a PoolSpec,
    ) -> (Cow<'a, PoolSpec>, Option<Grant>) {
        let named = self.pools.get(key).and_then(|pool| Some((pool, pool.named.get(node)?)));
        let Some((pool, named)) = named else { return (Cow::Borrowed(spec), None) };
        let is_declared = pool.record.digest(pool.record.target) == Some(named.revision);
        let template = pool.record.template(&named.revision).filter(|_| !is_declared);
        (template.map_or(Cow::Borrowed(spec), |template| Cow::Owned(template.put_into(spec))), named.grant)
    }

    /// What the document of a node is to name of a pool, where that is not just what is declared.
    pub(super) fn named(&self, key: &PoolKey, node: &NodeId) -> Option<&Named> {
        self.pools.get(key)?.named.get(node)
    }

    /// The Secrets that a pool's revisions name, beside those that its spec does.
    pub(super) fn secrets_of(&self, key: &PoolKey) -> impl Iterator<Item = &BTreeSet<String>> {
        self.pools.get(key).into_iter().flat_map(|pool| pool.record.secrets())
    }
}

impl World {
    /// What the documents of nodes say of a pool, taken from what was offered last: after a start.
    pub(super) fn restore_rollouts(&mut self) {
        for (key, pool) in &mut self.rollouts.pools {
            let Some(goal) = pool.record.digest(pool.record.goal()) else { continue };
            for node in self.stored.nodes_of(key) {
                let offers = self.offered.of(node, &key.tenant);
                let Some(offer) = offers.and_then(|offers| offers.pools.current()?.get(&key.pool)) else {
                    continue;
                };
                let named = offer.named(goal);
                if pool.record.is_noted(&named) {
                    pool.named.insert(node.clone(), named);
                }
            }
        }
        self.rollouts.open.extend(self.pools.keys().cloned());
        // Of their revisions, which are known only now.
        self.bundles.open(self.pools.keys().cloned());
        // Of those that went while no coordinator ran.
        let gone = self.rollouts.pools.keys().filter(|key| !self.pools.contains_key(*key));
        for key in gone.cloned().collect::<Vec<_>>() {
            self.forget_rollout(&key);
        }
    }

    pub(super) fn forget_rollout(&mut self, key: &PoolKey) {
        self.rollouts.open.remove(key);
        self.rollouts.rolling.remove(key);
        if self.rollouts.pools.remove(key).is_some() {
            self.rollouts.unsaved.insert(key.clone());
        }
    }

    /// News of a node: what it has of pools that are being rolled out may be another, and whether it is there.
    pub(super) fn reopen_rollouts_on(&mut self, node: &NodeId) {
        if self.rollouts.rolling.is_empty() {
            return;
        }
        let rolling = self.stored.pools_on(node).filter(|key| self.rollouts.rolling.contains(*key));
        let rolling: Vec<_> = rolling.cloned().collect();
        self.rollouts.open.extend(rolling);
    }

    /// Decides what is open. The nodes whose documents are to say something else are touched.
    pub(super) fn decide_rollouts(&mut self, now: Timestamp) {
        for key in std::mem::take(&mut self.rollouts.open) {
            self.decide_rollout(&key, now);
        }
    }

    fn decide_rollout(&mut self, key: &PoolKey, now: Timestamp) {
        let Some(entry) = self.pools.get(key) else { return self.forget_rollout(key) };
        if entry.object.metadata.deleting_since.is_some() {
            self.rollouts.rolling.remove(key);
            return;
        }
        let update = entry.spec.update;
        let known = self.rollouts.pools.remove(key);
        let is_new = known.is_none();
        let mut pool = known.unwrap_or_else(|| self.first_rollout(key, entry, now));
        let before = (pool.record.clone(), pool.named.clone());
        self.take_in_declared(key, &mut pool, now);
        let mut plan = roll(&self.rollout(key, &pool, &update));
        if let Some((reason, message)) = self.failure(key, &mut pool, &plan, now) {
            let rolls_back = update.on_failure == OnRolloutFailure::Rollback
                && !pool.record.is_rolling_back()
                && pool.record.can_go_back();
            tracing::warn!(pool = %format!("{}/{}", key.tenant, key.pool), reason, message, rolls_back, "a rollout failed");
            pool.record.fail(reason, &message, rolls_back);
            pool.progress = None;
            plan = roll(&self.rollout(key, &pool, &update));
        }
        let is_halted = update.paused || (pool.record.failed.is_some() && !pool.record.is_rolling_back());
        let is_everywhere = plan.done && plan.away.is_empty();
        if is_everywhere
            && !is_halted
            && pool.record.failed.is_none()
            && pool.record.settled != pool.record.target
        {
            pool.record.settled = pool.record.target;
            tracing::info!(pool = %format!("{}/{}", key.tenant, key.pool), revision = pool.record.target, "a revision is rolled out");
        }
        let goal = pool.record.digest(pool.record.goal());
        pool.named = plan.nodes;
        pool.named.retain(|_, named| pool.record.is_noted(named));
        let (record, named) = &before;
        if *record != pool.record || is_new {
            self.rollouts.unsaved.insert(key.clone());
            self.stale_pools.insert(key.clone());
        }
        let goal_before = record.digest(record.goal());
        for node in self.stored.nodes_of(key) {
            let says = |named: &BTreeMap<NodeId, Named>, goal: Option<Digest>| {
                let all = |named: &Named| (Some(named.revision), named.secrets, named.grant);
                named.get(node).map_or((goal, None, None), all)
            };
            if says(named, goal_before) != says(&pool.named, goal) {
                self.touched.insert(node.clone());
                self.stale_pools.insert(key.clone());
                // Instances of another revision may be larger.
                self.undivided.insert(key.tenant.clone());
            }
        }
        let is_old = |named: &Named| Some(named.revision) != goal;
        let is_behind = pool.named.values().any(is_old) || plan.counts.outdated > 0;
        if pool.record.failed.is_none() && pool.record.target == pool.record.settled && !is_behind {
            self.rollouts.rolling.remove(key);
        } else {
            self.rollouts.rolling.insert(key.clone());
        }
        self.rollouts.pools.insert(key.clone(), pool);
    }

    /// What is declared becomes the newest revision, if it is another one. A rollout that stopped goes on if a user says so.
    fn take_in_declared(&mut self, key: &PoolKey, pool: &mut PoolRollout, now: Timestamp) {
        let changed = self.bundles.take_changed(key);
        let Some(entry) = self.pools.get(key) else { return };
        let annotations = &entry.object.metadata.annotations;
        let declared = self.declared(key, &entry.spec);
        let named: BTreeSet<Digest> = pool.named.values().map(|named| named.revision).collect();
        let is_named = |digest: &Digest| named.contains(digest);
        match (pool.record.news_of(&declared), declared.secrets) {
            (News::Revision, _) => {
                // Those that were to have the goal, and nothing in particular.
                let goal = pool.record.digest(pool.record.goal());
                for node in self.stored.nodes_of(key).filter(|_| goal != Some(declared.digest)) {
                    if let (Some(goal), Some(offer), false) =
                        (goal, self.offer_of(key, node), pool.named.contains_key(node))
                    {
                        pool.named.insert(node.clone(), Named { grant: None, ..offer.named(goal) });
                    }
                }
                let cause = annotations.get(CAUSE_ANNOTATION).map(String::as_str).unwrap_or_default();
                let is_named = |digest: &Digest| Some(*digest) == goal || is_named(digest);
                pool.record.declare(declared, cause, now, is_named);
                pool.progress = None;
            }
            (News::Values, Some(secrets)) => {
                pool.record.rotate(secrets, &changed, now, is_named);
                pool.progress = None;
            }
            _ => {}
        }
        let resumed = annotations.get(RESUMED_ANNOTATION);
        if resumed.is_some() && resumed != pool.record.resumed.as_ref() {
            pool.record.resumed = resumed.cloned();
            pool.record.insisted = pool.record.failed.take().is_some();
            pool.progress = None;
        }
        // What is paused does not have to come further.
        if entry.spec.update.paused {
            pool.progress = None;
        }
    }

    /// Why a rollout that is under way has failed, if it has.
    fn failure(
        &self,
        key: &PoolKey,
        pool: &mut PoolRollout,
        plan: &RolloutPlan,
        now: Timestamp,
    ) -> Option<(&'static str, String)> {
        let entry = self.pools.get(key)?;
        let is_under_way = match &pool.record.failed {
            Some(failed) => failed.rolls_back,
            None => pool.record.target != pool.record.settled,
        };
        let can_go_on = !entry.spec.update.paused && self.has_bundle(key, &entry.spec.secrets);
        if !can_go_on || !is_under_way || plan.done {
            pool.progress = None;
            return None;
        }
        if let Some(why) = plan.failing.as_ref().filter(|_| !pool.record.insisted) {
            return Some(("InstancesFailing", why.clone()));
        }
        let progress = plan.counts.progress;
        match pool.progress {
            Some((furthest, since)) if progress <= furthest => {
                let deadline = deadline_of(&entry.spec);
                let is_over = now.since(since) >= deadline;
                is_over.then(|| {
                    let waits = self.waits_for(key, &entry.spec, pool).unwrap_or_default();
                    let message = format!("it came no further for {} s{waits}", deadline.as_secs());
                    ("ProgressDeadlineExceeded", message)
                })
            }
            _ => {
                pool.progress = Some((progress, now));
                None
            }
        }
    }

    /// The first node that is being rolled, and what it does not do yet.
    fn waits_for(&self, key: &PoolKey, spec: &PoolSpec, pool: &PoolRollout) -> Option<String> {
        let rollout = self.rollout(key, pool, &spec.update);
        let is_waited_for = |node: &RolloutNode| {
            node.named.is_some_and(|named| rollout.is_goal(&named)) && !rollout.is_done(node)
        };
        let (id, _) = rollout.nodes.iter().find(|(_, node)| is_waited_for(node))?;
        let news = self.nodes.get(id).and_then(|entry| entry.news.pools.get(key));
        let deferred = news.and_then(|news| news.deferred.first());
        Some(deferred.map_or_else(|| format!("; waits for {id}"), |why| format!("; {id}: {why}")))
    }

    /// When something is to be decided although nothing is heard.
    pub(crate) fn rollout_due(&self, now: Timestamp) -> Option<Duration> {
        let due = self.rollouts.rolling.iter().filter_map(|key| {
            let (_, since) = self.rollouts.pools.get(key)?.progress?;
            let deadline = deadline_of(&self.pools.get(key)?.spec);
            Some(deadline.saturating_sub(now.since(since)))
        });
        due.min()
    }

    /// Opens what has come no further for too long.
    pub(super) fn open_overdue_rollouts(&mut self, now: Timestamp) {
        let is_over = |key: &&PoolKey| {
            let since = self.rollouts.pools.get(*key).and_then(|pool| pool.progress).map(|(_, since)| since);
            let spec = self.pools.get(*key).map(|entry| &entry.spec);
            since.zip(spec).is_some_and(|(since, spec)| now.since(since) >= deadline_of(spec))
        };
        let overdue: Vec<_> = self.rollouts.rolling.iter().filter(is_over).cloned().collect();
        self.rollouts.open.extend(overdue);
    }

    fn first_rollout(&self, key: &PoolKey, entry: &PoolEntry, now: Timestamp) -> PoolRollout {
        let annotations = &entry.object.metadata.annotations;
        let cause = annotations.get(CAUSE_ANNOTATION).map(String::as_str).unwrap_or_default();
        let resumed = annotations.get(RESUMED_ANNOTATION);
        let record = RolloutRecord::first(self.declared(key, &entry.spec), cause, resumed, now);
        PoolRollout { record, named: BTreeMap::new(), progress: None }
    }

    /// What a spec declares, as far as it makes a revision.
    fn declared(&self, key: &PoolKey, spec: &PoolSpec) -> Declared {
        Declared {
            digest: render::revision(&key.pool, spec),
            secrets: self.bundle_digest(key, &spec.secrets),
            template: PoolTemplate::of(spec),
        }
    }
}

/// How long a rollout may come no further. An instance has to run for its minimum before it may be replaced.
fn deadline_of(spec: &PoolSpec) -> Duration {
    let least =
        spec.policies.runtime_policy.min_running_seconds.max(spec.policies.runtime_policy.min_warm_seconds);
    let seconds = spec.update.progress_deadline_seconds.saturating_add(spec.update.min_ready_seconds);
    Duration::from_secs(seconds.saturating_add(least))
}
