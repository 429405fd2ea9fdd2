//! Guest sessions in the stores that this node knows: listed, and deleted.

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mvm_proto::status::GuestSession;
use mvm_proto::{IdError, PoolId, TenantId};
use serde::{Deserialize, Serialize};

use super::input::{id, no_query, object, read_body};
use super::problem::{self, Refused};
use super::{Api, SMALL_BODY_BYTES};
use crate::intake::authz::Caller;
use crate::intake::guest_sessions::asked;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Filter {
    tenant: Option<String>,
    pool: Option<String>,
}

#[derive(Serialize)]
struct SessionsBody {
    sessions: Vec<GuestSession>,
    /// Stores that could not be read, each with the reason.
    unreadable: Vec<String>,
}

pub(super) async fn list(
    State(api): State<Api>,
    query: Result<Query<Filter>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(filter) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    let tenant: Option<TenantId> = filter.tenant.as_deref().map(|text| id("tenant", text)).transpose()?;
    let pool: Option<PoolId> = filter.pool.as_deref().map(|text| id("pool", text)).transpose()?;
    let which = asked(tenant, pool, None, 0, Vec::new());
    let found = api.shared.node.guest_sessions(&which).await;
    Ok(Json(SessionsBody { sessions: found.sessions, unreadable: found.unreadable }).into_response())
}

/// Which sessions to delete.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeleteBody {
    #[serde(default)]
    tenant: String,
    pool: Option<String>,
    session: Option<u32>,
    /// Only what was not used for so long.
    #[serde(default)]
    unused_seconds: u64,
}

#[derive(Serialize)]
struct DeletedBody {
    deleted: Vec<GuestSession>,
    kept: Vec<KeptBody>,
    unreadable: Vec<String>,
}

#[derive(Serialize)]
struct KeptBody {
    session: String,
    store: String,
    reason: String,
}

pub(super) async fn delete(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let body: DeleteBody = object(&read_body(body, SMALL_BODY_BYTES).await?)?;
    let bad = |field: &str, rule: IdError| problem::bad_body(format!("`{field}` {rule}"));
    let tenant: TenantId = body.tenant.parse().map_err(|rule| bad("tenant", rule))?;
    let pool = body.pool.as_deref().map(|text| text.parse::<PoolId>().map_err(|rule| bad("pool", rule)));
    let pool = pool.transpose()?;
    if pool.is_none() && body.session.is_some() {
        return Err(problem::bad_body("`session` is the number of a session of a `pool`"));
    }
    let which = asked(Some(tenant), pool, body.session, body.unused_seconds, Vec::new());
    let deleted = api.shared.node.delete_guest_sessions(&which, &caller.describe()).await;
    let kept = deleted.kept.into_iter();
    let kept = kept.map(|(it, reason)| KeptBody { session: it.session, store: it.store, reason }).collect();
    Ok(Json(DeletedBody { deleted: deleted.deleted, kept, unreadable: deleted.unreadable }).into_response())
}
