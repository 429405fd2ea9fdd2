//! Declared objects over REST: the same calls as over gRPC, one set of routes for each kind.
//!
//! ```text
//! GET|POST              /v1/tenants, /v1/nodes, /v1/api-keys         GET|PUT|PATCH|DELETE  .../{name}
//! GET|POST              /v1/tenants/{tenant}/pools                   GET|PUT|PATCH|DELETE  .../{name}
//! GET                   /v1/pools                                    of all tenants
//! PUT                   /v1/tenants/{tenant}/pools/{name}/scale-metric   what is measured of a pool's load
//! POST                  /v1/plan                                     what declaring objects would do
//! GET                   /v1/explain/{kind}/{tenant}/{name}           why a pool is where it is
//! GET                   /v1/demand                                   what has no place for want of nodes, and which have nothing
//! GET                   /v1/events                                   what happened to objects lately
//! GET                   /v1/audit, /openapi.json, /healthz, /readyz, /version
//! ```

mod body;
mod one;
mod openapi;
mod query;
mod stream;

use std::sync::{Arc, LazyLock};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, MatchedPath, Path, RawQuery, State as Shared};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use mvm_proto::object::{Declared, KINDS, Kind, Object, Outcome, kind_named};
use mvm_proto::problem::PROBLEM_MEDIA_TYPE;
use mvm_proto::{Problem, TenantId};
use mvm_telemetry::{Route, current};
use serde::Deserialize;
use serde_json::{Value, json};

use self::query::{EventsQuery, ListQuery, OneQuery};
use crate::api::identify::Identified;
use crate::api::object_events::{self, Asked};
use crate::objects::{self, Caller, Filter, Mode, Writing, Written};
use crate::state::State;
use crate::stored::now;
use crate::{placement, refuse};

/// The largest body: a plan of some hundred objects.
const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;
/// The most objects of one plan.
const MAX_PLANNED: usize = 1000;
const REQUEST_ID: &str = "x-request-id";

type App = Arc<State>;

pub(crate) fn router(state: App) -> Router {
    let mut router = Router::new();
    for kind in &KINDS {
        router = router.merge(routes(kind));
    }
    router
        .route("/v1/tenants/{tenant}/pools/{name}/scale-metric", put(scale_metric))
        .route("/v1/plan", post(plan))
        .route("/v1/explain/{kind}/{tenant}/{name}", get(explain))
        .route("/v1/demand", get(demand))
        .route("/v1/events", get(events))
        .route("/v1/audit", get(audit))
        .route("/openapi.json", get(described))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/version", get(version))
        .fallback(unknown)
        .method_not_allowed_fallback(|| async { Refused(wrong_method()) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn(known_callers_only))
        .layer(middleware::from_fn(name_request))
        .with_state(state)
}

fn routes(kind: &'static Kind) -> Router<App> {
    let all = format!("/v1/{}", kind.plural);
    if !kind.is_tenant_scoped() {
        let list = move |app, query, caller| collection(kind, app, None, query, caller);
        let make =
            move |app, query, caller, headers, bytes| create(kind, app, None, query, caller, headers, bytes);
        return Router::new()
            .route(&all, get(list).post(make))
            .route(&format!("{all}/{{name}}"), one::cluster_routes(kind));
    }
    let of_tenant = format!("/v1/tenants/{{tenant}}/{}", kind.plural);
    let everywhere = move |app, query, caller| collection(kind, app, None, query, caller);
    let list = move |app, Path(tenant): Path<String>, query, caller| {
        collection(kind, app, Some(tenant), query, caller)
    };
    let make = move |app, Path(tenant): Path<String>, query, caller, headers, bytes| {
        create(kind, app, Some(tenant), query, caller, headers, bytes)
    };
    Router::new()
        .route(&all, get(everywhere))
        .route(&of_tenant, get(list).post(make))
        .route(&format!("{of_tenant}/{{name}}"), one::tenant_routes(kind))
}

/// Refuses requests of unknown callers before anything of their bodies is read.
async fn known_callers_only(request: axum::extract::Request, next: Next) -> Response {
    let is_open = !request.uri().path().starts_with("/v1/");
    let identified = request.extensions().get::<Identified>().cloned();
    match caller(identified.map(Extension)) {
        Err(problem) if !is_open => Refused(problem).into_response(),
        _ => next.run(request).await,
    }
}

/// Names every request by its route for its span, and tells its id in the answer's header and in problems.
async fn name_request(request: axum::extract::Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| Route(path.as_str().to_owned()));
    let mut response = next.run(request).await;
    if let Some(value) = current::request_id().and_then(|id| HeaderValue::from_str(&id).ok()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if let Some(route) = route {
        response.extensions_mut().insert(route);
    }
    match response.extensions_mut().remove::<Problem>() {
        Some(problem) => {
            current::fail(&problem.code);
            let problem = refuse::of_request(problem);
            let body = serde_json::to_vec(&problem).unwrap_or_default();
            response.headers_mut().remove(header::CONTENT_LENGTH);
            *response.body_mut() = body.into();
            response
        }
        None => response,
    }
}

/// A problem as an answer.
pub(crate) struct Refused(pub(crate) Problem);

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_MEDIA_TYPE)]).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // Written by `name_request`, with the request's id.
        response.extensions_mut().insert(self.0);
        response
    }
}

