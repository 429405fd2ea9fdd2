//! What is told of a pool's rollout: in its status and conditions, in explanations and plans.

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::rollout::{Named, Rollout, RolloutNode, RolloutPlan, roll};
use mvm_proto::object::{NodeRollout, PlannedRollout, RolloutDetail, RolloutPhase, RolloutStatus};
use mvm_proto::status::Condition;
use mvm_proto::{NodeId, Timestamp};

use super::record::News;
use super::{PoolRollout, World};

/// How many nodes a message names.
const NODES_SHOWN: usize = 3;

impl World {
    fn rollout_now(&self, key: &PoolKey) -> Option<(&PoolRollout, Rollout, RolloutPlan)> {
        let entry = self.pools.get(key)?;
        let pool = self.rollouts.pools.get(key)?;
        let rollout = self.rollout(key, pool, &entry.spec.update);
        let plan = roll(&rollout);
        Some((pool, rollout, plan))
    }

    /// How far a pool's revision is rolled out, and its two conditions.
    pub(crate) fn rollout_status(
        &self,
        key: &PoolKey,
        now: Timestamp,
    ) -> Option<(RolloutStatus, [Condition; 2])> {
        let (pool, rollout, plan) = self.rollout_now(key)?;
        let status = self.numbers(key, pool, &plan)?;
        let condition = |kind: &str, status: &str, reason: &str, message: String| Condition {
            r#type: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            since: now.to_string(),
        };
        let message = message(pool, &rollout, &plan, &status);
        let failed = pool.record.failed.as_ref().map_or("Failed", |failed| failed.reason.as_str());
        let (progressing, reason, rolled_out) = match status.phase {
            RolloutPhase::Done => ("True", "Done", "True"),
            RolloutPhase::Progressing if !plan.away.is_empty() && plan.done => ("True", "NodesAway", "False"),
            RolloutPhase::Progressing => ("True", "Rolling", "False"),
            RolloutPhase::Paused => ("False", "Paused", "False"),
            RolloutPhase::Failed => ("False", failed, "False"),
            RolloutPhase::RollingBack => ("True", "RollingBack", "False"),
            RolloutPhase::RolledBack => ("False", "RolledBack", "False"),
        };
        let conditions = [
            condition("Progressing", progressing, reason, message.clone()),
            condition("RolledOut", rolled_out, reason, message),
        ];
        Some((status, conditions))
    }

    fn numbers(&self, key: &PoolKey, pool: &PoolRollout, plan: &RolloutPlan) -> Option<RolloutStatus> {
        let spec = &self.pools.get(key)?.spec;
        let mut status = status(pool, plan, spec.update.paused);
        // Declared, and not looked at yet.
        if pool.record.news_of(&self.declared(key, spec)) != News::None {
            let paused = spec.update.paused;
            status.phase = if paused { RolloutPhase::Paused } else { RolloutPhase::Progressing };
        }
        Some(status)
    }

    /// All that is known of a pool's rollout. Of nodes that `sees` is not true of nothing is told.
    pub(crate) fn rollout_detail(
        &self,
        key: &PoolKey,
        sees: impl Fn(&NodeId) -> bool,
    ) -> Option<RolloutDetail> {
        let (pool, rollout, plan) = self.rollout_now(key)?;
        let status = self.numbers(key, pool, &plan)?;
        let nodes = rollout.nodes.iter().filter(|(id, _)| sees(id)).map(|(id, node)| {
            let is_done = rollout.is_done(node);
            let is_begun = is_begun(&rollout, node);
            let state = if is_done {
                "done"
            } else if is_begun {
                "rolling"
            } else {
                "waiting"
            };
            NodeRollout {
                node: id.clone(),
                revision: node.named.and_then(|named| pool.record.number(&named.revision)),
                state: state.to_owned(),
                reason: if is_done {
                    String::new()
                } else {
                    self.node_reason(key, &rollout, id, node, is_begun)
                },
            }
        });
        let message = message(pool, &rollout, &plan, &status);
        Some(RolloutDetail { nodes: nodes.collect(), history: pool.record.history(), message, status })
    }

    fn node_reason(
        &self,
        key: &PoolKey,
        rollout: &Rollout,
        id: &NodeId,
        node: &RolloutNode,
        is_begun: bool,
    ) -> String {
        if node.away {
            return "it is not connected".to_owned();
        }
        if let Some(why) = &node.report.failing {
            return why.clone();
        }
        if rollout.halted {
            return "the rollout stands still".to_owned();
        }
        if !is_begun {
            return format!(
                "its turn: at most {} of the running count may not serve, and {} may run beyond it",
                rollout.limits.max_unavailable, rollout.limits.max_surge
            );
        }
        if !node.report.of_newest {
            return "it has not told of its newest document yet".to_owned();
        }
        let news = self.nodes.get(id).and_then(|entry| entry.news.pools.get(key));
        if let Some(why) = news.and_then(|news| news.deferred.first()) {
            return why.clone();
        }
        match node.report.outdated {
            0 => format!("{} of {} serve", node.report.serving, node.wanted),
            left => format!("{left} left to replace"),
        }
    }

