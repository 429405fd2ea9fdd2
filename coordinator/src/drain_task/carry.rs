//! One move from its first step to its last.
//!
//! Every step is asked of a node until it answers, then stored, and only then the next one begins; asking twice is asking once.
//! Until the source is told to remove the instance a move may be given up: it is then where it was. From there on it is
//! carried to its end, whatever it takes.

use std::time::Duration;

use mvm_planner::fleet::drain::Refused;
use mvm_proto::moves::MoveStep;
use mvm_proto::wire::session::v1::{MoveInstance, Moved, reply, request};
use mvm_proto::{Digest, NodeId, Problem};
use tokio::time::Instant;

use super::stream;
use crate::placement::store_move;
use crate::state::State;
use crate::world::{MoveRecord, Step};

/// Between two looks at what a move waits for.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// How long one step may wait for nodes, documents and images before the move is given up.
const STEP_WITHIN: Duration = Duration::from_secs(120);
/// Streams that may fail before the move is given up.
const MAX_TRIES: u32 = 3;
/// How long a node may take for one order: it waits for what is under way on the instance.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// How long putting an instance to sleep, or waking it, may take: a guest drains first.
const ACT_WITHIN: Duration = Duration::from_secs(180);

/// What trying again does not change.
const LASTING: [&str; 14] = [
    "immovable",
    "other_driver",
    "other_network",
    "image_missing",
    "image_unusable",
    "snapshot_unusable",
    "key_missing",
    "address_taken",
    "instance_exists",
    "unmanaged_pool",
    "claimed",
    "unknown_instance",
    "unknown_request",
    "not_sleeping",
];

/// Why a step was not taken.
enum Hindered {
    /// It may be later.
    Later(String),
    /// It may be later, and was tried often enough for now.
    Enough(String),
    /// It won't be.
    Never(String),
    /// The move is over.
    Over,
}

impl From<Problem> for Hindered {
    fn from(problem: Problem) -> Self {
        let lasting = LASTING.contains(&problem.code.as_str());
        if lasting { Self::Never(problem.detail) } else { Self::Later(problem.detail) }
    }
}