type Answer = Result<Response, Refused>;

fn caller(identified: Option<Extension<Identified>>) -> Result<Caller, Problem> {
    identified.map_or_else(|| Err(refuse::no_credential()), |Extension(Identified(caller))| caller)
}

fn tenant_id(text: Option<&str>) -> Result<Option<TenantId>, Problem> {
    // What is no name is the name of nothing.
    let unknown =
        |_| refuse::no_object(kind_named("tenants").unwrap_or(&KINDS[0]), None, text.unwrap_or_default());
    text.map(str::parse).transpose().map_err(unknown)
}

async fn collection(
    kind: &'static Kind,
    Shared(app): Shared<App>,
    tenant: Option<String>,
    RawQuery(query): RawQuery,
    identified: Option<Extension<Identified>>,
) -> Answer {
    let caller = caller(identified)?;
    let query: ListQuery = query::read(query.as_deref())?;
    let tenant = tenant_id(tenant.as_deref())?.map(|tenant| tenant.to_string()).unwrap_or_default();
    let filter = Filter::new(&tenant, &query.label_selector, &query.field_selector)?.within(&caller, kind);
    if query.watch {
        return stream::changes(&app, &caller, kind, filter, &query.resource_version).await;
    }
    let limit = usize::try_from(query.limit).unwrap_or(usize::MAX);
    let mut page = objects::list(&app.store, &caller, kind, &filter, limit, &query.continue_from).await?;
    page.objects.iter_mut().for_each(|object| placement::show_live(&app, object));
    let body = json!({
        "api_version": mvm_proto::object::API_VERSION,
        "kind": format!("{}List", kind.name),
        "metadata": { "resource_version": page.revision.to_string(), "continue": page.continue_from },
        "items": page.objects,
    });
    Ok(Json(body).into_response())
}

