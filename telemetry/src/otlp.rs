//! The messages of OTLP that traces travel in: `opentelemetry/proto/trace/v1/trace.proto` and what it imports, as far as spans
//! of ours have it. Their numbers are fixed since OTLP 1.0.

use prost::{Message, Oneof};

use crate::span::{Attribute, Ended, Resource as Whose, Value as Said};

/// Below a collector's base URL.
pub const TRACES_PATH: &str = "/v1/traces";
pub const MEDIA_TYPE: &str = "application/x-protobuf";

#[derive(Clone, PartialEq, Message)]
pub struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExportTraceServiceResponse {
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PartialSuccess {
    #[prost(int64, tag = "1")]
    pub rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Scope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Span {
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub name: String,
    #[prost(int32, tag = "6")]
    pub kind: i32,
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "13")]
    pub links: Vec<Link>,
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Link {
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Status {
    #[prost(string, tag = "2")]
    pub message: String,
    #[prost(int32, tag = "3")]
    pub code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AnyValue {
    #[prost(oneof = "OneValue", tags = "1, 2, 3")]
    pub value: Option<OneValue>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum OneValue {
    #[prost(string, tag = "1")]
    String(String),
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(int64, tag = "3")]
    Int(i64),
}

/// `STATUS_CODE_ERROR`.
pub const STATUS_ERROR: i32 = 2;
/// The trace flag "sampled".
const SAMPLED: u32 = 1;

fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(OneValue::String(value.to_owned()));
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value }) }
}

impl Resource {
    pub(crate) fn of(whose: &Whose, service: &str) -> Self {
        let mut attributes = vec![
            text("service.name", service),
            text("service.instance.id", &whose.instance),
            text("service.version", whose.version),
        ];
        if !whose.cluster.is_empty() {
            attributes.push(text("mvm.cluster", &whose.cluster));
        }
        Self { attributes }
    }
}

/// What is posted of these spans.
pub(crate) fn request(resource: &Resource, spans: &[Ended]) -> ExportTraceServiceRequest {
    let scope = Scope { name: "mvm".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
    let scope_spans = ScopeSpans { scope: Some(scope), spans: spans.iter().map(span).collect() };
    let of = ResourceSpans { resource: Some(resource.clone()), scope_spans: vec![scope_spans] };
    ExportTraceServiceRequest { resource_spans: vec![of] }
}

fn span(ended: &Ended) -> Span {
    Span {
        trace_id: ended.context.trace().to_be_bytes().to_vec(),
        span_id: ended.context.span().to_be_bytes().to_vec(),
        parent_span_id: ended.parent.map(|parent| parent.to_be_bytes().to_vec()).unwrap_or_default(),
        name: ended.name.clone().into_owned(),
        kind: ended.kind as i32,
        start_time_unix_nano: ended.begun_ns,
        end_time_unix_nano: ended.ended_ns,
        attributes: ended.attributes.iter().map(attribute).collect(),
        links: ended
            .links
            .iter()
            .map(|link| Link {
                trace_id: link.trace().to_be_bytes().to_vec(),
                span_id: link.span().to_be_bytes().to_vec(),
            })
            .collect(),
        status: ended.failed.then(|| Status { message: String::new(), code: STATUS_ERROR }),
        flags: SAMPLED,
    }
}

fn attribute((attribute, said): &(Attribute, Said)) -> KeyValue {
    let value = match said {
        Said::Text(text) => OneValue::String(text.clone()),
        Said::Number(number) => OneValue::Int(*number),
        Said::Flag(flag) => OneValue::Bool(*flag),
    };
    KeyValue { key: attribute.name().to_owned(), value: Some(AnyValue { value: Some(value) }) }
}
