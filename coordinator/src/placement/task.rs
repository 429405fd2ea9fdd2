//! The loop: hears what changed, settles it, stores it, and issues the documents that follow.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mvm_planner::fleet::AwayGrace;
use mvm_proto::object::{KINDS, Object, OnDelete, TenantSpec, kind_named};
use mvm_proto::{NodeId, Problem, TenantId, Timestamp};
use mvm_store::{Event, Store, StoreError, Watch};
use tokio::time::Instant;

use super::commit;
use super::pace::rest_after;
use super::settle::{Settled, settle};
use super::statuses::Statuses;
use crate::fleet::{Fleet, PoolsWithNews};
use crate::objects::{self, decode_object};
use crate::records::{NODES, NodeRecord, Numbers, OBJECTS, OFFERS, STATUS, StatusRecord};
use crate::state::State;
use crate::stored::{Backend, StateError, load_all, now};
use crate::world::{Moves, NodeNews, NodeOffers, Offered, Placements, Rollouts, SCALE_EVERY, World};

/// After a settling that changed something, changes that come within this are one settling, and one document for each node.
const GATHER: Duration = Duration::from_millis(20);
/// News of nodes wait no longer than this until they are heard.
const NEWS_WAIT: Duration = Duration::from_millis(20);
/// Statuses of objects wait no longer than this. What only moves is written much more rarely, see [`Statuses`].
const STATUS_WAIT: Duration = Duration::from_millis(50);
/// Without anything to do, the loop still looks around this often.
const IDLE_AT_MOST: Duration = Duration::from_secs(300);
/// After the store or a document failed, this long until it is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The world as the store has it, and the changes from there on.
pub(crate) async fn load_world(
    store: &Backend,
    started_at: Timestamp,
    away_grace: AwayGrace,
) -> Result<(World, Watch), StateError> {
    let mut world = World::new(started_at, away_grace);
    for (name, record) in load_all::<StatusRecord>(store, STATUS).await? {
        if let Ok(node) = name.parse::<NodeId>() {
            let (news, pools) = NodeNews::stored(&record.value);
            world.hear(&node, news, pools);
        }
    }
    world.scales.restore(commit::load_scaled(store).await?);
    let listing = store.list(OBJECTS).await?;
    // Pools after their tenants and nodes, so that what is stored finds them.
    let mut found: Vec<Object> = listing.entries.iter().map(decode_object).collect::<Result<_, _>>()?;
    let order = |object: &Object| KINDS.iter().position(|kind| kind.name == object.kind);
    found.sort_by_key(order);
    for object in &found {
        // Left out, it would count as deleted, and what runs of it would end.
        World::check_readable(object)?;
        world.declare(object);
    }
    world.stored = Placements::new(commit::load(store).await?);
    world.holdings = commit::load_holdings(store).await?;
    world.rollouts = Rollouts::new(commit::load_rollouts(store).await?);
    world.moves = Moves::new(commit::load_moves(store).await?);
    let offers = load_all::<NodeOffers>(store, OFFERS).await?.into_iter();
    let offers = offers.filter_map(|(name, record)| Some((name.parse::<NodeId>().ok()?, record.value)));
    world.offered = Offered::new(offers.collect());
    world.restore();
    world.touched = world.nodes.keys().cloned().collect();
    world.stale_pools = world.pools.keys().cloned().collect();
    Ok((world, store.watch(OBJECTS, listing.revision)))
}

