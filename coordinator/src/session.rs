//! One conversation with one node, for as long as its session lasts.
//!
//! The transport proved who the node is. The task here looks whether it may speak before it reads anything, hears the
//! hello, takes the node's place in the fleet, and then does two things: what the node says goes to the fleet's table
//! (`incoming`), what lies in the node's outbox goes to the node (`outgoing`). Listening never waits for sending, so two large frames that meet can't block each other. It
//! keeps no queue and no document; what must survive is in the store before it gets here.

mod incoming;
mod join;
mod outgoing;
mod secrets;

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use mvm_pki::{Identity, Role};
use mvm_proto::status::fit::{fit_info, shorten};
use mvm_proto::status::{Mark, NodeInfo};
use mvm_proto::wire::session::v1::{
    AgentFrame, CoordinatorFrame, Goodbye, Hello, Welcome, agent_frame, coordinator_frame,
};
use mvm_proto::wire::{
    FEATURE_BATCH_SIGNATURES, FEATURE_DOCUMENT_DELTAS, SESSION_FEATURES, SESSION_PROTOCOL,
};
use mvm_proto::{Digest, NodeId, Problem};
use mvm_transport::session::close_code;
use mvm_transport::{
    FrameReceiver, FrameSender, Pace, ServerSession, SessionControl, SessionError, SessionHandler,
};
use prost::Message;

use self::incoming::Refusals;
use crate::enrolment;
use crate::fleet::Attached;
use crate::rate_limit::Holder;
use crate::records::Numbers;
use crate::secrets::Delivery;
use crate::settings::SILENT_INTERVALS;
use crate::state::State;
use crate::stored::now;

/// The oldest version of the session that is still spoken.
const OLDEST_PROTOCOL: u32 = 1;
/// From the handshake to the hello. An agent sends it at once.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// The largest description of a node that is kept: names, versions and a few conditions take a hundredth of it.
const MAX_INFO_BYTES: usize = 64 * 1024;
/// How long a goodbye may take to get out before the connection is cut anyway.
const GOODBYE_WAIT: Duration = Duration::from_secs(2);
/// Of why a session ended, in the log: the peer may have written it.
const MAX_REASON_BYTES: usize = 512;
/// When a node refused a document for want of its own resources (a full disk), it is tried again after this.
const RETRY_REFUSED: Duration = Duration::from_secs(30);

/// How fast a node is read: far more than an agent sends, and little enough that one which never stops sending costs a
/// few percent of a processor.
const PACE: Pace = Pace { bytes_per_second: 4 * 1024 * 1024, burst_bytes: 32 * 1024 * 1024 };
/// Sessions that one identity may open per second in the long run, and at once. Each costs reads of the store, and
/// lines in the log; agents wait longer and longer before they dial again.
pub(crate) const SESSIONS_PER_SECOND: f64 = 2.0;
pub(crate) const SESSIONS_BURST: f64 = 60.0;

/// Takes sessions from the transport.
pub(crate) struct Sessions(pub(crate) Arc<State>);

impl SessionHandler for Sessions {
    fn handle(&self, peer: Identity, address: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()> {
        Box::pin(run(Arc::clone(&self.0), peer, address, session))
    }
}

/// Why a conversation is over.
#[derive(Debug)]
enum End {
    /// The other side or the network ended it.
    Lost(SessionError),
    Finished,
    /// We end it, and say why.
    Refused {
        code: u32,
        reason: String,
        redial: bool,
    },
    Goodbye(Goodbye),
    /// The peer opens sessions too often. It says so itself only: a line for each would be a flood of its own.
    TooOften,
}

impl From<SessionError> for End {
    /// The transport has closed what broke a limit or fell silent, and told the peer why.
    fn from(error: SessionError) -> Self {
        Self::Lost(error)
    }
}

impl End {
    fn protocol(reason: String) -> Self {
        Self::Refused { code: close_code::PROTOCOL, reason, redial: true }
    }

