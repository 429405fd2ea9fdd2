//! What is known of one node right now: its session, its newest word, and who waits for its answers.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use mvm_proto::status::delta::{KeptStatus, PoolKey, Touched};
use mvm_proto::status::fit::shorten;
use mvm_proto::status::{Event, Mark, NodeInfo, NodeStatus};
use mvm_proto::wire::session::v1::reply;
use mvm_proto::{NodeId, Problem, Timestamp};
use mvm_transport::SessionControl;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{broadcast, oneshot, watch};

use super::outbox::Outbox;
use super::presence::Presence;
use super::second_session::{Agent, SecondMachine};
use crate::records::{Numbers, StatusRecord};

/// Events kept per node: a screenful, and at most some 60 KiB however chatty the node is.
const MAX_EVENTS: usize = 50;
/// The longest text of one event; a hostile node must not choose how much is kept.
const MAX_EVENT_TEXT: usize = 512;

/// What a node said to a request. `Ok(None)`: it is done, and there is nothing to tell.
pub(crate) type Answer = Result<Option<reply::Answer>, Problem>;

/// Where events go as they come. Sent to while the node is locked: what is not in the node's own list by then is
/// sent later.
pub(crate) type Followers = broadcast::Sender<(NodeId, Event)>;

/// A node's live session.
#[derive(Debug, Clone)]
pub(crate) struct SessionEntry {
    pub(crate) id: u64,
    pub(crate) control: SessionControl,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) since: Timestamp,
    pub(crate) address: SocketAddr,
    pub(crate) agent: Agent,
    /// Its agent opens tunnels.
    pub(crate) has_tunnels: bool,
}

/// A document that the node would not take.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refused {
    pub(crate) numbers: Numbers,
    /// problem+json, as the node sent it.
    pub(crate) problem: Vec<u8>,
}

/// Pools of which placement has not heard the newest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum PoolsWithNews {
    /// A whole status came.
    #[default]
    All,
    Some(BTreeSet<PoolKey>),
}

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) session: Option<SessionEntry>,
    pub(crate) info: Option<NodeInfo>,
    pub(crate) status: Option<KeptStatus>,
    pub(crate) pools_with_news: PoolsWithNews,
    pub(crate) presence: Presence,
    /// Another machine that wants a session as this node.
    pub(crate) second: Option<SecondMachine>,
    /// The session is being asked whether it is still there, until then at the latest.
    pub(crate) asked_until: Option<Instant>,
    pub(crate) events: VecDeque<Event>,
    followers: Option<(NodeId, Followers)>,
    pub(crate) last_seen_at: Option<Timestamp>,
    pub(crate) sent: Option<Numbers>,
    pub(crate) accepted: Option<Mark>,
    pub(crate) converged: Option<Mark>,
    /// The document that its newest status is of.
    pub(crate) reported: Option<Mark>,
    pub(crate) refused: Option<Refused>,
    /// Marks from before a reset. A node names the document in force until it has the next, and that says nothing about
    /// the new order.
    forgotten: Vec<Mark>,
    /// The newest push and when it was stored, until the node accepts it.
    pub(crate) pushed: Option<(Numbers, Instant)>,
    /// The node was taken out of the cluster while someone still looks here.
    pub(crate) removed: bool,
    waiting: Vec<(String, oneshot::Sender<Answer>)>,
}

#[derive(Debug)]
pub(crate) struct LiveNode {
    live: Mutex<Live>,
    changed: watch::Sender<()>,
}

