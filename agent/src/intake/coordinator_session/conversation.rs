//! One session, from hello to its end.
//!
//! A single loop owns both directions: it waits for whichever comes first - a frame from the coordinator, an ack that
//! is due, a change of status, an event, a heartbeat, a finished request. One frame is sent at a time, and sending waits
//! for the coordinator to read; listening goes on meanwhile, so that two large frames that meet can't block each other.
//! Nothing piles up behind a slow coordinator: status is the newest when it is sent, and events without a receiver
//! are dropped at their source.

use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use mvm_proto::status::{ConditionKind, Event, NodeInfo, NodeStatus};
use mvm_proto::wire::session::v1::{
    Ack, AgentFrame, CoordinatorFrame, DocumentWanted, Events, Heartbeat, Hello, RemovedOperators, Reply,
    Request, SecretsPiece, Trust, Welcome, agent_frame, coordinator_frame, request,
};
use mvm_proto::wire::{FEATURE_SECRETS, FEATURE_STATUS_DELTAS, SESSION_FEATURES, SESSION_PROTOCOL};
use mvm_proto::{Digest, Problem, TraceContext};
use mvm_transport::frame::encode_once;
use mvm_transport::session::close_code;
use mvm_transport::{AckBatcher, ClientSession, SessionControl, SessionError};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::acks::{self, Awaiting};
use super::requests;
use super::secrets_feed::{Arrived, SecretsFeed};
use super::status_feed::StatusFeed;
use super::{Ending, SessionContext, SessionFailure, SessionState};
use crate::node::event_log::EventLog;

/// Conditions that speak of the session, or count it among their reasons.
const SESSION_CONDITIONS: [ConditionKind; 2] = [ConditionKind::Ready, ConditionKind::SessionConnected];
/// From hello to welcome: a coordinator that takes longer is not well.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// When the coordinator names no interval.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);
/// The longest interval that a coordinator may ask for; above it a dead peer would go unnoticed for minutes.
const MAX_HEARTBEAT: Duration = Duration::from_secs(60);
/// So many heartbeats may go unanswered before the session counts as dead.
const MISSED_HEARTBEATS: u32 = 3;
/// Events in one frame.
const EVENTS_PER_FRAME: usize = 64;
/// So many of the newest events are told again at the beginning of a session: as many as a coordinator keeps. It may have
/// started anew, and what happened without a session was never told.
const EVENTS_TOLD_AGAIN: u64 = 50;
/// Requests worked on at once; more are turned away, and the coordinator asks again.
const MAX_REQUESTS: usize = 64;
/// Acks and replies that may wait while a frame is being sent; the next frame is heard once it is. A coordinator that
/// reads what it is sent never gets there.
const MAX_UNSENT: usize = 256;
/// How long the last words of a stopping agent may take.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Speaks until the session ends.
pub(super) async fn converse(
    context: &SessionContext,
    mut session: ClientSession,
    shutdown: &CancellationToken,
) -> Ending {
    let welcome = tokio::select! {
        welcome = greet(context, &mut session) => welcome,
        () = shutdown.cancelled() => return Ending::Stopping,
    };
    let welcome = match welcome {
        Ok(welcome) => welcome,
        Err(ending) => {
            session.control.close(close_code::PROTOCOL, "no welcome");
            return ending;
        }
    };
    info!(coordinator = %welcome.coordinator, "welcomed");
    context.metrics.session(true);
    context.state.send_replace(SessionState::Connected { coordinator: welcome.coordinator });

    let heartbeat = heartbeat_of(welcome.heartbeat_seconds);
    session.frames_in.set_silence(Some(heartbeat * MISSED_HEARTBEATS));
    let mut conversation = Conversation::new(context, &welcome.features, session.control.remote_address());
    match conversation.run(&mut session, heartbeat, shutdown).await {
        Ok(ending) => ending,
        Err(error) => Ending::Failed(error.into()),
    }
}