/// Runs until shutdown.
pub(crate) async fn placement_task(state: Arc<State>, mut changes: Watch) {
    ensure_nodes(&state).await;
    let mut status_due = Instant::now();
    let mut statuses = Statuses::default();
    let mut news_due = Instant::now();
    let mut again: Option<Instant> = Some(Instant::now());
    let mut gathered = Instant::now();
    loop {
        let sleep_until = next_wake(&state, &statuses, status_due, again);
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            event = changes.next() => match event {
                Ok(event) => hear_event(&state, &event),
                Err(StoreError::Compacted { .. }) => match reload(&state).await {
                    Some(next) => changes = next,
                    None => tokio::time::sleep(TRY_AGAIN).await,
                },
                Err(_) => return state.shutdown.cancelled().await,
            },
            // News that comes without end is heard at a pace.
            () = news(&state, news_due) => {}
            () = tokio::time::sleep_until(sleep_until) => {}
        }
        // The first change after a quiet time is settled at once, with what came together with it.
        while let Ok(event) = tokio::time::timeout_at(gathered, changes.next()).await {
            match event {
                Ok(event) => hear_event(&state, &event),
                Err(_) => break,
            }
        }
        state.metrics.placement_wakes.inc();
        let begun = Instant::now();
        hear_news(&state);
        adopt_documents(&state).await;
        let settled = settle(&state).await;
        let refused = settled.as_ref().map_or(0, |settled| settled.refused);
        match &settled {
            // More that follows is one document more, and not one for each.
            Ok(settled) if *settled != Settled::default() => {
                gathered = Instant::now() + rest_after(begun.elapsed(), GATHER);
            }
            Ok(_) => {}
            Err(problem) => {
                tracing::warn!(%problem, "could not carry out a placement");
                state.metrics.placement_errors.inc();
                // Some of it may be stored: what the store has is where the next one goes on from.
                if let Some(next) = reload(&state).await {
                    changes = next;
                }
            }
        }
        let settled = match settled {
            Ok(_) => finish_deletions(&state).await.and(confirm_removals(&state).await),
            Err(problem) => Err(problem),
        };
        if let Err(problem) = &settled {
            tracing::warn!(%problem, "could not finish deletions");
        }
        again = (settled.is_err() || refused > 0).then(|| Instant::now() + TRY_AGAIN);
        news_due = Instant::now() + rest_after(begun.elapsed(), NEWS_WAIT);
        let begun = Instant::now();
        if begun >= status_due {
            if let Err(problem) = statuses.write(&state).await {
                tracing::warn!(%problem, "could not write the status of objects");
            }
            status_due = Instant::now() + rest_after(begun.elapsed(), STATUS_WAIT);
        }
    }
}

async fn news(state: &State, due: Instant) {
    tokio::time::sleep_until(due).await;
    state.fleet.news().await;
}

/// When there is something to do although nothing happens.
fn next_wake(state: &State, statuses: &Statuses, status_due: Instant, again: Option<Instant>) -> Instant {
    let world = state.world.lock();
    let stale =
        !(world.stale_pools.is_empty() && world.stale_nodes.is_empty() && world.stale_tenants.is_empty());
    // A node that is away is looked at when its grace is over.
    let grace = world.grace_ends(state.steady.now()).map(|left| Instant::now() + left);
    let rollout = world.rollout_due(state.steady.now()).map(|left| Instant::now() + left);
    let scaling = (!world.scales.is_empty()).then(|| Instant::now() + SCALE_EVERY);
    let idle = Instant::now() + IDLE_AT_MOST;
    [stale.then_some(status_due), statuses.due(), again, grace, rollout, scaling]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(idle)
}

/// Every enrolled node has an object.
async fn ensure_nodes(state: &State) {
    let records = load_all::<NodeRecord>(&state.store, NODES).await.unwrap_or_default();
    for (_, record) in records.into_iter().filter(|(_, record)| record.value.removed_at.is_none()) {
        if let Err(problem) = objects::ensure_node(&state.objects, &record.value.node_id).await {
            tracing::warn!(%problem, node = %record.value.node_id, "could not make a node's object");
        }
    }
}

/// What was offered by pushes, or by a version that did not note it, is what the nodes' newest documents say.
async fn adopt_documents(state: &State) {
    let unread = std::mem::take(&mut state.world.lock().unread);
    for node in unread {
        match state.documents.content(&node).await {
            Ok(Some((numbers, desired))) => {
                let mut world = state.world.lock();
                world.offer(&node, numbers, &desired.tenants);
                world.unsaved.insert(node);
            }
            Ok(None) => {}
            Err(problem) => {
                tracing::warn!(%problem, %node, "could not read what a node was offered");
                state.world.lock().unread.insert(node);
            }
        }
    }
}

async fn reload(state: &State) -> Option<Watch> {
    match load_world(&state.store, state.steady.now(), AwayGrace(state.settings.node_grace)).await {
        Ok((mut world, changes)) => {
            for node in state.fleet.known_nodes() {
                if let Some(live) = state.fleet.get(&node) {
                    // The new world has heard nothing yet.
                    live.lock().pools_with_news = PoolsWithNews::All;
                    hear_node(&mut world, &state.fleet, &node);
                }
            }
            *state.world.lock() = world;
            state.objects.causes.forget();
            Some(changes)
        }
        Err(error) => {
            tracing::warn!(error = %mvm_proto::text::chain(&error), "could not read the objects");
            None
        }
    }
}

