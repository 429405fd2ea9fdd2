//! Which revision of a pool each node is to have, and what it may take down for it: how a new revision goes over the fleet.
//!
//! A node's document names one revision of a pool, and grants how far the node may roll to it. Nodes get the new revision in
//! turn, each with a grant; the others keep the one that they have. What is granted is counted until the node says that it has
//! nothing left to replace, so that all nodes together never pass the pool's limits, however late documents and reports are.
//! Each decision is made from what there is: nothing is remembered here.
//!
//! Values of secrets are not kept once there are others, so no node can wait with those of before: all documents name the new
//! ones at once, and what is started anywhere has them. What runs or rests is replaced in turn, as for a new revision: until it
//! is a node's turn its document grants nothing.

mod node;

use std::collections::BTreeMap;

use mvm_proto::{Digest, NodeId};
use serde::{Deserialize, Serialize};

use super::offers::Most;
pub use node::{Named, OfferedRevision, Report, RolloutNode, open_grant};

/// What a node may do to the instances of a pool that are of an older revision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Grant {
    /// Of the running count, how many may not serve.
    pub unavailable: u32,
    /// How many may run beyond it.
    pub surge: u32,
    /// What does not serve may be replaced all the same.
    pub failed: bool,
}

impl Grant {
    /// What a node does by its own rule that is granted nothing in particular: one after the other.
    pub const OWN_RULE: Self = Self { unavailable: 1, surge: 1, failed: true };
    /// Nothing is replaced but what does not serve.
    pub const FAILED_ONLY: Self = Self { unavailable: 0, surge: 0, failed: true };

    #[must_use]
    pub fn is_any(&self) -> bool {
        self.unavailable > 0 || self.surge > 0
    }
}

impl Most for Grant {
    fn most(&self, other: &Self) -> Self {
        Self {
            unavailable: self.unavailable.max(other.unavailable),
            surge: self.surge.max(other.surge),
            failed: self.failed || other.failed,
        }
    }
}

/// Over all nodes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RolloutLimits {
    pub max_unavailable: u32,
    pub max_surge: u32,
}

/// All that is decided from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rollout {
    /// The revision that all nodes are to have.
    pub goal: Digest,
    /// The last one that all nodes had.
    pub settled: Digest,
    /// The secrets of revisions as they are now; of one that is not there, none.
    pub secrets: BTreeMap<Digest, Digest>,
    pub limits: RolloutLimits,
    /// Nothing more is replaced: it is paused, or it failed.
    pub halted: bool,
    /// The secrets of the goal can't be had: nothing of it starts anywhere, whatever documents grant.
    pub lacks_secrets: bool,
    /// Those that the pool is placed on.
    pub nodes: BTreeMap<NodeId, RolloutNode>,
}

impl Rollout {
    fn secrets_of(&self, revision: &Digest) -> Option<Digest> {
        self.secrets.get(revision).copied()
    }

    fn named(&self, revision: Digest, grant: Option<Grant>) -> Named {
        Named { revision, secrets: self.secrets_of(&revision), grant }
    }

    /// Whether what is to be named is the goal, with its secrets as they are now.
    #[must_use]
    pub fn is_goal(&self, named: &Named) -> bool {
        *named == self.named(self.goal, named.grant)
    }

    /// Whether its document is to name secrets that are others by now.
    fn is_stale(&self, named: &Named) -> bool {
        named.secrets != self.secrets_of(&named.revision)
    }

    /// Whether a node has nothing but the goal, and as much of it as is wanted.
    #[must_use]
    pub fn is_done(&self, node: &RolloutNode) -> bool {
        node.named.is_some_and(|named| self.is_goal(&named))
            && node.is_spent()
            && !node.away
            && node.report.serving >= node.wanted
            && node.report.surge == 0
    }
}

/// What is decided.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RolloutPlan {
    /// What the document of each node is to name.
    pub nodes: BTreeMap<NodeId, Named>,
    pub counts: RolloutCounts,
    /// Every node that is there has nothing but the goal.
    pub done: bool,
    /// Nodes that are away and not done: what they wait for is told, and does not count as a failure.
    pub away: Vec<NodeId>,
    /// Why instances of the goal fail, on the first node where they do.
    pub failing: Option<String>,
}

