//! Events of one node or of all, as their sessions told them, with those of objects: those that are kept, then those that come.
//!
//! A node tells its newest events again with every session, so that a coordinator that started anew has them too.

use std::sync::Arc;

use mvm_proto::object::ObjectEvent;
use mvm_proto::status::Event;
use mvm_proto::wire::control::v1::{NodeEvent, StreamEventsRequest};
use mvm_proto::{NodeId, Problem, Timestamp};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::parse;
use crate::enrolment;
use crate::state::State;
use crate::stored::now;

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
    let news = News { nodes: state.fleet.follow_events(), objects: state.events.follow() };
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

/// What comes, of nodes and of objects.
struct News {
    nodes: Receiver<(NodeId, Event)>,
    objects: Receiver<ObjectEvent>,
}

impl News {
    /// The next of either; an error says how many were missed, or that there are no more.
    async fn next(&mut self) -> Result<Told, RecvError> {
        tokio::select! {
            event = self.nodes.recv() => event.map(|(node, event)| (Some(node), event)),
            event = self.objects.recv() => event.map(|event| of_object(&event)),
        }
    }

    fn try_next(&mut self) -> Option<Told> {
        let of_node = self.nodes.try_recv().ok().map(|(node, event)| (Some(node), event));
        of_node.or_else(|| self.objects.try_recv().ok().map(|event| of_object(&event)))
    }
}

/// An event, and the node that it is of, if it is of one.
type Told = (Option<NodeId>, Event);

/// An object's event as an event. One of a node's object is of the node.
fn of_object(event: &ObjectEvent) -> Told {
    let node = (event.kind == "Node").then(|| event.name.parse().ok()).flatten();
    let times = match event.count {
        1 => String::new(),
        count => format!(" ({count} times since {})", event.first_at),
    };
    let subject = if node.is_some() { String::new() } else { event.object() };
    let (at, kind) = (event.last_at.to_string(), event.reason.clone());
    (node, Event { at, kind, subject, message: format!("{}{times}", event.message) })
}

/// What is kept, in the order of the nodes' own clocks.
fn kept(state: &State, only: Option<&NodeId>) -> Vec<Told> {
    let nodes = match only {
        Some(node) => vec![node.clone()],
        None => state.fleet.known_nodes(),
    };
    let events = nodes.into_iter().filter_map(|node| state.fleet.get(&node).map(|live| (node, live)));
    let mut kept: Vec<Told> = events
        .flat_map(|(node, live)| {
            let events: Vec<_> = live.lock().events.iter().cloned().collect();
            events.into_iter().map(move |event| (Some(node.clone()), event))
        })
        .collect();
    let wanted =
        |event: &ObjectEvent| only.is_none_or(|only| event.kind == "Node" && event.name == only.as_str());
    kept.extend(state.events.kept(wanted, now()).iter().map(of_object));
    // Written times of different precision do not sort as text.
    kept.sort_by_key(|(_, event)| event.at.parse::<Timestamp>().ok());
    kept
}

async fn tell(kept: Vec<Told>, only: Option<NodeId>, news: Option<News>, sender: &mpsc::Sender<NodeEvent>) {
    // Came while the others were read: some of them are among those.
    let mut between = Vec::new();
    let mut news = news;
    while let Some(event) = news.as_mut().and_then(News::try_next) {
        between.push(event);
    }
    between.retain(|event| !kept.contains(event));
    let wanted = |node: &Option<NodeId>| only.is_none() || only == *node;
    let message = |node: Option<NodeId>, event| NodeEvent {
        node_id: node.map(|node| node.to_string()).unwrap_or_default(),
        event: Some(event),
    };
    for (node, event) in kept.into_iter().chain(between).filter(|(node, _)| wanted(node)) {
        if sender.send(message(node, event)).await.is_err() {
            return;
        }
    }
    let Some(mut news) = news else { return };
    loop {
        let told = match news.next().await {
            Ok((node, event)) if wanted(&node) => message(node, event),
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
