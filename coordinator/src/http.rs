//! What nodes ask over HTTP/3: the roots to pin, enrolment, renewal. All but renewal works without a certificate.
//!
//! ```text
//! GET  /v1/ca      the root certificates, as PEM
//! GET  /v1/trust   root metadata and image statement; they prove themselves
//! POST /v1/enrol   {token, csr, node_id?} -> {chain_pem, roots_pem, endorsements_pem, cluster, node_id, trust}
//! POST /v1/renew   {csr} -> {chain_pem, roots_pem, endorsements_pem}; with a node's or an operator's certificate
//! ```

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State as Shared};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_pki::TrustBundle;
use mvm_proto::problem::PROBLEM_MEDIA_TYPE;
use mvm_proto::{NodeId, Problem};
use mvm_transport::Peer;
use mvm_transport::slots::network_of;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::enrolment::NotRenewed;
use crate::metrics::Outcome;
use crate::rate_limit::too_soon;
use crate::state::State;
use crate::stored::now;
use crate::{enrolment, refuse};

/// A token, an id and a certificate request with some names fit many times over.
const MAX_BODY_BYTES: usize = 32 * 1024;

pub(crate) fn router(state: Arc<State>) -> Router {
    Router::new()
        .route("/v1/ca", get(ca))
        .route("/v1/trust", get(trust))
        .route("/v1/enrol", post(enrol))
        .route("/v1/renew", post(renew))
        .fallback(|| async { Answer(not_found()) })
        .method_not_allowed_fallback(|| async { Answer(wrong_method()) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(state)
}

/// A problem as an HTTP answer.
struct Answer(Problem);

impl From<Problem> for Answer {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, PROBLEM_MEDIA_TYPE)], body).into_response()
    }
}

/// 429 with the seconds to wait.
fn limited(detail: &str, wait: Duration) -> Response {
    let (problem, seconds) = too_soon(detail, wait);
    let mut response = Answer(problem).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

fn not_found() -> Problem {
    Problem::new(404, "not_found", "there is nothing here", "See the coordinator's HTTP routes in the docs.")
}

fn wrong_method() -> Problem {
    Problem::new(
        405,
        "method_not_allowed",
        "this path does not support this method",
        "Use GET or POST as documented.",
    )
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnrolRequest {
    token: String,
    csr: String,
    /// Only checked: the token is bound to a node.
    node_id: Option<String>,
}

#[derive(Serialize)]
struct EnrolResponse {
    chain_pem: String,
    roots_pem: String,
    endorsements_pem: String,
    cluster: String,
    node_id: String,
    trust: TrustBundle,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RenewRequest {
    csr: String,
}

#[derive(Serialize)]
struct RenewResponse {
    chain_pem: String,
    roots_pem: String,
    endorsements_pem: String,
}

async fn ca(Shared(state): Shared<Arc<State>>) -> Response {
    let pem = state.anchors.current().to_pem();
    ([(header::CONTENT_TYPE, "application/x-pem-file")], pem).into_response()
}

async fn trust(Shared(state): Shared<Arc<State>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], state.trust.encoded()).into_response()
}

async fn enrol(
    Shared(state): Shared<Arc<State>>,
    peer: Peer,
    body: Result<Bytes, BodyRejection>,
) -> Response {
    let address: IpAddr = peer.address.ip();
    if let Err(wait) = state.enrol_limit.take(network_of(address), Instant::now()) {
        return limited("too many enrolment requests from this address", wait);
    }
    let result = try_enrol(&state, address, body).await;
    state.metrics.enrolments.get_or_create(&Outcome::from(result.is_ok())).inc();
    match result {
        Ok(answer) => Json(answer).into_response(),
        Err(problem) => {
            tracing::warn!(%address, code = %problem.code, "refused an enrolment");
            Answer(problem).into_response()
        }
    }
}

async fn try_enrol(
    state: &State,
    address: IpAddr,
    body: Result<Bytes, BodyRejection>,
) -> Result<EnrolResponse, Problem> {
    let EnrolRequest { token, csr, node_id } = read(body)?;
    let token = Zeroizing::new(token);
    let claimed = node_id.map(|id| id.parse::<NodeId>()).transpose();
    let claimed = claimed.map_err(|error| refuse::bad_request(format!("node_id {error}")))?;
    let csr = decode_csr(&csr)?;
    let (node_id, issued) = enrolment::enrol(state, &token, claimed.as_ref(), &csr, address, now()).await?;
    Ok(EnrolResponse {
        chain_pem: issued.chain_pem(),
        roots_pem: state.anchors.current().to_pem(),
        endorsements_pem: state.endorsements_pem.clone(),
        cluster: state.cluster.cluster.to_string(),
        node_id: node_id.to_string(),
        trust: state.trust.bundle(),
    })
}

async fn renew(
    Shared(state): Shared<Arc<State>>,
    peer: Peer,
    body: Result<Bytes, BodyRejection>,
) -> Response {
    let result = try_renew(&state, &peer, body).await;
    state.metrics.renewals.get_or_create(&Outcome::from(result.is_ok())).inc();
    match result {
        Ok(answer) => Json(answer).into_response(),
        Err(NotRenewed::TooSoon(wait)) => limited(enrolment::TOO_MANY_RENEWALS, wait),
        Err(NotRenewed::Refused(problem)) => Answer(problem).into_response(),
    }
}

async fn try_renew(
    state: &State,
    peer: &Peer,
    body: Result<Bytes, BodyRejection>,
) -> Result<RenewResponse, NotRenewed> {
    let identity = peer.identity.as_ref().ok_or_else(refuse::no_certificate)?;
    let request: RenewRequest = read(body)?;
    let csr = decode_csr(&request.csr)?;
    let issued = enrolment::renew(state, identity, peer.certificate.as_ref(), &csr, now()).await?;
    Ok(RenewResponse {
        chain_pem: issued.chain_pem(),
        roots_pem: state.anchors.current().to_pem(),
        endorsements_pem: state.endorsements_pem.clone(),
    })
}

type BodyRejection = axum::extract::rejection::BytesRejection;

fn read<T: DeserializeOwned>(body: Result<Bytes, BodyRejection>) -> Result<T, Problem> {
    let body = body.map_err(|rejection| {
        let status = rejection.status().as_u16();
        let detail = format!("the body can't be read; the limit is {MAX_BODY_BYTES} bytes");
        Problem::new(status, "body_refused", detail, "Send a smaller body.")
    })?;
    // serde_json quotes what it could not read only by kind and place, so a token never ends up in an error.
    serde_json::from_slice(&body).map_err(|error| {
        let detail = format!(
            "the body is not the JSON that is expected: line {} column {}",
            error.line(),
            error.column()
        );
        Problem::new(400, "body_invalid", detail, "Send the JSON object described in the docs.")
    })
}

fn decode_csr(text: &str) -> Result<Vec<u8>, Problem> {
    STANDARD.decode(text).map_err(|_| refuse::bad_request("csr must be base64 of a DER certificate request"))
}
