//! The span of the request that is being answered, for what answers it. Work that a request hands to a task of its own takes
//! its [`context`] along.

use std::sync::Arc;

use mvm_proto::TraceContext;
use parking_lot::Mutex;

use crate::span::{Attribute, Span, Value};

tokio::task_local! {
    static CURRENT: Shared;
}

pub(crate) type Shared = Arc<Mutex<Span>>;

/// Answers a request whose span this is.
pub(crate) async fn within<F: Future>(span: Shared, answering: F) -> F::Output {
    CURRENT.scope(span, answering).await
}

fn with<T>(then: impl FnOnce(&mut Span) -> T) -> Option<T> {
    CURRENT.try_with(|span| then(&mut span.lock())).ok()
}

/// Where what the request causes belongs; none outside of requests.
#[must_use]
pub fn context() -> Option<TraceContext> {
    with(|span| span.context()).flatten()
}

/// The same, where someone records the trace.
#[must_use]
pub fn sampled() -> Option<TraceContext> {
    with(|span| span.sampled()).flatten()
}

/// The id of the request: its span's.
#[must_use]
pub fn request_id() -> Option<String> {
    with(|span| span.id())
}

/// Says something of the request.
pub fn set(attribute: Attribute, value: impl Into<Value>) {
    with(|span| span.set(attribute, value));
}

/// The request is refused, with a problem's code.
pub fn fail(code: &str) {
    with(|span| span.fail(code));
}