/// How far it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RolloutCounts {
    pub nodes: u32,
    pub nodes_done: u32,
    pub serving: u32,
    /// Instances of the goal, in all phases.
    pub updated: u32,
    /// Of the running counts, those that do not serve, or may not by what is granted.
    pub unavailable: u32,
    /// Those that run beyond the counts, or may.
    pub surge: u32,
    /// Those that nodes have left to replace.
    pub outdated: u32,
    /// Grows as long as it comes further.
    pub progress: u64,
}

/// What all nodes together have not serving, or running beyond the counts, or may by what is granted.
#[derive(Debug, Clone, Copy)]
struct Ledger {
    limits: RolloutLimits,
    unavailable: u32,
    surge: u32,
}

impl Ledger {
    /// Whether a node may have `grant`, beside all that the others have or may. Then it is counted.
    fn take(&mut self, node: &RolloutNode, had: Grant, grant: Grant) -> bool {
        let (unavailable, surge) = (node.unavailable().max(had.unavailable), node.surge().max(had.surge));
        let others = (self.unavailable.saturating_sub(unavailable), self.surge.saturating_sub(surge));
        let fits = |more: u32, others: u32, limit: u32| more == 0 || others.saturating_add(more) <= limit;
        if !fits(grant.unavailable, others.0, self.limits.max_unavailable)
            || !fits(grant.surge, others.1, self.limits.max_surge)
        {
            return false;
        }
        self.unavailable = others.0.saturating_add(unavailable.max(grant.unavailable));
        self.surge = others.1.saturating_add(surge.max(grant.surge));
        true
    }

    /// What a node gets that has nothing. A surge instance leaves all others serving: it is taken first.
    fn begin(&mut self, node: &RolloutNode) -> Option<Grant> {
        let limits = self.limits;
        let whole = Grant {
            unavailable: limits.max_unavailable.min(1),
            surge: limits.max_surge.min(1),
            failed: true,
        };
        let surge = Grant { unavailable: 0, surge: 1, failed: true };
        let in_place = Grant { unavailable: 1, surge: 0, failed: true };
        // An older agent rolls by its own rule: with a surge instance, or without where there is no room.
        let choices: &[Grant] = if node.whole { &[whole] } else { &[surge, in_place] };
        choices.iter().copied().find(|grant| self.take(node, Grant::default(), *grant))
    }
}

/// Decides for all nodes of a pool.
#[must_use]
pub fn roll(rollout: &Rollout) -> RolloutPlan {
    let mut plan = RolloutPlan { counts: count(rollout), ..RolloutPlan::default() };
    for (id, node) in &rollout.nodes {
        plan.nodes.insert(id.clone(), stays(rollout, node));
        let is_done = rollout.is_done(node);
        let is_goal = node.named.is_some_and(|named| rollout.is_goal(&named));
        // What it said before is of what it had before.
        if is_goal && node.report.of_newest && !is_done && plan.failing.is_none() {
            plan.failing = node.report.failing.as_ref().map(|why| format!("{id}: {why}"));
        }
        if node.away && !is_done {
            plan.away.push(id.clone());
        }
    }
    let counts = plan.counts;
    plan.done = counts.nodes_done + u32::try_from(plan.away.len()).unwrap_or(u32::MAX) == counts.nodes;
    if !rollout.halted && !rollout.lacks_secrets {
        let mut ledger =
            Ledger { limits: rollout.limits, unavailable: counts.unavailable, surge: counts.surge };
        let rolling = advance(rollout, &mut plan, &mut ledger);
        spend_rest(rollout, &mut plan, &rolling, &mut ledger);
    }
    plan
}

fn count(rollout: &Rollout) -> RolloutCounts {
    let mut counts = RolloutCounts::default();
    for node in rollout.nodes.values() {
        let is_done = rollout.is_done(node);
        counts.nodes += 1;
        counts.nodes_done += u32::from(is_done);
        counts.serving = counts.serving.saturating_add(node.report.serving);
        counts.unavailable = counts.unavailable.saturating_add(node.unavailable());
        counts.surge = counts.surge.saturating_add(node.surge());
        counts.outdated = counts.outdated.saturating_add(node.report.outdated);
        if node.named.is_some_and(|named| rollout.is_goal(&named)) && node.report.of_newest {
            counts.updated = counts.updated.saturating_add(node.report.current);
            counts.progress += 1 + u64::from(node.report.current) + u64::from(is_done);
        }
    }
    counts
}

