//! A span: what was done, where it belongs, how long it took and what came of it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use mvm_proto::TraceContext;
use mvm_proto::text::one_line;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;

use crate::export_task::{Exporter, QUEUED_SPANS};
use crate::settings::{OtlpError, OtlpSettings};

/// Attributes of one span: more than any has.
const MAX_ATTRIBUTES: usize = 24;
/// Other traces that a span belongs to.
pub(crate) const MAX_LINKS: usize = 8;
/// Of one text, once it is one line: names and codes are far shorter.
const MAX_TEXT_BYTES: usize = 256;

/// What a span may say. The list is closed: what is not in it is exported nowhere. `docs/tracing.md` has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    HttpMethod,
    HttpRoute,
    HttpStatus,
    RpcMethod,
    RpcStatus,
    ErrorCode,
    Object,
    Outcome,
    Tenant,
    Pool,
    Instance,
    Node,
    Epoch,
    Generation,
    Action,
    Phase,
    Woken,
    ExitCode,
    Signal,
}

impl Attribute {
    pub const ALL: [Self; 19] = [
        Self::HttpMethod,
        Self::HttpRoute,
        Self::HttpStatus,
        Self::RpcMethod,
        Self::RpcStatus,
        Self::ErrorCode,
        Self::Object,
        Self::Outcome,
        Self::Tenant,
        Self::Pool,
        Self::Instance,
        Self::Node,
        Self::Epoch,
        Self::Generation,
        Self::Action,
        Self::Phase,
        Self::Woken,
        Self::ExitCode,
        Self::Signal,
    ];

    /// OpenTelemetry's name where it has one.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HttpMethod => "http.request.method",
            Self::HttpRoute => "http.route",
            Self::HttpStatus => "http.response.status_code",
            Self::RpcMethod => "rpc.method",
            Self::RpcStatus => "rpc.grpc.status_code",
            Self::ErrorCode => "error.type",
            Self::Object => "mvm.object",
            Self::Outcome => "mvm.outcome",
            Self::Tenant => "mvm.tenant",
            Self::Pool => "mvm.pool",
            Self::Instance => "mvm.instance",
            Self::Node => "mvm.node",
            Self::Epoch => "mvm.document.epoch",
            Self::Generation => "mvm.document.generation",
            Self::Action => "mvm.action",
            Self::Phase => "mvm.phase",
            Self::Woken => "mvm.woken",
            Self::ExitCode => "mvm.exec.exit_code",
            Self::Signal => "mvm.exec.signal",
        }
    }
}

/// What an attribute says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Number(i64),
    Flag(bool),
}

impl Value {
    /// A text of at most [`MAX_TEXT_BYTES`], on one line.
    pub fn text(value: impl fmt::Display) -> Self {
        Self::Text(one_line(&value.to_string(), MAX_TEXT_BYTES))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(one_line(text, MAX_TEXT_BYTES))
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// On which side of a call a span is, as OTLP numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Internal = 1,
    Server = 2,
    Client = 3,
    /// What it causes goes on elsewhere, after it.
    Producer = 4,
    /// The other end of a producer's.
    Consumer = 5,
}

/// What became of spans.
#[derive(Debug, Clone, Default)]
pub struct SpanCounters {
    pub exported: Counter,
    pub dropped: Counter,
}

/// Whose spans these are.
#[derive(Debug, Clone)]
pub struct Resource {
    /// Unless the settings name another.
    pub service: &'static str,
    /// Which of the service's processes: a node's id, a coordinator's name.
    pub instance: String,
    pub version: &'static str,
    pub cluster: String,
}

/// Begins spans. Cheap to clone. The default one records nothing.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<Arc<Recorder>>);

#[derive(Debug)]
struct Recorder {
    queue: mpsc::Sender<Ended>,
    /// Traces of lower numbers are recorded, whatever their callers do.
    below: u64,
    counters: SpanCounters,
}

/// A span that is over, as it waits to be exported.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) context: TraceContext,
    pub(crate) parent: Option<u64>,
    pub(crate) kind: Kind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) begun_ns: u64,
    pub(crate) ended_ns: u64,
    pub(crate) attributes: Vec<(Attribute, Value)>,
    pub(crate) links: Vec<TraceContext>,
    /// Whether what it tells of failed.
    pub(crate) failed: bool,
}

