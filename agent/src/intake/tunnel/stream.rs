//! One stream, from its `open` frame on: read, bounded, and handed to what its kind is.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::wire::tunnel::v1::{Ended, Frame, Open, Opened, frame};
use mvm_proto::{IdError, Problem, TraceContext};
use mvm_telemetry::{Attribute, Kind, Span};
use mvm_transport::{SessionError, TunnelReceiver, TunnelSender, TunnelStream};
use tokio::time::timeout;
use tracing::{Instrument, debug, info_span, warn};

use super::{Shared, archive, exec, logs};
use crate::node::Place;

pub(super) const EXEC: &str = "exec";
pub(super) const ATTACH: &str = "attach";
pub(super) const LOGS: &str = "logs";
pub(super) const EXPORT: &str = "export";
pub(super) const IMPORT: &str = "import";
pub(super) const RELEASE: &str = "release";

/// From a stream's opening to its first frame.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// How long opening may take, a wake included: unless the caller says, and at most.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
const LONGEST_DEADLINE: Duration = Duration::from_secs(120);
/// Of a caller's name, in audit logs.
const MAX_ACTOR_CHARS: usize = 128;

pub(super) type Frames = TunnelReceiver<Frame>;
pub(super) type Answers = TunnelSender<Frame>;

/// Serves one stream until it ends.
pub(super) async fn serve(shared: Arc<Shared>, stream: TunnelStream<Frame>) {
    let TunnelStream { mut frames_in, mut frames_out } = stream;
    let open = match timeout(OPEN_WITHIN, frames_in.recv()).await {
        Ok(Ok(Some(Frame { body: Some(frame::Body::Open(open)) }))) => open,
        Ok(Ok(_)) => return debug!("a stream does not begin with its header"),
        Ok(Err(error)) => return debug!(%error, "lost a stream before its header"),
        Err(_) => return debug!("a stream's header did not come in time"),
    };
    let parent = TraceContext::parse(&open.traceparent);
    let trace = parent.map(|parent| parent.trace_id()).unwrap_or_default();
    let log = info_span!("stream", kind = %shown(&open.kind), trace = %trace);
    let mut span = shared.parts.tracer.begin(Kind::Server, "stream", parent);
    let refused = Box::pin(run(&shared, open, &mut span, frames_in, &mut frames_out)).instrument(log).await;
    if let Err(problem) = refused {
        span.fail(&problem.code);
        end(&mut frames_out, &problem).await;
    }
}

async fn run(
    shared: &Arc<Shared>,
    open: Open,
    span: &mut Span,
    frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let actor: String = mvm_proto::text::one_line(&open.actor, MAX_ACTOR_CHARS);
    // What an archive holds is known once its header came.
    if let (IMPORT, Some(asked)) = (open.kind.as_str(), &open.import) {
        return archive::import(shared, &open, actor, asked, frames_in, frames_out).await;
    }
    let place = Place {
        tenant: id("tenant_id", &open.tenant_id)?,
        pool: id("pool_id", &open.pool_id)?,
        instance: id("instance_id", &open.instance_id)?,
    };
    span.set(Attribute::Tenant, place.tenant.as_str());
    span.set(Attribute::Pool, place.pool.as_str());
    span.set(Attribute::Instance, place.instance.as_str());
    if [EXEC, ATTACH, LOGS, EXPORT, RELEASE].contains(&open.kind.as_str()) {
        span.rename(open.kind.clone());
    }
    let opening =
        Opening { shared: Arc::clone(shared), place, actor, deadline: deadline(open.open_within_ms) };
    match (open.kind.as_str(), &open.export, &open.release) {
        (EXPORT, Some(asked), None) => {
            return archive::export(&opening, asked, frames_in, frames_out).await;
        }
        (RELEASE, None, Some(asked)) => return archive::release(&opening, asked, frames_out).await,
        _ => {}
    }
    match (open.kind.as_str(), open.exec, open.attach, open.logs) {
        (EXEC, Some(asked), None, None) => {
            let tuning = (open.may_wake, open.is_activity);
            exec::run(opening, tuning, asked, span, frames_in, frames_out).await
        }
        (ATTACH, None, Some(asked), None) => {
            let tuning = (open.may_wake, open.is_activity);
            exec::attach(opening, tuning, asked, span, frames_in, frames_out).await
        }
        (LOGS, None, None, Some(asked)) => logs::run(&opening, &asked, frames_in, frames_out).await,
        (EXEC | ATTACH | LOGS | EXPORT | IMPORT | RELEASE, ..) => {
            Err(bad(format!("a stream of kind {} comes with its own operation and no other", open.kind)))
        }
        (kind, ..) => {
            let detail =
                format!("this agent opens no streams of kind {}", mvm_proto::json::quote(&shown(kind)));
            Err(Problem::new(501, "unknown_kind", detail, "Upgrade the agent."))
        }
    }
}

