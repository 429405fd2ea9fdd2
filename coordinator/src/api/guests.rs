//! Streams to guests: a caller's gRPC stream, relayed to the tunnel of the node that has the instance.
//!
//! The caller comes from the credential, and so does the tenant of one that is bound to a tenant. In this order: the header is
//! read and the caller's right checked, a slot taken, the instance found ([`locate`]), the audit log written, the node's tunnel
//! opened, and then frames pass both ways until either side ends ([`relay`]). Whatever ends here leaves the program in the
//! guest running: only its caller ends it.

mod locate;
mod relay;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use mvm_proto::wire::tunnel::v1::guests_server::Guests;
use mvm_proto::wire::tunnel::v1::{Frame, Open, frame};
use mvm_proto::{NodeId, Problem, TenantId, TraceContext};
use mvm_telemetry::{Attribute, Kind, Span, current};
use mvm_transport::slots::{Evict, Full, Rules, Slot, Slots};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};

use self::locate::{Located, Wanted};
use super::identify::{Credential, Identified};
use super::{Answer, answer};
use crate::objects::{Caller, Entering, Reach, enter, note_entry};
use crate::refuse;
use crate::state::State;
use crate::stored::now;
use crate::tunnels::stream_lost;

/// The kind of streams that read a console.
const LOGS: &str = "logs";

/// From the call to its first frame.
const FIRST_WITHIN: Duration = Duration::from_secs(10);
/// Streams of all callers, of one tenant's instances, and of one caller: nodes have limits of their own.
const MAX_STREAMS: usize = 4096;
const MAX_STREAMS_PER_TENANT: usize = 2048;
const MAX_STREAMS_PER_CALLER: usize = 512;
/// Frames that wait for the caller to read. An agent sends 32 KiB in each; one that lies, four times as much.
const WAITING_FRAMES: usize = 2;
/// Of what the audit log repeats of a program's name.
const MAX_AUDITED_CHARS: usize = 256;

pub(super) struct GuestService {
    pub(super) state: Arc<State>,
    slots: Slots<String>,
    tenants: Slots<TenantId>,
}

impl GuestService {
    pub(super) fn new(state: Arc<State>) -> Self {
        let rules = |most_per_key| Rules { most: MAX_STREAMS, most_per_key, evict: Evict::Idle };
        let slots = Slots::new(rules(MAX_STREAMS_PER_CALLER));
        Self { state, slots, tenants: Slots::new(rules(MAX_STREAMS_PER_TENANT)) }
    }

    async fn begin(
        &self,
        request: Request<Streaming<Frame>>,
    ) -> Result<mpsc::Receiver<Result<Frame, Status>>, Problem> {
        let identified = request.extensions().get::<Identified>();
        let caller = identified.map_or_else(|| Err(refuse::no_credential()), |found| found.0.clone())?;
        let credential = Credential::of(request.extensions(), request.metadata());
        let mut frames = request.into_inner();
        let first = timeout(FIRST_WITHIN, frames.message()).await;
        let open = match first.map(|first| first.map(|frame| frame.and_then(|frame| frame.body))) {
            Ok(Ok(Some(frame::Body::Open(open)))) => open,
            Ok(Ok(_)) => return Err(refuse::bad_request("a stream begins with `open`")),
            Ok(Err(status)) => return Err(refuse::bad_request(status.message())),
            Err(_) => return Err(refuse::bad_request("`open` did not come in time")),
        };
        let wanted = wanted(&caller, &open)?;
        let slot = self.slots.take_busy(caller.name.clone()).map_err(|full| no_slot(&caller, full))?;
        let located = locate::locate(&self.state, &wanted).await?;
        let of_tenant = match located.place.as_ref().map(|place| &place.tenant) {
            Some(tenant) => {
                let taken = self.tenants.take_busy(tenant.clone());
                Some(taken.map_err(|_| tenant_full(tenant))?)
            }
            None => None,
        };
        let mut span = self.begin_span(&open, &located);
        let open = rewritten(open, &caller, &located, &span);
        let entered = Entering { what: audited(&open), on: located.reference(), at: now() };
        note_entry(&self.state.store, &caller, entered).await?;
        let opened = self.open_stream(&located.node, &open).await;
        let stream = opened.inspect_err(|problem| span.fail(&problem.code))?;
        let (answers, waiting) = mpsc::channel(WAITING_FRAMES);
        let relay = relay::Relay {
            state: Arc::clone(&self.state),
            located,
            is_logs: open.kind == LOGS,
            credential,
            caller_frames: frames,
            answers,
            span,
            _slots: (slot, of_tenant),
        };
        tokio::spawn(relay.run(stream));
        Ok(waiting)
    }

    /// A span of the stream, of the caller's trace: it lasts as long as the stream.
    fn begin_span(&self, open: &Open, located: &Located) -> Span {
        let parent = TraceContext::parse(&open.traceparent).or_else(current::context);
        let mut span = self.state.tracer.begin(Kind::Client, format!("relay {}", open.kind), parent);
        if let Some(place) = &located.place {
            span.set(Attribute::Tenant, place.tenant.as_str());
            span.set(Attribute::Pool, place.pool.as_str());
            span.set(Attribute::Instance, place.instance.as_str());
        }
        span.set(Attribute::Node, located.node.as_str());
        span
    }