/// What a node has that nothing is decided about.
fn stays(rollout: &Rollout, node: &RolloutNode) -> Named {
    let Some(named) = node.named else {
        // It has nothing yet. A revision that is not proven is not begun with.
        let is_proven =
            rollout.goal == rollout.settled || rollout.nodes.values().all(|it| it.named.is_none());
        return rollout.named(if is_proven { rollout.goal } else { rollout.settled }, None);
    };
    if rollout.is_stale(&named) && (!node.whole || rollout.lacks_secrets) {
        // What it was granted was for what it has by now, unless it is still at it.
        let had = named.grant.filter(|_| !rollout.halted && !node.is_spent());
        return rollout.named(named.revision, Some(had.unwrap_or_default()));
    }
    // A grant that nothing is left for changes nothing, and costs no document.
    // Of a node that says nothing now it is not known whether it is one; nothing is begun with it anyway.
    let may_use = !node.away && !node.is_spent() && (named.grant.is_some() || node.report.of_newest);
    let is_halted = rollout.halted || rollout.lacks_secrets;
    let grant = if is_halted && may_use { Some(Grant::default()) } else { named.grant };
    Named { grant, ..named }
}

/// Goes on with the nodes that are being rolled, then begins with the next ones. Returns those that are being rolled now.
fn advance<'a>(rollout: &'a Rollout, plan: &mut RolloutPlan, ledger: &mut Ledger) -> Vec<&'a NodeId> {
    let (mut rolling, mut waiting) = (Vec::new(), Vec::new());
    // What is granted to all nodes that are being rolled, where the limits were lowered meanwhile.
    let (mut unavailable, mut surge) = (rollout.limits.max_unavailable, rollout.limits.max_surge);
    for (id, node) in &rollout.nodes {
        let Some(named) = node.named else { continue };
        let is_stale = rollout.is_stale(&named);
        // An older agent would replace everything at once by its own rule.
        if named.revision != rollout.goal || (is_stale && node.whole) {
            if !node.away {
                waiting.push((id, node, named));
            }
            continue;
        }
        // Of a node that is not heard, as all are after a start, what it was granted counts, and nothing of it changes.
        if (node.is_spent() || node.away) && !is_stale {
            continue;
        }
        let had = if is_stale && node.is_spent() {
            Grant::default()
        } else {
            named.grant.unwrap_or(node.open.filter(|_| node.whole).unwrap_or_default())
        };
        let kept = Grant {
            unavailable: had.unavailable.min(unavailable),
            surge: had.surge.min(surge),
            failed: true,
        };
        (unavailable, surge) = (unavailable - kept.unavailable, surge - kept.surge);
        plan.nodes.insert(id.clone(), rollout.named(rollout.goal, Some(kept)));
        rolling.push(id);
    }
    for id in &rolling {
        let Some(node) = rollout.nodes.get(*id).filter(|node| !node.away) else { continue };
        let Some(grant) = plan.nodes.get_mut(*id).and_then(|named| named.grant.as_mut()) else { continue };
        if !grant.is_any() {
            *grant = ledger.begin(node).unwrap_or(*grant);
        }
    }
    // First what still counts for what it was granted before, then what does not serve, then what was caught between two
    // revisions.
    waiting.sort_by_key(|(id, node, named)| {
        (!node.open_grant().is_any(), !node.is_broken(), named.revision == rollout.settled, *id)
    });
    for (id, node, _) in waiting {
        let grant = ledger.begin(node);
        let Some(grant) = grant.or((node.is_broken() && !node.whole).then_some(Grant::FAILED_ONLY)) else {
            continue;
        };
        plan.nodes.insert(id.clone(), rollout.named(rollout.goal, Some(grant)));
        rolling.push(id);
    }
    rolling
}

/// What no other node can use goes to those that are being rolled: one that has no room for a surge instance comes further
/// with an instance less, and the other way round.
fn spend_rest(rollout: &Rollout, plan: &mut RolloutPlan, rolling: &[&NodeId], ledger: &mut Ledger) {
    for id in rolling {
        let Some(node) = rollout.nodes.get(*id).filter(|node| !node.away && !node.whole) else { continue };
        let Some(grant) = plan.nodes.get_mut(*id).and_then(|named| named.grant.as_mut()) else { continue };
        for more in [Grant { unavailable: 1, ..*grant }, Grant { surge: 1, ..*grant }] {
            let more = more.most(grant);
            if more != *grant && ledger.take(node, *grant, more) {
                *grant = more;
            }
        }
    }
}
