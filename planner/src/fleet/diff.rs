//! What changes between two placements: for people who are asked to agree to it, and for programs as JSON.
//!
//! Counts move between nodes, not instances: whether an instance is taken along or a new one is started elsewhere is
//! decided when the plan is carried out.

mod reason;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Phase, PoolId, TenantId, Timestamp};
use serde::Serialize;

use super::state::{PHASES, count, count_mut};
use super::{Fleet, FleetPlan, Placed, PoolKey};
use reason::Reasons;

/// All that changes, in the order of tenants, pools and nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub changes: Vec<Change>,
    /// What has no place after it.
    pub unplaced: Vec<UnplacedPool>,
}

/// The same change of one or more instances of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub count: u32,
    #[serde(flatten)]
    pub action: ChangeAction,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum ChangeAction {
    /// More in this phase on a node.
    Start { node: NodeId, phase: Phase },
    /// Fewer in this phase on a node.
    Stop { node: NodeId, phase: Phase },
    /// From one phase to another, where they are.
    Transition { node: NodeId, from: Phase, to: Phase },
    /// Fewer on one node, and as many more on another.
    Move { from: NodeId, to: NodeId, phase: Phase },
}

/// What of a pool has no place, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnplacedPool {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub counts: DesiredCounts,
    pub reason: String,
}

/// What changes from the placements of one fleet to a plan for another, and why.
#[must_use]
pub fn difference(before: &Fleet, after: &Fleet, plan: &FleetPlan, now: Timestamp) -> Difference {
    let keys: BTreeSet<&PoolKey> = before.placed.keys().chain(plan.placed.keys()).collect();
    let nothing = Placed::new();
    let mut changes = Vec::new();
    for key in keys {
        let had = before.placed.get(key).unwrap_or(&nothing);
        let has = plan.placed.get(key).unwrap_or(&nothing);
        if had != has {
            let reasons = Reasons { before, after, now, key, had, has };
            changes.extend(pool_changes(key, had, has, &reasons));
        }
    }
    let unplaced = plan.unplaced.iter().map(|(key, unplaced)| UnplacedPool {
        tenant: key.tenant.clone(),
        pool: key.pool.clone(),
        counts: unplaced.counts,
        reason: unplaced.reason.clone(),
    });
    Difference { changes, unplaced: unplaced.collect() }
}

/// By how much a node has more or fewer in each phase, until it is told.
type Shifts = BTreeMap<NodeId, [i64; PHASES.len()]>;

fn pool_changes(key: &PoolKey, had: &Placed, has: &Placed, reasons: &Reasons<'_>) -> Vec<Change> {
    let mut shifts = Shifts::new();
    for (placed, sign) in [(had, -1), (has, 1)] {
        for (id, counts) in placed {
            let shift = shifts.entry(id.clone()).or_default();
            PHASES.iter().zip(shift).for_each(|(phase, by)| *by += sign * i64::from(count(counts, *phase)));
        }
    }
    let mut actions = transitions(&mut shifts);
    actions.extend(moves(&mut shifts));
    for (node, shift) in &shifts {
        for (phase, by) in PHASES.into_iter().zip(*shift) {
            let node = node.clone();
            let action =
                if by < 0 { ChangeAction::Stop { node, phase } } else { ChangeAction::Start { node, phase } };
            actions.push((action, by.unsigned_abs()));
        }
    }
    let change = |(action, number): (ChangeAction, u64)| Change {
        tenant: key.tenant.clone(),
        pool: key.pool.clone(),
        count: u32::try_from(number).unwrap_or(u32::MAX),
        reason: reasons.of(&action),
        action,
    };
    actions.into_iter().filter(|(_, number)| *number > 0).map(change).collect()
}

/// What a node has fewer in one phase and more in another.
fn transitions(shifts: &mut Shifts) -> Vec<(ChangeAction, u64)> {
    let mut actions = Vec::new();
    for (node, shift) in shifts {
        for (from_at, from) in PHASES.into_iter().enumerate() {
            for (to_at, to) in PHASES.into_iter().enumerate() {
                let number = shift[from_at].min(0).unsigned_abs().min(shift[to_at].max(0).unsigned_abs());
                shift[from_at] = shift[from_at].saturating_add_unsigned(number);
                shift[to_at] = shift[to_at].saturating_sub_unsigned(number);
                actions.push((ChangeAction::Transition { node: node.clone(), from, to }, number));
            }
        }
    }
    actions
}