fn heartbeat_of(seconds: u32) -> Duration {
    match seconds {
        0 => DEFAULT_HEARTBEAT,
        seconds => Duration::from_secs(seconds.into()).min(MAX_HEARTBEAT),
    }
}

/// Hello up, welcome down; or a goodbye, when this node is not wanted.
async fn greet(context: &SessionContext, session: &mut ClientSession) -> Result<Welcome, Ending> {
    let (trust_root_version, images_version) = context.intake.trust_versions();
    let hello = Hello {
        protocol: SESSION_PROTOCOL,
        info: Some(without_session((context.describe)())),
        high_water: context.intake.high_water(),
        trust_root_version,
        images_version,
        removed_operators: u32::try_from(context.removed_operators.len()).unwrap_or(u32::MAX),
        features: SESSION_FEATURES.iter().map(|feature| (*feature).to_owned()).collect(),
        start: Some(context.start.clone()),
    };
    let failed = |failure: SessionFailure| Ending::Failed(failure);
    let sent = session.frames_out.send_encoded(encode(agent_frame::Body::Hello(hello))).await;
    sent.map_err(|error| failed(error.into()))?;
    let first = tokio::time::timeout(WELCOME_TIMEOUT, session.frames_in.recv())
        .await
        .map_err(|_| failed(SessionFailure::NoWelcome(WELCOME_TIMEOUT)))?
        .map_err(|error| failed(error.into()))?;
    match first.and_then(|frame| frame.body) {
        Some(coordinator_frame::Body::Welcome(welcome)) if welcome.protocol == SESSION_PROTOCOL => {
            Ok(welcome)
        }
        Some(coordinator_frame::Body::Welcome(welcome)) => {
            Err(failed(SessionFailure::Protocol { ours: SESSION_PROTOCOL, theirs: welcome.protocol }))
        }
        Some(coordinator_frame::Body::Goodbye(goodbye)) => {
            Err(Ending::Goodbye { reason: goodbye.reason, redial: goodbye.redial })
        }
        Some(_) => Err(failed(SessionFailure::NotAWelcome)),
        None => Err(failed(SessionFailure::Ended)),
    }
}

/// What the node is, without the conditions that the session itself decides: as long as this hello is the newest word,
/// there is a session, and before it there is none.
fn without_session(mut info: NodeInfo) -> NodeInfo {
    info.conditions.retain(|condition| !SESSION_CONDITIONS.iter().any(|kind| condition.is(*kind)));
    info
}

fn encode(body: agent_frame::Body) -> Bytes {
    encode_once(&AgentFrame { body: Some(body) })
}

struct Conversation<'a> {
    context: &'a SessionContext,
    /// Of the coordinator.
    address: SocketAddr,
    acks: AckBatcher,
    /// How many the batcher holds.
    unsent_acks: usize,
    awaiting: Awaiting,
    feed: StatusFeed,
    secrets: SecretsFeed,
    requests: JoinSet<Reply>,
    heartbeats: u64,
    /// What guests run on here was not known at the hello.
    still_finding_out: bool,
    /// What the last description said of the roots that this node trusts.
    told_roots: Vec<Digest>,
    /// A delta came of a document that is not here: the whole is still to be asked for.
    document_wanted: bool,
}

impl<'a> Conversation<'a> {
    /// `features`: those that both sides know.
    fn new(context: &'a SessionContext, features: &[String], address: SocketAddr) -> Self {
        let has = |wanted: &str| features.iter().any(|feature| feature == wanted);
        let mut awaiting = Awaiting::default();
        // The coordinator may have missed the convergence of what was accepted in an earlier session.
        awaiting.expect(context.intake.high_water());
        Self {
            context,
            address,
            acks: AckBatcher::new(),
            unsent_acks: 0,
            awaiting,
            feed: StatusFeed::new(context.node.status(), has(FEATURE_STATUS_DELTAS)),
            secrets: SecretsFeed::new(context.node.lacking_secrets(), has(FEATURE_SECRETS)),
            requests: JoinSet::new(),
            heartbeats: 0,
            still_finding_out: true,
            told_roots: Vec::new(),
            document_wanted: false,
        }
    }

