//! Plans and explanations: what would change, and why things are where they are. From the code that does it.

use std::collections::BTreeMap;

use mvm_planner::fleet::Verdict;
use mvm_planner::fleet::diff::{Change, ChangeAction, difference};
use mvm_proto::object::{
    Declared, FleetChange, Kind, NodeChange, NodeCounts, NodeFit, ObjectChange, Outcome, PlannedStep,
    PoolExplanation, PoolUnplaced, UnplacedCounts, field_changes,
};
use mvm_proto::{NodeId, Phase, Problem, TenantId};
use serde_json::{Value, json};

use crate::objects::{self, Caller, Verb, allowed, propose};
use crate::refuse;
use crate::state::State;
use crate::world::World;

/// What declaring some objects, and deleting others, would do.
pub(crate) async fn plan(
    state: &State,
    caller: &Caller,
    declared: &[Declared],
    deleted: &[(&'static Kind, Option<TenantId>, String)],
) -> Result<FleetChange, Problem> {
    let mut change = FleetChange::default();
    let mut proposals = Vec::new();
    for object in declared {
        let (outcome, stored, proposed) = propose(&state.objects, caller, object).await?;
        let fields = match &stored {
            Some(stored) => {
                let of = |object: &mvm_proto::object::Object| json!({ "labels": object.metadata.labels, "annotations": object.metadata.annotations });
                let mut fields = field_changes("metadata", &of(stored), &of(&proposed));
                fields.extend(field_changes("spec", &stored.spec, &proposed.spec));
                fields
            }
            None => field_changes("spec", &Value::Null, &proposed.spec),
        };
        change.objects.push(ObjectChange { object: proposed.reference(), outcome, fields });
        proposals.push(proposed);
    }
    let mut forgotten = Vec::new();
    for (kind, tenant, name) in deleted {
        allowed(caller, Verb::Write, kind, tenant.as_ref(), name)?;
        let object = objects::get(&state.store, caller, kind, tenant.as_ref(), name).await?;
        let reference = object.reference();
        change.objects.push(ObjectChange {
            object: reference,
            outcome: Outcome::Deleted,
            fields: Vec::new(),
        });
        forgotten.push((kind.name, tenant.clone(), name.clone()));
    }
    if proposals.is_empty() && forgotten.is_empty() {
        return Ok(change);
    }
    // A copy of all that is known, and a while of a processor: a few at a time, and not where sessions are served.
    let _turn = state.plans.acquire().await.map_err(|_| refuse::stopping())?;
    let (mut next, now): (World, _) = (state.world.lock().clone(), state.steady.now());
    let planned = tokio::task::spawn_blocking(move || {
        let rollouts: Vec<_> =
            proposals.iter().filter_map(|proposed| next.planned_rollout(proposed)).collect();
        let before = next.fleet();
        proposals.iter().for_each(|proposed| next.declare(proposed));
        for (kind, tenant, name) in &forgotten {
            next.forget(kind, tenant.as_ref(), name);
        }
        next.placer.settle(now);
        let after = next.fleet();
        (difference(&before, &after, &next.placer.plan(), now), rollouts)
    });
    let (difference, rollouts) = planned.await.map_err(|cause| refuse::internal(&cause))?;
    let sees = |tenant: &TenantId| caller.tenant.as_ref().is_none_or(|own| own == tenant);
    let mut nodes: BTreeMap<NodeId, Vec<PlannedStep>> = BTreeMap::new();
    for step in difference.changes.into_iter().filter(|step| sees(&step.tenant)) {
        for (node, step) in steps(step) {
            nodes.entry(node).or_default().push(step);
        }
    }
    change.rollouts = rollouts;
    change.nodes = nodes.into_iter().map(|(node, steps)| NodeChange { node, steps }).collect();
    let unplaced = difference.unplaced.into_iter().filter(|unplaced| sees(&unplaced.tenant));
    change.unplaced = unplaced
        .map(|unplaced| PoolUnplaced {
            pool: format!("{}/{}", unplaced.tenant, unplaced.pool),
            unplaced: UnplacedCounts { counts: unplaced.counts.into(), reason: unplaced.reason },
        })
        .collect();
    Ok(change)
}

/// A change as the steps of the nodes that it is on.
fn steps(change: Change) -> Vec<(NodeId, PlannedStep)> {
    let Change { tenant, pool, count, action, reason } = change;
    let step = |action: &str, phase: Phase, other: Option<NodeId>| PlannedStep {
        pool: format!("{tenant}/{pool}"),
        action: action.to_owned(),
        phase: phase.to_string(),
        count,
        other,
        reason: reason.clone(),
    };
    match action {
        ChangeAction::Start { node, phase } => vec![(node, step("start", phase, None))],
        ChangeAction::Stop { node, phase } => vec![(node, step("stop", phase, None))],
        ChangeAction::Transition { node, from, to } => {
            let mut transition = step("transition", to, None);
            transition.reason = format!("from {from}: {reason}");
            vec![(node, transition)]
        }
        ChangeAction::Move { from, to, phase } => vec![
            (from.clone(), step("move_out", phase, Some(to.clone()))),
            (to, step("move_in", phase, Some(from))),
        ],
    }
}

/// Why a pool is where it is.
pub(crate) async fn explain(
    state: &State,
    caller: &Caller,
    kind: &'static Kind,
    tenant: Option<&TenantId>,
    name: &str,
) -> Result<PoolExplanation, Problem> {
    let object = objects::get(&state.store, caller, kind, tenant, name).await?;
    let key = match (kind.name, crate::world::pool_key(&object)) {
        ("Pool", Some(key)) => key,
        _ => {
            let detail = format!("placement has nothing to say of {}", kind.plural);
            return Err(Problem::new(
                422,
                "not_placed",
                detail,
                "Explain a pool: `mvm explain pool TENANT/NAME`.",
            ));
        }
    };
    let world = state.world.lock();
    let (Some(entry), Some(explanation)) = (world.pools.get(&key), world.placer.explain(&key)) else {
        return Err(refuse::being_deleted(&object.reference()));
    };
    let actual = |node: &NodeId| world.nodes.get(node).and_then(|entry| entry.news.pools.get(&key));
    let placed = explanation.placed.iter().map(|(node, counts)| NodeCounts {
        node: node.clone(),
        wanted: (*counts).into(),
        actual: actual(node).map(|news| news.actual),
    });
    let has = |node: &NodeId| {
        explanation.placed.get(node).map_or(0, |counts| counts.running + counts.warm + counts.sleeping)
    };
    // What tenants see of nodes are those that they have something on.
    let all_nodes = caller.tenant.is_none();
    let fits = explanation.nodes.iter().filter(|fit| all_nodes || has(&fit.node) > 0).map(|fit| {
        let (score, obstacle) = match &fit.verdict {
            Verdict::Suits(score) => (Some(score.total()), None),
            Verdict::Refused(obstacle) => (None, Some(obstacle.to_string())),
        };
        NodeFit { node: fit.node.clone(), has: has(&fit.node), score, obstacle }
    });
    let deferred = world
        .news_of(&key)
        .flat_map(|(node, news)| news.deferred.iter().map(move |reason| format!("{node}: {reason}")));
    let lacking = world.lacking(&key).into_iter().filter(|lacking| all_nodes || has(&lacking.node) > 0);
    let lacking = lacking.map(|lacking| format!("{}: {}", lacking.node, lacking.message));
    Ok(PoolExplanation {
        pool: format!("{}/{}", key.tenant, key.pool),
        wanted: entry.spec.counts,
        placed: placed.collect(),
        unplaced: explanation.unplaced.as_ref().map(|unplaced| UnplacedCounts {
            counts: unplaced.counts.into(),
            reason: unplaced.reason.clone(),
        }),
        quota: explanation.quota.clone(),
        nodes: fits.collect(),
        deferred: lacking.chain(deferred).collect(),
        rollout: world.rollout_detail(&key, |node| all_nodes || has(node) > 0),
    })
}
