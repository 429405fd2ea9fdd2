//! One settling: what is not placed is placed, and everything that follows is stored and sent. The placements and documents
//! that fit go into one transaction, so that a change waits for one flush of the disk.

use std::collections::BTreeSet;

use mvm_proto::{DesiredState, NodeId, Problem};
use mvm_store::MAX_CHANGES;

use super::batch::{Batch, Change, Issue};
use super::bundles::make_bundles;
use super::commit;
use crate::causes::Issuing;
use crate::documents::{Made, Signed};
use crate::records::offers_key;
use crate::refuse;
use crate::state::State;
use crate::stored::{MAX_TRIES, encode, now};

/// What one settling did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settled {
    pub(super) placements: usize,
    pub(super) documents: usize,
    /// Nodes whose document could not be made. They keep nothing else from being done.
    pub(super) refused: usize,
}

/// Places what is not placed, stores where everything is, and issues the documents of the nodes that it touches.
pub(super) async fn settle(state: &State) -> Result<Settled, Problem> {
    make_bundles(state).await?;
    let heard = state.objects.causes.take_heard();
    let (mut issuing, differences, holdings, rollouts, scaled, unsaved, moves) = {
        let mut world = state.world.lock();
        world.scale(state.steady.now());
        let begun = std::time::Instant::now();
        let differences = world.settle_and_store(state.steady.now());
        if !differences.is_empty() {
            state.metrics.schedule_duration.observe(begun.elapsed().as_secs_f64());
        }
        let news = world.take_unplaced_news();
        for cause in news.into_iter().filter_map(|(_, unplaced)| Some(unplaced?.cause)) {
            state.metrics.scheduling_failures.get_or_create(&cause.into()).inc();
        }
        let nodes = std::mem::take(&mut world.unsaved);
        let unsaved = nodes.into_iter().filter_map(|node| {
            let offers = world.offered.get(&node).map(encode)?;
            Some((node, offers))
        });
        let unsaved: Vec<_> = unsaved.collect();
        let (rollouts, scaled) = (world.rollouts.take_unsaved(), world.scales.take_unsaved());
        let moves = world.moves.unsaved();
        let issuing = Issuing::begin(&state.tracer, &heard, &world.stored, &differences);
        (issuing, differences, world.new_holdings(), rollouts, scaled, unsaved, moves)
    };
    // Before what is placed: a node that has something of a tenant is always known to.
    let mut placements: Vec<Change> =
        holdings.iter().map(|(tenant, node, holding)| commit::holding(tenant, node, Some(holding))).collect();
    // Together with where they go: one settling begins no more than one transaction takes.
    placements.extend(moves.iter().map(|(id, record)| commit::moved(id, record.as_ref())));
    placements
        .extend(differences.iter().flat_map(|(key, before, after)| commit::changes(key, before, after)));
    placements.extend(rollouts.iter().map(|(key, record)| commit::rollout(key, record.as_ref())));
    placements.extend(scaled.iter().map(commit::scaled));
    placements.extend(unsaved.iter().map(|(node, offers)| (offers_key(node), Some(offers.clone()))));
    let take_back = |touched: BTreeSet<NodeId>| {
        let mut world = state.world.lock();
        world.take_back(&differences);
        world.rollouts.unsave(rollouts.iter().map(|(key, _)| key.clone()));
        world.unsaved.extend(unsaved.iter().map(|(node, _)| node.clone()));
        world.scales.put_back(&scaled);
        world.touched.extend(touched);
    };
    let mut settled = Settled { placements: placements.len(), ..Settled::default() };
    let mut batch = match store_placements(state, placements).await {
        Ok(last) => last,
        Err(problem) => {
            take_back(BTreeSet::new());
            return Err(problem);
        }
    };
    let mut holdings = Some(holdings);
    let mut failed: Option<Problem> = None;
    let mut again = BTreeSet::new();
    for _ in 0..MAX_TRIES {
        let touched = std::mem::take(&mut state.world.lock().touched);
        match issue_all(state, &touched, std::mem::take(&mut batch), &mut issuing).await {
            Ok(issued) => {
                if let Some(holdings) = holdings.take() {
                    let mut world = state.world.lock();
                    world.note_holdings(holdings);
                    world.moves.saved(moves.iter().map(|(id, _)| id.clone()));
                }
                settled.documents += issued.documents;
                again.extend(issued.refused.into_iter().map(|(node, _)| node));
            }
            Err(problem) => {
                // What the store did not take is not stored, so all of it is tried again.
                take_back(touched);
                failed = Some(problem);
                break;
            }
        }
        // Those of which something changed while their documents were made.
        if state.world.lock().touched.is_empty() {
            break;
        }
    }
    settled.refused = again.len();
    state.world.lock().touched.extend(again);
    failed.map_or(Ok(settled), Err)
}

