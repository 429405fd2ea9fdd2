//! Events of one node or of all, as their sessions told them: those that are kept, then those that come.
//!
//! A node tells its newest events again with every session, so that a coordinator that started anew has them too.

use std::sync::Arc;

use mvm_proto::status::Event;
use mvm_proto::wire::control::v1::{NodeEvent, StreamEventsRequest};
use mvm_proto::{NodeId, Problem, Timestamp};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::parse;
use crate::enrolment;
use crate::state::State;

/// Events that wait for the operator to read.
const WAITING: usize = 64;

pub(super) async fn stream(
    state: &Arc<State>,
    asked: &StreamEventsRequest,
) -> Result<mpsc::Receiver<NodeEvent>, Problem> {
    let only: Option<NodeId> = match asked.node_id.as_str() {
        "" => None,
        name => {
            let node = parse("node_id", name)?;
            enrolment::registered(state, &node).await?;
            Some(node)
        }
    };
    // Before what is kept is read, so that nothing falls between.
    let news = state.fleet.follow_events();
    let kept = kept(state, only.as_ref());
    let (sender, receiver) = mpsc::channel(WAITING);
    let (state, follow) = (Arc::clone(state), asked.follow);
    tokio::spawn(async move {
        let telling = tell(kept, only, follow.then_some(news), &sender);
        tokio::select! {
            () = telling => {}
            () = sender.closed() => {}
            () = state.shutdown.cancelled() => {}
        }
    });
    Ok(receiver)
}

/// What is kept, in the order of the nodes' own clocks.
fn kept(state: &State, only: Option<&NodeId>) -> Vec<(NodeId, Event)> {
    let nodes = match only {
        Some(node) => vec![node.clone()],
        None => state.fleet.known_nodes(),
    };
    let events = nodes.into_iter().filter_map(|node| state.fleet.get(&node).map(|live| (node, live)));
    let mut kept: Vec<(NodeId, Event)> = events
        .flat_map(|(node, live)| {
            let events: Vec<_> = live.lock().events.iter().cloned().collect();
            events.into_iter().map(move |event| (node.clone(), event))
        })
        .collect();
    // Written times of different precision do not sort as text.
    kept.sort_by_key(|(_, event)| event.at.parse::<Timestamp>().ok());
    kept
}

async fn tell(
    kept: Vec<(NodeId, Event)>,
    only: Option<NodeId>,
    news: Option<tokio::sync::broadcast::Receiver<(NodeId, Event)>>,
    sender: &mpsc::Sender<NodeEvent>,
) {
    // Came while the others were read: some of them are among those.
    let mut between = Vec::new();
    let mut news = news;
    while let Some(Ok(event)) = news.as_mut().map(|news| news.try_recv()) {
        between.push(event);
    }
    between.retain(|event| !kept.contains(event));
    let wanted = |node: &NodeId| only.as_ref().is_none_or(|only| only == node);
    for (node, event) in kept.into_iter().chain(between).filter(|(node, _)| wanted(node)) {
        if sender.send(NodeEvent { node_id: node.to_string(), event: Some(event) }).await.is_err() {
            return;
        }
    }
    let Some(mut news) = news else { return };
    loop {
        let told = match news.recv().await {
            Ok((node, event)) if wanted(&node) => NodeEvent { node_id: node.to_string(), event: Some(event) },
            Ok(_) => continue,
            Err(RecvError::Lagged(missed)) => {
                let message = format!("{missed} events were left out: they came faster than they were read");
                let event = Event { kind: "EventsLost".to_owned(), message, ..Event::default() };
                NodeEvent { node_id: String::new(), event: Some(event) }
            }
            Err(RecvError::Closed) => return,
        };
        if sender.send(told).await.is_err() {
            return;
        }
    }
}
