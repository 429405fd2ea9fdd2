//! Starts the copies of guest sessions that are due. [`crate::persist`] decides which are due and makes the copy.
//!
//! Copies run in a fixed number of slots. A tenant gets at most half of them. Among the waiting sessions the tenant with the
//! fewest running copies comes first, then the session that has waited longest: a tenant whose guests make their copies slow
//! delays no other tenant's. Each copy has a deadline ([`crate::persist::SessionLimits::copy_within`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::{InstanceId, TenantId};
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::instance::records::Records;
use crate::persist::{Due, Sessions};

/// The shortest interval that a document can ask for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// One slow store must not hold all sessions up, nor all of them the machine.
const AT_ONCE: usize = 8;

/// One tenant must not hold up the others.
const AT_ONCE_PER_TENANT: usize = AT_ONCE / 2;

/// Copies under way: whose, by the id of the task that makes each.
type Running = BTreeMap<Id, (TenantId, InstanceId)>;

/// Runs until `stop`. A copy under way is cut off then: the store has the session as it was.
pub(crate) async fn session_copy_task(
    sessions: Arc<Sessions>,
    records: Arc<Records>,
    stop: CancellationToken,
) {
    let mut copies: JoinSet<()> = JoinSet::new();
    let mut running = Running::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
            Some(done) = copies.join_next_with_id() => {
                let id = match done {
                    Ok((id, ())) => id,
                    Err(error) => {
                        tracing::error!(%error, "copying a session panicked");
                        error.id()
                    }
                };
                running.remove(&id);
            }
        }
        let due = sessions.due(&records);
        while let Some(Due { tenant, instance, .. }) = next(&due, &running) {
            // One that was removed meanwhile is not due at the next look.
            let Some(record) = records.get(instance) else { break };
            let (sessions, records) = (Arc::clone(&sessions), Arc::clone(&records));
            let copy = copies.spawn(async move { sessions.copy_or_renew(&record, &records).await });
            running.insert(copy.id(), (tenant.clone(), instance.clone()));
        }
    }
}

/// The session that is copied next; absent: there is no slot for any of them.
fn next<'a>(due: &'a [Due], running: &Running) -> Option<&'a Due> {
    if running.len() >= AT_ONCE {
        return None;
    }
    let busy: BTreeSet<&InstanceId> = running.values().map(|(_, instance)| instance).collect();
    let slots = |tenant: &TenantId| running.values().filter(|(other, _)| other == tenant).count();
    let waiting = due.iter().filter(|due| !busy.contains(&due.instance));
    let waiting = waiting.map(|due| (slots(&due.tenant), due));
    let may_begin = waiting.filter(|(slots, _)| *slots < AT_ONCE_PER_TENANT);
    may_begin.min_by_key(|(slots, due)| (*slots, due.since)).map(|(_, due)| due)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn due(tenant: &str, bits: u32, since: Option<Instant>) -> Due {
        Due { since, tenant: tenant.parse().unwrap(), instance: InstanceId::from_bits(bits) }
    }

    #[tokio::test]
    async fn a_tenant_has_half_of_the_slots_and_the_oldest_waits_least() {
        let at = |seconds| Some(Instant::now() + Duration::from_secs(seconds));
        let (early, late) = (at(1), at(2));
        let mut waiting: Vec<Due> = (0..20).map(|bits| due("greedy", bits, None)).collect();
        waiting.push(due("late", 100, late));
        waiting.push(due("early", 101, early));
        let mut order = Vec::new();
        let mut running = Running::new();
        let mut tasks = JoinSet::new();
        while let Some(Due { tenant, instance, .. }) = next(&waiting, &running) {
            order.push(tenant.to_string());
            running.insert(tasks.spawn(async {}).id(), (tenant.clone(), instance.clone()));
        }
        // Each tenant once, the one that waited longest first; then the one that has more to copy, up to a half.
        assert_eq!(order, ["greedy", "early", "late", "greedy", "greedy", "greedy"]);
    }
}