    /// What the node is, once all of it is known and when it came to trust other roots.
    fn news_of_this_node(&mut self) -> Option<NodeInfo> {
        let roots = self.context.anchors.current().fingerprints();
        let same_roots = roots == self.told_roots;
        if !self.still_finding_out && same_roots {
            return None;
        }
        let info = without_session((self.context.describe)());
        self.still_finding_out = info.accelerator.is_empty();
        if self.still_finding_out && same_roots {
            return None;
        }
        self.told_roots = roots;
        Some(info)
    }

    async fn run(
        &mut self,
        session: &mut ClientSession,
        heartbeat: Duration,
        shutdown: &CancellationToken,
    ) -> Result<Ending, SessionError> {
        let status = self.context.node.status();
        let log = &self.context.events;
        let mut newest_event = log.newest();
        let mut told = newest_event.borrow().saturating_sub(EVENTS_TOLD_AGAIN);
        newest_event.mark_changed();
        let mut ticks = interval(heartbeat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let frame = tokio::select! {
                () = std::future::ready(()), if self.document_wanted => {
                    self.document_wanted = false;
                    Some(encode(agent_frame::Body::DocumentWanted(DocumentWanted {})))
                }
                received = session.frames_in.recv() => {
                    if let Some(ending) = self.hear(received?, &status).await {
                        return Ok(ending);
                    }
                    None
                }
                batch = self.acks.ready() => {
                    self.unsent_acks = 0;
                    Some(encode(agent_frame::Body::Acks(batch)))
                }
                told = self.feed.next() => match told {
                    Some(body) => Some(encode(body)),
                    None => return Ok(Ending::Stopping),
                },
                wanted = self.secrets.next() => Some(encode(wanted)),
                Ok(()) = newest_event.changed() => {
                    let (events, last) = next_events(log, told);
                    told = last;
                    if told < *newest_event.borrow_and_update() {
                        newest_event.mark_changed();
                    }
                    (!events.is_empty()).then(|| encode(agent_frame::Body::Events(Events { events })))
                }
                Some(done) = self.requests.join_next() => {
                    done.ok().map(|reply| encode(agent_frame::Body::Reply(reply)))
                }
                _ = ticks.tick() => {
                    self.heartbeats += 1;
                    let (sequence, info) = (self.heartbeats, self.news_of_this_node());
                    Some(encode(agent_frame::Body::Heartbeat(Heartbeat { sequence, info })))
                }
                () = shutdown.cancelled() => {
                    let _ = tokio::time::timeout(FAREWELL_TIMEOUT, self.farewell(session)).await;
                    return Ok(stopping(&session.control));
                }
            };
            self.observe(&status);
            if let Some(frame) = frame
                && let Some(ending) = self.send(frame, session, &status, shutdown).await?
            {
                return Ok(ending);
            }
        }
    }

    /// Sends one frame, and hears the coordinator all the while: what it is itself sending may have to be read before
    /// it reads this.
    async fn send(
        &mut self,
        frame: Bytes,
        session: &mut ClientSession,
        status: &watch::Receiver<NodeStatus>,
        shutdown: &CancellationToken,
    ) -> Result<Option<Ending>, SessionError> {
        let ClientSession { frames_in, frames_out, control, .. } = session;
        let mut sending = pin!(frames_out.send_encoded(frame));
        loop {
            tokio::select! {
                sent = &mut sending => return sent.map(|()| None),
                received = frames_in.recv(), if self.may_hear() => {
                    if let Some(ending) = self.hear(received?, status).await {
                        return Ok(Some(ending));
                    }
                }
                () = shutdown.cancelled() => break,
            }
        }
        // A frame given up half-way would be the end of the session; whole, it leaves room for the last acks.
        match tokio::time::timeout(FAREWELL_TIMEOUT, sending).await {
            Ok(sent) => sent.map(|()| None),
            Err(_) => Ok(Some(stopping(control))),
        }
    }

