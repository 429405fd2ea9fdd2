//! The table of nodes that this process knows live: at most one session each.
//!
//! Sessions attach and detach; documents, trust and requests are put into their outboxes; `remove` and `shutdown`
//! close them from outside. The table's lock is held for lookups only, each node's lock for single changes only.

mod live;
mod outbox;
mod presence;
pub(crate) mod second_session;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mvm_proto::status::delta::KeptStatus;
use mvm_proto::status::{Event, Mark, NodeInfo};
use mvm_proto::wire::session::v1::{Goodbye, Ping, Request, request};
use mvm_proto::{NodeId, Problem, Timestamp};
use mvm_transport::SessionControl;
use mvm_transport::session::close_code;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, broadcast, oneshot, watch};

use crate::clock::SteadyClock;
use crate::documents::Stored;
use crate::metrics::Metrics;
use crate::refuse;

pub(crate) use live::{Answer, Followers, Live, LiveNode, PoolsWithNews, Refused, SessionEntry};
pub(crate) use outbox::{Item, Outbox};
pub(crate) use presence::{Rules, Standing};
use second_session::{ANSWER_WITHIN, Agent, SecondMachine};

/// How many events a follower may be behind before it misses some.
const EVENTS_BEHIND: usize = 1024;

#[derive(Debug)]
pub(crate) struct Fleet {
    nodes: RwLock<HashMap<NodeId, Arc<LiveNode>>>,
    next_session: AtomicU64,
    sessions: watch::Sender<usize>,
    followers: Followers,
    /// Nodes whose status is to be written to the store.
    dirty: Mutex<HashSet<NodeId>>,
    /// Nodes of which placement has not heard the newest.
    news: Mutex<HashSet<NodeId>>,
    news_came: Notify,
    /// Nodes whose sessions began or ended.
    sessions_of: Mutex<HashSet<NodeId>>,
    session_changed: Notify,
    rules: Rules,
    /// What sessions that begin and end are dated with.
    pub(crate) steady: SteadyClock,
    metrics: Arc<Metrics>,
}

/// A session that wants to be its node's.
pub(crate) struct Newcomer {
    pub(crate) control: SessionControl,
    pub(crate) address: SocketAddr,
    pub(crate) agent: Agent,
    pub(crate) info: Option<NodeInfo>,
    pub(crate) high_water: Option<Mark>,
    /// Its agent opens tunnels.
    pub(crate) has_tunnels: bool,
}

/// Whether the agent of a session is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presumed {
    There,
    Gone,
    /// It is being asked for another newcomer.
    BeingAsked,
}

/// What came of offering a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offered {
    ToSession,
    NotConnected,
}

impl Fleet {
    pub(crate) fn new(rules: Rules, steady: SteadyClock, metrics: Arc<Metrics>) -> Self {
        Self {
            nodes: RwLock::default(),
            next_session: AtomicU64::new(1),
            sessions: watch::Sender::new(0),
            followers: broadcast::Sender::new(EVENTS_BEHIND),
            dirty: Mutex::default(),
            news: Mutex::default(),
            news_came: Notify::new(),
            sessions_of: Mutex::default(),
            session_changed: Notify::new(),
            rules,
            steady,
            metrics,
        }
    }

    /// Events as they come, of all nodes.
    pub(crate) fn follow_events(&self) -> broadcast::Receiver<(NodeId, Event)> {
        self.followers.subscribe()
    }

    pub(crate) fn get(&self, node: &NodeId) -> Option<Arc<LiveNode>> {
        self.nodes.read().get(node).cloned()
    }

    pub(crate) fn get_or_insert(&self, node: &NodeId) -> Arc<LiveNode> {
        if let Some(found) = self.get(node) {
            return found;
        }
        let mut nodes = self.nodes.write();
        Arc::clone(
            nodes
                .entry(node.clone())
                .or_insert_with(|| Arc::new(LiveNode::new(node, &self.followers, self.steady.now()))),
        )
    }