    fn problem(problem: &Problem) -> Self {
        // A node that is unknown or was removed has nothing to gain by dialling again; trouble here will pass.
        let pointless = matches!(problem.status, 403 | 404);
        let code = if pointless { close_code::REMOVED } else { close_code::OVERLOADED };
        Self::Refused { code, reason: problem.detail.clone(), redial: !pointless }
    }
}

async fn run(state: Arc<State>, peer: Identity, address: SocketAddr, session: ServerSession) {
    let ServerSession { mut frames_in, mut frames_out, control } = session;
    let end = match converse(&state, &peer, address, &mut frames_in, &mut frames_out, &control).await {
        Ok(()) => End::Finished,
        Err(end) => end,
    };
    let (code, goodbye) = match end {
        End::Finished => {
            tracing::debug!(peer = %peer, "the session ended");
            control.close(close_code::DONE, "");
            return;
        }
        End::Lost(error) => {
            let mut error = error.to_string();
            shorten(&mut error, MAX_REASON_BYTES);
            tracing::info!(peer = %peer, %address, %error, "lost the session");
            control.close(close_code::DONE, "");
            return;
        }
        End::Refused { code, reason, redial } => {
            tracing::warn!(peer = %peer, %address, %reason, "ended the session");
            (code, Goodbye { reason, redial })
        }
        End::Goodbye(goodbye) => (close_code::SHUTDOWN, goodbye),
        End::TooOften => {
            tracing::debug!(peer = %peer, %address, "the peer opens sessions too often");
            control.close(close_code::OVERLOADED, "too many sessions of this identity; dial again later");
            return;
        }
    };
    let reason = goodbye.reason.clone();
    let body = coordinator_frame::Body::Goodbye(goodbye);
    let farewell = async {
        frames_out.send(&frame(body)).await?;
        frames_out.finish().await
    };
    let _ = tokio::time::timeout(GOODBYE_WAIT, farewell).await;
    control.close(code, &reason);
}

fn frame(body: coordinator_frame::Body) -> CoordinatorFrame {
    CoordinatorFrame { body: Some(body) }
}

async fn converse(
    state: &Arc<State>,
    peer: &Identity,
    address: SocketAddr,
    frames_in: &mut FrameReceiver<AgentFrame>,
    frames_out: &mut FrameSender<CoordinatorFrame>,
    control: &SessionControl,
) -> Result<(), End> {
    let take = |holder| state.session_limit.take(holder, Instant::now()).map_err(|_| End::TooOften);
    take(Holder::Certificate(control.peer_certificate()))?;
    let node = node_of(peer)?;
    // Nothing of what a removed node or an old certificate sends is so much as read.
    admit(state, &node, control).await?;
    take(Holder::Identity(peer.clone()))?;
    frames_in.set_pace(PACE);
    let hello = tokio::time::timeout(HELLO_WAIT, frames_in.recv());
    let mut hello = match hello.await {
        Ok(Ok(Some(AgentFrame { body: Some(agent_frame::Body::Hello(hello)) }))) => hello,
        Ok(Ok(Some(_))) => return Err(End::protocol("the first frame is not a hello".to_owned())),
        Ok(Ok(None)) => return Ok(()),
        Ok(Err(error)) => return Err(error.into()),
        Err(_) => {
            let reason = "no hello came".to_owned();
            return Err(End::Refused { code: close_code::TOO_SLOW, reason, redial: true });
        }
    };
    let protocol = agree(&node, &hello)?;
    if let Some(info) = &mut hello.info {
        fit_info(info, now());
    }
    // The node forgets its mark with the trust that it is sent first.
    let forgotten = hello.high_water.take_if(|_| state.trust.resets_since(hello.trust_root_version));

    // A certificate from before a removal must not push out the session of the node that came back: it may have been
    // removed since it was admitted.
    admit(state, &node, control).await?;
    // The place in the fleet is taken before the store is asked again. Removing the node or storing a document does
    // it the other way round, so neither can slip between.
    let attached = Box::pin(join::join(state, &node, control, address, &hello)).await?;
    admit(state, &node, control).await?;
    if let Some(mark) = forgotten {
        attached.live.change(|live| live.forget_mark(&mark));
    }
    tracing::info!(%node, %address, "connected");

    let silence = state.settings.heartbeat * SILENT_INTERVALS;
    frames_in.set_silence(Some(silence));
    let welcome = Welcome {
        protocol,
        coordinator: state.cluster.name.clone(),
        heartbeat_seconds: u32::try_from(state.settings.heartbeat.as_secs().max(1)).unwrap_or(u32::MAX),
        now: now().to_string(),
        features: features(&hello),
    };
    let knows = |name| welcome.features.iter().any(|feature| feature == name);
    let takes_batches = knows(FEATURE_BATCH_SIGNATURES);
    // The signature of a delta is of a batch as well.
    let takes_deltas = takes_batches && knows(FEATURE_DOCUMENT_DELTAS);
    frames_out.send(&frame(coordinator_frame::Body::Welcome(welcome))).await?;

    let mut talk = Talk {
        state,
        attached,
        trust: (hello.trust_root_version, hello.images_version),
        sent: None,
        unanswered: None,
        refusals: Refusals::default(),
        renumbered: 0,
        retry: None,
        whole_wanted: false,
        ask_for_whole: false,
        secrets: Delivery::default(),
        takes_deltas,
        takes_batches,
    };
    talk.attached.outbox.put_trust();
    // A node that keeps entries is told also when there are none any more.
    if hello.removed_operators > 0 || !state.operators.refused(now()).operators.is_empty() {
        talk.attached.outbox.put_operators();
    }
    let behind = state.documents.after_hello(&node, &talk.attached.live, hello.high_water.as_ref(), now());
    let behind = Box::pin(behind).await;
    match behind {
        Ok(Some(stored)) => talk.attached.outbox.put_document(stored),
        Ok(None) => {}
        // Trouble with this one document; the session is of use all the same, for trust above all.
        Err(problem) if problem.status < 500 => tracing::warn!(%node, %problem, "no document for the node"),
        Err(problem) => return Err(End::problem(&problem)),
    }
    drop(hello);
    talk.run(frames_in, frames_out).await
}

/// Whether the node is of the cluster, and its certificate of this membership. What happens once is boxed, so that an
/// idle session does not carry the room for it.
fn admit<'a>(
    state: &'a State,
    node: &'a NodeId,
    control: &'a SessionControl,
) -> BoxFuture<'a, Result<(), End>> {
    Box::pin(async move {
        let certificate = control.peer_certificate();
        let admitted = enrolment::admitted(state, node, certificate.as_ref(), now()).await;
        admitted.map(drop).map_err(|problem| End::problem(&problem))
    })
}

