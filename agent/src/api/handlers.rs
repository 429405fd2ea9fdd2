//! One function per endpoint: read the request, ask the node, word the answer.

use std::str::FromStr;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::LengthLimitError;
use mvm_proto::status::{InstanceStatus, PoolStatus};
use mvm_proto::{IdError, InstanceId, Phase, PoolId, TenantId};
use serde::{Deserialize, Serialize};

use super::problem::{self, Refused};
use super::{Api, SMALL_BODY_BYTES};

const JSON: &str = "application/json";
/// What other signers call the JSON form of a DSSE envelope.
const DSSE_JSON: &str = "application/vnd.dsse.envelope.v1+json";

/// The answer to an accepted document: its place in the order, and its content.
#[derive(Serialize)]
struct AcceptedBody {
    generation: u64,
    epoch: u64,
    digest: String,
}

/// Takes a signed document. 202: durable in the ledger; making it true has begun.
pub(super) async fn reconcile(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    media_type(&headers, &[JSON, DSSE_JSON])?;
    let envelope = read_body(body, api.shared.max_body_bytes).await?;
    let accepted = api.shared.intake.accept(&envelope).await?;
    let mark = accepted.mark;
    let body = AcceptedBody { generation: mark.generation, epoch: mark.epoch, digest: mark.digest };
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrustBody {
    #[serde(default)]
    roots: Vec<serde_json::Value>,
    #[serde(default)]
    images: Vec<serde_json::Value>,
}

/// Takes the next root versions and image statements, oldest first.
pub(super) async fn trust(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    media_type(&headers, &[JSON])?;
    let bytes = read_body(body, api.shared.max_body_bytes).await?;
    let body = trust_body(&bytes)?;
    api.shared.intake.update_trust(&as_json(&body.roots), &as_json(&body.images)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Reads the object alone: serde would take a list for a struct's fields in order.
fn trust_body(bytes: &[u8]) -> Result<TrustBody, Refused> {
    let value: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|cause| problem::bad_body(cause.to_string()))?;
    if !value.is_object() {
        return Err(problem::bad_body("an object with `roots` and `images` is expected"));
    }
    serde_json::from_value(value).map_err(|cause| problem::bad_body(cause.to_string()))
}

/// Each envelope as text again. What is signed lies inside as base64, so reading the JSON around it loosely is safe.
fn as_json(envelopes: &[serde_json::Value]) -> Vec<Vec<u8>> {
    envelopes.iter().map(|envelope| envelope.to_string().into_bytes()).collect()
}

pub(super) async fn node_info(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    Ok(Json((api.shared.describe)()).into_response())
}

pub(super) async fn node_stats(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let status = api.shared.node.status().borrow().clone();
    Ok(Json(status).into_response())
}

#[derive(Serialize)]
struct TenantsBody {
    tenants: Vec<TenantBody>,
}

#[derive(Serialize)]
struct TenantBody {
    tenant_id: TenantId,
    instances: usize,
    pools: Vec<PoolStatus>,
}

pub(super) async fn tenants(State(api): State<Api>, RawQuery(query): RawQuery) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let node = &api.shared.node;
    let (mut pools, all) = (node.status().borrow().pools.clone(), node.instances(None));
    let tenants = node.tenants().into_iter().map(|tenant_id| TenantBody {
        instances: all.iter().filter(|instance| instance.tenant_id == tenant_id.as_str()).count(),
        pools: pools.extract_if(.., |pool| pool.tenant_id == tenant_id.as_str()).collect(),
        tenant_id,
    });
    Ok(Json(TenantsBody { tenants: tenants.collect() }).into_response())
}

/// Which of a tenant's instances to list; absent is all.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InstanceFilter {
    pool: Option<String>,
    phase: Option<String>,
}

#[derive(Serialize)]
struct InstancesBody {
    instances: Vec<InstanceStatus>,
}

pub(super) async fn instances(
    State(api): State<Api>,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<InstanceFilter>, QueryRejection>,
) -> Result<Response, Refused> {
    let Path(tenant) = path.map_err(|_| unreadable_path())?;
    let tenant: TenantId = id("tenant", &tenant)?;
    let Query(filter) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    let pool: Option<PoolId> = filter.pool.as_deref().map(|text| id("pool", text)).transpose()?;
    let phase = filter.phase.as_deref().map(phase).transpose()?;
    let mut instances = api.shared.node.instances(Some(&tenant));
    instances.retain(|instance| {
        pool.as_ref().is_none_or(|pool| instance.pool_id == pool.as_str())
            && phase.is_none_or(|phase| instance.phase == phase.as_str())
    });
    Ok(Json(InstancesBody { instances }).into_response())
}

/// Wakes an instance; answers when it runs.
pub(super) async fn wake(
    State(api): State<Api>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    read_body(body, SMALL_BODY_BYTES).await?;
    let Path((tenant, pool, instance)) = path.map_err(|_| unreadable_path())?;
    let tenant: TenantId = id("tenant", &tenant)?;
    let pool: PoolId = id("pool", &pool)?;
    let instance: InstanceId = id("instance", &instance)?;
    api.shared.node.wake(&tenant, &pool, &instance).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn id<T: FromStr<Err = IdError>>(field: &str, text: &str) -> Result<T, Refused> {
    text.parse().map_err(|rule: IdError| problem::bad_id(field, &rule, text))
}

fn phase(text: &str) -> Result<Phase, Refused> {
    let known = || Phase::ALL.map(Phase::as_str).join(", ");
    text.parse().map_err(|_| problem::bad_query(format!("`phase` must be one of {}", known())))
}

fn unreadable_path() -> Refused {
    problem::bad_id("text", &"UTF-8", "bytes that are not")
}

/// Refuses a query where none is known, so that a misspelt parameter is not silently ignored.
fn no_query(query: Option<&str>) -> Result<(), Refused> {
    match query {
        None | Some("") => Ok(()),
        Some(text) => {
            Err(problem::bad_query(format!("this call knows no parameters, found {}", problem::shown(text))))
        }
    }
}

fn media_type(headers: &HeaderMap, accepted: &[&str]) -> Result<(), Refused> {
    let found = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = found.map(|text| text.split(';').next().unwrap_or_default().trim());
    if essence.is_some_and(|text| accepted.iter().any(|media| text.eq_ignore_ascii_case(media))) {
        return Ok(());
    }
    Err(problem::wrong_media_type(found, JSON))
}

async fn read_body(body: Body, limit: usize) -> Result<Bytes, Refused> {
    axum::body::to_bytes(body, limit).await.map_err(|cause| {
        let cause = cause.into_inner();
        let over = std::iter::successors(Some(&*cause as &(dyn std::error::Error + 'static)), |e| e.source())
            .any(|error| error.is::<LengthLimitError>());
        if over { problem::too_large(limit) } else { problem::bad_body("the body did not arrive whole") }
    })
}