    /// What each connected node said last.
    pub(crate) fn for_each_connected(&self, mut each: impl FnMut(&Live)) {
        let nodes: Vec<_> = self.nodes.read().values().map(Arc::clone).collect();
        for node in nodes {
            let live = node.lock();
            if live.session.is_some() {
                each(&live);
            }
        }
    }

    pub(crate) fn connected(&self) -> usize {
        *self.sessions.borrow()
    }

    /// Makes this the node's session in place of `older`. None when another one is there, or none any more.
    pub(crate) fn attach(
        self: &Arc<Self>,
        node: &NodeId,
        newcomer: Newcomer,
        older: Option<u64>,
        now: Timestamp,
    ) -> Option<Attached> {
        let id = self.next_session.fetch_add(1, Ordering::Relaxed);
        let outbox = Arc::new(Outbox::default());
        let live = self.get_or_insert(node);
        let Newcomer { control, address, agent, info, high_water, has_tunnels } = newcomer;
        let outbox_of_it = Arc::clone(&outbox);
        let entry =
            SessionEntry { id, control, outbox: outbox_of_it, since: now, address, agent, has_tunnels };
        let (replaced, is_news) = live.change(|live| {
            if live.session.as_ref().map(|session| session.id) != older {
                return None;
            }
            let steady = self.steady.now();
            let standing = live.presence.standing(&self.rules, steady);
            let mut is_news = live.info != info;
            let replaced = live.session.take();
            if let Some(replaced) = &replaced {
                live.presence.disconnect(&self.rules, steady);
                if replaced.agent.start != entry.agent.start {
                    is_news |= live.second.take().is_some();
                }
            }
            live.end_session();
            live.session = Some(entry);
            live.info = info;
            live.seen(now);
            // The numbers of its changes begin anew.
            live.status.iter_mut().for_each(KeptStatus::await_whole);
            if let Some(mark) = &high_water {
                is_news |= live.accept(mark);
            }
            live.presence.connect(&self.rules, steady);
            is_news |= live.presence.standing(&self.rules, steady) != standing;
            Some((replaced, is_news))
        })?;
        match replaced {
            Some(older) => older.control.close(close_code::REPLACED, "replaced by a newer session"),
            None => self.count(1),
        }
        self.note_session(node);
        if is_news {
            self.mark_dirty(node);
        }
        Some(Attached { fleet: Arc::clone(self), node: node.clone(), live, outbox, id })
    }

    fn detach(&self, node: &NodeId, live: &LiveNode, id: u64) {
        let was_current = live.change(|live| {
            let current = live.session.as_ref().is_some_and(|session| session.id == id);
            if current {
                live.end_session();
                live.presence.disconnect(&self.rules, self.steady.now());
            }
            current
        });
        if was_current {
            self.count(-1);
            self.note_session(node);
        }
    }

    /// A node's session began, ended or became old enough to count: when its standing changes is to be looked at.
    pub(crate) fn note_session(&self, node: &NodeId) {
        self.sessions_of.lock().insert(node.clone());
        self.session_changed.notify_one();
    }

    /// Waits until a session of some node began or ended. One task waits.
    pub(crate) async fn sessions_changed(&self) {
        self.session_changed.notified().await;
    }

    pub(crate) fn take_changed_sessions(&self) -> HashSet<NodeId> {
        std::mem::take(&mut *self.sessions_of.lock())
    }

    /// When something of a node changes because time passes.
    pub(crate) fn changes_at(&self, node: &NodeId, now: Timestamp) -> Option<Timestamp> {
        let live = self.get(node)?;
        let live = live.lock();
        let second = live.second.as_ref().map(SecondMachine::until).filter(|until| *until > now);
        [live.presence.changes_at(&self.rules, now), second].into_iter().flatten().min()
    }