/// Only nodes hold sessions, and each speaks for itself alone.
fn node_of(peer: &Identity) -> Result<NodeId, End> {
    let refused = || End::Refused {
        code: close_code::NOT_HERE,
        reason: format!("{peer} is not a node"),
        redial: false,
    };
    peer.node_id().filter(|_| peer.role() == Role::Node).ok_or_else(refused)
}

/// The version to speak, if the hello is one that this node may send.
fn agree(node: &NodeId, hello: &Hello) -> Result<u32, End> {
    check_info(node, hello.info.as_ref())?;
    check_mark(hello.high_water.as_ref())?;
    if hello.protocol < OLDEST_PROTOCOL {
        let reason = format!(
            "session version {} is not supported, only {OLDEST_PROTOCOL} to {SESSION_PROTOCOL}; upgrade the agent",
            hello.protocol
        );
        return Err(End::Refused { code: close_code::PROTOCOL, reason, redial: false });
    }
    Ok(hello.protocol.min(SESSION_PROTOCOL))
}

/// What both sides can do beyond the version.
fn features(hello: &Hello) -> Vec<String> {
    let known =
        SESSION_FEATURES.iter().filter(|feature| hello.features.iter().any(|named| named == *feature));
    known.map(|feature| (*feature).to_owned()).collect()
}

/// A node may describe only itself, within a size limit.
fn check_info(node: &NodeId, info: Option<&NodeInfo>) -> Result<(), End> {
    let claimed = info.map_or("", |info| info.node_id.as_str());
    if claimed != node.as_str() {
        let shown: String = claimed.chars().take(64).collect();
        let reason = format!("node {node} says that it is {shown:?}");
        return Err(End::Refused { code: close_code::PROTOCOL, reason, redial: false });
    }
    if info.is_some_and(|info| info.encoded_len() > MAX_INFO_BYTES) {
        return Err(End::protocol(format!("the node's description exceeds {MAX_INFO_BYTES} bytes")));
    }
    Ok(())
}

/// Marks are kept, so their digests must be digests: nothing else, and no longer.
fn check_mark(mark: Option<&Mark>) -> Result<(), End> {
    match mark.map(|mark| mark.digest.parse::<Digest>()) {
        Some(Err(rule)) => Err(End::protocol(format!("the digest of a mark {rule}"))),
        Some(Ok(_)) | None => Ok(()),
    }
}