/// Stores all but the last batch of placements, which the first documents go with.
async fn store_placements(state: &State, placements: Vec<Change>) -> Result<Batch, Problem> {
    let mut batch = Batch::default();
    for placement in placements {
        if !batch.takes_placement(&placement) {
            std::mem::take(&mut batch).commit(state).await?;
        }
        batch.add_placement(placement);
    }
    Ok(batch)
}

#[derive(Debug, Default)]
struct Issued {
    documents: usize,
    /// Nodes whose document can't be made, each with the reason. They keep no other node from its own.
    refused: Vec<(NodeId, Problem)>,
}

/// Documents that are made at a time: about as many as one transaction takes, so that the store writes some while the next are
/// signed.
const MADE_AT_ONCE: usize = (MAX_CHANGES - 1) / Signed::GUARDS;

/// Stores a batch and the documents of these nodes, and sends them. The batches are stored in order: whatever a crash leaves,
/// the documents that are there are of placements that are there.
async fn issue_all(
    state: &State,
    nodes: &BTreeSet<NodeId>,
    mut batch: Batch,
    issuing: &mut Issuing,
) -> Result<Issued, Problem> {
    let mut issued = Issued::default();
    let mut full = Vec::new();
    let mut rest = nodes.iter().peekable();
    while rest.peek().is_some() {
        let some: Vec<&NodeId> = rest.by_ref().take(MADE_AT_ONCE).collect();
        let (finished, made) =
            tokio::join!(finish_all(state, std::mem::take(&mut full), issuing), make_some(state, &some));
        issued.documents += finished?;
        for (node, made) in made? {
            match made {
                Ok(None) => {}
                Ok(Some(issue)) => {
                    if !batch.takes_issue(&issue) {
                        full.push(std::mem::take(&mut batch));
                    }
                    batch.add_issue(issue);
                }
                Err(problem) => {
                    tracing::warn!(%node, %problem, "could not issue a document");
                    issued.refused.push((node, problem));
                }
            }
        }
    }
    full.push(batch);
    issued.documents += finish_all(state, full, issuing).await?;
    if issued.documents > 0 {
        tracing::info!(documents = issued.documents, "issued documents");
    }
    Ok(issued)
}

/// The documents of these nodes that are to have another than their newest, or why there is none.
async fn make_some(
    state: &State,
    nodes: &[&NodeId],
) -> Result<Vec<(NodeId, Result<Option<Issue>, Problem>)>, Problem> {
    let rendered: Vec<DesiredState> = {
        let world = state.world.lock();
        nodes.iter().filter_map(|node| world.render(&state.cluster.cluster, node)).collect()
    };
    let made = state.documents.make_all(rendered, now()).await?;
    let mut world = state.world.lock();
    let issue = |Made { desired, bytes, signed }| {
        let node = desired.node_id.clone();
        world.note_size(&node, bytes);
        let issue = match signed {
            Ok(None) => Ok(None),
            Ok(Some(signed)) => {
                // A new process must know what this one offered. What the store has is that already, or more, where the
                // document offers nothing new.
                let offers = world.offers_with(&node, signed.stored.assigned.numbers, &desired.tenants);
                let is_new = signed.is_first() || world.offered.get(&node) != Some(&offers);
                let beside = is_new.then(|| (offers_key(&node), Some(encode(&offers)))).into_iter().collect();
                Ok(Some(Issue { node: node.clone(), desired, signed, beside }))
            }
            // Its object goes with it.
            Err(problem) if refuse::is_no_node(&problem) => Ok(None),
            Err(problem) => Err(problem),
        };
        (node, issue)
    };
    Ok(made.into_iter().map(issue).collect())
}

/// Stores batches one after the other and sends their documents. Says how many there were.
async fn finish_all(state: &State, batches: Vec<Batch>, issuing: &mut Issuing) -> Result<usize, Problem> {
    let mut count = 0;
    for batch in batches {
        count += finish(state, batch, issuing).await?;
    }
    Ok(count)
}

/// Stores a batch and sends its documents. Says how many there were.
async fn finish(state: &State, batch: Batch, issuing: &mut Issuing) -> Result<usize, Problem> {
    let outcome = batch.commit(state).await?;
    let count = outcome.stored.len();
    {
        let mut world = state.world.lock();
        for (node, desired, stored) in &outcome.stored {
            world.offer(node, stored.assigned.numbers, &desired.tenants);
        }
        world.touched.extend(outcome.lost);
    }
    let issued_at = std::time::Instant::now();
    for (node, _, mut stored) in outcome.stored {
        tracing::debug!(%node, generation = stored.assigned.numbers.generation, "issued a document");
        issuing.finish(&node, &mut stored);
        state.fleet.offer(&node, stored, Some(issued_at));
    }
    Ok(count)
}