impl LiveNode {
    /// Nothing is known of the node before `now`.
    pub(crate) fn new(node: &NodeId, followers: &Followers, now: Timestamp) -> Self {
        let live = Live { followers: Some((node.clone(), followers.clone())), ..Live::new(now) };
        Self { live: Mutex::new(live), changed: watch::Sender::new(()) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Live> {
        self.live.lock()
    }

    /// Changes something and notifies the watchers.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Live) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.send_replace(());
        result
    }

    pub(crate) fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

impl Live {
    fn new(now: Timestamp) -> Self {
        Self {
            session: None,
            info: None,
            status: None,
            pools_with_news: PoolsWithNews::default(),
            presence: Presence::new(now),
            second: None,
            asked_until: None,
            events: VecDeque::new(),
            followers: None,
            last_seen_at: None,
            sent: None,
            accepted: None,
            converged: None,
            reported: None,
            refused: None,
            forgotten: Vec::new(),
            pushed: None,
            removed: false,
            waiting: Vec::new(),
        }
    }

    /// It said something.
    pub(crate) fn seen(&mut self, now: Timestamp) {
        self.last_seen_at = Some(now);
    }

    /// Whether the node said anything since the start.
    pub(crate) fn was_heard(&self) -> bool {
        self.info.is_some() || self.status.is_some()
    }

    /// The node's newest status.
    pub(crate) fn status(&self) -> Option<&NodeStatus> {
        self.status.as_ref().map(KeptStatus::get)
    }

    /// A whole status came.
    pub(crate) fn set_status(&mut self, status: KeptStatus) {
        self.status = Some(status);
        self.pools_with_news = PoolsWithNews::All;
    }

    /// What changed of the status was taken in.
    pub(crate) fn note_touched(&mut self, touched: Touched) {
        if let PoolsWithNews::Some(pools) = &mut self.pools_with_news {
            pools.extend(touched.pools);
        }
    }

    /// Takes over the node's word that it accepted or made true what `mark` names. `true` when that is news.
    pub(crate) fn accept(&mut self, mark: &Mark) -> bool {
        if self.forgotten.contains(mark) {
            return false;
        }
        if self.refused.as_ref().is_some_and(|refused| refused.numbers <= Numbers::from(mark)) {
            self.refused = None;
        }
        replace_if_newer(&mut self.accepted, mark)
    }

    pub(crate) fn converge(&mut self, mark: &Mark) -> bool {
        if self.forgotten.contains(mark) {
            return false;
        }
        let accepted = self.accept(mark);
        replace_if_newer(&mut self.converged, mark) || accepted
    }

    /// Whether the node said that it accepted this one or a newer one.
    pub(crate) fn is_accepted(&self, mark: &Mark) -> bool {
        !self.forgotten.contains(mark)
            && self.accepted.as_ref().map(Numbers::from) >= Some(Numbers::from(mark))
    }

    /// The node forgets its numbers: what it said of them no longer counts.
    pub(crate) fn forget_marks(&mut self) {
        self.forgotten = self.accepted.take().into_iter().chain(self.converged.take()).collect();
        self.reported = None;
        (self.sent, self.refused, self.pushed) = (None, None, None);
    }

    /// The same for what a node says that has yet to hear of the reset.
    pub(crate) fn forget_mark(&mut self, mark: &Mark) {
        self.accept(mark);
        self.forget_marks();
    }

    /// How long the newest push took, once the node accepted it.
    pub(crate) fn take_push_time(&mut self) -> Option<f64> {
        let (numbers, since) = self.pushed?;
        let accepted = self.accepted.as_ref().map(Numbers::from);
        if accepted < Some(numbers) {
            return None;
        }
        self.pushed = None;
        Some(since.elapsed().as_secs_f64())
    }

    /// Keeps what is news, and tells the followers: a node tells its newest events again with every session.
    pub(crate) fn add_events(&mut self, events: Vec<Event>) {
        let skipped = events.len().saturating_sub(MAX_EVENTS);
        for mut event in events.into_iter().skip(skipped) {
            for text in [&mut event.at, &mut event.kind, &mut event.subject, &mut event.message] {
                shorten(text, MAX_EVENT_TEXT);
            }
            if self.events.contains(&event) {
                continue;
            }
            if self.events.len() == MAX_EVENTS {
                self.events.pop_front();
            }
            if let Some((node, followers)) = &self.followers {
                // There may be none.
                let _ = followers.send((node.clone(), event.clone()));
            }
            self.events.push_back(event);
        }
    }

    /// An event that is said again at every hello is kept once.
    pub(crate) fn add_event_once(&mut self, event: Event) {
        if !self.events.iter().any(|known| (&known.kind, &known.message) == (&event.kind, &event.message)) {
            self.add_events(vec![event]);
        }
    }

    pub(crate) fn expect_reply(&mut self, id: String, reply: oneshot::Sender<Answer>) {
        // Callers that gave up at their deadline leave a dead entry behind.
        self.waiting.retain(|(_, waiting)| !waiting.is_closed());
        self.waiting.push((id, reply));
    }

    /// The sender to the caller that waits for the answer to request `id`.
    pub(crate) fn take_waiting(&mut self, id: &str) -> Option<oneshot::Sender<Answer>> {
        let at = self.waiting.iter().position(|(waiting, _)| waiting == id)?;
        Some(self.waiting.swap_remove(at).1)
    }

    /// The session is over, so no answer will come. Dropping the senders tells the callers.
    pub(crate) fn end_session(&mut self) {
        self.session = None;
        self.sent = None;
        self.waiting = Vec::new();
    }

    pub(crate) fn record(&self) -> StatusRecord {
        StatusRecord {
            last_seen_at: self.last_seen_at,
            info: self.info.clone(),
            status: self.status().cloned(),
            accepted: self.accepted.clone(),
            converged: self.converged.clone(),
        }
    }
}

fn replace_if_newer(slot: &mut Option<Mark>, mark: &Mark) -> bool {
    let newer = slot.as_ref().map(Numbers::from) < Some(Numbers::from(mark));
    if newer {
        *slot = Some(mark.clone());
    }
    newer
}

#[cfg(test)]
mod tests {
    use mvm_proto::Digest;

    use super::*;

    fn mark(generation: u64) -> Mark {
        Mark::new(1, generation, Digest::of(b""))
    }

    #[test]
    fn marks_only_move_forward() {
        let mut live = Live::new(Timestamp::from_unix_ms(0));
        assert!(live.accept(&mark(2)));
        assert!(!live.accept(&mark(1)) && !live.accept(&mark(2)));
        assert!(live.converge(&mark(3)));
        assert_eq!((live.accepted, live.converged), (Some(mark(3)), Some(mark(3))));
    }

    #[test]
    fn marks_from_before_a_reset_no_longer_count_and_lower_ones_do() {
        let mut live = Live::new(Timestamp::from_unix_ms(0));
        live.converge(&mark(900));
        live.forget_marks();
        assert!(!live.converge(&mark(900)) && live.converge(&mark(1)));
        assert_eq!((live.accepted, live.converged), (Some(mark(1)), Some(mark(1))));
    }

    #[test]
    fn a_refusal_is_forgotten_once_that_document_or_a_newer_is_accepted() {
        let refused = Refused { numbers: Numbers { epoch: 1, generation: 5 }, problem: Vec::new() };
        let mut live = Live { refused: Some(refused.clone()), ..Live::new(Timestamp::from_unix_ms(0)) };
        live.accept(&mark(4));
        assert_eq!(live.refused, Some(refused));
        live.accept(&mark(5));
        assert_eq!(live.refused, None);
    }

    #[test]
    fn events_are_bounded_in_number_and_length() {
        let mut live = Live::new(Timestamp::from_unix_ms(0));
        let event =
            |n: usize| Event { kind: n.to_string(), message: "é".repeat(10_000), ..Event::default() };
        let (followers, mut told) = broadcast::channel(300);
        live.followers = Some(("node-a".parse().unwrap(), followers));
        live.add_events((0..200).map(event).collect());
        assert_eq!(told.len(), MAX_EVENTS);
        while told.try_recv().is_ok() {}
        // What a node tells again is known.
        live.add_events((198..201).map(event).collect());
        assert_eq!((told.try_recv().unwrap().1.kind.as_str(), told.len()), ("200", 0));
        assert_eq!(live.events.len(), MAX_EVENTS);
        assert_eq!(live.events.back().map(|last| last.kind.as_str()), Some("200"));
        assert!(live.events.iter().all(|event| event.message.len() <= MAX_EVENT_TEXT));
    }

    #[test]
    fn the_time_of_a_push_is_taken_once() {
        let numbers = Numbers { epoch: 1, generation: 2 };
        let mut live =
            Live { pushed: Some((numbers, Instant::now())), ..Live::new(Timestamp::from_unix_ms(0)) };
        live.accept(&mark(1));
        assert!(live.take_push_time().is_none());
        live.accept(&mark(2));
        assert!(live.take_push_time().is_some() && live.take_push_time().is_none());
    }
}
