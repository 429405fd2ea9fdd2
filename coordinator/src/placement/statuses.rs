//! Writes the statuses of pools, nodes and tenants: at once what changed in kind, and rarely what only moved. Counts move with every
//! claim and every wake on any node; as long as the store has no newer ones, reads take them from the fleet
//! ([`show_live`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::{Object, kind_named};
use mvm_proto::{NodeId, Problem, TenantId};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use crate::objects::{self, StatusOf};
use crate::refuse;
use crate::state::State;
use crate::stored::now;
use crate::world::{pool_key, same_kind_of_node, same_kind_of_pool};

/// What only moved is written this often for one object at most.
const MOVED_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Pool(PoolKey),
    Node(NodeId),
    Tenant(TenantId),
}

/// When what moved was written last, and what waits for the next time.
#[derive(Debug, Default)]
pub(super) struct Statuses {
    written: BTreeMap<Subject, Instant>,
    waiting: BTreeSet<Subject>,
}

/// What became of one status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Write {
    Now,
    Moved,
    Later,
}

impl Statuses {
    /// When something that waits is to be written.
    pub(super) fn due(&self) -> Option<Instant> {
        let due = self.waiting.iter().filter_map(|subject| self.written.get(subject));
        due.min().map(|written| *written + MOVED_EVERY)
    }

    fn decide(&self, subject: &Subject, same_kind: bool, now: Instant) -> Write {
        let recent = self.written.get(subject).is_some_and(|written| now < *written + MOVED_EVERY);
        match (same_kind, recent) {
            (false, _) => Write::Now,
            (true, false) => Write::Moved,
            (true, true) => Write::Later,
        }
    }

    /// Those that changed, and those that have waited for long enough.
    fn take(&mut self, state: &State, now: Instant) -> Vec<Subject> {
        self.written
            .retain(|subject, written| self.waiting.contains(subject) || now < *written + MOVED_EVERY);
        let mut subjects: BTreeSet<Subject> = {
            let mut world = state.world.lock();
            let pools = std::mem::take(&mut world.stale_pools).into_iter().map(Subject::Pool);
            let nodes = std::mem::take(&mut world.stale_nodes).into_iter().map(Subject::Node);
            let tenants = std::mem::take(&mut world.stale_tenants).into_iter().map(Subject::Tenant);
            pools.chain(nodes).chain(tenants).collect()
        };
        let ready = |subject: &&Subject| self.decide(subject, true, now) == Write::Moved;
        subjects.extend(self.waiting.iter().filter(ready).cloned());
        subjects.into_iter().collect()
    }

    pub(super) async fn write(&mut self, state: &State) -> Result<(), Problem> {
        let instant = Instant::now();
        let subjects = self.take(state, instant);
        let kind = |name| kind_named(name).map_err(refuse::bad_request);
        let (of_pools, of_nodes, of_tenants) = (kind("pools")?, kind("nodes")?, kind("tenants")?);
        let all: Vec<_> = subjects
            .iter()
            .map(|subject| match subject {
                Subject::Pool(PoolKey { tenant, pool }) => {
                    StatusOf { kind: of_pools, tenant: Some(tenant), name: pool.as_str() }
                }
                Subject::Node(node) => StatusOf { kind: of_nodes, tenant: None, name: node.as_str() },
                Subject::Tenant(tenant) => StatusOf { kind: of_tenants, tenant: None, name: tenant.as_str() },
            })
            .collect();
        let decided: Mutex<BTreeMap<usize, Write>> = Mutex::default();
        let status = |at: usize, object: &Object| {
            let (status, same_kind) = newest(state, subjects.get(at)?, object)?;
            if status == object.status {
                return None;
            }
            let write = self.decide(&subjects[at], same_kind, instant);
            decided.lock().insert(at, write);
            (write != Write::Later).then_some(status)
        };
        let written = objects::set_statuses(&state.objects, &state.events, &all, &status).await;
        let lost: Vec<usize> = match &written {
            Ok(lost) => lost.clone(),
            Err(_) => (0..all.len()).collect(),
        };
        drop(all);
        let decided = decided.into_inner();
        for (at, subject) in subjects.into_iter().enumerate() {
            if lost.contains(&at) {
                let mut world = state.world.lock();
                match subject {
                    Subject::Pool(key) => drop(world.stale_pools.insert(key)),
                    Subject::Node(node) => drop(world.stale_nodes.insert(node)),
                    Subject::Tenant(tenant) => drop(world.stale_tenants.insert(tenant)),
                }
                continue;
            }
            self.waiting.remove(&subject);
            match decided.get(&at) {
                Some(Write::Later) => drop(self.waiting.insert(subject)),
                Some(Write::Moved | Write::Now) => drop(self.written.insert(subject, instant)),
                None => {}
            }
        }
        written.map(drop)
    }
}

/// The status of an object as the fleet has it now, and whether it is the stored one but for what moves.
fn newest(state: &State, subject: &Subject, object: &Object) -> Option<(Value, bool)> {
    let world = state.world.lock();
    match subject {
        Subject::Pool(key) => {
            let status = world.pool_status(key, object, now())?;
            let same = same_kind_of_pool(&object.status, &status);
            Some((status, same))
        }
        Subject::Node(node) => {
            let status = world.node_status(node, object, now())?;
            let same = same_kind_of_node(&object.status, &status);
            Some((status, same))
        }
        // What is said of a tenant does not move.
        Subject::Tenant(tenant) => Some((world.tenant_status(tenant, object, now())?, false)),
    }
}

/// Puts what the fleet says now in place of the status that was stored.
pub(crate) fn show_live(state: &State, object: &mut Object) {
    let subject = match object.kind.as_str() {
        "Pool" => pool_key(object).map(Subject::Pool),
        "Node" => object.metadata.name.parse().ok().map(Subject::Node),
        _ => None,
    };
    if let Some((status, _)) = subject.and_then(|subject| newest(state, &subject, object)) {
        object.status = status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_moves_is_written_once_in_a_while_and_what_changes_in_kind_at_once() {
        let subject = Subject::Node("n1".parse().unwrap());
        let mut statuses = Statuses::default();
        let begun = Instant::now();
        assert_eq!(statuses.decide(&subject, true, begun), Write::Moved);
        statuses.written.insert(subject.clone(), begun);
        let soon = begun + MOVED_EVERY / 2;
        assert_eq!(statuses.decide(&subject, true, soon), Write::Later);
        assert_eq!(statuses.decide(&subject, false, soon), Write::Now);
        assert_eq!(statuses.due(), None, "nothing waits");
        statuses.waiting.insert(subject.clone());
        assert_eq!(statuses.due(), Some(begun + MOVED_EVERY));
        assert_eq!(statuses.decide(&subject, true, begun + MOVED_EVERY), Write::Moved);
    }
}