    fn may_hear(&self) -> bool {
        self.unsent_acks + self.requests.len() < MAX_UNSENT
    }

    fn push_ack(&mut self, ack: Ack) {
        self.unsent_acks += 1;
        self.acks.push(ack);
    }

    /// After whatever happened: a document may just have been accepted, or made true.
    fn observe(&mut self, status: &watch::Receiver<NodeStatus>) {
        if let Some(ack) = self.awaiting.observe(&status.borrow()) {
            self.push_ack(ack);
        }
    }

    /// The acks that were not sent yet, so that nothing accepted goes unreported.
    async fn farewell(&mut self, session: &mut ClientSession) -> Result<(), SessionError> {
        if !self.acks.is_empty() {
            let batch = self.acks.take();
            session.frames_out.send_encoded(encode(agent_frame::Body::Acks(batch))).await?;
        }
        session.frames_out.finish().await
    }

    async fn hear(
        &mut self,
        received: Option<CoordinatorFrame>,
        status: &watch::Receiver<NodeStatus>,
    ) -> Option<Ending> {
        let ending = match received {
            Some(CoordinatorFrame { body: Some(body) }) => self.on_frame(body).await,
            // A frame of a kind that a newer coordinator knows: not for this agent.
            Some(CoordinatorFrame { body: None }) => None,
            None => Some(Ending::Failed(SessionFailure::Ended)),
        };
        self.observe(status);
        ending
    }

    async fn on_frame(&mut self, body: coordinator_frame::Body) -> Option<Ending> {
        match body {
            coordinator_frame::Body::Document(document) => {
                self.on_document(&document.envelope, &document.traceparent).await;
            }
            coordinator_frame::Body::DocumentDelta(mut delta) => {
                let traceparent = std::mem::take(&mut delta.traceparent);
                match self.context.intake.rebuilt(delta) {
                    Some(envelope) => self.on_document(&envelope, &traceparent).await,
                    None => self.document_wanted = true,
                }
            }
            coordinator_frame::Body::Trust(trust) => return self.on_trust(&trust).await,
            coordinator_frame::Body::Request(request) => self.on_request(request),
            coordinator_frame::Body::RemovedOperators(told) => return self.on_removed_operators(&told),
            coordinator_frame::Body::Goodbye(goodbye) => {
                return Some(Ending::Goodbye { reason: goodbye.reason, redial: goodbye.redial });
            }
            coordinator_frame::Body::StatusWanted(_) => self.feed.send_whole(),
            coordinator_frame::Body::SecretsPiece(piece) => self.on_secrets(&piece).await,
            coordinator_frame::Body::SecretsRefused(refused) => self.secrets.refused(&refused),
            coordinator_frame::Body::HeartbeatAck(_) | coordinator_frame::Body::Welcome(_) => {}
        }
        None
    }

    async fn on_document(&mut self, envelope: &[u8], traceparent: &str) {
        let intake = &self.context.intake;
        match intake.accept(envelope, TraceContext::parse(traceparent)).await {
            Ok(accepted) => {
                self.awaiting.expect(Some(accepted.mark.clone()));
                self.push_ack(acks::accepted(accepted.mark));
            }
            Err(problem) => {
                let ack = acks::refused(envelope, &problem, intake.high_water());
                self.push_ack(ack);
            }
        }
    }

    /// What failed for want of this node's resources may work later, so the session is begun anew, with growing waits.
    /// A refusal would be the same next time: it was announced as an event, and the documents that need this trust will
    /// be refused by name.
    async fn on_trust(&mut self, trust: &Trust) -> Option<Ending> {
        let updated = self.context.intake.update_trust(&trust.roots, &trust.images).await;
        let problem = updated.err().filter(|problem| problem.status >= 500)?;
        Some(Ending::Failed(SessionFailure::Trust(problem)))
    }

