//! Metrics, liveness and readiness on a loopback port of their own, for the machine's own tools.
//!
//! `/healthz`: is the reconcile loop alive (if not, restart the agent). `/readyz`: can this node do its work (if not,
//! the answer says why). Neither needs a certificate, so neither tells anything about tenants.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::{StatusCode, header};
use mvm_pki::LiveCredential;
use mvm_proto::Problem;
use mvm_proto::status::{Condition, ConditionKind};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::clock::Clock;
use crate::intake::coordinator_session::SessionState;
use crate::intake::source::FileState;
use crate::metrics::{MEDIA_TYPE, Metrics, NodeState};
use crate::node::handle::NodeHandle;

/// A pass may be late by this much beyond three intervals before the loop counts as dead: a slow boot is not a hang.
const LATE_PASS_GRACE: Duration = Duration::from_secs(60);

/// The file that readiness writes to learn whether state can be written.
const PROBE_FILE: &str = ".writable";

/// What readiness is judged by.
#[derive(Debug)]
pub struct Health {
    pub clock: Clock,
    pub interval: Duration,
    pub data_dir: PathBuf,
    /// When the loop last finished a pass.
    pub last_pass: watch::Receiver<Instant>,
    /// Absent: this node runs without certificates.
    pub credential: Option<LiveCredential>,
    pub source: SourceHealth,
}

/// The one source of desired state, as far as it can fail.
#[derive(Debug)]
pub enum SourceHealth {
    Session(watch::Receiver<SessionState>),
    File(watch::Receiver<FileState>),
    /// Pushed documents only: there is nothing to lose.
    Pushed,
}

/// One reason for not being ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub code: &'static str,
    pub detail: String,
}

#[derive(Serialize)]
struct ReadyBody {
    ready: bool,
    reasons: Vec<Reason>,
}

impl Health {
    /// Whether the reconcile loop still makes passes.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.last_pass.borrow().elapsed() <= self.interval * 3 + LATE_PASS_GRACE
    }

    /// Why this node can't do its work now; empty when it can.
    #[must_use]
    pub fn reasons(&self) -> Vec<Reason> {
        let loop_dead = (!self.is_alive()).then(|| Reason {
            code: "reconcile_stalled",
            detail: "the reconcile loop has not finished a pass for too long".to_owned(),
        });
        [self.certificate(), self.source(), self.state_writable(), loop_dead].into_iter().flatten().collect()
    }

    fn certificate(&self) -> Option<Reason> {
        let credential = self.credential.as_ref()?.current();
        let now = self.clock.now();
        let detail = if now >= credential.not_after() {
            format!("the certificate expired at {}; enrol again with a new token", credential.not_after())
        } else if now < credential.not_before() {
            format!("the certificate counts only from {}; check the clock", credential.not_before())
        } else {
            return None;
        };
        Some(Reason { code: "certificate_invalid", detail })
    }

    fn source(&self) -> Option<Reason> {
        match &self.source {
            SourceHealth::Pushed => None,
            SourceHealth::Session(state) => match &*state.borrow() {
                SessionState::Connected { .. } => None,
                SessionState::Disconnected { reason } => {
                    Some(Reason { code: "no_session", detail: reason.clone() })
                }
            },
            SourceHealth::File(state) => match &*state.borrow() {
                FileState::InForce => None,
                FileState::NotRead => {
                    Some(Reason { code: "file_not_read", detail: "the file was not read yet".to_owned() })
                }
                FileState::Refused(problem) => {
                    Some(Reason { code: "file_refused", detail: problem.to_string() })
                }
            },
        }
    }

    fn state_writable(&self) -> Option<Reason> {
        let path = self.data_dir.join(PROBE_FILE);
        let error = std::fs::write(&path, b"probe").err()?;
        Some(Reason {
            code: "state_not_writable",
            detail: format!("could not write {}: {error}", path.display()),
        })
    }

    /// The same as conditions, for `node info`.
    #[must_use]
    pub fn condition(&self) -> Condition {
        let reasons = self.reasons();
        let message = reasons.iter().map(|reason| reason.detail.as_str()).collect::<Vec<_>>().join("; ");
        let reason = if reasons.is_empty() { "AllWell" } else { "SeeMessage" };
        Condition::new(ConditionKind::Ready, reasons.is_empty(), reason, message, self.clock.now())
    }
}

/// The node's state, looked at anew for each scrape.
pub type StateOf = Arc<dyn Fn() -> NodeState + Send + Sync>;

/// `/metrics`, `/healthz`, `/readyz`.
pub fn router(health: Arc<Health>, metrics: Arc<Metrics>, node: NodeHandle, state: StateOf) -> Router {
    let measured = Router::new().route("/metrics", get(render)).with_state((metrics, node, state));
    let asked =
        Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz)).with_state(health);
    measured.merge(asked)
}

async fn render(State((metrics, node, state)): State<(Arc<Metrics>, NodeHandle, StateOf)>) -> Response {
    let text = metrics.render(&node.instances(None), &state());
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], text).into_response()
}

async fn healthz(State(health): State<Arc<Health>>) -> Response {
    if health.is_alive() {
        return (StatusCode::OK, "ok\n").into_response();
    }
    let detail = "the reconcile loop has not finished a pass for too long";
    let problem =
        Problem::new(503, "reconcile_stalled", detail, "Restart the agent; instances keep running.");
    (StatusCode::SERVICE_UNAVAILABLE, Json(problem)).into_response()
}

async fn readyz(State(health): State<Arc<Health>>) -> Response {
    let reasons = health.reasons();
    let ready = reasons.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(ReadyBody { ready, reasons })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mvm_proto::Timestamp;

    struct Fixture {
        health: Health,
        file: watch::Sender<FileState>,
        _dir: tempfile::TempDir,
        _pass: watch::Sender<Instant>,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let (pass, last_pass) = watch::channel(Instant::now());
        let (file, state) = watch::channel(FileState::InForce);
        let health = Health {
            clock: Clock::new(|| Timestamp::from_unix_ms(0)),
            interval: Duration::from_secs(30),
            data_dir: dir.path().to_owned(),
            last_pass,
            credential: None,
            source: SourceHealth::File(state),
        };
        Fixture { health, file, _dir: dir, _pass: pass }
    }

    fn codes(health: &Health) -> Vec<&'static str> {
        health.reasons().into_iter().map(|reason| reason.code).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stopped_making_passes_is_dead_and_a_slow_one_is_not() {
        let fixture = fixture();
        tokio::time::advance(Duration::from_secs(3 * 30 + 60)).await;
        assert!(fixture.health.is_alive());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!fixture.health.is_alive());
        assert_eq!(codes(&fixture.health), ["reconcile_stalled"]);
    }

    #[tokio::test]
    async fn what_is_wrong_is_told_by_code_and_nothing_is_told_when_all_is_well() {
        let mut fixture = fixture();
        assert_eq!(codes(&fixture.health), [""; 0]);
        fixture.file.send_replace(FileState::Refused(Problem::new(422, "wrong_node", "for another", "")));
        assert_eq!(codes(&fixture.health), ["file_refused"]);
        fixture.health.data_dir = "/nonexistent".into();
        assert_eq!(codes(&fixture.health), ["file_refused", "state_not_writable"]);
        let (_session, state) = watch::channel(SessionState::default());
        fixture.health.source = SourceHealth::Session(state);
        assert_eq!(codes(&fixture.health), ["no_session", "state_not_writable"]);
        assert_eq!(fixture.health.condition().status, "False");
    }
}
