//! The trace that the calls of this command belong to: the one of `TRACEPARENT`, where a caller names one, else one of its own,
//! so that all its calls are found under one id. It is recorded where a coordinator or an agent exports its spans.

use std::sync::OnceLock;

use mvm_proto::TraceContext;
use mvm_proto::trace::TRACEPARENT_VARIABLE;

pub(crate) fn context() -> Option<TraceContext> {
    static CONTEXT: OnceLock<Option<TraceContext>> = OnceLock::new();
    *CONTEXT.get_or_init(|| {
        let given = std::env::var(TRACEPARENT_VARIABLE).ok();
        let given = given.and_then(|text| TraceContext::parse(&text));
        given.or_else(|| TraceContext::new(fastrand::u128(1..), fastrand::u64(1..), false))
    })
}
