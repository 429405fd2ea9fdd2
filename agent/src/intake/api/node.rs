//! What the node is asked as a whole: its tenants and pools, what the planner is told, what runs as a document.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use mvm_proto::document::{Pool, Tenant};
use mvm_proto::status::{InstanceStatus, PoolStatus};
use mvm_proto::text::chain;
use mvm_proto::{PoolId, Problem, TenantId};
use serde::{Deserialize, Serialize};

use super::Api;
use super::input::{id, no_query, object, unreadable_path};
use super::problem::Refused;

/// What to look at, and how closely.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct VerifyBody {
    /// Whether packets are sent that must and must not pass.
    deep: bool,
}

pub(super) async fn verify_network(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let VerifyBody { deep } = object(&body)?;
    let report = api.shared.node.verify_network(deep).await.map_err(|error| {
        let detail = format!("could not inspect the network: {}", chain(&error));
        Problem::new(
            503,
            "network_unavailable",
            detail,
            "Look at NetworkReady in `mvm node get`, and at the agent's log.",
        )
    })?;
    Ok(Json(report).into_response())
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

#[derive(Serialize)]
struct OneTenantBody {
    tenant_id: TenantId,
    /// Whether the document in force names it.
    managed: bool,
    instances: usize,
    pools: Vec<PoolStatus>,
    /// What the document in force says of it, without its pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    desired: Option<Tenant>,
}

pub(super) async fn tenant(
    State(api): State<Api>,
    path: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let Path(tenant) = path.map_err(|_| unreadable_path())?;
    let tenant_id: TenantId = id("tenant", &tenant)?;
    let node = &api.shared.node;
    let current_document = node.desired();
    let named = current_document.as_ref().and_then(|current_document| {
        current_document.desired.tenants.iter().find(|tenant| tenant.tenant_id == tenant_id).cloned()
    });
    let instances = node.instances(Some(&tenant_id)).len();
    if named.is_none() && instances == 0 {
        return Err(unknown("tenant", tenant_id.as_str()));
    }
    let desired = named.map(|tenant| Tenant { pools: Vec::new(), ..tenant });
    let mut pools = node.status().borrow().pools.clone();
    pools.retain(|pool| pool.tenant_id == tenant_id.as_str());
    let managed = desired.is_some();
    Ok(Json(OneTenantBody { tenant_id, managed, instances, pools, desired }).into_response())
}

#[derive(Serialize)]
struct OnePoolBody {
    tenant_id: TenantId,
    pool_id: PoolId,
    managed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<PoolStatus>,
    instances: Vec<InstanceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    desired: Option<Pool>,
}

pub(super) async fn pool(
    State(api): State<Api>,
    path: Result<Path<(String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let Path((tenant, pool)) = path.map_err(|_| unreadable_path())?;
    let (tenant_id, pool_id): (TenantId, PoolId) = (id("tenant", &tenant)?, id("pool", &pool)?);
    let node = &api.shared.node;
    let current_document = node.desired();
    let desired = current_document.as_ref().and_then(|current_document| {
        let mut pools = current_document.desired.pools();
        let found = pools.find(|(tenant, pool)| tenant.tenant_id == tenant_id && pool.pool_id == pool_id);
        found.map(|(_, pool)| pool.clone())
    });
    let mut instances = node.instances(Some(&tenant_id));
    instances.retain(|instance| instance.pool_id == pool_id.as_str());
    if desired.is_none() && instances.is_empty() {
        return Err(unknown("pool", &format!("{tenant_id}/{pool_id}")));
    }
    let is_it = |pool: &&PoolStatus| pool.tenant_id == tenant_id.as_str() && pool.pool_id == pool_id.as_str();
    let status = node.status().borrow().pools.iter().find(is_it).cloned();
    let managed = desired.is_some();
    Ok(Json(OnePoolBody { tenant_id, pool_id, managed, status, instances, desired }).into_response())
}

fn unknown(what: &str, name: &str) -> Refused {
    let detail = format!("there is no {what} {name} on this node");
    Refused(Problem::new(404, &format!("unknown_{what}"), detail, "List the node's tenants."))
}

pub(super) async fn observation(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    Ok(Json(api.shared.node.observation()).into_response())
}

pub(super) async fn desired(State(api): State<Api>, RawQuery(query): RawQuery) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    Ok(Json(api.shared.node.export()).into_response())
}