/// The conversation after the hello.
struct Talk<'a> {
    state: &'a Arc<State>,
    attached: Attached,
    /// Root and images versions that the node has, or was sent.
    trust: (u64, u64),
    sent: Option<Numbers>,
    /// The newest heartbeat that was not answered yet. One slot: who hears of a later one knows of the earlier.
    unanswered: Option<u64>,
    refusals: Refusals,
    /// How often this session made us number its document anew.
    renumbered: u32,
    /// When to try again what the node could not take.
    retry: Option<tokio::time::Instant>,
    /// The node was asked for its whole status, which has not come.
    whole_wanted: bool,
    /// It is still to be asked.
    ask_for_whole: bool,
    /// The bundles that the node asked for.
    secrets: Delivery,
    /// Documents may be sent as what changed of the one before.
    takes_deltas: bool,
    /// Documents may have a signature that they share with others.
    takes_batches: bool,
}

impl Talk<'_> {
    async fn run(
        &mut self,
        frames_in: &mut FrameReceiver<AgentFrame>,
        frames_out: &mut FrameSender<CoordinatorFrame>,
    ) -> Result<(), End> {
        loop {
            while let Some(body) = self.next_out()? {
                if Box::pin(self.send(body, frames_in, frames_out)).await?.is_break() {
                    return Ok(());
                }
            }
            let (retry, secrets_due) = (self.retry, self.secrets.due(tokio::time::Instant::now()));
            tokio::select! {
                received = frames_in.recv() => if self.hear(received?).await?.is_break() {
                    return Ok(());
                },
                () = self.attached.outbox.filled() => {}
                () = sleep_until(retry), if retry.is_some() => Box::pin(self.try_again()).await?,
                () = sleep_until(secrets_due), if secrets_due.is_some() => Box::pin(self.make_secrets()).await?,
            }
        }
    }

    /// `Break` when the node has nothing more to say.
    async fn hear(&mut self, received: Option<AgentFrame>) -> Result<ControlFlow<()>, End> {
        match received {
            Some(AgentFrame { body: Some(body) }) => Box::pin(self.hear_body(body)).await?,
            // A frame of a kind that only newer versions know.
            Some(AgentFrame { body: None }) => {}
            None => return Ok(ControlFlow::Break(())),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// The node lacks the document that a delta was of: it gets this one whole, and the next ones too.
    async fn send_whole(&mut self) -> Result<(), End> {
        if std::mem::take(&mut self.takes_deltas) {
            self.try_again().await?;
        }
        Ok(())
    }

    async fn try_again(&mut self) -> Result<(), End> {
        self.retry = None;
        let stored = self.state.documents.load(&self.attached.node).await;
        if let Some(stored) = stored.map_err(|error| End::problem(&error.into()))? {
            self.sent = None;
            self.attached.outbox.put_document(stored);
        }
        Ok(())
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn hello(protocol: u32, node: &str) -> Hello {
        let info = NodeInfo { node_id: node.to_owned(), ..NodeInfo::default() };
        Hello { protocol, info: Some(info), ..Hello::default() }
    }

    #[test]
    fn a_newer_agent_is_answered_in_our_newest_version() {
        let node: NodeId = "n1".parse().unwrap();
        assert!(matches!(agree(&node, &hello(99, "n1")), Ok(SESSION_PROTOCOL)));
        assert!(matches!(agree(&node, &hello(0, "n1")), Err(End::Refused { redial: false, .. })));
    }

    #[test]
    fn a_node_that_gives_anothers_name_is_refused() {
        let node: NodeId = "n1".parse().unwrap();
        assert!(matches!(agree(&node, &hello(1, "n2")), Err(End::Refused { redial: false, .. })));
        assert!(matches!(agree(&node, &Hello { protocol: 1, ..Hello::default() }), Err(End::Refused { .. })));
    }

    #[test]
    fn a_hello_chooses_not_how_much_is_kept_of_it() {
        let node: NodeId = "n1".parse().unwrap();
        let mut large = hello(1, "n1");
        large.info.as_mut().unwrap().driver = "x".repeat(MAX_INFO_BYTES);
        assert!(matches!(agree(&node, &large), Err(End::Refused { .. })));
        let mark = Mark { epoch: 1, generation: 1, digest: "x".repeat(100) };
        let odd = Hello { high_water: Some(mark), ..hello(1, "n1") };
        assert!(matches!(agree(&node, &odd), Err(End::Refused { .. })));
    }

    #[test]
    fn only_nodes_hold_sessions() {
        for role in [Role::Operator, Role::Coordinator] {
            let peer = Identity::new("c".parse().unwrap(), role, "n1").unwrap();
            assert!(matches!(node_of(&peer), Err(End::Refused { redial: false, .. })));
        }
    }
}
