//! Rate limits on requests by identity and address, and the problem that a limited caller gets.

use std::time::Duration;

use mvm_pki::Identity;
use mvm_proto::{Digest, Problem};

/// The refusal of a request that came too soon, with the whole seconds to wait.
pub(crate) fn too_soon(detail: impl Into<String>, wait: Duration) -> (Problem, u64) {
    let seconds = wait.as_secs() + 1;
    (Problem::new(429, "too_many_requests", detail, format!("Try again in {seconds} s.")), seconds)
}

/// Whose rate is spent: a certificate's until it was judged, its identity's after that. So a certificate from before a
/// removal spends nothing of who has the name now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Certificate(Option<Digest>),
    Identity(Identity),
}
