//! All that a pool's rollout is decided from: what nodes may be following of it, and what they said.

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::offers::Most as _;
use mvm_planner::fleet::rollout::{Grant, Named, Report, Rollout, RolloutLimits, RolloutNode, open_grant};
use mvm_proto::document::{Update, UpdateSleeping};
use mvm_proto::object::PoolUpdate;
use mvm_proto::status::Feature;
use mvm_proto::{Digest, NodeId};

use super::super::offered::PoolOffer;
use super::super::{PoolNews, World};
use super::PoolRollout;
use crate::fleet::Standing;
use crate::records::Numbers;

impl World {
    /// All that a rollout is decided from.
    pub(super) fn rollout(&self, key: &PoolKey, pool: &PoolRollout, update: &PoolUpdate) -> Rollout {
        let record = &pool.record;
        let goal = record.digest(record.goal()).unwrap_or(Digest::of(b""));
        let limits = RolloutLimits { max_unavailable: update.max_unavailable, max_surge: update.max_surge };
        let nodes = self.stored.get(key).into_iter().flatten();
        let nodes =
            nodes.map(|(id, counts)| (id.clone(), self.rollout_node(key, pool, id, counts.running, goal)));
        // Of what has no bundle now nothing can be started.
        let lacks_secrets = record.template(&goal).is_some_and(|goal| !self.has_bundle(key, &goal.secrets));
        let secrets =
            |digest: Digest| Some((digest, self.secrets_now(key, &record.template(&digest)?.secrets)?));
        Rollout {
            goal,
            settled: record.digest(record.settled).unwrap_or(goal),
            secrets: record.digests_with_secrets().into_iter().filter_map(secrets).collect(),
            limits,
            halted: update.paused || record.failed.as_ref().is_some_and(|failed| !failed.rolls_back),
            lacks_secrets,
            nodes: nodes.collect(),
        }
    }

    fn rollout_node(
        &self,
        key: &PoolKey,
        pool: &PoolRollout,
        id: &NodeId,
        placed: u32,
        goal: Digest,
    ) -> RolloutNode {
        let news = self.nodes.get(id).map(|entry| &entry.news);
        let whole = !self.can_roll(id);
        let offers = self.offered.of(id, &key.tenant).map(|offers| &offers.pools);
        let offer = self.offer_of(key, id);
        let named = pool.named.get(id).copied();
        let named = named.or_else(|| Some(Named { grant: None, ..offer?.named(goal) }));
        let has = news.and_then(|news| news.pools.get(key));
        let open = if whole {
            Some(Grant::OWN_RULE)
        } else {
            let offered = offers.into_iter().flat_map(|offers| offers.open());
            let offered =
                offered.filter_map(|(number, pools)| Some((number, pools.get(&key.pool)?.of_rollout())));
            let is_clean = has.is_none_or(|has| has.outdated == 0);
            let reported = news.and_then(|news| news.reported).filter(|_| is_clean);
            let open = open_grant(offered, reported.map(|at| (at.epoch, at.generation)));
            // What is on its way as well as what is to be offered next.
            let names_the_same = named.zip(offer).is_some_and(|(named, offer)| {
                (offer.revision, offer.secrets) == (Some(named.revision), named.secrets)
            });
            let asked = named.map(|named| self.update_of(key, id, named.grant));
            let asked = asked.map_or_else(Grant::default, |asked| asked.map_or(Grant::OWN_RULE, grant_of));
            open.map_or_else(|| (!names_the_same).then_some(asked), |open| Some(open.most(&asked)))
        };
        let since = offers.and_then(|offers| offers.current_since());
        let since = since.map(|(epoch, generation)| Numbers { epoch, generation });
        let is_offered = named.zip(offer).is_some_and(|(named, offer)| {
            offer.revision.is_none_or(|revision| revision == named.revision)
                && offer.secrets == named.secrets
                && (whole || self.update_of(key, id, named.grant).map(grant_of) == offer.update)
        });
        let mark = news.and_then(|news| if whole { news.converged } else { news.reported });
        let of_newest = is_offered && since.is_some() && mark >= since;
        RolloutNode {
            wanted: offer.map_or(placed, |offer| offer.counts.running),
            named,
            open,
            report: report(has, of_newest, whole),
            away: mark.is_none() || news.is_none_or(|news| news.standing != Standing::Present),
            whole,
        }
    }

    /// What the newest document of a node says of a pool.
    pub(in crate::world) fn offer_of(&self, key: &PoolKey, node: &NodeId) -> Option<&PoolOffer> {
        self.offered.of(node, &key.tenant)?.pools.current()?.get(&key.pool)
    }

    /// Whether a node's agent understands grants.
    pub(in crate::world) fn can_roll(&self, node: &NodeId) -> bool {
        let info = self.nodes.get(node).and_then(|entry| entry.news.info.as_ref());
        // As long as it was not heard since a start it is what its newest document took it for.
        let offers = || self.offered.get(node).is_some_and(|offers| offers.grants_anything());
        info.map_or_else(offers, |info| info.has(Feature::RolloutLimits))
    }

    /// What a node's document says of how far it may roll a pool.
    pub(in crate::world) fn update_of(
        &self,
        key: &PoolKey,
        node: &NodeId,
        grant: Option<Grant>,
    ) -> Option<Update> {
        let update = &self.pools.get(key)?.spec.update;
        let grant = grant.or((update.sleeping == UpdateSleeping::OnWake).then(Grant::default));
        let grant = grant.filter(|_| self.can_roll(node))?;
        Some(Update {
            max_unavailable: grant.unavailable,
            max_surge: grant.surge,
            replace_failed: grant.failed,
            min_ready_seconds: update.min_ready_seconds,
            sleeping: update.sleeping,
        })
    }
}

/// What a document grants, whatever its words.
pub(in crate::world) fn grant_of(update: Update) -> Grant {
    Grant { unavailable: update.max_unavailable, surge: update.max_surge, failed: update.replace_failed }
}

/// What a node said, as far as its agent tells it.
fn report(news: Option<&PoolNews>, of_newest: bool, whole: bool) -> Report {
    let Some(news) = news else { return Report { of_newest, ..Report::default() } };
    let all = news.actual.running.saturating_add(news.actual.warm).saturating_add(news.actual.sleeping);
    let (serving, outdated, current) = if whole {
        let old = if of_newest { 0 } else { all };
        (news.actual.running.saturating_sub(news.down), old, all - old)
    } else {
        (news.serving, news.outdated, all.saturating_sub(news.old.unwrap_or(0)))
    };
    Report {
        of_newest,
        serving,
        current,
        down: news.down,
        outdated,
        surge: news.surge,
        failing: Some(news.failing.clone()).filter(|why| !why.is_empty()),
    }
}