    /// Whether a node counts as there, and since when it does not.
    pub(crate) fn standing(&self, live: &Live, now: Timestamp) -> (Standing, Option<Timestamp>) {
        (live.presence.standing(&self.rules, now), live.presence.absent_since(&self.rules, now))
    }

    /// Asks a node's session whether its agent is there. One question at a time.
    pub(crate) async fn ask_if_there(&self, node: &NodeId) -> Presumed {
        let Some(live) = self.get(node) else { return Presumed::Gone };
        {
            let mut live = live.lock();
            if live.asked_until.is_some_and(|until| Instant::now() < until) {
                return Presumed::BeingAsked;
            }
            live.asked_until = Some(Instant::now() + ANSWER_WITHIN);
        }
        let answer = self.ask(node, request::Ask::Ping(Ping {}), ANSWER_WITHIN).await;
        live.lock().asked_until = None;
        match answer {
            // Whatever it answers, also that it does not know the question.
            Err(problem) if matches!(problem.code.as_str(), "node_not_connected" | "node_silent") => {
                Presumed::Gone
            }
            Ok(_) | Err(_) => Presumed::There,
        }
    }

    fn count(&self, by: isize) {
        self.sessions.send_modify(|sessions| *sessions = sessions.saturating_add_signed(by));
        self.metrics.sessions.set(i64::try_from(self.connected()).unwrap_or(i64::MAX));
    }

    /// Hands a newly stored document to the node's session, if there is one.
    pub(crate) fn offer(&self, node: &NodeId, stored: Stored, pushed_at: Option<Instant>) -> Offered {
        let live = self.get_or_insert(node);
        let outbox = live.change(|live| {
            if let Some(at) = pushed_at {
                live.pushed = Some((stored.assigned.numbers, at));
            }
            live.session.as_ref().map(|session| Arc::clone(&session.outbox))
        });
        match outbox {
            Some(outbox) => {
                outbox.put_document(stored);
                Offered::ToSession
            }
            None => Offered::NotConnected,
        }
    }

    /// Which process of the node's agent a tunnel would lead to. None where the agent opens no tunnels.
    pub(crate) fn tunnel_process(&self, node: &NodeId) -> Result<Option<String>, Problem> {
        let live = self.get(node).ok_or_else(|| refuse::not_connected(node))?;
        let live = live.lock();
        let session = live.session.as_ref().ok_or_else(|| refuse::not_connected(node))?;
        Ok(session.has_tunnels.then(|| session.agent.process()))
    }

    /// Asks a node and waits for its answer.
    pub(crate) async fn ask(&self, node: &NodeId, ask: request::Ask, wait: Duration) -> Answer {
        let id = format!("{:016x}", fastrand::u64(..));
        let (reply, answer) = oneshot::channel();
        let live = self.get(node).ok_or_else(|| refuse::not_connected(node))?;
        let outbox = {
            let mut live = live.lock();
            let session = live.session.as_ref().ok_or_else(|| refuse::not_connected(node))?;
            let outbox = Arc::clone(&session.outbox);
            live.expect_reply(id.clone(), reply);
            outbox
        };
        if !outbox.put_request(Request { id: id.clone(), ask: Some(ask) }) {
            live.lock().take_waiting(&id);
            let detail = format!("node {node} has too many requests waiting");
            return Err(Problem::new(429, "node_busy", detail, "Try again in a moment."));
        }
        match tokio::time::timeout(wait, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(refuse::not_connected(node)),
            Err(_) => {
                live.lock().take_waiting(&id);
                let detail = format!("node {node} did not answer within {} s", wait.as_secs());
                Err(Problem::new(504, "node_silent", detail, "Asking again is safe: it is done once."))
            }
        }
    }