/// Carries a move as far as it goes. Returns when it is over, or when this process can't go on with it.
pub(super) async fn carry(state: &State, id: &str) {
    let (mut last, mut since, mut tries) = (None, Instant::now(), 0);
    loop {
        let Some(record) = state.world.lock().moves.stored(id).cloned() else { return };
        if last != Some(record.step) {
            (last, since, tries) = (Some(record.step), Instant::now(), 0);
        }
        let taken = tokio::select! {
            taken = step(state, id, &record, &mut tries) => taken,
            () = state.shutdown.cancelled() => return,
        };
        let can_stop = record.step < Step::Releasing;
        match taken {
            Ok(()) => continue,
            Err(Hindered::Over) => return,
            Err(Hindered::Never(reason)) if can_stop => {
                give_up(state, id, &record, Refused { reason, lasting: true }).await;
            }
            Err(Hindered::Enough(reason)) if can_stop => {
                give_up(state, id, &record, Refused { reason, lasting: false }).await;
            }
            Err(Hindered::Later(reason)) if can_stop && since.elapsed() > STEP_WITHIN => {
                give_up(state, id, &record, Refused { reason, lasting: false }).await;
            }
            Err(Hindered::Later(reason) | Hindered::Enough(reason) | Hindered::Never(reason)) => {
                let mut world = state.world.lock();
                if world.moves.wait_for(id, reason) {
                    world.stale_nodes.insert(record.from.clone());
                }
                state.fleet.tell_news(&record.from);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(AGAIN_AFTER) => {}
            () = state.shutdown.cancelled() => return,
        }
    }
}

/// Takes a move back: placement does it, in one transaction with where the instance is placed then.
async fn give_up(state: &State, id: &str, record: &MoveRecord, refused: Refused) {
    let reason = &refused.reason;
    tracing::info!(instance = record.name(), from = %record.from, to = %record.to, reason, "a move is given up");
    loop {
        {
            let mut world = state.world.lock();
            // Until that is stored: then it is of another step.
            let Some(now) = world.moves.find(id) else { return };
            if now.step != record.step && world.moves.stored(id).is_some() {
                return;
            }
            if now.step == record.step {
                // Again, because a world that was read anew knows nothing of it.
                world.give_up_move(id, refused.clone());
            }
        }
        state.fleet.tell_news(&record.from);
        tokio::select! {
            () = tokio::time::sleep(AGAIN_AFTER) => {}
            () = state.shutdown.cancelled() => return,
        }
    }
}

async fn step(state: &State, id: &str, record: &MoveRecord, tries: &mut u32) -> Result<(), Hindered> {
    let is_declared = {
        let world = state.world.lock();
        let pool = world.pools.get(&record.key());
        pool.is_some_and(|pool| pool.object.metadata.deleting_since.is_none())
    };
    if !is_declared && record.step < Step::Releasing {
        return Err(Hindered::Never("its pool is being deleted".to_owned()));
    }
    match record.step {
        Step::Planned => depart(state, id, record).await,
        Step::Departed => bring(state, id, record, tries).await,
        Step::Received => {
            // A source that was removed from the cluster has nothing any more that could run.
            let both = [&record.from, &record.to];
            let ends = if is_there(state, &record.from) { &both[..] } else { &both[1..] };
            ready(state, record, ends).await?;
            take(state, id, record, Step::Releasing, None).await
        }
        Step::Releasing => {
            if is_there(state, &record.from) {
                order(state, id, record, MoveStep::Release, &[], None).await?;
            }
            take(state, id, record, Step::Released, None).await
        }
        Step::Released => activate(state, id, record).await,
        Step::GivenUp => undo(state, id, record).await,
    }
}

/// Stores that a move is this far, and lets documents follow.
async fn take(
    state: &State,
    id: &str,
    record: &MoveRecord,
    step: Step,
    snapshot: Option<Digest>,
) -> Result<(), Hindered> {
    let mut next = MoveRecord { step, ..record.clone() };
    if let (Some(moved), Some(snapshot)) = (&mut next.instance, snapshot) {
        moved.snapshot = Some(snapshot);
    }
    store_move(state, id, Some(&next)).await?;
    state.world.lock().step_taken(id, step, snapshot);
    state.fleet.tell_news(&record.from);
    Ok(())
}

/// The target has the pool's image; then the instance sleeps, and leaves its counts.
async fn depart(state: &State, id: &str, record: &MoveRecord) -> Result<(), Hindered> {
    ready(state, record, &[&record.to]).await?;
    let has_image = {
        let world = state.world.lock();
        let news = world.nodes.get(&record.to).and_then(|entry| entry.news.pools.get(&record.key()));
        news.is_some_and(|news| news.has_image)
    };
    if !has_image {
        return Err(Hindered::Later(format!("{} does not have its image yet", record.to)));
    }
    let departed = order(state, id, record, MoveStep::Depart, &[], None).await?;
    let snapshot = departed.snapshot.parse().map_err(|_| Hindered::Later("it has no snapshot".to_owned()))?;
    take(state, id, record, Step::Departed, Some(snapshot)).await
}

/// Brings the bytes, by tickets that are good for this try.
async fn bring(state: &State, id: &str, record: &MoveRecord, tries: &mut u32) -> Result<(), Hindered> {
    ready(state, record, &[&record.from, &record.to]).await?;
    let lacking = state.world.lock().lacking(&record.key());
    if let Some(lacking) = lacking.into_iter().find(|lacking| lacking.node == record.to) {
        return Err(Hindered::Later(format!("{}: {}", record.to, lacking.message)));
    }
    let (export, import) = (stream::ticket(), stream::ticket());
    let departed = order(state, id, record, MoveStep::Depart, &export, None).await?;
    let snapshot = Some(departed.snapshot.as_str());
    let expected = order(state, id, record, MoveStep::Expect, &import, snapshot).await?;
    if !expected.is_here {
        *tries += 1;
        if let Err(problem) = stream::relay(state, record, &export, &import).await {
            return Err(match Hindered::from(problem) {
                Hindered::Later(reason) if *tries >= MAX_TRIES => Hindered::Enough(reason),
                hindered => hindered,
            });
        }
    }
    take(state, id, record, Step::Received, None).await
}

/// The source has let go of it: it begins to be an instance of the target.
async fn activate(state: &State, id: &str, record: &MoveRecord) -> Result<(), Hindered> {
    // A target that was removed meanwhile took it along.
    if is_there(state, &record.to) {
        ready(state, record, &[&record.to]).await?;
        match order(state, id, record, MoveStep::Activate, &[], None).await {
            // It was activated before, and destroyed since.
            Err(Hindered::Never(_)) => return over(state, id, record).await,
            activated => activated.map(drop)?,
        }
        if !has_address(state, record) {
            return Err(Hindered::Later(format!("{} has not said yet which address it has", record.to)));
        }
    }
    over(state, id, record).await
}

/// Whether the target said that it has the instance's address: from then on that is known without the move.
fn has_address(state: &State, record: &MoveRecord) -> bool {
    let Some(offset) = record.instance.as_ref().and_then(|moved| moved.offset) else { return true };
    let world = state.world.lock();
    let told = world.nodes.get(&record.to).and_then(|entry| entry.news.addresses.get(&record.tenant));
    told.is_some_and(|told| told.has(offset))
}

/// What was begun is taken back: at the source first, so that the instance can be used again.
async fn undo(state: &State, id: &str, record: &MoveRecord) -> Result<(), Hindered> {
    if is_there(state, &record.from) {
        match order(state, id, record, MoveStep::Stay, &[], None).await {
            // Never: it was destroyed meanwhile.
            Ok(_) | Err(Hindered::Never(_)) => {}
            Err(later) => return Err(later),
        }
    }
    if is_there(state, &record.to) {
        match order(state, id, record, MoveStep::Discard, &[], None).await {
            Ok(_) | Err(Hindered::Never(_)) => {}
            Err(later) => return Err(later),
        }
    }
    over(state, id, record).await
}

async fn over(state: &State, id: &str, record: &MoveRecord) -> Result<(), Hindered> {
    store_move(state, id, None).await?;
    state.world.lock().move_over(id);
    state.fleet.tell_news(&record.from);
    Err(Hindered::Over)
}

/// Whether a node belongs to the cluster.
fn is_there(state: &State, node: &NodeId) -> bool {
    state.world.lock().nodes.get(node).is_some_and(|entry| entry.declared.is_some())
}

/// Whether nodes follow the documents that what was decided so far makes.
async fn ready(state: &State, record: &MoveRecord, nodes: &[&NodeId]) -> Result<(), Hindered> {
    for node in nodes {
        if !is_there(state, node) {
            return Err(Hindered::Never(format!("{node} is no node of the cluster any more")));
        }
        let (accepted, pending) = {
            let world = state.world.lock();
            let accepted = world.nodes.get(*node).and_then(|entry| entry.news.accepted);
            (accepted, world.is_pending(node, &record.tenant))
        };
        let assigned = state.documents.assigned(node).await.map_err(Problem::from)?;
        let follows = assigned.is_some_and(|assigned| accepted == Some(assigned.numbers));
        if pending || !follows {
            return Err(Hindered::Later(format!("{node} does not follow its newest document yet")));
        }
    }
    Ok(())
}

/// One order to one end of the move.
async fn order(
    state: &State,
    id: &str,
    record: &MoveRecord,
    step: MoveStep,
    ticket: &[u8],
    snapshot: Option<&str>,
) -> Result<Moved, Hindered> {
    let Some(moved) = &record.instance else { return Err(Hindered::Over) };
    let at_source = matches!(step, MoveStep::Depart | MoveStep::Stay | MoveStep::Release);
    let (node, peer) = if at_source { (&record.from, &record.to) } else { (&record.to, &record.from) };
    let ask = request::Ask::MoveInstance(MoveInstance {
        tenant_id: record.tenant.to_string(),
        pool_id: record.pool.to_string(),
        instance_id: moved.id.to_string(),
        step: step.to_string(),
        move_id: id.to_owned(),
        ticket: ticket.to_vec(),
        peer_node_id: peer.to_string(),
        snapshot: snapshot.unwrap_or_default().to_owned(),
        phase: record.phase.to_string(),
    });
    // What is up is put to sleep first, and woken last.
    let is_long = matches!(step, MoveStep::Depart | MoveStep::Activate | MoveStep::Stay);
    let within = if is_long { ACT_WITHIN } else { ANSWER_WITHIN };
    match state.fleet.ask(node, ask, within).await? {
        Some(reply::Answer::Moved(moved)) => Ok(moved),
        _ => Err(Hindered::Later(format!("{node} answered something else"))),
    }
}
