//! Asks nodes that are being drained what they have, and carries out the moves that placement began.
//!
//! One task looks; each move is a task of its own ([`carry`]). What is under way is in the store: after a start, or when the
//! world was read again, every move goes on from its last step.

mod carry;
mod stream;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::drain::Resident;
use mvm_proto::status::InstanceStatus;
use mvm_proto::wire::session::v1::{ListInstances, reply, request};
use mvm_proto::{NodeId, Phase, Problem, Timestamp};
use tokio::task::JoinSet;

use crate::state::State;

/// How often a node that is drained is asked what it has, and moves are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often it is looked whether there is anything to do at all.
const REST: Duration = Duration::from_secs(1);
/// How long a node may take for one page of its list.
const TELL_WITHIN: Duration = Duration::from_secs(10);
/// Instances asked of a node at once, and in all: far more than a machine runs.
const PAGE: u32 = 512;
const MAX_LISTED: usize = 16 * 1024;

/// Runs until shutdown.
pub(crate) async fn drain_task(state: Arc<State>) {
    let mut carried: JoinSet<String> = JoinSet::new();
    let mut active: BTreeSet<String> = BTreeSet::new();
    loop {
        let (nodes, moves) = {
            let world = state.world.lock();
            (world.draining(), world.moves.carried())
        };
        for id in moves {
            if active.insert(id.clone()) {
                let state = Arc::clone(&state);
                carried.spawn(async move {
                    carry::carry(&state, &id).await;
                    id
                });
            }
        }
        for node in &nodes {
            look(&state, node).await;
        }
        let rest = if nodes.is_empty() && active.is_empty() { REST } else { LOOK_EVERY };
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            Some(ended) = carried.join_next() => match ended {
                Ok(id) => drop(active.remove(&id)),
                Err(error) => {
                    tracing::error!(%error, "the task of a move panicked");
                    active.clear();
                }
            },
            () = tokio::time::sleep(rest) => {}
        }
    }
}

/// Asks a node what it has, and tells placement if it is news.
async fn look(state: &State, node: &NodeId) {
    let ended = state.world.lock().moves_ended();
    match residents(state, node).await {
        Ok(found) => {
            if state.world.lock().hear_residents(node, found, ended) {
                state.fleet.tell_news(node);
            }
        }
        Err(problem) => tracing::debug!(%node, %problem, "a node that is drained does not say what it has"),
    }
}

async fn residents(state: &State, node: &NodeId) -> Result<Vec<(Resident, Option<u32>)>, Problem> {
    let (mut found, mut after) = (Vec::new(), String::new());
    while found.len() < MAX_LISTED {
        let asked = ListInstances { limit: PAGE, after: after.clone(), ..ListInstances::default() };
        let answer = state.fleet.ask(node, request::Ask::ListInstances(asked), TELL_WITHIN).await?;
        let Some(reply::Answer::Instances(page)) = answer else { break };
        let more = page.more;
        for one in page.instances {
            after.clone_from(&one.instance_id);
            found.extend(resident(state, &one));
        }
        if !more {
            break;
        }
    }
    Ok(found)
}

/// What a node says of an instance, as far as it can be read; and its address.
fn resident(state: &State, told: &InstanceStatus) -> Option<(Resident, Option<u32>)> {
    let key = PoolKey { tenant: told.tenant_id.parse().ok()?, pool: told.pool_id.parse().ok()? };
    let phase: Phase = told.phase.parse().ok()?;
    let subnet = {
        let world = state.world.lock();
        let tenant = world.tenants.get(&key.tenant)?;
        tenant.rendered.as_ref().map(|rendered| rendered.network.ipv4_subnet)
    };
    let address = told.address.parse::<std::net::Ipv4Addr>().ok();
    let offset = subnet.zip(address).and_then(|(subnet, address)| {
        let offset = address.to_bits().checked_sub(subnet.network().to_bits())?;
        (subnet.instance_address(offset) == Some(address)).then_some(offset)
    });
    let now = crate::stored::now();
    let held = told.override_until.parse::<Timestamp>().is_ok_and(|until| until > now);
    let resident = Resident {
        key,
        id: told.instance_id.parse().ok()?,
        phase,
        has_disk: told.data_disk_mib > 0,
        claimed: told.claimed,
        held_until: if held { told.override_until.clone() } else { String::new() },
        is_moving: !told.moving.is_empty(),
    };
    Some((resident, offset))
}
