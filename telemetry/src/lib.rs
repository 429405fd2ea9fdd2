//! Spans of requests, documents, steps and streams, and their export over OTLP.
//!
//! A [`Tracer`] begins spans; one that ended goes into a bounded queue, from which one task posts batches to a collector
//! ([`Exporter`]). Nothing ever waits for that: what finds the queue full is dropped and counted. Without a collector a tracer
//! records nothing, and hands on the contexts that it was given.
//!
//! What a span may say is a closed list ([`Attribute`]), so that no secret, argument, variable or body comes into one by
//! accident. [`TraceRequests`] begins a span for every request to a server; what answers it finds the span in [`current`].

pub mod current;
mod export_task;
pub mod otlp;
mod requests;
mod settings;
mod span;

pub use export_task::Exporter;
pub use requests::{LogSpan, Route, TraceRequests};
pub use settings::{OtlpError, OtlpSettings};
pub use span::{Attribute, Kind, Resource, Span, SpanCounters, Tracer, Value};
