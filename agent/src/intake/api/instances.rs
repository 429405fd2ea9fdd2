//! Instances: listed, looked at, and acted on by hand.

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::StatusCode;
use mvm_proto::ManualAction;
use mvm_proto::status::{InstanceStatus, WakeTiming};
use mvm_proto::{InstanceId, PoolId, Problem, TenantId};
use serde::{Deserialize, Serialize};

use super::Api;
use super::input::{InstancePath, id, instance_and_body, no_query, phase, unreadable_path};
use super::problem::{self, Refused};
use crate::intake::authz::Caller;
use crate::node::actions::{Manual, override_for};

/// Which instances to list; absent is all.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Filter {
    tenant: Option<String>,
    pool: Option<String>,
    phase: Option<String>,
    id: Option<String>,
}

#[derive(Serialize)]
struct InstancesBody {
    instances: Vec<InstanceStatus>,
}

pub(super) async fn all(
    State(api): State<Api>,
    query: Result<Query<Filter>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(filter) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    let tenant: Option<TenantId> = filter.tenant.as_deref().map(|text| id("tenant", text)).transpose()?;
    list(&api, tenant.as_ref(), &filter)
}

pub(super) async fn of_tenant(
    State(api): State<Api>,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<Filter>, QueryRejection>,
) -> Result<Response, Refused> {
    let Path(tenant) = path.map_err(|_| unreadable_path())?;
    let tenant: TenantId = id("tenant", &tenant)?;
    let Query(filter) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    if filter.tenant.is_some() {
        return Err(problem::bad_query("the path already names the tenant"));
    }
    list(&api, Some(&tenant), &filter)
}

fn list(api: &Api, tenant: Option<&TenantId>, filter: &Filter) -> Result<Response, Refused> {
    let pool: Option<PoolId> = filter.pool.as_deref().map(|text| id("pool", text)).transpose()?;
    let phase = filter.phase.as_deref().map(phase).transpose()?;
    let named: Option<InstanceId> = filter.id.as_deref().map(|text| id("instance", text)).transpose()?;
    let mut instances = api.shared.node.instances(tenant);
    instances.retain(|instance| {
        pool.as_ref().is_none_or(|pool| instance.pool_id == pool.as_str())
            && phase.is_none_or(|phase| instance.phase == phase.as_str())
            && named.as_ref().is_none_or(|id| instance.instance_id == id.as_str())
    });
    Ok(Json(InstancesBody { instances }).into_response())
}

pub(super) async fn one(
    State(api): State<Api>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let path = InstancePath::read(path)?;
    Ok(Json(find(&api, &path)?).into_response())
}

pub(super) fn find(api: &Api, path: &InstancePath) -> Result<InstanceStatus, Refused> {
    Ok(api.shared.node.find(&path.tenant, &path.pool, &path.instance)?)
}

/// What may be said along with an action.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ActBody {
    override_seconds: Option<u64>,
}

/// How an instance is after an action.
#[derive(Serialize)]
struct ActedBody {
    #[serde(flatten)]
    instance: InstanceStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    wake: Option<WakeTiming>,
}

/// Does one thing to an instance; answers how it is then, or 204 when it is gone. A request's wake is answered by
/// where its time went alone.
pub(super) async fn act(
    State(api): State<Api>,
    Extension(action): Extension<ManualAction>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, Refused> {
    let (path, asked) = instance_and_body::<ActBody>(path, query.as_deref(), body).await?;
    let override_for = override_for(asked.override_seconds)?;
    if action == ManualAction::Wake && asked.override_seconds.is_none() {
        // A request's wake: the sleep policy puts the instance back once it is idle, no window is needed.
        let woken = api.shared.node.wake(&path.tenant, &path.pool, &path.instance).await;
        let timing = woken.map_err(|error| Problem::from(&*error))?;
        return Ok(Json(timing).into_response());
    }
    let manual = Manual {
        tenant: path.tenant.clone(),
        pool: path.pool.clone(),
        instance: path.instance.clone(),
        action,
        override_for,
        by: caller.describe(),
    };
    let wake = api.shared.node.act(manual).await?.wake;
    match find(&api, &path) {
        Ok(instance) => Ok(Json(ActedBody { instance, wake }).into_response()),
        Err(_) => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}