impl Tracer {
    /// A tracer, and what posts its spans. The latter is to be run as a task.
    pub fn start(
        settings: &OtlpSettings,
        resource: &Resource,
        counters: SpanCounters,
    ) -> Result<(Self, Exporter), OtlpError> {
        let (queue, ended) = mpsc::channel(QUEUED_SPANS);
        let exporter = Exporter::new(settings, resource, ended, counters.clone())?;
        let recorder = Recorder { queue, below: settings.sampled_below()?, counters };
        Ok((Self(Some(Arc::new(recorder))), exporter))
    }

    /// Begins a span: of the parent's trace, or of a trace of its own. It is recorded where there is a collector, and the caller
    /// records the trace or the sampling ratio takes it in.
    #[must_use]
    pub fn begin(
        &self,
        kind: Kind,
        name: impl Into<Cow<'static, str>>,
        parent: Option<TraceContext>,
    ) -> Span {
        let trace = parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace());
        let id = fastrand::u64(1..);
        let is_asked_for = parent.is_some_and(|parent| parent.is_sampled);
        let recorder = self.0.as_ref().filter(|recorder| is_asked_for || recorder.takes(trace));
        let own = TraceContext::new(trace, id, recorder.is_some());
        let recording = recorder.zip(own).map(|(recorder, context)| {
            let ended = Ended {
                context,
                parent: parent.map(|parent| parent.span()),
                kind,
                name: name.into(),
                begun_ns: nanoseconds(SystemTime::now()),
                ended_ns: 0,
                attributes: Vec::new(),
                links: Vec::new(),
                failed: false,
            };
            Box::new(Recording { recorder: Arc::clone(recorder), begun: Instant::now(), ended })
        });
        // Nothing of its own is told: those below belong to the caller's.
        let context = if recording.is_some() { own } else { parent.or(own) };
        Span { context, id, recording }
    }
}

impl Recorder {
    fn takes(&self, trace: u128) -> bool {
        // As OpenTelemetry's own sampler reads it, so that several services take in the same traces.
        let low = trace & u128::from(u64::MAX);
        low < u128::from(self.below) || self.below == u64::MAX
    }

    fn hand_over(&self, ended: Ended) {
        if self.queue.try_send(ended).is_err() {
            self.counters.dropped.inc();
        }
    }
}

/// Something that is being done. It ends when it is dropped.
#[derive(Debug)]
pub struct Span {
    /// None never comes of ids that are drawn above zero.
    context: Option<TraceContext>,
    id: u64,
    recording: Option<Box<Recording>>,
}

#[derive(Debug)]
struct Recording {
    recorder: Arc<Recorder>,
    /// What tells how long it took: the machine's clock may be set meanwhile.
    begun: Instant,
    ended: Ended,
}

impl Span {
    /// What is handed on to what this causes.
    #[must_use]
    pub fn context(&self) -> Option<TraceContext> {
        self.context
    }

    /// The same, where someone records the trace.
    #[must_use]
    pub fn sampled(&self) -> Option<TraceContext> {
        self.context.filter(|context| context.is_sampled)
    }

    /// The span's own id, recorded or not.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{:016x}", self.id)
    }

    /// Calls it otherwise, once more is known of it.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let Some(recording) = &mut self.recording {
            recording.ended.name = name.into();
        }
    }

    /// Says something of it. Said again it replaces what was said.
    pub fn set(&mut self, attribute: Attribute, value: impl Into<Value>) {
        let Some(recording) = &mut self.recording else { return };
        let attributes = &mut recording.ended.attributes;
        match attributes.iter().position(|(known, _)| *known == attribute) {
            Some(at) => attributes[at].1 = value.into(),
            None if attributes.len() < MAX_ATTRIBUTES => attributes.push((attribute, value.into())),
            None => {}
        }
    }

    /// Another trace that this belongs to as well.
    pub fn link(&mut self, other: TraceContext) {
        if let Some(recording) = &mut self.recording
            && recording.ended.links.len() < MAX_LINKS
        {
            recording.ended.links.push(other);
        }
    }

    /// What it tells of failed, with a problem's code.
    pub fn fail(&mut self, code: &str) {
        self.set(Attribute::ErrorCode, code);
        if let Some(recording) = &mut self.recording {
            recording.ended.failed = true;
        }
    }

    /// Tells nothing of it.
    pub fn discard(mut self) {
        self.recording = None;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(recording) = self.recording.take() {
            let Recording { recorder, begun, mut ended } = *recording;
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            ended.ended_ns = ended.begun_ns.saturating_add(took);
            recorder.hand_over(ended);
        }
    }
}