    fn on_removed_operators(&self, told: &RemovedOperators) -> Option<Ending> {
        let kept = self.context.removed_operators.replace(told);
        info!(entries = self.context.removed_operators.len(), "received the list of removed operators");
        match kept {
            Ok(()) => None,
            // It would be the same next time; the last list stays in force.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                warn!(%error, "refused the list of removed operators");
                None
            }
            Err(error) => Some(Ending::Failed(SessionFailure::RemovedOperators(error))),
        }
    }

    /// What could not be kept is asked for again.
    async fn on_secrets(&mut self, piece: &SecretsPiece) {
        let Some(Arrived { tenant, digest, bytes }) = self.secrets.take(piece) else { return };
        let node = &self.context.node;
        match node.keep_secrets(tenant.clone(), digest, bytes).await {
            Ok(()) => info!(%tenant, %digest, "received a bundle of secrets"),
            Err(error) => node.events().warn("SecretsNotKept", &tenant, mvm_proto::text::chain(&error)),
        }
    }

    fn on_request(&mut self, request: Request) {
        let Request { id, ask } = request;
        let busy = self.requests.len() >= MAX_REQUESTS;
        let (node, tunnels) = (self.context.node.clone(), self.context.tunnels.clone());
        let (address, host) = (self.address, self.context.coordinator.host().to_owned());
        self.requests.spawn(async move {
            let done = match ask {
                _ if busy => Err(too_busy()),
                Some(request::Ask::OpenTunnel(asked)) => {
                    tunnels.open(address, &host, asked.port, asked.ticket).await.map(|()| None)
                }
                ask => requests::answer(&node, ask).await,
            };
            match done {
                Ok(answer) => Reply { id, problem: Vec::new(), answer },
                Err(problem) => {
                    warn!(code = %problem.code, detail = %problem.detail, "could not carry out the coordinator's request");
                    Reply { id, problem: serde_json::to_vec(&problem).unwrap_or_default(), answer: None }
                }
            }
        });
    }
}

fn stopping(control: &SessionControl) -> Ending {
    control.close(close_code::SHUTDOWN, "the agent is stopping");
    Ending::Stopping
}

fn too_busy() -> Problem {
    let detail = format!("{MAX_REQUESTS} requests are already being worked on");
    Problem::new(503, "busy", detail, "Ask again in a moment.")
}

/// The events after number `told` that fit one frame, and the number of the last.
fn next_events(log: &EventLog, told: u64) -> (Vec<Event>, u64) {
    let mut next = log.after(told);
    next.truncate(EVENTS_PER_FRAME);
    let mut events = Vec::new();
    let mut last = told;
    for (number, event) in next {
        let missed = number - last - 1;
        if missed > 0 {
            let message = format!("{missed} events were lost because they could not be sent in time");
            events.push(Event { kind: "EventsLost".to_owned(), message, ..Event::default() });
        }
        events.push(event);
        last = number;
    }
    (events, last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coordinators_heartbeat_is_taken_within_bounds() {
        assert_eq!(heartbeat_of(0), DEFAULT_HEARTBEAT);
        assert_eq!(heartbeat_of(5), Duration::from_secs(5));
        assert_eq!(heartbeat_of(u32::MAX), MAX_HEARTBEAT);
    }

    #[test]
    fn waiting_events_travel_in_one_frame_and_losses_are_told() {
        let log = EventLog::default();
        let event = |kind: u64| Event { kind: kind.to_string(), ..Event::default() };
        (1..=1026).map(event).for_each(|event| log.push(event));
        let (events, last) = next_events(&log, 1);
        let kinds: Vec<_> = events.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!((&kinds[..2], kinds.len(), last), (&["EventsLost", "3"][..], 65, 66));
        assert_eq!(next_events(&log, 1026), (Vec::new(), 1026));
    }
}