/// A stream that is being opened.
pub(super) struct Opening {
    pub(super) shared: Arc<Shared>,
    pub(super) place: Place,
    /// Who asks, as the coordinator says.
    pub(super) actor: String,
    /// How long opening may take.
    pub(super) deadline: Duration,
}

impl Opening {
    /// What a stream is answered with once it is open.
    pub(super) fn opened(&self, exec_id: String, woken: bool) -> Frame {
        let Place { tenant, pool, instance } = &self.place;
        framed(frame::Body::Opened(Opened {
            exec_id,
            tenant_id: tenant.to_string(),
            pool_id: pool.to_string(),
            instance_id: instance.to_string(),
            node_id: self.shared.parts.node.node_id().to_string(),
            woken,
        }))
    }

    pub(super) fn late(&self) -> Problem {
        let detail = format!("{} was not up within {:?}", self.place, self.deadline);
        Problem::new(504, "open_timed_out", detail, "Ask again: what was begun goes on.")
    }
}

pub(super) fn framed(body: frame::Body) -> Frame {
    Frame { body: Some(body) }
}

/// Tells why a stream is over, and waits until that has arrived.
pub(super) async fn end(frames_out: &mut Answers, problem: &Problem) {
    let problem = serde_json::to_vec(problem).unwrap_or_default().into();
    let told = frames_out.send(&framed(frame::Body::Ended(Ended { problem }))).await;
    if told.is_ok() {
        finish(frames_out).await;
    }
}

/// Ends a stream that has said all.
pub(super) async fn finish(frames_out: &mut Answers) {
    frames_out.finish();
    if let Err(error) = frames_out.delivered().await {
        debug!(%error, "lost a stream at its end");
    }
}

/// A peer that is gone is no trouble of this node.
pub(super) fn lost(error: &SessionError) {
    match error {
        SessionError::FrameTooLarge { .. } | SessionError::Malformed(_) => {
            warn!(%error, "a stream broke a rule");
        }
        error => debug!(%error, "lost a stream"),
    }
}

fn deadline(asked_ms: u32) -> Duration {
    match asked_ms {
        0 => DEFAULT_DEADLINE,
        ms => Duration::from_millis(ms.into()).min(LONGEST_DEADLINE),
    }
}

pub(super) fn id<T: FromStr<Err = IdError>>(field: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|rule: IdError| bad(format!("{field} {rule}")))
}

pub(super) fn bad(detail: String) -> Problem {
    Problem::new(400, "bad_request", detail, "Correct the request.")
}

fn shown(text: &str) -> String {
    mvm_proto::text::one_line(text, 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_taken_within_bounds() {
        assert_eq!(deadline(0), DEFAULT_DEADLINE);
        assert_eq!(deadline(50), Duration::from_millis(50));
        assert_eq!(deadline(u32::MAX), LONGEST_DEADLINE);
    }
}
