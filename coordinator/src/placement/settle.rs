//! One settling: what is not placed is placed, and everything that follows is stored and sent. The placements and documents
//! that fit go into one transaction, so that a change waits for one flush of the disk.

use std::collections::BTreeSet;

use mvm_proto::{NodeId, Problem};

use super::batch::{Batch, Change, Issue};
use super::bundles::make_bundles;
use super::commit;
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
    let (differences, holdings, rollouts, unsaved) = {
        let mut world = state.world.lock();
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
        (differences, world.new_holdings(), world.rollouts.take_unsaved(), unsaved)
    };
    // Before what is placed: a node that has something of a tenant is always known to.
    let mut placements: Vec<Change> =
        holdings.iter().map(|(tenant, node, holding)| commit::holding(tenant, node, Some(holding))).collect();
    placements
        .extend(differences.iter().flat_map(|(key, before, after)| commit::changes(key, before, after)));
    placements.extend(rollouts.iter().map(|(key, record)| commit::rollout(key, record.as_ref())));
    placements.extend(unsaved.iter().map(|(node, offers)| (offers_key(node), Some(offers.clone()))));
    let take_back = |touched: BTreeSet<NodeId>| {
        let mut world = state.world.lock();
        world.take_back(&differences);
        world.rollouts.unsave(rollouts.iter().map(|(key, _)| key.clone()));
        world.unsaved.extend(unsaved.iter().map(|(node, _)| node.clone()));
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
        match issue_all(state, &touched, std::mem::take(&mut batch)).await {
            Ok(issued) => {
                if let Some(holdings) = holdings.take() {
                    state.world.lock().note_holdings(holdings);
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

/// Stores a batch and the documents of these nodes, and sends them.
async fn issue_all(state: &State, nodes: &BTreeSet<NodeId>, mut batch: Batch) -> Result<Issued, Problem> {
    let mut issued = Issued::default();
    for node in nodes {
        match sign(state, node).await {
            Ok(None) => {}
            Ok(Some(issue)) => {
                if !batch.takes_issue(&issue) {
                    issued.documents += finish(state, std::mem::take(&mut batch)).await?;
                }
                batch.add_issue(issue);
            }
            Err(problem) => {
                tracing::warn!(%node, %problem, "could not issue a document");
                issued.refused.push((node.clone(), problem));
            }
        }
    }
    issued.documents += finish(state, batch).await?;
    Ok(issued)
}

/// The document of a node, if it is to have another than its newest.
async fn sign(state: &State, node: &NodeId) -> Result<Option<Issue>, Problem> {
    let desired = {
        let mut world = state.world.lock();
        let desired = world.render(&state.cluster.cluster, node);
        desired.iter().for_each(|desired| world.note_size(desired));
        desired
    };
    let Some(desired) = desired else { return Ok(None) };
    match state.documents.sign_if_new(&desired, now()).await {
        Ok(None) => Ok(None),
        Ok(Some(signed)) => {
            let numbers = signed.stored.assigned.numbers;
            // A new process must know what this one offered.
            let offers = state.world.lock().offers_with(node, numbers, &desired.tenants);
            let beside = vec![(offers_key(node), Some(encode(&offers)))];
            Ok(Some(Issue { node: node.clone(), desired, signed, beside }))
        }
        // Its object goes with it.
        Err(problem) if refuse::is_no_node(&problem) => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// Stores a batch and sends its documents. Says how many there were.
async fn finish(state: &State, batch: Batch) -> Result<usize, Problem> {
    let outcome = batch.commit(state).await?;
    let count = outcome.stored.len();
    for (node, desired, stored) in outcome.stored {
        state.world.lock().offer(&node, stored.assigned.numbers, &desired.tenants);
        let mark = stored.assigned.mark();
        tracing::info!(%node, generation = mark.generation, "issued a document");
        state.fleet.offer(&node, &stored, Some(std::time::Instant::now()));
    }
    state.world.lock().touched.extend(outcome.lost);
    Ok(count)
}