fn hear_event(state: &State, event: &Event) {
    state.objects.causes.hear(event.key());
    let mut world = state.world.lock();
    match event {
        Event::Put(entry) => match decode_object(entry) {
            Ok(object) => world.declare(&object),
            Err(error) => tracing::error!(error = %mvm_proto::text::chain(&error), "can't read an object"),
        },
        Event::Delete { key, .. } => {
            let path: Vec<&str> = key.trim_start_matches(OBJECTS).split('/').collect();
            let (tenant, name) = match path.as_slice() {
                [_, name] => (None, *name),
                [_, tenant, name] => (tenant.parse::<TenantId>().ok(), *name),
                _ => return,
            };
            if let Ok(kind) = kind_named(path[0]) {
                world.forget(kind.name, tenant.as_ref(), name);
            }
        }
    }
}

fn hear_news(state: &State) {
    let nodes = state.fleet.take_news();
    if !nodes.is_empty() {
        let mut world = state.world.lock();
        nodes.iter().for_each(|node| hear_node(&mut world, &state.fleet, node));
    }
}

fn hear_node(world: &mut World, fleet: &Fleet, node: &NodeId) {
    let Some(live) = fleet.get(node) else { return };
    let mut live = live.lock();
    if live.was_heard() {
        let (news, pools) = NodeNews::take(&mut live, fleet, fleet.steady.now());
        world.hear(node, news, pools);
    } else {
        world.hear_standing(node, fleet.standing(&live, fleet.steady.now()).0);
    }
}

/// Objects that are being deleted go once no node has anything of them.
async fn finish_deletions(state: &State) -> Result<(), Problem> {
    let (tenants, pools) = state.world.lock().deleting();
    for tenant in &tenants {
        let Ok(id) = tenant.metadata.name.parse::<TenantId>() else { continue };
        objects::delete_pools_of(&state.objects, &id, now()).await?;
        let waits = state.world.lock().tenant_waits(&id);
        let is_done = waits.is_none();
        state.world.lock().set_tenant_waits(&id, waits);
        if is_done {
            finish_tenant(state, &id, tenant).await?;
        }
    }
    for (key, object) in pools {
        let mut newest = std::collections::BTreeMap::new();
        let nodes: BTreeSet<NodeId> = state.world.lock().stored.nodes_of(&key).cloned().collect();
        for node in nodes {
            if let Some(assigned) = state.documents.assigned(&node).await? {
                newest.insert(node, assigned.numbers);
            }
        }
        // The document that says so could not be made yet.
        let unmade = state.world.lock().touched.clone();
        newest
            .extend(unmade.into_iter().map(|node| (node, Numbers { epoch: u64::MAX, generation: u64::MAX })));
        let waits = state.world.lock().pool_waits(&key, |node| newest.get(node).copied());
        let is_done = waits.is_none();
        state.world.lock().set_pool_waits(&key, waits);
        if is_done {
            let placed = state.world.lock().stored.remove(&key).unwrap_or_default();
            commit::remove(state, &key, &placed).await?;
            objects::finish(&state.objects, &object, now()).await?;
        }
    }
    Ok(())
}

/// A tenant goes of which no node has anything left. Where its data is kept, it stays known which nodes have it.
async fn finish_tenant(state: &State, id: &TenantId, tenant: &Object) -> Result<(), Problem> {
    let with_data = tenant.spec::<TenantSpec>().is_ok_and(|spec| spec.on_delete == OnDelete::Delete);
    if with_data {
        let nodes: Vec<NodeId> = state.world.lock().holdings.nodes_of(id).cloned().collect();
        commit::forget_holdings(state, id, &nodes).await?;
        state.world.lock().forget_holdings(id);
    }
    objects::finish(&state.objects, tenant, now()).await
}

/// The networks of deleted tenants are free some time after nothing is left of them on any node.
async fn confirm_removals(state: &State) -> Result<(), Problem> {
    if !std::mem::take(&mut state.world.lock().leaving) {
        return Ok(());
    }
    let has_left =
        |tenant: &TenantId, node: &NodeId| state.world.lock().offered.nodes_of(tenant).any(|has| has == node);
    let confirmed = objects::confirm_removals(&state.objects, has_left, now()).await;
    if confirmed.is_err() {
        state.world.lock().leaving = true;
    }
    confirmed
}
