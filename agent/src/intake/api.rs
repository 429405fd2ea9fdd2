//! The agent's HTTP API: the same router behind HTTP/3 with mutual TLS and behind the local unix socket.
//!
//! A request passes the rate limit of its peer and the list of removed operators, then its route's row of
//! [`crate::intake::authz::TABLE`], then its handler.
//! Handlers only translate: documents go to the [`Intake`], everything else is asked of the [`NodeHandle`].
//! Every error, also those that axum would word itself, leaves as `application/problem+json`.

mod events;
pub(super) mod exec;
mod gate;
mod handlers;
mod input;
mod instances;
mod logs;
mod migration;
mod node;
mod problem;
mod sessions;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use mvm_proto::TraceContext;
use mvm_proto::status::NodeInfo;
use mvm_telemetry::{TraceRequests, Tracer};
use mvm_transport::RateLimit;
use tokio_util::sync::CancellationToken;
use tower::layer::layer_fn;

use crate::intake::authz::{Caller, Endpoint, Rule, TABLE};
use crate::intake::removed_operators::RemovedOperators;
use crate::intake::source::Intake;
use crate::metrics::Metrics;
use crate::node::event_log::EventLog;
use crate::node::handle::NodeHandle;

pub use gate::Listener;

/// Bodies of calls that carry no document: room for a client's empty JSON, no more.
const SMALL_BODY_BYTES: usize = 4 * 1024;

/// How long a handler may take to begin its answer. A wake is the slowest: a restore from a cold disk.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// What the handlers work with.
#[derive(Clone)]
pub struct Api {
    shared: Arc<Shared>,
}

/// What an [`Api`] is made of.
pub struct ApiParts {
    pub intake: Intake,
    pub node: NodeHandle,
    /// Tells what this node is, freshly.
    pub describe: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    pub events: Arc<EventLog>,
    pub metrics: Arc<Metrics>,
    /// Whose certificates are refused although they are in date.
    pub removed_operators: Arc<RemovedOperators>,
    pub max_body_bytes: usize,
    pub tracer: Tracer,
    /// Ends the streams that have no end of their own.
    pub shutdown: CancellationToken,
}

struct Shared {
    parts: ApiParts,
    limit: RateLimit<Caller>,
}

/// The token bucket that each peer of the API has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateSettings {
    pub per_second: u32,
    pub burst: u32,
}

impl Default for RateSettings {
    fn default() -> Self {
        Self { per_second: 10, burst: 20 }
    }
}

impl std::ops::Deref for Shared {
    type Target = ApiParts;
    fn deref(&self) -> &ApiParts {
        &self.parts
    }
}

impl std::fmt::Debug for ApiParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiParts").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    pub fn new(parts: ApiParts, rate: RateSettings) -> Self {
        let limit = RateLimit::new(rate.per_second.max(1).into(), rate.burst.into());
        Self { shared: Arc::new(Shared { parts, limit }) }
    }

    /// The routes for callers that come through `listener`.
    pub fn router(&self, listener: Listener) -> Router {
        let tracer = self.shared.tracer.clone();
        let mut router = Router::new();
        for rule in TABLE {
            let guarded = handler(rule).route_layer(from_fn_with_state(rule, gate::authorise));
            router = router.route(rule.path, guarded.with_state(self.clone()));
        }
        router
            .fallback(problem::unknown_path)
            .method_not_allowed_fallback(problem::wrong_method)
            .layer(from_fn_with_state(self.clone(), gate::admit))
            .layer(from_fn(move |request, next| gate::name_caller(listener, request, next)))
            .layer(layer_fn(move |inner| TraceRequests::new(inner, tracer.clone(), log_span)))
    }
}

/// What the log's lines of a request begin with.
fn log_span(context: &TraceContext) -> tracing::Span {
    tracing::info_span!("request", trace = %context.trace_id())
}

/// Which code answers a row. The match is what keeps table and code together: a new endpoint needs an arm here.
fn handler(rule: &Rule) -> MethodRouter<Api> {
    match rule.endpoint {
        Endpoint::Reconcile => post(handlers::reconcile),
        Endpoint::Trust => post(handlers::trust),
        Endpoint::NodeInfo => get(handlers::node_info),
        Endpoint::NodeStats => get(handlers::node_stats),
        Endpoint::NodeWatch => get(watch::node_watch),
        Endpoint::NodeEvents => get(events::node_events),
        Endpoint::NodeObservation => get(node::observation),
        Endpoint::NodeDesired => get(node::desired),
        Endpoint::NetworkVerify => post(node::verify_network),
        Endpoint::Tenants => get(node::tenants),
        Endpoint::Tenant => get(node::tenant),
        Endpoint::Pool => get(node::pool),
        Endpoint::Instances => get(instances::of_tenant),
        Endpoint::AllInstances => get(instances::all),
        Endpoint::Instance => get(instances::one),
        Endpoint::Logs => get(logs::logs),
        Endpoint::Act(action) => post(instances::act).layer(Extension(action)),
        Endpoint::Sessions => get(sessions::list),
        Endpoint::DeleteSessions => post(sessions::delete),
        Endpoint::Exec => post(exec::exec),
        Endpoint::Export => post(migration::export),
        Endpoint::Release => post(migration::release),
        Endpoint::Import => post(migration::import),
    }
}