    /// Drops everything known live of a node and closes its session; `true` when there was one.
    pub(crate) fn forget(&self, node: &NodeId) -> bool {
        let removed = self.nodes.write().remove(node);
        let Some(live) = removed else { return false };
        let session = live.change(|live| {
            let session = live.session.take();
            live.end_session();
            live.removed = true;
            session
        });
        match session {
            Some(session) => {
                session.control.close(close_code::REMOVED, "the node was removed from the cluster");
                self.count(-1);
                true
            }
            None => false,
        }
    }

    /// The nodes that have a session now, in the order of their names.
    pub(crate) fn connected_nodes(&self) -> Vec<NodeId> {
        let nodes = self.nodes.read();
        let live = nodes.iter().filter(|(_, live)| live.lock().session.is_some());
        let mut names: Vec<NodeId> = live.map(|(node, _)| node.clone()).collect();
        names.sort();
        names
    }

    /// The nodes of the cluster.
    pub(crate) fn known_nodes(&self) -> Vec<NodeId> {
        self.nodes.read().keys().cloned().collect()
    }

    fn outboxes(&self) -> Vec<Arc<Outbox>> {
        let nodes = self.nodes.read();
        let outbox = |live: &Arc<LiveNode>| live.lock().session.as_ref().map(|s| Arc::clone(&s.outbox));
        nodes.values().filter_map(outbox).collect()
    }

    /// A trust root made every node forget its numbers. What waits to be sent is numbered anew, and comes back.
    pub(crate) fn forget_marks(&self) {
        let nodes: Vec<_> = self.nodes.read().values().cloned().collect();
        for live in nodes {
            live.change(Live::forget_marks);
        }
        self.outboxes().iter().for_each(|outbox| outbox.drop_document());
    }

    /// Every session looks what trust its node lacks.
    pub(crate) fn trust_changed(&self) {
        self.outboxes().iter().for_each(|outbox| outbox.put_trust());
    }

    /// Every session tells its node which operators are refused.
    pub(crate) fn operators_changed(&self) {
        self.outboxes().iter().for_each(|outbox| outbox.put_operators());
    }

    /// Says goodbye to all and waits until they are gone, or `wait` is over.
    pub(crate) async fn close_all(&self, wait: Duration) {
        // When they were last seen is written with what else is.
        self.dirty.lock().extend(self.connected_nodes());
        let goodbye = Goodbye { reason: "the coordinator is stopping".to_owned(), redial: true };
        self.outboxes().iter().for_each(|outbox| outbox.put_goodbye(goodbye.clone()));
        let mut sessions = self.sessions.subscribe();
        let _ = tokio::time::timeout(wait, sessions.wait_for(|sessions| *sessions == 0)).await;
    }

    pub(crate) fn mark_dirty(&self, node: &NodeId) {
        self.dirty.lock().insert(node.clone());
        self.tell_news(node);
    }

    /// There is news of a node that placement is to hear.
    pub(crate) fn tell_news(&self, node: &NodeId) {
        self.news.lock().insert(node.clone());
        self.news_came.notify_one();
    }

    /// Waits until there is news of a node. One task waits.
    pub(crate) async fn news(&self) {
        self.news_came.notified().await;
    }

    /// The nodes with news since the last call.
    pub(crate) fn take_news(&self) -> HashSet<NodeId> {
        std::mem::take(&mut *self.news.lock())
    }

    /// The nodes to write since the last call.
    pub(crate) fn take_dirty(&self) -> Vec<(NodeId, Arc<LiveNode>)> {
        let dirty = std::mem::take(&mut *self.dirty.lock());
        dirty.into_iter().filter_map(|node| self.get(&node).map(|live| (node, live))).collect()
    }
}

/// A session's place in the table; gives it up when dropped.
pub(crate) struct Attached {
    fleet: Arc<Fleet>,
    pub(crate) node: NodeId,
    pub(crate) live: Arc<LiveNode>,
    pub(crate) outbox: Arc<Outbox>,
    id: u64,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.fleet.detach(&self.node, &self.live, self.id);
    }
}