/// What one node has fewer and another has more of.
fn moves(shifts: &mut Shifts) -> Vec<(ChangeAction, u64)> {
    let mut actions = Vec::new();
    for (at, phase) in PHASES.into_iter().enumerate() {
        let with = |sign: i64| -> Vec<NodeId> {
            shifts.iter().filter(|(_, shift)| shift[at].signum() == sign).map(|(id, _)| id.clone()).collect()
        };
        let mut gaining = with(1).into_iter().peekable();
        for from in with(-1) {
            while let Some(to) = gaining.peek().cloned() {
                let of = |id: &NodeId| shifts.get(id).map_or(0, |shift| shift[at].unsigned_abs());
                let number = of(&from).min(of(&to));
                if let Some(shift) = shifts.get_mut(&from) {
                    shift[at] = shift[at].saturating_add_unsigned(number);
                }
                let filled = shifts.get_mut(&to).is_none_or(|shift| {
                    shift[at] = shift[at].saturating_sub_unsigned(number);
                    shift[at] == 0
                });
                actions.push((ChangeAction::Move { from: from.clone(), to, phase }, number));
                if filled {
                    gaining.next();
                }
                if shifts.get(&from).is_none_or(|shift| shift[at] == 0) {
                    break;
                }
            }
        }
    }
    actions
}

impl Difference {
    /// The placements after it, given those before it.
    #[must_use]
    pub fn apply(&self, before: &BTreeMap<PoolKey, Placed>) -> BTreeMap<PoolKey, Placed> {
        let mut placed = before.clone();
        for change in &self.changes {
            let key = PoolKey { tenant: change.tenant.clone(), pool: change.pool.clone() };
            let pool = placed.entry(key).or_default();
            let mut less = |node: &NodeId, phase| {
                let counts = count_mut(pool.entry(node.clone()).or_default(), phase);
                *counts = counts.saturating_sub(change.count);
            };
            match &change.action {
                ChangeAction::Stop { node, phase } => less(node, *phase),
                ChangeAction::Transition { node, from, .. } => less(node, *from),
                ChangeAction::Move { from, phase, .. } => less(from, *phase),
                ChangeAction::Start { .. } => {}
            }
            let mut more = |node: &NodeId, phase| {
                let counts = count_mut(pool.entry(node.clone()).or_default(), phase);
                *counts = counts.saturating_add(change.count);
            };
            match &change.action {
                ChangeAction::Start { node, phase } => more(node, *phase),
                ChangeAction::Transition { node, to, .. } => more(node, *to),
                ChangeAction::Move { to, phase, .. } => more(to, *phase),
                ChangeAction::Stop { .. } => {}
            }
            pool.retain(|_, counts| *counts != DesiredCounts::default());
        }
        placed.retain(|_, pool| !pool.is_empty());
        placed
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.changes.is_empty() && self.unplaced.is_empty() {
            return f.write_str("nothing changes\n");
        }
        self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))?;
        self.unplaced.iter().try_for_each(|unplaced| writeln!(f, "{unplaced}"))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tenant, pool, count, action, reason } = self;
        write!(f, "{tenant}/{pool}: ")?;
        match action {
            ChangeAction::Start { node, phase } => write!(f, "{node}: {count} more {phase}")?,
            ChangeAction::Stop { node, phase } => write!(f, "{node}: {count} fewer {phase}")?,
            ChangeAction::Transition { node, from, to } => write!(f, "{node}: {count} from {from} to {to}")?,
            ChangeAction::Move { from, to, phase } => write!(f, "{count} {phase} move from {from} to {to}")?,
        }
        write!(f, " ({reason})")
    }
}

impl fmt::Display for UnplacedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tenant, pool, counts: DesiredCounts { running, warm, sleeping }, reason } = self;
        write!(
            f,
            "{tenant}/{pool}: no place for {running} running, {warm} warm, {sleeping} sleeping ({reason})"
        )
    }
}