async fn create(
    kind: &'static Kind,
    Shared(app): Shared<App>,
    tenant: Option<String>,
    RawQuery(query): RawQuery,
    identified: Option<Extension<Identified>>,
    headers: HeaderMap,
    bytes: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Answer {
    let caller = caller(identified)?;
    let query: OneQuery = query::read(query.as_deref())?;
    let tenant = tenant_id(tenant.as_deref())?;
    let bytes = body::bytes(&headers, bytes)?;
    let declared = body::object(&bytes, kind, tenant.as_ref(), None)?;
    let key = body::idempotency_key(&headers)?;
    write(&app, &caller, declared, Mode::Create, key, &query).await
}

/// Writes an object, and waits for it where the caller wants that.
async fn write(
    app: &State,
    caller: &Caller,
    declared: Declared,
    mode: Mode,
    idempotency_key: Option<&str>,
    query: &OneQuery,
) -> Answer {
    let kind = declared.kind;
    let writing = Writing { caller, declared, mode, dry_run: query.dry_run, idempotency_key };
    let Written { outcome, mut object, secret } = objects::apply(&app.objects, writing).await?;
    if let Some(wait) = query.wait
        && !query.dry_run
    {
        object = stream::until_ready(app, caller, kind, object, wait).await?;
    }
    let status =
        if outcome == Outcome::Created && !query.dry_run { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = shown(&object, secret.as_deref());
    *response.status_mut() = status;
    if status == StatusCode::CREATED
        && let Ok(place) = HeaderValue::from_str(&path_of(kind, &object))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(response)
}

fn path_of(kind: &Kind, object: &Object) -> String {
    match &object.metadata.tenant {
        Some(tenant) => format!("/v1/tenants/{tenant}/{}/{}", kind.plural, object.metadata.name),
        None => format!("/v1/{}/{}", kind.plural, object.metadata.name),
    }
}

/// An object with its version as its tag. The text of a new key is in its status, this once.
fn shown(object: &Object, secret: Option<&str>) -> Response {
    let mut body = serde_json::to_value(object).unwrap_or(Value::Null);
    if let Some(secret) = secret {
        body["status"]["secret"] = Value::String(secret.to_owned());
    }
    let mut response = Json(body).into_response();
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{}\"", object.metadata.resource_version)) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

async fn plan(
    Shared(app): Shared<App>,
    identified: Option<Extension<Identified>>,
    headers: HeaderMap,
    bytes: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Answer {
    let caller = caller(identified)?;
    let bytes = body::bytes(&headers, bytes)?;
    let declared = body::objects(&bytes, MAX_PLANNED)?;
    Ok(Json(placement::plan(&app, &caller, &declared, &[]).await?).into_response())
}

async fn explain(
    Shared(app): Shared<App>,
    Path((kind, tenant, name)): Path<(String, String, String)>,
    identified: Option<Extension<Identified>>,
) -> Answer {
    let caller = caller(identified)?;
    let unknown = |rule| Problem::new(404, "kind_unknown", rule, "Pools can be explained.");
    let kind = kind_named(&kind).map_err(unknown)?;
    let tenant = tenant_id(Some(&tenant))?;
    Ok(Json(placement::explain(&app, &caller, kind, tenant.as_ref(), &name).await?).into_response())
}

/// What a caller measured of a pool's load.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Measured {
    value: f64,
}

async fn scale_metric(
    Shared(app): Shared<App>,
    Path((tenant, name)): Path<(String, String)>,
    identified: Option<Extension<Identified>>,
    headers: HeaderMap,
    bytes: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Answer {
    let caller = caller(identified)?;
    let bytes = body::bytes(&headers, bytes)?;
    let Measured { value } = serde_json::from_slice(&bytes)
        .map_err(|error| refuse::bad_request(format!("the body must be {{\"value\": NUMBER}}: {error}")))?;
    let tenant = tenant
        .parse()
        .map_err(|_| refuse::no_object(kind_named("tenants").unwrap_or(&KINDS[0]), None, &tenant))?;
    Ok(Json(placement::measured(&app, &caller, &tenant, &name, value).await?).into_response())
}

async fn demand(Shared(app): Shared<App>, identified: Option<Extension<Identified>>) -> Answer {
    Ok(Json(placement::demand(&app, &caller(identified)?)?).into_response())
}

/// What happened to the objects that the caller may see, or to one of them; the newest last.
async fn events(
    Shared(app): Shared<App>,
    RawQuery(query): RawQuery,
    identified: Option<Extension<Identified>>,
) -> Answer {
    let caller = caller(identified)?;
    let EventsQuery { object, tenant } = query::read(query.as_deref())?;
    let tenant = tenant_id(tenant.as_deref())?;
    let items = object_events::list(&app, &caller, &Asked { object, tenant }, now()).await?;
    Ok(Json(json!({ "items": items })).into_response())
}

/// The newest entries of the audit log; for those who may see all tenants.
async fn audit(Shared(app): Shared<App>, identified: Option<Extension<Identified>>) -> Answer {
    const SHOWN: usize = 1000;
    let caller = caller(identified)?;
    let key = kind_named("api-keys").map_err(refuse::bad_request)?;
    if !caller.may_see(key, None, "") {
        let detail = format!("the role {} may not read the audit log", caller.role.as_str());
        return Err(Refused(Problem::new(403, "forbidden", detail, "Ask an admin.")));
    }
    let entries = objects::newest_audit(&app.store, SHOWN).await.map_err(Problem::from)?;
    Ok(Json(json!({ "items": entries })).into_response())
}

async fn ready(Shared(app): Shared<App>) -> Response {
    if app.shutdown.is_cancelled() {
        return Refused(refuse::stopping()).into_response();
    }
    "ok".into_response()
}

/// Made once: anyone may ask for it, as often as they like.
async fn described() -> Response {
    static DESCRIBED: LazyLock<Bytes> = LazyLock::new(|| openapi::document().to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], DESCRIBED.clone()).into_response()
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION"), "api_version": mvm_proto::object::API_VERSION }))
}

async fn unknown(headers: HeaderMap) -> Response {
    let is_grpc = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if is_grpc {
        return tonic::Status::unimplemented("there is no such service").into_http();
    }
    let problem =
        Problem::new(404, "not_found", "there is nothing here", "See /openapi.json for the routes.");
    Refused(problem).into_response()
}

fn wrong_method() -> Problem {
    let detail = "this path does not support this method";
    Problem::new(405, "method_not_allowed", detail, "See /openapi.json for the routes.")
}