    /// The rollout that declaring a pool like this would begin, if it is another revision.
    pub(crate) fn planned_rollout(&self, object: &mvm_proto::object::Object) -> Option<PlannedRollout> {
        let key = super::super::pool_key(object)?;
        let spec: mvm_proto::object::PoolSpec = object.spec().ok()?;
        let pool = self.rollouts.pools.get(&key)?;
        if pool.record.news_of(&self.declared(&key, &spec)) != News::Revision {
            return None;
        }
        let placed = self.stored.get(&key)?;
        let running = placed.values().fold(0u32, |sum, counts| sum.saturating_add(counts.running));
        Some(PlannedRollout {
            pool: format!("{}/{}", key.tenant, key.pool),
            nodes: u32::try_from(placed.len()).unwrap_or(u32::MAX),
            running,
            max_unavailable: spec.update.max_unavailable,
            max_surge: spec.update.max_surge,
        })
    }
}

fn status(pool: &PoolRollout, plan: &RolloutPlan, paused: bool) -> RolloutStatus {
    let record = &pool.record;
    let is_done = plan.done && plan.away.is_empty();
    let phase = match &record.failed {
        Some(failed) if !failed.rolls_back => RolloutPhase::Failed,
        Some(_) if is_done => RolloutPhase::RolledBack,
        None if record.settled == record.target
            && (is_done || plan.counts.outdated == 0 && !is_split(pool)) =>
        {
            RolloutPhase::Done
        }
        _ if paused => RolloutPhase::Paused,
        Some(_) => RolloutPhase::RollingBack,
        None => RolloutPhase::Progressing,
    };
    RolloutStatus {
        revision: record.target,
        settled: record.settled,
        phase,
        nodes_done: plan.counts.nodes_done,
        nodes: plan.counts.nodes,
        updated: plan.counts.updated,
        serving: plan.counts.serving,
        unavailable: plan.counts.unavailable,
        surge: plan.counts.surge,
    }
}

/// Whether a node has its turn, or had it.
fn is_begun(rollout: &Rollout, node: &RolloutNode) -> bool {
    let is_goal = |named: &Named| rollout.is_goal(named);
    node.named.filter(is_goal).is_some_and(|named| named.grant.is_none_or(|grant| grant.is_any()))
}

/// Whether documents name more than one revision.
fn is_split(pool: &PoolRollout) -> bool {
    let goal = pool.record.digest(pool.record.goal());
    pool.named.values().any(|named| Some(named.revision) != goal)
}

fn message(pool: &PoolRollout, rollout: &Rollout, plan: &RolloutPlan, status: &RolloutStatus) -> String {
    let RolloutStatus { revision, settled, nodes_done, nodes, .. } = status;
    let failed = || pool.record.failed.as_ref().map_or_else(String::new, |failed| failed.message.clone());
    let away = || {
        let shown: Vec<_> = plan.away.iter().take(NODES_SHOWN).map(NodeId::as_str).collect();
        format!("not connected: {}", shown.join(", "))
    };
    match status.phase {
        RolloutPhase::Done => format!("revision {revision} is rolled out"),
        RolloutPhase::Paused => {
            format!("revision {revision} is on {nodes_done} of {nodes} nodes; a user paused it")
        }
        RolloutPhase::Failed if pool.record.can_go_back() => format!(
            "revision {revision} stands still: {}. Go back with `mvm rollout undo`, declare another one, or try on with `mvm rollout resume`",
            failed()
        ),
        RolloutPhase::Failed => format!(
            "revision {revision} stands still: {}. The values of secrets before it are not kept: set others with `mvm secret set`, or try on with `mvm rollout resume`",
            failed()
        ),
        RolloutPhase::RollingBack => {
            format!(
                "back to revision {settled} on {nodes_done} of {nodes} nodes, because of {revision}: {}",
                failed()
            )
        }
        RolloutPhase::RolledBack => {
            format!("back at revision {settled}, because of {revision}: {}", failed())
        }
        RolloutPhase::Progressing if plan.done && !plan.away.is_empty() => away(),
        RolloutPhase::Progressing => {
            let waiting =
                rollout.nodes.values().filter(|node| !rollout.is_done(node) && !is_begun(rollout, node));
            format!(
                "revision {revision} is on {nodes_done} of {nodes} nodes; {} have not begun",
                waiting.count()
            )
        }
    }
}