    /// A stream on the node's tunnel, its header sent. A tunnel that ended just now, as idle ones do, is dialled once more.
    async fn open_stream(
        &self,
        node: &NodeId,
        open: &Open,
    ) -> Result<mvm_transport::TunnelStream<Frame>, Problem> {
        let header = Frame { body: Some(frame::Body::Open(open.clone())) };
        for _ in 0..2 {
            let tunnel = self.state.tunnels.of(&self.state.fleet, node).await?;
            if let Ok(mut stream) = tunnel.open::<Frame>().await
                && stream.frames_out.send(&header).await.is_ok()
            {
                return Ok(stream);
            }
        }
        Err(stream_lost(node))
    }
}

#[tonic::async_trait]
impl Guests for GuestService {
    type OpenStream = BoxStream<'static, Result<Frame, Status>>;

    async fn open(&self, request: Request<Streaming<Frame>>) -> Answer<Self::OpenStream> {
        let begun = Box::pin(self.begin(request)).await;
        if let Err(problem) = &begun {
            self.state.metrics.streams_refused.inc();
            tracing::debug!(%problem, "refused a stream to a guest");
        }
        answer(begun.map(|frames| ReceiverStream::new(frames).boxed()))
    }
}

/// What the caller may ask of the instances that it may reach.
fn wanted(caller: &Caller, open: &Open) -> Result<Wanted, Problem> {
    let reach = match open.kind.as_str() {
        LOGS => Reach::Logs,
        "exec" | "attach" => Reach::Exec,
        "export" | "import" | "release" => Reach::Move,
        kind => {
            let kind = mvm_proto::json::quote(&kind.chars().take(32).collect::<String>());
            return Err(refuse::bad_request(format!("there are no streams of kind {kind}")));
        }
    };
    let tenant: Option<TenantId> =
        if open.tenant_id.is_empty() { None } else { Some(super::parse("tenant_id", &open.tenant_id)?) };
    // Tickets are the coordinator's own.
    let ticket =
        open.export.as_ref().map(|asked| &asked.ticket).or(open.import.as_ref().map(|asked| &asked.ticket));
    if ticket.is_some_and(|ticket| !ticket.is_empty()) {
        return Err(refuse::bad_request("a caller has no ticket of a move"));
    }
    let tenant = enter(caller, reach, tenant)?;
    if open.kind == "import" {
        return Wanted::read_node(open);
    }
    Wanted::read(tenant, open, caller.tenant.is_some())
}

/// The header as the node gets it.
fn rewritten(open: Open, caller: &Caller, located: &Located, span: &Span) -> Open {
    Open {
        tenant_id: located.place.as_ref().map(|place| place.tenant.to_string()).unwrap_or_default(),
        pool_id: located.place.as_ref().map(|place| place.pool.to_string()).unwrap_or_default(),
        instance_id: located.place.as_ref().map(|place| place.instance.to_string()).unwrap_or_default(),
        node_id: String::new(),
        actor: caller.name.clone(),
        traceparent: span.context().map(|context| context.to_string()).unwrap_or_default(),
        ..open
    }
}

/// What is asked, without what may be secret: arguments, variables and input.
fn audited(open: &Open) -> String {
    let shown = |text: &str| mvm_proto::json::quote(&mvm_proto::text::one_line(text, MAX_AUDITED_CHARS));
    match (&open.exec, &open.attach) {
        (Some(exec), _) => {
            let (program, arguments) =
                exec.command.split_first().map_or(("", 0), |(first, rest)| (first.as_str(), rest.len()));
            format!("exec {} with {arguments} argument(s)", shown(program))
        }
        (_, Some(attach)) => format!("attach {}", shown(&attach.exec_id)),
        _ => open.kind.clone(),
    }
}

fn no_slot(caller: &Caller, full: Full) -> Problem {
    let (code, detail) = match full {
        Full::Key => ("caller_streams_full", format!("{} has {MAX_STREAMS_PER_CALLER} streams", caller.name)),
        Full::Whole => ("coordinator_streams_full", format!("this coordinator relays {MAX_STREAMS} streams")),
    };
    Problem::new(429, code, detail, "End some of them, or wait until they have ended.")
}

fn tenant_full(tenant: &TenantId) -> Problem {
    let detail = format!("tenant {tenant} has {MAX_STREAMS_PER_TENANT} streams through this coordinator");
    Problem::new(429, "tenant_streams_full", detail, "End some of them, or wait until they have ended.")
}

/// What a relay keeps while it lasts.
type StreamSlots = (Slot<String>, Option<Slot<TenantId>>);

#[cfg(test)]
mod tests {
    use mvm_proto::wire::tunnel::v1::{Attach, Exec};

    use super::*;

    #[test]
    fn the_audit_log_names_the_program_and_none_of_its_arguments() {
        let exec = Exec { command: vec!["sh".into(), "-c".into(), "hunter2\n".into()], ..Exec::default() };
        let open = Open { kind: "exec".into(), exec: Some(exec), ..Open::default() };
        assert_eq!(audited(&open), "exec \"sh\" with 2 argument(s)");
        let attach = Attach { exec_id: "x-1\n".into(), ..Attach::default() };
        let open = Open { kind: "attach".into(), attach: Some(attach), ..Open::default() };
        assert!(!audited(&open).contains('\n'));
    }
}