fn nanoseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracer(below: u64, room: usize) -> (Tracer, mpsc::Receiver<Ended>, SpanCounters) {
        let (queue, ended) = mpsc::channel(room);
        let counters = SpanCounters::default();
        let recorder = Recorder { queue, below, counters: counters.clone() };
        (Tracer(Some(Arc::new(recorder))), ended, counters)
    }

    fn parent(trace: u128, is_sampled: bool) -> Option<TraceContext> {
        TraceContext::new(trace, 7, is_sampled)
    }

    #[test]
    fn a_span_belongs_below_its_parent_and_says_what_was_set_last() {
        let (tracer, mut ended, _) = tracer(0, 4);
        let mut span = tracer.begin(Kind::Server, "one", parent(5, true));
        span.set(Attribute::Outcome, "first");
        span.set(Attribute::Outcome, "last\nline");
        span.fail("forbidden");
        let handed_on = span.context().unwrap();
        drop(span);
        let told = ended.try_recv().unwrap();
        assert_eq!((told.parent, told.context), (Some(7), handed_on));
        assert_eq!((handed_on.trace(), handed_on.is_sampled), (5, true));
        assert!(told.failed && told.ended_ns >= told.begun_ns);
        let expected = [
            (Attribute::Outcome, Value::Text("last\\nline".to_owned())),
            (Attribute::ErrorCode, Value::Text("forbidden".to_owned())),
        ];
        assert_eq!(told.attributes, expected);
    }

    #[test]
    fn what_nobody_records_is_handed_on_as_it_came() {
        let (tracer, mut ended, _) = tracer(0, 4);
        for tracer in [Tracer::default(), tracer] {
            let asked = parent(5, false);
            assert_eq!(tracer.begin(Kind::Server, "one", asked).context(), asked);
            assert!(tracer.begin(Kind::Server, "one", None).sampled().is_none());
        }
        assert!(ended.try_recv().is_err());
    }

    #[test]
    fn a_trace_is_recorded_where_its_caller_does_or_its_number_is_within_the_ratio() {
        let (half, mut ended, _) = tracer(u64::MAX / 2, 4);
        let recorded =
            [(1, false), (u64::MAX.into(), true), (u128::MAX, false), (u128::MAX << 64 | 1, false)].map(
                |(trace, asked)| half.begin(Kind::Internal, "one", parent(trace, asked)).sampled().is_some(),
            );
        assert_eq!(recorded, [true, true, false, true]);
        assert_eq!(std::iter::from_fn(|| ended.try_recv().ok()).count(), 3);
        let (all, ..) = tracer(u64::MAX, 4);
        assert!(all.begin(Kind::Internal, "one", parent(u128::MAX, false)).sampled().is_some());
    }

    #[test]
    fn the_documents_list_is_the_list_of_attributes() {
        let page = include_str!("../../docs/tracing.md");
        let (_, table) = page.split_once("| attribute | of |").unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
        let documented: Vec<_> = rows.map(|(name, _)| name).collect();
        assert_eq!(documented, Attribute::ALL.map(Attribute::name));
    }

    #[test]
    fn a_full_queue_drops_and_counts_and_nobody_waits() {
        let (tracer, _ended, counters) = tracer(u64::MAX, 2);
        for _ in 0..5 {
            drop(tracer.begin(Kind::Internal, "one", None));
        }
        tracer.begin(Kind::Internal, "one", None).discard();
        assert_eq!(counters.dropped.get(), 3);
    }

    #[test]
    fn a_span_is_bounded_whatever_is_said_of_it() {
        let (tracer, mut ended, _) = tracer(u64::MAX, 2);
        let mut span = tracer.begin(Kind::Internal, "one", None);
        for attribute in Attribute::ALL {
            span.set(attribute, "x".repeat(100_000).as_str());
        }
        (0..100).for_each(|_| span.link(parent(9, true).unwrap()));
        drop(span);
        let told = ended.try_recv().unwrap();
        assert_eq!((told.attributes.len(), told.links.len()), (Attribute::ALL.len(), MAX_LINKS));
        let short = |value: &Value| matches!(value, Value::Text(text) if text.len() <= MAX_TEXT_BYTES);
        assert!(told.attributes.iter().all(|(_, value)| short(value)));
    }
}
