//! Documents, trust, and what the node says of itself: read the request, ask the node, word the answer.

use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use mvm_telemetry::current;
use serde::{Deserialize, Serialize};

use super::Api;
use super::input::{JSON, media_type, no_query, object, read_body};
use super::problem::Refused;

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
    let accepted = api.shared.intake.accept(&envelope, current::sampled()).await?;
    let mark = accepted.mark;
    let body = AcceptedBody { generation: mark.generation, epoch: mark.epoch, digest: mark.digest };
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

#[derive(Default, Deserialize)]
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
    let body: TrustBody = object(&bytes)?;
    api.shared.intake.update_trust(&as_json(&body.roots), &as_json(&body.images)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
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
