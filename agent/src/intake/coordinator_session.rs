//! Keeps one session to the coordinator, for as long as the agent runs.
//!
//! One task owns the loop: resolve, dial the addresses in turn, speak ([`conversation`]) until the session ends, wait,
//! again. The name is resolved anew for each attempt, so that a coordinator that restarts or moves is found. Losing the
//! session changes nothing on the node: what is in force stays in force.

mod acks;
mod conversation;
mod requests;
mod secrets_feed;
mod status_feed;
mod status_pacer;

use std::sync::Arc;
use std::time::Duration;

use mvm_pki::{LiveAnchors, LiveCredential};
use mvm_proto::status::{Condition, ConditionKind, NodeInfo};
use mvm_proto::text::chain;
use mvm_proto::wire::session::v1::AgentStart;
use mvm_proto::{Problem, Timestamp};
use mvm_transport::session::close_code;
use mvm_transport::{ALPN_SESSION, Backoff, ClientSession, Limits, SessionError, Target, dial_session};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::intake::removed_operators::RemovedOperators;
use crate::intake::source::Intake;
use crate::intake::tunnel::Tunnels;
use crate::metrics::Metrics;
use crate::node::event_log::EventLog;
use crate::node::handle::NodeHandle;
use crate::upkeep::certs;

/// A session that lasted this long was a real one: the next failure begins with short waits again. A coordinator that
/// welcomes and drops at once keeps its agents backing off.
const SETTLED_AFTER: Duration = Duration::from_secs(5);

/// How the session fares, for readiness and for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionState {
    Connected { coordinator: String },
    Disconnected { reason: String },
}

impl Default for SessionState {
    fn default() -> Self {
        Self::Disconnected { reason: "not dialled yet".to_owned() }
    }
}

impl SessionState {
    /// The same as a condition, for `node info`.
    #[must_use]
    pub fn condition(&self, now: Timestamp) -> Condition {
        let (holds, reason, message) = match self {
            Self::Connected { coordinator } => (true, "Welcomed", coordinator.as_str()),
            Self::Disconnected { reason } => (false, "Disconnected", reason.as_str()),
        };
        Condition::new(ConditionKind::SessionConnected, holds, reason, message, now)
    }
}

/// What a session is made with and works on.
pub struct SessionContext {
    pub coordinator: Target,
    pub credential: LiveCredential,
    pub anchors: LiveAnchors,
    pub limits: Limits,
    pub node: NodeHandle,
    pub intake: Intake,
    pub describe: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    pub events: Arc<EventLog>,
    pub metrics: Arc<Metrics>,
    pub removed_operators: Arc<RemovedOperators>,
    pub state: watch::Sender<SessionState>,
    pub tunnels: Tunnels,
    /// Which process this is.
    pub start: AgentStart,
}

impl std::fmt::Debug for SessionContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionContext").field("coordinator", &self.coordinator).finish_non_exhaustive()
    }
}

/// How a session ended.
#[derive(Debug)]
enum Ending {
    /// This agent is stopping.
    Stopping,
    /// The coordinator said goodbye, and whether to come back.
    Goodbye {
        reason: String,
        redial: bool,
    },
    Failed(SessionFailure),
}

#[derive(Debug, thiserror::Error)]
enum SessionFailure {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the coordinator ended the stream without a goodbye")]
    Ended,
    #[error("the coordinator did not welcome this node within {0:?}")]
    NoWelcome(Duration),
    #[error("the coordinator's first frame is not a welcome")]
    NotAWelcome,
    /// The next hello says which trust this node really has, and the coordinator sends the rest again.
    #[error("could not take over the cluster's trust metadata: {0}")]
    Trust(Problem),
    /// In force, but perhaps not across a restart; the next session brings it again.
    #[error("could not save the list of removed operators")]
    RemovedOperators(#[source] std::io::Error),
    #[error("the coordinator speaks version {theirs} of the session protocol, this agent {ours}")]
    Protocol { ours: u32, theirs: u32 },
}

impl Ending {
    /// Whether dialling again with the same certificate could help.
    fn is_final(&self) -> bool {
        match self {
            Self::Goodbye { redial, .. } => !redial,
            Self::Failed(SessionFailure::Session(SessionError::Closed { code, .. })) => {
                *code == u64::from(close_code::REMOVED)
            }
            Self::Stopping | Self::Failed(_) => false,
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Stopping => "the agent is stopping".to_owned(),
            Self::Goodbye { reason, .. } => format!("the coordinator said goodbye: {reason}"),
            Self::Failed(failure) => chain(failure),
        }
    }
}

/// Dials, speaks and dials again until `shutdown`.
pub async fn coordinator_session_task(context: SessionContext, shutdown: CancellationToken) {
    let mut backoff = Backoff::default();
    let mut swaps = context.credential.changed();
    loop {
        let dialled = tokio::select! {
            dialled = Box::pin(dial(&context)) => dialled,
            () = shutdown.cancelled() => return,
        };
        context.metrics.dialled(dialled.is_ok());
        let mut removed = false;
        match dialled {
            Err(reason) => {
                debug!(coordinator = %context.coordinator, %reason, "no session");
                if backoff.attempts() == 0 {
                    warn!(coordinator = %context.coordinator, %reason, "could not open a session; retrying");
                }
                context.state.send_replace(SessionState::Disconnected { reason });
            }
            Ok(session) => {
                let begun = Instant::now();
                let ending = Box::pin(conversation::converse(&context, session, &shutdown)).await;
                context.metrics.session(false);
                context.state.send_replace(SessionState::Disconnected { reason: ending.reason() });
                if matches!(ending, Ending::Stopping) {
                    return;
                }
                warn!(reason = %ending.reason(), "the session ended");
                removed = ending.is_final();
                if begun.elapsed() >= SETTLED_AFTER {
                    backoff.reset();
                }
            }
        }
        let wait = backoff.next(fastrand::f64());
        tokio::select! {
            () = shutdown.cancelled() => return,
            // Told not to come back: only a new certificate, that is a new enrolment, makes this a member again.
            () = tokio::time::sleep(wait), if !removed => {}
            changed = swaps.changed() => if changed.is_err() { return },
        }
    }
}

/// A connection to the first of the coordinator's addresses that answers.
async fn dial(context: &SessionContext) -> Result<ClientSession, String> {
    let target = &context.coordinator;
    let addresses = target.resolve().await.map_err(|error| chain(&error))?;
    let mut reasons = Vec::new();
    for address in addresses {
        let tls = certs::verified(Some(&context.credential), &context.anchors, ALPN_SESSION)
            .map_err(|error| chain(&error))?;
        match dial_session(address, target.host(), tls, &context.limits).await {
            Ok(session) => {
                info!(coordinator = %target, %address, "connected");
                return Ok(session);
            }
            Err(error) => reasons.push(chain(&error)),
        }
    }
    Err(reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_removal_or_an_explicit_goodbye_keeps_the_agent_from_redialling() {
        let closed = |code: u32| {
            Ending::Failed(SessionError::Closed { code: code.into(), reason: String::new() }.into())
        };
        assert!(closed(close_code::REMOVED).is_final());
        assert!(Ending::Goodbye { reason: String::new(), redial: false }.is_final());
        for ending in [
            closed(close_code::SHUTDOWN),
            closed(close_code::REPLACED),
            closed(close_code::OVERLOADED),
            Ending::Goodbye { reason: String::new(), redial: true },
            Ending::Failed(SessionFailure::Ended),
        ] {
            assert!(!ending.is_final(), "{ending:?}");
        }
    }
}
